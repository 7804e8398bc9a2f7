"""Source that builds megatron-core's modules without tpverify: what :mod:`.environment` does in a run, as a program does it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.nn.functional as F
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.transformer_config import TransformerConfig

from tpverify.adapters.megatron_core.environment import FIELDS, finalize_gradients
from tpverify.adapters.source import Expression, called, changed, program, source_of

PROGRAM = """
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed{imports}

{definitions}

def build():
    torch.compiler.set_stance("force_eager")
    torch.cuda.current_device = torch.get_default_device  # where layers allocate
    parallel_state.initialize_model_parallel(dist.get_world_size())
    model_parallel_cuda_manual_seed(1, inference_rng_tracker=True)
    {statements}
    return module
"""

FINALIZED = """from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads
"""

SIZE = Expression("dist.get_world_size()")
FREEZE = "for parameter in module.parameters():\n    parameter.requires_grad_(parameter.dim() < 2)"


def script(*statements: str, imports: str = "", definitions: tuple[str, ...] = (), finalized: bool = True) -> str:
    """Source of ``build()``, and of ``finalize_gradients()`` unless the subject has none.

    Args:
        statements: the last binds ``module``.
        imports: import statements of their own.
        definitions: source of classes and functions of their own.
    """
    after = (source_of(finalize_gradients),) if finalized else ()
    return program(PROGRAM, *statements, imports=(FINALIZED * finalized + imports).strip("\n"), definitions=(*definitions, *after))


def config_source(sequence_parallel: bool = False, kind: type[TransformerConfig] = TransformerConfig, **fields: Any) -> str:
    """A statement that binds ``config`` to what :func:`.environment.transformer_config` returns, without the defaults."""
    heads = fields.get("num_attention_heads", SIZE)
    values = {**FIELDS, "num_attention_heads": heads, "hidden_size": heads, **fields}
    values |= {"tensor_model_parallel_size": SIZE, "params_dtype": Expression("torch.get_default_dtype()")}
    if sequence_parallel:
        values["sequence_parallel"] = Expression(f"{SIZE} > 1")
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    return f"config = {called(kind.__name__, **{name: _written(value) for name, value in changed(values, defaults).items()})}"


INITIAL = {"config": Expression("config"), "init_method": Expression("torch.nn.init.xavier_normal_")}

MASK = "mask = torch.ones({seq}, {seq}, dtype=torch.bool).triu(1)[None, None]"
ROTARY = "rotary = RotaryEmbedding({size}, 1.0, use_cpu_initialization=True)({seq})"

CONFIG = "from megatron.core.transformer.transformer_config import TransformerConfig\n"
LINEAR = "from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear\n"
ROTARY_IMPORT = "from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding\n"
ACTIVATION = "from megatron.core.fusions.fused_bias_geglu import quick_gelu\n"
NN = "from torch import nn\n"


def _written(value: Any) -> Any:
    if value is quick_gelu:
        return Expression("quick_gelu")
    name = getattr(value, "__name__", "")
    return Expression(f"torch.nn.functional.{name}") if callable(value) and getattr(F, name, None) is value else value
