"""megatron-core's MLP beside one of torch's linear layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from torch import nn

from tpverify.adapters.megatron_core.environment import COMMON, along_sequence, begin, finalize_gradients, transformer_config
from tpverify.adapters.megatron_core.references import MLPConfig, ReferenceMLP, freeze
from tpverify.adapters.megatron_core.script import ACTIVATION, CONFIG, FREEZE, LINEAR, config_source, script
from tpverify.sharding import Block, FusedShard, Partial, Placement, PlacementLike, Replicate, Shard
from tpverify.subjects.drawing import activations, divisible
from tpverify.subjects.subject import Input, Subject

ACTIVATIONS = {"gelu": F.gelu, "silu": F.silu, "relu": F.relu, "quick_gelu": quick_gelu}
FUSED = (("gelu", False), ("gelu", True), ("silu", True))
"""Activations that Megatron has fused, each with whether it is gated."""


@st.composite
def mlp_configs(draw: st.DrawFn, world_size: int, fused: bool) -> MLPConfig:
    """All options; an ``ffn`` that does not divide is rare, to be refused."""
    sequence_parallel = draw(st.booleans())
    seq, batch, flaw = draw(activations(world_size, sequence_parallel, ("ffn",)))
    activation, gated = draw(st.sampled_from(FUSED)) if fused else (draw(st.sampled_from(sorted(ACTIVATIONS))), draw(st.booleans()))
    special = gated and not fused
    return MLPConfig(
        seq=seq,
        batch=batch,
        hidden=draw(st.integers(1, 6)),
        ffn=draw(divisible(world_size, flaw != "")),
        activation=activation,
        gated=gated,
        bias=draw(st.booleans()) or (fused and not gated),
        offset=draw(st.sampled_from([0.0, 1.0])) if special else 0.0,
        clamp=draw(st.sampled_from([None, 0.75])) if special else None,
        fused=fused,
        frozen=draw(st.booleans()),
        sequence_parallel=sequence_parallel,
    )


def mlp_fields(config: MLPConfig) -> dict[str, Any]:
    """Of a ``TransformerConfig``."""
    return {
        "ffn_hidden_size": config.ffn,
        "activation_func": ACTIVATIONS[config.activation],
        "gated_linear_unit": config.gated,
        "add_bias_linear": config.bias,
        "glu_linear_offset": config.offset,
        "activation_func_clamp_value": config.clamp,
        "bias_activation_fusion": config.fused,
    }


def _parallel(config: MLPConfig) -> nn.Module:
    begin()
    megatron = transformer_config(config.sequence_parallel, hidden_size=config.hidden, kv_channels=1, **mlp_fields(config))
    submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    module: nn.Module = MLP(megatron, submodules, ffn_hidden_size=config.ffn)
    freeze(module, config.frozen)
    return module


def _source(config: MLPConfig) -> str:
    fields = {"hidden_size": config.hidden, "kv_channels": 1, **mlp_fields(config)}
    imports = ACTIVATION * (config.activation == "quick_gelu") + LINEAR + "from megatron.core.transformer.mlp import MLP, MLPSubmodules\n"
    return script(
        config_source(config.sequence_parallel, **fields),
        "submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)",
        f"module = MLP(config, submodules, ffn_hidden_size={config.ffn})",
        FREEZE * config.frozen,
        imports=imports + CONFIG,
    )


def mlp_placements(config: MLPConfig) -> dict[str, PlacementLike]:
    """Of the MLP's parameters wherever it sits in a model; gate and up are each cut by themselves."""
    rows = FusedShard(0, (Block(config.ffn), Block(config.ffn))) if config.gated else Shard(0)
    return {"*linear_fc1.*": rows, "*linear_fc2.weight": Shard(1), "*linear_fc2.*": Replicate()}


def with_bias_left(config: Any) -> PlacementLike | tuple[PlacementLike, ...]:
    """Of the output and of the bias that is left to the caller, who adds it to a part of the sequence under sequence parallelism."""
    output = along_sequence(config.sequence_parallel)
    if not config.bias:
        return output
    return output, Placement(Replicate(), Partial() if config.sequence_parallel else Replicate())


def _subject(name: str, fused: bool) -> Subject:
    return Subject(
        name=f"megatron_core.{name}",
        reference=ReferenceMLP,
        parallel=_parallel,
        configs=lambda world_size: mlp_configs(world_size, fused),
        inputs=lambda c: {"x": Input((c.seq, c.batch, c.hidden), placement=along_sequence(c.sequence_parallel))},
        placements=mlp_placements,
        outputs=with_bias_left,
        finalize_gradients=finalize_gradients,
        rejects=lambda c, world_size: c.ffn % world_size != 0,
        refusal=AssertionError,
        exact=lambda c: c.activation == "relu" and c.clamp is None,
        precision=torch.float32 if fused else torch.float64,  # constants of the fused functions have nine digits
        script=_source,
        **COMMON,
    )


SUBJECTS = {"mlp": _subject("mlp", False), "fused_mlp": _subject("fused_mlp", True)}
