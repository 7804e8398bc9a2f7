"""Planted bugs that need a condition: one TP degree, two options together, a coincidence of sizes, a memory layout, the second call."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpverify.mutants.mappings import joined, mapping, same, summed
from tpverify.mutants.mutant import add_mutant, mutant
from tpverify.subjects.linear import ColumnParallelLinear, RowParallelLinear
from tpverify.subjects.linear_subjects import column_parallel_linear, row_parallel_linear
from tpverify.subjects.mappings import reduce_from_region
from tpverify.subjects.mlp import mlp

KIND = "conditional"
LEFT_OUT = "is missing from the sum"


@mutant(
    KIND,
    row_parallel_linear,
    "forward",
    origin="all-reduces by exchange with a partner: an odd number of ranks leaves one without",
    diagnosis=LEFT_OUT,
    module="output*",
)
class OddRankLeftOut(RowParallelLinear):
    """With an odd number of ranks the last one has no partner, and its partial result is lost."""

    def reduce(self, partial: Tensor) -> Tensor:
        """g, without a rank that has no partner."""
        alone = self.group.size() > 1 and self.group.size() % 2 and self.group.rank() == self.group.size() - 1
        return super().reduce(partial * 0.0 if alone else partial)


@mutant(
    KIND,
    row_parallel_linear,
    "forward",
    origin="a node of four: the second node's leader is never asked for its sum",
    diagnosis=LEFT_OUT,
    module="output*",
)
class MoreThanFourRanks(RowParallelLinear):
    """The sum goes over the first four ranks; with more, theirs is lost."""

    def reduce(self, partial: Tensor) -> Tensor:
        """g of four ranks."""
        return super().reduce(partial if self.group.rank() < 4 else partial * 0.0)


@mutant(
    KIND,
    row_parallel_linear,
    "forward",
    communication=None,
    origin="recursive doubling, which counts some ranks twice unless their number is a power of two",
    diagnosis="counted twice",
    module="output*",
)
class RecursiveDoubling(RowParallelLinear):
    """In each round a rank adds what the rank 1, 2, 4, ... below has summed: right for powers of two."""

    def reduce(self, partial: Tensor) -> Tensor:
        """g as that many rounds would compute it."""
        rank, size = self.group.rank(), self.group.size()

        def rounds(x: Tensor) -> Tensor:
            parts = joined(x.unsqueeze(0), 0, self.group)
            return sum((parts[(rank - k) % size] for k in range(2 ** math.ceil(math.log2(size)))), torch.zeros_like(x))

        return mapping(partial, rounds, same)


@mutant(
    KIND,
    column_parallel_linear,
    "forward",
    origin="fused gather epilogues that know no bias; each option is tested, their combination is not",
    diagnosis="every row holds bias once too little",
    module="output*",
)
class BiasLostWhenJoined(ColumnParallelLinear):
    """With several ranks a layer that has a bias and gathers its output forgets the bias."""

    def local_parameters(self) -> tuple[Tensor, Tensor | None]:
        """A bias times nothing, so that it keeps a gradient."""
        weight, bias = super().local_parameters()
        lost = bias is not None and self.gather_output and not self.skip_bias_add and self.group.size() > 1
        return weight, mapping(bias, torch.zeros_like, same) if lost and bias is not None else bias


@mutant(
    KIND,
    row_parallel_linear,
    "forward",
    origin="MinivLLM: a mask unsqueezed at the wrong place, which raises for most shapes and is silently wrong for others",
    module="output*",
)
class SequenceEqualsHidden(RowParallelLinear):
    """The bias is added along the sequence where the sequence is as long as the output is wide."""

    def add_bias(self, output: Tensor) -> Tensor:
        """The bias, along one dimension or another."""
        square = self.bias is not None and output.shape[0] == output.shape[-1] > 1 and self.group.size() > 1
        return super().add_bias(output.transpose(0, -1)).transpose(0, -1) if square else super().add_bias(output)


@mutant(
    KIND,
    column_parallel_linear,
    "input-gradient",
    origin="vLLM-style fast paths: a single column takes the matrix-vector kernel, which was written for inference",
    diagnosis="a missing all_reduce(SUM) in backward",
    module="x.grad*",
)
class OneLocalColumn(ColumnParallelLinear):
    """A rank that has one output feature only leaves out f."""

    def spread(self, x: Tensor) -> Tensor:
        """f, in most cases."""
        return x if max(self.sizes) == min(self.sizes) == 1 else super().spread(x)


@mutant(
    KIND,
    mlp,
    "forward",
    origin="decode paths for a single sequence, which reduce with another kernel",
    diagnosis="one reduction too many in forward",
    module="fc2*",
)
class SingleSequence(RowParallelLinear):
    """With a batch of one the output is reduced twice."""

    def reduce(self, partial: Tensor) -> Tensor:
        """g, once or twice."""
        output = super().reduce(partial)
        return reduce_from_region(output, self.group) if partial.shape[1] == 1 and partial.shape[0] > 1 else output


@mutant(
    KIND,
    row_parallel_linear,
    "forward",
    origin="reductions in chunks of two numbers, the packed format of half precision: what is over is not sent",
    module="output*",
)
class OddNumberOfElements(RowParallelLinear):
    """The last of an odd number of elements is not reduced."""

    def reduce(self, partial: Tensor) -> Tensor:
        """g, but for what does not fill a pair."""

        def pairs(x: Tensor) -> Tensor:
            output = summed(x, self.group)
            if x.numel() % 2 and x.numel() > 1:
                output.view(-1)[-1] = x.reshape(-1)[-1]
            return output

        return mapping(partial, pairs, same)


@mutant(
    KIND,
    row_parallel_linear,
    "forward",
    origin="captured graphs: the second call is replayed from a capture that lacks the collective",
    module="output*",
    diagnosis="a missing all_reduce",
)
class SecondCallNotReduced(RowParallelLinear):
    """The second call's output is not summed over the ranks."""

    def reduce(self, partial: Tensor) -> Tensor:
        """g, in the first call."""
        self.calls = getattr(self, "calls", 0) + 1
        return partial if self.calls == 2 else super().reduce(partial)


@mutant(
    KIND,
    column_parallel_linear,
    "input-gradient",
    origin="kernels that ask for contiguous inputs, served by a copy that is made outside autograd",
    diagnosis="a detached branch",
    module="x.grad*",
)
class StridedInputDetached(ColumnParallelLinear):
    """An input that is not contiguous is copied without its graph, on several ranks only."""

    def spread(self, x: Tensor) -> Tensor:
        """f of the input or of a copy."""
        return super().spread(x if x.is_contiguous() or self.group.size() == 1 else x.detach().contiguous())


@mutant(
    KIND,
    column_parallel_linear,
    "communication",
    origin="shards of PyTorch's chunk rule that come out empty: the rank has nothing to compute and returns before the others meet",
    module="*",
    ranks="",
    diagnosis="no rank can",
)
class EmptyShardLeaves(ColumnParallelLinear):
    """A rank without output features does not take part in backward's reduction."""

    def spread(self, x: Tensor) -> Tensor:
        """f, where there is something to do."""
        return super().spread(x) if len(self.weight) else x


@mutant(
    KIND,
    mlp,
    "forward",
    origin="custom all-reduces that switch to a second kernel for long messages, whose last block is cut off",
    module="fc2*",
)
class LongMessagesCutOff(RowParallelLinear):
    """Elements beyond the first 4096 are not reduced: no test with small tensors sees it."""

    def reduce(self, partial: Tensor) -> Tensor:
        """g of the first elements."""

        def first(x: Tensor) -> Tensor:
            output = summed(x, self.group)
            output.view(-1)[4096:] = x.reshape(-1)[4096:]
            return output

        return mapping(partial, first, same)


def floored(config: Any) -> nn.Module:
    """The layer, with the input features that are over left out."""
    size = dist.get_world_size()
    fitting = max(size, config.in_features // size * size)
    return row_parallel_linear.parallel(config if config.uneven else replace(config, in_features=fitting))


add_mutant(
    "features-over-left-out",
    KIND,
    row_parallel_linear,
    "rejection",
    parallel=floored,
    subgroups=False,
    story="Sizes that do not divide are rounded down where they should be refused.",
    origin="transformers, PyTorch: in_features // world_size computed in one place, and another that multiplies it back",
    module="*",
    diagnosis="to be refused",
)


@mutant(
    KIND,
    row_parallel_linear,
    "parameter-gradient",
    origin="fused kernels with one flag for two options: the bias is handed back only where the sequence is not cut",
    diagnosis="a missing all_reduce(SUM) in backward",
    module="bias.grad*",
    ranks="",
)
class SkippedBiasUnflagged(RowParallelLinear):
    """With sequence parallelism and skip_bias_add together the bias loses the flag that has its gradient summed."""

    def forward(self, x: Tensor) -> Any:
        """The layer, its bias unflagged in one case of four."""
        bias: Any = self.bias
        if self.skip_bias_add and hasattr(bias, "sequence_parallel_group"):
            del bias.sequence_parallel_group
        return super().forward(x)
