"""Planted bugs: values or gradients that are right but for a factor."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpverify.mutants.mappings import mapping, same
from tpverify.mutants.mutant import add_mutant, mutant
from tpverify.subjects.linear import ColumnParallelLinear, RowParallelLinear
from tpverify.subjects.linear_subjects import column_parallel_linear, row_parallel_linear
from tpverify.subjects.mlp import ParallelMLP, mlp, swiglu_mlp
from tpverify.subjects.parameters import finalize_gradients

CONSTANT = "a constant factor"


@mutant(
    "scale",
    row_parallel_linear,
    "forward",
    origin="8-bit code paths: the scale of the quantised weights is applied with two ranks or more, and rounded",
    diagnosis=CONSTANT,
    module="output*",
)
class OutputOnePercentLarger(RowParallelLinear):
    """The sum over several ranks comes out one per cent too large."""

    def reduce(self, partial: Tensor) -> Tensor:
        """g, and a factor."""
        return super().reduce(partial) * (1.01 if self.group.size() > 1 else 1.0)


@mutant(
    "scale",
    column_parallel_linear,
    "input-gradient",
    origin="loss scaling undone in one place with a rounded factor; every norm of the gradient looks plausible",
    diagnosis=CONSTANT,
    module="x.grad*",
)
class GradientOnePercentLarger(ColumnParallelLinear):
    """The summed input gradient comes out one per cent too large."""

    def spread(self, x: Tensor) -> Tensor:
        """f / and a factor."""
        return super().spread(x) if self.group.size() == 1 else mapping(super().spread(x), same, lambda grad: grad * 1.01)


@mutant(
    "scale",
    mlp,
    "input-gradient",
    origin="pre-scaling against overflow in half precision, by the square root of the TP degree on one side only",
    diagnosis=CONSTANT,
    module="fc2*",
)
class GradientTimesRootOfRanks(RowParallelLinear):
    """Backward of the second layer's reduction multiplies by the square root of the number of ranks."""

    def multiply(self, x: Tensor) -> Tensor:
        """The summand, its gradient scaled."""
        return mapping(super().multiply(x), same, lambda grad: grad * math.sqrt(self.group.size()))


@mutant(
    "scale",
    row_parallel_linear,
    "forward",
    origin="reductions along a tree that average at every level where the number of levels was tested with two ranks and a sum after it",
    module="output*",
    diagnosis=CONSTANT,
)
class TimesLevelsOfTheTree(RowParallelLinear):
    """The result is multiplied by log2 of the number of ranks, the levels of the tree: one with two ranks."""

    def reduce(self, partial: Tensor) -> Tensor:
        """g, and the number of levels."""
        return super().reduce(partial) * max(1.0, math.log2(self.group.size()))


@mutant(
    "scale",
    mlp,
    "parameter-gradient",
    origin="gradient accumulation: biases are divided by the number of ranks like a data-parallel mean, weights are not",
    diagnosis="one division too many in backward",
    module="fc1.bias.grad*",
)
class BiasGradientOverRanks(ColumnParallelLinear):
    """The gradient of the column-parallel bias, of which each rank has its own part, is divided by the number of ranks."""

    def local_parameters(self) -> tuple[Tensor, Tensor | None]:
        """The bias / divided."""
        bias = self.bias
        return self.weight, None if bias is None else mapping(bias, same, lambda grad: grad / self.group.size())


@mutant(
    "scale",
    swiglu_mlp,
    "forward",
    origin="scaled activations folded into one half of the gate by a converter that runs for sharded checkpoints only",
    module="fc2*",
)
class GateHalved(ParallelMLP):
    """With several ranks the gate is halved before its activation, as if two ranks had added it up."""

    def forward(self, x: Tensor) -> Tensor:
        """The network, with a gate of another size."""
        gate, up = self.fc1(x).chunk(2, -1)
        output: Tensor = self.fc2(F.silu(gate * (0.5 if self.fc1.group.size() > 1 else 1.0)) * up)
        return output


def finalize_over_ranks(module: nn.Module) -> None:
    """Divides the summed gradients by the number of ranks."""
    finalize_gradients(module)
    for parameter in module.parameters():
        if hasattr(parameter, "sequence_parallel_group") and parameter.grad is not None:
            parameter.grad /= parameter.sequence_parallel_group.size()


add_mutant(
    "finalized-to-the-mean",
    "scale",
    row_parallel_linear,
    "parameter-gradient",
    finalize_gradients=finalize_over_ranks,
    story="The partial gradients of sequence parallelism are averaged over the ranks, where each holds a summand.",
    origin="trainers that treat the TP group like a data-parallel one when they synchronise norm and bias gradients",
    diagnosis="one division too many in backward",
    module="bias.grad*",
)


def initialised_by_local_fan_in(config: Any) -> nn.Module:
    """The layer, its weight scaled as if this rank's input features were all there are."""
    layer: Any = row_parallel_linear.parallel(config)
    with torch.no_grad():
        layer.weight.mul_(math.sqrt(layer.group.size()))
    return layer  # type: ignore[no-any-return]


add_mutant(
    "initialised-by-local-fan-in",
    "scale",
    row_parallel_linear,
    "forward",
    parallel=initialised_by_local_fan_in,
    story="The initial weight of a row-parallel layer is scaled by its local input size, too large by the root of the TP degree.",
    origin="ORBIT-2: activation statistics at the start depend on the TP degree",
    equivalent="only initial values differ, and both sides of a comparison start from values of the harness",
)
