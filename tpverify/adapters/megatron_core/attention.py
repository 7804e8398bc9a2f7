"""megatron-core's self-attention beside one that goes head by head on one device."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from tpverify.adapters.megatron_core.environment import COMMON, Norm, along_sequence, begin, finalize_gradients, transformer_config
from tpverify.adapters.megatron_core.mlp import with_bias_left
from tpverify.adapters.megatron_core.references import AttentionConfig, ReferenceAttention, freeze, later
from tpverify.adapters.megatron_core.script import CONFIG, FREEZE, LINEAR, MASK, NN, ROTARY, ROTARY_IMPORT, config_source, script
from tpverify.adapters.source import source_of
from tpverify.sharding import PlacementLike, Replicate, Shard
from tpverify.subjects.drawing import activations
from tpverify.subjects.subject import Input, Subject

SOFTMAXES = ("vanilla", "off-by-one", "learnable")


@st.composite
def head_counts(draw: st.DrawFn, world_size: int) -> tuple[int, int]:
    """(heads, groups): every head its own key and value, several in a group, and groups that several ranks share."""
    shared = [groups for groups in range(1, world_size) if world_size % groups == 0]
    groups = draw(st.sampled_from([world_size, 2 * world_size, *shared]))
    least = -(-world_size // groups)
    return groups * least * draw(st.integers(1, 2)), groups


def head_sizes(world_size: int, heads: int, groups: int, gate: bool) -> list[int]:
    """Sizes for which the rows of the projection can be dealt out evenly, although ranks share groups."""
    rows = (1 + gate) * heads + 2 * groups
    return [size for size in (2, 4, 6, 8, 3 * world_size, 4 * world_size) if rows * size % world_size == 0 and size % 2 == 0]


@st.composite
def attention_configs(draw: st.DrawFn, world_size: int, gate: bool) -> AttentionConfig:
    """All options; a number of heads that does not divide is rare, to be refused."""
    sequence_parallel = draw(st.booleans())
    seq, batch, flaw = draw(activations(world_size, sequence_parallel, ("heads",)))
    heads, groups = draw(head_counts(world_size))
    bias = draw(st.booleans())
    return AttentionConfig(
        seq=seq,
        batch=batch,
        hidden=draw(st.integers(1, 6)),
        heads=heads + (flaw != ""),
        groups=groups,
        head_dim=draw(st.sampled_from(head_sizes(world_size, heads, groups, gate))),
        bias=bias,
        qkv_bias=not bias and draw(st.booleans()),
        causal=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        softmax=draw(st.sampled_from(SOFTMAXES)),
        gate=gate,
        rotary=draw(st.booleans()),
        normalization=draw(st.sampled_from(["LayerNorm", "RMSNorm"])),
        frozen=draw(st.booleans()),
        sequence_parallel=sequence_parallel,
    )


def attention_fields(config: AttentionConfig) -> dict[str, Any]:
    """Of a ``TransformerConfig``."""
    return {
        "hidden_size": config.hidden,
        "num_attention_heads": config.heads,
        "num_query_groups": config.groups,
        "kv_channels": config.head_dim,
        "add_bias_linear": config.bias,
        "add_qkv_bias": config.qkv_bias,
        "qk_layernorm": config.qk_norm,
        "softmax_type": config.softmax,
        "attention_output_gate": config.gate,
        "normalization": config.normalization,
    }


class ParallelAttention(SelfAttention):  # type: ignore[misc]
    """Megatron's, with mask and rotary positions made here."""

    def __init__(self, config: TransformerConfig, causal: bool, rotary: bool) -> None:
        norm = Norm if config.qk_layernorm else None
        submodules = SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=DotProductAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=norm,
            k_layernorm=norm,
        )
        super().__init__(config, submodules, 1, AttnMaskType.causal if causal else AttnMaskType.no_mask)
        self.causal = causal
        self.rotary = RotaryEmbedding(config.kv_channels, 1.0, use_cpu_initialization=True) if rotary else None

    def forward(self, x: Tensor) -> Any:
        """[s, b, hidden], or this rank's part of the sequence -> the same, and the bias of the output projection."""
        seq = x.shape[0] * (self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1)
        return super().forward(
            x,
            later(seq)[None, None] if self.causal else None,
            rotary_pos_emb=self.rotary(seq) if self.rotary else None,
        )


def _parallel(config: AttentionConfig) -> nn.Module:
    begin()
    module = ParallelAttention(transformer_config(config.sequence_parallel, **attention_fields(config)), config.causal, config.rotary)
    freeze(module, config.frozen)
    return module


SUBMODULES = """submodules = SelfAttentionSubmodules(
    linear_qkv=ColumnParallelLinear, core_attention=DotProductAttention, linear_proj=RowParallelLinear{norms}
)"""
IMPORTS = """from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
"""


def _source(config: AttentionConfig) -> str:
    norms = ", q_layernorm=Norm, k_layernorm=Norm" * config.qk_norm
    mask = MASK.format(seq=config.seq) if config.causal else "mask = None"
    given = ", rotary_pos_emb=rotary" * config.rotary
    return script(
        config_source(config.sequence_parallel, **attention_fields(config)),
        SUBMODULES.format(norms=norms),
        f"module = SelfAttention(config, submodules, 1, AttnMaskType.{'causal' if config.causal else 'no_mask'})",
        mask,
        ROTARY.format(size=config.head_dim, seq=config.seq) * config.rotary,
        f"forward = module.forward\nmodule.forward = lambda x: forward(x, mask{given})",
        FREEZE * config.frozen,
        imports=ROTARY_IMPORT * config.rotary + LINEAR + IMPORTS + CONFIG + NN * config.qk_norm,
        definitions=(source_of(Norm),) * config.qk_norm,
    )


def attention_placements(config: AttentionConfig) -> dict[str, PlacementLike]:
    """Of attention's parameters wherever it sits in a model; groups lie one after the other, so that an even cut is one by groups."""
    norms: dict[str, PlacementLike] = {"*q_layernorm.*": Replicate(), "*k_layernorm.*": Replicate()} if config.qk_norm else {}
    sinks: dict[str, PlacementLike] = {"*softmax_offset": Shard(0)} if config.softmax == "learnable" else {}
    return {"*linear_qkv.*": Shard(0), "*linear_proj.weight": Shard(1), "*linear_proj.*": Replicate(), **norms, **sinks}


def _subject(name: str, gate: bool) -> Subject:
    return Subject(
        name=f"megatron_core.{name}",
        reference=ReferenceAttention,
        parallel=_parallel,
        configs=lambda world_size: attention_configs(world_size, gate),
        inputs=lambda c: {"x": Input((c.seq, c.batch, c.hidden), placement=along_sequence(c.sequence_parallel))},
        placements=attention_placements,
        outputs=with_bias_left,
        finalize_gradients=finalize_gradients,
        rejects=lambda c, world_size: c.heads % world_size != 0,
        precision=torch.float32 if gate else torch.float64,  # the gate is applied in float32
        script=_source,
        **COMMON,
    )


SUBJECTS = {"self_attention": _subject("self_attention", False), "gated_self_attention": _subject("gated_self_attention", True)}
