"""Planted bugs: the right numbers, at the cost of messages or work that nobody needs."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tpverify.mutants.mappings import cut, summed
from tpverify.mutants.mutant import add_mutant, mutant
from tpverify.subjects.block import transformer_block
from tpverify.subjects.linear import ColumnParallelLinear, RowParallelLinear
from tpverify.subjects.linear_subjects import column_parallel_linear, row_parallel_linear
from tpverify.subjects.mappings import copy_to_region, gather_from_region, scatter_to_region
from tpverify.subjects.mlp import ParallelMLP, activate, mlp

KIND = "waste"


@mutant(
    KIND,
    row_parallel_linear,
    "communication",
    origin="a sum for a debug statistic that stayed in the layer; one more message for every layer and step",
    diagnosis="no further collective",
)
class ReducedInVain(RowParallelLinear):
    """Sums the partial results once more, for nobody."""

    def reduce(self, partial: Tensor) -> Tensor:
        """g, after a sum that is thrown away."""
        summed(partial, self.group)
        return super().reduce(partial)


@mutant(
    KIND,
    mlp,
    "communication",
    origin="blocks built from layers with gather_output=True in front of layers that cut their input again",
    diagnosis="no further collective",
)
class GatheredBeforeTheActivation(ParallelMLP):
    """All features are rejoined between the two layers, where each rank needs its own only."""

    def forward(self, x: Tensor) -> Tensor:
        """fc1, gather, activation, scatter, fc2."""
        features, group = self.fc1(x), self.fc1.group
        sizes = [features.shape[-1]] * group.size()
        whole = activate(gather_from_region(features, -1, sizes, group), self.activation)
        output: Tensor = self.fc2(scatter_to_region(whole, -1, sizes, group))
        return output


@mutant(
    KIND,
    column_parallel_linear,
    "communication",
    origin="weights gathered as sharded data parallelism does, in layers that are tensor-parallel already",
    diagnosis="no further collective",
)
class WeightGatheredThenSliced(ColumnParallelLinear):
    """Every rank gathers the whole weight, multiplies with all of it and keeps its own features."""

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """The whole product, cut."""
        if self.sequence_parallel:
            return super().multiply(x, weight)
        whole = gather_from_region(weight, 0, self.sizes, self.group)
        return cut(F.linear(copy_to_region(x, self.group), whole), self.sizes, self.group)


@mutant(
    KIND,
    mlp,
    "communication",
    origin="barriers that made a hang easier to find and were never taken out",
    diagnosis="no further collective",
)
class BarrierInForward(RowParallelLinear):
    """All ranks meet before each reduction, which makes them meet anyway."""

    def reduce(self, partial: Tensor) -> Tensor:
        """g, after a barrier."""
        dist.barrier(group=self.group)
        return super().reduce(partial)


@mutant(
    KIND,
    row_parallel_linear,
    "communication",
    origin="chunked overlap without anything to overlap with: twice the latency",
    diagnosis="no further collective",
)
class ReducedInHalves(RowParallelLinear):
    """The partial result is summed in two messages where one is enough."""

    def reduce(self, partial: Tensor) -> Tensor:
        """g of each half."""
        return torch.cat([super(ReducedInHalves, self).reduce(half) for half in partial.tensor_split(2, -1)], -1)


def finalize_one_by_one(module: nn.Module) -> None:
    """Sums each flagged gradient in a message of its own."""
    for parameter in module.parameters():
        if hasattr(parameter, "sequence_parallel_group") and parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=parameter.sequence_parallel_group)


add_mutant(
    "finalized-one-by-one",
    KIND,
    transformer_block,
    "communication",
    finalize_gradients=finalize_one_by_one,
    story="The gradients of norms and biases are summed one by one, a message for a few hundred numbers each.",
    origin="the first version of most sequence-parallel trainers; later ones coalesce",
    diagnosis="split or gathered messages",
)


@mutant(
    KIND,
    mlp,
    "communication",
    origin="activation functions evaluated once for the value and once more for a statistic",
    equivalent="it costs time on every rank, but neither a message nor a different number: the harness counts messages",
)
class ActivationComputedTwice(ParallelMLP):
    """The activation is computed twice, and one result is thrown away."""

    def forward(self, x: Tensor) -> Tensor:
        """The network, at some extra cost."""
        features = self.fc1(x)
        activate(features.detach(), self.activation)
        output: Tensor = self.fc2(activate(features, self.activation))
        return output
