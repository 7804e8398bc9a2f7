"""A small in-house library as companies have them: global groups, a GPU taken for granted, a norm in float32, gradients finished later."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

group: Any = None


def initialize(tensor_parallel_size: int) -> None:
    """Make this rank's TP group of neighbouring ranks; once per process."""
    global group
    if group is not None:
        raise RuntimeError("initialized twice")
    for start in range(0, dist.get_world_size(), tensor_parallel_size):
        ranks = list(range(start, start + tensor_parallel_size))
        made = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            group = made


class _Gather(torch.autograd.Function):
    """All tokens from each rank's own; their gradients are added up and dealt out again."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        whole = torch.empty(own.shape[0] * group.size(), *own.shape[1:], dtype=own.dtype, device=torch.cuda.current_device())
        dist.all_gather_into_tensor(whole, own.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        own = torch.empty(gradient.shape[0] // group.size(), *gradient.shape[1:], dtype=gradient.dtype)
        dist.reduce_scatter_tensor(own, gradient.contiguous(), group=group)
        return own


class _Scatter(torch.autograd.Function):
    """The sum over ranks, of which each keeps its own tokens; the other way round in backward."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor) -> Tensor:
        return _Gather.backward(ctx, partial)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _Gather.forward(ctx, gradient)


class Norm(nn.LayerNorm):
    """LayerNorm in float32, whatever it is given."""

    def forward(self, x: Tensor) -> Tensor:
        """[s, h] -> [s, h]."""
        return F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps).to(x.dtype)


class MLP(nn.Module):
    """norm, up, GELU, down, over tokens that are dealt out to the ranks."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.norm = Norm(hidden)
        self.up = nn.Linear(hidden, ffn // group.size())
        self.down = nn.Linear(ffn // group.size(), hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[s / ranks, h] -> [s / ranks, h]."""
        inner = F.gelu(self.up(_Gather.apply(self.norm(x))))
        scattered: Tensor = _Scatter.apply(F.linear(inner, self.down.weight))
        return scattered + self.down.bias


def finish_gradients(module: nn.Module) -> None:
    """Add up the gradients of what every rank applies to its own tokens only."""
    for name in ("norm.weight", "norm.bias", "down.bias"):
        dist.all_reduce(module.get_parameter(name).grad, group=group)
