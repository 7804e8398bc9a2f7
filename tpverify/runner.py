"""Runs one case both ways, from the same logical tensors: the reference on one device, the parallel module on every rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate

from tpverify import modules, values
from tpverify.case import Case, call_label
from tpverify.description import check_description, check_subject, checked_module
from tpverify.device import default_dtype, on_device, seeded
from tpverify.errors import SimulationError, SubjectError
from tpverify.ledger.ledger import Ledger
from tpverify.logical import Logical, draw, in_order, leaves_of
from tpverify.options import CPU
from tpverify.rank_program import Calls, group_layouts, is_rejected, program_of, start_backward
from tpverify.run import Comparison, RankRun, Run
from tpverify.sharding import Placement
from tpverify.simulator.endpoint import Capture
from tpverify.simulator.exchange import Perturb
from tpverify.simulator.world import process_state, run_world
from tpverify.subjects.subject import Subject
from tpverify.tolerance import exact_limit
from tpverify.trace import replay
from tpverify.world import World

CASE_TIMEOUT = 60.0
HALF = ("bfloat16", "float16")
"""Dtypes with too few digits to compare two runs with each other: both are held against a third in float64."""


@dataclass(frozen=True)
class Reference:
    """The reference side of one TP group: its module, what both sides start from, and what came out."""

    module: nn.Module
    logical: Logical
    run: Run


def run_both(
    subject: Subject,
    case: Case,
    timeout: float = CASE_TIMEOUT,
    *,
    traced: int = 0,
    schedule: int | None = None,
    reduction_order: str = "rank",
    world: World | None = None,
    perturb: Perturb | None = None,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    device: str = CPU,
) -> tuple[Comparison, ...]:
    """Run a case; one comparison per TP group in the world.

    Args:
        timeout: seconds for all ranks together.
        traced: the call, from 1, in which to capture what goes into and comes out of every submodule; 0 = in none.
        schedule, reduction_order: see :func:`tpverify.simulate`; correct code does not depend on them, but for rounding.
        world: what executes the ranks; None = the simulator.
        perturb: changes what collectives hand to their ranks, in the simulator; see :class:`tpverify.simulator.exchange.Exchange`.
        around: surrounds the program of every simulated rank, in its thread.
        device: where the reference and simulated ranks compute; another world's ranks compute where it says.

    Raises:
        SubjectError: the subject contradicts itself or its reference raises.
    """
    with process_state():
        check_subject(subject)
        check_description(subject, case)
        layouts = group_layouts(case)
        case, sides = _reference_sides(subject, case, len(layouts), traced, device)
        program = _within(around, program_of(subject, case, {group: side.logical for group, side in enumerate(sides)}, traced, device))
        with subject.context_for(case.config):
            ledger, results, failure = (
                world.run(subject, case, traced=traced, timeout=timeout)
                if world is not None
                else run_world(
                    program,
                    sum(len(members) for members in layouts),
                    args=(),
                    seed=case.seed,
                    timeout=timeout,
                    rank_local=subject.rank_local,
                    capture=capture_of(subject, case, traced),
                    schedule=schedule,
                    reduction_order=reduction_order,
                    perturb=perturb,
                    device=device,
                )
            )
        cause = getattr(failure, "exception", None)
        if isinstance(cause, SubjectError):
            shared = "; two TP groups share the world here: does every module use tpverify.tp_group()?" if case.groups != "world" else ""
            raise SubjectError(f"subject {subject.name}: {cause} (on {case!r}{shared})") from cause
        comparisons = []
        for members, side in zip(layouts, sides, strict=True):
            parallel = _group_run(members, results, ledger, failure)
            if traced and parallel.ranks and side.run.ranks:
                with on_device(device):
                    stepped = traced > 1 and case.calls == "twice"  # as they were in the call that was traced
                    modules.load_logical(side.module, side.logical.stepped if stepped else side.logical.parameters)
                    side.run.replayed = replay(side.module, side.run.ranks[0].calls, parallel.ranks)
            comparisons.append(Comparison(subject, case, side.run, parallel, members))
    return tuple(comparisons)


def _within(around: Callable[[], AbstractContextManager[Any]], program: Callable[[], RankRun]) -> Callable[[], RankRun]:
    def surrounded() -> RankRun:
        with around():
            return program()

    return surrounded


def run_reference(
    subject: Subject,
    case: Case,
    group: int,
    traced: int,
    device: str = CPU,
    dtype: torch.dtype | None = None,
    arithmetic: AbstractContextManager[Any] | None = None,
) -> Reference:
    """Run the reference on logical tensors drawn from the case's seed.

    Args:
        group: index of the TP group.
        traced: the call, from 1, in which to capture what goes into and comes out of every submodule; 0 = in none.
        device: where it computes; what it produced comes back to the CPU.
        dtype: in which it computes; None = the working dtype, to which values are rounded in any case.
        arithmetic: how forward and backward compute; None = as torch does.

    Raises:
        SubjectError: building, forward or backward raises.
    """
    dtype = dtype or subject.working_dtype(case.dtype)
    try:
        with seeded(case.seed, device), default_dtype(dtype), on_device(device):
            module = checked_module("reference", subject.reference(case.config))
            logical = draw(subject, case, group, module, dtype)
            modules.load_logical(module, logical.parameters)
            calls = Calls(module, leaves_of(subject, case, logical), case.layout, traced)
            with arithmetic or nullcontext():
                _call_reference(subject, case, group, logical, calls)
            uses = _uses(module, subject, case, logical)
    except SubjectError:
        raise
    except (Exception, SystemExit) as error:
        raised = f"{type(error).__name__}: {error} on {case!r}{_precision_hint(dtype, error)}"
        raise SubjectError(f"Expected the reference of {subject.name} to run but it raised {raised}") from error
    names = modules.named_parameters(module)
    held = calls.collect(logical, dict.fromkeys(names, Placement(Replicate())))
    held.buffers = calls.changed_buffers()
    run = Run([held], Ledger(()), inputs=logical.labelled_inputs, uses=uses)
    run.random = calls.random
    run.depth = max(2 + sum(1 for _ in module.modules()), calls.depth)
    sizes = [max(tensor.shape, default=1) for tensor in logical.parameters.values()]
    run.terms = max([1, *sizes, *(tensor.numel() for tensor in run.inputs.values())])
    return Reference(module, logical, run)


def _reference_side(subject: Subject, case: Case, group: int, traced: int, device: str) -> Reference:
    if is_rejected(subject, case):
        return _unrun_reference(subject, case, group)
    side = run_reference(subject, case, group, traced, device)
    if case.dtype in HALF:
        side.run.oracle = run_reference(subject, case, group, False, device, torch.float64).run.ranks[0]
        side.run.exact = case.values == "integers" and subject.exact_for(case.config) and _is_exact(subject, case, group, device)
    return side


def _is_exact(subject: Subject, case: Case, group: int, device: str) -> bool:
    """Whether integer values make no sum that the working dtype has to round, whatever its order.

    Where all arithmetic is additions, products and selections, the same run on magnitudes bounds every intermediate value,
    and as no magnitude is below 1, its outputs and gradients bound those on the way to them.
    """
    with values.magnitudes():
        largest = run_reference(subject, case, group, False, device, torch.float64).run.ranks[0]
    held = (*largest.outputs.values(), *largest.input_gradients.values(), *largest.parameter_gradients.values())
    most = exact_limit(subject.working_dtype(case.dtype))
    return all(placed.local is None or not placed.local.numel() or float(placed.local.abs().max()) < most for placed in held)


def _reference_sides(subject: Subject, case: Case, groups: int, traced: int, device: str) -> tuple[Case, list[Reference]]:
    """The reference of every TP group, and the case as it can be run: a reference need not take every memory layout."""
    try:
        return case, [_reference_side(subject, case, group, traced, device) for group in range(groups)]
    except SubjectError:
        if case.layout == "contiguous":
            raise
    plain = dataclasses.replace(case, layout="contiguous")
    return plain, [_reference_side(subject, plain, group, traced, device) for group in range(groups)]


def _unrun_reference(subject: Subject, case: Case, group: int) -> Reference:
    """For a case that must be refused: the reference may not be able to run it, but the ranks need something to start from."""
    with default_dtype(subject.working_dtype(case.dtype)):
        module = nn.Module()
        logical = draw(subject, case, group, module)
    return Reference(module, logical, Run([], Ledger(())))


def _precision_hint(dtype: torch.dtype, error: BaseException) -> str:
    return f" (inputs are {dtype}: see Subject.precision and Subject.dtypes)" if "dtype" in str(error) or "mplemented" in str(error) else ""


def rank_program(subject: Subject, case: Case, rank: int, traced: int) -> Callable[[], RankRun]:
    """What one rank runs where ranks share nothing: the logical tensors of its own TP group are drawn here once more.

    Args:
        rank: global rank.
    """
    group = next(index for index, members in enumerate(group_layouts(case)) if rank in members)
    side = _unrun_reference(subject, case, group) if is_rejected(subject, case) else run_reference(subject, case, group, False)
    return program_of(subject, case, {group: side.logical}, traced, CPU)


def _call_reference(subject: Subject, case: Case, group: int, logical: Logical, calls: Calls) -> None:
    """All calls of the reference; the shapes of its outputs decide the cotangents."""

    def forward(call: int) -> None:
        outputs = calls.forward(call)
        if not outputs:
            raise SubjectError(f"Expected the reference of {subject.name} to return at least one tensor but it returned none")
        calls.depth = max(calls.depth, modules.graph_depth(outputs.values()))
        for label, output in outputs.items():
            drawn = values.draw_cotangent(case, group, call_label(label, call), output.shape)
            logical.cotangents[call][label] = values.rounded(drawn, subject.working_dtype(case.dtype))

    def backward(call: int) -> None:
        calls.backward(call, logical.cotangents[call], dict.fromkeys(logical.cotangents[call], Placement(Replicate())))

    in_order(case, forward, backward, lambda: modules.load_logical(calls.module, logical.stepped))


def _uses(module: nn.Module, subject: Subject, case: Case, logical: Logical) -> dict[str, torch.Tensor]:
    """For every name of a tied parameter, the gradient that this use alone contributes in all calls together."""
    tied = [name for names in modules.ties(module) for name in names]
    if not tied:
        return {}
    untied = {name: parameter.detach().clone().requires_grad_() for name, parameter in modules.named_parameters(module).items()}
    for call, (leaves, cotangents) in enumerate(zip(leaves_of(subject, case, logical), logical.cotangents, strict=True)):
        with torch.no_grad():
            for name, value in (logical.stepped if call else logical.parameters).items():
                untied[name].copy_(value)
        with modules.parameters_replaced(module, untied):  # in backward too, which may run forward again
            start_backward(modules.named_tensors(module(*leaves.values())), cotangents, case.layout)
    return {name: modules.on_host(gradient) for name in tied if (gradient := untied[name].grad) is not None}


def capture_of(subject: Subject, case: Case, traced: int) -> Capture | None:
    """Keep what ranks contribute to sums, for those who look at it: of vocabulary lookups, of all in half precision, or to explain."""
    if traced or case.dtype in HALF:
        kinds = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all") if traced else ("all_reduce", "reduce_scatter")
        return lambda record: record.phase in ("forward", "backward") and record.kind in kinds
    vocabulary = subject.vocabulary(case.config) if subject.vocabulary else None
    if vocabulary is None or not vocabulary.lookup:
        return None
    pattern = vocabulary.lookup
    return lambda record: (
        record.phase == "forward" and record.kind in ("all_reduce", "reduce_scatter") and fnmatchcase(record.module, pattern)
    )


def _group_run(members: tuple[int, ...], results: Sequence[Any], ledger: Ledger, failure: SimulationError | None) -> Run:
    ranks = [] if failure is not None else [results[rank] for rank in members]
    return Run(ranks, ledger.within(members), failure, ledger.beyond(members))
