"""What an adequacy run came to: plain data, which every report of it reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA_VERSION = 1

STATUSES = {
    "killed": "a check notices it",
    "unnoticed": "no check notices it",
    "equivalent": "there is nothing to notice: it changes nothing that is used, or rounding only",
    "untested": "it could not be tried",
}

LOOKS_LIKE = {
    "hole": "results change and no check notices: a hole in the checks",
    "unneeded": "results do not change without it: the collective looks unneeded",
    "barrier": "a barrier carries no data, so that no result shows whether it is needed",
    "no effect": "the ranks are handed the same, or something that nobody uses",
    "rounding": "results change by a rounding, no more",
    "one rank": "it was never carried out by more than one rank",
    "no case": "no case that was drawn can show it",
}


@dataclass(frozen=True)
class Outcome:
    """One operator at one site.

    Attributes:
        operator: see :data:`tpverify.mutants.perturbation.OPERATORS`.
        ranks: ``all`` or ``one``.
        status: one of ``STATUSES``.
        killed_by: id of the first check that notices it, or "".
        looks_like: one of ``LOOKS_LIKE``; "" where it is killed.
        evidence: what has been seen, in a sentence; "" where it is killed.
        cases: how many cases were run with it.
        case: the text of the case that shows it.
    """

    operator: str
    ranks: str
    status: str
    killed_by: str = ""
    looks_like: str = ""
    evidence: str = ""
    cases: int = 0
    case: str = ""


@dataclass(frozen=True)
class SiteOutcome:
    """One site and all that was done to it.

    Attributes:
        site: in words.
        module, phase, kind, reduce_op, ordinal, group: see :class:`tpverify.mutants.sites.Site`.
        call_site: the user's line, ``file:line``, or "".
        world_sizes: numbers of ranks that carried it out.
        perturbations: the outcomes.
    """

    site: str
    module: str
    phase: str
    kind: str
    reduce_op: str
    ordinal: int
    group: str
    call_site: str
    world_sizes: tuple[int, ...]
    perturbations: tuple[Outcome, ...] = ()


@dataclass(frozen=True)
class AdequacyResult:
    """How much of what may go wrong in a subject's communication its checks notice.

    Attributes:
        subject: name of the subject.
        sites: in the order in which they are first issued.
        cases_run: cases run unperturbed.
        perturbed: cases run perturbed.
        failing: (case, check) of unperturbed cases that fail: no perturbation is tried on them.
        left_out: number of calls that were not perturbed, by reason.
        seconds: wall time, seconds.
    """

    subject: str
    sites: tuple[SiteOutcome, ...]
    cases_run: int
    perturbed: int
    failing: tuple[tuple[str, str], ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def outcomes(self) -> Iterator[tuple[SiteOutcome, Outcome]]:
        """All outcomes, with their sites."""
        return ((site, outcome) for site in self.sites for outcome in site.perturbations)

    @property
    def holes(self) -> tuple[tuple[SiteOutcome, Outcome], ...]:
        """What goes unnoticed although it changes results."""
        return tuple(pair for pair in self.outcomes if pair[1].looks_like == "hole")

    @property
    def unneeded(self) -> tuple[SiteOutcome, ...]:
        """Sites that look unneeded: that is waste, and no fault."""
        return tuple(site for site in self.sites if any(_looks_unneeded(outcome) for outcome in site.perturbations))

    @property
    def passed(self) -> bool:
        """True if something was perturbed, nothing is a hole in the checks, and the unperturbed subject holds."""
        return self.perturbed > 0 and not self.holes and not self.failing

    def counts(self) -> dict[str, int]:
        """Number of outcomes by status; ``hole`` and ``unneeded`` apart."""
        counted = dict.fromkeys(("killed", "hole", "unneeded", "equivalent", "untested", "barrier"), 0)
        for _, outcome in self.outcomes:
            counted[outcome.looks_like if outcome.status == "unnoticed" else outcome.status] += 1
        return counted

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready data; ``seconds`` is left out so that equal seeds give equal documents."""
        return {
            "schema_version": SCHEMA_VERSION,
            "subject": self.subject,
            "passed": self.passed,
            "counts": self.counts(),
            "cases_run": self.cases_run,
            "perturbed": self.perturbed,
            "failing": [{"case": case, "check": check} for case, check in self.failing],
            "left_out": dict(self.left_out),
            "sites": [{**asdict(site), "world_sizes": list(site.world_sizes), "perturbations": _dicts(site)} for site in self.sites],
        }


def _dicts(site: SiteOutcome) -> list[dict[str, Any]]:
    return [asdict(outcome) for outcome in site.perturbations]


def _looks_unneeded(outcome: Outcome) -> bool:
    return outcome.operator == "drop" and outcome.ranks == "all" and outcome.looks_like == "unneeded"
