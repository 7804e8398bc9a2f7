"""Runs one case both ways, from the same logical tensors: the reference on one device, the parallel module on every rank."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from tpverify import modules, values
from tpverify.case import Case, call_label
from tpverify.current_group import tp_group, use_tp_group
from tpverify.description import check_description, check_lookup, check_subject, checked_module
from tpverify.errors import SimulationError, SubjectError
from tpverify.ledger.ledger import Ledger
from tpverify.logical import Logical, draw, in_order, leaves_of
from tpverify.run import Comparison, ModuleCall, Placed, RankRun, Run
from tpverify.sharding import Partial, Placement, shard
from tpverify.simulator import recorder
from tpverify.simulator.endpoint import Capture
from tpverify.simulator.world import process_state, run_world
from tpverify.subjects.subject import Subject
from tpverify.trace import replay, tracing
from tpverify.world import World

CASE_TIMEOUT = 60.0


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
    traced: bool = False,
    schedule: int | None = None,
    reduction_order: str = "rank",
    world: World | None = None,
) -> tuple[Comparison, ...]:
    """Run a case; one comparison per TP group in the world.

    Args:
        timeout: seconds for all ranks together.
        traced: whether to capture what goes into and comes out of every submodule.
        schedule, reduction_order: see :func:`tpverify.simulate`; correct code does not depend on them, but for rounding.
        world: what executes the ranks; None = the simulator.

    Raises:
        SubjectError: the subject contradicts itself or its reference raises.
    """
    with process_state():
        check_subject(subject)
        check_description(subject, case)
        layouts = group_layouts(case)
        case, sides = _reference_sides(subject, case, len(layouts), traced)
        program = _rank_program(subject, case, {group: side.logical for group, side in enumerate(sides)}, traced)
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
                    capture=capture_of(subject, case),
                    schedule=schedule,
                    reduction_order=reduction_order,
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
                side.run.replayed = replay(side.module, side.run.ranks[0].calls, parallel.ranks)
            comparisons.append(Comparison(subject, case, side.run, parallel, members))
    return tuple(comparisons)


def group_layouts(case: Case) -> list[tuple[int, ...]]:
    """The global ranks of each TP group of the case's world."""
    size = case.world_size
    if case.groups == "blocks":
        return [tuple(range(size)), tuple(range(size, 2 * size))]
    if case.groups == "strided":
        return [tuple(range(0, 2 * size, 2)), tuple(range(1, 2 * size, 2))]
    return [tuple(range(size))]


def run_reference(subject: Subject, case: Case, group: int, traced: bool) -> Reference:
    """Run the reference on logical tensors drawn from the case's seed.

    Raises:
        SubjectError: building, forward or backward raises.
    """
    try:
        with torch.random.fork_rng(devices=[]), _default_dtype(subject.precision):
            torch.manual_seed(case.seed)
            module = checked_module("reference", subject.reference(case.config))
            logical = draw(subject, case, group, module)
            modules.load_logical(module, logical.parameters)
            calls = _Calls(module, leaves_of(subject, case, logical), case.layout, traced)
            _call_reference(subject, case, group, logical, calls)
            uses = _uses(module, subject, case, logical)
    except SubjectError:
        raise
    except (Exception, SystemExit) as error:
        raised = f"{type(error).__name__}: {error} on {case!r}{_precision_hint(subject, error)}"
        raise SubjectError(f"Expected the reference of {subject.name} to run but it raised {raised}") from error
    names = modules.named_parameters(module)
    run = Run(
        [_collect(calls, logical, dict.fromkeys(names, Placement(Replicate())))], Ledger(()), inputs=logical.labelled_inputs, uses=uses
    )
    run.random = calls.random
    run.depth = max(2 + sum(1 for _ in module.modules()), calls.depth)
    sizes = [max(tensor.shape, default=1) for tensor in logical.parameters.values()]
    run.terms = max([1, *sizes, *(tensor.numel() for tensor in run.inputs.values())])
    return Reference(module, logical, run)


def _is_rejected(subject: Subject, case: Case) -> bool:
    return subject.rejects is not None and subject.rejects(case.config, case.world_size)


def _reference_side(subject: Subject, case: Case, group: int, traced: bool) -> Reference:
    return _unrun_reference(subject, case, group) if _is_rejected(subject, case) else run_reference(subject, case, group, traced)


def _reference_sides(subject: Subject, case: Case, groups: int, traced: bool) -> tuple[Case, list[Reference]]:
    """The reference of every TP group, and the case as it can be run: a reference need not take every memory layout."""
    try:
        return case, [_reference_side(subject, case, group, traced) for group in range(groups)]
    except SubjectError:
        if case.layout == "contiguous":
            raise
    plain = dataclasses.replace(case, layout="contiguous")
    return plain, [_reference_side(subject, plain, group, traced) for group in range(groups)]


def _unrun_reference(subject: Subject, case: Case, group: int) -> Reference:
    """For a case that must be refused: the reference may not be able to run it, but the ranks need something to start from."""
    with torch.random.fork_rng(devices=[]), _default_dtype(subject.precision):
        module = nn.Module()
        logical = draw(subject, case, group, module)
    return Reference(module, logical, Run([], Ledger(())))


def _precision_hint(subject: Subject, error: BaseException) -> str:
    return f" (inputs are {subject.precision}: see Subject.precision)" if "dtype" in str(error) else ""


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def rank_program(subject: Subject, case: Case, rank: int, traced: bool) -> Callable[[], RankRun]:
    """What one rank runs where ranks share nothing: the logical tensors of its own TP group are drawn here once more.

    Args:
        rank: global rank.
    """
    group = next(index for index, members in enumerate(group_layouts(case)) if rank in members)
    return _rank_program(subject, case, {group: _reference_side(subject, case, group, traced=False).logical}, traced)


def _rank_program(subject: Subject, case: Case, logical: Mapping[int, Logical], traced: bool) -> Callable[[], RankRun]:
    layouts = group_layouts(case)
    run = try_rank if _is_rejected(subject, case) else run_rank

    def program() -> RankRun:
        torch.set_default_dtype(subject.precision)
        me = dist.get_rank()
        groups = [dist.new_group(list(members)) for members in layouts] if len(layouts) > 1 else [None]
        index = next(i for i, members in enumerate(layouts) if me in members)
        with use_tp_group(groups[index]):
            return run(subject, case, logical[index], layouts[index].index(me), traced)

    return program


def try_rank(subject: Subject, case: Case, logical: Logical, rank: int, traced: bool) -> RankRun:
    """One rank's program for a case that must be refused: build, and run forward if the inputs can be cut at all."""
    module = subject.parallel(case.config)
    with contextlib.suppress(SubjectError):
        module(*leaves_of(subject, case, logical, rank)[0].values())
    return RankRun()


def run_rank(subject: Subject, case: Case, logical: Logical, rank: int, traced: bool) -> RankRun:
    """One rank's program: build, load, forward, backward, finalise, collect."""
    size = case.world_size
    module = checked_module("parallel", subject.parallel(case.config))
    check_lookup(subject, case, module)
    current = recorder.current()
    if current is not None:
        current.name_modules(module)
    patterns = subject.placements_for(case.config)
    placements = modules.placements_of(modules.named_parameters(module), patterns, logical.parameters)
    modules.check_complete(logical.parameters, placements, patterns, rank)
    modules.load_shards(module, logical.parameters, placements, rank, size, _owners(patterns, placements, size))
    calls = _Calls(module, leaves_of(subject, case, logical, rank), case.layout, traced)
    declared: dict[int, dict[str, Placement]] = {}

    def forward(call: int) -> None:
        with recorder.phase("forward"):
            outputs = calls.forward(call)
        declared[call] = _output_placements(subject, case, outputs, list(logical.cotangents[call]))

    def backward(call: int) -> None:
        cotangents = {
            label: shard(cotangent, declared[call][label].of_gradient, rank, size)
            for label, cotangent in logical.cotangents[call].items()
            if label in declared[call]
        }
        with recorder.phase("backward"):
            calls.backward(call, cotangents, declared[call])

    in_order(case, forward, backward)
    with recorder.phase("optimizer"):
        if subject.finalize_gradients is not None:
            subject.finalize_gradients(module)
    return _collect(calls, logical, placements)


def _owners(declared: Mapping[str, Placement], placements: Mapping[str, Placement], size: int) -> dict[str, int]:
    """By name of a Partial parameter, the lowest rank of the TP group that has it; only asked for if one is declared."""
    if size == 1 or not any(isinstance(placement.value, Partial) for placement in declared.values()):
        return {}
    held: list[Any] = [None] * size
    dist.all_gather_object(held, [name for name, placement in placements.items() if isinstance(placement.value, Partial)], tp_group())
    return {name: rank for rank in reversed(range(size)) for name in held[rank]}


class _Calls:
    """The calls of one module, and what came out of them.

    Args:
        leaves: of each call, the inputs by name.
        layout: memory layout of the cotangents.
        traced: whether to capture the first call of every submodule.
    """

    def __init__(self, module: nn.Module, leaves: Sequence[Mapping[str, torch.Tensor]], layout: str, traced: bool) -> None:
        self.module = module
        self.leaves = leaves
        self.layout = layout
        self.traced = traced
        self.random = False
        self.depth = 1
        self.outputs: dict[str, Placed] = {}
        self.submodules: dict[str, ModuleCall] = {}
        self._before = [{name: leaf.detach().clone() for name, leaf in of_call.items()} for of_call in leaves]
        self._pending: dict[int, dict[str, torch.Tensor]] = {}

    def forward(self, call: int) -> dict[str, torch.Tensor]:
        """The outputs of the call, by label."""
        state = torch.get_rng_state()
        with tracing(self.module, self.submodules) if self.traced and not call else contextlib.nullcontext():
            self._pending[call] = modules.named_tensors(self.module(*self.leaves[call].values()))
        self.random = self.random or not torch.equal(state, torch.get_rng_state())
        return self._pending[call]

    def backward(self, call: int, cotangents: Mapping[str, torch.Tensor], placements: Mapping[str, Placement]) -> None:
        """Backward of the call; its outputs must have kept their values up to here."""
        outputs = self._pending.pop(call)
        _backward(outputs, cotangents, self.layout)
        for label, output in outputs.items():
            self.outputs[call_label(label, call)] = Placed(modules.local_of(output).detach().clone(), placements[label].value)

    def changed_inputs(self) -> tuple[str, ...]:
        """Labels of the inputs that the module wrote to."""
        return tuple(
            call_label(name, call)
            for call, before in enumerate(self._before)
            for name, value in before.items()
            if not torch.equal(self.leaves[call][name].detach(), value)
        )


def _call_reference(subject: Subject, case: Case, group: int, logical: Logical, calls: _Calls) -> None:
    """All calls of the reference; the shapes of its outputs decide the cotangents."""

    def forward(call: int) -> None:
        outputs = calls.forward(call)
        if not outputs:
            raise SubjectError(f"Expected the reference of {subject.name} to return at least one tensor but it returned none")
        calls.depth = max(calls.depth, modules.graph_depth(outputs.values()))
        for label, output in outputs.items():
            logical.cotangents[call][label] = values.draw_cotangent(case, group, call_label(label, call), output.shape)

    def backward(call: int) -> None:
        calls.backward(call, logical.cotangents[call], dict.fromkeys(logical.cotangents[call], Placement(Replicate())))

    in_order(case, forward, backward)


def _output_placements(subject: Subject, case: Case, outputs: Mapping[str, torch.Tensor], labels: Sequence[str]) -> dict[str, Placement]:
    """By output label: a DTensor's own placement, otherwise the declared one; outputs nobody expects count as Replicate."""
    declared = subject.outputs_for(case.config)
    if isinstance(declared, tuple) and len(declared) != len(labels):
        raise SubjectError(
            f"Expected one output placement per output of the reference but got {len(declared)} placements for {', '.join(labels)}"
        )
    each = declared if isinstance(declared, tuple) else (declared,) * len(labels)
    by_label = {**dict.fromkeys(outputs, Placement(Replicate())), **dict(zip(labels, each, strict=True))}
    own = {label: modules.mesh_placement(output, label) for label, output in outputs.items() if isinstance(output, DTensor)}
    return by_label | own


def _backward(outputs: Mapping[str, torch.Tensor], cotangents: Mapping[str, torch.Tensor], layout: str) -> None:
    """Start backward from a cotangent for each differentiable output; an output of a wrong shape has none, and forward tells."""
    roots, starts = [], []
    for label, output in outputs.items():
        local = modules.local_of(output)
        if local.requires_grad and label in cotangents and cotangents[label].shape == local.shape:
            roots.append(local)
            starts.append(values.laid_out(cotangents[label].to(local), layout))
    if roots:
        torch.autograd.backward(roots, starts)


def _collect(calls: _Calls, logical: Logical, placements: Mapping[str, Placement]) -> RankRun:
    parameters = modules.named_parameters(calls.module)
    return RankRun(
        outputs=calls.outputs,
        input_gradients={
            call_label(name, call): modules.gradient_of(leaves[name], spec.placements)
            for call, leaves in enumerate(calls.leaves)
            for name, spec in logical.specs.items()
            if spec.requires_grad
        },
        parameters={
            name: Placed(modules.local_of(parameter).detach().clone(), placements[name].value) for name, parameter in parameters.items()
        },
        parameter_gradients={name: modules.gradient_of(parameter, placements[name]) for name, parameter in parameters.items()},
        ties=modules.ties(calls.module),
        changed_inputs=calls.changed_inputs(),
        calls=calls.submodules,
    )


def _uses(module: nn.Module, subject: Subject, case: Case, logical: Logical) -> dict[str, torch.Tensor]:
    """For every name of a tied parameter, the gradient that this use alone contributes in all calls together."""
    tied = [name for names in modules.ties(module) for name in names]
    if not tied:
        return {}
    untied = {name: parameter.detach().clone().requires_grad_() for name, parameter in modules.named_parameters(module).items()}
    for leaves, cotangents in zip(leaves_of(subject, case, logical), logical.cotangents, strict=True):
        output = torch.func.functional_call(module, untied, tuple(leaves.values()), tie_weights=False)
        _backward(modules.named_tensors(output), cotangents, case.layout)
    return {name: gradient for name in tied if (gradient := untied[name].grad) is not None}


def capture_of(subject: Subject, case: Case) -> Capture | None:
    """Keep what each rank contributes to the reduction of a vocabulary lookup, for the ``vocabulary`` check."""
    vocabulary = subject.vocabulary(case.config) if subject.vocabulary else None
    if vocabulary is None or not vocabulary.lookup:
        return None
    pattern = vocabulary.lookup
    return lambda record: (
        record.phase == "forward" and record.kind in ("all_reduce", "reduce_scatter") and fnmatchcase(record.module, pattern)
    )


def _group_run(members: tuple[int, ...], results: Sequence[Any], ledger: Ledger, failure: SimulationError | None) -> Run:
    if failure is not None:
        return Run([], ledger.within(members), failure)
    return Run([results[rank] for rank in members], ledger.within(members))
