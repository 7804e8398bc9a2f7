"""What each collective computes, as pure functions from the ranks' inputs to the ranks' results."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tpverify.errors import CollectiveRefused

REDUCTION_ORDERS = ("rank", "reversed", "tree")


def _logical_or(a: Tensor, b: Tensor) -> Tensor:
    return a.logical_or(b)


def _add(a: Tensor, b: Tensor) -> Tensor:
    return _logical_or(a, b) if a.dtype == torch.bool else a + b


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    return a.logical_and(b) if a.dtype == torch.bool else a * b


_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": _add,
    "AVG": _add,
    "PRODUCT": _multiply,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
REDUCE_OPS = tuple(_BINARY)


def check_reducible(dtype: torch.dtype, reduce_op: str) -> None:
    """Refuse what no backend defines.

    Raises:
        CollectiveRefused: bitwise reduction of non-integers, AVG of booleans, anything but sums and means of complex numbers, or
            an unknown operator.
    """
    if reduce_op not in _BINARY:
        raise CollectiveRefused(f"Expected one of {', '.join(REDUCE_OPS)} but got reduce_op={reduce_op}")
    inexact = dtype.is_floating_point or dtype.is_complex
    if reduce_op in ("BAND", "BOR", "BXOR") and inexact:
        raise CollectiveRefused(f"Expected an integer or bool tensor for {reduce_op} but got dtype={dtype}")
    if reduce_op == "AVG" and dtype == torch.bool:
        raise CollectiveRefused(f"Expected a numeric tensor for AVG but got dtype={dtype}")
    if dtype.is_complex and reduce_op not in ("SUM", "AVG"):
        raise CollectiveRefused(f"Expected a real tensor for {reduce_op} but got dtype={dtype}")


def reduce_tensors(tensors: Sequence[Tensor], reduce_op: str, order: str = "rank") -> Tensor:
    """Reduce equally shaped tensors, in the tensors' own dtype, into a fresh tensor.

    Args:
        tensors: one tensor per rank, in rank order.
        reduce_op: one of ``REDUCE_OPS``; booleans add as *or* and multiply as *and*, as NCCL does.
        order: ``rank`` (ascending), ``reversed`` (descending) or ``tree`` (pairwise): which rounding a backend may show.
    """
    binary = _BINARY[reduce_op]
    parts = list(reversed(tensors)) if order == "reversed" else list(tensors)
    if order == "tree":
        while len(parts) > 1:
            paired = [binary(parts[i], parts[i + 1]) for i in range(0, len(parts) - 1, 2)]
            parts = paired + parts[2 * len(paired) :]
        total = parts[0]
    else:
        total = parts[0]
        for part in parts[1:]:
            total = binary(total, part)
    if reduce_op == "AVG":
        inexact = total.is_floating_point() or total.is_complex()
        total = total / len(tensors) if inexact else total.div(len(tensors), rounding_mode="trunc")
    return total.clone() if len(tensors) == 1 else total


REDUCING = ("all_reduce", "reduce", "reduce_scatter")
"""Kinds whose results are fresh tensors; the others hand the ranks' inputs on."""

Results = list[list[Tensor]]
"""Per rank: the value of each of its output tensors (compared and copied by number of elements)."""


def all_reduce(inputs: Sequence[Sequence[Tensor]], reduce_op: str, order: str) -> Results:
    """Every rank gets, for each of its tensors, the reduction over ranks."""
    reduced = [reduce_tensors(column, reduce_op, order) for column in zip(*inputs, strict=True)]
    return [reduced for _ in inputs]


def reduce(inputs: Sequence[Sequence[Tensor]], reduce_op: str, order: str, root: int) -> Results:
    """Only the root gets the reduction."""
    reduced = [reduce_tensors(column, reduce_op, order) for column in zip(*inputs, strict=True)]
    return [reduced if rank == root else [] for rank in range(len(inputs))]


def all_gather(inputs: Sequence[Sequence[Tensor]]) -> Results:
    """Every rank gets every rank's tensors: for each tensor in turn, rank 0's, rank 1's, ..."""
    gathered = [tensor for column in zip(*inputs, strict=True) for tensor in column]
    return [gathered for _ in inputs]


def reduce_scatter(inputs: Sequence[Sequence[Tensor]], reduce_op: str, order: str) -> Results:
    """Rank r gets the reduction of chunk r; ``inputs[rank]`` holds the chunks of each tensor in turn, one per rank."""
    world_size = len(inputs)
    tensors = len(inputs[0]) // world_size
    return [
        [reduce_tensors([chunks[t * world_size + rank] for chunks in inputs], reduce_op, order) for t in range(tensors)]
        for rank in range(world_size)
    ]


def broadcast(inputs: Sequence[Sequence[Tensor]], root: int) -> Results:
    """Every rank but the root gets the root's tensors."""
    return [[] if rank == root else list(inputs[root]) for rank in range(len(inputs))]


def gather(inputs: Sequence[Sequence[Tensor]], root: int) -> Results:
    """The root gets every rank's tensor, in rank order; the others get nothing."""
    return [[own[0] for own in inputs] if rank == root else [] for rank in range(len(inputs))]


def scatter(inputs: Sequence[Sequence[Tensor]], root: int) -> Results:
    """Rank r gets the root's tensor r."""
    return [[inputs[root][rank]] for rank in range(len(inputs))]


def all_to_all(inputs: Sequence[Sequence[Tensor]]) -> Results:
    """Rank r gets tensor r of every rank, in rank order."""
    return [[own[rank] for own in inputs] for rank in range(len(inputs))]


def compute(kind: str, inputs: Sequence[Sequence[Tensor]], reduce_op: str = "", order: str = "rank", root: int | None = None) -> Results:
    """What a collective of any kind gives each rank.

    Args:
        kind: as in :class:`tpverify.ledger.record.Record`, but no send or recv.
        inputs: by rank, the tensors it brings.
        root: group rank, where the kind has one.
    """
    rooted = root or 0
    kinds: dict[str, Callable[[], Results]] = {
        "all_reduce": lambda: all_reduce(inputs, reduce_op, order),
        "reduce": lambda: reduce(inputs, reduce_op, order, rooted),
        "all_gather": lambda: all_gather(inputs),
        "reduce_scatter": lambda: reduce_scatter(inputs, reduce_op, order),
        "broadcast": lambda: broadcast(inputs, rooted),
        "gather": lambda: gather(inputs, rooted),
        "scatter": lambda: scatter(inputs, rooted),
        "all_to_all": lambda: all_to_all(inputs),
        "barrier": lambda: [[] for _ in inputs],
    }
    return kinds[kind]()


def uncommunicated(kind: str, inputs: Sequence[Sequence[Tensor]], results: Results, root: int = 0) -> Results:
    """What the ranks' buffers hold if nothing is communicated: a reduction's local value, a gather's own part between zeros.

    Args:
        inputs: of each rank.
        results: what each rank is handed if there is communication.
        root: group rank of the root.
    """
    size = len(inputs)
    if kind in ("all_reduce", "reduce", "broadcast"):
        return [list(own) if result else [] for own, result in zip(inputs, results, strict=True)]
    if kind == "reduce_scatter":
        return [[inputs[rank][index * size + rank] for index in range(len(results[rank]))] for rank in range(size)]
    return [
        [
            part if rank == (root if kind == "scatter" else index % size) else torch.zeros_like(part)
            for index, part in enumerate(results[rank])
        ]
        for rank in range(size)
    ]
