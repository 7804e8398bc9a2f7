"""The one list of what the simulator does otherwise than a real backend on purpose, each with its reason."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from tpverify.conformance.program import Program, Step
from tpverify.conformance.tensors import laid_out, pair_rows
from tpverify.ledger.record import Record

INTEGERS = ("int64", "int32", "int8", "uint8")
IN_PLACE = ("all_reduce", "all_reduce_coalesced", "broadcast", "reduce", "coalescing_manager")
SEVERAL = ("all_reduce_coalesced", "coalescing_manager")
MESSAGES = ("ring", "batch", "send_recv", "recv_from_any")
GLOO = ("gloo",)
Members = tuple[int, ...]
COMPUTES, DIES = "computes", "dies"
SCALAR_GATHERS = ("all_gather_into_tensor", "functional.all_gather_tensor", "functional.all_gather_into_tensor_coalesced")


@dataclass(frozen=True)
class Difference:
    """One kind of step on which the simulator and a backend do not agree.

    Attributes:
        name: in a few words.
        reason: why it is right that they do not.
        applies: (step, global ranks of its group) -> whether the step is of that kind. As narrow as can be: such steps are left out of
            the programs that are compared.
        example: a program that shows it.
        ours, theirs: what the simulator and the backend make of the example: ``computes``, ``dies``, or the name of the
            exception's class; where both compute, their results differ.
        backends: those it holds for.
    """

    name: str
    reason: str
    applies: Callable[[Step, Members], bool]
    example: Program
    ours: str = COMPUTES
    theirs: str = COMPUTES
    backends: tuple[str, ...] = GLOO


def _overlaps(step: Step, members: Members) -> bool:
    rows = (step.shape or (0,))[0] * (2 if step.call in SEVERAL else 1)
    written = step.call != "broadcast" or len(members) > 1
    return step.call in IN_PLACE and step.layout == "expanded" and rows > 1 and math.prod(step.shape) > 0 and written


def _read(step: Step, size: int) -> list[torch.Tensor]:
    """By rank, a tensor as the step reads it."""
    rows = [size * (step.shape or (1,))[0]] * size
    if step.splits:
        rows = [sum(pair_rows(step, size, me, peer) for peer in range(size)) for me in range(size)]
    whole = step.kind in ("all_to_all_single", "reduce_scatter_tensor")
    return [laid_out(torch.empty((extent, *step.shape[1:]) if whole else step.shape), step.layout) for extent in rows]


def _scattered(step: Step, size: int) -> bool:
    """Whether a rank reads a non-contiguous tensor."""
    return not all(tensor.is_contiguous() for tensor in _read(step, size))


def _garbled(step: Step, members: Members) -> bool:
    layouts = {"scatter": ("transposed", "strided", "expanded"), "reduce_scatter": ("transposed",)}
    layouts |= dict.fromkeys(("all_reduce", "broadcast", "reduce"), ("strided",))
    return step.layout in layouts.get(step.call, ()) and _scattered(step, len(members))


def _uneven(step: Step, members: Members) -> bool:
    return (
        step.call == "all_to_all" and bool(step.splits) and len({step.splits[i % len(step.splits)] for i in range(len(members) ** 2)}) > 1
    )


def _gathers_scalars(step: Step, members: Members) -> bool:
    alone = step.call == "all_gather_into_tensor" and step.fault == "scalar" and len(members) == 1
    return (not step.shape and step.call in SCALAR_GATHERS) or alone


def _same_elements(step: Step, members: Members) -> bool:
    if step.kind == "all_to_all_single":
        return False
    return step.fault == "output shape" or (step.fault == "output size" and math.prod(step.shape[1:]) == 0)


def _others(step: Step, members: Members) -> set[int]:
    """Group ranks that are not the root."""
    return set(range(len(members))) - {step.root % len(members)}


def _leaves_a_rest(step: Step, members: Members) -> bool:
    if step.kind != "all_to_all_single" or step.splits:
        return False
    if step.fault == "scalar":
        return True
    size = len(members)
    rows = size * step.shape[0] if step.shape else size
    shape = (rows, *step.shape[1:])
    return (step.fault == "output size" and size > 1) or (step.fault == "output shape" and [*shape[1:], rows][0] % size > 0)


DIFFERENCES: tuple[Difference, ...] = (
    Difference(
        "stacked all_gather",
        "torch documents an output with a dimension for ranks, and NCCL takes it; gloo compares shapes and refuses",
        lambda step, members: step.call == "all_gather_stacked",
        Program(2, (Step("all_gather_stacked"),)),
        theirs="RuntimeError",
    ),
    Difference(
        "same elements in another shape",
        "collectives move elements, and NCCL looks at their number only; gloo compares shapes and refuses",
        _same_elements,
        Program(2, (Step("all_gather", shape=(2, 3), fault="output shape"),)),
        theirs="RuntimeError",
    ),
    Difference(
        "mean of integers",
        "NCCL computes it, rounded towards zero; gloo divides to floating point and cannot write the result",
        lambda step, members: step.op == "AVG" and step.dtype in INTEGERS,
        Program(2, (Step("all_reduce", dtype="int64", op="AVG"),)),
        theirs="RuntimeError",
    ),
    Difference(
        "8-bit floating point",
        "NCCL has these types; gloo knows them in messages only",
        lambda step, members: step.dtype.startswith("float8") and step.call not in MESSAGES,
        Program(2, (Step("broadcast", dtype="float8_e4m3fn"),)),
        theirs="RuntimeError",
    ),
    Difference(
        "result into memory that overlaps itself",
        "an expanded tensor has one element for many results: NCCL refuses it as non-contiguous, gloo writes them over each other",
        _overlaps,
        Program(2, (Step("all_reduce", layout="expanded"),)),
        ours="RuntimeError",
    ),
    Difference(
        "non-contiguous tensors",
        "the simulator reads the elements that are meant and reports a hazard, on any backend; gloo sends what lies in memory",
        _garbled,
        Program(2, (Step("broadcast", layout="strided"),)),
    ),
    Difference(
        "non-contiguous all_to_all_single",
        "the simulator reports a hazard as for every other collective, and goes on; gloo refuses here",
        lambda step, members: step.call == "all_to_all_single" and _scattered(step, len(members)),
        Program(2, (Step("all_to_all_single", layout="strided"),)),
        theirs="ValueError",
    ),
    Difference(
        "all_to_all of lists of different blocks",
        "every pair of ranks may exchange as much as it likes, as over NCCL; gloo wants all blocks of one shape",
        _uneven,
        Program(2, (Step("all_to_all", splits=(1, 2)),)),
        theirs="RuntimeError",
    ),
    Difference(
        "all_gather of scalars into a tensor",
        "one element of each rank, as over NCCL; gloo compares shapes and refuses",
        _gathers_scalars,
        Program(2, (Step("all_gather_into_tensor", shape=()),)),
        theirs="RuntimeError",
    ),
    Difference(
        "reduce_scatter_tensor to scalars",
        "one element for each rank, as over NCCL; gloo reads the first extent of a shape that has none, and the process dies",
        lambda step, members: step.call == "reduce_scatter_tensor" and (not step.shape or step.fault == "scalar"),
        Program(2, (Step("reduce_scatter_tensor", shape=()),)),
        theirs=DIES,
    ),
    Difference(
        "empty message from any rank",
        "a message of no elements is a message; gloo refuses to take it from whoever sends",
        lambda step, members: step.call == "recv_from_any" and len(members) > 1 and math.prod(step.shape) == 0,
        Program(2, (Step("recv_from_any", shape=(0,)),)),
        theirs="RuntimeError",
    ),
    Difference(
        "gradient of nn.broadcast off the root",
        "torch tells the root by comparing a group rank with a global one, so another rank may keep what its reduce left behind: that is"
        " undefined, its own numbers in the simulator and partial sums in gloo",
        lambda step, members: step.call == "nn.broadcast" and members[step.root % len(members)] in _others(step, members),
        Program(4, (Step("nn.broadcast", 1, (1031,)),), groups=((1, 3),)),
    ),
    Difference(
        "all_to_all_single that leaves a rest",
        "rows that do not divide by the number of ranks: NCCL refuses; gloo exchanges what divides and leaves the rest unwritten",
        _leaves_a_rest,
        Program(2, (Step("all_to_all_single", fault="scalar"),)),
        ours="RuntimeError",
    ),
    Difference(
        "all_to_all of empty lists",
        "the simulator counts the tensors and refuses as for any wrong number; PyTorch finds no tensor to tell the backend by",
        lambda step, members: step.call == "all_to_all" and step.fault == "list length" and len(members) == 1,
        Program(2, (Step("all_to_all", 1, fault="list length"),), groups=((0,),)),
        ours="RuntimeError",
        theirs="NotImplementedError",
    ),
    Difference(
        "asynchronous message to oneself",
        "NCCL carries out a pair of isend and irecv of one rank; gloo has no connection for it",
        lambda step, members: step.call in ("ring", "batch") and step.fault == "self" and len(members) > 1,
        Program(2, (Step("batch", fault="self"),)),
        theirs="RuntimeError",
    ),
)


def known(step: Step, members: Members, backend: str) -> Difference | None:
    """The difference that a step shows, if it is a known one."""
    return next((found for found in DIFFERENCES if backend in found.backends and found.applies(step, members)), None)


def without_differences(program: Program, backend: str) -> tuple[Program, list[str]]:
    """The program without the steps that are known to differ, and the names of the differences met."""
    met = [(step, known(step, program.members(step), backend)) for step in program.steps]
    kept = tuple(step for step, difference in met if difference is None)
    return replace(program, steps=kept), [difference.name for _, difference in met if difference is not None]


def as_issued(record: Record, backend: str) -> list[tuple[str, str, int]]:
    """What the backend's own recorder is expected to hold of a call: kind, dtype and number of elements read, one item per entry.

    gloo has no reduce_scatter: it reduces all of one tensor, or each of a list of tensors, on all ranks. It records no messages.
    """
    dtype = (record.input_dtypes or ("",))[0]
    elements = [math.prod(size) for size in record.input_sizes]
    if record.kind in ("send", "recv"):
        return []
    if backend == "gloo" and record.kind == "reduce_scatter":
        return [("all_reduce", dtype, count) for count in elements]
    return [(record.kind, dtype, sum(elements))]
