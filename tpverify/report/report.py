"""What every report format is given: results, ledgers and errors of one session, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tpverify.ledger.ledger import Ledger
from tpverify.result import Result
from tpverify.violation import Violation


@dataclass(frozen=True)
class SubjectFailure:
    """A subject that could not be verified.

    Attributes:
        subject: its name, as the user gave it.
        kind: ``usage`` (the subject or an option is wrong), ``internal`` (an unexpected exception), ``interrupted``, or
            ``unavailable`` (the device that was asked for is not there).
        message: what happened.
    """

    subject: str
    kind: str
    message: str


@dataclass(frozen=True)
class Report:
    """One session.

    Attributes:
        results: one for each subject that was verified, in order.
        seed: the session's seed; None where each property has its own.
        ledgers: by subject name, the ledger of one run of it; may be empty.
        failures: subjects that could not be verified.
    """

    results: tuple[Result, ...]
    seed: int | None = None
    ledgers: Mapping[str, Ledger] = field(default_factory=dict)
    failures: tuple[SubjectFailure, ...] = ()

    @property
    def passed(self) -> bool:
        """True if every subject was verified, checked something and violated nothing."""
        return bool(self.results) and not self.failures and all(result.passed for result in self.results)

    @property
    def violations(self) -> tuple[Violation, ...]:
        """The violations of all results, in order."""
        return tuple(violation for result in self.results for violation in result.violations)


def verdict(result: Result) -> str:
    """``held``, ``violated`` or ``nothing checked``."""
    if result.violations:
        return "violated"
    return "held" if result.passed else "nothing checked"


def result_from_dict(data: Mapping[str, Any]) -> Result:
    """Read back :meth:`tpverify.result.Result.as_dict`; ``seconds`` is 0 because the dict leaves it out."""
    return Result(
        subject=data["name"],
        cases_run=data["cases_run"],
        world_sizes={int(size): count for size, count in data["world_sizes"].items()},
        dtypes=dict(data.get("dtypes", {})),
        checks=dict(data["checks"]),
        rejected=data["rejected"],
        violations=tuple(Violation(**{**item, "ranks": tuple(item["ranks"])}) for item in data["violations"]),
    )
