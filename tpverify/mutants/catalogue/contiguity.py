"""Planted bugs: memory read in the wrong order, and copies that are reduced in place of what is returned."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tpverify.mutants.mappings import all_gather_single, cut, mapping, reduce_scatter_single, same
from tpverify.mutants.mutant import mutant
from tpverify.subjects.linear import ColumnParallelLinear, RowParallelLinear
from tpverify.subjects.linear_subjects import column_parallel_linear, row_parallel_linear
from tpverify.subjects.mappings import join_sequence
from tpverify.subjects.mlp import mlp

KIND = "contiguity"


@mutant(
    KIND,
    column_parallel_linear,
    "input-gradient",
    origin="SkyRL, Megatron-LM: the gradient is made contiguous for the all-reduce, and what it was made from is returned",
    diagnosis="a missing all_reduce(SUM) in backward",
    module="x.grad*",
)
class CopyReduced(ColumnParallelLinear):
    """Backward sums a contiguous copy of the input gradient in place and returns the original, if a copy was made."""

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """The product of a batch-first view / the sum, or not."""
        if self.sequence_parallel:
            return super().multiply(x, weight)

        def in_place(grad: Tensor) -> Tensor:
            dist.all_reduce(grad.contiguous(), group=self.group)
            return grad

        return F.linear(mapping(x, same, in_place).transpose(0, 1), weight).transpose(0, 1)


@mutant(
    KIND,
    row_parallel_linear,
    "buffers",
    origin="PyTorch, gloo: all-reduce and its siblings are wrong on strided tensors; NCCL refuses them",
    module="*",
    diagnosis="non-contiguous tensor at a collective",
)
class StridedReduction(RowParallelLinear):
    """A transposed view is handed to the reduction, which a simulator survives and a real backend does not."""

    def reduce(self, partial: Tensor) -> Tensor:
        """g of a view."""

        def strided(x: Tensor) -> Tensor:
            output = x.transpose(0, -1).contiguous().transpose(0, -1)
            dist.all_reduce(output, group=self.group)
            return output

        return mapping(partial, strided, same)


@mutant(
    KIND,
    column_parallel_linear,
    "buffers",
    origin="PyTorch, gloo: a gather of a strided tensor returns other elements; the tests filled tensors with one number",
    module="*",
    diagnosis="non-contiguous tensor at a collective",
)
class StridedGather(ColumnParallelLinear):
    """The gather along the features sends a view whose features come first."""

    def join(self, output: Tensor) -> Tensor:
        """All output features, gathered from a view."""
        if len(set(self.sizes)) > 1:
            return super().join(output)

        def gathered(x: Tensor) -> Tensor:
            front = x.new_empty(sum(self.sizes), *x.shape[:-1])
            all_gather_single(front, x.movedim(-1, 0), group=self.group)
            return front.movedim(0, -1)

        return mapping(output, gathered, lambda grad: cut(grad, self.sizes, self.group))


@mutant(
    KIND,
    column_parallel_linear,
    "execution",
    origin="Megatron-style layers that flatten with view; callers hand in a transposed tensor and get an error",
    module="*",
    ranks="first",
)
class ViewOfAnyInput(ColumnParallelLinear):
    """Takes every input for contiguous, on several ranks."""

    def spread(self, x: Tensor) -> Tensor:
        """f of a flat view."""
        return super().spread(x) if self.group.size() == 1 else super().spread(x.view(-1, x.shape[-1])).view(x.shape)


@mutant(
    KIND,
    row_parallel_linear,
    "forward",
    origin="custom all-reduce kernels that get a pointer and a number of elements, and read memory as it lies",
    module="output*",
    diagnosis="without regard to its strides",
)
class StorageReadLinearly(RowParallelLinear):
    """With several ranks the input is read from its storage one element after the other, whatever its strides."""

    def multiply(self, x: Tensor) -> Tensor:
        """The summand, of what lies at the address."""
        if self.group.size() == 1 or x.is_contiguous():
            return super().multiply(x)
        stored = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())[: x.numel()]
        values = F.pad(stored, [0, x.numel() - stored.numel()]).view(x.shape)
        return super().multiply(x + (values - x).detach())


@mutant(
    KIND,
    row_parallel_linear,
    "parameter-gradient",
    origin="trainers that flatten gradients with reshape, sum the flat copy and never copy it back",
    diagnosis="a missing all_reduce(SUM) in backward",
    module="bias.grad*",
    finalize_gradients=lambda module: finalize_a_copy(module),
)
class FinalizedCopy(RowParallelLinear):
    """The flagged gradients are summed in a flat copy that is thrown away."""


def finalize_a_copy(module: torch.nn.Module) -> None:
    """Sums what nobody keeps."""
    for parameter in module.parameters():
        if hasattr(parameter, "sequence_parallel_group") and parameter.grad is not None:
            dist.all_reduce(torch.cat([parameter.grad]), group=parameter.sequence_parallel_group)


@mutant(
    KIND,
    mlp,
    "buffers",
    origin="reduce-scatter of a batch-first view of the partial result, as attention code leaves it",
    module="*",
    diagnosis="non-contiguous tensor at a collective",
)
class StridedReduceScatter(RowParallelLinear):
    """The reduce-scatter along the sequence reads a view whose batch comes first in memory."""

    def reduce_scatter(self, partial: Tensor) -> Tensor:
        """reduce_scatter / all_gather of a view."""

        def strided(x: Tensor) -> Tensor:
            output = x.new_empty(len(x) // self.group.size(), *x.shape[1:])
            reduce_scatter_single(output, x.transpose(0, 1).contiguous().transpose(0, 1), group=self.group)
            return output

        return mapping(partial, strided, lambda grad: join_sequence(grad, self.group))
