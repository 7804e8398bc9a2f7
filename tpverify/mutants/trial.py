"""One case run as it is, then with one fault: does a check notice, and if not, what has changed?"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch.distributed as dist
from torch import Tensor, nn

from tpverify.case import Case
from tpverify.checks.catalogue import NUMERIC, selected
from tpverify.checks.diagnosing import undiagnosed
from tpverify.checks.finding import gradient_scale
from tpverify.ledger.ledger import Ledger
from tpverify.ledger.record import Record
from tpverify.modules import local_of
from tpverify.mutants.perturbation import OTHER_OP, Call, Injection, InputLog, Perturbation, call_of
from tpverify.mutants.sites import Site, sites_of
from tpverify.run import Comparison
from tpverify.runner import CASE_TIMEOUT, run_both
from tpverify.sensitivity import hold_alike, measure
from tpverify.simulator.collectives import REDUCTION_ORDERS
from tpverify.simulator.exchange import Perturb
from tpverify.subjects.subject import Subject
from tpverify.tolerance import bitwise_equal, compare, relative_error, tolerance, unit_roundoff

COARSE = 2.0**-12
"""Unit roundoffs beyond this are half precisions', whose tolerance is far too wide to call a change a rounding."""

COMPARED_BY = {"outputs": "forward", "input_gradients": "input-gradient", "parameter_gradients": "parameter-gradient"}
"""Which check holds a part of a :class:`tpverify.run.RankRun` against the reference."""

Tensors = dict[tuple[str, str], Tensor]
"""What one rank is left with, by part and label."""


@dataclass(frozen=True)
class Change:
    """A tensor that is not what it was.

    Attributes:
        part: attribute of :class:`tpverify.run.RankRun`, or ``buffers``.
        tensor: its label.
        ranks: ranks of the TP group.
        relative: relative change, the largest of any rank.
        rounding: whether it is no more than correct code may be off.
    """

    part: str
    tensor: str
    ranks: tuple[int, ...]
    relative: float
    rounding: bool


@dataclass(frozen=True)
class Trial:
    """What one perturbed run showed.

    Attributes:
        killed_by: the first check that notices, or "".
        handed: whether any rank was handed other bits than without the perturbation.
        telling: whether ranks are handed anything but zeros there, so that it means something if nothing changes.
        changes: where nothing noticed, what changed.
    """

    killed_by: str
    handed: bool = False
    telling: bool = True
    changes: tuple[Change, ...] = ()


@dataclass
class Clean:
    """One case as it is.

    Attributes:
        case: the case.
        comparisons: of each TP group.
        sites: of each TP group, see :func:`tpverify.mutants.sites.sites_of`.
        inputs: what ranks bring to each collective; filled where two TP groups share the world.
        failed: the first check that does not hold, or "".
        buffers: of each rank, its module's buffers after the run.
        measured: whether the comparisons' references know how much rounding moves them.
    """

    case: Case
    comparisons: tuple[Comparison, ...]
    sites: tuple[dict[Site, tuple[Record, ...]], ...] = ()
    inputs: Mapping[Call, Sequence[Sequence[Tensor]]] = field(default_factory=dict)
    failed: str = ""
    buffers: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)
    measured: bool = False

    def measure(self) -> None:
        """Find out how much rounding moves the references: what a failed case is held to."""
        self.measured = True
        measure(self.comparisons)


class Bench:
    """Runs one subject's cases, clean and perturbed.

    Args:
        subject: what is run.
        checks: ids of the checks to apply; None = all.
        timeout: seconds for one run.
    """

    def __init__(self, subject: Subject, checks: Collection[str] | None = None, timeout: float = CASE_TIMEOUT) -> None:
        self.checks = selected(checks)
        self._timeout = timeout
        self._modules: dict[int, nn.Module] = {}
        self._build = subject.parallel
        self._subject = replace(subject, parallel=self._kept)

    def clean(self, case: Case) -> Clean:
        """The case without a perturbation."""
        log = InputLog() if case.groups != "world" else None
        clean = Clean(case, self._run(case, log))
        clean.failed = self._noticed_by(clean, clean.comparisons)
        clean.sites = tuple(sites_of(comparison.parallel.ledger, comparison.members) for comparison in clean.comparisons)
        clean.inputs = log.inputs if log is not None else {}
        clean.buffers = self._buffers()
        return clean

    def perturbed(self, clean: Clean, perturbation: Perturbation, others: Mapping[Call, Sequence[Sequence[Tensor]]]) -> Trial:
        """The same case with a perturbation."""
        injection = Injection(perturbation, others)
        comparisons = self._run(clean.case, injection)
        check = self._noticed_by(clean, comparisons)
        if check or not injection.changed:
            return Trial(check, injection.changed, injection.telling)
        changes = tuple(self._changes(clean, comparisons))
        if any(not change.rounding for change in changes) and self._notices_ledger(clean, comparisons, perturbation):
            return Trial("communication", True)
        return Trial("", True, True, changes)

    def _run(self, case: Case, perturb: Perturb | None) -> tuple[Comparison, ...]:
        self._modules.clear()
        order = REDUCTION_ORDERS[case.seed % len(REDUCTION_ORDERS)]
        return run_both(self._subject, case, self._timeout, schedule=case.seed or None, reduction_order=order, perturb=perturb)

    def _kept(self, config: object) -> nn.Module:
        module: nn.Module = self._build(config)
        self._modules[dist.get_rank()] = module
        return module

    def _buffers(self) -> dict[int, dict[str, Tensor]]:
        return {
            rank: {name: local_of(buffer).detach().clone() for name, buffer in module.named_buffers()}
            for rank, module in self._modules.items()
        }

    def _noticed_by(self, clean: Clean, comparisons: Sequence[Comparison]) -> str:
        """The first check with a finding; differences count as they do when a failed case is looked at again."""
        if not clean.measured:
            first = self._first_check(comparisons)
            if first not in NUMERIC:
                return first
            clean.measure()
        hold_alike(comparisons, clean.comparisons)
        return self._first_check(comparisons)

    def _first_check(self, comparisons: Sequence[Comparison]) -> str:
        with undiagnosed():
            return next((name for name, check in self.checks.items() if any(check(comparison) for comparison in comparisons)), "")

    def _notices_ledger(self, clean: Clean, comparisons: Sequence[Comparison], perturbation: Perturbation) -> bool:
        """Whether the ``communication`` check would notice the faulty program by what it calls, not by what it gets."""
        if perturbation.rank is not None or "communication" not in self.checks:
            return False
        check = self.checks["communication"]
        written = [_as_written(comparison, perturbation) for comparison in comparisons]
        return any(check(comparison) for comparison in written if comparison is not None)

    def _changes(self, clean: Clean, comparisons: Sequence[Comparison]) -> Iterator[Change]:
        buffers = self._buffers()
        for before, after in zip(clean.comparisons, comparisons, strict=True):
            found: dict[tuple[str, str], list[tuple[int, float, bool]]] = {}
            for rank, member in enumerate(before.members):
                old = _tensors(before, rank, clean.buffers.get(member, {}))
                new = _tensors(after, rank, buffers.get(member, {}))
                for key in {**old, **new}:
                    difference = _difference(before, key[0], old.get(key), new.get(key))
                    if difference is not None:
                        found.setdefault(key, []).append((rank, *difference))
            for (part, label), differences in found.items():
                ranks = tuple(rank for rank, _, _ in differences)
                largest = max(relative for _, relative, _ in differences)
                yield Change(part, label, ranks, largest, all(rounding for _, _, rounding in differences))


def _tensors(comparison: Comparison, rank: int, buffers: Mapping[str, Tensor]) -> Tensors:
    run = comparison.parallel.ranks[rank]
    parts = (*COMPARED_BY, "parameters")
    held = {(part, label): placed.local for part in parts for label, placed in getattr(run, part).items()}
    present = {key: tensor for key, tensor in held.items() if tensor is not None}
    return present | {("buffers", name): tensor for name, tensor in buffers.items()}


def _difference(comparison: Comparison, part: str, old: Tensor | None, new: Tensor | None) -> tuple[float, bool] | None:
    """Relative change and whether it is a rounding; None if no bit has changed."""
    if old is None or new is None or old.shape != new.shape or old.dtype != new.dtype:
        return float("inf"), False
    if bitwise_equal(old, new):
        return None
    scale = gradient_scale(comparison) * old.numel() ** 0.5 if part.endswith("gradients") else None
    inexact = old.is_floating_point() or old.is_complex()
    bound = rounding_bound(comparison) if inexact else 0.0
    return relative_error(new, old, scale=scale), compare(new, old, bound=bound, scale=scale) is None


def rounding_bound(comparison: Comparison) -> float:
    """The largest relative change that is called a rounding."""
    unit = unit_roundoff(comparison.dtype)
    return 4 * unit if unit > COARSE else tolerance(comparison.dtype, comparison.reference.depth, comparison.reference.terms)


def _as_written(comparison: Comparison, perturbation: Perturbation) -> Comparison | None:
    """The comparison with the ledger of a program that has the fault in its text; None where the ledger would be the same."""
    ledger = comparison.parallel.ledger
    befallen = {_meeting(record) for record in ledger if call_of(record) in perturbation.calls}
    operator = OTHER_OP.get(perturbation.operator, "")
    copies = {"drop": 0, "double": 2}.get(perturbation.operator, 1)
    if not befallen or (copies == 1 and not operator):
        return None
    records = [
        replace(record, reduce_op=operator or record.reduce_op) if _meeting(record) in befallen else record
        for record in ledger
        for _ in range(copies if _meeting(record) in befallen else 1)
    ]
    return replace(comparison, parallel=replace(comparison.parallel, ledger=Ledger(records)))


def _meeting(record: Record) -> tuple[str, tuple[int, ...], int]:
    return record.process_group[0], record.group_ranks, record.collective_seq_id
