"""Runs cases of one subject and remembers what they showed: results, counts, and the smallest case of each failure."""

from __future__ import annotations

import dataclasses
import re
import shlex
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from tpverify.case import Case, without_call
from tpverify.checks.catalogue import COMPARING, NUMERIC, apply, selected
from tpverify.checks.diagnosing import undiagnosed
from tpverify.checks.finding import SINGLE, Finding
from tpverify.device import checked_device
from tpverify.errors import CaseError, RankTimeout
from tpverify.options import CPU, DTYPES, WORLDS
from tpverify.processes.world import process_world
from tpverify.repair.search import circumstances_of, repairs_of
from tpverify.result import Result
from tpverify.run import Comparison
from tpverify.runner import CASE_TIMEOUT, run_both
from tpverify.sensitivity import measure
from tpverify.simulator.collectives import REDUCTION_ORDERS
from tpverify.subjects.subject import Subject
from tpverify.violation import Violation
from tpverify.world import World

GROUP = "(the TP group of global ranks"
"""How the line begins that says which of two TP groups a finding is about."""

ALONE = "it is wrong on one rank already, so not for want of communication"
"""Said where nothing fits."""

WITNESSES = 3
"""Other cases, one of which a repair must mend as well."""

SECONDS_OF_REPAIRS = 30.0
"""After which no further case is repaired."""

Key = tuple[str, str]
"""What tells failures apart: the check and the tensor."""


class Session:
    """Executions of one subject.

    Args:
        subject: what is run.
        checks: ids of the checks to apply; None = all.
        world: what executes ranks.
        timeout: seconds for one case.
        device: where they and the reference compute.
        measure: whether to keep the largest ratios of an error to its bound, which takes some time.

    Attributes:
        largest: if measured, by check and dtype of the case: the largest error of any tensor relative to its bound. Below 1 the
            check holds; how far below, in correct code, and how far above, with a bug, is the margin of the check.
        hasty: whether a failed case is taken as it is, not run once more to look into it: rounding may pass for a failure then.
    """

    def __init__(
        self,
        subject: Subject,
        checks: Collection[str] | None = None,
        world: str = "simulator",
        timeout: float = CASE_TIMEOUT,
        device: str = CPU,
        measure: bool = False,
    ) -> None:
        self.world, self.device = world_named(world, device)
        self.subject = subject
        self.checks = selected(checks)
        self.timeout = timeout
        self.cases_run = 0
        self.world_sizes: dict[int, int] = {}
        self.applied: dict[str, int] = dict.fromkeys(self.checks, 0)
        self.dtypes: dict[str, int] = {}
        self.largest: dict[tuple[str, str], float] = {}
        self.measure = measure
        self.rejected = 0
        self.timed_out = False
        self.hasty = False
        self.last: tuple[Violation, ...] = ()
        self._known: dict[str, tuple[Violation, ...]] = {}
        self._failed: dict[str, Case] = {}
        self._repairs: dict[str, dict[Key, str]] = {}
        self._depends: dict[str, str] = {}
        self._repairing = 0.0

    def run(self, case: Case) -> tuple[Violation, ...]:
        """Run a case and apply the checks; a case that ran before is remembered."""
        key = repr(case)
        if key not in self._known:
            self._known[key] = self._execute(case)
            if self._known[key]:
                self._failed[key] = case
        self.last = self._known[key]
        return self.last

    def explained(self, violations: Sequence[Violation]) -> tuple[Violation, ...]:
        """The violations; of values, with the repair that mends them where no pattern fits, and with what they depend on."""
        held = [violation for violation in violations if violation.check in COMPARING]
        fitting = {violation.case for violation in held if is_explained(violation)}
        for text in dict.fromkeys(violation.case for violation in held):
            if text not in self._repairs and self._repairing < SECONDS_OF_REPAIRS:
                started = time.monotonic()
                self._repair(self._failed[text], violations, text not in fitting)
                self._repairing += time.monotonic() - started
        return tuple(self._repaired(violation) for violation in violations)

    def _repair(self, case: Case, violations: Sequence[Violation], unexplained: bool) -> None:
        text, common = repr(case), (self.checks, self.timeout)
        self._repairs[text] = {}
        if unexplained:
            self._repairs[text] = repairs_of(self.subject, case, *common, self._others_like(case, violations), self.device)
        self._depends[text] = circumstances_of(self.subject, case, *common, self.device)

    def _others_like(self, case: Case, violations: Sequence[Violation]) -> list[Case]:
        """Of the other cases in which the first failure was seen, those in the same circumstances, the largest of them."""
        key = next(key_of(violation) for violation in violations if violation.case == repr(case) and violation.check in COMPARING)
        texts = {violation.case for violation in self.violations_of(key)} - {repr(case)}
        others = [self._failed[text] for text in texts]
        return sorted(others, key=lambda other: (_circumstances_shared(case, other), size_of(other)))[-WITNESSES:]

    def again(self, case: Case) -> tuple[Violation, ...]:
        """Run a case once more, whatever is remembered of it."""
        self._known.pop(repr(case), None)
        self._repairs.pop(repr(case), None)
        return self.run(case)

    def _repaired(self, violation: Violation) -> Violation:
        found = self._repairs.get(violation.case, {})
        repair = found.get(key_of(violation)) or next((text for key, text in found.items() if key[0] == violation.check), "")
        depends = self._depends.get(violation.case, "") if violation.check in COMPARING else ""
        told = "" if repair and SINGLE in violation.diagnosis else violation.diagnosis
        alone = violation.world_size == 1 and not (told or repair or depends) and violation.check in COMPARING
        lines = [told, "" if is_explained(violation) else repair, depends, ALONE if alone else ""]
        return dataclasses.replace(violation, diagnosis="; ".join(filter(None, lines)))

    def violations_of(self, key: Key) -> list[Violation]:
        """What one failure came to in every case that showed it."""
        return [violation for found in self._known.values() for violation in found if key_of(violation) == key]

    def result(self, violations: Sequence[Violation], seconds: float) -> Result:
        """What the executions so far came to."""
        return Result(
            subject=self.subject.name,
            cases_run=self.cases_run,
            world_sizes=dict(sorted(self.world_sizes.items())),
            dtypes=dict(sorted(self.dtypes.items(), key=lambda item: DTYPES.index(item[0]))),
            checks=dict(self.applied),
            rejected=self.rejected,
            violations=tuple(violations),
            seconds=seconds,
        )

    def _execute(self, case: Case) -> tuple[Violation, ...]:
        largest: dict[str, float] | None = {} if self.measure else None
        with undiagnosed():
            found, applied = self._apply(self._both(case, traced=0), largest)
        if not self.hasty and any(name in NUMERIC for name, _ in found):
            # Once more, into every module and with the case's own sensitivity: both are worth their time now.
            largest = {} if self.measure else None
            comparisons = self._both(case, traced=_first_wrong_call(found))
            measure(comparisons, self.device)
            found, applied = self._apply(comparisons, largest)
        for name, ratio in (largest or {}).items():
            self.largest[name, case.dtype] = max(ratio, self.largest.get((name, case.dtype), 0.0))
        self.cases_run += 1
        self.dtypes[case.dtype] = self.dtypes.get(case.dtype, 0) + 1
        self.world_sizes[case.world_size] = self.world_sizes.get(case.world_size, 0) + 1
        for name in applied:
            self.applied[name] += 1
        self.rejected += "rejection" in applied and not found
        return tuple(violation(self.subject, case, name, finding) for name, finding in found)

    def _both(self, case: Case, *, traced: int) -> tuple[Comparison, ...]:
        """The case run both ways, with a schedule and an order of reductions of its own."""
        return run_both(
            self.subject,
            case,
            self.timeout,
            traced=traced,
            schedule=case.seed or None,
            reduction_order=REDUCTION_ORDERS[case.seed % len(REDUCTION_ORDERS)],
            world=self.world,
            device=self.device,
        )

    def _apply(
        self, comparisons: Sequence[Comparison], largest: dict[str, float] | None
    ) -> tuple[dict[tuple[str, Finding], None], set[str]]:
        """All findings, in the checks' order, and the checks that had something to look at."""
        found: dict[tuple[str, Finding], None] = {}
        applied: set[str] = set()
        for comparison in comparisons:
            self.timed_out = self.timed_out or isinstance(comparison.parallel.error, RankTimeout)
            for name, findings in apply(self.checks, comparison, largest).items():
                if findings is not None:
                    applied.add(name)
                for finding in findings or ():
                    found[name, _within(finding, comparison.members) if len(comparisons) > 1 else finding] = None
        return found, applied


def _circumstances_shared(case: Case, other: Case) -> int:
    names = ("groups", "values", "layout", "calls", "dtype")
    return sum(getattr(case, name) == getattr(other, name) for name in names)


def _first_wrong_call(found: Iterable[tuple[str, Finding]]) -> int:
    """The first call, from 1, in which a tensor is wrong that belongs to one call; 1 if none does."""
    calls = [re.search(r"\(call (\d+)\)", finding.tensor) for name, finding in found if name in ("forward", "input-gradient")]
    return min((int(call[1]) if call else 1 for call in calls), default=1)


def is_explained(violation: Violation) -> bool:
    """Whether a pattern fits: not all lines of diagnosis say so, some only describe, and small errors may pass for rounding."""
    return " fit" in violation.diagnosis and SINGLE not in violation.diagnosis


def world_named(name: str, device: str = CPU) -> tuple[World | None, str]:
    """What executes ranks (None = the simulator, which the runner has built in), and the device on which it does.

    Raises:
        CaseError: there is no such world or device, or not on this machine.
    """
    if name not in WORLDS:
        raise CaseError(f"Expected one of {', '.join(WORLDS)} but got world={name!r}")
    device = checked_device(device, name)
    return None if name == WORLDS[0] else process_world(name, device), device


def _within(finding: Finding, members: Sequence[int]) -> Finding:
    """Of two TP groups that share the world, which one."""
    group = f"{GROUP} {', '.join(str(rank) for rank in members)})"
    return dataclasses.replace(finding, message=f"{finding.message}\n{group}")


def violation(subject: Subject, case: Case, check: str, finding: Finding) -> Violation:
    """A finding together with the case that shows it."""
    text = repr(case)
    return Violation(
        check=check,
        subject=subject.name,
        world_size=case.world_size,
        ranks=finding.ranks,
        tensor=finding.tensor,
        message=finding.message,
        diagnosis=finding.diagnosis,
        case=text,
        replay=f"tpverify replay {_shell_quoted(text)}",
    )


def _shell_quoted(text: str) -> str:
    """Double quotes where they do, since a case is full of single ones."""
    return shlex.quote(text) if set(text) & set('"$`\\!') else f'"{text}"'


def key_of(violation: Violation) -> Key:
    """What tells this failure apart from others."""
    if violation.check != "execution":
        return violation.check, without_call(violation.tensor)
    # What was raised, without its numbers and addresses: another exception is another failure.
    lines = [line for line in violation.message.splitlines() if not line.startswith(GROUP)]
    return violation.check, re.sub(r"0x[0-9a-f]+|\d+", "#", lines[-1])


def size_of(case: Case) -> tuple[Any, ...]:
    """An order by simplicity, for cases that nothing has shrunk."""
    return case.groups != "world", case.world_size, len(repr(case)), repr(case)
