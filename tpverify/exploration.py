"""Draws cases of a subject until enough have run, and shrinks every different failure by itself."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Flaky, Unsatisfiable

from tpverify.case import Case
from tpverify.checks.catalogue import COMPARING
from tpverify.errors import SubjectError
from tpverify.options import DTYPES
from tpverify.session import Key, Session, is_explained, key_of, size_of
from tpverify.strategies import cases
from tpverify.violation import Violation

CASES_AFTER_FAILURE = 50
"""How many more cases are drawn once one has failed, to find other failures beside it."""

BATCH = 10
"""Cases drawn from one seed: Hypothesis varies what it drew before, so many short runs see more kinds of cases than a long one."""

SEED_STEP = 1_000_003
"""Keeps the batches of neighbouring seeds apart."""

REPEATS = 4
"""Hypothesis may draw this many times the cases asked for, since it draws some of them again."""

SECONDS_AFTER_FAILURE = 300.0
"""How long drawing and shrinking may go on once a case has failed; cases are quick, so only a very slow subject gets there."""

CASES_TO_TELL = 10
"""How many cases are drawn to find one that is large enough for a pattern to fit."""

SECONDS_TO_TELL = 10.0
"""After which no more are drawn."""

BATCHES_TO_TELL = 1_000
"""The first batch of these: far beyond those that are explored."""

MOST_LARGER = 2
"""For how many failures that is done."""

MOST_SHRUNK = 12
"""How many different failures are shrunk, each by itself."""


class _Enough(Exception):
    """No more cases are wanted."""


class _Shown(Exception):
    """The case shows the failure that is being shrunk."""


def _meaning(violation: Violation) -> str:
    """The end of a diagnosis, which says what fits."""
    return violation.diagnosis.rpartition(": ")[2]


class Explorer:
    """Draws and shrinks cases with Hypothesis, reproducibly from one seed."""

    def __init__(
        self, session: Session, world_sizes: Sequence[int], max_examples: int, seed: int, dtypes: Sequence[str] = DTYPES[:1]
    ) -> None:
        self._session = session
        world = session.world
        self._cases = cases(session.subject, world_sizes, None if world is None else world.most_ranks, dtypes)
        if world is not None:
            world.check_ranks(max(world_sizes))
        self._max_examples = max_examples
        self._seed = seed
        self._patience = math.inf
        self._order = list(session.checks)
        self._batch_of: dict[Key, int] = {}

    def explore(
        self, progress: Callable[[int, int], None] | None, enough: Callable[[Sequence[Violation]], bool] | None = None
    ) -> dict[Key, Case]:
        """Draw cases, until the violations of one are ``enough``; the smallest case that showed each failure."""
        smallest: dict[Key, Case] = {}
        left = self._max_examples
        batch = 0

        def explore(case: Case) -> None:
            nonlocal left
            if left <= 0 or self._session.timed_out or time.monotonic() > self._patience:
                raise _Enough
            before = self._session.cases_run
            try:
                violations = self._session.run(case)
            except SubjectError:
                if smallest:  # what was found counts, whatever another case brings to light about the subject
                    raise _Enough from None
                raise
            left -= self._session.cases_run - before
            if violations:
                self._patience = min(self._patience, time.monotonic() + SECONDS_AFTER_FAILURE)
                left = min(left, CASES_AFTER_FAILURE)
            for violation in violations:
                known = smallest.get(key_of(violation))
                if known is None or size_of(case) < size_of(known):
                    smallest[key_of(violation)] = case
                    self._batch_of[key_of(violation)] = batch
            if progress is not None:
                progress(self._session.cases_run, self._max_examples)
            if enough is not None and enough(violations):
                raise _Enough

        with contextlib.suppress(_Enough):
            for batch in range(-(-REPEATS * self._max_examples // BATCH)):
                self._drive(explore, (Phase.generate,), batch)
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

    def explained(self, violations: Sequence[Violation]) -> list[Violation]:
        """The violations with what repairs and larger cases tell, where no pattern fits on their own."""
        found = list(self._session.explained(violations))
        held = [violation for violation in found if violation.check in COMPARING]
        explained = {violation.case for violation in held if is_explained(violation)}
        unexplained = dict.fromkeys(key_of(violation) for violation in held if violation.case not in explained)
        for key in list(unexplained)[:MOST_LARGER]:
            if not self._told(key):
                self._draw_larger(key)
        return [self._with_larger(violation) for violation in found]

    def _told(self, key: Key) -> list[Violation]:
        """What fits in other cases of the failure; rounding may, where a case is so odd that the fault hardly shows."""
        return [other for other in self._session.violations_of(key) if is_explained(other) and "rounding fits" not in other.diagnosis]

    def _draw_larger(self, key: Key) -> None:
        """A tensor of one number fits any pattern and none: draw until a case shows the same failure and tells more."""
        left, until = CASES_TO_TELL, time.monotonic() + SECONDS_TO_TELL

        def look(case: Case) -> None:
            nonlocal left
            if left <= 0 or self._told(key) or self._session.timed_out or time.monotonic() > min(until, self._patience):
                raise _Enough
            left -= 1
            with contextlib.suppress(SubjectError):
                self._session.run(case)

        with contextlib.suppress(_Enough):
            for batch in range(-(-CASES_TO_TELL // BATCH)):
                self._drive(look, (Phase.generate,), BATCHES_TO_TELL + batch)

    def _with_larger(self, violation: Violation) -> Violation:
        told = [] if is_explained(violation) else self._told(key_of(violation))
        if violation.world_size == 1:
            told = [other for other in told if other.world_size == 1]  # what more ranks do wrong is another matter
        if not told:
            return violation
        commonest = Counter(_meaning(other) for other in told).most_common(1)[0][0]
        alike = [other for other in told if _meaning(other) == commonest]
        first = min(alike, key=lambda other: (other.world_size, len(other.case), other.case))
        larger = f"{first.diagnosis} (in a larger case, of world size {first.world_size})"
        return dataclasses.replace(violation, diagnosis="; ".join(filter(None, (violation.diagnosis, larger))))

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
            self._drive(show, (Phase.generate, Phase.shrink), self._batch_of[key])
        except (_Shown, Flaky):
            return smallest
        return fallback

    def _drive(self, function: Callable[[Case], None], phases: tuple[Phase, ...], batch: int) -> None:
        config = settings(
            max_examples=BATCH,
            phases=phases,
            database=None,
            deadline=None,
            derandomize=False,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            verbosity=hypothesis.Verbosity.quiet,
        )
        test = hypothesis.seed(self._seed + batch * SEED_STEP)(config(given(self._cases)(function)))
        try:
            test()
        except Unsatisfiable as error:
            name = self._session.subject.name
            raise SubjectError(f"Expected configs of subject {name} to hold at least one config but none could be drawn") from error
