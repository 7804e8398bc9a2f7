"""Which repair mends a failed case: each is tried, and what is right then tells what was wrong."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from tpverify.case import Case, without_call
from tpverify.checks.catalogue import COMPARING, NUMERIC
from tpverify.checks.diagnosing import undiagnosed
from tpverify.checks.finding import Check
from tpverify.errors import SubjectError
from tpverify.options import CPU
from tpverify.rank_program import group_layouts
from tpverify.repair.of_cases import of_cases
from tpverify.repair.of_collectives import Brought, of_collectives
from tpverify.repair.of_operations import CAST, DETACH, PRODUCT, STATISTIC, Noticed, of_operations
from tpverify.repair.repair import Repair, Sites
from tpverify.run import Comparison
from tpverify.runner import run_both
from tpverify.sensitivity import hold_alike, measure
from tpverify.simulator.collectives import REDUCTION_ORDERS
from tpverify.subjects.subject import Subject

MOST_REPAIRS = 60
"""Tried on one case."""

SECONDS = 10.0
"""After which no further repair is tried on a case."""

SEEDS = 8
"""Other values for which a plainer case must be right as well, before its circumstances are blamed."""

Key = tuple[str, str]
"""A check and the tensor that it finds wrong."""


def repairs_of(
    subject: Subject, case: Case, checks: Mapping[str, Check], timeout: float, witnesses: Sequence[Case] = (), device: str = CPU
) -> dict[Key, str]:
    """By check and tensor, the first repair in the simulator that mends it, in words.

    A repair mends a tensor if the checks find nothing wrong with it any more, and nothing that was right before; where the
    forward pass is wrong a repair must mend that, since gradients follow from it. One that mends the whole case comes first.

    Args:
        checks: by id, those to go by.
        timeout: seconds for one run.
        witnesses: other cases that fail in the same way, one of which a repair must mend as well: in a small case, some do by chance.
    """
    checks = {name: check for name, check in checks.items() if name in COMPARING}
    failed = _Failed(subject, case, checks, timeout, device)
    others = [other for witness in witnesses if (other := _Failed(subject, witness, checks, timeout, device)).wrong]
    mended: dict[Key, str] = {}
    until = time.monotonic() + SECONDS
    for tried, (key_of_repair, repair) in enumerate(failed.repairs.items()):
        if not failed.wrong or tried >= MOST_REPAIRS or time.monotonic() > until:
            break
        keys = failed.mended_by(repair)
        if not keys or not _is_confirmed(key_of_repair, others):
            continue
        if keys == failed.wrong:
            return dict.fromkeys(keys, repair.diagnosis)
        for key in keys:
            mended.setdefault(key, repair.diagnosis)
    return mended


def _is_confirmed(key: tuple[str, Sites], others: Sequence[_Failed]) -> bool:
    """Whether the repair mends one of the other cases, unless it can be tried in none."""
    tried = [other.mended_by(other.repairs[key]) for other in others if key in other.repairs]
    answers = [mended for mended in tried if mended is not None]
    return any(answers) or not answers


def circumstances_of(subject: Subject, case: Case, checks: Mapping[str, Check], timeout: float, device: str = CPU) -> str:
    """In which plainer circumstances nothing is wrong with the values of a failed case, in words; "" if in none."""
    plainer = list(of_cases(case))
    if not plainer:
        return ""
    held = {name: check for name, check in checks.items() if name in COMPARING}
    failed = _Failed(subject, case, held, timeout, device)
    for repair in plainer:
        if failed.wrong and failed.mended_by(repair) == failed.wrong and failed.is_right_whatever_the_seed(repair):
            return repair.diagnosis
    return ""


class _Failed:
    """A failed case.

    Attributes:
        wrong: what is wrong in it.
        repairs: what may be changed, by ``Repair.key``.
    """

    def __init__(self, subject: Subject, case: Case, checks: Mapping[str, Check], timeout: float, device: str) -> None:
        self._subject, self._case, self._checks, self._timeout, self._device = subject, case, checks, timeout, device
        self._measured: tuple[Comparison, ...] = ()
        brought, noticed = Brought(), Noticed()
        self.wrong = self._run(Repair("", "", perturb=brought, around=noticed.around)) or set()
        self._forward = {key for key in self.wrong if key[0] == "forward"}
        self.repairs = {repair.key: repair for repair in self._repairs(brought, noticed)} if self.wrong else {}

    def mended_by(self, repair: Repair) -> set[Key] | None:
        """What is right with the repair, and was not without; empty if anything else is wrong instead, None if it cannot be run."""
        left = self._run(repair)
        if left is None:
            return None
        if not left < self.wrong or left & self._forward:
            return set()
        mended = self.wrong - left
        return mended if any(check in NUMERIC for check, _ in mended) else set()  # equal replicas may be equally wrong

    def is_right_whatever_the_seed(self, repair: Repair) -> bool:
        """Whether the repaired case is right for other values too: otherwise it is those that it depends on."""
        return all(self._run(repair, seed) == set() for seed in range(self._case.seed + 1, self._case.seed + 1 + SEEDS))

    def _repairs(self, brought: Brought, noticed: Noticed) -> Iterator[Repair]:
        phases = ("forward",) if self._forward else ("backward", "recompute", "optimizer")
        kinds = (CAST, PRODUCT, STATISTIC) if self._forward else (CAST, DETACH, PRODUCT, STATISTIC)
        return chain(of_collectives(brought, group_layouts(self._case), phases), of_operations(noticed, kinds))

    def _run(self, repair: Repair, seed: int | None = None) -> set[Key] | None:
        """What is wrong in a run, with the case's seed or another; None if it did not come to its end."""
        case = dataclasses.replace(self._case, **repair.circumstances, seed=self._case.seed if seed is None else seed)
        try:
            comparisons = run_both(
                self._subject,
                case,
                min(self._timeout, SECONDS),
                schedule=case.seed or None,
                reduction_order=REDUCTION_ORDERS[case.seed % len(REDUCTION_ORDERS)],
                perturb=repair.perturb,
                around=repair.around,
                device=self._device,
            )
        except SubjectError:
            return None
        if any(comparison.parallel.error for comparison in comparisons):
            return None
        if not self._measured:
            measure(comparisons, self._device)
            self._measured = comparisons
        if not repair.circumstances:
            hold_alike(comparisons, self._measured)
        with undiagnosed():
            return {
                (name, without_call(finding.tensor))
                for comparison in comparisons
                for name, check in self._checks.items()
                for finding in check(comparison) or ()
            }
