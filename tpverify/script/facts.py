"""What a script is about: the plainest case that shows the same, what ranks start from, and which tensors are compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tpverify import modules
from tpverify.case import Case
from tpverify.checks.catalogue import COMPARING
from tpverify.checks.equivalence import AFTERWARDS
from tpverify.checks.finding import bound_of, gradient_scale, is_finite
from tpverify.description import checked_module
from tpverify.device import default_dtype
from tpverify.errors import CaseError
from tpverify.logical import Logical, leaves_of
from tpverify.options import CPU
from tpverify.rank_program import is_rejected
from tpverify.run import Comparison, Placed, RankRun
from tpverify.runner import CASE_TIMEOUT, HALF, Reference, run_both, run_reference
from tpverify.sensitivity import sensitivity
from tpverify.session import Key, Session, key_of
from tpverify.sharding import Layout, Partial, Placement, shard, unshard
from tpverify.simulator.world import process_state, run_world
from tpverify.subjects.subject import Subject
from tpverify.violation import Violation


@dataclass(frozen=True)
class Returned:
    """One tensor of what a module returns.

    Attributes:
        path: how to get at it, to be appended to the output's name: ``""``, ``[0]``, ``['logits']``, ``.loss``.
        shape: of the rank's own part.
        starts_backward: whether it takes a cotangent.
        distributed: whether it is a DTensor.
    """

    path: str
    shape: tuple[int, ...]
    starts_backward: bool
    distributed: bool


@dataclass
class Built:
    """What one rank's module turned out to be.

    Attributes:
        placements: of its parameters, by name; a tied one stands under its first name only.
        distributed: names of those that are DTensors.
        returned: the tensors that it returns; None if its forward did not.
    """

    placements: dict[str, Placement] = field(default_factory=dict)
    distributed: set[str] = field(default_factory=set)
    returned: list[Returned] | None = None


@dataclass(frozen=True)
class Compared:
    """A tensor that the script compares.

    Attributes:
        label: as failure reports call it.
        expected: the logical tensor, by the reference; None where the reference has no gradient.
        layout: how ranks hold theirs.
        late: of an output, whether backward has to be done before it is looked at.
    """

    label: str
    expected: torch.Tensor | None
    layout: Layout
    late: bool


@dataclass(frozen=True)
class Facts:
    """All that a script says.

    Attributes:
        subject, case: what is run; the case may be a plainer one than was asked for.
        violations: what the checks say of it.
        logical: what both sides start from.
        built: what every rank's module is; None where it cannot be built.
        returned: the tensors that the module returns, on rank 0; the reference's where its forward did not get that far.
        outputs: placements of the outputs, by label of the first call.
        compared: tensors that the script compares.
        tolerance: largest difference of an element between correct code and the reference.
        shown: whether the simulated ranks' numbers differ by more than that, or a rank raised.
    """

    subject: Subject
    case: Case
    violations: tuple[Violation, ...]
    logical: Logical
    built: Built | None
    returned: Sequence[Returned]
    outputs: Mapping[str, Placement]
    compared: Sequence[Compared]
    tolerance: float
    shown: bool


def facts_of(subject: Subject, case: Case, world: str) -> Facts:
    """Everything about a case that goes into its script.

    Args:
        world: what executes the ranks when the checks look.

    Raises:
        CaseError: the case is one that no script can show.
        SubjectError: the subject contradicts itself or its reference raises.
    """
    if is_rejected(subject, case):
        raise CaseError(
            f"Expected a case that is computed but got one that must be refused, {case!r}: its construction is all there is to it"
        )
    session = Session(subject, world=world)
    case = _plainest(session, case)
    if case.groups != "world":
        raise CaseError(f"Expected a case that shows the same on one TP group but got groups={case.groups!r}: a script has one group")
    violations = session.run(case)
    if violations and all(violation.tensor.endswith(AFTERWARDS) for violation in violations):
        raise CaseError(
            f"Expected a case that outputs or gradients show but got {case!r}, which shows in {violations[0].tensor} only: a script does"
            " not look at what is left in the module"
        )
    comparison = run_both(subject, case, traced=1)[0]
    case = comparison.case
    reference = run_reference(subject, case, 0, False)
    if case.dtype not in HALF:
        comparison.reference.sensitivity = sensitivity(comparison, 0)
    built = _probe(subject, case, reference.logical)
    compared = _compared(comparison, violations, built)
    tolerance = max((_largest_error(comparison, each) for each in compared), default=0.0)
    return Facts(
        subject=subject,
        case=case,
        violations=violations,
        logical=reference.logical,
        built=built,
        returned=built.returned if built is not None and built.returned is not None else _of_reference(subject, case, reference),
        outputs=_output_placements(comparison, reference),
        compared=compared,
        tolerance=tolerance,
        shown=comparison.parallel.error is not None or any(_differs(comparison, each, tolerance) for each in compared),
    )


def _plainest(session: Session, case: Case) -> Case:
    """The case in float64, of small integers and with one TP group, as far as it still shows the same."""
    keys = _keys(session, case)
    # Numbers that are equal by chance would hide what real processes make of a misused buffer.
    small = case.values == "normal" and all(check in COMPARING for check, _ in keys)
    for field_name, plain in (("dtype", "float64"), ("groups", "world"), ("values", "integers" if small else case.values)):
        changed: dict[str, Any] = {field_name: plain}
        plainer = dataclasses.replace(case, **changed)
        if plainer != case and _keys(session, plainer) == keys:
            case = plainer
    return case


def _keys(session: Session, case: Case) -> set[Key]:
    return {key_of(violation) for violation in session.run(case)}


def _probe(subject: Subject, case: Case, logical: Logical) -> Built | None:
    """Build the module on simulated ranks and call it once, to see what its parameters and outputs are."""
    ranks: dict[int, Built] = {}

    def program() -> None:
        torch.set_default_dtype(subject.working_dtype(case.dtype))
        rank = dist.get_rank()
        module = checked_module("parallel", subject.parallel(case.config))
        parameters = modules.named_parameters(module)
        placements = modules.placements_of(parameters, subject.placements_for(case.config), logical.parameters)
        first = {name: placements[name] for name, _ in module.named_parameters()}
        built = ranks[rank] = Built(first, {name for name in first if isinstance(parameters[name], DTensor)})
        modules.load_shards(module, logical.parameters, placements, rank, case.world_size, {})
        built.returned = list(_walk(module(*leaves_of(subject, case, logical, rank)[0].values())))

    with process_state(), subject.context_for(case.config):
        run_world(program, case.world_size, args=(), seed=case.seed, timeout=CASE_TIMEOUT, rank_local=subject.rank_local, device=CPU)
    if len(ranks) < case.world_size:
        return None
    if any(built.placements != ranks[0].placements for built in ranks.values()):
        raise CaseError("Expected every rank to have the same parameters but they differ: a script cannot load those of each rank")
    return ranks[0]


def _of_reference(subject: Subject, case: Case, reference: Reference) -> list[Returned]:
    """What the reference returns: where the parallel module's forward raised, as good a guess as there is."""
    with default_dtype(subject.working_dtype(case.dtype)):
        modules.load_logical(reference.module, reference.logical.parameters)
        return list(_walk(reference.module(*leaves_of(subject, case, reference.logical)[0].values())))


def _walk(output: Any, path: str = "") -> Iterator[Returned]:
    """In the order of :func:`tpverify.modules.named_tensors`."""
    if isinstance(output, torch.Tensor):
        yield Returned(path, tuple(modules.local_of(output).shape), output.requires_grad, isinstance(output, DTensor))
    elif isinstance(output, (tuple, list)):
        for index, item in enumerate(output):
            yield from _walk(item, f"{path}[{index}]")
    elif isinstance(output, Mapping):
        for key, item in output.items():
            yield from _walk(item, f"{path}[{key!r}]")
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for each in dataclasses.fields(output):
            yield from _walk(getattr(output, each.name), f"{path}.{each.name}")


def _output_placements(comparison: Comparison, reference: Reference) -> dict[str, Placement]:
    """By label: as declared, but a DTensor's own."""
    labels = list(reference.logical.cotangents[0])
    declared = comparison.subject.outputs_for(comparison.case.config)
    each = declared if isinstance(declared, tuple) else (declared,) * len(labels)
    placements = dict(zip(labels, each, strict=True))
    for label, placed in (comparison.parallel.ranks[0].outputs if comparison.parallel.ranks else {}).items():
        if label in placements and placements[label].value != placed.layout:
            placements[label] = Placement(placed.layout)
    return placements


def _tensors(run: RankRun) -> dict[str, Placed]:
    """All tensors that checks compare, by label."""
    gradients = {f"{name}.grad": placed for name, placed in (*run.input_gradients.items(), *run.parameter_gradients.items())}
    return run.outputs | gradients


def _compared(comparison: Comparison, violations: Sequence[Violation], built: Built | None) -> list[Compared]:
    """The tensors that checks found wrong; all of them where that is not a matter of tensors, or nothing is wrong."""
    if built is None or not is_finite(comparison):
        return []
    expected = _tensors(comparison.reference.ranks[0])
    aliases = {name for names in comparison.reference.ranks[0].ties for name in names[1:]}
    known = {label: placed for label, placed in expected.items() if label.removesuffix(".grad") not in aliases}
    wrong = {violation.tensor.partition(" (units")[0] for violation in violations if violation.check in COMPARING}
    named = wrong <= set(known) and all(violation.check in COMPARING for violation in violations) and wrong
    return [
        Compared(label, placed.local, _layout(comparison, label, built), _is_late(comparison, label))
        for label, placed in known.items()
        if (label in wrong if named else placed.local is not None)
    ]


def _is_late(comparison: Comparison, label: str) -> bool:
    """Whether an output changed in backward; one that was not there before is compared before."""
    changed = [run.outputs[label].local for run in comparison.parallel.ranks if label in run.changed_outputs]
    return any(local is not None and not bool(local.isnan().any()) for local in changed)


def _layout(comparison: Comparison, label: str, built: Built) -> Layout:
    """How ranks hold a tensor, as they turned out to, or as declared where they did not get that far."""
    if comparison.parallel.ranks:
        held = _tensors(comparison.parallel.ranks[0]).get(label)
        if held is not None:
            return held.layout
    subject, config = comparison.subject, comparison.case.config
    if label.endswith(".grad"):
        name = label.removesuffix(".grad")
        spec = subject.inputs(config).get(name.partition(" (call")[0])
        placement = spec.placements if spec is not None else built.placements[name]
        return placement.of_gradient
    declared = subject.outputs_for(config)
    if isinstance(declared, tuple):
        return declared[list(comparison.reference.ranks[0].outputs).index(label) % len(declared)].value
    return declared.value


def _largest_error(comparison: Comparison, compared: Compared) -> float:
    """The largest error of an element that rounding can explain."""
    if compared.expected is None or not compared.expected.is_floating_point():
        return 0.0
    size = float(compared.expected.double().norm())
    if compared.label.endswith(".grad"):
        size = max(size, gradient_scale(comparison) * compared.expected.numel() ** 0.5)
    return bound_of(comparison, compared.label) * size


def _differs(comparison: Comparison, compared: Compared, tolerance: float) -> bool:
    """Whether the simulated ranks hold other numbers than expected."""
    size = comparison.case.world_size
    parts = [_tensors(run)[compared.label].local if compared.label in _tensors(run) else None for run in comparison.parallel.ranks]
    if compared.expected is None:
        return any(part is not None and bool(torch.any(part != 0)) for part in parts)
    expected = [shard(compared.expected, compared.layout, rank, size).double() for rank in range(size)]
    if isinstance(compared.layout, Partial):
        held = [part.double() for part in parts if part is not None]
        parts, expected = [unshard(held, Partial(), held[0].shape) if held else None], [compared.expected.double()]
    return any(
        part is None or part.shape != wanted.shape or not torch.allclose(part.double(), wanted, rtol=0.0, atol=tolerance)
        for part, wanted in zip(parts, expected, strict=True)
    )
