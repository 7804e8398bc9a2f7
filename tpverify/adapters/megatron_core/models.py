"""megatron-core's transformer layer and GPT beside ones of torch's own modules on one device."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from tpverify.adapters.megatron_core.attention import SOFTMAXES, attention_fields, attention_placements, head_counts, head_sizes
from tpverify.adapters.megatron_core.environment import COMMON, Norm, along_sequence, begin, finalize_gradients, transformer_config
from tpverify.adapters.megatron_core.mlp import ACTIVATIONS, mlp_fields, mlp_placements
from tpverify.adapters.megatron_core.model_references import GPTConfig, LayerConfig, ReferenceGPT, ReferenceLayer, positions_of
from tpverify.adapters.megatron_core.references import freeze, later
from tpverify.adapters.megatron_core.script import ACTIVATION, CONFIG, FREEZE, MASK, NN, ROTARY, ROTARY_IMPORT, config_source, script
from tpverify.adapters.source import Expression, called, source_of
from tpverify.sharding import PlacementLike, Replicate, Shard
from tpverify.subjects.drawing import activations, divisible
from tpverify.subjects.subject import Input, Subject, Vocabulary


@st.composite
def layer_fields(draw: st.DrawFn, world_size: int) -> dict[str, Any]:
    """All options of a layer; a number of heads that does not divide is rare, to be refused."""
    sequence_parallel = draw(st.booleans())
    seq, batch, flaw = draw(activations(world_size, sequence_parallel, ("heads",)))
    heads, groups = draw(head_counts(world_size))
    return {
        "seq": seq,
        "batch": batch,
        "hidden": draw(st.integers(4, 8)),
        "heads": heads + (flaw != ""),
        "groups": groups,
        "head_dim": draw(st.sampled_from(head_sizes(world_size, heads, groups, False))),
        "ffn": draw(divisible(world_size)),
        "activation": draw(st.sampled_from(sorted(ACTIVATIONS))),
        "gated": draw(st.booleans()),
        "bias": draw(st.booleans()),
        "qk_norm": draw(st.booleans()),
        "softmax": draw(st.sampled_from(SOFTMAXES)),
        "normalization": draw(st.sampled_from(["LayerNorm", "RMSNorm"])),
        "frozen": draw(st.booleans()),
        "sequence_parallel": sequence_parallel,
    }


@st.composite
def layer_configs(draw: st.DrawFn, world_size: int) -> LayerConfig:
    """All options."""
    return LayerConfig(**draw(layer_fields(world_size)), rotary=draw(st.booleans()))


@st.composite
def gpt_configs(draw: st.DrawFn, world_size: int, labels: bool) -> GPTConfig:
    """All options; the vocabulary divides, as Megatron pads it."""
    positions = draw(st.sampled_from(["learned_absolute", "rope", "none"]))
    fields = draw(layer_fields(world_size))
    recompute = draw(st.sampled_from(["", "selective", "full", "distributed"]))
    return GPTConfig(
        **fields,
        rotary=positions == "rope",
        layers=draw(st.integers(1, 2)),
        vocab=max(2, draw(divisible(world_size))),
        positions=positions,
        tied=draw(st.booleans()),
        labels=labels,
        gathered=draw(st.booleans()),
        fused_loss=labels and draw(st.booleans()),
        recompute="full" if recompute == "distributed" and fields["sequence_parallel"] else recompute,
    )


def layer_spec(config: LayerConfig) -> ModuleSpec:
    """Megatron's own, with norms that run without CUDA."""
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_norm)
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    if config.qk_norm:
        attention = spec.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = Norm
    return spec


SPEC = """spec = get_gpt_layer_local_spec(qk_layernorm={qk_norm})
spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm"""
HEADS = """attention = spec.submodules.self_attention.submodules
attention.q_layernorm = attention.k_layernorm = Norm"""
RECOMPUTED = """torch.cuda.random.get_rng_state = lambda device: torch.get_rng_state()  # a GPU's generator is kept and restored
random._set_cuda_rng_state = lambda *args, **kwargs: None"""
IMPORTS = "from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec\n"
GPT = """from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
"""


def _model_source(config: LayerConfig, *statements: str, imports: str, **fields: Any) -> str:
    """Source of a module that is made of layers; ``statements`` find its ``config`` and ``spec``."""
    fields = {**attention_fields(config), **mlp_fields(config), **fields}
    recomputed = fields.get("recompute_granularity") is not None
    imports += IMPORTS + CONFIG + NN + ACTIVATION * (config.activation == "quick_gelu")
    return script(
        RECOMPUTED * recomputed,
        config_source(config.sequence_parallel, **fields),
        SPEC.format(qk_norm=config.qk_norm),
        HEADS * config.qk_norm,
        *statements,
        FREEZE * config.frozen,
        imports=imports + "from megatron.core.tensor_parallel import random\n" * recomputed,
        definitions=(source_of(Norm),),
    )


def _layer_source(config: LayerConfig) -> str:
    given = ", rotary_pos_emb=rotary" * config.rotary
    return _model_source(
        config,
        "module = TransformerLayer(config, spec.submodules)",
        MASK.format(seq=config.seq),
        ROTARY.format(size=config.head_dim, seq=config.seq) * config.rotary,
        f"forward = module.forward\nmodule.forward = lambda x: forward(x, attention_mask=mask{given})[0]",
        imports="from megatron.core.transformer.transformer_layer import TransformerLayer\n" + ROTARY_IMPORT * config.rotary,
    )


def _gpt_source(config: GPTConfig) -> str:
    options = {
        "vocab_size": config.vocab,
        "max_sequence_length": config.seq,
        "parallel_output": not config.gathered,
        "share_embeddings_and_output_weights": config.tied,
        "position_embedding_type": config.positions,
    }
    given = ", labels=targets" * config.labels
    return _model_source(
        config,
        f"block = TransformerBlockSubmodules(layer_specs=[spec] * {config.layers}, layer_norm=Norm)",
        "module = " + called("GPTModel", Expression("config"), Expression("block"), **options),
        MASK.format(seq=config.seq),
        f"positions = torch.arange({config.seq}).expand({config.batch}, {config.seq})",
        f"forward = module.forward\nmodule.forward = lambda ids, targets: forward(ids, positions, mask{given})",
        imports=GPT,
        cross_entropy_loss_fusion=config.fused_loss,
        num_layers=config.layers,
        **_recompute_fields(config),
    )


def layer_placements(config: LayerConfig) -> dict[str, PlacementLike]:
    """Of a layer's parameters wherever it sits in a model."""
    return {**attention_placements(config), **mlp_placements(config), "*layernorm.*": Replicate()}


class ParallelLayer(TransformerLayer):  # type: ignore[misc]
    """Megatron's, with mask and rotary positions made here."""

    def __init__(self, config: LayerConfig) -> None:
        begin()
        fields = {**attention_fields(config), **mlp_fields(config)}
        super().__init__(transformer_config(config.sequence_parallel, **fields), layer_spec(config).submodules)
        self.rotary = RotaryEmbedding(config.head_dim, 1.0, use_cpu_initialization=True) if config.rotary else None
        self.seq = config.seq
        freeze(self, config.frozen)

    def forward(self, x: Tensor) -> Any:
        """[s, b, hidden], or this rank's part of the sequence -> the same."""
        rotary = self.rotary(self.seq) if self.rotary else None
        return super().forward(x, attention_mask=later(self.seq)[None, None], rotary_pos_emb=rotary)[0]


def _recompute_fields(config: GPTConfig) -> dict[str, Any]:
    if config.recompute in ("", "selective"):
        return {"recompute_granularity": config.recompute or None}
    method = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {**method, "distribute_saved_activations": config.recompute == "distributed"}


class ParallelGPT(GPTModel):  # type: ignore[misc]
    """Megatron's, with mask and positions made here."""

    def __init__(self, config: GPTConfig) -> None:
        begin()
        fields = {**attention_fields(config), **mlp_fields(config), **_recompute_fields(config), "num_layers": config.layers}
        super().__init__(
            transformer_config(config.sequence_parallel, cross_entropy_loss_fusion=config.fused_loss, **fields),
            TransformerBlockSubmodules(layer_specs=[layer_spec(config)] * config.layers, layer_norm=Norm),
            vocab_size=config.vocab,
            max_sequence_length=config.seq,
            parallel_output=not config.gathered,
            share_embeddings_and_output_weights=config.tied,
            position_embedding_type=config.positions,
        )
        self.labels = config.labels
        freeze(self, config.frozen)

    def forward(self, ids: Tensor, targets: Tensor) -> Any:
        """ids, targets [b, s] -> losses [b, s], or logits [b, s, vocab]."""
        mask = later(ids.shape[1])[None, None]
        return super().forward(ids, positions_of(ids), mask, labels=targets if self.labels else None)


def gpt_placements(config: GPTConfig) -> dict[str, PlacementLike]:
    """Of all of GPT's parameters."""
    positions: dict[str, PlacementLike] = {"*position_embeddings.*": Replicate()} if config.positions == "learned_absolute" else {}
    head: dict[str, PlacementLike] = {} if config.tied else {"output_layer.weight": Shard(0)}
    return {"*word_embeddings.weight": Shard(0), **positions, **head, **layer_placements(config)}


def _gpt_outputs(config: GPTConfig) -> PlacementLike:
    return Replicate() if config.labels or config.gathered else Shard(2)


def _gpt(name: str, labels: bool) -> Subject:
    return Subject(
        name=f"megatron_core.{name}",
        reference=ReferenceGPT,
        parallel=ParallelGPT,
        configs=lambda world_size: gpt_configs(world_size, labels),
        inputs=lambda c: {
            "ids": Input((c.batch, c.seq), kind="integers", high=c.vocab),
            "targets": Input((c.batch, c.seq), kind="integers", high=c.vocab),
        },
        placements=gpt_placements,
        outputs=_gpt_outputs,
        finalize_gradients=finalize_gradients,
        rejects=lambda c, world_size: c.heads % world_size != 0,
        vocabulary=lambda c: Vocabulary(
            c.vocab, parameters=("*word_embeddings.weight", "output_layer.weight"), ids="ids", lookup="embedding.word_embeddings"
        ),
        precision=torch.float32 if labels else torch.float64,  # the loss is computed in float32
        script=_gpt_source,
        **COMMON,
    )


SUBJECTS = {
    "transformer_layer": Subject(
        name="megatron_core.transformer_layer",
        reference=ReferenceLayer,
        parallel=ParallelLayer,
        configs=layer_configs,
        inputs=lambda c: {"x": Input((c.seq, c.batch, c.hidden), placement=along_sequence(c.sequence_parallel))},
        placements=layer_placements,
        outputs=lambda c: along_sequence(c.sequence_parallel),
        finalize_gradients=finalize_gradients,
        rejects=lambda c, world_size: c.heads % world_size != 0,
        script=_layer_source,
        **COMMON,
    ),
    "gpt": _gpt("gpt", True),
    "gpt_logits": _gpt("gpt_logits", False),
}
