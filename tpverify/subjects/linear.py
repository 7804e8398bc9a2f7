"""ColumnParallelLinear and RowParallelLinear: which part of a linear layer a rank holds, and when ranks talk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpverify.subjects.mappings import (
    Group,
    apply,
    copy_to_region,
    divide,
    gather_from_region,
    join_sequence,
    reduce_from_region,
    reduce_scatter_sequence,
    scatter_to_region,
    split_sizes,
    sum_and_cut_sequence,
)
from tpverify.subjects.parameters import INIT_STD, initial_weight, mark_sequence_parallel, with_bias


class ColumnParallelLinear(nn.Module):
    """``x @ weight.T + bias`` with the output features cut over the ranks of ``group``.

    Args:
        gather_output: join the output features, so that every rank returns all of them.
        skip_bias_add: return ``(output, bias)`` with the bias not added; the bias stays this rank's part.
        sequence_parallel: the input is a shard of the sequence, dimension 0; the output is not.
        uneven: cut ``out_features`` as ``torch.tensor_split`` does; a rank may hold none.
        rows: logical output features that this rank holds, in local order, where they are not one plain cut (fused Q|K|V).

    Shapes: [..., in_features] -> [..., out_features / world_size]; under sequence parallelism
        [s / world_size, ..., in_features] -> [s, ..., out_features / world_size].

    Raises:
        ValueError: ``out_features`` does not divide, or the options contradict each other.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: Group,
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        sequence_parallel: bool = False,
        uneven: bool = False,
        rows: Sequence[range] | None = None,
        init_std: float = INIT_STD,
    ) -> None:
        super().__init__()
        if gather_output and (sequence_parallel or rows is not None):
            raise ValueError("Expected gather_output=False with sequence_parallel or rows but got gather_output=True")
        self.group = group
        self.gather_output, self.skip_bias_add, self.sequence_parallel = gather_output, skip_bias_add, sequence_parallel
        if rows is None:
            self.sizes = _sizes(out_features, group, uneven, "out_features")
            rows = [_part(self.sizes, group)]
        self.weight = initial_weight(out_features, in_features, init_std, 0, rows)
        self.bias = nn.Parameter(torch.zeros(len(self.weight))) if bias else None

    def local_parameters(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias as this rank uses them."""
        return self.weight, self.bias

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        """This rank's output features, or all of them (``gather_output``); with the bias beside it (``skip_bias_add``)."""
        weight, bias = self.local_parameters()
        output = self.multiply(x, weight)
        if not self.skip_bias_add:
            output = with_bias(output, bias)
        if self.gather_output:
            output = self.join(output)
        return (output, bias) if self.skip_bias_add else output

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """This rank's output features, of the whole sequence, without the bias."""
        if self.sequence_parallel:
            return gathered_product(x, weight, self.group)
        return F.linear(self.spread(x), weight)

    def spread(self, x: Tensor) -> Tensor:
        """f: the input, whose gradient is summed over the ranks."""
        return copy_to_region(x, self.group)

    def join(self, output: Tensor) -> Tensor:
        """All ranks' output features."""
        return gather_from_region(output, -1, self.sizes, self.group)


class RowParallelLinear(nn.Module):
    """``x @ weight.T + bias`` with the input features cut over the ranks of ``group``: one reduction, then the bias, once.

    Args:
        input_is_parallel: the input holds this rank's features only; otherwise all of them, and the layer cuts.
        skip_bias_add: return ``(output, bias)`` with the bias not added.
        sequence_parallel: the output is a shard of the sequence, dimension 0; the gradient of the bias is then partial.
        uneven: cut ``in_features`` as ``torch.tensor_split`` does; a rank may hold none.

    Shapes: [..., in_features / world_size] -> [..., out_features]; under sequence parallelism
        [s, ..., in_features / world_size] -> [s / world_size, ..., out_features].

    Raises:
        ValueError: ``in_features`` or, under sequence parallelism, the sequence does not divide, or the options contradict
            each other.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: Group,
        bias: bool = True,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        sequence_parallel: bool = False,
        uneven: bool = False,
        init_std: float = INIT_STD,
    ) -> None:
        super().__init__()
        if sequence_parallel and not input_is_parallel:
            raise ValueError("Expected input_is_parallel=True with sequence_parallel but got input_is_parallel=False")
        self.group = group
        self.input_is_parallel, self.skip_bias_add, self.sequence_parallel = input_is_parallel, skip_bias_add, sequence_parallel
        self.sizes = _sizes(in_features, group, uneven, "in_features")
        self.weight = initial_weight(out_features, in_features, init_std, 1, [_part(self.sizes, group)])
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        if self.bias is not None and sequence_parallel:
            mark_sequence_parallel(self.bias, group)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        """The whole output features, summed over the ranks; with the bias beside it (``skip_bias_add``)."""
        if not self.input_is_parallel:
            x = scatter_to_region(x, -1, self.sizes, self.group)
        partial = self.multiply(x)
        output = self.reduce_scatter(partial) if self.sequence_parallel else self.reduce(partial)
        return (output, self.bias) if self.skip_bias_add else self.add_bias(output)

    def multiply(self, x: Tensor) -> Tensor:
        """This rank's summand of the output features."""
        return F.linear(x, self.weight)

    def reduce(self, partial: Tensor) -> Tensor:
        """g: the sum over the ranks."""
        return reduce_from_region(partial, self.group)

    def reduce_scatter(self, partial: Tensor) -> Tensor:
        """The sum over the ranks, of this rank's part of the sequence."""
        return reduce_scatter_sequence(partial, self.group)

    def add_bias(self, output: Tensor) -> Tensor:
        """The output features with the bias, where there is one."""
        return with_bias(output, self.bias)


def column_parallel_product(x: Tensor, weight: Tensor, group: Group, sequence_parallel: bool) -> Tensor:
    """``x @ weight.T`` where the rows of ``weight`` are cut over the ranks; the input gradient is summed over them.

    Shapes: x [..., in], weight [out / world_size, in] -> [..., out / world_size]; under sequence parallelism
        x [s / world_size, ..., in] -> [s, ..., out / world_size].
    """
    return gathered_product(x, weight, group) if sequence_parallel else F.linear(copy_to_region(x, group), weight)


def gathered_product(x: Tensor, weight: Tensor, group: Group) -> Tensor:
    """``x @ weight.T`` for an input that is cut along the sequence; its gradient is summed over the ranks and cut again.

    Shapes: x [s / world_size, ..., in], weight [out / world_size, in] -> [s, ..., out / world_size].
    """
    return F.linear(x, weight) if group.size() == 1 else apply(_GatherSequenceProduct, x, weight, group)


class _GatherSequenceProduct(torch.autograd.Function):
    """Gather the sequence, then multiply; keeps only the shard for backward and gathers it again for the weight gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: Group) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return F.linear(join_sequence(x, group), weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[1]:
            whole = join_sequence(x, ctx.group)
            grad_weight = grad.flatten(0, -2).t() @ whole.flatten(0, -2)
        if ctx.needs_input_grad[0]:
            grad_x = sum_and_cut_sequence(grad @ weight, ctx.group)
        return grad_x, grad_weight, None


def _sizes(features: int, group: Group, uneven: bool, name: str) -> list[int]:
    if uneven:
        return split_sizes(features, group.size())
    return [divide(features, group.size(), name)] * group.size()


def _part(sizes: Sequence[int], group: Group) -> range:
    start = sum(sizes[: group.rank()])
    return range(start, start + sizes[group.rank()])
