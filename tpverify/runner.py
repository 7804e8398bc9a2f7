"""Runs one case both ways, from the same logical tensors: the reference on one device, the parallel module on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from tpverify import modules, values
from tpverify.case import Case
from tpverify.current_group import use_tp_group
from tpverify.description import check_description, check_lookup, check_subject, checked_module
from tpverify.errors import SimulationError, SubjectError
from tpverify.ledger.ledger import Ledger
from tpverify.run import Comparison, ModuleCall, Placed, RankRun, Run
from tpverify.sharding import Layout, Placement, local_indices, shard, sharded_dim
from tpverify.simulator import recorder
from tpverify.simulator.endpoint import Capture
from tpverify.simulator.world import run_world
from tpverify.subjects.subject import Input, Subject
from tpverify.trace import replay, tracing
from tpverify.world import World

CASE_TIMEOUT = 60.0


@dataclass(frozen=True)
class Logical:
    """What both sides of one TP group start from.

    Attributes:
        parameters: values by name; a tied parameter stands under each of its names.
        inputs: values by name.
        specs: how each input is drawn and placed.
        cotangents: by output label; filled when the reference has run.
    """

    parameters: dict[str, torch.Tensor]
    inputs: dict[str, torch.Tensor]
    specs: Mapping[str, Input]
    cotangents: dict[str, torch.Tensor]


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
    check_subject(subject)
    check_description(subject, case)
    layouts = group_layouts(case)
    sides = [_reference_side(subject, case, group, traced) for group in range(len(layouts))]
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
            logical = _draw(subject, case, group, module)
            modules.load_logical(module, logical.parameters)
            leaves = {name: _leaf(logical.inputs[name], spec, case.layout, subject.precision) for name, spec in logical.specs.items()}
            before = _copies(leaves)
            calls: dict[str, ModuleCall] = {}
            state = torch.get_rng_state()
            with tracing(module, calls) if traced else contextlib.nullcontext():
                outputs = modules.named_tensors(module(*leaves.values()))
            random = not torch.equal(state, torch.get_rng_state())
            if not outputs:
                raise SubjectError(f"Expected the reference of {subject.name} to return at least one tensor but it returned none")
            for label, output in outputs.items():
                logical.cotangents[label] = values.draw_cotangent(case, group, label, output.shape)
            _backward(outputs, logical.cotangents, case.layout)
            uses = _uses(module, logical, case.layout, subject.precision)
    except SubjectError:
        raise
    except (Exception, SystemExit) as error:
        raised = f"{type(error).__name__}: {error} on {case!r}{_precision_hint(subject, error)}"
        raise SubjectError(f"Expected the reference of {subject.name} to run but it raised {raised}") from error
    names = modules.named_parameters(module)
    run = Run(
        [_collect(module, leaves, logical, dict.fromkeys(names, Placement(Replicate())))], Ledger(()), inputs=logical.inputs, uses=uses
    )
    run.ranks[0].outputs = {label: Placed(output.detach().clone(), Replicate()) for label, output in outputs.items()}
    run.ranks[0].calls = calls
    run.ranks[0].changed_inputs = _changed(leaves, before)
    run.random = random
    run.depth = 2 + sum(1 for _ in module.modules())
    sizes = [max(tensor.shape, default=1) for tensor in logical.parameters.values()]
    run.terms = max([1, *sizes, *(tensor.numel() for tensor in logical.inputs.values())])
    return Reference(module, logical, run)


def _is_rejected(subject: Subject, case: Case) -> bool:
    return subject.rejects is not None and subject.rejects(case.config, case.world_size)


def _reference_side(subject: Subject, case: Case, group: int, traced: bool) -> Reference:
    return _unrun_reference(subject, case, group) if _is_rejected(subject, case) else run_reference(subject, case, group, traced)


def _unrun_reference(subject: Subject, case: Case, group: int) -> Reference:
    """For a case that must be refused: the reference may not be able to run it, but the ranks need something to start from."""
    with torch.random.fork_rng(devices=[]), _default_dtype(subject.precision):
        module = nn.Module()
        logical = _draw(subject, case, group, module)
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


def _draw(subject: Subject, case: Case, group: int, module: nn.Module) -> Logical:
    parameters: dict[str, torch.Tensor] = {}
    drawn: dict[int, torch.Tensor] = {}
    for name, parameter in modules.named_parameters(module).items():
        if id(parameter) not in drawn:
            drawn[id(parameter)] = values.draw_parameter(case, group, name, parameter.shape)
        parameters[name] = drawn[id(parameter)]
    specs = subject.inputs(case.config)
    vocabulary = subject.vocabulary(case.config) if subject.vocabulary else None
    inputs = {}
    for name, spec in specs.items():
        shards = _id_shards(subject, case, specs, parameters)
        spiked = vocabulary is not None and name == vocabulary.logits
        inputs[name] = values.draw_input(case, group, name, spec, shards, spiked)
    return Logical(parameters, inputs, specs, {})


def _id_shards(subject: Subject, case: Case, specs: Mapping[str, Input], parameters: Iterable[str]) -> list[list[int]]:
    """The vocabulary ids that each rank owns."""
    vocabulary = subject.vocabulary(case.config) if subject.vocabulary else None
    if vocabulary is None:
        highest = max((spec.high for spec in specs.values()), default=0)
        return [list(range(highest))]
    names = [name for name in parameters if any(fnmatchcase(name, pattern) for pattern in vocabulary.parameters)]
    placements = subject.placements_for(case.config) if names else {}
    layouts = [placement.value for name in names for pattern, placement in placements.items() if fnmatchcase(name, pattern)]
    if vocabulary.logits:
        layouts.append(specs[vocabulary.logits].placements.value)
    layout: Layout = layouts[0] if layouts else Replicate()
    if sharded_dim(layout) is None:
        return [list(range(vocabulary.size))]
    owned = [local_indices(vocabulary.size, layout, rank, case.world_size) for rank in range(case.world_size)]
    return [[index for index in indices if index >= 0] for indices in owned]


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
        leaves = [
            _leaf(shard(logical.inputs[name], spec.placements.value, rank, case.world_size), spec, case.layout, subject.precision)
            for name, spec in logical.specs.items()
        ]
        module(*leaves)
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
    modules.load_shards(module, logical.parameters, placements, rank, size)
    leaves = {
        name: _leaf(shard(logical.inputs[name], spec.placements.value, rank, size), spec, case.layout, subject.precision)
        for name, spec in logical.specs.items()
    }
    before = _copies(leaves)
    calls: dict[str, ModuleCall] = {}
    with recorder.phase("forward"), tracing(module, calls) if traced else contextlib.nullcontext():
        outputs = modules.named_tensors(module(*leaves.values()))
    declared = _output_placements(subject, case, outputs, list(logical.cotangents))
    with recorder.phase("backward"):
        cotangents = {
            label: shard(cotangent, declared[label].of_gradient, rank, size)
            for label, cotangent in logical.cotangents.items()
            if label in outputs
        }
        _backward(outputs, cotangents, case.layout)
    with recorder.phase("optimizer"):
        if subject.finalize_gradients is not None:
            subject.finalize_gradients(module)
    run = _collect(module, leaves, logical, placements)
    run.calls = calls
    run.changed_inputs = _changed(leaves, before)
    run.outputs = {label: Placed(modules.local_of(output).detach().clone(), declared[label].value) for label, output in outputs.items()}
    return run


def _copies(leaves: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: leaf.detach().clone() for name, leaf in leaves.items()}


def _changed(leaves: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    return tuple(name for name, leaf in leaves.items() if not torch.equal(leaf.detach(), before[name]))


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


def _leaf(tensor: torch.Tensor, spec: Input, layout: str, dtype: torch.dtype) -> torch.Tensor:
    if spec.kind != "normal":
        return tensor.to(torch.get_default_device(), copy=True)
    return values.laid_out(tensor.to(torch.get_default_device(), dtype, copy=True), layout).requires_grad_(spec.requires_grad)


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


def _collect(module: nn.Module, leaves: Mapping[str, torch.Tensor], logical: Logical, placements: Mapping[str, Placement]) -> RankRun:
    parameters = modules.named_parameters(module)
    return RankRun(
        input_gradients={
            name: modules.gradient_of(leaves[name], spec.placements) for name, spec in logical.specs.items() if spec.requires_grad
        },
        parameters={
            name: Placed(modules.local_of(parameter).detach().clone(), placements[name].value) for name, parameter in parameters.items()
        },
        parameter_gradients={name: modules.gradient_of(parameter, placements[name]) for name, parameter in parameters.items()},
        ties=modules.ties(module),
    )


def _uses(module: nn.Module, logical: Logical, layout: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """For every name of a tied parameter, the gradient that this use alone contributes."""
    tied = [name for names in modules.ties(module) for name in names]
    if not tied:
        return {}
    untied = {name: parameter.detach().clone().requires_grad_() for name, parameter in modules.named_parameters(module).items()}
    leaves = [_leaf(logical.inputs[name], spec, layout, dtype) for name, spec in logical.specs.items()]
    output = torch.func.functional_call(module, untied, tuple(leaves), tie_weights=False)
    _backward(modules.named_tensors(output), logical.cotangents, layout)
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
