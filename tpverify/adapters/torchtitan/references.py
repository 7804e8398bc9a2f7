"""Llama 3 on one device, from plain torch, with torchtitan's parameter names."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpverify.adapters.torchtitan.config import IGNORED, STORED, TOKENS, LlamaConfig

THETA = 500000.0
SCALE, LOW, HIGH, TRAINED = 8.0, 1.0, 4.0, 8192
"""Of Llama 3.1's rotary frequencies: slow ones are divided by ``SCALE``; how many times they turn within ``TRAINED`` tokens decides."""


def positions_of(config: LlamaConfig) -> Tensor | None:
    """The positions that the model is given."""
    if config.positions == "none":
        return None
    rows = 1 if config.positions == "shared" else config.batch
    # The second sequence of a row begins where the first one ends, and that differs from row to row.
    ends = [1 + (row % max(1, config.seq - 1)) for row in range(rows)]
    return torch.stack([torch.cat([torch.arange(end), torch.arange(config.seq - end)]) for end in ends])


def mode_of(config: LlamaConfig) -> contextlib.AbstractContextManager[Any]:
    """What surrounds a call."""
    return torch.no_grad() if config.mode == "no_grad" else contextlib.nullcontext()


class FromOne(torch.autograd.Function):
    """Backward begins here, with 1, as ``loss.backward()`` has it, whatever the caller does with the loss."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        """[] -> the same."""
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """1."""
        return torch.ones_like(gradient)


def unscaled(config: LlamaConfig, loss: Tensor) -> Tensor:
    """The loss, whose backward starts from 1 where the config says so."""
    untouched = config.scaled or config.call != "chunked" or not loss.requires_grad
    return loss if untouched else FromOne.apply(loss)  # type: ignore[no-untyped-call]


def _frequencies(config: LlamaConfig) -> Tensor:
    frequencies = THETA ** -(torch.arange(0, config.width, 2, dtype=torch.float64) / config.width)
    if not config.scaled_rotary:
        return frequencies
    turns = TRAINED * frequencies / (2 * math.pi)
    kept = ((turns - LOW) / (HIGH - LOW)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / SCALE)


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    """[b, s, heads, width], neighbouring features being one complex number, by angles [b or 1, s, width / 2]."""
    cos, sin = angles.cos()[:, :, None].to(x), angles.sin()[:, :, None].to(x)
    real, imaginary = x[..., 0::2], x[..., 1::2]
    return torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1).flatten(-2)


class _Projections(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config, self.groups = config, config.heads // config.kv_heads
        queries, keys = config.heads * config.width, config.kv_heads * config.width
        if config.fused:
            self.wqkv = nn.Linear(config.hidden, queries + 2 * keys, bias=False)
        else:
            self.wq = nn.Linear(config.hidden, queries, bias=False)
            self.wk = nn.Linear(config.hidden, keys, bias=False)
            self.wv = nn.Linear(config.hidden, keys, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[b, s, hidden] -> queries, keys and values, [b, s, heads, width] each."""
        if not self.config.fused:
            queries, keys, values = (layer(x).unflatten(-1, (-1, self.config.width)) for layer in (self.wq, self.wk, self.wv))
            return queries, keys, values
        # For every key head its queries, itself and its value lie one after the other.
        heads = self.wqkv(x).unflatten(-1, (self.config.kv_heads, self.groups + 2, self.config.width))
        return heads[..., : self.groups, :].flatten(2, 3), heads[..., self.groups, :], heads[..., self.groups + 1, :]


class _Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.qkv_linear = _Projections(config)
        self.wo = nn.Linear(config.heads * config.width, config.hidden, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """[b, s, hidden] -> the same."""
        queries, keys, values = self.qkv_linear(x)
        queries, keys = _rotated(queries, angles), _rotated(keys, angles)
        keys, values = (each.repeat_interleave(self.qkv_linear.groups, 2) for each in (keys, values))
        scores = torch.einsum("bqhw,bkhw->bhqk", queries, keys) / math.sqrt(queries.shape[-1])
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        heads = torch.einsum("bhqk,bkhw->bqhw", scores.masked_fill(later, -math.inf).softmax(-1), values)
        output: Tensor = self.wo(heads.flatten(2))
        return output


class _FeedForward(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.hidden, config.ffn, bias=False)
        self.w2 = nn.Linear(config.ffn, config.hidden, bias=False)
        self.w3 = nn.Linear(config.hidden, config.ffn, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, hidden] -> the same."""
        output: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return output


class _Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention = _Attention(config)
        self.feed_forward = _FeedForward(config)
        self.attention_norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.ffn_norm = nn.RMSNorm(config.hidden, eps=1e-5)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """[b, s, hidden] -> the same."""
        x = x + self.attention(self.attention_norm(x), angles)
        output: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return output


class ReferenceLlama(nn.Module):
    """The decoder, and what is made of its logits."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.lm_head = nn.Linear(config.hidden, config.vocab, bias=False)
        if config.tied:
            self.tok_embeddings.weight = self.lm_head.weight

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        """Ids and labels [b, s] -> logits [b, s, vocab], a loss [], log-probabilities and entropies [b, s], or parameters."""
        if self.config.call == STORED:
            return self._stored()
        with mode_of(self.config):
            positions = positions_of(self.config)
            positions = torch.arange(self.config.seq)[None] if positions is None else positions
            angles = positions.double()[..., None] * _frequencies(self.config)
            x = self.tok_embeddings(ids)
            for layer in self.layers:
                x = layer(x, angles)
            logits = self.lm_head(self.norm(x))
            if labels is None:
                return logits
            return log_probabilities(logits, labels) if self.config.call == "logprobs" else self._loss(logits, labels)

    def _stored(self) -> dict[str, dict[str, Tensor]]:
        saved: dict[str, Tensor] = {}
        held = {name: parameter.detach() for name, parameter in self.named_parameters(remove_duplicate=False)}
        for name, value in held.items():
            parts = _unfused(value, self.config) if "wqkv" in name else (value,)
            kinds = ("wq", "wk", "wv") if "wqkv" in name else ("wqkv",)
            saved |= {name.replace("wqkv", kind): part for kind, part in zip(kinds, parts, strict=True)}
        return {"saved": saved, "loaded": {name: 2 * value for name, value in held.items()}}

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORED)
        return unscaled(self.config, loss / TOKENS if self.config.divided else loss)


def _unfused(weight: Tensor, config: LlamaConfig) -> tuple[Tensor, Tensor, Tensor]:
    """The weights of queries, keys and values out of that of all."""
    heads = weight.reshape(config.kv_heads, -1, config.width, weight.shape[1])
    return heads[:, :-2].flatten(0, 2), heads[:, -2].flatten(0, 1), heads[:, -1].flatten(0, 1)


def log_probabilities(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The log-probability of each label, 0 of ignored ones, and the entropy at each place, which is differentiated by nothing."""
    logs = logits.log_softmax(-1)
    chosen = logs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    with torch.no_grad():
        entropies = -(logs.exp() * logs).sum(-1)
    return torch.where(labels == IGNORED, 0.0, chosen), entropies
