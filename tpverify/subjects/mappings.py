"""The communication of tensor parallelism: three pairs of autograd functions, each the exact adjoint of its partner.

===========================  ==============================  ==============================
function                     forward                         backward
===========================  ==============================  ==============================
copy_to_region (f)           identity                        all_reduce
reduce_from_region (g)       all_reduce                      identity
gather_from_region           all_gather along dim            keep the rank's part
scatter_to_region            keep the rank's part            all_gather along dim
gather_sequence              all_gather along dim 0          reduce_scatter along dim 0
reduce_scatter_sequence      reduce_scatter along dim 0      all_gather along dim 0
===========================  ==============================  ==============================

All take the process group and send nothing in a group of one. Tensors at a collective are contiguous and nobody else's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

Group = dist.ProcessGroup

# Torch 2.13 renamed these two.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def divide(numerator: int, world_size: int, name: str) -> int:
    """``numerator / world_size``.

    Args:
        name: what ``numerator`` is called in the error.

    Raises:
        ValueError: it does not divide; names both numbers.
    """
    if numerator % world_size:
        raise ValueError(f"Expected {name} to be divisible by the TP world size but got {name}={numerator}, world_size={world_size}")
    return numerator // world_size


def split_sizes(size: int, world_size: int) -> list[int]:
    """Extents by rank of a cut that need not divide, as ``torch.tensor_split``: the first ranks hold one more."""
    part, rest = divmod(size, world_size)
    return [part + (rank < rest) for rank in range(world_size)]


def copy_to_region(x: Tensor, group: Group) -> Tensor:
    """f: hand a replicated tensor to ranks that each compute a part; their gradients are summed.

    Shapes: any -> the same.
    """
    return x if group.size() == 1 else apply(_Copy, x, group)


def reduce_from_region(x: Tensor, group: Group) -> Tensor:
    """g: sum the ranks' partial results; the replicated gradient is each rank's gradient.

    Shapes: any -> the same.
    """
    return x if group.size() == 1 else apply(_Reduce, x, group)


def gather_from_region(x: Tensor, dim: int, sizes: Sequence[int], group: Group) -> Tensor:
    """Join the ranks' parts along ``dim`` into a replicated tensor whose gradient is replicated too.

    Args:
        sizes: extent along ``dim`` on each rank; they may differ or be zero.

    Shapes: [..., sizes[rank], ...] -> [..., sum(sizes), ...].
    """
    return x if group.size() == 1 else apply(_Gather, x, dim, tuple(sizes), group)


def scatter_to_region(x: Tensor, dim: int, sizes: Sequence[int], group: Group) -> Tensor:
    """Keep this rank's part of a replicated tensor along ``dim``; the gradient is joined again.

    Args:
        sizes: extent along ``dim`` on each rank; they may differ or be zero.

    Shapes: [..., sum(sizes), ...] -> [..., sizes[rank], ...].
    """
    return x if group.size() == 1 else apply(_Scatter, x, dim, tuple(sizes), group)


def gather_sequence(x: Tensor, group: Group) -> Tensor:
    """Join sequence shards for ranks that each compute a part of the features; their gradients are summed and cut again.

    Shapes: [s / world_size, ...] -> [s, ...].
    """
    return x if group.size() == 1 else apply(_GatherSequence, x, group)


def reduce_scatter_sequence(x: Tensor, group: Group) -> Tensor:
    """Sum the ranks' partial results and keep this rank's part of the sequence.

    Shapes: [s, ...] -> [s / world_size, ...].

    Raises:
        ValueError: the sequence does not divide by the world size.
    """
    if group.size() == 1:
        return x
    divide(len(x), group.size(), "sequence length")
    return apply(_ReduceScatterSequence, x, group)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_from_region(grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return copy_to_region(grad, ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sizes: tuple[int, ...], group: Group) -> Tensor:
        ctx.cut = (dim, sizes, group)
        return _all_gather(x, dim, sizes, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return scatter_to_region(grad, *ctx.cut), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sizes: tuple[int, ...], group: Group) -> Tensor:
        ctx.cut = (dim, sizes, group)
        rank = group.rank()
        return x.narrow(dim, sum(sizes[:rank]), sizes[rank]).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return gather_from_region(grad, *ctx.cut), None, None, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return join_sequence(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter_sequence(grad, ctx.group), None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return sum_and_cut_sequence(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gather_sequence(grad, ctx.group), None


def join_sequence(x: Tensor, group: Group) -> Tensor:
    """Join sequence shards without autograd.

    Shapes: [s / world_size, ...] -> [s, ...].
    """
    output = x.new_empty((len(x) * group.size(), *x.shape[1:]))
    _all_gather_single(output, x.contiguous(), group=group)
    return output


def sum_and_cut_sequence(x: Tensor, group: Group) -> Tensor:
    """Sum partial results and keep this rank's part, without autograd.

    Shapes: [s, ...] -> [s / world_size, ...].
    """
    output = x.new_empty((len(x) // group.size(), *x.shape[1:]))
    _reduce_scatter_single(output, x.contiguous(), group=group)
    return output


def _all_reduce(x: Tensor, group: Group) -> Tensor:
    # A copy: the collective works in place, and x may be saved by autograd or shared with another branch.
    output = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(output, group=group)
    return output


def _all_gather(x: Tensor, dim: int, sizes: tuple[int, ...], group: Group) -> Tensor:
    """Parts of unequal extent travel padded to the largest one: the collective wants equal messages."""
    if x.shape[dim] != sizes[group.rank()]:
        raise ValueError(f"Expected {sizes[group.rank()]} elements along dim={dim} on rank {group.rank()} but got shape={tuple(x.shape)}")
    front = x.movedim(dim, 0)
    largest = max(sizes)
    padded = F.pad(front, [0, 0] * (front.dim() - 1) + [0, largest - len(front)])
    gathered = join_sequence(padded, group)
    parts = [gathered.narrow(0, rank * largest, size) for rank, size in enumerate(sizes)]
    return torch.cat(parts).movedim(0, dim)


def apply(function: Any, *args: Any) -> Tensor:
    """``Function.apply`` with a type."""
    result: Tensor = function.apply(*args)
    return result
