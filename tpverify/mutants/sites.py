"""Sites: places in a program that communicate, told apart in a way that no shape and no world size changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tpverify.ledger.ledger import Ledger
from tpverify.ledger.matching import POINT_TO_POINT
from tpverify.ledger.record import Record

BUILDING = "while the module is built, where the harness loads its own values afterwards"
MESSAGES = "point to point"


@dataclass(frozen=True)
class Site:
    """One place that communicates.

    Attributes:
        module, phase, kind, reduce_op: as in :class:`tpverify.ledger.record.Record`.
        ordinal: position among the collectives that agree in all the others, as a rank issues them, from 0.
        group: ``tp`` for the whole TP group, ``part`` for a part of it.
    """

    module: str
    phase: str
    kind: str
    reduce_op: str
    ordinal: int
    group: str

    def __str__(self) -> str:
        operator = f"({self.reduce_op})" if self.reduce_op else ""
        number = f" #{self.ordinal + 1}" if self.ordinal else ""
        part = "" if self.group == "tp" else " of a part of the TP group"
        return f"{self.kind}{operator}{number} of {self.module or '(root)'} in {self.phase}{part}"


def sites_of(ledger: Ledger, members: Sequence[int]) -> dict[Site, tuple[Record, ...]]:
    """The sites of one TP group's run; of each, the record of every collective there, as its group's first member issued it.

    Args:
        ledger: of the group's ranks.
        members: their global ranks, in group order.
    """
    found: dict[Site, tuple[Record, ...]] = {}
    for rank in members:
        issued: Counter[tuple[str, str, str, str, str]] = Counter()
        for record in ledger.rank(rank):
            if left_out(record):
                continue
            group = "tp" if set(record.group_ranks) == set(members) else "part"
            place = (record.module, record.phase, record.kind, record.reduce_op, group)
            site = Site(*place[:4], ordinal=issued[place], group=group)
            issued[place] += 1
            if record.group_ranks[0] == rank:
                found[site] = (*found.get(site, ()), record)
    return found


def left_out(record: Record) -> str:
    """Why a call is no site; "" if it is one."""
    if record.kind in POINT_TO_POINT:
        return MESSAGES
    return BUILDING if record.phase == "other" else ""


def count_left_out(ledgers: Iterable[Ledger]) -> Mapping[str, int]:
    """Of the calls that are no site, the largest number in any run, by reason."""
    most: Counter[str] = Counter()
    for ledger in ledgers:
        lowest = ledger.rank(ledger.ranks[0]) if len(ledger) else ()
        most |= Counter(reason for record in lowest if (reason := left_out(record)))
    return dict(most)
