"""The ledger for people: a table of one rank's collectives, the rows behind it, and the difference of two ledgers."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from tpverify.ledger.ledger import Ledger
from tpverify.ledger.record import CallSite, Record


@dataclass(frozen=True)
class LedgerRow:
    """Equal collectives of the lowest rank, counted.

    Attributes:
        phase, module, kind, reduce_op: as in :class:`tpverify.ledger.record.Record`; ``module`` is ``(root)`` for the root.
        count: how many.
        message: dtype and shape of one message, e.g. ``float64[2, 3]``.
        elements, nbytes: of all of them together.
        call_site: the first one's, shortened.
    """

    phase: str
    module: str
    kind: str
    reduce_op: str
    count: int
    message: str
    elements: int
    nbytes: int
    call_site: str


def ledger_rows(ledger: Ledger) -> list[LedgerRow]:
    """Rows in the order of first issue; equal in phase, module, kind, reduce op and message means one row."""
    groups: dict[tuple[str, str, str, str, str], list[Record]] = {}
    for record in ledger.rank(ledger.ranks[0]) if len(ledger) else ():
        key = (record.phase, record.module or "(root)", record.kind, record.reduce_op, _message(record))
        groups.setdefault(key, []).append(record)
    return [_row(key, records) for key, records in groups.items()]


def ledger_table(ledger: Ledger) -> Table:
    """The rows as a table, with totals."""
    rows = ledger_rows(ledger)
    table = Table(box=box.SIMPLE, show_footer=bool(rows), pad_edge=False)
    columns = ("phase", "module", "collective", "op", "count", "message", "elements", "bytes", "call site")
    totals = ("total", "", "", "", f"{sum(row.count for row in rows)}", "", f"{ledger.elements():,}", f"{ledger.nbytes():,}", "")
    for column, total in zip(columns, totals, strict=True):
        numeric = column in ("count", "elements", "bytes")
        table.add_column(column, Text(total), justify="right" if numeric else "left", overflow="fold", no_wrap=numeric)
    for row in rows:
        cells = (row.phase, row.module, row.kind, row.reduce_op, str(row.count), row.message, f"{row.elements:,}", f"{row.nbytes:,}")
        table.add_row(*map(Text, (*cells, row.call_site)))
    return table


def ledger_difference(expected: Ledger, found: Ledger) -> str:
    """A unified diff of what each rank issued, or "" if nothing differs; call sites and group names do not count."""
    lines = difflib.unified_diff(list(_lines(expected)), list(_lines(found)), "expected", "found", lineterm="", n=2)
    return "\n".join(lines)


def _row(key: tuple[str, str, str, str, str], records: list[Record]) -> LedgerRow:
    phase, module, kind, reduce_op, message = key
    elements, nbytes = sum(record.elements for record in records), sum(record.nbytes for record in records)
    site = records[0].call_site
    return LedgerRow(phase, module, kind, reduce_op, len(records), message, elements, nbytes, _short(site) if site else "")


def _short(site: CallSite) -> str:
    """``file:line`` with the part of the path that says nothing left out: the current folder, or all up to site-packages."""
    path = Path(site.filename)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    elif "site-packages" in path.parts:
        path = Path(*path.parts[path.parts.index("site-packages") + 1 :])
    return f"{path.as_posix()}:{site.line}"


def _message(record: Record) -> str:
    inputs, outputs = (record.input_sizes, record.input_dtypes), (record.output_sizes, record.output_dtypes)
    sizes, dtypes = inputs if record.kind == "reduce_scatter" or not record.output_sizes else outputs
    return ", ".join(f"{dtype}{list(size)}" for size, dtype in zip(sizes, dtypes, strict=False))


def _lines(ledger: Ledger) -> Iterator[str]:
    for rank in ledger.ranks:
        for record in ledger.rank(rank):
            members = ",".join(map(str, record.group_ranks))
            yield f"rank {rank}  {record.phase:<9} {record.module or '(root)'}  {record.describe()}  group [{members}]"
