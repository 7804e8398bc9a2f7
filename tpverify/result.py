"""What verifying one subject came to: the only thing, beside the ledger, that reports see."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tpverify.violation import Violation


@dataclass(frozen=True)
class Result:
    """Outcome of :func:`tpverify.verify` for one subject.

    Attributes:
        subject: name of the subject.
        cases_run: number of distinct executions of a case, shrinking included.
        world_sizes: cases run by TP degree, ascending.
        checks: how often each check held something to look at, by check id; 0 = it never applied to this subject.
        rejected: cases the subject says must be refused, and that were refused.
        violations: the broken checks, each on the smallest case found that shows it.
        seconds: wall time, seconds.
        dtypes: cases run by ``Case.dtype``.
    """

    subject: str
    cases_run: int
    world_sizes: dict[int, int] = field(default_factory=dict)
    checks: dict[str, int] = field(default_factory=dict)
    rejected: int = 0
    violations: tuple[Violation, ...] = ()
    seconds: float = 0.0
    dtypes: dict[str, int] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """True if at least one check had a case to look at and none was violated."""
        return self.cases_run > 0 and any(self.checks.values()) and not self.violations

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON-ready data; ``seconds`` is left out so that equal seeds give equal documents."""
        return {
            "name": self.subject,
            "passed": self.passed,
            "cases_run": self.cases_run,
            "world_sizes": {str(size): count for size, count in sorted(self.world_sizes.items())},
            "dtypes": dict(self.dtypes),
            "checks": dict(sorted(self.checks.items())),
            "rejected": self.rejected,
            "violations": [violation.as_dict() for violation in self.violations],
        }
