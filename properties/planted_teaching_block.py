"""A block as teaching material has it, all-gather attention and a column-GELU-row network, with five faults to switch on one by one."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from planted import plant
from torch import Tensor, nn

import tpverify as tpv
from tpverify.current_group import tp_group
from tpverify.subjects.mappings import apply
from tpverify.subjects.teaching_block import AllGatherAttentionBlockConfig, all_gather_attention_block

Group = dist.ProcessGroup

GATHER_WITHOUT_GRADIENT = "gather_without_gradient"
REDUCED_IN_BACKWARD = "reduced_in_backward"
INPUT_GRADIENT_NOT_REDUCED = "input_gradient_not_reduced"
SCORES_ACROSS_HEADS = "scores_across_heads"
NORM_BEFORE = "norm_before"
FAULTS = (GATHER_WITHOUT_GRADIENT, REDUCED_IN_BACKWARD, INPUT_GRADIENT_NOT_REDUCED, SCORES_ACROSS_HEADS, NORM_BEFORE)


class Sum(torch.autograd.Function):
    """all_reduce in forward, in backward, or in both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, forward: bool, backward: bool) -> Tensor:
        ctx.group, ctx.backward = group, backward
        return summed(x, group) if forward else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return summed(grad, ctx.group) if ctx.backward else grad, None, None, None


class Rejoin(torch.autograd.Function):
    """all_gather of the last dimension whose gradient is this rank's part of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.width = group, x.shape[-1]
        return rejoined(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.narrow(-1, ctx.group.rank() * ctx.width, ctx.width), None


def summed(x: Tensor, group: Group) -> Tensor:
    """The sum over the ranks, in a tensor of its own."""
    output = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(output, group=group)
    return output


def rejoined(x: Tensor, group: Group) -> Tensor:
    """The ranks' parts side by side: autograd does not see how they came."""
    x = x.detach().contiguous()
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x, group=group)
    return torch.cat(parts, dim=-1)


class ColumnLinear(nn.Linear):
    """A linear layer to this rank's output features, from whole input features."""

    def __init__(self, in_features: int, out_features: int, group: Group, faults: Collection[str]) -> None:
        super().__init__(in_features, out_features)
        self.group, self.faults = group, faults

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        return F.linear(apply(Sum, x, self.group, False, INPUT_GRADIENT_NOT_REDUCED not in self.faults), self.weight, self.bias)


class RowLinear(nn.Linear):
    """A linear layer over this rank's input features, summed over the ranks."""

    def __init__(self, in_features: int, out_features: int, group: Group, faults: Collection[str]) -> None:
        super().__init__(in_features, out_features)
        self.group, self.faults = group, faults

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        partial = F.linear(x, self.weight)
        return apply(Sum, partial, self.group, True, REDUCED_IN_BACKWARD in self.faults) + self.bias


class TeachingAttention(nn.Module):
    """This rank's heads, then all heads side by side; no output projection."""

    def __init__(self, hidden: int, heads: int, group: Group, faults: Collection[str]) -> None:
        super().__init__()
        self.group, self.faults = group, faults
        self.heads, self.head_dim = heads // group.size(), hidden // heads
        self.qkv = ColumnLinear(hidden, 3 * hidden // group.size(), group, faults)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, hidden] -> the same."""
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, self.head_dim)).unbind(2)  # [s, b, heads, head_dim] each
        if SCORES_ACROSS_HEADS not in self.faults:
            query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))  # [b, heads, s, head_dim]
        scores = query @ key.transpose(-2, -1) / math.sqrt(self.head_dim)
        context = scores.softmax(-1) @ value
        if SCORES_ACROSS_HEADS not in self.faults:
            context = context.permute(2, 0, 1, 3)
        context = context.flatten(2)
        return rejoined(context, self.group) if GATHER_WITHOUT_GRADIENT in self.faults else apply(Rejoin, context, self.group)


class TeachingMLP(nn.Module):
    """Column-parallel, GELU, row-parallel."""

    def __init__(self, hidden: int, ffn: int, group: Group, faults: Collection[str]) -> None:
        super().__init__()
        self.fc1 = ColumnLinear(hidden, ffn // group.size(), group, faults)
        self.fc2 = RowLinear(ffn // group.size(), hidden, group, faults)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, hidden] -> the same."""
        output: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return output


class TeachingBlock(nn.Module):
    """ "Post-LN" block."""

    def __init__(self, config: AllGatherAttentionBlockConfig, group: Group, faults: Collection[str]) -> None:
        super().__init__()
        for name, size in (("heads", config.heads), ("ffn", config.ffn)):
            if size % group.size():
                raise ValueError(f"Expected {name} to be divisible by the ranks but got {name}={size} on {group.size()} ranks")
        self.faults = faults
        self.attention = TeachingAttention(config.hidden, config.heads, group, faults)
        self.norm1 = nn.LayerNorm(config.hidden)
        self.mlp = TeachingMLP(config.hidden, config.ffn, group, faults)
        self.norm2 = nn.LayerNorm(config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, hidden] -> the same."""
        if NORM_BEFORE in self.faults:
            x = x + self.attention(self.norm1(x))
            output: Tensor = x + self.mlp(self.norm2(x))
            return output
        x = self.norm1(x + self.attention(x))
        output = self.norm2(x + self.mlp(x))
        return output


def teaching_block(name: str, *faults: str) -> tpv.Subject:
    """The block with some of its faults, beside the reference of the built-in corrected one."""
    return plant(all_gather_attention_block, name, parallel=lambda config: TeachingBlock(config, tp_group(), faults))


corrected = teaching_block("corrected")
gather_without_gradient = teaching_block("gather_without_gradient", GATHER_WITHOUT_GRADIENT)
reduced_in_backward = teaching_block("reduced_in_backward", REDUCED_IN_BACKWARD)
input_gradient_not_reduced = teaching_block("input_gradient_not_reduced", INPUT_GRADIENT_NOT_REDUCED)
scores_across_heads = teaching_block("scores_across_heads", SCORES_ACROSS_HEADS)
norm_before = teaching_block("norm_before", NORM_BEFORE)
as_published = teaching_block("as_published", *FAULTS)
