"""Sharding: every layout round-trips, agrees with an independent construction, and refuses what does not fit."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tpverify.errors import SubjectError
from tpverify.sharding import (
    Block,
    FusedShard,
    Layout,
    PaddedShard,
    Partial,
    Placement,
    Replicate,
    Shard,
    UnevenShard,
    as_placement,
    describe,
    local_indices,
    local_shape,
    owners,
    padded_size,
    shard,
    sharded_dim,
    unshard,
)

WORLD_SIZES = st.sampled_from((1, 2, 3, 4, 5, 6, 8))


@dataclass(frozen=True)
class Cut:
    """A logical shape, how it is cut and over how many ranks."""

    shape: tuple[int, ...]
    layout: Layout
    world_size: int

    @property
    def size(self) -> int:
        dim = sharded_dim(self.layout)
        return 1 if dim is None else self.shape[dim]

    def tensor(self) -> torch.Tensor:
        """Distinct non-zero values, so that a misplaced element and stray padding show."""
        return torch.arange(1.0, 1 + torch.Size(self.shape).numel()).reshape(self.shape)

    def locals(self) -> list[torch.Tensor]:
        return [shard(self.tensor(), self.layout, rank, self.world_size) for rank in range(self.world_size)]


@st.composite
def blocks(draw: st.DrawFn, world_size: int) -> Block:
    kind = draw(st.sampled_from(("elements", "units", "replicated units")))
    if kind == "elements":
        return Block(draw(st.integers(0, 9)))
    if kind == "units":
        units = world_size * draw(st.integers(1, 2))
    else:
        units = draw(st.sampled_from([count for count in range(1, world_size + 1) if world_size % count == 0]))
    return Block(units * draw(st.integers(1, 3)), units)


@st.composite
def cuts(draw: st.DrawFn, kinds: tuple[type, ...] = (Shard, Replicate, Partial, UnevenShard, PaddedShard, FusedShard)) -> Cut:
    world_size = draw(WORLD_SIZES)
    kind = draw(st.sampled_from(kinds))
    shape = draw(st.lists(st.integers(0, 4), min_size=0 if kind in (Replicate, Partial) else 1, max_size=3))
    if kind in (Replicate, Partial):
        return Cut(tuple(shape), kind(), world_size)
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    size = draw(st.integers(0, 20))
    layout: Layout = Shard(dim)
    if kind is UnevenShard:
        layout = UnevenShard(dim, draw(st.sampled_from(("chunk", "tensor_split", "last"))))
    elif kind is PaddedShard:
        layout = PaddedShard(dim, draw(st.integers(1, 4)))
    elif kind is FusedShard:
        layout = FusedShard(dim, tuple(draw(st.lists(blocks(world_size), min_size=1, max_size=3))))
        size = sum(block.size for block in layout.blocks)
    shape[dim] = size
    return Cut(tuple(shape), layout, world_size)


def by_hand(cut: Cut) -> list[torch.Tensor]:
    """The local tensors, built from torch's own functions."""
    tensor, layout, world_size = cut.tensor(), cut.layout, cut.world_size
    if isinstance(layout, Replicate):
        return [tensor] * world_size
    if isinstance(layout, Partial):
        return [tensor] + [torch.zeros_like(tensor)] * (world_size - 1)
    moved = tensor.movedim(layout.dim, 0)
    if isinstance(layout, UnevenShard) and layout.rule == "tensor_split":
        parts = moved.tensor_split(world_size)
    elif isinstance(layout, UnevenShard) and layout.rule == "last":
        floor = len(moved) // world_size
        parts = torch.split(moved, [floor] * (world_size - 1) + [len(moved) - floor * (world_size - 1)])
    elif isinstance(layout, PaddedShard):
        while len(moved) % (layout.multiple * world_size):
            moved = torch.cat([moved, torch.zeros_like(moved[:1])])
        parts = torch.split(moved, len(moved) // world_size) if len(moved) else (moved,) * world_size
    elif isinstance(layout, FusedShard):
        by_block = [
            cut_block(part, block, world_size)
            for part, block in zip(torch.split(moved, [block.size for block in layout.blocks]), layout.blocks, strict=True)
        ]
        parts = tuple(torch.cat(rank_parts) for rank_parts in zip(*by_block, strict=True))
    else:
        parts = chunk(moved, world_size)
    return [part.movedim(0, layout.dim) for part in parts]


def cut_block(part: torch.Tensor, block: Block, world_size: int) -> tuple[torch.Tensor, ...]:
    """Replicated units are repeated until every rank can have its own; then everything divides."""
    if block.units is None:
        return chunk(part, world_size)
    units = part.reshape(block.units, len(part) // block.units, *part.shape[1:])
    units = units.repeat_interleave(max(1, world_size // block.units), dim=0)
    return tuple(rank_units.flatten(0, 1) for rank_units in units.chunk(world_size))


def chunk(tensor: torch.Tensor, world_size: int) -> tuple[torch.Tensor, ...]:
    """``torch.chunk`` with the empty parts that it leaves out."""
    parts = tensor.chunk(world_size) if len(tensor) else (tensor,)
    return (*parts, *[tensor[:0]] * (world_size - len(parts)))


@settings(deadline=None)
@given(cuts())
@example(Cut((5,), Shard(0), 4))  # 2, 2, 1, 0
@example(Cut((2, 3), UnevenShard(0, "last"), 4))  # 0, 0, 0, 2
@example(Cut((3,), PaddedShard(0), 8))  # five ranks hold padding only
@example(Cut((12, 2), FusedShard(0, (Block(8, 4), Block(2, 2), Block(2, 2))), 4))
def test_round_trip(cut: Cut) -> None:
    assert torch.equal(unshard(cut.locals(), cut.layout, cut.shape), cut.tensor())


@settings(deadline=None)
@given(cuts())
def test_agrees_with_torch(cut: Cut) -> None:
    for rank, (local, expected) in enumerate(zip(cut.locals(), by_hand(cut), strict=True)):
        assert torch.equal(local, expected), rank
        assert local_shape(cut.shape, cut.layout, rank, cut.world_size) == tuple(local.shape)


@settings(deadline=None)
@given(st.integers(0, 100), WORLD_SIZES)
def test_shard_agrees_with_dtensor(size: int, world_size: int) -> None:
    for rank in range(world_size):
        length, offset = Shard.local_shard_size_and_offset(size, world_size, rank)
        assert local_indices(size, Shard(0), rank, world_size) == list(range(offset, offset + length))


@settings(deadline=None)
@given(cuts((Shard, UnevenShard, PaddedShard, FusedShard)))
def test_index_map_describes_the_locals(cut: Cut) -> None:
    along = sharded_dim(cut.layout)
    assert along is not None
    logical = cut.tensor().movedim(along, 0)
    for rank, local in enumerate(cut.locals()):
        indices = local_indices(cut.size, cut.layout, rank, cut.world_size)
        rows = local.movedim(along, 0)
        assert len(indices) == len(rows)
        for index, row in zip(indices, rows, strict=True):
            assert torch.equal(row, torch.zeros_like(row) if index == -1 else logical[index])


@settings(deadline=None)
@given(cuts((Shard, UnevenShard, PaddedShard, FusedShard)))
def test_every_index_has_its_owners(cut: Cut) -> None:
    held = owners(cut.size, cut.layout, cut.world_size)
    assert len(held) == cut.size
    for index, ranks in enumerate(held):
        assert ranks == [rank for rank in range(cut.world_size) if index in local_indices(cut.size, cut.layout, rank, cut.world_size)]
    parts = cut.layout.blocks if isinstance(cut.layout, FusedShard) else (Block(cut.size),)
    copies = [max(1, cut.world_size // (block.units or cut.world_size)) for block in parts for _ in range(block.size)]
    assert [len(ranks) for ranks in held] == copies


@settings(deadline=None)
@given(st.integers(0, 1000), st.integers(1, 64), WORLD_SIZES)
def test_padding_is_the_least_that_divides(size: int, multiple: int, world_size: int) -> None:
    padded = padded_size(size, PaddedShard(0, multiple), world_size)
    assert padded % (multiple * world_size) == 0
    assert 0 <= padded - size < multiple * world_size
    assert padded_size(size, Shard(0), world_size) == size


def test_padded_vocabulary() -> None:
    layout = PaddedShard(0, multiple=128)
    assert padded_size(50257, layout, 8) == 51200
    assert [local_shape((50257, 4), layout, rank, 8) for rank in range(8)] == [(6400, 4)] * 8
    assert sum(local_indices(50257, layout, rank, 8).count(-1) for rank in range(8)) == 943


def test_fused_layout_read_off_by_hand() -> None:
    layout = FusedShard(0, (Block(8, units=4), Block(4, units=2), Block(4, units=2)))
    assert [local_indices(16, layout, rank, 4) for rank in range(4)] == [
        [0, 1, 8, 9, 12, 13],
        [2, 3, 8, 9, 12, 13],
        [4, 5, 10, 11, 14, 15],
        [6, 7, 10, 11, 14, 15],
    ]


def test_units_are_never_cut() -> None:
    # One head of 4 on 2 ranks: both hold all of it, whereas Block(4) would be cut in half.
    assert local_indices(4, FusedShard(0, (Block(4, units=1),)), 1, 2) == [0, 1, 2, 3]
    assert local_indices(4, FusedShard(0, (Block(4),)), 1, 2) == [2, 3]


@settings(deadline=None)
@given(cuts(), st.booleans())
def test_results_are_fresh_and_contiguous(cut: Cut, transposed: bool) -> None:
    tensor = cut.tensor().requires_grad_()
    source = tensor.mT.contiguous().mT if transposed and tensor.dim() > 1 else tensor
    before = source.detach().clone()
    locals_ = [shard(source, cut.layout, rank, cut.world_size) for rank in range(cut.world_size)]
    logical = unshard(locals_, cut.layout, cut.shape)
    assert torch.equal(logical, before)
    for local in (*locals_, logical):
        assert local.is_contiguous()
        assert not local.requires_grad
        assert local.dtype == source.dtype
        local.fill_(-1.0)
        assert torch.equal(source, before)
    for rank, local in enumerate(locals_):
        local.fill_(float(rank))
    assert all(bool((local == rank).all()) for rank, local in enumerate(locals_))


def test_partial_sums_in_rank_order() -> None:
    # 1 + 1e16 loses the 1; added after the cancellation it survives.
    locals_ = [torch.tensor([value], dtype=torch.float64) for value in (1e16, -1e16, 1.0)]
    assert unshard(locals_, Partial(), (1,)).item() == 1.0
    assert unshard([locals_[2], *locals_[:2]], Partial(), (1,)).item() == 0.0


def test_lowest_rank_decides_where_several_hold_a_value() -> None:
    locals_ = [torch.full((2,), float(rank)) for rank in range(4)]
    assert unshard(locals_, Replicate(), (2,)).tolist() == [0.0, 0.0]
    assert unshard(locals_, FusedShard(0, (Block(4, units=2),)), (4,)).tolist() == [0.0, 0.0, 2.0, 2.0]


def test_mixed_dtypes_promote() -> None:
    locals_ = [torch.ones(1, dtype=torch.float32), torch.full((1,), 0.1, dtype=torch.float64)]
    assert unshard(locals_, Shard(0), (2,)).tolist() == [1.0, 0.1]


def test_placement_of_the_gradient_defaults_to_that_of_the_value() -> None:
    assert as_placement(Shard(0)) == Placement(Shard(0))
    assert as_placement(Placement(Partial(), Replicate())).of_gradient == Replicate()
    assert Placement(Shard(1)).of_gradient == Shard(1)


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (Shard(-1), "Shard(-1)"),
        (Replicate(), "Replicate"),
        (Partial(), "Partial"),
        (UnevenShard(1, "last"), "UnevenShard(1, last)"),
        (PaddedShard(0, 128), "PaddedShard(0, multiple=128)"),
        (FusedShard(0, (Block(8, 4), Block(4, 2))), "FusedShard(0, 8|4, units of block 1 replicated)"),
        (FusedShard(0, (Block(8), Block(8))), "FusedShard(0, 8|8)"),
    ],
)
def test_describe(layout: Layout, text: str) -> None:
    assert describe(layout, 4) == text


@pytest.mark.parametrize("placement", ["Shard(0)", None, 0, Shard, (Shard(0),)])
def test_only_placements_are_placements(placement: Any) -> None:
    with pytest.raises(SubjectError, match=f"Expected a placement .* got {re.escape(repr(placement))}"):
        as_placement(placement)


def test_only_sums_are_supported() -> None:
    with pytest.raises(SubjectError, match=r"Expected Partial\('sum'\).*reduce_op='avg'"):
        as_placement(Partial("avg"))
    with pytest.raises(SubjectError, match="reduce_op='max'"):
        shard(torch.ones(2), Partial("max"), 0, 2)


@pytest.mark.parametrize(
    ("shape", "layout", "numbers"),
    [
        ((4,), Shard(1), "1-d tensor of shape (4,) but got dim=1"),
        ((4, 4), UnevenShard(-3, "chunk"), "2-d tensor of shape (4, 4) but got dim=-3"),
        ((), PaddedShard(0), "0-d tensor of shape () but got dim=0"),
        ((7,), FusedShard(0, (Block(4), Block(4))), "size=7 but got 4 + 4 = 8"),
        ((5,), FusedShard(0, (Block(5, units=5),)), "units=5, world_size=3"),
        ((2,), FusedShard(0, (Block(2, units=2),)), "units=2, world_size=3"),
    ],
)
def test_layouts_that_do_not_fit(shape: tuple[int, ...], layout: Layout, numbers: str) -> None:
    with pytest.raises(SubjectError, match=re.escape(numbers)):
        shard(torch.zeros(shape), layout, 0, 3)
    with pytest.raises(SubjectError, match=re.escape(numbers)):
        local_shape(shape, layout, 0, 3)


@pytest.mark.parametrize("rank", [-1, 3])
def test_ranks_outside_the_world(rank: int) -> None:
    for layout in (Replicate(), Shard(0), Partial()):
        with pytest.raises(SubjectError, match=f"rank={rank}, world_size=3"):
            shard(torch.zeros(3), layout, rank, 3)


def test_layouts_that_contradict_themselves() -> None:
    with pytest.raises(SubjectError, match="chunk, tensor_split, last but got rule='even'"):
        UnevenShard(0, "even")
    with pytest.raises(SubjectError, match="multiple=0"):
        PaddedShard(0, 0)
    with pytest.raises(SubjectError, match="size=6, units=4"):
        Block(6, units=4)
    with pytest.raises(SubjectError, match="units=0"):
        Block(6, units=0)
    with pytest.raises(SubjectError, match="size=-1"):
        Block(-1)
    with pytest.raises(SubjectError, match="non-empty tuple of Block"):
        FusedShard(0, ())


def test_locals_that_contradict_the_logical_shape() -> None:
    with pytest.raises(SubjectError, match=r"Shard\(0\) of \(5, 2\) to be \(2, 2\) on rank 1 of 3 but got shape=\(3, 2\)"):
        unshard([torch.zeros(2, 2), torch.zeros(3, 2), torch.zeros(0, 2)], Shard(0), (5, 2))
    with pytest.raises(SubjectError, match=r"Replicate of \(2,\)"):
        unshard([torch.zeros(2), torch.zeros(3)], Replicate(), (2,))
    with pytest.raises(SubjectError, match="world_size=0"):
        unshard([], Replicate(), (2,))
