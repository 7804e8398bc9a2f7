"""All-gather attention, after a published teaching block, corrected: its heads are rejoined by a gather that carries gradients.

What the corrections are, against the published form:
  - the all_gather of the heads is differentiable: without that Q, K and V learn nothing;
  - the all_reduce after the feed-forward network does not reduce again in backward;
  - the input gradient of column-parallel layers is summed over the ranks;
  - scores run over the sequence, head by head, not over the heads of one token;
  - each norm comes after its residual, which is what post-LN means.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from tpverify.current_group import tp_group
from tpverify.sharding import PlacementLike, Replicate
from tpverify.subjects.attention import QKVParallelLinear
from tpverify.subjects.attention_subject import attend, qkv_placement
from tpverify.subjects.block import head_sizes
from tpverify.subjects.drawing import activations, divisible
from tpverify.subjects.mappings import Group, gather_from_region
from tpverify.subjects.mlp import ParallelMLP, ReferenceMLP, mlp_placements
from tpverify.subjects.subject import Collective, Input, Subject


class AllGatherAttention(nn.Module):
    """Bidirectional attention without output projection; the heads of all ranks are joined by one all_gather.

    Shapes: [s, b, hidden] -> the same.

    Raises:
        ValueError: hidden or heads do not divide.
    """

    def __init__(self, hidden: int, heads: int, *, group: Group) -> None:
        super().__init__()
        self.group = group
        self.qkv = QKVParallelLinear(hidden, heads, heads, group=group)

    def forward(self, x: Tensor) -> Tensor:
        """Attention over the whole sequence, for this rank's heads, then all heads."""
        by_head = self.qkv(x).unflatten(-1, (3, self.qkv.heads, self.qkv.head_dim))
        query, key, value = by_head.permute(2, 1, 3, 0, 4)  # [b, heads, s, head_dim] each: scores run over the sequence
        context = F.scaled_dot_product_attention(query, key, value).permute(2, 0, 1, 3).flatten(2)
        return gather_from_region(context, -1, [context.shape[-1]] * self.group.size(), self.group)


class AllGatherAttentionBlock(nn.Module):
    """Post-LN block: all-gather attention, then column-parallel -> GELU -> row-parallel.

    Shapes: [s, b, hidden] -> the same.

    Raises:
        ValueError: hidden, heads or ffn do not divide.
    """

    def __init__(self, hidden: int, heads: int, ffn: int, *, group: Group) -> None:
        super().__init__()
        self.attention = AllGatherAttention(hidden, heads, group=group)
        self.norm1 = nn.LayerNorm(hidden)
        self.mlp = ParallelMLP(hidden, ffn, group=group)
        self.norm2 = nn.LayerNorm(hidden)

    def forward(self, x: Tensor) -> Tensor:
        """The block."""
        x = self.norm1(x + self.attention(x))
        output: Tensor = self.norm2(x + self.mlp(x))
        return output


@dataclass(frozen=True)
class AllGatherAttentionBlockConfig:
    """Sizes, elements; the input is [seq, batch, hidden]."""

    seq: int = 1
    batch: int = 1
    hidden: int = 4
    heads: int = 1
    ffn: int = 1


class ReferenceHeads(nn.Module):
    """Bidirectional attention on one device, head by head, without output projection: [s, b, hidden] -> the same."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Attention."""
        parts = self.qkv(x).chunk(3 * self.heads, dim=-1)
        by_head = zip(parts[: self.heads], parts[self.heads : 2 * self.heads], parts[2 * self.heads :], strict=True)
        return torch.cat([attend(query, key, value, causal=False) for query, key, value in by_head], dim=-1)


class ReferenceAllGatherAttentionBlock(nn.Module):
    """The block on one device: [s, b, hidden] -> the same."""

    def __init__(self, config: AllGatherAttentionBlockConfig) -> None:
        super().__init__()
        self.attention = ReferenceHeads(config.hidden, config.heads)
        self.norm1 = nn.LayerNorm(config.hidden)
        self.mlp = ReferenceMLP(config.hidden, config.ffn, "gelu", True)
        self.norm2 = nn.LayerNorm(config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """The block."""
        x = self.norm1(x + self.attention(x))
        output: Tensor = self.norm2(x + self.mlp(x))
        return output


@st.composite
def all_gather_attention_block_configs(draw: st.DrawFn, world_size: int) -> AllGatherAttentionBlockConfig:
    """Counts that do not divide are rare, to be refused."""
    seq, batch, flaw = draw(activations(world_size, False, ("heads", "ffn")))
    heads = draw(divisible(world_size, flaw == "heads"))
    return AllGatherAttentionBlockConfig(
        seq=seq,
        batch=batch,
        hidden=heads * draw(head_sizes(heads)),
        heads=heads,
        ffn=draw(divisible(world_size, flaw == "ffn")),
    )


def _placements(config: AllGatherAttentionBlockConfig) -> dict[str, PlacementLike]:
    return {
        "attention.qkv.*": qkv_placement(config.hidden, config.heads, config.heads),
        **mlp_placements(config.ffn, "gelu"),
        "*": Replicate(),
    }


def _communication(config: AllGatherAttentionBlockConfig, world_size: int) -> list[Collective]:
    if world_size == 1:
        return []
    message = config.seq * config.batch * config.hidden
    return [
        Collective("all_gather", "forward", "attention", 1, message),
        Collective("all_reduce", "backward", "attention.qkv", 1, message),
        Collective("all_reduce", "forward", "mlp.fc2", 1, message),
        Collective("all_reduce", "backward", "mlp.fc1", 1, message),
    ]


all_gather_attention_block = Subject(
    name="all_gather_attention_block",
    reference=ReferenceAllGatherAttentionBlock,
    parallel=lambda c: AllGatherAttentionBlock(c.hidden, c.heads, c.ffn, group=tp_group()),
    configs=all_gather_attention_block_configs,
    inputs=lambda c: {"x": Input((c.seq, c.batch, c.hidden))},
    placements=_placements,
    communication=_communication,
    rejects=lambda c, world_size: c.heads % world_size != 0 or c.ffn % world_size != 0,
    subgroups=True,
)
