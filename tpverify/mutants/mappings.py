"""Collectives whose forward and backward are given apart from one another, so that either can be wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpverify.subjects.mappings import Group, apply, join_sequence

Step = Callable[[Tensor], Tensor]

# Torch 2.13 renamed these two.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Mapping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Step, backward: Step) -> Tensor:
        ctx.step = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.step(grad), None, None


def mapping(x: Tensor, forward: Step, backward: Step) -> Tensor:
    """``forward(x)``, whose gradient is ``backward`` of the gradient."""
    return apply(_Mapping, x, forward, backward)


def same(x: Tensor) -> Tensor:
    """Nothing happens."""
    return x.view_as(x)


def summed(x: Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """The sum over the ranks (or what else ``op`` says), in a fresh tensor and without autograd."""
    output = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(output, op=op, group=group)
    return output


def joined(x: Tensor, dim: int, group: Group) -> Tensor:
    """Equal parts of all ranks along ``dim``, without autograd."""
    return torch.cat(join_sequence(x.detach().contiguous().unsqueeze(0), group).unbind(), dim)


def part(x: Tensor, dim: int, group: Group, rank: int | None = None) -> Tensor:
    """One of equal parts along ``dim``: that of ``rank``, by default the own one."""
    size = x.shape[dim] // group.size()
    return x.narrow(dim, (group.rank() if rank is None else rank) * size, size)


def cut(x: Tensor, sizes: Sequence[int], group: Group) -> Tensor:
    """The own part along the last dimension, of parts that need not be equal; a copy."""
    return x.narrow(-1, sum(sizes[: group.rank()]), sizes[group.rank()]).clone()
