"""What a program does before it uses megatron-core, and what its layers need where there is no CUDA."""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from tpverify.current_group import tp_group
from tpverify.sharding import PlacementLike, Replicate, Shard


@contextlib.contextmanager
def _surroundings(config: Any) -> Iterator[None]:
    """Buffers are allocated on the current CUDA device, and fused functions compiled; here on the ranks' device, and not."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(mock.patch("torch.cuda.current_device", torch.get_default_device))
        if importlib.util.find_spec("transformer_engine") is None:  # 0.16.1 says that it is there, or uses a name that it lacks
            stack.enter_context(mock.patch("megatron.core.transformer.multi_latent_attention.HAVE_TE", False))
            stack.enter_context(mock.patch("megatron.core.transformer.moe.moe_utils.te_general_gemm", None, create=True))
        if not torch.cuda.is_available():  # recomputation keeps and restores the state of the GPU's generator
            stack.enter_context(mock.patch("torch.cuda.random.get_rng_state", return_value=torch.get_rng_state()))
            stack.enter_context(mock.patch("megatron.core.tensor_parallel.random._set_cuda_rng_state"))
        yield


COMMON: dict[str, Any] = {
    "rank_local": (
        "megatron.core.parallel_state",
        "megatron.core.tensor_parallel.random",
        "megatron.core.utils",
        "megatron.core.models.common.embeddings.rotary_pos_embedding",
    ),
    "context": _surroundings,
}


def begin() -> None:
    """What a program does first; the TP group is the world."""
    parallel_state.initialize_model_parallel(tp_group().size())
    model_parallel_cuda_manual_seed(1, inference_rng_tracker=True)  # this tracker does not ask for the state of a GPU


FIELDS: dict[str, Any] = {
    "num_layers": 1,
    "use_cpu_initialization": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "gradient_accumulation_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "attention_softmax_in_fp32": False,
}
"""Of every config: without what needs CUDA, and without dropout."""


def transformer_config(
    sequence_parallel: bool = False, kind: type[TransformerConfig] = TransformerConfig, **fields: Any
) -> TransformerConfig:
    """A config; sizes that no ``fields`` name are the smallest there are."""
    size = tp_group().size()
    heads = fields.setdefault("num_attention_heads", size)
    fields.setdefault("hidden_size", heads)
    return kind(
        **{
            **FIELDS,
            "tensor_model_parallel_size": size,
            "sequence_parallel": sequence_parallel and size > 1,
            "params_dtype": torch.get_default_dtype(),
            **fields,
        }
    )


class Norm(nn.Module):
    """A norm as Megatron's layer specifications build one, flagged under sequence parallelism.

    Megatron's own is Apex's, which needs CUDA, or torch's, which it refuses under sequence parallelism.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> nn.Module:  # type: ignore[misc]
        """torch's LayerNorm or RMSNorm."""
        norm = nn.RMSNorm(hidden_size, eps) if config.normalization == "RMSNorm" else nn.LayerNorm(hidden_size, eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


def finalize_gradients(module: nn.Module) -> None:
    """What ``finalize_model_grads`` does over the TP group, by Megatron's own function."""
    config: Any = module.config
    module.ddp_config = DistributedDataParallelConfig()
    _allreduce_non_tensor_model_parallel_grads([module], config)


def along_sequence(sequence_parallel: bool) -> PlacementLike:
    """Placement of an activation, sequence first, between layers."""
    return Shard(0) if sequence_parallel else Replicate()
