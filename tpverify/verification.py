"""The public entry points: verify a subject over generated cases, check one case, make a pytest property."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Flaky, Unsatisfiable

from tpverify import options
from tpverify.case import Case
from tpverify.checks.catalogue import describe_checks
from tpverify.errors import CaseError, SubjectError
from tpverify.lookup import addressed, builtin_subjects, load_subject, read_case
from tpverify.result import Result
from tpverify.run import Comparison
from tpverify.runner import CASE_TIMEOUT, run_both
from tpverify.session import Key, Session, key_of, size_of
from tpverify.strategies import ALL_WORLD_SIZES, DEFAULT_WORLD_SIZES, cases
from tpverify.subjects.subject import Subject
from tpverify.violation import Violation, failure_report

__all__ = [
    "CheckFailed",
    "builtin_subjects",
    "check_case",
    "describe_checks",
    "load_subject",
    "property_test",
    "read_case",
    "record_result",
    "run_case",
    "typical_case",
    "verify",
]

CASES_AFTER_FAILURE = 20
"""How many more cases are drawn once one has failed, to find other failures beside it."""

REPEATS = 4
"""Hypothesis may draw this many times the cases asked for, since it draws some of them again."""

SECONDS_AFTER_FAILURE = 300.0
"""How long drawing and shrinking may go on once a case has failed; cases are quick, so only a very slow subject gets there."""

MOST_SHRUNK = 12
"""How many different failures are shrunk, each by itself."""

pending_results: list[dict[str, Any]] = []
"""Results of property tests that nobody has collected yet; the pytest plugin takes them."""


class CheckFailed(AssertionError):
    """Raised by property tests; the message is the failure report."""


class _Enough(Exception):
    """No more cases are wanted."""


class _Shown(Exception):
    """The case shows the failure that is being shrunk."""


def verify(
    subject: Subject,
    *,
    world_sizes: Sequence[int] = DEFAULT_WORLD_SIZES,
    max_examples: int = 100,
    seed: int | None = None,
    world: str = "simulator",
    checks: Collection[str] | None = None,
    timeout: float = CASE_TIMEOUT,
    progress: Callable[[int, int], None] | None = None,
) -> Result:
    """Verify a subject over generated cases; a failed check is a violation in the result, never an exception.

    After a failure some more cases are drawn, then every different failure (check and tensor) is shrunk by itself.

    Args:
        world_sizes: TP degrees to draw from.
        max_examples: number of cases to draw; shrinking adds more.
        seed: decides which cases are drawn; None = 0.
        world: what executes ranks.
        checks: ids of the checks to apply; None = all.
        timeout: seconds for one case.
        progress: called with (cases done, cases to do).

    Raises:
        SubjectError: the subject contradicts itself or its reference raises.
        CaseError: an argument is out of range.
    """
    if isinstance(max_examples, bool) or not isinstance(max_examples, int) or max_examples < 0:
        raise CaseError(f"Expected max_examples to be at least 0 but got max_examples={max_examples!r}")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
        raise CaseError(f"Expected seed to be None or an integer of at least 0 but got seed={seed!r}")
    started = time.monotonic()
    session = Session(addressed(subject), checks, world, timeout)
    explorer = _Explorer(session, world_sizes, max_examples, 0 if seed is None else seed)
    shown = explorer.explore(progress) if max_examples else {}
    violations = explorer.shrink_all(shown)
    return session.result(violations, time.monotonic() - started)


class _Explorer:
    """Draws and shrinks cases with Hypothesis, reproducibly from one seed."""

    def __init__(self, session: Session, world_sizes: Sequence[int], max_examples: int, seed: int) -> None:
        self._session = session
        self._cases = cases(session.subject, world_sizes)
        self._max_examples = max_examples
        self._seed = seed
        self._patience = math.inf
        self._order = list(session.checks)

    def explore(self, progress: Callable[[int, int], None] | None) -> dict[Key, Case]:
        """Draw cases; the smallest case that showed each failure."""
        smallest: dict[Key, Case] = {}
        left = self._max_examples

        def explore(case: Case) -> None:
            nonlocal left
            if left <= 0 or self._session.timed_out or time.monotonic() > self._patience:
                raise _Enough
            before = self._session.cases_run
            violations = self._session.run(case)
            left -= self._session.cases_run - before
            if violations:
                self._patience = min(self._patience, time.monotonic() + SECONDS_AFTER_FAILURE)
                left = min(left, CASES_AFTER_FAILURE)
            for violation in violations:
                known = smallest.get(key_of(violation))
                if known is None or size_of(case) < size_of(known):
                    smallest[key_of(violation)] = case
            if progress is not None:
                progress(self._session.cases_run, self._max_examples)

        with contextlib.suppress(_Enough):
            self._drive(explore, (Phase.generate,))
        return smallest

    def shrink_all(self, shown: dict[Key, Case]) -> list[Violation]:
        """Each failure on the smallest case that shows it; failures that a reported case shows as well are not shrunk again."""
        reported: dict[Key, list[Violation]] = {}
        keys = sorted(shown, key=lambda key: (self._order.index(key[0]), key[1]))
        first_of_check = {check: next(key for key in keys if key[0] == check) for check, _ in keys}
        for key in [*first_of_check.values(), *(key for key in keys if key not in first_of_check.values())]:
            if key in reported:
                continue
            shrunk = len(reported) < MOST_SHRUNK and not self._session.timed_out and time.monotonic() < self._patience
            case = self._shrink(key, shown[key]) if shrunk else shown[key]
            for violation in self._session.run(case):
                if violation.check == key[0] and key_of(violation) not in reported or key_of(violation) == key:
                    reported.setdefault(key_of(violation), [])
                    if violation not in reported[key_of(violation)]:
                        reported[key_of(violation)].append(violation)
        violations = [violation for found in reported.values() for violation in found]
        return sorted(violations, key=lambda violation: (self._order.index(violation.check), violation.tensor))

    def _shrink(self, key: Key, fallback: Case) -> Case:
        smallest = fallback

        def show(case: Case) -> None:
            nonlocal smallest
            if time.monotonic() > self._patience:
                return  # what fails no longer is flaky to Hypothesis, which ends there
            with contextlib.suppress(SubjectError):  # a smaller case may be one that the reference cannot run
                if any(key_of(violation) == key for violation in self._session.run(case)):
                    smallest = case
                    raise _Shown

        try:
            self._drive(show, (Phase.generate, Phase.shrink))
        except (_Shown, Flaky):
            return smallest
        return fallback

    def _drive(self, function: Callable[[Case], None], phases: tuple[Phase, ...]) -> None:
        config = settings(
            max_examples=REPEATS * max(1, self._max_examples),
            phases=phases,
            database=None,
            deadline=None,
            derandomize=False,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            verbosity=hypothesis.Verbosity.quiet,
        )
        test = hypothesis.seed(self._seed)(config(given(self._cases)(function)))
        try:
            test()
        except Unsatisfiable as error:
            name = self._session.subject.name
            raise SubjectError(f"Expected configs of subject {name} to hold at least one config but none could be drawn") from error


def run_case(subject: Subject, case: Case, timeout: float = CASE_TIMEOUT) -> Comparison:
    """Run one case both ways; of two TP groups, the first.

    Raises:
        SubjectError: the subject contradicts itself or its reference raises.
    """
    return run_both(subject, case, timeout)[0]


def check_case(subject: Subject, case: Case, world: str = "simulator", checks: Collection[str] | None = None) -> list[Violation]:
    """Run one case and return its violations.

    Raises:
        SubjectError: the subject contradicts itself or its reference raises.
        CaseError: an argument is out of range.
    """
    return list(Session(addressed(subject), checks, world).run(case))


def typical_case(subject: Subject, world_size: int, seed: int = 0) -> Case:
    """An ordinary case of a given TP degree, for looking at its ledger.

    Raises:
        CaseError: the subject has no case of that world size that it accepts.
    """
    found: list[Case] = []

    def collect(case: Case) -> None:
        refused = subject.rejects is not None and subject.rejects(case.config, case.world_size)
        if case.groups == "world" and case.layout == "contiguous" and case.values == "normal" and not refused:
            found.append(case)

    config = settings(max_examples=100, phases=(Phase.generate,), database=None, deadline=None, suppress_health_check=list(HealthCheck))
    hypothesis.seed(seed)(config(given(cases(subject, (world_size,)))(collect)))()
    if not found:
        raise CaseError(f"Expected {subject.name} to accept a case of world_size={world_size} but it refuses all that were drawn")
    return max(found, key=lambda case: (-_collectives(subject, case), -_options_changed(case.config), _total_size(case.config), repr(case)))


def _collectives(subject: Subject, case: Case) -> int:
    """How many collectives the subject declares: options that need more of them are not what is typical."""
    declared = subject.communication(case.config, case.world_size) if subject.communication else ()
    return sum(collective.count for collective in declared)


def _options_changed(config: Any) -> int:
    """How many switches and choices differ from their default."""
    return sum(
        getattr(config, field.name) != field.default for field in dataclasses.fields(config) if isinstance(field.default, (bool, str))
    )


def _total_size(config: Any) -> int:
    """The sum of a config's sizes."""
    numbers = [getattr(config, field.name) for field in dataclasses.fields(config)]
    return sum(number for number in numbers if isinstance(number, int) and not isinstance(number, bool))


def property_test(
    subject: Subject, *, world_sizes: Sequence[int] | None = None, checks: Collection[str] | None = None
) -> Callable[[], None]:
    """A pytest test, run by Hypothesis under the active profile: for every case of the subject, all checks hold.

    Args:
        world_sizes: TP degrees to draw from; None = those of ``--tpverify-world-sizes``, or 1, 2, 3, 4, 5, 6 and 8.
        checks: ids of the checks to apply; None = all.
    """
    chosen = os.environ.get(options.WORLD_SIZES_VARIABLE)
    allowed = world_sizes if world_sizes is not None else (options.parse_world_sizes(chosen) if chosen else ALL_WORLD_SIZES)
    session = Session(addressed(subject), checks, os.environ.get(options.WORLD_VARIABLE, options.WORLDS[0]))

    def holds(case: Case) -> None:
        __tracebackhide__ = True
        violations = session.run(case)
        if violations:
            raise CheckFailed("\n\n".join(failure_report(violation) for violation in violations))

    # The first operation of a process takes seconds, so no deadline fits; the report explains, so Hypothesis need not trace lines.
    phases = (Phase.explicit, Phase.reuse, Phase.generate, Phase.target, Phase.shrink)
    unhurried = settings(deadline=None, suppress_health_check=list(HealthCheck), phases=phases)
    driven = unhurried(given(cases(session.subject, allowed))(holds))

    def test() -> None:
        __tracebackhide__ = True
        started = time.monotonic()
        failed: tuple[Violation, ...] = ()
        try:
            driven()
        except CheckFailed:
            failed = session.last
            raise
        finally:
            record_result(session.result(failed, time.monotonic() - started).as_dict())

    test.__name__ = f"test_{subject.name.replace(':', '_').replace('.', '_')}"
    test.__doc__ = f"All checks hold for {subject.name}."
    return test


def record_result(result: dict[str, Any]) -> None:
    """Leave a property test's result for the pytest plugin."""
    pending_results.append(result)
