"""The measurements for people: a table for each question, and what it says in one line."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tpverify.bench.case_parts import Parts
from tpverify.bench.comparison import Row
from tpverify.bench.detection import Detection
from tpverify.bench.growth import Growth
from tpverify.bench.measurements import Measurements, machine
from tpverify.bench.stuck import Stuck
from tpverify.bench.throughput import Throughput
from tpverify.bench.timing import Spread

SLOWEST = 5
"""How many of the mutants that take longest to find are listed."""


def render(found: Measurements) -> RenderableType:
    """All tables, those without a figure left out."""
    told = machine()
    parts: list[RenderableType] = [
        Text(f"{told['cores']} cores, {told['processor']}, Python {told['python']}, torch {told['torch']}; ratios are of medians\n")
    ]
    tables = {
        "One forward and backward of all ranks, by every way to run them": found.rows and _comparison(found.rows),
        "Where the time of a case goes, milliseconds; 4 ranks": found.parts and _parts(found.parts),
        "What grows with what: seconds and peak memory": found.growth and _growth(found.growth),
        "From the last rank's getting stuck to the error, milliseconds": found.stuck and _stuck(found.stuck),
        "Test runs by pytest": found.throughput and _throughput(found.throughput),
        "Cases until a planted bug is found": found.detection and _detection(found.detection),
    }
    for title, table in tables.items():
        if table:
            parts += [Text(title, style="bold"), table]
    return Group(*parts)


def _table(words: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in words:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _milliseconds(seconds: float) -> str:
    return _number(1000 * seconds)


def _number(value: float) -> str:
    """Three digits, or all of them."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _spread(spread: Spread) -> tuple[str, str, str]:
    return _milliseconds(spread.median), _milliseconds(spread.min), _milliseconds(spread.max)


def _comparison(rows: Sequence[Row]) -> RenderableType:
    table = _table(("subject", "ranks", "hidden", "run by"), ("median ms", "min", "max", "x floor"))
    before = None
    for row in rows:
        what = (row.subject, str(row.world_size), str(row.hidden))
        table.add_row(*(what if what != before else ("", "", "")), row.runner, *_spread(row.spread), _number(row.ratio))
        before = what
    return table


def _parts(parts: Sequence[Parts]) -> RenderableType:
    table = _table(("subject", "hidden"), ("draw", "reference", "ranks", "checks", "whole", "floor", "x floor"))
    for each in parts:
        times = (each.draw, each.reference.median, each.ranks, each.checks.median, each.whole.median + each.draw, each.floor.median)
        table.add_row(each.subject, str(each.hidden), *map(_milliseconds, times), _number(each.ratio))
    return table


def _growth(growth: Sequence[Growth]) -> RenderableType:
    table = _table(("what", "over", "size"), ("seconds", "peak MiB", "exponent"))
    for series in growth:
        last = len(series.seconds) - 1
        for index, size in enumerate(series.series.sizes):
            what = (series.series.name, series.series.over) if index == 0 else ("", "")
            figures = (f"{series.seconds[index]:.3g}", f"{series.peak_bytes[index] / 2**20:.0f}")
            table.add_row(*what, str(size), *figures, f"{series.exponent:.2f}" if index == last else "")
    return table


def _stuck(stuck: Sequence[Stuck]) -> RenderableType:
    table = _table(("fault", "ranks"), ("median", "min", "max"))
    for each in stuck:
        table.add_row(each.fault, str(each.world_size), *_spread(each.spread))
    return table


def _throughput(runs: Sequence[Throughput]) -> RenderableType:
    table = _table(("processes",), ("cases", "seconds", "cases a second", "x one process"))
    for run in runs:
        figures = (str(run.cases), f"{run.seconds:.1f}", f"{run.rate:.1f}", f"{run.rate / runs[0].rate:.2f}")
        table.add_row(str(run.processes), *figures)
    return table


def _detection(found: Sequence[Detection]) -> RenderableType:
    medians = [each.median_cases for each in found]
    seeds = len(found[0].cases)
    missed = sum(each.missed for each in found)
    line = f"{len(found)} mutants, {seeds} seeds each: {statistics.median(medians):g} cases in the median, {max(medians):g} for the mutant"
    line += f" that takes longest; {missed} of {len(found) * seeds} searches missed it"
    return Group(Text(""), Text(line), *(Text(line) for line in _slowest(found)), Text(""))


def _slowest(found: Sequence[Detection]) -> Iterator[str]:
    for each in sorted(found, key=lambda each: -each.median_cases)[:SLOWEST]:
        yield f"  {each.id}: {each.median_cases:g} cases, at most {max(each.cases)}"
