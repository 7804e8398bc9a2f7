"""Unusual but right: what looks like a bug, has been reported as one, and must pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from planted import OpenColumnLinear, OpenRowLinear, built_in_configs, clone_reduce, plant
from torch import Tensor, nn

from tpverify.sharding import Partial, Placement, Replicate, Shard, UnevenShard
from tpverify.subjects.linear_subjects import RowParallelLinearConfig, column_parallel_linear, row_parallel_linear
from tpverify.subjects.mappings import Group, apply, reduce_from_region, scatter_to_region
from tpverify.subjects.parameters import with_bias
from tpverify.subjects.subject import Input


class BiasBeforeReduction(OpenRowLinear):
    """Adds whatever bias this rank holds before the sum."""

    def multiply(self, x: Tensor) -> Tensor:
        """With the bias."""
        return F.linear(x, self.weight, self.bias)

    def add_bias(self, output: Tensor) -> Tensor:
        """Nothing left to add."""
        return output


def bias_on_rank_zero(config: RowParallelLinearConfig) -> nn.Module:
    """Only the first rank of the group has a bias."""
    module: Any = zero_elsewhere.parallel(config)
    if module.group.rank() > 0:
        module.bias = None
    return module  # type: ignore[no-any-return]


def added_bias(world_size: int) -> Any:
    """Configs whose bias is added by the layer, and is not left partial by sequence parallelism."""
    return built_in_configs(row_parallel_linear, world_size).map(lambda c: replace(c, skip_bias_add=False, sequence_parallel=False))


def partial_bias(config: RowParallelLinearConfig) -> dict[str, Any]:
    """The ranks' biases add up to the bias, and each has its whole gradient."""
    weight = UnevenShard(1, "tensor_split") if config.uneven else Shard(1)
    return {"weight": weight, "bias": Placement(Partial(), Replicate())} if config.bias else {"weight": weight}


zero_elsewhere = plant(row_parallel_linear, "zero_elsewhere", BiasBeforeReduction, configs=added_bias, placements=partial_bias)
rank_zero_only = plant(zero_elsewhere, "rank_zero_only", parallel=bias_on_rank_zero)


def bias_on_last_rank(config: RowParallelLinearConfig) -> nn.Module:
    """Only the last rank of the group has a bias."""
    module: Any = zero_elsewhere.parallel(config)
    if module.group.rank() < module.group.size() - 1:
        module.bias = None
    return module  # type: ignore[no-any-return]


last_rank_only = plant(zero_elsewhere, "last_rank_only", parallel=bias_on_last_rank)


class BiasHeldTwice(BiasBeforeReduction):
    """The last rank has the bias, and adds it once for every rank."""

    def multiply(self, x: Tensor) -> Tensor:
        """With a multiple of this rank's bias."""
        return with_bias(F.linear(x, self.weight), None if self.bias is None else self.bias * self.group.size())


held_twice = plant(row_parallel_linear, "held_twice", BiasHeldTwice, configs=added_bias, placements=partial_bias)


def repeated_bias_on_last_rank(config: RowParallelLinearConfig) -> nn.Module:
    """As ``bias_on_last_rank``, but wrong."""
    module: Any = held_twice.parallel(config)
    if module.group.rank() < module.group.size() - 1:
        module.bias = None
    return module  # type: ignore[no-any-return]


last_rank_repeats = plant(held_twice, "last_rank_repeats", parallel=repeated_bias_on_last_rank)


class Share(torch.autograd.Function):
    """1 / world size of a value whose gradient stays whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        return x / size

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class BiasDividedBefore(BiasBeforeReduction):
    """Every rank adds its share of the bias before the sum."""

    def multiply(self, x: Tensor) -> Tensor:
        """With this rank's share."""
        return with_bias(F.linear(x, self.weight), None if self.bias is None else apply(Share, self.bias, self.group.size()))


bias_divided = plant(row_parallel_linear, "bias_divided", BiasDividedBefore, configs=added_bias, exact=False)


class ScatteredLinear(nn.Linear):
    """A linear layer that works on this rank's part of a replicated sequence: the gradient of the input is gathered."""

    def __init__(self, config: RowParallelLinearConfig, group: Group) -> None:
        super().__init__(config.in_features, config.out_features, bias=config.bias)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, in_features] -> [s / world_size, b, out_features]."""
        part = len(x) // self.group.size()
        return super().forward(scatter_to_region(x, 0, [part] * self.group.size(), self.group))


def sequences(world_size: int) -> Any:
    """Plain configs with a sequence that divides."""
    return built_in_configs(row_parallel_linear, world_size).map(
        lambda c: replace(c, seq=c.seq * world_size, skip_bias_add=False, sequence_parallel=False, input_is_parallel=False, uneven=True)
    )


def scattered(config: RowParallelLinearConfig) -> nn.Module:
    """The layer in the default group."""
    world = dist.group.WORLD
    assert world is not None
    return ScatteredLinear(config, world)


sequence_scattered = plant(
    row_parallel_linear,
    "sequence_scattered",
    parallel=scattered,
    configs=sequences,
    inputs=lambda c: {"x": Input((c.seq, c.batch, c.in_features))},
    outputs=Shard(0),
    placements={"*": Placement(Replicate(), Partial())},
    finalize_gradients=None,
    communication=None,
    subgroups=False,
)


class ColumnOfData(OpenColumnLinear):
    """No f, since nobody asks for the gradient of the input."""

    def spread(self, x: Tensor) -> Tensor:
        """Identity, backward too."""
        return x


def without_sequence(world_size: int) -> Any:
    """Configs without sequence parallelism."""
    return built_in_configs(column_parallel_linear, world_size).map(lambda c: replace(c, sequence_parallel=False))


input_needs_no_gradient = plant(
    column_parallel_linear,
    "input_needs_no_gradient",
    ColumnOfData,
    configs=without_sequence,
    inputs=lambda c: {"x": Input((c.seq, c.batch, c.in_features), grad=False)},
    communication=None,
)


class Chatty(OpenRowLinear):
    """Reduces once more for a statistic, and from another line on the first rank."""

    def reduce(self, partial: Tensor) -> Tensor:
        """g, after a collective of no consequence."""
        if self.group.rank() == 0:
            clone_reduce(partial.abs().sum(), self.group)
            output = reduce_from_region(partial, self.group)
        else:
            clone_reduce(partial.abs().sum(), self.group)
            output = reduce_from_region(partial, self.group)
        return output


chatty = plant(row_parallel_linear, "chatty", Chatty, communication=None)
