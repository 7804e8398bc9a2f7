"""megatron-core's tensor-parallel layers, loss and mappings beside torch's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from megatron.core import parallel_state
from megatron.core import tensor_parallel as tp
from megatron.core.model_parallel_config import ModelParallelConfig
from torch import Tensor, nn

from tpverify.adapters.regions import region_mappings
from tpverify.current_group import tp_group
from tpverify.sharding import Partial, Placement, PlacementLike, Replicate, Shard
from tpverify.subjects.drawing import activations, divisible, loss_vocabularies
from tpverify.subjects.subject import Input, Subject, Vocabulary

COMMON: dict[str, Any] = {
    "rank_local": ("megatron.core.parallel_state", "megatron.core.tensor_parallel.random", "megatron.core.utils"),
    # Buffers of collectives are allocated on the current CUDA device.
    "context": lambda config: mock.patch("torch.cuda.current_device", torch.get_default_device),
}


def begin() -> None:
    """What a program does first; the TP group is the world."""
    parallel_state.initialize_model_parallel(tp_group().size())


def model_parallel_config(sequence_parallel: bool = False, **fields: Any) -> ModelParallelConfig:
    """Without what needs CUDA."""
    return ModelParallelConfig(
        tensor_model_parallel_size=tp_group().size(),
        sequence_parallel=sequence_parallel and tp_group().size() > 1,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        params_dtype=torch.get_default_dtype(),
        **fields,
    )


@dataclass(frozen=True)
class ColumnConfig:
    """Sizes, elements, and options of a ColumnParallelLinear over [seq, batch, in_features]; ``frozen``: its weight needs no gradient."""

    seq: int = 1
    batch: int = 1
    in_features: int = 1
    out_features: int = 1
    bias: bool = True
    gather_output: bool = False
    skip_bias_add: bool = False
    sequence_parallel: bool = False
    frozen: bool = False


@dataclass(frozen=True)
class RowConfig:
    """Sizes, elements, and options of a RowParallelLinear over [seq, batch, in_features]; ``frozen``: its weight needs no gradient."""

    seq: int = 1
    batch: int = 1
    in_features: int = 1
    out_features: int = 1
    bias: bool = True
    input_is_parallel: bool = True
    skip_bias_add: bool = False
    sequence_parallel: bool = False
    frozen: bool = False


class ReferenceLinear(nn.Linear):
    """``nn.Linear`` that returns ``(output, bias)`` where the bias is left to the caller, else ``(output, None)``."""

    def __init__(self, config: ColumnConfig | RowConfig) -> None:
        super().__init__(config.in_features, config.out_features, config.bias)
        self.skip_bias_add = config.skip_bias_add
        self.weight.requires_grad_(not config.frozen)

    def forward(self, x: Tensor) -> Any:
        """[..., in_features] -> [..., out_features]."""
        return (F.linear(x, self.weight), self.bias) if self.skip_bias_add else (super().forward(x), None)


@st.composite
def column_configs(draw: st.DrawFn, world_size: int) -> ColumnConfig:
    """All options; sizes that do not divide are rare, to be refused."""
    bias, skip, gather, sequence_parallel, frozen = (draw(st.booleans()) for _ in range(5))
    seq, batch, flaw = draw(activations(world_size, sequence_parallel, ("out_features",)))
    in_features, out_features = draw(st.integers(1, 6)), draw(divisible(world_size, flaw != ""))
    gather = gather and not sequence_parallel
    return ColumnConfig(seq, batch, in_features, out_features, bias, gather, bias and skip, sequence_parallel, frozen)


@st.composite
def row_configs(draw: st.DrawFn, world_size: int) -> RowConfig:
    """All options; sizes that do not divide are rare, to be refused."""
    bias, skip, whole, sequence_parallel, frozen = (draw(st.booleans()) for _ in range(5))
    seq, batch, flaw = draw(activations(world_size, sequence_parallel, ("in_features",)))
    in_features, out_features = draw(divisible(world_size, flaw != "")), draw(st.integers(1, 6))
    parallel = sequence_parallel or not whole
    return RowConfig(seq, batch, in_features, out_features, bias, parallel, bias and skip, sequence_parallel, frozen)


def _column(config: ColumnConfig) -> nn.Module:
    begin()
    layer: nn.Module = tp.ColumnParallelLinear(
        config.in_features,
        config.out_features,
        config=model_parallel_config(config.sequence_parallel),
        init_method=nn.init.xavier_normal_,
        bias=config.bias,
        gather_output=config.gather_output,
        skip_bias_add=config.skip_bias_add,
    )
    return _frozen(layer, config.frozen)


def _row(config: RowConfig) -> nn.Module:
    begin()
    layer: nn.Module = tp.RowParallelLinear(
        config.in_features,
        config.out_features,
        config=model_parallel_config(config.sequence_parallel),
        init_method=nn.init.xavier_normal_,
        bias=config.bias,
        input_is_parallel=config.input_is_parallel,
        skip_bias_add=config.skip_bias_add,
    )
    return _frozen(layer, config.frozen)


def _frozen(layer: nn.Module, frozen: bool) -> nn.Module:
    layer.get_parameter("weight").requires_grad_(not frozen)
    return layer


def finalize_gradients(module: nn.Module) -> None:
    """What ``finalize_model_grads`` does for parameters that every rank used on its own part of the sequence."""
    for parameter in module.parameters():
        if getattr(parameter, "sequence_parallel", False) and parameter.grad is not None:
            torch.distributed.all_reduce(parameter.grad, group=parallel_state.get_tensor_model_parallel_group())


def _column_outputs(config: ColumnConfig) -> PlacementLike | tuple[PlacementLike, ...]:
    output = Replicate() if config.gather_output else Shard(2)
    return (output, Shard(0)) if config.skip_bias_add else output


def _row_outputs(config: RowConfig) -> PlacementLike | tuple[PlacementLike, ...]:
    output = Shard(0) if config.sequence_parallel else Replicate()
    if not config.skip_bias_add:
        return output
    return output, Placement(Replicate(), Partial() if config.sequence_parallel else Replicate())


@dataclass(frozen=True)
class EmbeddingConfig:
    """Sizes, elements, and options of a VocabParallelEmbedding: ids [batch, seq] -> [batch, seq, hidden], or sequence first and cut."""

    batch: int = 1
    seq: int = 1
    vocab: int = 1
    hidden: int = 1
    reduce_scatter: bool = False
    deterministic: bool = False


@st.composite
def embedding_configs(draw: st.DrawFn, world_size: int) -> EmbeddingConfig:
    """All options; vocabularies that do not divide are rare, to be refused."""
    scatter, deterministic = draw(st.booleans()), draw(st.booleans())
    seq, batch, flaw = draw(activations(world_size, scatter, ("vocab",)))
    return EmbeddingConfig(batch, seq, draw(divisible(world_size, flaw != "")), draw(st.integers(1, 5)), scatter, deterministic)


class ReferenceEmbedding(nn.Embedding):
    """``nn.Embedding``, sequence first if it is to be cut."""

    def __init__(self, config: EmbeddingConfig) -> None:
        super().__init__(config.vocab, config.hidden)
        self.sequence_first = config.reduce_scatter

    def forward(self, ids: Tensor) -> Tensor:
        """[b, s] -> [b, s, h], or [s, b, h]."""
        rows = super().forward(ids)
        return rows.transpose(0, 1) if self.sequence_first else rows


def _embedding(config: EmbeddingConfig) -> nn.Module:
    begin()
    layer: nn.Module = tp.VocabParallelEmbedding(
        config.vocab,
        config.hidden,
        init_method=nn.init.xavier_normal_,
        reduce_scatter_embeddings=config.reduce_scatter,
        config=model_parallel_config(deterministic_mode=config.deterministic),
    )
    return layer


@dataclass(frozen=True)
class CrossEntropyConfig:
    """Sizes, elements, and options of a loss over logits [seq, batch, vocab]; ``reuse``: the logits are looked at again after it."""

    seq: int = 1
    batch: int = 1
    vocab: int = 2
    label_smoothing: float = 0.0
    reuse: bool = False


@st.composite
def cross_entropy_configs(draw: st.DrawFn, world_size: int) -> CrossEntropyConfig:
    """All options; the vocabulary divides, as Megatron pads it."""
    seq, batch, _ = draw(activations(world_size, False, ()))
    vocab = draw(loss_vocabularies(world_size)) * world_size
    return CrossEntropyConfig(seq, batch, vocab, draw(st.sampled_from([0.0, 0.1, 0.5])), draw(st.booleans()))


class ReferenceLoss(nn.Module):
    """The loss of every token, and the logits after it if they are reused."""

    def __init__(self, config: CrossEntropyConfig) -> None:
        super().__init__()
        self.label_smoothing, self.reuse = config.label_smoothing, config.reuse

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """[s, b, v] and [s, b] -> [s, b]; smoothing is dealt out to the other ids only, not to the target as well."""
        vocab = logits.shape[-1]
        smoothing = self.label_smoothing * vocab / (vocab - 1)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", label_smoothing=smoothing).view_as(targets)

    def forward(self, hidden: Tensor, targets: Tensor) -> Any:
        """``hidden`` are logits that a head has yet to hand over."""
        logits = hidden * 1.0
        loss = self.loss(logits, targets)
        return (loss, logits.detach()) if self.reuse else loss


class ParallelLoss(ReferenceLoss):
    """Megatron's."""

    def __init__(self, config: CrossEntropyConfig) -> None:
        super().__init__(config)
        begin()

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """[s, b, v / world_size] and [s, b] -> [s, b]."""
        losses: Tensor = tp.vocab_parallel_cross_entropy(logits, targets, self.label_smoothing)
        return losses


MAPPINGS = {
    "copy": tp.copy_to_tensor_model_parallel_region,
    "reduce": tp.reduce_from_tensor_model_parallel_region,
    "scatter": tp.scatter_to_tensor_model_parallel_region,
    "gather": tp.gather_from_tensor_model_parallel_region,
    "scatter_sequence": tp.scatter_to_sequence_parallel_region,
    "gather_sequence": lambda x: tp.gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False),
    "gather_sequence_to_parallel": tp.gather_from_sequence_parallel_region,
    "reduce_scatter_sequence": tp.reduce_scatter_to_sequence_parallel_region,
}

SUBJECTS = {
    "column_parallel_linear": Subject(
        name="megatron_core.column_parallel_linear",
        reference=ReferenceLinear,
        parallel=_column,
        configs=column_configs,
        inputs=lambda c: {"x": Input((c.seq, c.batch, c.in_features), placement=Shard(0) if c.sequence_parallel else Replicate())},
        placements={"*": Shard(0)},
        outputs=_column_outputs,
        rejects=lambda c, world_size: c.out_features % world_size != 0,
        refusal=AssertionError,
        exact=True,
        **COMMON,
    ),
    "row_parallel_linear": Subject(
        name="megatron_core.row_parallel_linear",
        reference=ReferenceLinear,
        parallel=_row,
        configs=row_configs,
        inputs=lambda c: {"x": Input((c.seq, c.batch, c.in_features), placement=Shard(2) if c.input_is_parallel else Replicate())},
        placements={"weight": Shard(1), "*": Replicate()},
        outputs=_row_outputs,
        finalize_gradients=finalize_gradients,
        rejects=lambda c, world_size: c.in_features % world_size != 0,
        refusal=AssertionError,
        exact=True,
        **COMMON,
    ),
    "vocab_parallel_embedding": Subject(
        name="megatron_core.vocab_parallel_embedding",
        reference=ReferenceEmbedding,
        parallel=_embedding,
        configs=embedding_configs,
        inputs=lambda c: {"ids": Input((c.batch, c.seq), kind="integers", high=c.vocab)},
        placements={"weight": Shard(0)},
        outputs=lambda c: Shard(0) if c.reduce_scatter else Replicate(),
        rejects=lambda c, world_size: c.vocab % world_size != 0,
        refusal=AssertionError,
        vocabulary=lambda c: Vocabulary(c.vocab, parameters=("weight",), ids="ids"),
        exact=True,
        **COMMON,
    ),
    "vocab_parallel_cross_entropy": Subject(
        name="megatron_core.vocab_parallel_cross_entropy",
        reference=ReferenceLoss,
        parallel=ParallelLoss,
        configs=cross_entropy_configs,
        inputs=lambda c: {
            "logits": Input((c.seq, c.batch, c.vocab), placement=Shard(2)),
            "targets": Input((c.seq, c.batch), kind="integers", high=c.vocab),
        },
        outputs=lambda c: (Replicate(), Shard(2)) if c.reuse else Replicate(),
        vocabulary=lambda c: Vocabulary(c.vocab, targets="targets", logits="logits"),
        precision=torch.float32,  # the loss is computed in it
        **COMMON,
    ),
    "mappings": region_mappings("megatron_core.mappings", MAPPINGS, begin, **COMMON),
}
