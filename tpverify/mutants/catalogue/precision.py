"""Planted bugs: sums that are taken in a narrower dtype than the one they are for."""

from __future__ import annotations

import torch
from torch import Tensor

from tpverify.mutants.mappings import Step, mapping, same, summed
from tpverify.mutants.mutant import mutant
from tpverify.subjects.linear import ColumnParallelLinear, RowParallelLinear
from tpverify.subjects.linear_subjects import column_parallel_linear, row_parallel_linear
from tpverify.subjects.mappings import Group
from tpverify.subjects.mlp import ParallelMLP, activate, mlp

KIND = "precision"
FITS = "rounding fits this"


def reduced_in(dtype: torch.dtype, reduce: Step, x: Tensor, group: Group) -> Tensor:
    """``reduce`` of the values rounded to ``dtype``, widened again; of a single rank's, as they are."""
    return reduce(x) if group.size() == 1 else reduce(x.to(dtype)).to(x.dtype)


@mutant(
    KIND,
    row_parallel_linear,
    "forward",
    origin="communication in a fixed dtype, whatever the activations have",
    diagnosis=FITS,
    module="output*",
)
class ReducedInSingle(RowParallelLinear):
    """The partial results are rounded to float32, summed, and widened again."""

    def reduce(self, partial: Tensor) -> Tensor:
        """g of half the bytes."""
        return reduced_in(torch.float32, super().reduce, partial, self.group)


@mutant(
    KIND,
    row_parallel_linear,
    "forward",
    origin="TransformerEngine: row-parallel partials summed in bf16 lose what is small beside the running sum",
    diagnosis=FITS,
    module="output*",
)
class ReducedInBfloat16(RowParallelLinear):
    """The partial results are summed in bfloat16, with three digits."""

    def reduce(self, partial: Tensor) -> Tensor:
        """g of a quarter of the bytes."""
        return reduced_in(torch.bfloat16, super().reduce, partial, self.group)


@mutant(
    KIND,
    column_parallel_linear,
    "input-gradient",
    origin="PyTorch: a requested reduction dtype is honoured for data parallelism and ignored for tensor parallelism",
    diagnosis=FITS,
    module="x.grad*",
)
class GradientReducedInHalf(ColumnParallelLinear):
    """The input gradient is summed in float16."""

    def spread(self, x: Tensor) -> Tensor:
        """Identity / all_reduce in float16."""
        return mapping(x, same, lambda grad: reduced_in(torch.float16, lambda narrow: summed(narrow, self.group), grad, self.group))


@mutant(
    KIND,
    mlp,
    "forward",
    origin="RL-Kernel: each shard's accumulator is stored in the narrow dtype before the sum, so results depend on the TP degree",
    diagnosis=FITS,
    module="fc2*",
)
class RoundedBeforeTheSum(RowParallelLinear):
    """With several ranks the partial results are rounded to float16 before they are summed in full precision."""

    def multiply(self, x: Tensor) -> Tensor:
        """The summand, rounded."""
        partial = super().multiply(x)
        return partial.half().to(partial.dtype) if self.group.size() > 1 else partial


@mutant(
    KIND,
    column_parallel_linear,
    "parameter-gradient",
    origin="gradient accumulation into a narrow main_grad in the fused weight-gradient kernel, which only TP layers use",
    diagnosis=FITS,
    module="*.grad*",
)
class WeightGradientInSingle(ColumnParallelLinear):
    """With several ranks parameter gradients pass through float32."""

    def local_parameters(self) -> tuple[Tensor, Tensor | None]:
        """The parameters / rounded."""
        weight, bias = super().local_parameters()
        if self.group.size() == 1:
            return weight, bias
        weight = mapping(weight, same, lambda grad: grad.float().double())
        return weight, None if bias is None else mapping(bias, same, lambda grad: grad.float().double())


@mutant(
    KIND,
    mlp,
    "forward",
    origin="sharded layers whose epilogue was compiled for float32",
    diagnosis=FITS,
    module="fc2*",
)
class BiasAddedInSingle(RowParallelLinear):
    """Under sequence parallelism the sum of output and bias is rounded to float32."""

    def add_bias(self, output: Tensor) -> Tensor:
        """With the bias, rounded."""
        return (
            super().add_bias(output).float().to(output.dtype)
            if self.sequence_parallel and self.group.size() > 1
            else super().add_bias(output)
        )


@mutant(
    KIND,
    mlp,
    "forward",
    origin="activations recomputed or stored in bf16 on the sharded path only",
    diagnosis=FITS,
    module="fc2*",
)
class HiddenInBfloat16(ParallelMLP):
    """With several ranks the hidden features are handed on in bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        """The network, a rounding in its middle."""
        hidden = activate(self.fc1(x), self.activation)
        output: Tensor = self.fc2(hidden.bfloat16().to(x.dtype) if self.fc1.group.size() > 1 else hidden)
        return output


@mutant(
    KIND,
    row_parallel_linear,
    "forward",
    origin="sequence-parallel code in which the reduce-scatter adds up in the wire's dtype, rank after rank",
    diagnosis=FITS,
    module="output*",
)
class RunningSumInHalf(RowParallelLinear):
    """The reduce-scatter sums in float16."""

    def reduce_scatter(self, partial: Tensor) -> Tensor:
        """reduce_scatter in float16."""
        return reduced_in(torch.float16, super().reduce_scatter, partial, self.group)
