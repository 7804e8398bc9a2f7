"""Subjects: GPT and BERT beside single-device models; tied and untied embeddings, with and without sequence parallelism."""

from __future__ import annotations

import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from tpverify.current_group import tp_group
from tpverify.sharding import PlacementLike, Replicate
from tpverify.subjects.attention_subject import head_counts
from tpverify.subjects.block import ReferenceBlock, block_communication, block_placements, block_rejected, flagged_elements, head_sizes
from tpverify.subjects.communication import finalization
from tpverify.subjects.cross_entropy_subject import (
    ReferenceCrossEntropy,
    ignore_indices,
    label_smoothings,
    loss_communication,
    reductions,
    z_losses,
)
from tpverify.subjects.drawing import activations, divisible, loss_vocabularies
from tpverify.subjects.embedding import lookup_communication, vocab_multiples, vocab_placement
from tpverify.subjects.language_model import TOKEN_TYPES, LanguageModelConfig, ParallelBERT, ParallelGPT
from tpverify.subjects.parameters import finalize_gradients
from tpverify.subjects.subject import Collective, Input, Subject, Vocabulary


class ReferenceGPT(nn.Module):
    """GPT on one device."""

    def __init__(self, config: LanguageModelConfig, head_bias: bool = False) -> None:
        super().__init__()
        self.word = nn.Embedding(config.vocab, config.hidden)
        self.position = nn.Embedding(config.positions, config.hidden)
        self.blocks = nn.Sequential(*(ReferenceBlock(config) for _ in range(config.layers)))
        self.final_norm = nn.Identity() if config.arrangement == "post_ln" else nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab, bias=head_bias)
        if config.tied:
            self.head.weight = self.word.weight
        self.loss = ReferenceCrossEntropy(config.label_smoothing, config.z_loss, config.ignore_index, config.reduction)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """ids, targets [b, s] -> [b, s], or [] for ``mean``."""
        x = self.final_norm(self.blocks(self.embed(ids).transpose(0, 1))).transpose(0, 1)
        losses: Tensor = self.loss(self.head(x), targets)
        return losses

    def embed(self, ids: Tensor) -> Tensor:
        """Word and position embeddings: [b, s] -> [b, s, hidden]."""
        embedded: Tensor = self.word(ids) + self.position.weight[: ids.shape[1]]
        return embedded


class ReferenceBERT(ReferenceGPT):
    """BERT on one device."""

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__(config, head_bias=True)
        self.token_type = nn.Embedding(TOKEN_TYPES, config.hidden)
        self.embedding_norm = nn.LayerNorm(config.hidden)
        self.dense = nn.Linear(config.hidden, config.hidden)
        self.dense_norm = nn.LayerNorm(config.hidden)

    def forward(self, ids: Tensor, token_types: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        """ids, token_types, targets [b, s] -> [b, s], or [] for ``mean``."""
        x = self.embedding_norm(self.embed(ids) + self.token_type(token_types))
        x = self.final_norm(self.blocks(x.transpose(0, 1))).transpose(0, 1)
        losses: Tensor = self.loss(self.head(self.dense_norm(F.gelu(self.dense(x)))), targets)
        return losses


@st.composite
def language_model_configs(draw: st.DrawFn, world_size: int, causal: bool, arrangements: tuple[str, ...]) -> LanguageModelConfig:
    """All options; counts that do not divide are rare, to be refused."""
    sequence_parallel = draw(st.booleans())
    seq, batch, flaw = draw(activations(world_size, sequence_parallel, ("heads", "kv_heads", "ffn")))
    heads, kv_heads = draw(head_counts(world_size, flaw, 2))
    return LanguageModelConfig(
        seq=seq,
        batch=batch,
        hidden=heads * draw(head_sizes(heads)),
        heads=heads,
        kv_heads=kv_heads,
        causal=causal,
        bias=draw(st.booleans()),
        sequence_parallel=sequence_parallel,
        ffn=draw(divisible(world_size, flaw == "ffn")),
        activation=draw(st.sampled_from(["gelu", "swiglu"])),
        arrangement=draw(st.sampled_from(arrangements)),
        vocab=draw(loss_vocabularies(world_size)),
        multiple=draw(vocab_multiples),
        layers=draw(st.integers(1, 2)),
        positions=seq + draw(st.integers(0, 1)),
        tied=draw(st.booleans()),
        label_smoothing=draw(label_smoothings),
        z_loss=draw(z_losses),
        ignore_index=draw(ignore_indices),
        reduction=draw(reductions),
    )


def _head_communication(elements: int, sequence_parallel: bool) -> list[Collective]:
    if not sequence_parallel:
        return [Collective("all_reduce", "backward", "head", 1, elements)]
    return [
        Collective("all_gather", "forward", "head", 1, elements),
        Collective("all_gather", "backward", "head", 1, elements),
        Collective("reduce_scatter", "backward", "head", 1, elements),
    ]


def _communication(config: LanguageModelConfig, world_size: int, replicated: int) -> list[Collective]:
    """2L + 1 + loss forward, 2L + 1 backward.

    Args:
        replicated: numbers in the replicated parameters outside the blocks, except the positions.
    """
    if world_size == 1:
        return []
    tokens = config.seq * config.batch
    messages = lookup_communication(tokens * config.hidden, config.sequence_parallel, "word")
    for layer in range(config.layers):
        messages += block_communication(config, world_size, f"blocks.{layer}.")
    messages += _head_communication(tokens * config.hidden, config.sequence_parallel)
    messages += loss_communication(tokens, config.label_smoothing, "loss")
    if config.sequence_parallel:
        final_norm = 0 if config.arrangement == "post_ln" else 2 * config.hidden
        tables = config.positions * config.hidden + final_norm + replicated
        messages += finalization(config.layers * flagged_elements(config) + tables)
    return messages


def _placements(config: LanguageModelConfig) -> dict[str, PlacementLike]:
    rows = vocab_placement(0, config.multiple)
    return {"word.weight": rows, "head.*": rows, **block_placements(config), "*": Replicate()}


def _inputs(config: LanguageModelConfig, names: tuple[str, ...]) -> dict[str, Input]:
    highs = {"ids": config.vocab, "token_types": TOKEN_TYPES, "targets": config.vocab}
    return {
        name: Input(
            (config.batch, config.seq), kind="integers", high=highs[name], ignore=config.ignore_index if name == "targets" else None
        )
        for name in names
    }


def _vocabulary(config: LanguageModelConfig) -> Vocabulary:
    return Vocabulary(
        config.vocab, parameters=("word.weight", "head.*"), ids="ids", lookup="word", targets="targets", ignore=config.ignore_index
    )


gpt = Subject(
    name="gpt",
    reference=ReferenceGPT,
    parallel=lambda c: ParallelGPT(c, group=tp_group()),
    configs=lambda world_size: language_model_configs(world_size, True, ("pre_ln",)),
    inputs=lambda c: _inputs(c, ("ids", "targets")),
    placements=_placements,
    finalize_gradients=finalize_gradients,
    communication=lambda c, world_size: _communication(c, world_size, 0),
    rejects=block_rejected,
    vocabulary=_vocabulary,
    subgroups=True,
)

bert = Subject(
    name="bert",
    reference=ReferenceBERT,
    parallel=lambda c: ParallelBERT(c, group=tp_group()),
    configs=lambda world_size: language_model_configs(world_size, False, ("post_ln", "pre_ln", "normalized_residual")),
    inputs=lambda c: _inputs(c, ("ids", "token_types", "targets")),
    placements=_placements,
    finalize_gradients=finalize_gradients,
    communication=lambda c, world_size: _communication(c, world_size, (TOKEN_TYPES + 4 + c.hidden + 1) * c.hidden),
    rejects=block_rejected,
    vocabulary=_vocabulary,
    subgroups=True,
)
