"""Transformer block: attention and feed-forward network around a residual, in the arrangements of GPT and BERT."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import strategies as st
from torch import Tensor, nn

from tpverify.current_group import tp_group
from tpverify.sharding import PlacementLike, Replicate, Shard
from tpverify.subjects.attention import ParallelAttention
from tpverify.subjects.attention_subject import (
    AttentionConfig,
    ReferenceAttention,
    attention_communication,
    attention_placements,
    head_counts,
    heads_rejected,
)
from tpverify.subjects.communication import column_row, finalization
from tpverify.subjects.drawing import activations, divisible
from tpverify.subjects.mappings import Group
from tpverify.subjects.mlp import ParallelMLP, ReferenceMLP, mlp_placements
from tpverify.subjects.parameters import finalize_gradients, mark_sequence_parallel, residual_init_std
from tpverify.subjects.subject import Collective, Input, Subject

ARRANGEMENTS = ("pre_ln", "post_ln", "normalized_residual")


@dataclass(frozen=True, kw_only=True)
class BlockConfig(AttentionConfig):
    """Sizes, elements, and options of a transformer block; its input is [seq, batch, hidden].

    Attributes:
        arrangement: ``pre_ln``: x + f(norm(x)); ``post_ln``, as in BERT: norm(x + f(x)); ``normalized_residual``, the other
            arrangement of BERT, which takes the residual after the norm: norm(x) + f(norm(x)).
    """

    ffn: int = 1
    activation: str = "gelu"
    arrangement: str = "pre_ln"


class ParallelTransformerBlock(nn.Module):
    """Attention, then a feed-forward network, each around a residual.

    Under sequence parallelism norms and residual work on this rank's part of the sequence.

    Args:
        layers: number of blocks in the model; decides the initial scale of the two layers that write to the residual.

    Shapes: [s, b, hidden] -> the same; under sequence parallelism [s / world_size, b, hidden] -> the same.

    Raises:
        ValueError: hidden, heads, key-value heads or ffn do not divide.
    """

    def __init__(self, config: BlockConfig, *, group: Group, layers: int = 1) -> None:
        super().__init__()
        self.arrangement = config.arrangement
        std = residual_init_std(layers)
        self.norm1 = parallel_layer_norm(config.hidden, group, config.sequence_parallel)
        self.attention = ParallelAttention(
            config.hidden,
            config.heads,
            config.kv_heads,
            group=group,
            causal=config.causal,
            bias=config.bias,
            sequence_parallel=config.sequence_parallel,
            output_std=std,
        )
        self.norm2 = parallel_layer_norm(config.hidden, group, config.sequence_parallel)
        self.mlp = ParallelMLP(
            config.hidden,
            config.ffn,
            group=group,
            activation=config.activation,
            bias=config.bias,
            sequence_parallel=config.sequence_parallel,
            output_std=std,
        )

    def forward(self, x: Tensor) -> Tensor:
        """The block."""
        x = around_residual(x, self.attention, self.norm1, self.arrangement)
        return around_residual(x, self.mlp, self.norm2, self.arrangement)


def parallel_layer_norm(hidden: int, group: Group, sequence_parallel: bool) -> nn.LayerNorm:
    """A replicated LayerNorm, flagged where it sees a part of the sequence only."""
    norm = nn.LayerNorm(hidden)
    if sequence_parallel:
        mark_sequence_parallel(norm.weight, group)
        mark_sequence_parallel(norm.bias, group)
    return norm


def around_residual(x: Tensor, layer: Callable[[Tensor], Tensor], norm: Callable[[Tensor], Tensor], arrangement: str) -> Tensor:
    """``layer`` around a residual, see :class:`BlockConfig`: [s, b, hidden] -> the same."""
    if arrangement == "post_ln":
        return norm(x + layer(x))
    normalized = norm(x)
    return (normalized if arrangement == "normalized_residual" else x) + layer(normalized)


class ReferenceBlock(nn.Module):
    """The block on one device."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.arrangement = config.arrangement
        self.norm1 = nn.LayerNorm(config.hidden)
        self.attention = ReferenceAttention(config.hidden, config.heads, config.kv_heads, config.causal, config.bias)
        self.norm2 = nn.LayerNorm(config.hidden)
        self.mlp = ReferenceMLP(config.hidden, config.ffn, config.activation, config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, hidden] -> the same."""
        for layer, norm in ((self.attention, self.norm1), (self.mlp, self.norm2)):
            if self.arrangement == "pre_ln":
                x = x + layer(norm(x))
            elif self.arrangement == "post_ln":
                x = norm(x + layer(x))
            else:
                x = norm(x)
                x = x + layer(x)
        return x


def block_placements(config: BlockConfig) -> dict[str, PlacementLike]:
    """Placements of the block's parameters wherever it sits in a model."""
    norms: dict[str, PlacementLike] = {"*norm1.*": Replicate(), "*norm2.*": Replicate()}
    return {
        **attention_placements(config.hidden, config.heads, config.kv_heads),
        **mlp_placements(config.ffn, config.activation),
        **norms,
    }


def block_communication(config: BlockConfig, world_size: int, prefix: str = "") -> list[Collective]:
    """The collectives of one block, without the finalisation of gradients.

    Args:
        prefix: path of the block, with a final dot, or "".
    """
    elements = config.seq * config.batch * config.hidden
    return [
        *attention_communication(config, world_size, f"{prefix}attention."),
        *column_row(f"{prefix}mlp.fc1", f"{prefix}mlp.fc2", elements, config.sequence_parallel),
    ]


def flagged_elements(config: BlockConfig) -> int:
    """Numbers in the block's flagged parameters: two norms, and the biases of two row-parallel layers."""
    return (4 + 2 * config.bias) * config.hidden if config.sequence_parallel else 0


def block_rejected(config: BlockConfig, world_size: int) -> bool:
    """Whether the block must refuse these sizes."""
    return heads_rejected(config.hidden, config.heads, config.kv_heads, world_size) or config.ffn % world_size != 0


def head_sizes(heads: int) -> st.SearchStrategy[int]:
    """A head size that makes hidden at least 4: the gradient of a LayerNorm over 1 or 2 numbers is rounding noise."""
    smallest = -(-4 // heads)
    return st.integers(smallest, smallest + 2)


@st.composite
def block_configs(draw: st.DrawFn, world_size: int) -> BlockConfig:
    """All options; counts that do not divide are rare, to be refused."""
    sequence_parallel = draw(st.booleans())
    seq, batch, flaw = draw(activations(world_size, sequence_parallel, ("heads", "kv_heads", "ffn")))
    heads, kv_heads = draw(head_counts(world_size, flaw, 2))
    return BlockConfig(
        seq=seq,
        batch=batch,
        hidden=heads * draw(head_sizes(heads)),
        heads=heads,
        kv_heads=kv_heads,
        ffn=draw(divisible(world_size, flaw == "ffn")),
        activation=draw(st.sampled_from(["gelu", "swiglu"])),
        causal=draw(st.booleans()),
        arrangement=draw(st.sampled_from(ARRANGEMENTS)),
        bias=draw(st.booleans()),
        sequence_parallel=sequence_parallel,
    )


def _communication(config: BlockConfig, world_size: int) -> list[Collective]:
    return [] if world_size == 1 else block_communication(config, world_size) + finalization(flagged_elements(config))


transformer_block = Subject(
    name="transformer_block",
    reference=ReferenceBlock,
    parallel=lambda c: ParallelTransformerBlock(c, group=tp_group()),
    configs=block_configs,
    inputs=lambda c: {"x": Input((c.seq, c.batch, c.hidden), placement=Shard(0) if c.sequence_parallel else Replicate())},
    placements=block_placements,
    outputs=lambda c: Shard(0) if c.sequence_parallel else Replicate(),
    finalize_gradients=finalize_gradients,
    communication=_communication,
    rejects=block_rejected,
    subgroups=True,
)
