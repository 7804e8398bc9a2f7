"""Planted bugs: a reduction that is missing, that is done twice, or that stands in the wrong place."""

from __future__ import annotations

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tpverify.mutants.mappings import mapping, same, summed
from tpverify.mutants.mutant import mutant
from tpverify.subjects.block import transformer_block
from tpverify.subjects.linear import ColumnParallelLinear, RowParallelLinear
from tpverify.subjects.linear_subjects import column_parallel_linear, row_parallel_linear
from tpverify.subjects.mappings import copy_to_region, reduce_from_region
from tpverify.subjects.mlp import ParallelMLP, ReferenceMLP, mlp

TOO_MANY = "one reduction too many"
LEFT_OUT = "is missing from the sum"


@mutant(
    "missing reduction",
    row_parallel_linear,
    "forward",
    origin="litgpt, tpu-inference: nonsense for text as soon as there are two ranks, for MLP classes that build their own layers",
    diagnosis="a missing all_reduce(SUM) in forward",
    module="output*",
)
class RowNotReduced(RowParallelLinear):
    """Nobody sums: every rank takes its partial result for the whole."""

    def reduce(self, partial: Tensor) -> Tensor:
        """Left out."""
        return partial


@mutant(
    "missing reduction",
    column_parallel_linear,
    "input-gradient",
    origin="ml-cross-entropy, picotron-style code: outputs are right, but the layers before this one train with one rank's gradient",
    diagnosis="a missing all_reduce(SUM) in backward",
    module="x.grad*",
)
class ColumnGradientNotReduced(ColumnParallelLinear):
    """The input goes in without f: its gradient is that of this rank's output features only."""

    def spread(self, x: Tensor) -> Tensor:
        """Identity, backward too."""
        return x


@mutant(
    "missing reduction",
    row_parallel_linear,
    "forward",
    origin="custom one-shot all-reduce kernels: a loop over the peers that ends one too early",
    diagnosis=LEFT_OUT,
    module="output*",
)
class LastRankLeftOut(RowParallelLinear):
    """The sum goes over all ranks but the last."""

    def reduce(self, partial: Tensor) -> Tensor:
        """g without the last summand."""
        last = 0 < self.group.rank() == self.group.size() - 1
        return mapping(partial, lambda x: summed(x * 0.0 if last else x, self.group), same)


@mutant(
    "missing reduction",
    row_parallel_linear,
    "forward",
    origin="hand-written ring all-reduces: each rank adds what it receives to an empty buffer and forgets its own part",
    diagnosis="a missing all_reduce",
    module="output*",
)
class OwnPartLeftOut(RowParallelLinear):
    """Every rank sums what the others have, without its own partial result."""

    def reduce(self, partial: Tensor) -> Tensor:
        """g less the own summand."""
        return mapping(partial, lambda x: summed(x, self.group) - x if self.group.size() > 1 else same(x), same)


@mutant(
    "missing reduction",
    row_parallel_linear,
    "forward",
    origin="pipelines that only read the result on rank 0: a reduce to the first rank where all need the sum",
    module="output*",
    ranks="all but first",
    diagnosis="a wrong kind of collective",
)
class ReducedToTheFirstRank(RowParallelLinear):
    """The sum is sent to the first rank; the others keep their partial results."""

    def reduce(self, partial: Tensor) -> Tensor:
        """reduce in place of all_reduce."""

        def to_first(x: Tensor) -> Tensor:
            output = x.clone()
            dist.reduce(output, group=self.group, group_dst=0)
            return output

        return mapping(partial, to_first, same)


@mutant(
    "doubled reduction",
    row_parallel_linear,
    "forward",
    origin="layers that reduce, called by a runner that reduces the total again",
    diagnosis=f"{TOO_MANY} in forward",
    module="output*",
)
class RowReducedTwice(RowParallelLinear):
    """Sums what is summed already."""

    def reduce(self, partial: Tensor) -> Tensor:
        """g, and g again."""
        return reduce_from_region(super().reduce(partial), self.group)


@mutant(
    "doubled reduction",
    transformer_block,
    "forward",
    origin="vLLM: Aria writes well on one device, badly on two and nonsense on four; the shared expert reduces, and so does its caller",
    diagnosis=TOO_MANY,
    module="mlp*",
)
class WholeSummedByCaller(ParallelMLP):
    """The feed-forward network has reduced its output, and whoever called it reduces once more."""

    def forward(self, x: Tensor) -> Tensor:
        """The network, reduced twice."""
        output = super().forward(x)
        return output if self.fc1.sequence_parallel else reduce_from_region(output, self.fc1.group)


@mutant(
    "doubled reduction",
    row_parallel_linear,
    "parameter-gradient",
    origin="xtuner: gradients are multiplied by the TP size; the framework's differentiable all-reduce also reduces in backward",
    diagnosis=f"{TOO_MANY} in backward",
    module="weight.grad*",
)
class ReducedBothWays(RowParallelLinear):
    """Takes the all-reduce for its own adjoint, and sums a gradient that is replicated already."""

    def reduce(self, partial: Tensor) -> Tensor:
        """all_reduce / all_reduce."""
        return mapping(partial, lambda x: summed(x, self.group), lambda grad: summed(grad, self.group))


@mutant(
    "doubled reduction",
    column_parallel_linear,
    "input-gradient",
    origin="Megatron-LM: a copy-with-reduce put in front of a layer that has one",
    diagnosis=f"{TOO_MANY} in backward",
    module="x.grad*",
)
class ColumnGradientReducedTwice(ColumnParallelLinear):
    """The input passes through f twice, and its gradient is summed twice."""

    def spread(self, x: Tensor) -> Tensor:
        """Identity / two all_reduces."""
        return copy_to_region(super().spread(x), self.group)


@mutant(
    "doubled reduction",
    mlp,
    "input-gradient",
    origin="Megatron-LM, review of a fix for multi-latent attention: right without sequence parallelism, summed twice with it",
    module="x.grad*",
    diagnosis="one reduction too many",
)
class CopiedBeforeTheGather(ParallelMLP):
    """Under sequence parallelism the input passes through f, although the gather's backward sums it already."""

    def forward(self, x: Tensor) -> Tensor:
        """The network, behind an f too many."""
        return super().forward(copy_to_region(x, self.fc1.group) if self.fc1.sequence_parallel else x)


@mutant(
    "moved reduction",
    row_parallel_linear,
    "forward",
    origin="schedules that hoist the all-reduce over the matrix product: shapes agree, and so does the number of messages",
    module="output*",
)
class ReducedBeforeTheProduct(RowParallelLinear):
    """The inputs of the product are summed in place of its results."""

    def multiply(self, x: Tensor) -> Tensor:
        """The summand, of an input that is a sum."""
        reducible = len(set(self.sizes)) == 1 and not self.sequence_parallel
        return super().multiply(super().reduce(x) if reducible else x)

    def reduce(self, partial: Tensor) -> Tensor:
        """Done, as far as this one knows."""
        return partial if len(set(self.sizes)) == 1 else super().reduce(partial)


@mutant(
    "moved reduction",
    column_parallel_linear,
    "input-gradient",
    origin="fused column-parallel layers: the gradient of the output, not of the input, is summed; one all-reduce, as it should be",
    module="x.grad*",
    diagnosis="one reduction too many",
)
class OutputGradientReduced(ColumnParallelLinear):
    """f stands behind the product: gradients of different output features are added up."""

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """The product, then f."""
        even = not self.sequence_parallel and len(set(self.sizes)) == 1
        return copy_to_region(F.linear(x, weight), self.group) if even else super().multiply(x, weight)


class _ReferenceNormedMLP(ReferenceMLP):
    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.fc2(F.rms_norm(F.relu(self.fc1(x)) + 1.0, (self.fc2.in_features,)))
        return output


@mutant(
    "normalisation",
    mlp,
    "forward",
    reference=lambda c: _ReferenceNormedMLP(c.hidden, c.ffn, c.activation, c.bias),
    exact=False,
    communication=None,
    origin="exllamav3, mamba: a norm over features that tensor parallelism cuts, with a variance per rank; equal halves hide it",
    diagnosis="a local statistic",
    module="fc2*",
)
class NormOfOwnFeatures(ParallelMLP):
    """A norm between the two layers takes its statistic from this rank's features, without a sum over the ranks."""

    def forward(self, x: Tensor) -> Tensor:
        """The network, normalised rank by rank."""
        hidden = F.relu(self.fc1(x)) + 1.0
        output: Tensor = self.fc2(F.rms_norm(hidden, (hidden.shape[-1],)))
        return output
