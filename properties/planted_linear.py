"""Bugs of linear layers and networks, of the kinds that public reports tell of, each as small as it can be planted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from planted import OpenColumnLinear, OpenRowLinear, built_in_configs, clone_reduce
from planted_registry import add_bug, bug
from torch import Tensor, nn

from tpverify.sharding import Replicate, Shard
from tpverify.subjects.linear import ColumnParallelLinear
from tpverify.subjects.linear_subjects import column_parallel_linear, row_parallel_linear
from tpverify.subjects.mappings import (
    apply,
    copy_to_region,
    gather_from_region,
    gather_sequence,
    reduce_from_region,
    reduce_scatter_sequence,
)
from tpverify.subjects.mlp import ParallelMLP, ReferenceMLP, activate, mlp, mlp_placements, swiglu_mlp
from tpverify.subjects.parameters import finalize_gradients, with_bias


@bug(row_parallel_linear, "forward")
class RowAveraged(OpenRowLinear):
    """A mean where a sum is meant."""

    def reduce(self, partial: Tensor) -> Tensor:
        return reduce_from_region(partial, self.group) / self.group.size()


@bug(row_parallel_linear, "parameter-gradient")
class BiasGradientDivided(OpenRowLinear):
    """The share of the bias is taken by a division that autograd follows."""

    def multiply(self, x: Tensor) -> Tensor:
        share = None if self.bias is None or self.skip_bias_add else self.bias / self.group.size()
        return with_bias(F.linear(x, self.weight), share)

    def add_bias(self, output: Tensor) -> Tensor:
        return output


@bug(row_parallel_linear, "forward", "replication")
class BiasOnRankZeroAfterwards(OpenRowLinear):
    """The bias is added by one rank, but after the reduction."""

    def add_bias(self, output: Tensor) -> Tensor:
        return with_bias(output, self.bias if self.group.rank() == 0 else None)


@bug(row_parallel_linear, "parameter-gradient", "input-gradient")
class ReducedOutsideAutograd(OpenRowLinear):
    """The reduction cuts the graph."""

    def reduce(self, partial: Tensor) -> Tensor:
        return clone_reduce(partial, self.group)


@bug(row_parallel_linear, "communication")
class ReducedInVain(OpenRowLinear):
    """One more reduction, whose result nobody uses."""

    def reduce(self, partial: Tensor) -> Tensor:
        if self.group.size() > 1:
            clone_reduce(partial, self.group)
        return super().reduce(partial)


class AsyncSum(torch.autograd.Function):
    """all_reduce without waiting / identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        output = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(output, group=group, async_op=True)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@bug(row_parallel_linear, "forward", "buffers")
class NeverWaited(OpenRowLinear):
    """The result is used before it is there."""

    def reduce(self, partial: Tensor) -> Tensor:
        return apply(AsyncSum, partial, self.group)


class StridedSum(torch.autograd.Function):
    """all_reduce of a transposed view / identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        output = x.transpose(0, -1).contiguous().transpose(0, -1)
        dist.all_reduce(output, group=group)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@bug(row_parallel_linear, "buffers")
class NonContiguous(OpenRowLinear):
    """Works in a simulator that does not look, and corrupts numbers elsewhere."""

    def reduce(self, partial: Tensor) -> Tensor:
        return apply(StridedSum, partial, self.group)


@bug(row_parallel_linear, "forward")
class SinglePrecision(OpenRowLinear):
    """Half the bytes, half the digits."""

    def reduce(self, partial: Tensor) -> Tensor:
        return reduce_from_region(partial.float(), self.group).to(partial.dtype)


@bug(row_parallel_linear, "forward")
class WholeWorld(OpenRowLinear):
    """The default group is somebody else's, too."""

    def reduce(self, partial: Tensor) -> Tensor:
        world = dist.group.WORLD
        assert world is not None
        return reduce_from_region(partial, world)


@bug(row_parallel_linear, "parameter-gradient")
class InputOverwritten(OpenRowLinear):
    """Scratch space is saved where autograd keeps its own."""

    def multiply(self, x: Tensor) -> Tensor:
        partial = super().multiply(x)
        x.data.zero_()
        return partial


@bug(column_parallel_linear, "forward")
class JoinedAlongWrongDimension(OpenColumnLinear):
    """Features of different ranks become tokens."""

    def join(self, output: Tensor) -> Tensor:
        return gather_from_region(output, 0, [len(output)] * self.group.size(), self.group)


@bug(column_parallel_linear, "input-gradient", "communication")
class InputGradientReducedTwice(OpenColumnLinear):
    """f after f."""

    def spread(self, x: Tensor) -> Tensor:
        return copy_to_region(copy_to_region(x, self.group), self.group)


@bug(column_parallel_linear, "execution")
class ViewOfAnyInput(OpenColumnLinear):
    """Takes every input for contiguous, and some are not."""

    def spread(self, x: Tensor) -> Tensor:
        return super().spread(x.view(-1, x.shape[-1])).view(x.shape)


@bug(column_parallel_linear, "input-gradient")
class SequenceGradientCut(ColumnParallelLinear):
    """The gather's gradient is cut, not summed and cut."""

    def forward(self, x: Tensor) -> Any:
        if not self.sequence_parallel:
            return super().forward(x)
        whole = gather_from_region(x, 0, [len(x)] * self.group.size(), self.group)
        output = with_bias(F.linear(whole, self.weight), None if self.skip_bias_add else self.bias)
        return (output, self.bias) if self.skip_bias_add else output


@bug(
    row_parallel_linear,
    "parameter-gradient",
    "input-gradient",
    outputs=Replicate(),
    communication=None,
    configs=lambda world_size: built_in_configs(row_parallel_linear, world_size).map(lambda c: replace(c, skip_bias_add=False)),
)
class ReplicatedGradientSummed(OpenRowLinear):
    """The sequence is rejoined for replicated work by a gather whose gradient is summed as if the work were cut."""

    def forward(self, x: Tensor) -> Any:
        output = super().forward(x)
        return gather_sequence(output, self.group) if self.sequence_parallel else output


class WrongAdjoint(torch.autograd.Function):
    """reduce_scatter along the sequence / this rank's slice of the gradient at its place, zeros elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return reduce_scatter_sequence(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        rank, size, part = ctx.group.rank(), ctx.group.size(), len(grad)
        return F.pad(grad, [0, 0] * (grad.dim() - 1) + [rank * part, (size - 1 - rank) * part]), None


@bug(row_parallel_linear, "input-gradient", "parameter-gradient", "communication")
class SequenceGradientNotGathered(OpenRowLinear):
    """Each rank sees the gradient of its own tokens only."""

    def reduce_scatter(self, partial: Tensor) -> Tensor:
        return apply(WrongAdjoint, partial, self.group)


class ReferenceNormedMLP(ReferenceMLP):
    """A norm over all hidden features, between the two layers."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.fc2(F.rms_norm(F.relu(self.fc1(x)) + 1.0, (self.fc2.in_features,)))
        return output


@bug(
    mlp,
    "forward",
    reference=lambda c: ReferenceNormedMLP(c.hidden, c.ffn, c.activation, c.bias),
    exact=False,
)
class LocalNorm(ParallelMLP):
    """Each rank normalises what it holds."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.fc1(x)) + 1.0
        output: Tensor = self.fc2(F.rms_norm(hidden, (hidden.shape[-1],)))
        return output


@bug(swiglu_mlp, "forward")
class GateAndUpExchanged(ParallelMLP):
    """up * silu(gate), the other way round."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.fc2(activate(torch.cat(self.fc1(x).chunk(2, -1)[::-1], -1), self.activation))
        return output


add_bug("FusedCutContiguously", swiglu_mlp, "forward", placements=lambda c: {**mlp_placements(c.ffn, c.activation), "*fc1.*": Shard(0)})


def noisy_finalization(module: nn.Module) -> None:
    """One rank's gradients off by a rounding error."""
    finalize_gradients(module)
    if dist.get_rank() == 1:
        for name, parameter in module.named_parameters():
            if name == "fc2.bias" and parameter.grad is not None:
                parameter.grad.mul_(1.0 + 2.0**-52)


add_bug("ReplicasOneUlpApart", mlp, "replication", finalize_gradients=noisy_finalization)


def floored(config: Any) -> nn.Module:
    """The layer, with the features that do not divide left out."""
    size = dist.get_world_size()
    return row_parallel_linear.parallel(replace(config, in_features=max(size, config.in_features // size * size)))


def indivisible(world_size: int) -> Any:
    """Configs that must be refused."""
    return built_in_configs(row_parallel_linear, world_size).map(
        lambda c: replace(c, uneven=False, in_features=c.in_features * world_size + 1)
    )


add_bug("NotRefused", row_parallel_linear, "rejection", parallel=floored, configs=indivisible, subgroups=False)


class SavedTensorReduced(ParallelMLP):
    """Reuses, as the buffer of a collective, what autograd has kept for backward."""

    def forward(self, x: Tensor) -> Tensor:
        features = self.fc1(x)
        hidden = activate(features, self.activation)
        if features.shape[-1] and self.fc1.group.size() > 1:
            dist.all_reduce(features.detach(), group=self.fc1.group)
        output: Tensor = self.fc2(hidden)
        return output


add_bug("SavedTensorReduced", mlp, "execution", layers=(SavedTensorReduced,))
