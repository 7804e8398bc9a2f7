"""megatron-core's linear layers and embedding beside torch's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from megatron.core import tensor_parallel as tp
from torch import Tensor, nn

from tpverify.adapters.megatron_core.environment import COMMON, along_sequence, begin, finalize_gradients, transformer_config
from tpverify.adapters.megatron_core.script import CONFIG, INITIAL, config_source, script
from tpverify.adapters.source import called
from tpverify.sharding import Partial, Placement, PlacementLike, Replicate, Shard
from tpverify.subjects.drawing import activations, divisible
from tpverify.subjects.subject import Input, Subject, Vocabulary


@dataclass(frozen=True)
class ColumnConfig:
    """Sizes, elements, and options of a ColumnParallelLinear over [seq, batch, in_features].

    Attributes:
        frozen: the weight needs no gradient.
        given: the layer allocates no weight; the caller passes one.
        at_call: whether the output is gathered is said by the caller, not the constructor.
        unreduced: the gradients of the input are left for the caller to sum.
    """

    seq: int = 1
    batch: int = 1
    in_features: int = 1
    out_features: int = 1
    bias: bool = True
    gather_output: bool = False
    skip_bias_add: bool = False
    sequence_parallel: bool = False
    frozen: bool = False
    given: bool = False
    at_call: bool = False
    unreduced: bool = False


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
    bias, skip, sequence_parallel, frozen = (draw(st.booleans()) for _ in range(4))
    seq, batch, flaw = draw(activations(world_size, sequence_parallel, ("out_features",)))
    return ColumnConfig(
        seq=seq,
        batch=batch,
        in_features=draw(st.integers(1, 6)),
        out_features=draw(divisible(world_size, flaw != "")),
        bias=bias,
        gather_output=draw(st.booleans()),
        skip_bias_add=bias and skip,
        sequence_parallel=sequence_parallel,
        frozen=frozen,
        given=draw(st.booleans()),
        at_call=draw(st.booleans()),
        unreduced=draw(st.booleans()),
    )


@st.composite
def row_configs(draw: st.DrawFn, world_size: int) -> RowConfig:
    """All options; sizes that do not divide are rare, to be refused."""
    bias, skip, whole, sequence_parallel, frozen = (draw(st.booleans()) for _ in range(5))
    seq, batch, flaw = draw(activations(world_size, sequence_parallel, ("in_features",)))
    in_features, out_features = draw(divisible(world_size, flaw != "")), draw(st.integers(1, 6))
    parallel = sequence_parallel or not whole
    return RowConfig(seq, batch, in_features, out_features, bias, parallel, bias and skip, sequence_parallel, frozen)


class ParallelColumn(tp.ColumnParallelLinear):  # type: ignore[misc]
    """Megatron's, with the options of a call."""

    def __init__(self, config: ColumnConfig) -> None:
        begin()
        self.call: dict[str, Any] = {"runtime_gather_output": config.gather_output} if config.at_call else {}
        self.given = config.given
        super().__init__(
            config.in_features,
            config.out_features,
            config=transformer_config(config.sequence_parallel),
            init_method=nn.init.xavier_normal_,
            bias=config.bias,
            gather_output=config.gather_output != config.at_call,
            skip_bias_add=config.skip_bias_add,
            skip_weight_param_allocation=config.given,
            disable_grad_reduce=config.unreduced,
        )
        if config.given:
            self.weight = nn.Parameter(torch.empty(self.output_size_per_partition, config.in_features))
        _frozen(self, config.frozen)

    def forward(self, x: Tensor) -> Any:
        """[s, b, in_features] -> [s, b, this rank's or all of out_features], and the bias or None."""
        return super().forward(x, **self.call, **({"weight": self.weight} if self.given else {}))


def _column_source(config: ColumnConfig) -> str:
    options = {
        "bias": config.bias,
        "gather_output": config.gather_output != config.at_call,
        "skip_bias_add": config.skip_bias_add,
        **({"skip_weight_param_allocation": True} if config.given else {}),
        **({"disable_grad_reduce": True} if config.unreduced else {}),
    }
    at_call = [f"runtime_gather_output={config.gather_output}"] * config.at_call + ["weight=module.weight"] * config.given
    return script(
        config_source(config.sequence_parallel),
        "module = " + called("ColumnParallelLinear", config.in_features, config.out_features, **INITIAL, **options),
        f"module.weight = torch.nn.Parameter(torch.empty(module.output_size_per_partition, {config.in_features}))" * config.given,
        f"forward = module.forward\nmodule.forward = lambda x: forward(x, {', '.join(at_call)})" if at_call else "",
        FROZEN * config.frozen,
        imports=f"from megatron.core.tensor_parallel import ColumnParallelLinear\n{CONFIG}",
        finalized=False,
    )


FROZEN = "module.weight.requires_grad_(False)"


def _row(config: RowConfig) -> nn.Module:
    begin()
    layer: nn.Module = tp.RowParallelLinear(
        config.in_features,
        config.out_features,
        config=transformer_config(config.sequence_parallel),
        init_method=nn.init.xavier_normal_,
        bias=config.bias,
        input_is_parallel=config.input_is_parallel,
        skip_bias_add=config.skip_bias_add,
    )
    return _frozen(layer, config.frozen)


def _row_source(config: RowConfig) -> str:
    options = {name: getattr(config, name) for name in ("bias", "input_is_parallel", "skip_bias_add")}
    return script(
        config_source(config.sequence_parallel),
        "module = " + called("RowParallelLinear", config.in_features, config.out_features, **INITIAL, **options),
        FROZEN * config.frozen,
        imports=f"from megatron.core.tensor_parallel import RowParallelLinear\n{CONFIG}",
    )


def _frozen(layer: nn.Module, frozen: bool) -> nn.Module:
    layer.get_parameter("weight").requires_grad_(not frozen)
    return layer


def _column_input(config: ColumnConfig) -> PlacementLike:
    if config.unreduced and not config.sequence_parallel:
        return Placement(Replicate(), Partial())
    return along_sequence(config.sequence_parallel)


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
        config=transformer_config(deterministic_mode=config.deterministic),
    )
    return layer


def _embedding_source(config: EmbeddingConfig) -> str:
    options = {"reduce_scatter_embeddings": config.reduce_scatter}
    return script(
        config_source(deterministic_mode=config.deterministic),
        "module = " + called("VocabParallelEmbedding", config.vocab, config.hidden, **INITIAL, **options),
        imports=f"from megatron.core.tensor_parallel import VocabParallelEmbedding\n{CONFIG}",
        finalized=False,
    )


SUBJECTS = {
    "column_parallel_linear": Subject(
        name="megatron_core.column_parallel_linear",
        reference=ReferenceLinear,
        parallel=ParallelColumn,
        configs=column_configs,
        inputs=lambda c: {"x": Input((c.seq, c.batch, c.in_features), placement=_column_input(c))},
        placements={"*": Shard(0)},
        outputs=_column_outputs,
        rejects=lambda c, world_size: c.out_features % world_size != 0,
        refusal=AssertionError,
        exact=True,
        script=_column_source,
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
        script=_row_source,
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
        script=_embedding_source,
        **COMMON,
    ),
}
