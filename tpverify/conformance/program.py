"""A program of collectives as plain data: what every rank calls, in order, on which group, and when it waits."""

from __future__ import annotations

from dataclasses import dataclass

from tpverify.case import short_repr
from tpverify.errors import CaseError

DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool", "complex64")
RARE_DTYPES = ("int16", "uint16", "float8_e4m3fn")
"""What backends have no name for."""
OPS = ("SUM", "PRODUCT", "MIN", "MAX", "AVG", "BAND", "BOR", "BXOR")
LAYOUTS = ("contiguous", "transposed", "strided", "expanded")
VALUES = ("integers", "normal", "magnitudes", "factors")

REDUCING = ("all_reduce", "reduce", "reduce_scatter")
"""Calls of these names, up to their suffix, take a reduce op."""
ROOTED = ("broadcast", "reduce", "gather", "scatter", "broadcast_object_list")


@dataclass(frozen=True)
class Step:
    """One call that every rank of a group makes.

    Attributes:
        call: name of one of ``interpreter.CALLS``: ``all_reduce``, ``functional.all_reduce``, ``nn.all_reduce``, ...
        group: 0 = the world, ``i`` = the program's group ``i - 1``.
        shape: of what one rank contributes for one peer; ``()`` is a scalar.
        dtype: of all tensors.
        op: reduce op, where the call reduces.
        root: group rank of the root, taken modulo the group's size; the distance to the peer for sends.
        layout: memory layout of the tensors that are read.
        splits: all_to_all_single: rows per pair of ranks, dealt out in turn; () = even, without split sizes.
        wait_after: None = a blocking call; otherwise asynchronous, waited for after that many further steps.
        reuse: read the newest finished result of the same dtype instead of fresh numbers, in place where the shape is the same.
        fault: what is wrong with the call, one of ``interpreter.FAULTS``; "" = nothing.
    """

    call: str
    group: int = 0
    shape: tuple[int, ...] = (2,)
    dtype: str = "float32"
    op: str = "SUM"
    root: int = 0
    layout: str = "contiguous"
    splits: tuple[int, ...] = ()
    wait_after: int | None = None
    reuse: bool = False
    fault: str = ""

    @property
    def kind(self) -> str:
        """The call's name without where it comes from."""
        return self.call.rpartition(".")[2]

    @property
    def reduces(self) -> bool:
        """Whether ``op`` means anything."""
        return self.kind.startswith(REDUCING)

    @property
    def rooted(self) -> bool:
        """Whether one rank is the root."""
        return self.kind in ROOTED


@dataclass(frozen=True, repr=False)
class Program:
    """What the ranks of a world do.

    Attributes:
        world_size: number of ranks.
        steps: calls, in the order in which every rank makes them.
        groups: global ranks of the process groups that are created at the start, in this order.
        values: what tensors hold. ``integers``: so small that sums and products are exact in any order; ``normal``: Gaussian;
            ``magnitudes``: the absolute values of the latter; ``factors``: the same, but none below 1.
        seed: decides the values.

    Raises:
        CaseError: a group is empty, repeats a rank or has one that is not there.
    """

    world_size: int
    steps: tuple[Step, ...]
    groups: tuple[tuple[int, ...], ...] = ()
    values: str = "integers"
    seed: int = 0

    def __post_init__(self) -> None:
        for group in self.groups:
            if not group or len(set(group)) != len(group) or not set(group) <= set(range(self.world_size)):
                raise CaseError(f"Expected groups of different ranks below {self.world_size} but got {group}")
        for step in self.steps:
            if not 0 <= step.group <= len(self.groups):
                raise CaseError(f"Expected a group from 0 to {len(self.groups)} but got group={step.group}")

    def __repr__(self) -> str:
        return short_program(self)

    @property
    def wrong(self) -> bool:
        """Whether a step is meant to be refused."""
        return any(step.fault for step in self.steps)

    def members(self, step: Step) -> tuple[int, ...]:
        """Global ranks of the step's group, in group order: ``new_group`` sorts them."""
        return tuple(sorted(self.groups[step.group - 1])) if step.group else tuple(range(self.world_size))


def short_program(program: Program) -> str:
    """The program's text, from which it can be made again, without fields that have their default value."""
    steps = ", ".join(short_repr(step) for step in program.steps)
    parts = [str(program.world_size), f"({steps}{',' if len(program.steps) == 1 else ''})"]
    parts += [f"groups={program.groups!r}"] if program.groups else []
    parts += [f"values={program.values!r}"] if program.values != "integers" else []
    parts += [f"seed={program.seed!r}"] if program.seed else []
    return f"Program({', '.join(parts)})"
