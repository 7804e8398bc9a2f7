"""Planted bugs of sequence parallelism: regions that begin or end in the wrong place, and cuts without a sum."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tpverify.mutants.mappings import mapping, same
from tpverify.mutants.mutant import add_mutant, mutant
from tpverify.sharding import Replicate
from tpverify.subjects.block import ParallelTransformerBlock, transformer_block
from tpverify.subjects.linear import ColumnParallelLinear, RowParallelLinear
from tpverify.subjects.linear_subjects import column_parallel_linear, row_parallel_linear, row_parallel_linear_configs
from tpverify.subjects.mappings import (
    gather_from_region,
    gather_sequence,
    join_sequence,
    reduce_from_region,
    scatter_to_region,
    sum_and_cut_sequence,
)
from tpverify.subjects.mlp import mlp

KIND = "sequence parallel"


@mutant(
    KIND,
    row_parallel_linear,
    "forward",
    origin="sequence parallelism added by cutting activations: where a sum and a cut are needed, only the cut was written",
    module="output*",
    diagnosis="a missing all_reduce",
)
class CutWithoutSum(RowParallelLinear):
    """The output is cut along the sequence and never summed over the ranks."""

    def reduce_scatter(self, partial: Tensor) -> Tensor:
        """This rank's tokens of this rank's summand."""
        return scatter_to_region(partial, 0, [len(partial) // self.group.size()] * self.group.size(), self.group)


@mutant(
    KIND,
    mlp,
    "communication",
    origin="layers that keep their all-reduce and slice afterwards: right, and twice the traffic that sequence parallelism promises",
    diagnosis="a wrong kind of collective",
)
class ReducedThenCut(RowParallelLinear):
    """An all-reduce of the whole sequence, then a cut, where a reduce-scatter does both."""

    def reduce_scatter(self, partial: Tensor) -> Tensor:
        """all_reduce, cut / all_gather."""
        sizes = [len(partial) // self.group.size()] * self.group.size()
        return scatter_to_region(reduce_from_region(partial, self.group), 0, sizes, self.group)


@mutant(
    KIND,
    row_parallel_linear,
    "parameter-gradient",
    outputs=Replicate(),
    communication=None,
    configs=lambda world_size: row_parallel_linear_configs(world_size).map(lambda c: replace(c, skip_bias_add=False)),
    origin="Megatron-LM: decoder gradients of a video model doubled at TP=2 by the gather that belongs in front of tensor-parallel work",
    diagnosis="one reduction too many in backward",
    module="weight.grad*",
)
class RegionClosedBySummingGather(RowParallelLinear):
    """The sequence is gathered for replicated work, and the gradient, which is replicated too, is summed over the ranks."""

    def add_bias(self, output: Tensor) -> Tensor:
        """With the bias, of all tokens."""
        output = super().add_bias(output)
        return gather_sequence(output, self.group) if self.sequence_parallel else output


@mutant(
    KIND,
    transformer_block,
    "parameter-gradient",
    origin="Megatron-style blocks whose norms moved out of the region while their gradients are still summed as if partial",
    diagnosis="one reduction too many in backward",
    module="norm1*.grad*",
)
class NormOutsideItsRegion(ParallelTransformerBlock):
    """The first norm works on the gathered sequence, where its gradient is whole, and is flagged all the same."""

    def forward(self, x: Tensor) -> Tensor:
        """The block, its first norm between a gather and a cut."""
        if not self.mlp.fc1.sequence_parallel or self.arrangement != "pre_ln":
            return super().forward(x)
        group = self.mlp.fc1.group
        sizes = [len(x)] * group.size()
        whole = self.norm1(gather_from_region(x, 0, sizes, group))
        x = x + self.attention(scatter_to_region(whole, 0, sizes, group))
        output: Tensor = x + self.mlp(self.norm2(x))
        return output


@mutant(
    KIND,
    column_parallel_linear,
    "parameter-gradient",
    origin="overlapped backward passes that forget to gather the input again and multiply the rows that happen to be there",
    module="weight.grad*",
)
class WeightGradientOfOwnTokens(ColumnParallelLinear):
    """Under sequence parallelism the weight gradient counts this rank's tokens only."""

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """The product, to which the other ranks' tokens are constants."""
        if not self.sequence_parallel:
            return super().multiply(x, weight)
        pieces = list(super().multiply(x, weight.detach()).chunk(self.group.size()))
        own = F.linear(x.detach(), weight)
        pieces[self.group.rank()] = pieces[self.group.rank()] + own - own.detach()
        return torch.cat(pieces)


@mutant(
    KIND,
    column_parallel_linear,
    "input-gradient",
    origin="FSDP-style reduce-scatters, which average, in the backward of the sequence gather",
    diagnosis="one division too many in backward",
    module="x.grad*",
)
class SequenceGradientAveraged(ColumnParallelLinear):
    """Backward of the sequence gather averages over the ranks where it should sum."""

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """all_gather / reduce_scatter(AVG), then the product."""
        if not self.sequence_parallel:
            return super().multiply(x, weight)
        return super().multiply(mapping(x, same, lambda grad: grad / self.group.size()), weight)


@mutant(
    KIND,
    row_parallel_linear,
    "parameter-gradient",
    origin="reduce-scatters whose backward gathers what is at hand, the ranks' gradients in reverse",
    module="weight.grad*",
    diagnosis="in another order",
)
class GradientGatheredBackwards(RowParallelLinear):
    """Backward of the reduce-scatter joins the ranks' tokens from the last rank to the first."""

    def reduce_scatter(self, partial: Tensor) -> Tensor:
        """reduce_scatter / all_gather, parts reversed."""

        def reversed_parts(grad: Tensor) -> Tensor:
            return torch.cat(join_sequence(grad, self.group).chunk(self.group.size())[::-1])

        return mapping(partial, lambda x: sum_and_cut_sequence(x, self.group), reversed_parts)


@mutant(
    KIND,
    mlp,
    "forward",
    origin="Megatron-Bridge adapters around sequence-parallel layers: the wrapper does not take over the flag, and nothing is gathered",
    module="fc1*",
    diagnosis="a wrong kind of collective",
)
class GatherForgotten(ColumnParallelLinear):
    """Under sequence parallelism each rank repeats its own tokens where it should gather everybody's."""

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """The product, of as many tokens as there should be."""
        if not self.sequence_parallel:
            return super().multiply(x, weight)
        return F.linear(self.spread(x).repeat(self.group.size(), *[1] * (x.dim() - 1)), weight)


add_mutant(
    "finalization-forgotten",
    KIND,
    transformer_block,
    "parameter-gradient",
    finalize_gradients=None,
    story="Nobody calls what sums the partial gradients of norms and biases after backward.",
    origin="gpt-neox: the loss stays near 8 after a hundred steps; the hooks that should have summed were registered and never ran",
    diagnosis="a missing all_reduce(SUM) in backward",
    module="norm*.grad*",
)
