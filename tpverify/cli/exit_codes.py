"""Exit codes, and which of several counts."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

from tpverify.report.report import Report


class ExitCode(IntEnum):
    """What the process ends with; ``NOTHING_CHECKED`` keeps a run of zero cases from looking like success."""

    HELD = 0
    VIOLATED = 1
    USAGE = 2
    INTERNAL = 3
    NOTHING_CHECKED = 5
    INTERRUPTED = 130


PRIORITY = (
    ExitCode.INTERRUPTED,
    ExitCode.INTERNAL,
    ExitCode.USAGE,
    ExitCode.VIOLATED,
    ExitCode.NOTHING_CHECKED,
    ExitCode.HELD,
)
"""Of several subjects' codes, the first in this order is the process's."""

FAILURES = {
    "usage": ExitCode.USAGE,
    "internal": ExitCode.INTERNAL,
    "interrupted": ExitCode.INTERRUPTED,
    "unavailable": ExitCode.NOTHING_CHECKED,
}


def worst(codes: Iterable[ExitCode]) -> ExitCode:
    """The code that counts; ``NOTHING_CHECKED`` where there is none."""
    return min(codes, key=PRIORITY.index, default=ExitCode.NOTHING_CHECKED)


def exit_code(report: Report) -> ExitCode:
    """The code of a whole session."""
    codes = [FAILURES[failure.kind] for failure in report.failures]
    for result in report.results:
        if result.violations:
            codes.append(ExitCode.VIOLATED)
        else:
            codes.append(ExitCode.HELD if result.passed else ExitCode.NOTHING_CHECKED)
    return worst(codes)
