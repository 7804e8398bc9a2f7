"""Whether a wrong tensor holds the right values, but at other places: exchanged parts, slices in another order, shifted rows."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tpverify.sharding import Layout, Replicate, sharded_dim
from tpverify.tolerance import compare

MOST_SLICES = 64
"""Slices along one dimension among which each one's place is looked for."""


def rearranged(layout: Layout, wanted: Mapping[int, torch.Tensor], locals_: Mapping[int, torch.Tensor], fit: float) -> str:
    """The pattern in words; "" if none fits.

    Args:
        layout: of the parts.
        wanted, locals_: by rank, its part as it should be and as it is; equal shapes.
        fit: largest relative error.
    """
    return _exchanged(layout, wanted, locals_, fit) or _reordered(layout, wanted, locals_, fit) or _shifted(wanted, locals_, fit)


def same(actual: torch.Tensor, expected: torch.Tensor, fit: float) -> bool:
    """Whether two tensors agree to within a relative error."""
    return actual.shape == expected.shape and compare(actual, expected, bound=fit) is None


def _exchanged(layout: Layout, wanted: Mapping[int, torch.Tensor], locals_: Mapping[int, torch.Tensor], fit: float) -> str:
    """Every rank holds some rank's right part, but not its own."""
    if isinstance(layout, Replicate) or sharded_dim(layout) is None:
        return ""
    held = {}
    for rank, local in locals_.items():
        holders = [other for other in wanted if same(local, wanted[other], fit)]
        if not holders:
            return ""
        held[rank] = rank if rank in holders else holders[0]
    moved = [f"rank {rank} holds the part of rank {other}" for rank, other in held.items() if rank != other]
    return f"{', '.join(moved)}: parts taken in the wrong order fit this" if moved else ""


def _reordered(layout: Layout, wanted: Mapping[int, torch.Tensor], locals_: Mapping[int, torch.Tensor], fit: float) -> str:
    """The right slices along one dimension, each of them once, in another order; on every rank the same, or right there."""
    size, ranks = len(wanted), len(locals_)
    for dim in range(wanted[0].dim()):
        orders = {rank: _order(locals_[rank], wanted[rank], dim, fit) for rank in locals_}
        if any(order is None for order in orders.values()):
            continue
        order = next((order for order in orders.values() if order and order != sorted(order)), None)
        if order is None:
            continue
        length = len(order)
        block = length // size if isinstance(layout, Replicate) and size and length % size == 0 else 0
        reverse = block and order == [place for part in reversed(range(size)) for place in range(part * block, (part + 1) * block)]
        if ranks > 1 and reverse:
            return f"the parts of the ranks stand in reverse order along dimension {dim}: a gather in the wrong order fits this"
        if ranks > 1 and _cut(layout, wanted[0]) != dim:
            return f"the right slices stand in another order along dimension {dim}, {_listed(order)}: a gather in the wrong order fits this"
        return f"the right slices stand in another order along dimension {dim}, {_listed(order)}: parts taken in the wrong order fit this"
    return ""


def _cut(layout: Layout, part: torch.Tensor) -> int | None:
    """The dimension along which ranks hold different parts."""
    dim = sharded_dim(layout)
    return None if dim is None else dim % part.dim()


def _listed(order: list[int]) -> str:
    shown = ", ".join(map(str, order[:8]))
    return f"{shown}, ..." if len(order) > 8 else shown


def _order(actual: torch.Tensor, expected: torch.Tensor, dim: int, fit: float) -> list[int] | None:
    """Which of the expected slices along ``dim`` each slice is; None unless each is there once and told from every other."""
    length = expected.shape[dim]
    if not 1 < length <= MOST_SLICES or not bool(actual.isfinite().all()) or not bool(expected.isfinite().all()):
        return None
    a, e = (tensor.movedim(dim, 0).reshape(length, -1).double() for tensor in (actual, expected))
    if not e.shape[1]:
        return None
    near = torch.cdist(a, e) <= fit * e.norm(dim=1).max()
    if not bool((near.sum(0) == 1).all() and (near.sum(1) == 1).all()):
        return None
    return [int(place) for place in near.int().argmax(1)]


def _shifted(wanted: Mapping[int, torch.Tensor], locals_: Mapping[int, torch.Tensor], fit: float) -> str:
    """Every rank holds what stands one or two places further along one dimension; its edge may hold anything."""
    for dim in range(wanted[0].dim()):
        for shift in (1, -1, 2, -2):
            lengths = [tensor.shape[dim] - abs(shift) for tensor in wanted.values()]
            if max(lengths) < 2 or all(same(locals_[rank], wanted[rank], fit) for rank in wanted):
                continue
            if all(_moved(locals_[rank], wanted[rank], dim, shift, fit) for rank in wanted):
                way = "after" if shift > 0 else "before"
                return f"every slice along dimension {dim} holds the one {abs(shift)} {way} it: shifted rows fit this"
    return ""


def _moved(actual: torch.Tensor, expected: torch.Tensor, dim: int, shift: int, fit: float) -> bool:
    kept = expected.shape[dim] - abs(shift)
    if kept < 1:
        return True
    a = actual.narrow(dim, max(0, -shift), kept)
    e = expected.narrow(dim, max(0, shift), kept)
    still = expected.narrow(dim, max(0, -shift), kept)
    return same(a, e, fit) and not same(e, still, fit)
