"""What a campaign came to: score, survivors, wrong checks, flagged controls, and how often the report named the fault."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tpverify.mutants.fate import Fate
from tpverify.mutants.margins import LEAST, WIDE, Margin, Ratios, Strength, margins_of
from tpverify.mutants.mutant import KINDS, Mutant
from tpverify.violation import Violation

SCHEMA_VERSION = 1

NAMED = 0.95
"""Share of the killed mutants whose layer, rank set and pattern the report must name, each."""


@dataclass(frozen=True)
class Pass:
    """What verifying a control came to.

    Attributes:
        id: of the control, or of a built-in subject as it is.
        cases: cases run.
        applied: checks that had something to look at.
        violations: the false alarms.
        largest: by check and working dtype, the largest error of any tensor relative to its bound.
    """

    id: str
    cases: int
    applied: tuple[str, ...]
    violations: tuple[Violation, ...] = ()
    largest: Ratios = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether something was checked and nothing flagged."""
        return self.cases > 0 and bool(self.applied) and not self.violations


@dataclass(frozen=True)
class Trouble:
    """A mutant or control that the harness could not try.

    Attributes:
        id: of either.
        message: what happened, in one line.
        traceback: of the exception, or "".
    """

    id: str
    message: str
    traceback: str = ""


@dataclass(frozen=True)
class Campaign:
    """Outcome of a campaign.

    Attributes:
        seed: decided which cases were drawn.
        whole: whether all mutants and controls were tried.
        fates: of the mutants, in the catalogue's order.
        passes: of the controls.
        troubles: what could not be tried.
        mutants: what was asked for, by id.
        interrupted: whether it was ended before all had their turn.
    """

    seed: int
    whole: bool
    fates: tuple[Fate, ...]
    passes: tuple[Pass, ...] = ()
    troubles: tuple[Trouble, ...] = ()
    mutants: Mapping[str, Mutant] = field(default_factory=dict)
    interrupted: bool = False

    @property
    def bugs(self) -> tuple[Fate, ...]:
        """The mutants that a check can tell from correct code."""
        return tuple(fate for fate in self.fates if not self.mutants[fate.id].equivalent)

    @property
    def killed(self) -> tuple[Fate, ...]:
        """Those killed by their named check."""
        return tuple(fate for fate in self.bugs if fate.status == "killed" and fate.by_named_check)

    @property
    def survivors(self) -> tuple[Fate, ...]:
        """Bugs that nothing noticed."""
        return tuple(fate for fate in self.bugs if fate.status == "survived")

    @property
    def wrong_check(self) -> tuple[Fate, ...]:
        """Bugs that another check noticed, and not the named one."""
        return tuple(fate for fate in self.bugs if fate.status == "killed" and not fate.by_named_check)

    @property
    def refuted(self) -> tuple[Fate, ...]:
        """Mutants said to be equivalent that a check tells apart all the same."""
        return tuple(fate for fate in self.fates if self.mutants[fate.id].equivalent and fate.status == "killed")

    @property
    def flagged(self) -> tuple[Pass, ...]:
        """Correct code that did not pass."""
        return tuple(control for control in self.passes if not control.passed)

    @property
    def score(self) -> float:
        """Share of the bugs that were killed by their named check; 1 where all mutants are equivalent, 0 where there are none."""
        return len(self.killed) / len(self.bugs) if self.bugs else float(bool(self.fates))

    def unnamed(self, what: str) -> tuple[Fate, ...]:
        """Killed bugs whose report does not name their ``layer``, ``ranks`` or ``pattern``."""
        return tuple(fate for fate in self.killed if not getattr(fate, what))

    def named(self, what: str) -> float:
        """Share of the killed bugs whose report names their ``layer``, ``ranks`` or ``pattern``, of those for which one can be stated."""
        stated = len(self.killed) - self.unstated(what)
        return 1 - len(self.unnamed(what)) / stated if stated else 1.0

    def unstated(self, what: str) -> int:
        """Killed bugs for which no layer, rank set or pattern can be stated beforehand, so that none counts."""
        field, anything = {"layer": ("module", "*"), "ranks": ("ranks", ""), "pattern": ("diagnosis", "")}[what]
        return sum(getattr(self.mutants[fate.id], field) == anything for fate in self.killed)

    @property
    def strengths(self) -> tuple[Strength, ...]:
        """How clearly each bug is killed, where its check holds errors against a bound; the weakest first."""
        found = [Strength(fate.id, fate.killed_by, fate.dtype, fate.ratio) for fate in self.killed if fate.ratio is not None]
        return tuple(sorted(found, key=lambda strength: (strength.ratio, strength.id)))

    @property
    def margins(self) -> tuple[Margin, ...]:
        """Of every check and working dtype."""
        return margins_of(self.strengths, [control.largest for control in self.passes if control.passed])

    @property
    def narrow(self) -> tuple[Margin, ...]:
        """Margins that are too small."""
        return tuple(margin for margin in self.margins if margin.dtype in WIDE and margin.value < LEAST)

    @property
    def passed(self) -> bool:
        """All killed by their named check, nothing correct flagged, everything tried, margins wide; faults named often enough.

        The last counts for a whole campaign only: of a few mutants, one may be one too many.
        """
        named = not self.whole or self.interrupted or all(self.named(what) >= NAMED for what in ("layer", "ranks", "pattern"))
        wrong = self.refuted or self.flagged or self.troubles or self.narrow or self.interrupted
        return self.score == 1.0 and not wrong and named

    def as_dict(self) -> dict[str, Any]:
        """The campaign as one JSON-ready document; only the mutants' ``seconds`` differ between runs of one seed."""
        bugs = {fate.id for fate in self.bugs}
        killed = {fate.id for fate in self.killed}
        kinds = {kind: [fate.id for fate in self.fates if fate.kind == kind] for kind in KINDS}
        return {
            "schema_version": SCHEMA_VERSION,
            "passed": self.passed,
            "interrupted": self.interrupted,
            "seed": self.seed,
            "score": round(100 * self.score, 1),
            "counts": {
                "mutants": len(self.fates),
                "killed": len(self.killed),
                "killed_by_another_check": len(self.wrong_check),
                "survived": len(self.survivors),
                "equivalent": len(self.fates) - len(bugs),
                "refuted": len(self.refuted),
            },
            "kinds": {
                kind: {"mutants": len(ids), "killed": len(killed.intersection(ids)), "equivalent": len(set(ids) - bugs)}
                for kind, ids in kinds.items()
                if ids
            },
            "named": {
                what: {
                    "percent": round(100 * self.named(what), 1),
                    "missed": [fate.id for fate in self.unnamed(what)],
                    "unstated": self.unstated(what),
                }
                for what in ("layer", "ranks", "pattern")
            },
            "controls": [
                {
                    "id": control.id,
                    "passed": control.passed,
                    "cases": control.cases,
                    "violations": [violation.as_dict() for violation in control.violations],
                }
                for control in self.passes
            ],
            "margins": [margin.as_dict() for margin in self.margins],
            "mutants": [self._mutant(fate) for fate in self.fates],
            "errors": [{"id": trouble.id, "message": trouble.message} for trouble in self.troubles],
        }

    def _mutant(self, fate: Fate) -> dict[str, Any]:
        mutant = self.mutants[fate.id]
        return {**fate.as_dict(), "story": mutant.story, "origin": mutant.origin, "equivalent": mutant.equivalent}
