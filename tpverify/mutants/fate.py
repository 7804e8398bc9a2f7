"""The fate of one planted bug: cases until the named check fires, the shrunk case, and what the report on it names."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tpverify.case import Case, parse_case
from tpverify.checks.catalogue import selected
from tpverify.exploration import Explorer
from tpverify.lookup import config_types
from tpverify.mutants.margins import WIDE
from tpverify.mutants.mutant import Mutant
from tpverify.mutants.naming import is_of_module, names_layer, names_pattern, names_ranks
from tpverify.options import DTYPES
from tpverify.session import Key, Session, key_of
from tpverify.strategies import ALL_WORLD_SIZES, DEFAULT_WORLD_SIZES
from tpverify.violation import Violation

MAX_EXAMPLES = 120
"""Cases drawn of a mutant before it counts as survived: about as many as ``tpverify verify`` draws."""


@dataclass(frozen=True)
class Fate:
    """What became of a mutant.

    Attributes:
        id, kind, subject: of the mutant; ``subject`` is the built-in one that it mutates.
        status: ``killed``: some check fired. ``survived``: none did. ``equivalent``: none did, and none should.
        expected_check: the check that must kill it.
        killed_by: the expected check if it fired, otherwise the first other that did; "" if none.
        fired: all checks that fired in any case, in the checks' order.
        cases: cases run until ``killed_by`` first fired; all that were drawn if nothing did.
        seconds: wall time until then, seconds.
        case: the shrunk case, as text; "" if nothing fired or shrinking was not asked for.
        violations: what the shrunk case shows, of all checks.
        dtype: the working dtype of all cases.
        ratio: the largest error on the shrunk case, in half precision on any, relative to its bound, as ``killed_by`` sees it;
            None where no error killed it, but a missing tensor, say, or where that check demands equality.
        layer, ranks, pattern: whether the report on the shrunk case names each as the mutant says.
    """

    id: str
    kind: str
    subject: str
    status: str
    expected_check: str
    killed_by: str = ""
    fired: tuple[str, ...] = ()
    cases: int = 0
    seconds: float = 0.0
    case: str = ""
    violations: tuple[Violation, ...] = field(default=(), repr=False)
    dtype: str = DTYPES[0]
    ratio: float | None = None
    layer: bool = False
    ranks: bool = False
    pattern: bool = False

    @property
    def by_named_check(self) -> bool:
        """Whether the check that must kill it did."""
        return self.killed_by == self.expected_check

    @property
    def diagnosis(self) -> str:
        """The line of diagnosis that a reader meets first: of the killing check, otherwise of any."""
        lines = [violation.diagnosis for violation in self.violations if violation.check == self.killed_by]
        return next(filter(None, [*lines, *(violation.diagnosis for violation in self.violations)]), "")

    def as_dict(self) -> dict[str, Any]:
        """The fate as JSON-ready data."""
        shown = ("id", "kind", "subject", "status", "killed_by", "expected_check", "diagnosis", "cases", "case", "dtype")
        named = {"layer": self.layer, "ranks": self.ranks, "pattern": self.pattern} if self.case else {}
        data = {name: getattr(self, name) for name in shown}
        return {**data, "seconds": round(self.seconds, 3), "fired": list(self.fired), "named": named, "ratio": self.ratio}


class WatchedSession(Session):
    """Remembers when each check first fired, in cases drawn and in cases of shrinking."""

    def __init__(self, mutant: Mutant) -> None:
        super().__init__(mutant.subject)
        self.started = time.monotonic()
        self.first: dict[str, tuple[int, float]] = {}

    @property
    def spent(self) -> float:
        """Seconds since the session began."""
        return time.monotonic() - self.started

    @property
    def fired(self) -> tuple[str, ...]:
        """The checks that have fired, in the checks' order."""
        return tuple(check for check in self.checks if check in self.first)

    def run(self, case: Case) -> tuple[Violation, ...]:
        """As in a session that nobody watches."""
        violations = super().run(case)
        for violation in violations:
            self.first.setdefault(violation.check, (self.cases_run, self.spent))
        return violations


def fate_of(mutant: Mutant, *, seed: int = 0, max_examples: int = MAX_EXAMPLES, shrink: bool = True, hasty: bool = True) -> Fate:
    """Draw cases until the mutant's own check fires, then shrink the case.

    Args:
        max_examples: cases drawn at most.
        shrink: False: stop at the first kill; the fate then holds no case, and names nothing.
        hasty: shrink by the killing check alone and without looking into every case on the way, which takes half the time.

    Raises:
        SubjectError: the mutated subject contradicts itself.
    """
    session = WatchedSession(mutant)
    session.measure = mutant.dtype not in WIDE
    sizes = ALL_WORLD_SIZES if mutant.kind == "conditional" else DEFAULT_WORLD_SIZES
    explorer = Explorer(session, sizes, max_examples, seed, (mutant.dtype,))
    shown = explorer.explore(None, lambda violations: any(violation.check == mutant.check for violation in violations))
    killed_by = mutant.check if mutant.check in session.first else next(iter(session.fired), "")
    cases, seconds = session.first.get(killed_by, (session.cases_run, session.spent))
    fate = Fate(
        id=mutant.id,
        kind=mutant.kind,
        subject=mutant.base,
        status="killed" if killed_by else "equivalent" if mutant.equivalent else "survived",
        expected_check=mutant.check,
        killed_by=killed_by,
        fired=session.fired,
        cases=cases,
        seconds=seconds,
        dtype=mutant.dtype,
    )
    if not killed_by or not shrink:
        return fate
    key = _first_tensor(session, {key: case for key, case in shown.items() if key[0] == killed_by})
    session.hasty = hasty
    if hasty:  # diagnosing what the other checks find takes longer than running the case
        session.checks = {killed_by: session.checks[killed_by]}
    told = explorer.shrink_all({key: shown[key]})
    case = parse_case(next(violation.case for violation in told if key_of(violation) == key), config_types(session.subject))
    session.hasty, session.measure, session.checks = False, True, selected(None)
    if mutant.dtype in WIDE:
        session.largest.clear()
    found = session.again(case)
    if hasty and key not in map(key_of, found):  # rounding led the shrinking astray
        return fate_of(mutant, seed=seed, max_examples=max_examples, hasty=False)
    ratio = session.largest.get((killed_by, case.dtype), math.inf)
    fired = {*fate.fired, *session.first, *(violation.check for violation in found)}
    fate = dataclasses.replace(
        fate,
        fired=tuple(check for check in session.checks if check in fired),
        case=repr(case),
        ratio=float(f"{ratio:.4g}") if 1 < ratio < math.inf else None,  # below: killed by what is missing, or has another shape
    )
    return _named(fate, mutant, explorer.explained(found))


def _first_tensor(session: Session, shown: dict[Key, Case]) -> Key:
    """The first failure that is not of a module as a whole, which only shows where a case is looked into."""
    of_modules = {key_of(violation) for case in shown.values() for violation in session.run(case) if is_of_module(violation)}
    return min(sorted(set(shown) - of_modules) or shown)


def _named(fate: Fate, mutant: Mutant, violations: Sequence[Violation]) -> Fate:
    """The fate with what its shrunk case shows, and what that names."""
    of_check = [violation for violation in violations if violation.check == fate.killed_by]
    return dataclasses.replace(
        fate,
        violations=tuple(violations),
        layer=names_layer(mutant, of_check),
        ranks=names_ranks(mutant, of_check),
        pattern=names_pattern(mutant, violations),
    )
