"""Planted bugs: values that are right and carry no gradient."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tpverify.mutants.mappings import cut, summed
from tpverify.mutants.mutant import mutant
from tpverify.subjects.block import ParallelTransformerBlock, around_residual, transformer_block
from tpverify.subjects.linear import ColumnParallelLinear, RowParallelLinear
from tpverify.subjects.linear_subjects import column_parallel_linear, row_parallel_linear
from tpverify.subjects.mlp import ParallelMLP, mlp, swiglu_mlp

KIND = "detached"
BRANCH = "a detached branch"


@mutant(
    KIND,
    row_parallel_linear,
    "parameter-gradient",
    origin="ms-swift and many hand-written layers: a plain in-place all-reduce, which autograd does not follow",
    diagnosis=BRANCH,
    module="weight.grad*",
)
class ReducedOutsideAutograd(RowParallelLinear):
    """The reduction cuts the graph, and everything before it stays without gradient."""

    def reduce(self, partial: Tensor) -> Tensor:
        """The sum, of nothing."""
        return summed(partial, self.group) if self.group.size() > 1 else super().reduce(partial)


@mutant(
    KIND,
    column_parallel_linear,
    "parameter-gradient",
    origin="tutorial code: heads and features rejoined by dist.all_gather, so that the layer before it is never trained",
    diagnosis=BRANCH,
    module="*.grad*",
)
class JoinedOutsideAutograd(ColumnParallelLinear):
    """The output features are joined by a plain gather."""

    def join(self, output: Tensor) -> Tensor:
        """All features, from nowhere."""
        return super().join(output.detach() if self.group.size() > 1 else output)


@mutant(
    KIND,
    mlp,
    "input-gradient",
    origin="a detach meant to save a second reduction, where the first one was missing as well",
    diagnosis=BRANCH,
    module="fc1*",
)
class InputDetached(ColumnParallelLinear):
    """The input of the layer is detached, on several ranks only."""

    def spread(self, x: Tensor) -> Tensor:
        """The values."""
        return x.detach() if self.group.size() > 1 else super().spread(x)


@mutant(
    KIND,
    mlp,
    "parameter-gradient",
    origin="torchtitan-style wrappers that unwrap a parameter by .data before they hand it to a kernel",
    diagnosis=BRANCH,
    module="fc2.weight.grad*",
)
class WeightThroughData(RowParallelLinear):
    """The weight reaches the product as ``weight.data``."""

    def multiply(self, x: Tensor) -> Tensor:
        """The summand, of a constant weight."""
        return F.linear(x, self.weight.data) if self.group.size() > 1 else super().multiply(x)


@mutant(
    KIND,
    column_parallel_linear,
    "parameter-gradient",
    origin="fused sequence-parallel products under no_grad, whose backward was to be written later and covers the input only",
    diagnosis=BRANCH,
    module="weight.grad*",
)
class ProductForTheInputOnly(ColumnParallelLinear):
    """Under sequence parallelism the fused product has a gradient for its input and none for its weight."""

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """The product, of a constant weight."""
        return super().multiply(x, weight.detach() if self.sequence_parallel and self.group.size() > 1 else weight)


@mutant(
    KIND,
    swiglu_mlp,
    "parameter-gradient",
    origin="fused activations for sharded features that compute the derivative for one of their two inputs",
    diagnosis=BRANCH,
    module="fc1*.grad*",
)
class GateDetached(ParallelMLP):
    """With several ranks the gate's half gets no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        """The network, its gate a constant."""
        gate, up = self.fc1(x).chunk(2, -1)
        output: Tensor = self.fc2(F.silu(gate.detach() if self.fc1.group.size() > 1 else gate) * up)
        return output


@mutant(
    KIND,
    transformer_block,
    "input-gradient",
    origin="PyTorch: a to_local / from_local round trip that is a no-op forward and changes the gradient",
    diagnosis=BRANCH,
    module="x.grad*",
)
class ResidualDetached(ParallelTransformerBlock):
    """On several ranks the second residual carries no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        """The block, less a path for its gradient."""
        if self.arrangement != "pre_ln" or self.mlp.fc1.group.size() == 1:
            return super().forward(x)
        x = around_residual(x, self.attention, self.norm1, self.arrangement)
        output: Tensor = x.detach() + self.mlp(self.norm2(x))
        return output


@mutant(
    KIND,
    row_parallel_linear,
    "input-gradient",
    origin="scatter by a plain dist.scatter from rank 0: parts arrive, gradients have no way back",
    diagnosis=BRANCH,
    module="x.grad*",
)
class ScatteredOutsideAutograd(RowParallelLinear):
    """A layer that cuts its input keeps a copy of its part, without the graph."""

    def forward(self, x: Tensor) -> Any:
        """The layer, of a constant part."""
        if self.input_is_parallel or self.group.size() == 1:
            return super().forward(x)
        with torch.no_grad():
            own = cut(x, self.sizes, self.group)
        output = self.reduce(self.multiply(own))
        return (output, self.bias) if self.skip_bias_add else self.add_bias(output)


@mutant(
    KIND,
    row_parallel_linear,
    "parameter-gradient",
    origin="layers that return (output, bias) for a fused kernel and hand out the bias's values",
    diagnosis=BRANCH,
    module="bias.grad*",
)
class ReturnedBiasDetached(RowParallelLinear):
    """The bias that is handed back to be added later is detached, on several ranks only."""

    def forward(self, x: Tensor) -> Any:
        """The output and a constant."""
        output = super().forward(x)
        if not isinstance(output, tuple) or self.bias is None or self.group.size() == 1:
            return output
        return output[0], self.bias.detach()


@mutant(
    KIND,
    row_parallel_linear,
    "execution",
    origin="in-place all-reduces under no_grad on the very tensor that autograd holds, as inference code does",
    equivalent="the sum replaces the partial result in place, nothing keeps the old value, and the adjoint of g is the identity",
    module="*",
)
class ReducedInPlaceOnData(RowParallelLinear):
    """The all-reduce works in place on the partial result's data, behind autograd's back."""

    def reduce(self, partial: Tensor) -> Tensor:
        """The same tensor, with the sum in it."""
        dist.all_reduce(partial.data, group=self.group)
        return partial
