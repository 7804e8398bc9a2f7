"""Which fault explains a wrong tensor: a line is given only where a pattern fits to within the tolerance."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tpverify.run import Placed
from tpverify.sharding import Layout, Replicate, shard, sharded_dim
from tpverify.tolerance import compare

SIMPLE_FACTORS = (0.5, 2.0, -1.0)


def diagnose(
    label: str,
    expected: torch.Tensor,
    actual: Mapping[int, Placed],
    world_size: int,
    bound: float,
    addends: Mapping[str, torch.Tensor] | None = None,
) -> str:
    """The pattern that turns the expected value into what the ranks hold, in words; "" if none fits.

    Args:
        label: how the tensor is called.
        expected: the logical tensor.
        actual: every rank's part, in one layout.
        bound: largest relative error of a fit.
        addends: vectors that may have been added to every row more or less often than once, by name.
    """
    locals_ = {rank: placed.local for rank, placed in sorted(actual.items()) if placed.local is not None}
    layouts = {repr(placed.layout) for placed in actual.values()}
    if len(locals_) != world_size or len(layouts) != 1 or not expected.numel():
        return ""
    layout = next(iter(actual.values())).layout
    wanted = {rank: shard(expected, layout, rank, world_size) for rank in locals_}
    if any(locals_[rank].shape != wanted[rank].shape for rank in locals_):
        return ""
    fit = max(bound, 1e-12)
    where = "backward" if label.endswith(".grad") else "forward"
    return (
        _sum_over_ranks(layout, expected, locals_, where, fit)
        or _factor(wanted, locals_, world_size, where, fit)
        or _exchanged(layout, wanted, locals_, fit)
        or _reversed(layout, wanted, locals_, fit)
        or _addend(wanted, locals_, addends or {}, world_size, fit)
        or _constant_factor(expected, wanted, locals_, fit)
    )


def _same(actual: torch.Tensor, expected: torch.Tensor, fit: float) -> bool:
    return actual.shape == expected.shape and compare(actual, expected, bound=fit) is None


def _sum_over_ranks(layout: Layout, expected: torch.Tensor, locals_: dict[int, torch.Tensor], where: str, fit: float) -> str:
    """Replicas that are still summands, or were averaged."""
    if not isinstance(layout, Replicate) or len(locals_) < 2:
        return ""
    total = torch.stack(list(locals_.values())).sum(0)
    names = " + ".join(f"rank {rank}" for rank in locals_)
    if _same(total, expected, fit):
        return f"{names} equals the expected value: a missing all_reduce(SUM) in {where} fits this"
    return ""


def _factor(wanted: dict[int, torch.Tensor], locals_: dict[int, torch.Tensor], world_size: int, where: str, fit: float) -> str:
    """One and the same constant factor on every rank."""
    e = torch.cat([tensor.reshape(-1) for tensor in wanted.values()])
    a = torch.cat([tensor.reshape(-1) for tensor in locals_.values()])
    if not bool(a.isfinite().all()) or not bool(e.isfinite().all()) or float(e.norm()) == 0.0:
        return ""
    if not bool(a.any()):
        return "all ranks hold zeros"
    telling = {float(world_size): "the world size", 1.0 / world_size: "1 / world size", float(world_size - 1): "world size - 1"}
    for number, name in telling.items():
        if number not in (0.0, 1.0) and _same(a, number * e, fit):
            meaning = (
                "one reduction too many" if number == world_size else "one division too many" if number < 1 else "the own rank left out"
            )
            return f"every rank holds {number:g} times the expected value ({name}): {meaning} in {where} fits this"
    for number in SIMPLE_FACTORS:
        if _same(a, number * e, fit):
            return f"every rank holds {number:g} times the expected value"
    return ""


def _constant_factor(expected: torch.Tensor, wanted: dict[int, torch.Tensor], locals_: dict[int, torch.Tensor], fit: float) -> str:
    """Any other factor; one or two elements always have one, so it takes more to believe in it."""
    e = torch.cat([tensor.reshape(-1) for tensor in wanted.values()])
    a = torch.cat([tensor.reshape(-1) for tensor in locals_.values()])
    if expected.numel() < 3 or not bool(a.isfinite().all()) or not float(e.norm()):
        return ""
    factor = float(a @ e / (e @ e))
    return f"every rank holds {factor:.6g} times the expected value: a constant factor fits this" if _same(a, factor * e, fit) else ""


def _exchanged(layout: Layout, wanted: dict[int, torch.Tensor], locals_: dict[int, torch.Tensor], fit: float) -> str:
    """Every rank holds some rank's right part, but not its own."""
    if isinstance(layout, Replicate) or sharded_dim(layout) is None:
        return ""
    held = {}
    for rank, local in locals_.items():
        holders = [other for other in wanted if _same(local, wanted[other], fit)]
        if not holders:
            return ""
        held[rank] = rank if rank in holders else holders[0]
    moved = [f"rank {rank} holds the part of rank {other}" for rank, other in held.items() if rank != other]
    return f"{', '.join(moved)}: parts taken in the wrong order fit this" if moved else ""


def _reversed(layout: Layout, wanted: dict[int, torch.Tensor], locals_: dict[int, torch.Tensor], fit: float) -> str:
    """The right values in another order along one dimension."""
    if isinstance(layout, Replicate) and len(locals_) > 1:
        local, whole = locals_[0], wanted[0]
        for dim in range(whole.dim()):
            size = whole.shape[dim]
            parts = whole.chunk(len(locals_), dim)
            if size > 1 and len(parts) > 1 and _same(local, torch.cat(list(reversed(parts)), dim), fit):
                return f"the parts of the ranks stand in reverse order along dimension {dim}: a gather in the wrong order fits this"
    return ""


def _addend(
    wanted: dict[int, torch.Tensor], locals_: dict[int, torch.Tensor], addends: Mapping[str, torch.Tensor], world_size: int, fit: float
) -> str:
    """A bias (or other vector) that every row holds once too often, or not at all."""
    for name, addend in addends.items():
        if any(tensor.shape[-1:] != addend.shape for tensor in wanted.values()):
            continue
        for times in (world_size - 1, -1, 1):
            if times and all(_same(locals_[rank], wanted[rank] + times * addend, fit) for rank in wanted):
                if times == world_size - 1:
                    return f"every row holds {name} {world_size} times instead of once: added on every rank before a reduction fits this"
                return f"every row holds {name} {'once too often' if times > 0 else 'once too little'}: that fits exactly"
    return ""
