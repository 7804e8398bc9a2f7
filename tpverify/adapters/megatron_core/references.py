"""megatron-core's modules on one device, from plain torch, with Megatron's parameter names and layouts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "silu": F.silu,
    "relu": F.relu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}
"""By name in a config."""


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """Sizes, elements, and options of an MLP over [seq, batch, hidden].

    Attributes:
        gated: fc1 makes gate|up, and the activation of the gate is multiplied with up.
        offset: added to up.
        clamp: bounds of gate (above) and up (both); None = none.
        fused: Megatron's fused activations; its GELU is then the tanh approximation.
        frozen: no weight needs a gradient, only biases and norms do.
    """

    seq: int = 1
    batch: int = 1
    hidden: int = 1
    ffn: int = 1
    activation: str = "gelu"
    gated: bool = False
    bias: bool = True
    offset: float = 0.0
    clamp: float | None = None
    fused: bool = False
    frozen: bool = False
    sequence_parallel: bool = False


class ReferenceMLP(nn.Module):
    """fc1, activation, fc2; the bias of fc2 is left to the caller."""

    def __init__(self, config: MLPConfig) -> None:
        super().__init__()
        self.config = config
        self.linear_fc1 = nn.Linear(config.hidden, (1 + config.gated) * config.ffn, config.bias)
        self.linear_fc2 = nn.Linear(config.ffn, config.hidden, config.bias)
        freeze(self, config.frozen)

    def forward(self, x: Tensor) -> Any:
        """[s, b, hidden] -> the same, and the bias."""
        return F.linear(self._activated(self.linear_fc1(x)), self.linear_fc2.weight), self.linear_fc2.bias

    def _activated(self, x: Tensor) -> Tensor:
        config = self.config
        if not config.gated:
            return self._activate(x)
        gate, up = x[..., : config.ffn], x[..., config.ffn :]
        if config.clamp is not None:
            gate, up = gate.clamp(max=config.clamp), up.clamp(-config.clamp, config.clamp)
        return self._activate(gate) * (up + config.offset)

    def _activate(self, x: Tensor) -> Tensor:
        if self.config.fused and self.config.activation == "gelu":
            return F.gelu(x, approximate="tanh")
        return ACTIVATIONS[self.config.activation](x)


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Sizes, elements, and options of self-attention over [seq, batch, hidden].

    Attributes:
        groups: how many key-value heads there are; each is used by heads / groups queries.
        head_dim: of each head; heads * head_dim need not be hidden.
        qkv_bias: a bias of the qkv projection although there is no other.
        qk_norm: queries and keys are normalised head by head.
        softmax: ``vanilla``; ``off-by-one``: 1 is added to the denominator; ``learnable``: a learned exponential is, by head.
        gate: each head's context is multiplied with the sigmoid of a projection of the input.
        rotary: rotary positions.
        frozen: no weight needs a gradient, only biases and norms do.
    """

    seq: int = 1
    batch: int = 1
    hidden: int = 1
    heads: int = 1
    groups: int = 1
    head_dim: int = 1
    bias: bool = True
    qkv_bias: bool = False
    causal: bool = True
    qk_norm: bool = False
    softmax: str = "vanilla"
    gate: bool = False
    rotary: bool = False
    normalization: str = "LayerNorm"
    frozen: bool = False
    sequence_parallel: bool = False


class Sink(nn.Module):
    """What softmax has in its denominator beside the scores: nothing, 1, or a learned exponential of each head."""

    def __init__(self, kind: str, heads: int) -> None:
        super().__init__()
        self.kind = kind
        if kind == "learnable":
            self.softmax_offset = nn.Parameter(torch.empty(heads))

    def forward(self, scores: Tensor, head: int) -> Tensor:
        """[b, s, t] -> probabilities."""
        if self.kind == "vanilla":
            return torch.softmax(scores, dim=-1)
        offset = self.softmax_offset[head] if self.kind == "learnable" else scores.new_zeros(())
        whole = torch.cat([scores, offset.expand(*scores.shape[:-1], 1)], dim=-1)
        return torch.softmax(whole, dim=-1)[..., :-1]


def freeze(module: nn.Module, frozen: bool) -> None:
    """Let no weight matrix need a gradient, if ``frozen``."""
    for parameter in module.parameters():
        parameter.requires_grad_(not (frozen and parameter.dim() > 1))


def norm_of(normalization: str, size: int) -> nn.Module:
    """torch's norm of that name."""
    return nn.RMSNorm(size, 1e-5) if normalization == "RMSNorm" else nn.LayerNorm(size, 1e-5)


class ReferenceAttention(nn.Module):
    """Head by head; the projection's rows are, group by group, the group's queries, its gates, its key and its value."""

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__()
        self.config = config
        rows = ((1 + config.gate) * config.heads + 2 * config.groups) * config.head_dim
        self.linear_qkv = nn.Linear(config.hidden, rows, config.bias or config.qkv_bias)
        self.linear_proj = nn.Linear(config.heads * config.head_dim, config.hidden, config.bias)
        self.core_attention = Sink(config.softmax, config.heads)
        if config.qk_norm:
            self.q_layernorm = norm_of(config.normalization, config.head_dim)
            self.k_layernorm = norm_of(config.normalization, config.head_dim)
        freeze(self, config.frozen)

    def forward(self, x: Tensor) -> Any:
        """[s, b, hidden] -> the same, and the bias of the output projection."""
        config, size = self.config, self.config.head_dim
        queries = config.heads // config.groups
        wide = (queries * (1 + config.gate) + 2) * size
        contexts = []
        for group, rows in enumerate(self.linear_qkv(x).split(wide, dim=-1)):
            parts = rows.split(size, dim=-1)
            key, value = self._key(parts[-2]), parts[-1]
            for query in range(queries):
                context = self._attend(self._query(parts[query]), key, value, group * queries + query)
                contexts.append(context * torch.sigmoid(parts[queries + query]) if config.gate else context)
        return F.linear(torch.cat(contexts, dim=-1), self.linear_proj.weight), self.linear_proj.bias

    def _query(self, x: Tensor) -> Tensor:
        return self._rotated(self.q_layernorm(x) if self.config.qk_norm else x)

    def _key(self, x: Tensor) -> Tensor:
        return self._rotated(self.k_layernorm(x) if self.config.qk_norm else x)

    def _rotated(self, x: Tensor) -> Tensor:
        return rotate(x) if self.config.rotary else x

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, head: int) -> Tensor:
        """One head over the sequence: [s, b, d] each -> [s, b, d]."""
        scores = torch.einsum("sbd,tbd->bst", query, key) / math.sqrt(self.config.head_dim)
        if self.config.causal:
            scores = scores.masked_fill(later(len(query)), -math.inf)
        return torch.einsum("bst,tbd->sbd", self.core_attention(scores, head), value)


def later(seq: int) -> Tensor:
    """True where a token (row) must not see another (column)."""
    return torch.ones(seq, seq, dtype=torch.bool).triu(1)


def rotate(x: Tensor) -> Tensor:
    """Rotary positions over the whole head, halves paired: [s, b, d] -> the same; angles are float32, as Megatron has them."""
    half = x.shape[-1] // 2
    frequencies = 1.0 / 10000.0 ** (torch.arange(half, dtype=torch.float32) / half)
    angles = torch.outer(torch.arange(len(x), dtype=torch.float32), frequencies)[:, None]
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos().to(x), angles.sin().to(x)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
