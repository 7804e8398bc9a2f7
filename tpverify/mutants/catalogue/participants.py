"""Planted bugs: the right collective in the wrong group, or with the wrong operation."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpverify.mutants.mappings import cut, joined, mapping, part, same, summed
from tpverify.mutants.mutant import add_mutant, mutant
from tpverify.subjects.linear import ColumnParallelLinear, RowParallelLinear
from tpverify.subjects.linear_subjects import column_parallel_linear, row_parallel_linear
from tpverify.subjects.mappings import copy_to_region, reduce_from_region
from tpverify.subjects.mlp import mlp
from tpverify.subjects.parameters import finalize_gradients, mark_sequence_parallel


@mutant(
    "wrong group",
    row_parallel_linear,
    "forward",
    origin="Megatron-LM, tokenspeed: code that falls back to the default group; with two TP groups each adds the other's data",
    diagnosis="a wrong group",
    module="output*",
)
class ReducedInTheWorld(RowParallelLinear):
    """The reduction runs in the default group, which other TP groups belong to as well."""

    def reduce(self, partial: Tensor) -> Tensor:
        """g in the world."""
        world = dist.group.WORLD
        assert world is not None
        return reduce_from_region(partial, world)


@mutant(
    "wrong group",
    column_parallel_linear,
    "input-gradient",
    origin="Megatron-LM cross-attention: forward honours the layer's group, backward takes the global one",
    diagnosis="a wrong group",
    module="x.grad*",
)
class GradientReducedInTheWorld(ColumnParallelLinear):
    """f sums the input gradient over the default group."""

    def spread(self, x: Tensor) -> Tensor:
        """Identity / all_reduce in the world."""
        world = dist.group.WORLD
        assert world is not None
        return copy_to_region(x, world)


@mutant(
    "wrong group",
    row_parallel_linear,
    "forward",
    origin="hierarchical all-reduce: within a node first; the second step, between nodes, is skipped",
    diagnosis="a wrong group",
    module="output*",
)
class ReducedWithinTheNode(RowParallelLinear):
    """The sum goes over a node of two ranks only, although the TP group spans several."""

    def reduce(self, partial: Tensor) -> Tensor:
        """g within pairs, where the group is made of more than one."""
        if self.group.size() % 2 or self.group.size() == 2:
            return super().reduce(partial)
        first = self.group.rank() // 2 * 2
        ranks = dist.get_process_group_ranks(self.group)[first : first + 2]
        return reduce_from_region(partial, dist.new_group(ranks, use_local_synchronization=True))


@mutant(
    "wrong group",
    column_parallel_linear,
    "execution",
    communication=None,
    origin="hand-written gathers by broadcast: the source is a global rank, and the loop runs over ranks of the group",
    ranks="",
)
class BroadcastFromGroupRank(ColumnParallelLinear):
    """The parts are gathered by broadcasts whose source counts within the group: fine until there is a second group."""

    def join(self, output: Tensor) -> Tensor:
        """All output features, one broadcast after the other."""

        def gather(x: Tensor) -> Tensor:
            parts = [x.new_empty(*x.shape[:-1], size) for size in self.sizes]
            parts[self.group.rank()].copy_(x)
            for source, buffer in enumerate(parts):
                dist.broadcast(buffer, src=source, group=self.group)
            return torch.cat(parts, -1)

        return mapping(output, gather, lambda grad: cut(grad, self.sizes, self.group))


@mutant(
    "wrong group",
    row_parallel_linear,
    "forward",
    origin="tensor slices by global rank modulo TP size: right for consecutive ranks, wrong on a mesh with TP as the outer axis",
    module="output*",
    ranks="",
    diagnosis="a wrong group or rank",
)
class PartOfGlobalRank(RowParallelLinear):
    """Which part of the input is whose goes by the global rank modulo the TP degree."""

    def forward(self, x: Tensor) -> Any:
        """The layer, with the input cut by the global rank."""
        if self.input_is_parallel or len(set(self.sizes)) > 1:
            return super().forward(x)
        rank = dist.get_rank() % self.group.size()
        own = mapping(x, lambda whole: part(whole, -1, self.group, rank).clone(), lambda grad: joined(grad, -1, self.group))
        output = self.reduce(self.multiply(own))
        return (output, self.bias) if self.skip_bias_add else self.add_bias(output)


def finalize_in_the_world(module: nn.Module) -> None:
    """Sums flagged gradients over the default group."""
    world = dist.group.WORLD
    assert world is not None
    for parameter in module.parameters():
        if hasattr(parameter, "sequence_parallel_group"):
            mark_sequence_parallel(parameter, world)
    finalize_gradients(module)


add_mutant(
    "finalized-in-the-world",
    "wrong group",
    row_parallel_linear,
    "parameter-gradient",
    finalize_gradients=finalize_in_the_world,
    story="The partial gradients of sequence parallelism are summed over the default group, the data of other TP groups with them.",
    origin="TransformerEngine, Megatron-LM: statistics and gradients reduced over a group that is not the tensor-parallel one",
    diagnosis="a wrong group",
    module="bias.grad*",
)


@mutant(
    "wrong reduce op",
    row_parallel_linear,
    "forward",
    origin="data-parallel habits: an all-reduce with AVG, or a sum divided by the number of ranks",
    diagnosis="one division too many in forward",
    module="output*",
)
class RowAveraged(RowParallelLinear):
    """A mean where a sum is meant."""

    def reduce(self, partial: Tensor) -> Tensor:
        """all_reduce(AVG)."""
        return mapping(partial, lambda x: summed(x, self.group, dist.ReduceOp.AVG), same)


@mutant(
    "wrong reduce op",
    row_parallel_linear,
    "forward",
    origin="tt-xla lowers one reduction for another; here the maximum that a softmax needs for the sum that a product needs",
    diagnosis="a wrong reduce op",
    module="output*",
)
class RowMaximum(RowParallelLinear):
    """The largest partial result where their sum is meant."""

    def reduce(self, partial: Tensor) -> Tensor:
        """all_reduce(MAX)."""
        return mapping(partial, lambda x: summed(x, self.group, dist.ReduceOp.MAX), same)


@mutant(
    "wrong reduce op",
    column_parallel_linear,
    "input-gradient",
    origin="torchtune, DDP-style hooks: gradients are averaged over a group that shares one model",
    diagnosis="one division too many in backward",
    module="x.grad*",
)
class ColumnGradientAveraged(ColumnParallelLinear):
    """The input gradient is the mean of the ranks' parts."""

    def spread(self, x: Tensor) -> Tensor:
        """Identity / all_reduce(AVG)."""
        return mapping(x, same, lambda grad: summed(grad, self.group, dist.ReduceOp.AVG))


@mutant(
    "wrong reduce op",
    mlp,
    "forward",
    origin="FSDP-style reduce-scatters, which average, reused for the activations of sequence parallelism",
    diagnosis="one division too many",
    module="fc2*",
)
class ReduceScatterAveraged(RowParallelLinear):
    """The reduce-scatter along the sequence averages; the all-reduce does not."""

    def reduce_scatter(self, partial: Tensor) -> Tensor:
        """reduce_scatter(AVG)."""
        return super().reduce_scatter(partial / self.group.size())


@mutant(
    "wrong reduce op",
    mlp,
    "input-gradient",
    origin="min-over-ranks of found-inf flags, generalised to whatever passes by: gradients shrink, and training only looks slow",
    diagnosis="a wrong reduce op",
    module="fc1*",
)
class ColumnGradientMinimum(ColumnParallelLinear):
    """The input gradient is the smallest of the ranks' parts."""

    def spread(self, x: Tensor) -> Tensor:
        """Identity / all_reduce(MIN)."""
        return mapping(x, same, lambda grad: summed(grad, self.group, dist.ReduceOp.MIN))
