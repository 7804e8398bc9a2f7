"""Which fault explains a wrong tensor: a line is given only where a pattern fits to within the tolerance."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tpverify.checks.rearranged import rearranged, same
from tpverify.run import Placed
from tpverify.sharding import Layout, Replicate, local_indices, owners, shard, sharded_dim

SIMPLE_FACTORS = (0.5, 2.0, -1.0)

FEW = 8
"""So many numbers may have three zero bits at their end by chance."""

DETACHED = "a detached branch fits this"
"""Said of a gradient that is not there although the reference has one."""


def diagnose(
    label: str,
    expected: torch.Tensor,
    actual: Mapping[int, Placed],
    world_size: int,
    bound: float,
    addends: Mapping[str, torch.Tensor] | None = None,
    unwritten: bool = True,
    ids: bool = False,
) -> str:
    """The pattern that turns the expected value into what the ranks hold, in words; "" if none fits.

    Args:
        label: how the tensor is called.
        expected: the logical tensor.
        actual: every rank's part, in one layout.
        bound: largest relative error of a fit.
        addends: what may have been added to every row more or less often than once, by name: vectors, or tables of rows.
        ids: whether the numbers are ids, which may stand elsewhere, but are no multiples or sums of each other.
        unwritten: whether there was memory that holds NaN until it is written: buffers in flight, gaps between strided rows.
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
    if ids:
        return rearranged(layout, wanted, locals_, fit)
    where = "backward" if label.endswith(".grad") else "forward"
    return (
        _not_a_number(wanted, locals_, unwritten)
        or _sum_over_ranks(layout, expected, locals_, where, fit)
        or _sum_over_holders(layout, expected, locals_, where, fit)
        or _factor(wanted, locals_, world_size, where, fit)
        or _nothing(wanted, locals_, where, fit)
        or rearranged(layout, wanted, locals_, fit)
        or _addend(wanted, locals_, addends or {}, world_size, fit)
        or _constant_factor(expected, wanted, locals_, fit)
    )


def _not_a_number(wanted: dict[int, torch.Tensor], locals_: dict[int, torch.Tensor], unwritten: bool) -> str:
    """What is no number although it should be."""
    ranks = [rank for rank in wanted if bool((locals_[rank].isnan() & wanted[rank].isfinite()).any())]
    meaning = "stale or never written data" if unwritten else "an overflow or a division by zero"
    return f"NaN on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {meaning} fits this" if ranks else ""


def _nothing(wanted: dict[int, torch.Tensor], locals_: dict[int, torch.Tensor], where: str, fit: float) -> str:
    """Zero here and there, and right elsewhere."""
    empty = {rank: (locals_[rank] == 0) & (wanted[rank] != 0) for rank in wanted}
    count = sum(int(mask.sum()) for mask in empty.values())
    if not count or not all(same(torch.where(empty[rank], wanted[rank], locals_[rank]), wanted[rank], fit) for rank in wanted):
        return ""
    total = sum(mask.numel() for mask in empty.values())
    meaning = DETACHED if where == "backward" else "parts that were masked or never written fit this"
    return f"zero at {count} of {total} elements and right elsewhere: {meaning}"


def _sum_over_ranks(layout: Layout, expected: torch.Tensor, locals_: dict[int, torch.Tensor], where: str, fit: float) -> str:
    """Replicas that are still summands, or were averaged."""
    if not isinstance(layout, Replicate) or len(locals_) < 2:
        return ""
    if all(torch.equal(local, locals_[0]) for local in locals_.values()):
        return ""  # replicas, so whatever sums or averages has been there
    total = torch.stack(list(locals_.values())).sum(0)
    names = " + ".join(f"rank {rank}" for rank in locals_)
    if same(total, expected, fit):
        return f"{names} equals the expected value: a missing all_reduce(SUM) in {where} fits this"
    return ""


def _sum_over_holders(layout: Layout, expected: torch.Tensor, locals_: dict[int, torch.Tensor], where: str, fit: float) -> str:
    """Units that several ranks hold, as those of key-value heads fewer than ranks: on each of them still a summand, or right."""
    dim, size = sharded_dim(layout), len(locals_)
    if dim is None or isinstance(layout, Replicate):
        return ""
    dim %= expected.dim()
    holders = owners(expected.shape[dim], layout, size)
    if all(len(ranks) == 1 for ranks in holders):
        return ""
    total, first = torch.zeros_like(expected), torch.zeros_like(expected)
    for rank in reversed(range(size)):
        places = local_indices(expected.shape[dim], layout, rank, size)
        kept = torch.tensor([position for position, index in enumerate(places) if index >= 0])
        held = torch.tensor([index for index in places if index >= 0])
        part = locals_[rank].index_select(dim, kept)
        total.index_add_(dim, held, part)
        first.index_copy_(dim, held, part)
    summed = [index for index, ranks in enumerate(holders) if len(ranks) > 1 and not same(*_slices(first, expected, dim, index), fit)]
    mended = first.clone()
    for index in summed:
        mended.select(dim, index).copy_(total.select(dim, index))
    if not summed or not same(mended, expected, fit):
        return ""
    sharing = ", ".join(map(str, holders[summed[0]]))
    return (
        f"where several ranks hold one unit (ranks {sharing} that at index {summed[0]} of dimension {dim}) their sum equals the expected"
        f" value: a missing all_reduce(SUM) among them in {where} fits this"
    )


def _slices(actual: torch.Tensor, expected: torch.Tensor, dim: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    return actual.select(dim, index), expected.select(dim, index)


def _factor(wanted: dict[int, torch.Tensor], locals_: dict[int, torch.Tensor], world_size: int, where: str, fit: float) -> str:
    """One and the same constant factor on every rank."""
    e = torch.cat([tensor.reshape(-1) for tensor in wanted.values()])
    a = torch.cat([tensor.reshape(-1) for tensor in locals_.values()])
    if not bool(a.isfinite().all()) or not bool(e.isfinite().all()) or float(e.norm()) == 0.0:
        return ""
    if not bool(a.any()):
        few = e.numel() < 3 * len(locals_)  # a few numbers may be zero for any reason
        return f"all ranks hold zeros: {DETACHED}" if where == "backward" and not few else "all ranks hold zeros"
    telling = {float(world_size): "the world size", 1.0 / world_size: "1 / world size", float(world_size - 1): "world size - 1"}
    for number, name in telling.items():
        if number not in (0.0, 1.0) and same(a, number * e, fit):
            meaning = (
                "one reduction too many" if number == world_size else "one division too many" if number < 1 else "the own rank left out"
            )
            return f"every rank holds {number:g} times the expected value ({name}): {meaning} in {where} fits this"
    for number in SIMPLE_FACTORS:
        if same(a, number * e, fit):
            return f"every rank holds {number:g} times the expected value"
    return ""


def _constant_factor(expected: torch.Tensor, wanted: dict[int, torch.Tensor], locals_: dict[int, torch.Tensor], fit: float) -> str:
    """Any other factor; one number always has one, and so has a gradient of rank one, so it takes more to believe in it."""
    e = torch.cat([tensor.reshape(-1) for tensor in wanted.values()])
    a = torch.cat([tensor.reshape(-1) for tensor in locals_.values()])
    if len(set(expected[expected != 0].tolist())) < 3 or not bool(a.isfinite().all()):
        return ""
    factor = float(a @ e / (e @ e))
    rows = expected.reshape(-1, expected.shape[-1]).double()
    independent = int(torch.linalg.matrix_rank(rows, rtol=max(4 * fit, 1e-9))) > 1
    round_number = abs(factor * 100 - round(factor * 100)) < max(100 * fit, 1e-7)
    if abs(factor - 1) < 1e-6 or not (independent or round_number) or not same(a, factor * e, fit):
        return ""
    return f"every rank holds {factor:.6g} times the expected value: a constant factor fits this"


def _addend(
    wanted: dict[int, torch.Tensor], locals_: dict[int, torch.Tensor], addends: Mapping[str, torch.Tensor], world_size: int, fit: float
) -> str:
    """A bias (or other vector) that every row holds once too often, or not at all."""
    for name, addend in addends.items():
        for times in (world_size - 1, -1, 1):
            found = {rank: _nearest(addend, (locals_[rank] - wanted[rank]) / times) for rank in wanted} if times else {}
            if found and all(part is not None and same(locals_[rank], wanted[rank] + times * part, fit) for rank, part in found.items()):
                if times == world_size - 1:
                    return f"every row holds {name} {world_size} times instead of once: added on every rank before a reduction fits this"
                return f"every row holds {name} {'once too often' if times > 0 else 'once too little'}: that fits exactly"
    return ""


def _nearest(addend: torch.Tensor, difference: torch.Tensor) -> torch.Tensor | None:
    """What may have been added: the addend itself, or for each row that row of a table that explains it best."""
    if addend.shape in (difference.shape, difference.shape[-1:]):
        return addend
    rows = difference.reshape(-1, difference.shape[-1]) if difference.dim() else difference
    if addend.dim() != 2 or difference.dim() < 2 or addend.shape[1] != difference.shape[-1] or not bool(rows.isfinite().all()):
        return None
    if rows.shape[0] * rows.shape[1] < 3 or not addend.numel() or bool((rows == 0).all()):
        return None
    return addend[torch.cdist(rows, addend).argmin(1)].reshape(difference.shape)


def narrower(actual: Mapping[int, Placed], expected: torch.Tensor, dtype: torch.dtype) -> str:
    """Whether every number is one of a narrower dtype's: a sum that was made, or sent, in it and cast back.

    Args:
        expected: the logical tensor; tensors of a few numbers are nobody's in particular.
        dtype: the working dtype.
    """
    held = [placed.local.to(dtype) for placed in actual.values() if placed.local is not None]
    if torch.finfo(dtype).bits == 16 and expected.numel() < FEW:
        return ""
    if not any(bool((torch.frexp(t.double()).mantissa * 16).frac().nan_to_num().any()) for t in held):
        return ""  # zeros, ones and the like are numbers of any dtype
    for other in (torch.bfloat16, torch.float16, torch.float32):
        narrow = torch.finfo(other).eps > torch.finfo(dtype).eps and all(torch.equal(t, t.to(other).to(dtype)) for t in held)
        if held and narrow and not torch.equal(expected, expected.to(other).to(expected.dtype)):
            return f"every number is one of {other}: its rounding fits this"
    return ""
