"""Two ledgers beside each other: how many collectives of each kind, in which phase, and how much they carry."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from tpverify.ledger.ledger import Ledger

Traffic = tuple[int, int]
"""How many collectives, and the elements of their messages together."""


def traffic(ledger: Ledger) -> dict[tuple[str, str, str], Traffic]:
    """Of the lowest rank, by phase, kind and reduce op, in order of first issue."""
    found: dict[tuple[str, str, str], Traffic] = {}
    for record in ledger.rank(ledger.ranks[0]) if len(ledger) else ():
        key = (record.phase, record.kind, record.reduce_op)
        count, elements = found.get(key, (0, 0))
        found[key] = count + 1, elements + record.elements
    return found


def comparison_table(ledgers: Sequence[tuple[str, Ledger]]) -> Table:
    """One line for each phase, kind and reduce op that any of the ledgers holds; the last column says whether they agree.

    Args:
        ledgers: with the names of what issued them.
    """
    table = Table("phase", "collective", "op", box=box.SIMPLE, pad_edge=False)
    for name, _ in ledgers:
        table.add_column(Text(f"{name}\ncount"), justify="right", overflow="fold")
        table.add_column(Text("\nelements"), justify="right")
    table.add_column("")
    held = [traffic(ledger) for _, ledger in ledgers]
    for key in dict.fromkeys(key for of_one in held for key in of_one):
        each = [of_one.get(key, (0, 0)) for of_one in held]
        cells = [cell for count, elements in each for cell in (str(count), f"{elements:,}")]
        table.add_row(*map(Text, (*key, *cells, verdict(each))))
    return table


def verdict(each: Sequence[Traffic]) -> str:
    """Whether all have the same number of collectives, and of the same size."""
    if len({count for count, _ in each}) > 1:
        return "other count"
    return "same" if len(set(each)) == 1 else "other size"
