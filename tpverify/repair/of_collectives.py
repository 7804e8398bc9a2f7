"""Repairs of collectives: another reduce op, another group, none at all, parts in another order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from tpverify.ledger.record import Record
from tpverify.repair.repair import Repair, Sites, at
from tpverify.simulator import collectives
from tpverify.simulator.collectives import Results
from tpverify.simulator.exchange import Meeting
from tpverify.tolerance import bitwise_equal

OPS = ("SUM", "MAX", "AVG")
"""What may have been meant, the likelier first."""

PARTED = ("all_gather", "all_to_all", "reduce_scatter")

Group = tuple[int, ...]
"""Global ranks."""


@dataclass(frozen=True)
class Place:
    """A place of the program that issues a collective.

    Attributes:
        phase, kind, reduce_op: as in :class:`~tpverify.ledger.record.Record`.
        size: of its groups.
        module: the module's path without its numbers; in backward there are no frames of its code.
        sites: the frames of the call.
    """

    phase: str
    kind: str
    reduce_op: str
    size: int
    module: str
    sites: Sites

    def __str__(self) -> str:
        op = f"({self.reduce_op})" if self.reduce_op else ""
        return f"{self.kind}{op}{at(self.sites)} in {self.phase}"


def place_of(record: Record) -> Place:
    """The place that issued it."""
    module = re.sub(r"\d+", "#", record.module)
    return Place(record.phase, record.kind, record.reduce_op, len(record.group_ranks), module, record.call_sites)


@dataclass
class Brought:
    """The simulator's hook that changes nothing and keeps what ranks bring to the collectives of each place.

    Attributes:
        inputs: by place and turn, by global rank.
        groups: by place, the groups that met there.
    """

    inputs: dict[tuple[Place, int], dict[int, list[Tensor]]] = field(default_factory=dict)
    groups: dict[Place, set[Group]] = field(default_factory=dict)
    _turns: Counter[tuple[Place, int]] = field(default_factory=Counter)

    def __call__(self, meeting: Meeting, results: Results) -> Results:
        """The results, unchanged."""
        for group_rank, record in meeting.records.items():
            place = place_of(record)
            turn = self._turns[place, record.rank]
            self._turns[place, record.rank] += 1
            self.inputs.setdefault((place, turn), {})[record.rank] = [tensor.clone() for tensor in meeting.calls[group_rank].inputs]
            self.groups.setdefault(place, set()).add(meeting.members)
        return results

    def is_replicated(self, place: Place) -> bool:
        """Whether all ranks bring the same there, so that any reduce op but a sum leaves it as it is."""
        held = [list(by_rank.values()) for (where, _), by_rank in self.inputs.items() if where == place]
        return place.size > 1 and all(_equal(ranks[0], other) for ranks in held for other in ranks)


def _equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(bitwise_equal(*pair) for pair in zip(one, other, strict=True))


def of_collectives(brought: Brought, tp_groups: Sequence[Group], phases: Sequence[str]) -> Iterator[Repair]:
    """All repairs of the collectives of one run.

    Args:
        brought: what ranks bring to them.
        tp_groups: the TP groups of the world.
        phases: those in which the fault may lie.
    """
    places = [place for place in brought.groups if place.phase in phases]
    replicated = [place for place in places if brought.is_replicated(place)]
    for place in replicated:
        if place.kind == "all_reduce":
            yield _without(place)
    for op in OPS:
        for place in places:
            if place.reduce_op not in ("", op) and place not in replicated:
                yield Repair(
                    f"with {place.kind}({op}) in place of {place}", "a wrong reduce op", place.sites, _Changed(place, _with_op(op))
                )
    for place in places:
        if place.kind == "all_reduce":
            for text, partition in _partitions(tp_groups):
                if not brought.groups[place] <= set(partition):
                    repair = _Regrouped(place, partition, brought)
                    yield Repair(f"if {place} goes over {text}", "a wrong group", place.sites, repair)
    for place in places:
        if place.kind in ("all_reduce", "reduce_scatter") and place not in replicated:
            yield _without(place)
        if place.kind in PARTED and place.size > 1:
            yield Repair(
                f"with the parts of {place} in reverse order", "parts taken in the wrong order", place.sites, _Changed(place, _reversed)
            )


def _without(place: Place) -> Repair:
    return Repair(f"without {place}", "one reduction too many", place.sites, _Changed(place, _left_out))


def _partitions(tp_groups: Sequence[Group]) -> Iterator[tuple[str, tuple[Group, ...]]]:
    """Ways in which a collective may group ranks, in words: the whole TP group, runs of neighbours, every n-th rank."""
    size = len(tp_groups[0])
    yield "the whole TP group", tuple(tp_groups)
    for part in range(2, size):
        if size % part == 0:
            yield (
                f"each {part} neighbouring ranks",
                tuple(group[start : start + part] for group in tp_groups for start in range(0, size, part)),
            )
            step = size // part
            yield f"{part} ranks each, every {_ordinal(step)}", tuple(group[start::step] for group in tp_groups for start in range(step))


def _ordinal(number: int) -> str:
    return {2: "second", 3: "third"}.get(number, f"{number}th")


class _Changed:
    """The hook that lets one place compute something else."""

    def __init__(self, place: Place, compute: Callable[[Meeting, Results], Results]) -> None:
        self._place = place
        self._compute = compute

    def __call__(self, meeting: Meeting, results: Results) -> Results:
        return self._compute(meeting, results) if place_of(meeting.records[0]) == self._place else results


class _Regrouped:
    """The hook that lets one place reduce over other groups, from what was brought there in the run that failed."""

    def __init__(self, place: Place, partition: Sequence[Group], brought: Brought) -> None:
        self._place = place
        self._group_of: Mapping[int, Group] = {rank: group for group in partition for rank in group}
        self._brought = brought
        self._turns: Counter[int] = Counter()

    def __call__(self, meeting: Meeting, results: Results) -> Results:
        record = meeting.records[0]
        if place_of(record) != self._place:
            return results
        changed: Results = []
        for rank, result in zip(meeting.members, results, strict=True):
            brought = self._brought.inputs.get((self._place, self._turns[rank]), {})
            self._turns[rank] += 1
            parts = [brought[other] for other in self._group_of.get(rank, ()) if other in brought]
            fits = parts and all([t.shape for t in part] == [t.shape for t in result] for part in parts)
            changed.append(
                [collectives.reduce_tensors(same, record.reduce_op) for same in zip(*parts, strict=True)] if fits else list(result)
            )
        return changed


def _with_op(op: str) -> Callable[[Meeting, Results], Results]:
    def compute(meeting: Meeting, results: Results) -> Results:
        call = meeting.calls[0]
        return collectives.compute(call.kind, _inputs(meeting), op, root=call.root)

    return compute


def _left_out(meeting: Meeting, results: Results) -> Results:
    """Every rank keeps its own."""
    return collectives.uncommunicated(meeting.calls[0].kind, _inputs(meeting), results)


def _reversed(meeting: Meeting, results: Results) -> Results:
    if meeting.calls[0].kind == "reduce_scatter":
        return [list(parts) for parts in reversed(results)]
    size = len(results)
    return [[part for start in range(0, len(parts), size) for part in reversed(parts[start : start + size])] for parts in results]


def _inputs(meeting: Meeting) -> list[Sequence[Tensor]]:
    return [meeting.calls[rank].inputs for rank in range(len(meeting.members))]
