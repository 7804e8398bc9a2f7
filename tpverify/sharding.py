"""How the local tensors of the ranks make up one logical tensor: even, uneven, padded, fused and replicated cuts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import TypeAlias

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from tpverify.errors import SubjectError

__all__ = [
    "Block",
    "FusedShard",
    "Layout",
    "PaddedShard",
    "Partial",
    "Placement",
    "PlacementLike",
    "Replicate",
    "Shard",
    "UnevenShard",
    "as_placement",
    "describe",
    "local_indices",
    "local_shape",
    "owners",
    "padded_size",
    "shard",
    "sharded_dim",
    "unshard",
]

RULES = ("chunk", "tensor_split", "last")


@dataclass(frozen=True)
class UnevenShard:
    """A cut along ``dim`` that need not divide.

    Attributes:
        dim: dimension that is cut; negative counts from the end.
        rule: ``chunk``: ceil-sized parts as ``torch.chunk``, the last ranks may hold less or nothing;
            ``tensor_split``: the first ``size % world_size`` ranks hold one more; ``last``: floor-sized parts, the last rank
            holds the rest too.
    """

    dim: int
    rule: str

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise SubjectError(f"Expected rule to be one of {', '.join(RULES)} but got rule={self.rule!r}")


@dataclass(frozen=True)
class PaddedShard:
    """An even cut along ``dim`` after zeros are appended up to the next multiple of ``multiple * world_size``.

    The padding belongs to the local tensors only: 50257 ids with ``multiple=128`` on 8 ranks are 8 parts of 6400.
    """

    dim: int
    multiple: int = 1

    def __post_init__(self) -> None:
        _at_least_one("multiple", self.multiple)


@dataclass(frozen=True)
class Block:
    """One part of a fused dimension, such as Q, K or V, or gate or up.

    Attributes:
        size: extent along the fused dimension, elements.
        units: number of equal units (heads) that are never cut. More units than ranks: each rank holds
            ``units / world_size`` of them. Fewer: neighbouring ranks hold the same unit. None: cut by elements, as ``Shard``.
    """

    size: int
    units: int | None = None

    def __post_init__(self) -> None:
        if self.size < 0:
            raise SubjectError(f"Expected the size of a block to be at least 0 but got size={self.size}")
        if self.units is not None:
            _at_least_one("units", self.units)
            if self.size % self.units:
                raise SubjectError(
                    f"Expected the size of a block to be a multiple of its units but got size={self.size}, units={self.units}"
                )


@dataclass(frozen=True)
class FusedShard:
    """Blocks that lie one after the other along ``dim``; each is cut by itself, and a rank holds its parts one after the other."""

    dim: int
    blocks: tuple[Block, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.blocks, tuple) or not self.blocks or not all(isinstance(block, Block) for block in self.blocks):
            raise SubjectError(f"Expected blocks to be a non-empty tuple of Block but got blocks={self.blocks!r}")


Layout: TypeAlias = Shard | Replicate | Partial | UnevenShard | PaddedShard | FusedShard

_CUTS = (Shard, UnevenShard, PaddedShard, FusedShard)


@dataclass(frozen=True)
class Placement:
    """Where a tensor's value lies and where its gradient lies; they differ for, say, a bias kept on rank 0 only.

    Attributes:
        value: layout of the value.
        gradient: layout of the gradient; None = that of the value.
    """

    value: Layout
    gradient: Layout | None = None

    def __post_init__(self) -> None:
        _check_layout(self.value)
        if self.gradient is not None:
            _check_layout(self.gradient)

    @property
    def of_gradient(self) -> Layout:
        """Layout of the gradient."""
        return self.value if self.gradient is None else self.gradient


PlacementLike: TypeAlias = Placement | Layout


def as_placement(placement: PlacementLike) -> Placement:
    """A :class:`Placement` from itself or from a bare layout.

    Raises:
        SubjectError: ``placement`` is neither.
    """
    return placement if isinstance(placement, Placement) else Placement(placement)


def sharded_dim(layout: Layout) -> int | None:
    """The dimension that ``layout`` cuts, as written (perhaps negative); None for ``Replicate`` and ``Partial``."""
    return layout.dim if isinstance(layout, _CUTS) else None


def padded_size(size: int, layout: Layout, world_size: int) -> int:
    """Extent of the sharded dimension with padding: ``size`` unless ``layout`` pads."""
    if not isinstance(layout, PaddedShard):
        return size
    step = layout.multiple * world_size
    return -(-size // step) * step


def local_indices(size: int, layout: Layout, rank: int, world_size: int) -> list[int]:
    """Which logical index each local position along the sharded dimension holds.

    Args:
        size: logical extent of that dimension, elements; for ``Replicate`` and ``Partial``, of any dimension.

    Returns:
        One logical index for each local position, in order; -1 for padding.

    Raises:
        SubjectError: the layout does not fit ``size`` or ``world_size``.
    """
    ranges, padding = _cut(size, layout, rank, world_size)
    return [index for start, stop in ranges for index in range(start, stop)] + [-1] * padding


def owners(size: int, layout: Layout, world_size: int) -> list[list[int]]:
    """For each logical index along the sharded dimension, the ranks that hold it, ascending."""
    holders: list[list[int]] = [[] for _ in range(size)]
    for rank in range(world_size):
        for start, stop in _cut(size, layout, rank, world_size)[0]:
            for index in range(start, stop):
                holders[index].append(rank)
    return holders


def local_shape(logical_shape: Sequence[int], layout: Layout, rank: int, world_size: int) -> tuple[int, ...]:
    """Shape of one rank's tensor, padding included.

    Raises:
        SubjectError: the layout does not fit the shape or the world size.
    """
    shape = list(logical_shape)
    dim = _normalized_dim(shape, layout)
    ranges, padding = _cut(0 if dim is None else shape[dim], layout, rank, world_size)
    if dim is not None:
        shape[dim] = sum(stop - start for start, stop in ranges) + padding
    return tuple(shape)


def shard(tensor: torch.Tensor, layout: Layout, rank: int, world_size: int) -> torch.Tensor:
    """One rank's part of a logical tensor.

    Padding is zero. ``Replicate``: the whole tensor. ``Partial``: the whole tensor on rank 0 and zeros elsewhere.

    Args:
        tensor: the logical tensor.

    Returns:
        A new contiguous tensor without autograd history; it never shares memory with ``tensor``.

    Raises:
        SubjectError: the layout does not fit the tensor or the world size.
    """
    shape = local_shape(tensor.shape, layout, rank, world_size)
    tensor = tensor.detach()
    dim = _normalized_dim(tensor.shape, layout)
    if dim is None:
        return tensor.new_zeros(shape) if isinstance(layout, Partial) and rank > 0 else tensor.new_empty(shape).copy_(tensor)
    ranges, padding = _cut(tensor.shape[dim], layout, rank, world_size)
    local = tensor.new_zeros(shape) if padding else tensor.new_empty(shape)
    offset = 0
    for start, stop in ranges:
        local.narrow(dim, offset, stop - start).copy_(tensor.narrow(dim, start, stop - start))
        offset += stop - start
    return local


def unshard(locals_: Sequence[torch.Tensor], layout: Layout, logical_shape: Sequence[int]) -> torch.Tensor:
    """The logical tensor that the ranks' tensors make up; padding is dropped.

    ``Partial``: the sum in rank order. ``Replicate``, and units held by several ranks: what the lowest rank holds; whether
    the others agree is for the caller to ask.

    Args:
        locals_: the local tensors, by rank; where dtypes differ, the result has the one they promote to.
        logical_shape: shape of the result.

    Returns:
        A new contiguous tensor without autograd history.

    Raises:
        SubjectError: a local shape is not what the layout makes of ``logical_shape``.
    """
    world_size = len(locals_)
    _at_least_one("world_size", world_size)
    for rank, local in enumerate(locals_):
        expected = local_shape(logical_shape, layout, rank, world_size)
        if tuple(local.shape) != expected:
            raise SubjectError(
                f"Expected {describe(layout, world_size)} of {tuple(logical_shape)} to be {expected} on rank {rank} of {world_size} "
                f"but got shape={tuple(local.shape)}: correct the placement or the logical shape"
            )
    dtype = reduce(torch.promote_types, (local.dtype for local in locals_))
    logical = locals_[0].new_empty(tuple(logical_shape), dtype=dtype)
    dim = _normalized_dim(logical.shape, layout)
    if dim is None:
        logical.copy_(locals_[0].detach())
        for local in locals_[1:] if isinstance(layout, Partial) else ():
            logical += local.detach()
        return logical
    for rank in reversed(range(world_size)):  # the lowest holder of an index writes last
        offset = 0
        for start, stop in _cut(logical.shape[dim], layout, rank, world_size)[0]:
            logical.narrow(dim, start, stop - start).copy_(locals_[rank].detach().narrow(dim, offset, stop - start))
            offset += stop - start
    return logical


def describe(layout: Layout, world_size: int) -> str:
    """Short text of a layout for messages, such as ``Shard(0)``, or ``FusedShard(0, 8|4|4)`` with the sizes of its blocks."""
    if isinstance(layout, UnevenShard):
        return f"UnevenShard({layout.dim}, {layout.rule})"
    if isinstance(layout, PaddedShard):
        return f"PaddedShard({layout.dim}, multiple={layout.multiple})"
    if isinstance(layout, FusedShard):
        sizes = "|".join(str(block.size) for block in layout.blocks)
        shared = [str(position) for position, block in enumerate(layout.blocks) if (block.units or world_size) < world_size]
        note = f", units of block {', '.join(shared)} replicated" if shared else ""
        return f"FusedShard({layout.dim}, {sizes}{note})"
    if isinstance(layout, Shard):
        return f"Shard({layout.dim})"
    return "Partial" if isinstance(layout, Partial) else "Replicate"


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise SubjectError(f"Expected {name} to be at least 1 but got {name}={value}")


def _check_layout(layout: object) -> None:
    # Exact types: DTensor's private subclasses (masked partials, strided shards) hold other local values.
    if type(layout) not in (*_CUTS, Replicate, Partial):
        raise SubjectError(
            f"Expected a placement (Shard, Replicate, Partial, UnevenShard, PaddedShard, FusedShard or Placement) but got {layout!r}"
        )
    if isinstance(layout, Partial) and layout.reduce_op != "sum":
        raise SubjectError(f"Expected Partial('sum'), the only reduction supported, but got reduce_op={layout.reduce_op!r}")


def _normalized_dim(shape: Sequence[int], layout: Layout) -> int | None:
    dim = sharded_dim(layout)
    if dim is None:
        return None
    if not -len(shape) <= dim < len(shape):
        raise SubjectError(f"Expected a dimension of a {len(shape)}-d tensor of shape {tuple(shape)} but got dim={dim}")
    return dim % len(shape)


@lru_cache(maxsize=4096)
def _cut(size: int, layout: Layout, rank: int, world_size: int) -> tuple[tuple[tuple[int, int], ...], int]:
    """The one index map: the half-open ranges of logical indices that a rank holds, in local order, and the padding after them."""
    _check_layout(layout)
    _at_least_one("world_size", world_size)
    if not 0 <= rank < world_size:
        raise SubjectError(f"Expected 0 <= rank < world_size but got rank={rank}, world_size={world_size}")
    if isinstance(layout, FusedShard):
        return _cut_blocks(size, layout.blocks, rank, world_size), 0
    if isinstance(layout, PaddedShard):
        part = padded_size(size, layout, world_size) // world_size
        start, stop = min(size, rank * part), min(size, (rank + 1) * part)
        return ((start, stop),), part - (stop - start)
    if isinstance(layout, (Replicate, Partial)):
        return ((0, size),), 0
    return (_split(size, layout.rule if isinstance(layout, UnevenShard) else "chunk", rank, world_size),), 0


def _split(size: int, rule: str, rank: int, world_size: int) -> tuple[int, int]:
    if rule == "chunk":
        part = -(-size // world_size)
        return min(size, rank * part), min(size, (rank + 1) * part)
    part, rest = divmod(size, world_size)
    if rule == "tensor_split":
        return rank * part + min(rank, rest), (rank + 1) * part + min(rank + 1, rest)
    return rank * part, size if rank == world_size - 1 else (rank + 1) * part


def _cut_blocks(size: int, blocks: tuple[Block, ...], rank: int, world_size: int) -> tuple[tuple[int, int], ...]:
    total = sum(block.size for block in blocks)
    if total != size:
        sizes = " + ".join(str(block.size) for block in blocks)
        raise SubjectError(f"Expected the blocks to add up to the dimension's size={size} but got {sizes} = {total}")
    ranges = []
    offset = 0
    for block in blocks:
        start, stop = _cut_block(block, rank, world_size)
        ranges.append((offset + start, offset + stop))
        offset += block.size
    return tuple(ranges)


def _cut_block(block: Block, rank: int, world_size: int) -> tuple[int, int]:
    if block.units is None:
        return _split(block.size, "chunk", rank, world_size)
    width = block.size // block.units
    if block.units >= world_size:
        if block.units % world_size:
            raise SubjectError(f"Expected units to be a multiple of the world size but got units={block.units}, world_size={world_size}")
        count = block.units // world_size
        return rank * count * width, (rank + 1) * count * width
    if world_size % block.units:
        raise SubjectError(
            f"Expected the world size to be a multiple of the units, where they are fewer than the ranks, "
            f"but got units={block.units}, world_size={world_size}"
        )
    unit = rank // (world_size // block.units)
    return unit * width, (unit + 1) * width
