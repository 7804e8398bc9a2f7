"""Do the ranks agree? Compares what each rank issued, call by call, and names the first difference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from tpverify.ledger.alternatives import take_turns
from tpverify.ledger.record import Record

POINT_TO_POINT = ("send", "recv")
ROOTED = ("broadcast", "reduce", "scatter", "gather")


def disagreement(first: Record, other: Record) -> str | None:
    """The first property in which two ranks' records of one collective differ, or None.

    Properties, in order: group, kind, reduce op, root, dtype, shape. Shapes that may legitimately differ (uneven gathers,
    all-to-all) are left to the exchange, which sees both sides' buffers.
    """
    if first.group_ranks != other.group_ranks:
        return "group"
    if first.kind != other.kind:
        return "kind"
    if first.reduce_op != other.reduce_op:
        return "reduce op"
    if first.kind in ROOTED and first.root != other.root:
        return "root"
    if first.kind in ("scatter", "gather"):
        return None if _leaf_dtype(first) == _leaf_dtype(other) else "dtype"
    if first.input_dtypes[:1] != other.input_dtypes[:1]:
        return "dtype"
    if first.kind == "all_to_all":
        return None
    if first.input_sizes != other.input_sizes and not (_declares_uneven(first) and _declares_uneven(other)):
        return "shape"
    if first.input_dtypes != other.input_dtypes:
        return "dtype"
    return None


def _leaf_dtype(record: Record) -> tuple[str, ...]:
    return (record.input_dtypes or record.output_dtypes)[:1]


def _declares_uneven(record: Record) -> bool:
    """An all_gather into a list whose buffers differ in shape, one per rank."""
    return record.kind == "all_gather" and len(set(record.output_sizes)) > 1


def name_difference(what: str, records: Sequence[Record]) -> str:
    """The message of a mismatch: each rank's call and where it was made."""
    group = records[0].process_group[1] or records[0].process_group[0]
    number = records[0].collective_seq_id
    lines = [f"Expected all ranks of group {group} to issue the same collective #{number} but they differ in {what}:"]
    for record in sorted(records, key=lambda record: record.rank):
        shown = f"group ranks {list(record.group_ranks)}, " if what == "group" else ""
        lines.append(f"  rank {record.rank}  {shown}{located(record)}{called_from(record, records)}")
    return "\n".join(lines)


def name_crossing(crossed: Sequence[tuple[Record, Record]]) -> str:
    """The message of a crossed stretch of calls: both ranks' calls in turn."""
    first, other = crossed[0]
    lines = [f"Expected rank {other.rank} to issue its collectives in the order of rank {first.rank} but the order differs:"]
    for pair in crossed:
        lines += [f"  #{record.collective_seq_id} rank {record.rank}  {located(record)}{called_from(record, pair)}" for record in pair]
    return "\n".join(lines)


def called_from(record: Record, others: Iterable[Record]) -> str:
    """Where a shared helper that issued the collective was called from: the innermost line that the other ranks do not share."""
    for depth, site in enumerate(record.call_sites):
        if any(site not in other.call_sites for other in others if other.rank != record.rank):
            return f", called from {site}" if depth else ""
    return ""


def located(record: Record) -> str:
    """One line: the call, its phase and module, and the user's line."""
    phase = f" in {record.phase}" if record.phase != "other" else ""
    module = f" of {record.module}" if record.module else ""
    site = f" at {record.call_site}" if record.call_site else ""
    return f"{record.describe()}{phase}{module}{site}"


def first_disagreement(records: Iterable[Record]) -> str:
    """The first collective on which a group's ranks do not agree, as a message; "" if they all do.

    Point-to-point operations are left out: they have a sender and a receiver and no common number.
    """
    meetings: dict[tuple[str, tuple[int, ...], int], dict[int, Record]] = {}
    for record in records:
        if record.kind not in POINT_TO_POINT:
            key = (record.process_group[0], record.group_ranks, record.collective_seq_id)
            meetings.setdefault(key, {})[record.rank] = record
    for (name, members, number), by_rank in sorted(meetings.items(), key=lambda item: item[0][2]):
        first = by_rank[min(by_rank)]
        for rank in sorted(by_rank):
            what = disagreement(first, by_rank[rank])
            if what is not None:
                return name_difference(what, [first, by_rank[rank]])
        missing = [str(rank) for rank in members if rank not in by_rank]
        if missing:
            group = first.process_group[1] or name
            ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
            return (
                f"Expected all ranks of group {group} to issue collective #{number} but not {ranks}:\n  rank {first.rank}  {located(first)}"
            )
    return ""


Origin = tuple[Hashable, ...]
LONGEST_WINDOW = 256


def origin(record: Record, depth: int | None = None) -> Origin:
    """Where in the program a collective was issued: what must not be crossed between ranks.

    Args:
        depth: how many of the user's frames count, from the innermost; None = all.
    """
    sizes = () if record.kind == "all_to_all" or _declares_uneven(record) else record.input_sizes  # each rank's own
    return (record.kind, record.reduce_op, record.root, sizes, record.phase, record.module, record.call_sites[:depth])


@dataclass
class CrossingDetector:
    """Finds collectives that two ranks issue in a different order although every single one matches in shape.

    Ranks may issue a collective from different lines (a root and its peers, say). But when over a stretch of calls the
    two ranks come from the *same* places in a *different* order, data of different places were combined. What a place is
    depends on the program: the line of the collective where every use has its own, the line that calls a shared helper
    otherwise. So every depth of the stack is watched. Arms of one branch are no different places: ranks may take turns in
    them (the owner of a chunk reduces its data, its peers zeros).
    """

    _stretches: dict[int, _Stretch] = field(default_factory=dict)

    def add(self, first: Record, other: Record) -> list[tuple[Record, Record]]:
        """Add one matched pair; a non-empty answer is the crossed stretch."""
        if origin(first) == origin(other):
            return []
        for depth in range(1, max(len(first.call_sites), len(other.call_sites), 1) + 1):
            crossed = self._stretches.setdefault(depth, _Stretch()).add(origin(first, depth), origin(other, depth), (first, other))
            if crossed and take_turns([(a.call_sites, b.call_sites) for a, b in crossed]):
                self._stretches.pop(depth)
            elif crossed:
                return crossed
        return []


@dataclass
class _Stretch:
    """Pairs from different places, until both ranks have come from the same places."""

    pairs: list[tuple[Record, Record]] = field(default_factory=list)
    excess: Counter[Origin] = field(default_factory=Counter)

    def add(self, first: Origin, other: Origin, pair: tuple[Record, Record]) -> list[tuple[Record, Record]]:
        if first == other:
            return []
        if len(self.pairs) >= LONGEST_WINDOW:
            # That many calls from different places without a crossing: the ranks merely run different code.
            self.pairs.clear()
            self.excess.clear()
        self.pairs.append(pair)
        self.excess[first] += 1
        self.excess[other] -= 1
        return list(self.pairs) if not any(self.excess.values()) else []
