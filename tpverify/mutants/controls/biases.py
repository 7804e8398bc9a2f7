"""Controls: biases that are neither whole nor added last, and add up to one bias all the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis.strategies import SearchStrategy
from torch import Tensor, nn

from tpverify.mutants.control import add_control
from tpverify.mutants.mappings import mapping, same
from tpverify.sharding import Partial, Placement, PlacementLike, Replicate, Shard, UnevenShard
from tpverify.strategies import configs_of
from tpverify.subjects.linear import RowParallelLinear
from tpverify.subjects.linear_subjects import RowParallelLinearConfig, row_parallel_linear
from tpverify.subjects.mappings import gather_from_region
from tpverify.subjects.parameters import with_bias


def added_bias(world_size: int) -> SearchStrategy[RowParallelLinearConfig]:
    """Configs whose bias is added by the layer, and is not left partial by sequence parallelism."""
    return configs_of(row_parallel_linear, world_size).map(lambda c: replace(c, skip_bias_add=False, sequence_parallel=False))


def partial_bias(config: RowParallelLinearConfig) -> dict[str, PlacementLike]:
    """The ranks' biases add up to the bias, and each has its whole gradient."""
    return with_bias_placement(config, Placement(Partial(), Replicate()))


def with_bias_placement(config: RowParallelLinearConfig, bias: PlacementLike) -> dict[str, PlacementLike]:
    """Placements of the weight, and of a bias if there is one."""
    weight = UnevenShard(1, "tensor_split") if config.uneven else Shard(1)
    return {"weight": weight, "bias": bias} if config.bias else {"weight": weight}


class BiasBeforeReduction(RowParallelLinear):
    """Adds whatever bias this rank holds before the sum."""

    def multiply(self, x: Tensor) -> Tensor:
        """With the bias."""
        return with_bias(super().multiply(x), self.bias)

    def add_bias(self, output: Tensor) -> Tensor:
        """Nothing left to add."""
        return output


class BiasDividedBefore(BiasBeforeReduction):
    """Every rank adds its share of the bias before the sum; the share's gradient is the whole one."""

    def multiply(self, x: Tensor) -> Tensor:
        """With this rank's share."""
        size = self.group.size()
        share = None if self.bias is None else mapping(self.bias, lambda bias: bias / size, same)
        return with_bias(RowParallelLinear.multiply(self, x), share)


class BiasCutAndGathered(RowParallelLinear):
    """Holds a part of the bias and joins the parts to add them."""

    def add_bias(self, output: Tensor) -> Tensor:
        """With all parts."""
        if self.bias is None:
            return output
        size = self.group.size()
        return output + gather_from_region(self.bias, 0, [len(self.bias)] * size, self.group)


def bias_on(first: bool) -> Any:
    """``parallel`` of a layer whose bias is on the first rank of the group only, or on the last."""

    def parallel(config: RowParallelLinearConfig) -> nn.Module:
        module: Any = row_parallel_linear.parallel(config)
        if module.group.rank() != (0 if first else module.group.size() - 1):
            module.bias = None
        built: nn.Module = module
        return built

    return parallel


def cut_bias(config: RowParallelLinearConfig) -> nn.Module:
    """A layer that holds a part of its bias."""
    module: Any = row_parallel_linear.parallel(config)
    if module.bias is not None:
        module.bias = nn.Parameter(module.bias.detach().chunk(module.group.size())[0].clone())
    built: nn.Module = module
    return built


def divisible_bias(world_size: int) -> SearchStrategy[RowParallelLinearConfig]:
    """Configs whose bias can be cut."""
    return added_bias(world_size).map(lambda c: replace(c, out_features=c.out_features * world_size))


ZERO_ELSEWHERE = add_control(
    "bias-zero-on-other-ranks",
    row_parallel_linear,
    layers=(BiasBeforeReduction,),
    looks_like="a bias that every rank adds before the reduction",
    because="the bias is declared Partial: what the ranks hold adds up to it once",
    configs=added_bias,
    placements=partial_bias,
)

FIRST_ONLY = add_control(
    "bias-on-first-rank-only",
    row_parallel_linear,
    layers=(BiasBeforeReduction,),
    looks_like="a bias added before the reduction, and missing on all ranks but the first (reported against two inference engines)",
    because="exactly one rank adds it before the sum, so that it is in the sum once",
    parallel=bias_on(first=True),
    configs=added_bias,
    placements=partial_bias,
)

LAST_ONLY = add_control(
    "bias-on-last-rank-only",
    row_parallel_linear,
    layers=(BiasBeforeReduction,),
    looks_like="a bias that the first rank lacks",
    because="which rank adds it makes no difference to the sum",
    parallel=bias_on(first=False),
    configs=added_bias,
    placements=partial_bias,
)

DIVIDED = add_control(
    "bias-divided-before-reduction",
    row_parallel_linear,
    layers=(BiasDividedBefore,),
    looks_like="a bias that is added on every rank and divided by the world size",
    because="the shares add up to the bias, and the division is left out of backward, so that its gradient is whole",
    configs=added_bias,
    exact=False,
)

GATHERED = add_control(
    "bias-cut-and-gathered",
    row_parallel_linear,
    layers=(BiasCutAndGathered,),
    looks_like="a row-parallel layer whose bias is sharded although its output is not",
    because="the parts are joined before they are added, and the placement says that they are parts",
    parallel=cut_bias,
    configs=divisible_bias,
    placements=lambda c: with_bias_placement(c, Shard(0)),
    communication=None,
)
