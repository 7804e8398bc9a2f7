"""The families of decoders, and how each one's config is written."""

from __future__ import annotations

from typing import Any

from tpverify.adapters.transformers.config import DecoderConfig, Family


def _windows(config: DecoderConfig, sliding: str = "sliding_attention") -> dict[str, Any]:
    """Sliding attention in the first layer, full attention in the second, as far as there is a window."""
    kinds = [sliding if config.window and not layer % 2 else "full_attention" for layer in range(config.layers)]
    return {"sliding_window": config.window or None, "layer_types": kinds}


def _always_windowed(config: DecoderConfig) -> dict[str, Any]:
    """For models that make a mask for sliding attention whether or not a layer uses it."""
    return {**_windows(config), "sliding_window": config.window or 16}


def _llama(config: DecoderConfig) -> dict[str, Any]:
    return {"attention_bias": config.bias, "mlp_bias": config.bias}


def _qwen2(config: DecoderConfig) -> dict[str, Any]:
    return {**_windows(config), "use_sliding_window": config.window > 0}


def _qwen3(config: DecoderConfig) -> dict[str, Any]:
    return {**_windows(config), "use_sliding_window": config.window > 0, "attention_bias": config.bias}


def _gemma2(config: DecoderConfig) -> dict[str, Any]:
    softcaps = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0}
    return {**_always_windowed(config), **softcaps, "attention_bias": config.bias, "query_pre_attn_scalar": 4}


def _phi3(config: DecoderConfig) -> dict[str, Any]:
    return {"sliding_window": config.window or None}


def _mixtral(config: DecoderConfig) -> dict[str, Any]:
    return {"num_local_experts": config.experts, "num_experts_per_tok": config.active, "sliding_window": config.window or None}


def _qwen3_moe(config: DecoderConfig) -> dict[str, Any]:
    return {
        "num_experts": config.experts,
        "num_experts_per_tok": config.active,
        "moe_intermediate_size": config.ffn,
        "attention_bias": config.bias,
        "norm_topk_prob": config.bias,
        "mlp_only_layers": [1],
        "use_sliding_window": config.window > 0,
        "sliding_window": config.window or None,
    }


def _gpt_oss(config: DecoderConfig) -> dict[str, Any]:
    return {
        "num_local_experts": config.experts,
        "num_experts_per_tok": config.active,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        **_always_windowed(config),
    }


def _apertus(config: DecoderConfig) -> dict[str, Any]:
    return {"attention_bias": config.bias}


def _gemma3(config: DecoderConfig) -> dict[str, Any]:
    return {**_always_windowed(config), "attention_bias": config.bias, "query_pre_attn_scalar": 4}


def _deepseek_v2(config: DecoderConfig) -> dict[str, Any]:
    return {
        "n_routed_experts": config.experts,
        "num_experts_per_tok": config.active,
        "moe_intermediate_size": config.ffn,
        "n_shared_experts": 1,
        "first_k_dense_replace": config.layers - 1,
        "q_lora_rank": 5 if config.bias else None,
        "kv_lora_rank": 4,
        "qk_rope_head_dim": config.head_dim,
        "qk_nope_head_dim": 4,
        "v_head_dim": config.width,
    }


def _llama4(config: DecoderConfig) -> dict[str, Any]:
    return {
        "num_local_experts": config.experts,
        "num_experts_per_tok": config.active,
        "intermediate_size_mlp": config.ffn,
        "moe_layers": [0],
        "attention_bias": config.bias,
    }


def _hrm_text(config: DecoderConfig) -> dict[str, Any]:
    return {"H_cycles": 1, "L_cycles": 2, "L_bp_cycles": [2]}


def _plain(config: DecoderConfig) -> dict[str, Any]:
    return {}


EAGER = {"attention": "eager"}
TENSOR = ("tensor",)

FAMILIES = {
    "llama": Family("llama", _llama, draws=("bias",)),
    "qwen2": Family("qwen2", _qwen2, draws=("window",)),
    "qwen3": Family("qwen3", _qwen3, draws=("bias", "window")),
    "gemma2": Family("gemma2", _gemma2, draws=("bias", "window"), fixed=EAGER),
    "gemma3": Family("gemma3_text", _gemma3, draws=("bias", "window")),
    "phi3": Family("phi3", _phi3, draws=("window",), whole_heads=False),
    "olmo2": Family("olmo2", _apertus, draws=("bias",), whole_heads=False),
    "apertus": Family("apertus", _apertus, draws=("bias",)),
    "hrm_text": Family("hrm_text", _hrm_text, grouped=False),
    "doge": Family("doge", _plain),
    "mixtral": Family("mixtral", _mixtral, draws=("window",), moe=True),
    "qwen3_moe": Family("qwen3_moe", _qwen3_moe, draws=("bias", "window"), moe=True),
    "gpt_oss": Family("gpt_oss", _gpt_oss, draws=("window",), whole_heads=False, moe=True, fixed=EAGER),
    "deepseek_v2": Family("deepseek_v2", _deepseek_v2, draws=("bias",), moe=True, grouped=False),
    "llama4": Family("llama4_text", _llama4, draws=("bias",), moe=True, expert_plans=TENSOR),
}
