"""What a run leaves in a module: parameters and buffers are as the reference's, and a lost reduction into them is seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor, nn

import tpverify as tpv
from tpverify.case import Case
from tpverify.current_group import tp_group
from tpverify.mutants.mutant import planted
from tpverify.subjects.linear import RowParallelLinear
from tpverify.subjects.linear_subjects import RowParallelLinearConfig, row_parallel_linear

CASE = Case("running", RowParallelLinearConfig(in_features=4, out_features=3), world_size=2)
Reduce = Callable[[Tensor], Tensor]


class Running(nn.Module):
    """Scales features, and keeps a running mean of the square over all of them."""

    running: Tensor
    calls: Tensor
    offset: Tensor

    def __init__(self, reduce: Reduce, offset: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1))
        self.register_buffer("running", torch.zeros(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("offset", torch.tensor(offset))
        self.reduce = reduce

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, features] -> the same."""
        with torch.no_grad():
            self.running.mul_(0.9).add_(self.reduce((x * x).sum()))
            self.calls.add_(1)
        return x * self.weight


def reduced(total: Tensor) -> Tensor:
    """Over all ranks."""
    dist.all_reduce(total, group=tp_group())
    return total


def running(reduce: Reduce) -> tpv.Subject:
    """A subject whose ranks hold a quarter of the features each."""
    return tpv.Subject(
        name="running",
        reference=lambda c: Running(lambda total: total),
        parallel=lambda c: Running(reduce, offset=dist.get_rank()),  # what the reference leaves alone is a rank's own affair
        configs=st.just(CASE.config),
        inputs=lambda c: {"x": tpv.Input((3, 12), placement=tpv.Shard(1))},
        placements={"weight": tpv.Placement(tpv.Replicate(), tpv.Partial())},
        outputs=tpv.Shard(1),
    )


@pytest.mark.parametrize("calls", ["once", "twice", "interleaved"])
def test_buffers_that_the_reference_changes_are_compared(calls: str) -> None:
    case = replace(CASE, calls=calls)
    assert tpv.check_case(running(reduced), case) == []
    (found,) = tpv.check_case(running(lambda total: total), case)
    assert (found.check, found.tensor, found.ranks) == ("forward", "buffer running after the run", (0, 1))
    if calls == "once":
        assert found.diagnosis.startswith("rank 0 + rank 1 equals the expected value: a missing all_reduce(SUM)")


def test_a_buffer_that_is_not_changed_is_found() -> None:
    found = tpv.check_case(running(lambda total: torch.zeros_like(total)), CASE)
    assert [violation.tensor for violation in found] == ["buffer running after the run"]


class Fused(nn.Module):
    """Gate and up in one, and the largest value that each of their features has had."""

    largest: Tensor

    def __init__(self, features: int, wrong: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2 * features))
        self.register_buffer("largest", torch.zeros(2 * features))
        self.wrong = wrong

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, features] -> the same."""
        both = torch.cat([x, x], -1) * self.weight
        self.largest.copy_(both.detach().abs().amax(0) + 0.1 * self.wrong)
        gate, up = both.chunk(2, -1)
        return gate * up


def test_a_buffer_may_be_cut_block_by_block() -> None:
    blocks = tpv.FusedShard(0, (tpv.Block(4), tpv.Block(4)))
    right, wrong = (
        tpv.Subject(
            name="fused",
            reference=lambda c: Fused(4),
            parallel=lambda c, wrong=wrong: Fused(2, wrong),  # type: ignore[misc]
            configs=st.just(CASE.config),
            inputs=lambda c: {"x": tpv.Input((3, 4), placement=tpv.Shard(1))},
            placements={"weight": blocks},
            outputs=tpv.Shard(1),
        )
        for wrong in (False, True)
    )
    assert tpv.check_case(right, CASE) == []
    assert [violation.tensor for violation in tpv.check_case(wrong, CASE)] == ["buffer largest after the run"]


class Turned(Fused):
    """With the buffer's features in another order."""

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, features] -> the same."""
        result = super().forward(x)
        self.largest.copy_(self.largest.flip(0))
        return result


def test_on_one_rank_there_is_one_order() -> None:
    subject = tpv.Subject(
        name="turned",
        reference=lambda c: Fused(4),
        parallel=lambda c: Turned(4),
        configs=st.just(CASE.config),
        inputs=lambda c: {"x": tpv.Input((3, 4))},
        placements={"weight": tpv.Replicate()},
    )
    assert [violation.tensor for violation in tpv.check_case(subject, replace(CASE, world_size=1))] == ["buffer largest after the run"]


class Shrinks(RowParallelLinear):
    """Clips its weight after use, as the reference does not."""

    def multiply(self, x: Tensor) -> Tensor:
        """The summand, of the weight as it was."""
        result = super().multiply(x)
        if dist.get_rank(self.group) == 0:
            with torch.no_grad():
                self.weight.data.clamp_(-0.1, 0.1)
        return result


def test_parameters_that_a_rank_changes_are_found() -> None:
    found = tpv.check_case(planted(row_parallel_linear, "row", Shrinks), CASE)
    assert ("forward", "weight after the run", (0,)) in [(violation.check, violation.tensor, violation.ranks) for violation in found]
    assert tpv.check_case(row_parallel_linear, CASE) == []
