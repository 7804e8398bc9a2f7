"""Controls: reductions in other steps, at other times or beside others, that come to the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tpverify.mutants.control import add_control
from tpverify.mutants.mappings import mapping, same, summed
from tpverify.strategies import configs_of
from tpverify.subjects.linear import ColumnParallelLinear, RowParallelLinear
from tpverify.subjects.linear_subjects import RowParallelLinearConfig, column_parallel_linear, row_parallel_linear
from tpverify.subjects.mappings import Group, apply, gather_from_region, reduce_from_region
from tpverify.subjects.mlp import ParallelMLP, mlp
from tpverify.subjects.subject import Input


class StatisticsBeside(RowParallelLinear):
    """Reduces once more for a statistic, and on the first rank from a line of its own."""

    def reduce(self, partial: Tensor) -> Tensor:
        """g, after a collective of no consequence."""
        if self.group.rank() == 0:
            summed(partial.abs().sum(), self.group)
            output = reduce_from_region(partial, self.group)
        else:
            summed(partial.abs().sum(), self.group)
            output = reduce_from_region(partial, self.group)
        return output


class GatheredThenSummed(RowParallelLinear):
    """Joins all ranks' summands and adds them up locally."""

    def reduce(self, partial: Tensor) -> Tensor:
        """g, by an all_gather."""
        return gather_from_region(partial.unsqueeze(0), 0, [1] * self.group.size(), self.group).sum(0)


class AveragedAndScaled(RowParallelLinear):
    """Takes the mean over the ranks and multiplies by their number."""

    def reduce(self, partial: Tensor) -> Tensor:
        """g, of shares."""
        size = self.group.size()
        return mapping(partial, lambda x: summed(x / size, self.group) * size, same) if size > 1 else partial


class ReducedInPlace(RowParallelLinear):
    """Reduces the product itself, of which nobody else has need."""

    def reduce(self, partial: Tensor) -> Tensor:
        """g, in place."""
        return apply(InPlaceSum, partial.contiguous(), self.group) if self.group.size() > 1 else partial


class InPlaceSum(torch.autograd.Function):
    """all_reduce in place / identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        """Shapes: any -> the same tensor."""
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Replicated, as the output is."""
        return grad, None


class WaitedFor(RowParallelLinear):
    """Works on something else while the reduction is under way, and waits before it uses the result."""

    def reduce(self, partial: Tensor) -> Tensor:
        """g, asynchronously."""
        return mapping(partial, self.awaited, same) if self.group.size() > 1 else partial

    def awaited(self, partial: Tensor) -> Tensor:
        """The sum, once it is complete."""
        output = partial.clone(memory_format=torch.contiguous_format)
        work = dist.all_reduce(output, group=self.group, async_op=True)
        self.norm = float(partial.norm())
        work.wait()
        return output


class SpreadTwice(ColumnParallelLinear):
    """Multiplies by the two halves of the weight one after the other, each with an f of its own."""

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """Both halves' output features."""
        if self.sequence_parallel:
            return super().multiply(x, weight)
        half = len(weight) // 2
        return torch.cat([F.linear(self.spread(x), weight[:half]), F.linear(self.spread(x), weight[half:])], -1)


class ColumnOfData(ColumnParallelLinear):
    """No f, since nobody asks for the gradient of the input."""

    def spread(self, x: Tensor) -> Tensor:
        """Identity, backward too."""
        return x


class Recomputed(ParallelMLP):
    """Runs forward again in backward, with all its collectives."""

    def forward(self, x: Tensor) -> Tensor:
        """The network, its activations not kept."""
        output: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return output


def broadcast_when_built(config: RowParallelLinearConfig) -> nn.Module:
    """A layer that takes its bias from the first rank once it is built."""
    module: Any = row_parallel_linear.parallel(config)
    if module.bias is not None:
        dist.broadcast(module.bias.detach(), group=module.group, group_src=0)
    built: nn.Module = module
    return built


STATISTICS = add_control(
    "statistics-beside",
    row_parallel_linear,
    layers=(StatisticsBeside,),
    looks_like="a reduction too many, and issued from different lines on different ranks",
    because="its result is not used, the ranks agree on it, and the subject's collectives are only recorded",
    communication=None,
)
add_control(
    "gathered-then-summed",
    row_parallel_linear,
    layers=(GatheredThenSummed,),
    looks_like="a gather where a reduction is due",
    because="the summands that it joins are added up right afterwards; the collectives are only recorded",
    communication=None,
)
add_control(
    "averaged-and-scaled",
    row_parallel_linear,
    layers=(AveragedAndScaled,),
    looks_like="a mean where a sum is meant",
    because="the mean times the world size is the sum, but for rounding",
    exact=False,
)
add_control(
    "reduced-in-place",
    row_parallel_linear,
    layers=(ReducedInPlace,),
    looks_like="a collective that overwrites a tensor of autograd's",
    because="the backward of a product needs its factors, not its result, and autograd is told of the write",
)
add_control(
    "reduction-waited-for",
    row_parallel_linear,
    layers=(WaitedFor,),
    looks_like="an asynchronous reduction whose input is read while it is under way",
    because="the buffer in flight is a copy, and its result is used after wait() only",
)
add_control(
    "input-spread-twice",
    column_parallel_linear,
    layers=(SpreadTwice,),
    looks_like="an input gradient that is reduced twice",
    because="each of the two reductions is of one half's summands; the collectives are only recorded",
    communication=None,
)
NO_GRADIENT = add_control(
    "input-without-gradient",
    column_parallel_linear,
    layers=(ColumnOfData,),
    looks_like="a missing all_reduce in backward (reported against PyTorch's own TP)",
    because="the input needs no gradient, so that there is nothing to reduce",
    configs=lambda world_size: configs_of(column_parallel_linear, world_size).map(lambda c: replace(c, sequence_parallel=False)),
    inputs=lambda c: {"x": Input((c.seq, c.batch, c.in_features), grad=False)},
    communication=None,
)
add_control(
    "activations-recomputed",
    mlp,
    layers=(Recomputed,),
    looks_like="forward's reductions a second time, in backward",
    because="activation checkpointing runs forward again, and its collectives with it; they are only recorded",
    communication=None,
)
add_control(
    "broadcast-when-built",
    row_parallel_linear,
    looks_like="a collective that nothing declares",
    because="it happens while the module is built; only forward, backward and finalisation are held against what is declared",
    parallel=broadcast_when_built,
)
