"""megatron-core's transformer layer and GPT on one device, from plain torch, with Megatron's parameter names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpverify.adapters.megatron_core.references import AttentionConfig, MLPConfig, ReferenceAttention, ReferenceMLP, freeze, norm_of


@dataclass(frozen=True, kw_only=True)
class LayerConfig(AttentionConfig, MLPConfig):
    """Sizes, elements, and options of a transformer layer over [seq, batch, hidden]."""


@dataclass(frozen=True, kw_only=True)
class GPTConfig(LayerConfig):
    """Sizes, elements, and options of a GPT over ids [batch, seq].

    Attributes:
        positions: ``learned_absolute``, ``rope`` or ``none``.
        tied: logits are made by the embedding's weight.
        labels: the output is the loss of each token, [batch, seq]; otherwise logits, [batch, seq, vocab].
        gathered: the model is built with ``parallel_output=False``: logits are whole on every rank.
        fused_loss: Megatron's fused cross-entropy.
        recompute: what backward computes again: nothing (""), ``selective`` (attention's core), ``full`` (layers), or
            ``distributed`` (layers, whose inputs are kept in parts on the ranks).
    """

    layers: int = 1
    vocab: int = 2
    positions: str = "learned_absolute"
    tied: bool = True
    labels: bool = True
    gathered: bool = False
    fused_loss: bool = False
    recompute: str = ""


class ReferenceLayer(nn.Module):
    """Attention and MLP, each after a norm and around a residual."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.input_layernorm = norm_of(config.normalization, config.hidden)
        self.self_attention = ReferenceAttention(config)
        self.pre_mlp_layernorm = norm_of(config.normalization, config.hidden)
        self.mlp = ReferenceMLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, hidden] -> the same."""
        x = x + _sum(self.self_attention(self.input_layernorm(x)))
        return x + _sum(self.mlp(self.pre_mlp_layernorm(x)))


def _sum(parts: tuple[Tensor, Tensor | None]) -> Tensor:
    output, bias = parts
    return output if bias is None else output + bias


class _Embedding(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab, config.hidden)
        if config.positions == "learned_absolute":
            self.position_embeddings = nn.Embedding(config.seq, config.hidden)


class _Decoder(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ReferenceLayer(config) for _ in range(config.layers))
        self.final_layernorm = norm_of(config.normalization, config.hidden)


class ReferenceGPT(nn.Module):
    """Embedding, layers, final norm, logits, loss."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.labels = config.labels
        self.embedding = _Embedding(config)
        self.decoder = _Decoder(config)
        if not config.tied:
            self.output_layer = nn.Linear(config.hidden, config.vocab, bias=False)
        freeze(self, config.frozen)

    def forward(self, ids: Tensor, targets: Tensor) -> Any:
        """ids, targets [b, s] -> losses [b, s], or logits [b, s, vocab]."""
        x = self.embedding.word_embeddings(ids)
        if hasattr(self.embedding, "position_embeddings"):
            x = x + self.embedding.position_embeddings.weight
        x = x.transpose(0, 1)
        for layer in self.decoder.layers:
            x = layer(x)
        rows = self.output_layer.weight if hasattr(self, "output_layer") else self.embedding.word_embeddings.weight
        logits = F.linear(self.decoder.final_layernorm(x), rows).transpose(0, 1)
        if not self.labels:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)


def positions_of(ids: Tensor) -> Tensor:
    """0, 1, ... along the sequence: [b, s] -> the same."""
    return torch.arange(ids.shape[1]).expand_as(ids)
