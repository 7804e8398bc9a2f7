"""The table at the end: what ran where and how it came out, and what did not run and why."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

WIDTH = 200


@dataclass(frozen=True)
class Row:
    """What one test did at one place.

    Attributes:
        what: name of the row; one of ``plan.COUNTS``, or more.
        world, device, dtype: where, and in what.
        sizes: world sizes.
        cases: how many cases were run.
        violations: of checks that had to hold.
        planted, caught: bugs that were planted, and that the expected checks found.
        missing: why it was not run, or "".
    """

    what: str
    world: str
    device: str
    dtype: str
    sizes: tuple[int, ...]
    cases: int = 0
    violations: int = 0
    planted: int = 0
    caught: int = 0
    missing: str = ""

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Row:
        """Read back :meth:`as_dict`."""
        return cls(**{**data, "sizes": tuple(data["sizes"])})


@dataclass
class _Line:
    sizes: set[int] = field(default_factory=set)
    tests: int = 0
    cases: int = 0
    violations: int = 0
    planted: int = 0
    caught: int = 0

    def add(self, row: Row) -> None:
        """Take in one test."""
        self.sizes |= set(row.sizes)
        self.tests += 1
        self.cases += row.cases
        self.violations += row.violations
        self.planted += row.planted
        self.caught += row.caught

    def outcome(self, missing: str) -> str:
        """In words."""
        if missing:
            return f"not run: {missing}"
        if self.caught < self.planted:
            return f"FAILED: {self.planted - self.caught} of {self.planted} bugs missed"
        if self.violations:
            return "FAILED"
        return f"{self.caught} of {self.planted} bugs caught" if self.planted else "held"


def summarised(rows: Iterable[Row]) -> list[tuple[str, ...]]:
    """The table's lines: what, world, device, dtype, world sizes, tests, cases, violations, outcome."""
    lines: dict[tuple[str, str, str, str, str], _Line] = {}
    for row in rows:
        lines.setdefault((row.what, row.world, row.device, row.dtype, row.missing), _Line()).add(row)
    return [
        (
            what,
            world,
            device,
            dtype,
            ", ".join(map(str, sorted(line.sizes))),
            str(line.tests),
            "-" if missing else str(line.cases),
            "-" if missing else str(line.violations),
            line.outcome(missing),
        )
        for (what, world, device, dtype, missing), line in lines.items()
    ]


def as_text(rows: Sequence[Row]) -> str:
    """The table, and one line that sums it up."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in ("what", "world", "device", "dtype", "world sizes", "tests", "cases", "violations", "outcome"):
        table.add_column(column, justify="right" if column in ("tests", "cases", "violations") else "left", overflow="fold")
    for line in summarised(rows):
        table.add_row(*line)
    stream = io.StringIO()
    Console(file=stream, width=WIDTH, color_system=None).print(table)
    return stream.getvalue() + closing_line(rows)


def closing_line(rows: Sequence[Row]) -> str:
    """Tests, cases, violations, bugs caught and tests not run."""
    ran = [row for row in rows if not row.missing]
    planted = sum(row.planted for row in ran)
    return (
        f"{len(ran)} tests ran, {sum(row.cases for row in ran)} cases, {sum(row.violations for row in ran)} violations, "
        f"{sum(row.caught for row in ran)} of {planted} planted bugs caught; {len(rows) - len(ran)} tests not run"
    )
