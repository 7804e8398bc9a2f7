"""megatron-core's multi-latent attention beside one that goes head by head on one device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor, nn

from tpverify.adapters.megatron_core.environment import COMMON, Norm, along_sequence, begin, finalize_gradients, transformer_config
from tpverify.adapters.megatron_core.mlp import with_bias_left
from tpverify.adapters.megatron_core.references import later, norm_of, rotate
from tpverify.adapters.megatron_core.script import LINEAR, MASK, NN, config_source, script
from tpverify.adapters.source import Expression, called, source_of
from tpverify.sharding import PlacementLike, Replicate, Shard
from tpverify.subjects.drawing import activations, divisible
from tpverify.subjects.subject import Input, Subject


@dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig:
    """Sizes, elements, and options of multi-latent attention over [seq, batch, hidden].

    Attributes:
        query_rank: of the compressed queries; None: they are projected at once.
        rank: of the compressed keys and values.
        head_dim: of the part of queries and keys without positions, and of values.
        rotary_dim: of the part with rotary positions, which all heads' keys share.
        qk_norm: compressed queries, and compressed keys and values, are normalised; later versions refuse it without ``query_rank``.
    """

    seq: int = 1
    batch: int = 1
    hidden: int = 1
    heads: int = 1
    query_rank: int | None = None
    rank: int = 4
    head_dim: int = 1
    rotary_dim: int = 2
    bias: bool = True
    qk_norm: bool = False
    normalization: str = "RMSNorm"
    sequence_parallel: bool = False


@st.composite
def latent_attention_configs(draw: st.DrawFn, world_size: int) -> LatentAttentionConfig:
    """All options; a number of heads that does not divide is rare, to be refused."""
    sequence_parallel = draw(st.booleans())
    seq, batch, flaw = draw(activations(world_size, sequence_parallel, ("heads",)))
    ranks = st.integers(1, 2).map(lambda part: part * world_size * 2 + 2 * world_size)
    query_rank = draw(st.none() | ranks)
    return LatentAttentionConfig(
        seq=seq,
        batch=batch,
        hidden=draw(st.integers(1, 6)),
        heads=draw(divisible(world_size, flaw != "", 2)),
        query_rank=query_rank,
        rank=draw(ranks),
        head_dim=draw(st.integers(1, 4)),
        rotary_dim=draw(st.integers(1, 2)) * 2 * world_size,
        bias=draw(st.booleans()),
        qk_norm=query_rank is not None and draw(st.booleans()),
        normalization=draw(st.sampled_from(["LayerNorm", "RMSNorm"])),
        sequence_parallel=sequence_parallel,
    )


class ReferenceLatentAttention(nn.Module):
    """Keys and values are made from one compressed tensor, and all heads' keys share their rotary part."""

    def __init__(self, config: LatentAttentionConfig) -> None:
        super().__init__()
        self.config = config
        query = config.heads * (config.head_dim + config.rotary_dim)
        if config.query_rank is None:
            self.linear_q_proj = nn.Linear(config.hidden, query, bias=False)
        else:
            self.linear_q_down_proj = nn.Linear(config.hidden, config.query_rank, bias=False)
            self.linear_q_up_proj = nn.Linear(config.query_rank, query, bias=False)
            self.q_layernorm = norm_of(config.normalization, config.query_rank) if config.qk_norm else nn.Identity()
        self.linear_kv_down_proj = nn.Linear(config.hidden, config.rank + config.rotary_dim, bias=False)
        self.kv_layernorm = norm_of(config.normalization, config.rank) if config.qk_norm else nn.Identity()
        self.linear_kv_up_proj = nn.Linear(config.rank, 2 * config.heads * config.head_dim, bias=False)
        self.linear_proj = nn.Linear(config.heads * config.head_dim, config.hidden, config.bias)

    def forward(self, x: Tensor) -> Any:
        """[s, b, hidden] -> the same, and the bias of the output projection."""
        size, heads = self.config.head_dim, self.config.heads
        queries = self._queries(x).chunk(heads, dim=-1)
        compressed = self.linear_kv_down_proj(x)
        shared = _rotated(compressed[..., self.config.rank :])
        pairs = self.linear_kv_up_proj(self.kv_layernorm(compressed[..., : self.config.rank])).chunk(heads, dim=-1)
        contexts = []
        for query, pair in zip(queries, pairs, strict=True):
            query = torch.cat([query[..., :size], _rotated(query[..., size:])], dim=-1)
            key = torch.cat([pair[..., :size], shared], dim=-1)
            scores = torch.einsum("sbd,tbd->bst", query, key) / math.sqrt(key.shape[-1])
            weights = torch.softmax(scores.masked_fill(later(len(x)), -math.inf), dim=-1)
            contexts.append(torch.einsum("bst,tbd->sbd", weights, pair[..., size:]))
        return F.linear(torch.cat(contexts, dim=-1), self.linear_proj.weight), self.linear_proj.bias

    def _queries(self, x: Tensor) -> Tensor:
        if self.config.query_rank is None:
            queries: Tensor = self.linear_q_proj(x)
        else:
            queries = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(x)))
        return queries


def _rotated(x: Tensor) -> Tensor:
    """Neighbours are paired."""
    return rotate(torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1))


class Core(nn.Module):
    """Softmax of the scores; Megatron's own takes no separate sizes of keys and values."""

    def __init__(self, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **_: Any) -> Tensor:
        """[s, b, heads, d] each -> [s, b, heads * d]."""
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        context = F.scaled_dot_product_attention(query, key, value, ~mask, scale=self.scale)
        return context.permute(2, 0, 1, 3).flatten(2)


class ParallelLatentAttention(MLASelfAttention):  # type: ignore[misc]
    """Megatron's, with mask made here."""

    def __init__(self, config: LatentAttentionConfig) -> None:
        begin()
        norm = Norm if config.qk_norm else IdentityOp
        submodules = MLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=ColumnParallelLinear,
            linear_q_up_proj=ColumnParallelLinear,
            linear_kv_down_proj=ColumnParallelLinear,
            linear_kv_up_proj=ColumnParallelLinear,
            core_attention=Core,
            linear_proj=RowParallelLinear,
            q_layernorm=norm,
            kv_layernorm=norm,
        )
        super().__init__(_latent_config(config), submodules, 1, AttnMaskType.causal)
        self.seq = config.seq

    def forward(self, x: Tensor) -> Any:
        """[s, b, hidden], or this rank's part of the sequence -> the same, and the bias of the output projection."""
        return super().forward(x, later(self.seq)[None, None])


def _latent_config(config: LatentAttentionConfig) -> MLATransformerConfig:
    return transformer_config(config.sequence_parallel, MLATransformerConfig, **_fields(config))


def _fields(config: LatentAttentionConfig) -> dict[str, Any]:
    """Of an ``MLATransformerConfig``."""
    return {
        "hidden_size": config.hidden,
        "num_attention_heads": config.heads,
        "kv_channels": config.head_dim,
        "q_lora_rank": config.query_rank,
        "kv_lora_rank": config.rank,
        "qk_head_dim": config.head_dim,
        "qk_pos_emb_head_dim": config.rotary_dim,
        "v_head_dim": config.head_dim,
        "rope_type": "rope",
        "add_bias_linear": config.bias,
        "qk_layernorm": config.qk_norm,
        "normalization": config.normalization,
    }


PROJECTIONS = ("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj")
IMPORTS = """import torch.nn.functional as F
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig
"""
IDENTITY = "from megatron.core.transformer.identity_op import IdentityOp\n"


def _source(config: LatentAttentionConfig) -> str:
    norm = Expression("Norm" if config.qk_norm else "IdentityOp")
    layers = dict.fromkeys(PROJECTIONS, Expression("ColumnParallelLinear"))
    others = {"core_attention": Expression("Core"), "linear_proj": Expression("RowParallelLinear")}
    return script(
        "multi_latent_attention.HAVE_TE = False  # 0.16.1 says that it is there",
        config_source(config.sequence_parallel, MLATransformerConfig, **_fields(config)),
        "submodules = " + called("MLASelfAttentionSubmodules", **layers, **others, q_layernorm=norm, kv_layernorm=norm),
        "module = MLASelfAttention(config, submodules, 1, AttnMaskType.causal)",
        MASK.format(seq=config.seq),
        "forward = module.forward\nmodule.forward = lambda x: forward(x, mask)",
        imports=LINEAR + IMPORTS + IDENTITY * (not config.qk_norm) + NN,
        definitions=(*(source_of(Norm),) * config.qk_norm, source_of(Core)),
    )


def latent_attention_placements(config: LatentAttentionConfig) -> dict[str, PlacementLike]:
    """Of all parameters."""
    norms: dict[str, PlacementLike] = {"*layernorm.*": Replicate()} if config.qk_norm else {}
    return {**norms, "linear_proj.weight": Shard(1), "linear_proj.*": Replicate(), "*": Shard(0)}


SUBJECTS = {
    "latent_self_attention": Subject(
        name="megatron_core.latent_self_attention",
        reference=ReferenceLatentAttention,
        parallel=ParallelLatentAttention,
        configs=latent_attention_configs,
        inputs=lambda c: {"x": Input((c.seq, c.batch, c.hidden), placement=along_sequence(c.sequence_parallel))},
        placements=latent_attention_placements,
        outputs=with_bias_left,
        finalize_gradients=finalize_gradients,
        rejects=lambda c, world_size: c.heads % world_size != 0,
        script=_source,
        **COMMON,
    ),
}
