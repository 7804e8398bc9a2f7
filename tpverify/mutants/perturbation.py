"""A perturbation: which collective of a run hands its ranks what a fault of the program would have given them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tpverify.ledger.record import Record
from tpverify.simulator import collectives
from tpverify.simulator.collectives import REDUCING, Results
from tpverify.simulator.exchange import Meeting
from tpverify.tolerance import bitwise_equal

Call = tuple[int, int]
"""One collective of one group in one run: global rank and ``op_id`` of the group's first member."""

OPERATORS = {
    "drop": "nobody communicates: a reduction leaves the local value, a gather the rank's own part between zeros",
    "double": "what was summed is summed once more: an all_reduce of the result, every contribution counted twice elsewhere",
    "swap": "every rank takes its neighbour's part for its own, as if parts were joined or dealt out in another order",
    "delay": "read before it is complete: the second half of the elements is what dropping the collective leaves",
    "half-group": "reduced within each half of the group only",
    "other-group": "reduced over both TP groups of the world; a gather brings the other group's parts",
    "down-cast": "carried out in bfloat16 and cast back",
    "as-max": "MAX instead of SUM or AVG",
    "as-avg": "AVG instead of SUM",
    "as-sum": "SUM instead of AVG, MAX or MIN",
    "wrong-root": "broadcast from the rank after the root",
}
"""What each operator imitates.

On one rank only, the collective takes place and that rank goes on with what the faulty one would have given it: a rank that
stayed away would merely be a deadlock.
"""

OTHER_OP = {"as-max": "MAX", "as-avg": "AVG", "as-sum": "SUM"}
"""What is reduced with instead, by operator."""

_MISTAKEN_FOR = {"as-max": ("SUM", "AVG"), "as-avg": ("SUM",), "as-sum": ("AVG", "MAX", "MIN")}
_PARTED = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
AT_ROOT = ("reduce", "gather")


@dataclass(frozen=True)
class Perturbation:
    """One fault in one run.

    Attributes:
        operator: one of ``OPERATORS``.
        calls: the collectives that it befalls.
        rank: group rank on which it shows; None = on all.
    """

    operator: str
    calls: frozenset[Call]
    rank: int | None = None


def applies(operator: str, record: Record) -> bool:
    """Whether the operator means anything for this collective; what it would leave as it is by definition, it does not fit."""
    kind, size = record.kind, len(record.group_ranks)
    if size < 2 or kind == "barrier":
        return False
    fits = {
        "drop": True,
        "double": kind in REDUCING and record.reduce_op in ("SUM", "PRODUCT"),
        "swap": kind in _PARTED,
        "delay": True,
        "half-group": kind in REDUCING and size > 2,
        "other-group": True,
        "down-cast": all(dtype in ("float32", "float64") for dtype in (*record.input_dtypes, *record.output_dtypes)),
        "wrong-root": kind == "broadcast",
    }
    if operator in fits:
        return fits[operator]
    return record.reduce_op in _MISTAKEN_FOR[operator] and not {"bool", "complex64", "complex128"} & {*record.input_dtypes}


def receivers(record: Record) -> tuple[int, ...]:
    """Group ranks to which the collective hands anything."""
    ranks = range(len(record.group_ranks))
    if record.kind in AT_ROOT:
        return (record.root or 0,)
    return tuple(rank for rank in ranks if record.kind != "broadcast" or rank != record.root)


class Injection:
    """The simulator's hook that carries out one perturbation.

    Args:
        perturbation: what to do.
        others: for ``other-group``, what the ranks of the other TP group bring to each of the calls.

    Attributes:
        reached: how many of the calls have taken place.
        changed: whether any rank was handed other bits than it should have been.
        telling: whether that means anything: the ranks concerned were not meant to be handed nothing, or nothing but zeros.
    """

    def __init__(self, perturbation: Perturbation, others: Mapping[Call, Sequence[Sequence[Tensor]]] | None = None) -> None:
        self.reached = 0
        self.changed = False
        self.telling = False
        self._perturbation = perturbation
        self._others = others or {}

    def __call__(self, meeting: Meeting, results: Results) -> Results:
        """What the ranks get instead."""
        call = call_of(meeting.records[0])
        if call not in self._perturbation.calls:
            return results
        self.reached += 1
        ranks = range(len(meeting.members))
        faulty = _faulty(self._perturbation.operator, _Seen(meeting, results, self._others.get(call, ())))
        if self._perturbation.rank is not None:
            faulty = [faulty[rank] if rank == self._perturbation.rank else results[rank] for rank in ranks]
        pairs = [pair for rank in ranks for pair in zip(faulty[rank], results[rank], strict=True)]
        self.changed = self.changed or any(got is not meant and not bitwise_equal(got, meant) for got, meant in pairs)
        concerned = ranks if self._perturbation.rank is None else (self._perturbation.rank,)
        handed = any(bool(tensor.count_nonzero()) for rank in concerned for tensor in results[rank])
        self.telling = self.telling or self.changed or handed
        return faulty


class InputLog:
    """The simulator's hook that changes nothing and keeps what ranks bring to every collective."""

    def __init__(self) -> None:
        self.inputs: dict[Call, list[list[Tensor]]] = {}

    def __call__(self, meeting: Meeting, results: Results) -> Results:
        """The results, unchanged."""
        brought = [meeting.calls[rank].inputs for rank in range(len(meeting.members))]
        self.inputs[call_of(meeting.records[0])] = [[tensor.clone() for tensor in tensors] for tensors in brought]
        return results


def call_of(record: Record) -> Call:
    """The name of a collective, from the record of its group's first member."""
    return record.rank, record.op_id


class _Seen:
    """A complete collective as the operators see it: what each rank brought, and what it should get."""

    def __init__(self, meeting: Meeting, results: Results, other: Sequence[Sequence[Tensor]]) -> None:
        call = meeting.calls[0]
        self.kind, self.reduce_op, self.root = call.kind, call.reduce_op, call.root or 0
        self.inputs = [meeting.calls[rank].inputs for rank in range(len(meeting.members))]
        self.results = results
        self.other = other
        self.ranks = range(len(self.inputs))

    def compute(self, inputs: Sequence[Sequence[Tensor]], reduce_op: str | None = None) -> Results:
        return collectives.compute(self.kind, inputs, self.reduce_op if reduce_op is None else reduce_op, root=self.root)


def _faulty(operator: str, seen: _Seen) -> Results:
    if operator in OTHER_OP:
        return seen.compute(seen.inputs, OTHER_OP[operator])
    operators: dict[str, Callable[[_Seen], Results]] = {
        "drop": _stale,
        "double": _doubled,
        "swap": _swapped,
        "delay": _torn,
        "half-group": _halved,
        "other-group": _of_other_group,
        "down-cast": _down_cast,
        "wrong-root": _from_next_root,
    }
    return operators[operator](seen)


def _stale(seen: _Seen) -> Results:
    return collectives.uncommunicated(seen.kind, seen.inputs, seen.results, seen.root)


def _doubled(seen: _Seen) -> Results:
    times = len(seen.ranks) if seen.kind == "all_reduce" else 2
    return [[collectives.reduce_tensors([tensor] * times, seen.reduce_op) for tensor in tensors] for tensors in seen.results]


def _swapped(seen: _Seen) -> Results:
    if seen.kind in ("reduce_scatter", "scatter"):
        return list(map(list, zip(*(_rotated(parts) for parts in zip(*seen.results, strict=True)), strict=True)))
    size = len(seen.ranks)
    return [[part for start in range(0, len(parts), size) for part in _rotated(parts[start : start + size])] for parts in seen.results]


def _rotated(parts: Sequence[Tensor]) -> list[Tensor]:
    """Each part's place taken by the next one of its size: parts of other sizes would not fit."""
    rotated = list(parts)
    for size in {part.numel() for part in parts}:
        places = [index for index, part in enumerate(parts) if part.numel() == size]
        for place, source in zip(places, [*places[1:], *places[:1]], strict=True):
            rotated[place] = parts[source].reshape(parts[place].shape)
    return rotated


def _torn(seen: _Seen) -> Results:
    return [[_mixed(*pair) for pair in zip(*both, strict=True)] for both in zip(seen.results, _stale(seen), strict=True)]


def _mixed(new: Tensor, old: Tensor) -> Tensor:
    half = new.numel() // 2
    return torch.cat([new.reshape(-1)[:half], old.reshape(-1)[half:]]).reshape(new.shape)


def _halved(seen: _Seen) -> Results:
    middle = (len(seen.ranks) + 1) // 2
    halves = [seen.inputs[:middle], seen.inputs[middle:]]
    if seen.kind == "reduce_scatter":
        size = len(seen.ranks)
        return [
            [_reduced(halves[rank >= middle], index * size + rank, seen) for index in range(len(seen.results[rank]))] for rank in seen.ranks
        ]
    return [[_reduced(halves[rank >= middle], index, seen) for index in range(len(seen.results[rank]))] for rank in seen.ranks]


def _reduced(inputs: Sequence[Sequence[Tensor]], index: int, seen: _Seen) -> Tensor:
    return collectives.reduce_tensors([own[index] for own in inputs], seen.reduce_op)


def _of_other_group(seen: _Seen) -> Results:
    if seen.kind not in REDUCING:
        return seen.compute(seen.other)
    theirs = seen.compute(seen.other)
    total = {"AVG": "SUM"}.get(seen.reduce_op, seen.reduce_op)
    both = [
        [collectives.reduce_tensors(pair, total) for pair in zip(*sides, strict=True)] for sides in zip(seen.results, theirs, strict=True)
    ]
    return [[tensor / 2 if seen.reduce_op == "AVG" else tensor for tensor in tensors] for tensors in both]


def _down_cast(seen: _Seen) -> Results:
    narrow = seen.compute([[tensor.bfloat16() for tensor in tensors] for tensors in seen.inputs])
    return [[low.to(meant.dtype) for low, meant in zip(*pair, strict=True)] for pair in zip(narrow, seen.results, strict=True)]


def _from_next_root(seen: _Seen) -> Results:
    """The old root is not written to, so it keeps its own."""
    source = seen.inputs[(seen.root + 1) % len(seen.ranks)]
    return [list(source) if tensors else [] for tensors in seen.results]
