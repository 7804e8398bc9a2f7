"""Every kind of values and every memory layout reaches the module as it was announced."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bent_subjects import SIZES, Sizes, bent, right
from hypothesis import strategies as st
from torch import Tensor, nn

import tpverify as tpv
from tpverify import values
from tpverify.case import LAYOUTS, Case
from tpverify.runner import run_both
from tpverify.sharding import local_indices, owners
from tpverify.strategies import tensor_values
from tpverify.subjects.mappings import reduce_from_region

SEEN: dict[tuple[str, int], Tensor] = {}


class Watched(nn.Module):
    """Keeps what it is given, by name and rank; -1 for the reference."""

    def __init__(self, c: Sizes, rows: int | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(c.out, c.features if rows is None else rows))

    def forward(self, *inputs: Tensor) -> Tensor:
        """The sum of all there is."""
        rank = dist.get_rank() if dist.is_initialized() else -1
        for index, tensor in enumerate(inputs):
            SEEN[f"input {index}", rank] = tensor
        SEEN["weight", rank] = self.weight
        return sum((tensor.sum() for tensor in inputs), self.weight.sum())


class Cut(Watched):
    """The same on a part."""

    def __init__(self, c: Sizes) -> None:
        super().__init__(c, c.features // dist.get_world_size(tpv.tp_group()))

    def forward(self, *inputs: Tensor) -> Tensor:
        """The sum over ranks."""
        return reduce_from_region(super().forward(*inputs), tpv.tp_group())


watched = bent(reference=Watched, parallel=Cut)


def seen(case: Case, subject: tpv.Subject = watched) -> dict[tuple[str, int], Tensor]:
    """What the reference (-1) and the ranks got."""
    SEEN.clear()
    comparison = run_both(subject, case)[0]
    assert comparison.parallel.error is None, comparison.parallel.error
    return dict(SEEN)


def is_transposed(tensor: Tensor) -> bool:
    return not tensor.is_contiguous() and tensor.transpose(0, -1).is_contiguous()


def is_sliced(tensor: Tensor) -> bool:
    return tensor.stride(-1) == 2 and tensor.storage_offset() == 1


def is_expanded(tensor: Tensor) -> bool:
    return tensor.stride(0) == 0 and tensor.shape[0] > 1


def is_contiguous(tensor: Tensor) -> bool:
    return tensor.is_contiguous()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_what_it_says_on_both_sides(layout: str) -> None:
    recognised = {"transposed": is_transposed, "sliced": is_sliced, "expanded": is_expanded, "contiguous": is_contiguous}
    got = seen(Case("bent", SIZES, 2, layout=layout))
    for rank in (-1, 0, 1):
        tensor = got["input 0", rank]
        assert {name for name, is_so in recognised.items() if is_so(tensor)} == {layout}
        assert tensor.is_leaf
        assert tensor.requires_grad
    whole = torch.cat([got["input 0", 0], got["input 0", 1]], 1)
    assert torch.equal(whole, got["input 0", -1])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (2, 0), (3, 4), (2, 3, 4)])
def test_a_layout_changes_no_value(shape: tuple[int, ...], layout: str) -> None:
    tensor = values.draw_cotangent(Case("x", SIZES, 2, layout=layout), 0, "output", shape)
    assert torch.equal(values.laid_out(tensor, layout), tensor)


def test_the_cotangent_has_the_layout_too() -> None:
    strides: dict[tuple[int, ...], None] = {}

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            strides[gradient.stride()] = None
            return gradient

    spying = bent(reference=lambda c: _Spying(right.reference(c), Spy), parallel=lambda c: _Spying(right.parallel(c), Spy))
    spying = bent(reference=spying.reference, parallel=spying.parallel, placements={"*weight": tpv.Shard(1)})
    run_both(spying, Case("bent", SIZES, 2, layout="sliced"))
    assert {stride[-1] for stride in strides} == {2}


class _Spying(nn.Module):
    def __init__(self, inner: nn.Module, spy: Any) -> None:
        super().__init__()
        self.inner, self.spy = inner, spy

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.spy.apply(self.inner(x))
        return output


def test_normal_values_are_random_and_differ_between_groups_and_seeds_only() -> None:
    got = seen(Case("bent", SIZES, 2, seed=1))
    assert got["input 0", -1].unique().numel() == 12
    assert torch.equal(got["input 0", -1], seen(Case("bent", SIZES, 2, seed=1))["input 0", -1])
    assert not torch.equal(got["input 0", -1], seen(Case("bent", SIZES, 2, seed=2))["input 0", -1])
    two = seen(Case("bent", SIZES, 2, groups="strided"))
    parts = [two["weight", rank] for rank in range(4)]
    assert len({tuple(part.flatten().tolist()) for part in parts}) == 4


def test_integers_are_small_and_never_zero() -> None:
    got = seen(Case("bent", Sizes(8, 8, 8), 2, values="integers"))
    for name, largest in (("input 0", 3), ("weight", 2)):
        assert got[name, -1].abs().unique().tolist() == [float(size) for size in range(1, largest + 1)]
        assert got[name, -1].min() < 0 < got[name, -1].max()


def lookup(layout: Any, pattern: str = "weight") -> tpv.Subject:
    """Ids into a table of 10 rows that is cut."""
    return bent(
        reference=lambda c: Watched(Sizes(out=10, features=1)),
        parallel=lambda c: Watched(Sizes(out=len(local_indices(10, layout, dist.get_rank(), dist.get_world_size())), features=1)),
        inputs=lambda c: {"ids": tpv.Input((6, 50), kind="integers", high=10)},
        placements={pattern: layout},
        vocabulary=lambda c: tpv.Vocabulary(10, parameters=("weight",), ids="ids"),
        subgroups=False,
        exact=False,
    )


@pytest.mark.parametrize("pattern", ["weight", "wei*"])
@pytest.mark.parametrize(
    ("layout", "size", "edges"),
    [
        (tpv.Shard(0), 2, [0, 4, 5, 9]),
        (tpv.PaddedShard(0, 4), 2, [0, 7, 8, 9]),
        (tpv.PaddedShard(0, 1), 3, [0, 3, 4, 7, 8, 9]),
        (tpv.PaddedShard(0, 8), 4, [0, 7, 8, 9]),
        (tpv.UnevenShard(0, "tensor_split"), 3, [0, 3, 4, 6, 7, 9]),
        (tpv.UnevenShard(0, "last"), 3, [0, 2, 3, 5, 6, 9]),
    ],
)
def test_edges_are_the_first_and_last_ids_of_every_shard(layout: Any, size: int, edges: list[int], pattern: str) -> None:
    got = seen(Case("bent", SIZES, size, values="edges"), lookup(layout, pattern))
    assert got["input 0", -1].unique().tolist() == edges
    assert got["input 0", -1].dtype == torch.int64


@pytest.mark.parametrize("layout", [tpv.Shard(0), tpv.PaddedShard(0, 4), tpv.UnevenShard(0, "last")])
def test_one_shard_is_owned_by_one_rank_and_another_one_for_another_seed(layout: Any) -> None:
    owner = owners(10, layout, 2)
    drawn = [seen(Case("bent", SIZES, 2, seed=seed, values="one_shard"), lookup(layout))["input 0", -1] for seed in range(8)]
    ranks = [{owner[identity][0] for identity in ids.unique().tolist()} for ids in drawn]
    assert all(len(rank) == 1 for rank in ranks)
    assert set.union(*ranks) == {0, 1}
    assert max(ids.unique().numel() for ids in drawn) > 1


def test_repeated_is_one_id_and_normal_is_all_of_them() -> None:
    subject = lookup(tpv.Shard(0))
    assert seen(Case("bent", SIZES, 2, values="repeated"), subject)["input 0", -1].unique().numel() == 1
    assert seen(Case("bent", SIZES, 2), subject)["input 0", -1].unique().tolist() == list(range(10))


def logits(ignore: int | None = None) -> tpv.Subject:
    """Logits that are cut along 6 ids."""
    return bent(
        inputs=lambda c: {
            "x": tpv.Input((40, 6), placement=tpv.Shard(1)),
            "targets": tpv.Input((400,), kind="integers", low=1, high=5, ignore=ignore),
        },
        reference=Watched,
        parallel=Cut,
        vocabulary=lambda c: tpv.Vocabulary(6, targets="targets", logits="x"),
    )


def test_a_spike_makes_the_exponentials_of_every_row_overflow_or_vanish() -> None:
    got = seen(Case("bent", SIZES, 2, values="spike"), logits())["input 0", -1]
    limit = math.log(torch.finfo(torch.float64).max)
    huge = (got > limit).sum(-1)
    one, all_of_them, none = huge == 1, huge == 6, (got < -limit).all(-1)
    assert bool((one | all_of_them | none).all())
    assert min(int(rows.sum()) for rows in (one, all_of_them, none)) > 0
    assert {index // 3 for index in got[one].argmax(-1).tolist()} in ({0}, {1})  # always on the same shard
    assert (seen(Case("bent", SIZES, 2), logits())["input 0", -1].abs() < 10).all()


def test_integer_inputs_stay_in_their_range_but_for_ignored_ones() -> None:
    for kind in ("normal", "edges", "one_shard", "repeated"):
        got = seen(Case("bent", SIZES, 2, values=kind), logits())["input 1", -1]
        assert set(got.tolist()) <= {1, 2, 3, 4}
    ignored = seen(Case("bent", SIZES, 2), logits(ignore=-100))["input 1", -1]
    assert set(ignored.tolist()) == {-100, 1, 2, 3, 4}
    assert 50 < int((ignored == -100).sum()) < 150


@pytest.mark.parametrize(
    ("subject", "expected"),
    [
        (right, {"normal", "integers"}),
        (bent(exact=False), {"normal"}),
        (bent(exact=lambda c: c.seq == 1), {"normal", "integers"}),
        (bent(exact=lambda c: c.seq == 2), {"normal"}),
        (lookup(tpv.Shard(0)), {"normal", "edges", "one_shard", "repeated"}),
        (logits(), {"normal", "integers", "edges", "one_shard", "repeated", "spike"}),
    ],
)
def test_only_kinds_that_matter_to_the_subject_are_drawn(subject: tpv.Subject, expected: set[str]) -> None:
    strategy = tensor_values(subject, Sizes())
    assert isinstance(strategy, st.SearchStrategy)
    assert set(strategy.elements) == expected  # type: ignore[attr-defined]


def test_a_parameter_is_scaled_so_that_activations_keep_their_size() -> None:
    case = Case("x", SIZES, 2)
    assert 0.9 < float(values.draw_parameter(case, 0, "w", (64, 64)).std()) * 8 < 1.1
    assert 0.9 < float(values.draw_parameter(case, 0, "b", (4096,)).std()) < 1.1
    assert not torch.equal(values.draw_parameter(case, 0, "a", (4,)), values.draw_parameter(case, 0, "b", (4,)))
