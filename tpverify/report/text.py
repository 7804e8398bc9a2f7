"""The text report: a table of subjects, one failure report a violation, and a closing line."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tpverify.options import DTYPES
from tpverify.report.report import Report, verdict
from tpverify.result import Result
from tpverify.violation import failure_report

PLAIN_WIDTH = 200
"""Columns at most of a table that goes to no terminal: wide enough that nothing wraps."""

STYLES = {"held": "green", "violated": "bold red", "nothing checked": "yellow"}


def write_text(report: Report) -> str:
    """The whole report as plain text, without colours."""
    stream = io.StringIO()
    Console(file=stream, width=PLAIN_WIDTH, color_system=None).print(render(report), soft_wrap=True)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def render(report: Report, *, verbose: bool = False) -> RenderableType:
    """The whole report for a rich console; ``verbose`` adds how often each check applied."""
    parts: list[RenderableType] = [_table(report)]
    if verbose:
        parts.append(Text("\n".join(_check_counts(result) for result in report.results) + "\n"))
    for violation in report.violations:
        parts.append(Text(failure_report(violation) + "\n"))
    for failure in report.failures:
        parts.append(Text(f"tpverify: {failure.subject} was not verified: {failure.message}\n", style="red"))
    parts.append(Text(closing_line(report), style="green" if report.passed else "bold red"))
    return Group(*parts)


def checks_held(result: Result) -> int:
    """How many check ids applied to the subject and were not violated."""
    violated = {violation.check for violation in result.violations}
    return sum(1 for check, count in result.checks.items() if count and check not in violated)


def closing_line(report: Report) -> str:
    """``2 subjects, 200 cases, 9 checks held, 0 violations``."""
    parts = [
        _plural(len(report.results), "subject"),
        _plural(sum(result.cases_run for result in report.results), "case") + _of_dtypes(report),
        f"{_plural(sum(checks_held(result) for result in report.results), 'check')} held",
        _plural(len(report.violations), "violation"),
    ]
    if report.failures:
        parts.append(f"{_plural(len(report.failures), 'subject')} not verified")
    return ", ".join(parts)


def _table(report: Report) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("subject", no_wrap=True)
    dtypes = ("dtypes",) if _several_dtypes(report) else ()
    for column in ("cases", *dtypes, "world sizes", "checks held", "rejected", "verdict", "seconds"):
        table.add_column(column, justify="left" if column in ("dtypes", "world sizes", "verdict") else "right", no_wrap=True)
    for result in report.results:
        table.add_row(
            Text(result.subject),
            str(result.cases_run),
            *([_counted(result.dtypes)] if dtypes else []),
            ", ".join(map(str, sorted(result.world_sizes))),
            str(checks_held(result)),
            str(result.rejected),
            Text(verdict(result), style=STYLES[verdict(result)]),
            f"{result.seconds:.1f}",
        )
    return table


def _several_dtypes(report: Report) -> bool:
    """Whether anything ran in another dtype than the usual one, so that it is worth a word."""
    return any(set(result.dtypes) - {DTYPES[0]} for result in report.results)


def _counted(dtypes: Mapping[str, int]) -> str:
    return ", ".join(f"{dtype} {dtypes[dtype]}" for dtype in DTYPES if dtype in dtypes)


def _check_counts(result: Result) -> str:
    counts = ", ".join(f"{check} {count}" for check, count in sorted(result.checks.items()))
    return f"{result.subject}: {counts or 'no check'}"


def _of_dtypes(report: Report) -> str:
    if not _several_dtypes(report):
        return ""
    total: Counter[str] = Counter()
    for result in report.results:
        total.update(result.dtypes)
    return f" ({_counted(total)})"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
