"""Subject: attention beside softmax(Q K^T / sqrt(d)) V written out on one device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from tpverify.current_group import tp_group
from tpverify.sharding import Block, FusedShard, PlacementLike, Replicate, Shard
from tpverify.subjects.attention import ParallelAttention
from tpverify.subjects.communication import column_row, finalization
from tpverify.subjects.drawing import activations, divisible
from tpverify.subjects.parameters import finalize_gradients
from tpverify.subjects.subject import Collective, Input, Subject


@dataclass(frozen=True)
class AttentionConfig:
    """Sizes, elements, and options of attention; its input is [seq, batch, hidden]."""

    seq: int = 1
    batch: int = 1
    hidden: int = 1
    heads: int = 1
    kv_heads: int = 1
    causal: bool = True
    bias: bool = True
    sequence_parallel: bool = False


class ReferenceAttention(nn.Module):
    """Attention on one device, each head by its own query and its group's key and value."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, causal: bool, bias: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.causal = heads, kv_heads, causal
        self.head_dim = hidden // heads
        self.qkv = nn.Linear(hidden, (heads + 2 * kv_heads) * self.head_dim, bias=bias)
        self.proj = nn.Linear(hidden, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, hidden] -> the same."""
        qkv = self.qkv(x)
        hidden, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        query, key, value = qkv[..., :hidden], qkv[..., hidden : hidden + keys], qkv[..., hidden + keys :]
        contexts = []
        for head in range(self.heads):
            shared = head * self.kv_heads // self.heads
            contexts.append(attend(self._of_head(query, head), self._of_head(key, shared), self._of_head(value, shared), self.causal))
        output: Tensor = self.proj(torch.cat(contexts, dim=-1))
        return output

    def _of_head(self, x: Tensor, head: int) -> Tensor:
        return x[..., head * self.head_dim : (head + 1) * self.head_dim]


def attend(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """One head's attention over the sequence: [s, b, d] each -> [s, b, d]."""
    scores = torch.einsum("sbd,tbd->bst", query, key) / math.sqrt(query.shape[-1])
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return torch.einsum("bst,tbd->sbd", torch.softmax(scores, dim=-1), value)


def qkv_placement(hidden: int, heads: int, kv_heads: int) -> PlacementLike:
    """Placement of the fused Q|K|V, weight or bias: each block is cut by heads."""
    keys = hidden // heads * kv_heads
    return FusedShard(0, (Block(hidden, heads), Block(keys, kv_heads), Block(keys, kv_heads)))


def attention_placements(hidden: int, heads: int, kv_heads: int) -> dict[str, PlacementLike]:
    """Placements of attention's parameters wherever it sits in a model."""
    return {"*qkv.*": qkv_placement(hidden, heads, kv_heads), "*proj.weight": Shard(1), "*proj.*": Replicate()}


def attention_communication(config: AttentionConfig, world_size: int, prefix: str = "") -> list[Collective]:
    """The collectives of one attention layer, without the finalisation of gradients.

    Args:
        prefix: path of the attention module, with a final dot, or "".
    """
    elements = config.seq * config.batch * config.hidden
    messages = column_row(f"{prefix}qkv", f"{prefix}proj", elements, config.sequence_parallel)
    if config.kv_heads < world_size:  # gradients of shared key-value heads
        rows = 2 * (config.hidden // config.heads)
        messages.append(Collective("all_reduce", "backward", f"{prefix}qkv", 1, rows * config.hidden))
        if config.bias:
            messages.append(Collective("all_reduce", "backward", f"{prefix}qkv", 1, rows))
    return messages


@st.composite
def head_counts(draw: st.DrawFn, world_size: int, flaw: str, largest: int = 4) -> tuple[int, int]:
    """(heads, kv_heads): multi-head, grouped-query and multi-query.

    Args:
        flaw: ``heads`` or ``kv_heads``: draw a count of these that must be refused.
        largest: most heads per rank.
    """
    heads = draw(divisible(world_size, flaw == "heads", largest))
    if flaw == "heads":
        return heads, heads
    refused = flaw == "kv_heads"
    return heads, draw(st.sampled_from([kv for kv in range(heads + 1, 0, -1) if heads_rejected(heads, heads, kv, world_size) == refused]))


def heads_rejected(hidden: int, heads: int, kv_heads: int, world_size: int) -> bool:
    """Whether attention must refuse these counts."""
    return bool(hidden % heads or heads % world_size or heads % kv_heads or (kv_heads % world_size and world_size % kv_heads))


@st.composite
def attention_configs(draw: st.DrawFn, world_size: int) -> AttentionConfig:
    """All options; counts that do not divide are rare, to be refused."""
    sequence_parallel = draw(st.booleans())
    seq, batch, flaw = draw(activations(world_size, sequence_parallel, ("hidden", "heads", "kv_heads")))
    heads, kv_heads = draw(head_counts(world_size, flaw))
    hidden = heads * draw(st.integers(1, 4)) + (flaw == "hidden")
    return AttentionConfig(
        seq=seq,
        batch=batch,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        causal=draw(st.booleans()),
        bias=draw(st.booleans()),
        sequence_parallel=sequence_parallel,
    )


def _communication(config: AttentionConfig, world_size: int) -> list[Collective]:
    if world_size == 1:
        return []
    flagged = config.hidden if config.sequence_parallel and config.bias else 0
    return attention_communication(config, world_size) + finalization(flagged)


attention = Subject(
    name="attention",
    reference=lambda c: ReferenceAttention(c.hidden, c.heads, c.kv_heads, c.causal, c.bias),
    parallel=lambda c: ParallelAttention(
        c.hidden,
        c.heads,
        c.kv_heads,
        group=tp_group(),
        causal=c.causal,
        bias=c.bias,
        sequence_parallel=c.sequence_parallel,
    ),
    configs=attention_configs,
    inputs=lambda c: {"x": Input((c.seq, c.batch, c.hidden), placement=Shard(0) if c.sequence_parallel else Replicate())},
    placements=lambda c: attention_placements(c.hidden, c.heads, c.kv_heads),
    outputs=lambda c: Shard(0) if c.sequence_parallel else Replicate(),
    finalize_gradients=finalize_gradients,
    communication=_communication,
    rejects=lambda c, world_size: heads_rejected(c.hidden, c.heads, c.kv_heads, world_size),
    subgroups=True,
)
