"""fairscale's tensor-parallel layers (``fairscale.nn.model_parallel``) beside torch's own."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from fairscale.nn.model_parallel import initialize_model_parallel, layers, mappings
from fairscale.nn.model_parallel.cross_entropy import vocab_parallel_cross_entropy
from hypothesis import strategies as st
from torch import Tensor, nn

from tpverify.adapters.regions import region_mappings
from tpverify.sharding import Replicate, Shard
from tpverify.subjects.drawing import activations, divisible
from tpverify.subjects.subject import Input, Subject, Vocabulary


def begin() -> None:
    """What a program does first."""
    initialize_model_parallel(dist.get_world_size())


COMMON: dict[str, Any] = {
    "rank_local": ("fairscale.nn.model_parallel.initialize", "fairscale.nn.model_parallel.random"),
    "refusal": AssertionError,
    "context": lambda config: contextlib.redirect_stdout(io.StringIO()),  # it announces its groups on stdout
}


PROGRAM = """
from fairscale.nn.model_parallel import initialize_model_parallel{imported}
{definitions}

def build():
    initialize_model_parallel(dist.get_world_size())
    return {module}
"""

LOSS = """from fairscale.nn.model_parallel.cross_entropy import vocab_parallel_cross_entropy


class Loss(torch.nn.Module):
    def forward(self, hidden, targets):
        logits = hidden * 1.0  # by a head
        loss = vocab_parallel_cross_entropy(logits, targets)
        return {returned}
"""

MAPPING = """

class Mapping(torch.nn.Module):
    def forward(self, x):
        return mappings.{mapping}(x.clone())
"""


def _layer_script(layer: str, *sizes: int, **options: object) -> str:
    arguments = [*map(repr, sizes), *(f"{name}={value!r}" for name, value in options.items())]
    return PROGRAM.format(imported=", layers", definitions="", module=f"layers.{layer}({', '.join(arguments)})")


@dataclass(frozen=True)
class LinearConfig:
    """Sizes, elements, and options of a linear layer over [seq, batch, in_features]; ``whole`` is what only one option leaves whole:
    the output (``gather_output``) of a column-parallel layer, the input (not ``input_is_parallel``) of a row-parallel one."""

    seq: int = 1
    batch: int = 1
    in_features: int = 1
    out_features: int = 1
    bias: bool = True
    whole: bool = False


def _linear_configs(sharded: str) -> Any:
    @st.composite
    def configs(draw: st.DrawFn, world_size: int) -> LinearConfig:
        bias, whole = draw(st.booleans()), draw(st.booleans())
        seq, batch, flaw = draw(activations(world_size, False, (sharded,)))
        cut, other = draw(divisible(world_size, flaw != "")), draw(st.integers(1, 6))
        sizes = {"in_features": other, "out_features": other, sharded: cut}
        return LinearConfig(seq=seq, batch=batch, bias=bias, whole=whole, **sizes)

    return configs


def _column(config: LinearConfig) -> nn.Module:
    begin()
    layer: nn.Module = layers.ColumnParallelLinear(config.in_features, config.out_features, config.bias, config.whole)
    return layer


def _row(config: LinearConfig) -> nn.Module:
    begin()
    layer: nn.Module = layers.RowParallelLinear(config.in_features, config.out_features, config.bias, not config.whole)
    return layer


def _linear(config: LinearConfig) -> nn.Module:
    return nn.Linear(config.in_features, config.out_features, config.bias)


@dataclass(frozen=True)
class EmbeddingConfig:
    """Sizes, elements, and the options of ``nn.Embedding``."""

    seq: int = 1
    batch: int = 1
    vocab: int = 1
    hidden: int = 1
    padding_idx: int | None = None
    max_norm: float | None = None
    norm_type: float = 2.0
    scale_grad_by_freq: bool = False


def _embedding_configs(sharded: str) -> Any:
    @st.composite
    def configs(draw: st.DrawFn, world_size: int) -> EmbeddingConfig:
        seq, batch, flaw = draw(activations(world_size, False, (sharded,)))
        cut, other = draw(divisible(world_size, flaw != "")), draw(st.integers(1, 6))
        sizes = {"vocab": other, "hidden": other, sharded: cut}
        return EmbeddingConfig(
            seq=seq,
            batch=batch,
            padding_idx=draw(st.none() | st.integers(0, sizes["vocab"] - 1)),
            max_norm=draw(st.sampled_from([None, None, 0.5, 2.0])),
            norm_type=draw(st.sampled_from([2.0, 1.0])),
            scale_grad_by_freq=draw(st.booleans()),
            **sizes,
        )

    return configs


def _table_options(config: EmbeddingConfig) -> dict[str, Any]:
    """Those that are not the default."""
    options = {name: getattr(config, name) for name in ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")}
    return {name: value for name, value in options.items() if value != getattr(EmbeddingConfig, name)}


def _table(layer: Any, config: EmbeddingConfig) -> nn.Module:
    module: nn.Module = layer(config.vocab, config.hidden, **_table_options(config))
    return module


def _parallel_table(layer: Any, config: EmbeddingConfig) -> nn.Module:
    begin()
    return _table(layer, config)


def _ids(config: EmbeddingConfig) -> dict[str, Input]:
    return {"ids": Input((config.seq, config.batch), kind="integers", high=config.vocab)}


@dataclass(frozen=True)
class CrossEntropyConfig:
    """Sizes, elements, of a loss over logits [seq, batch, vocab]; ``reuse``: the logits are looked at again after it, for an accuracy."""

    seq: int = 1
    batch: int = 1
    vocab: int = 2
    reuse: bool = False


@st.composite
def _cross_entropy_configs(draw: st.DrawFn, world_size: int) -> CrossEntropyConfig:
    seq, batch, _ = draw(activations(world_size, False, ()))
    return CrossEntropyConfig(seq, batch, max(2, draw(divisible(world_size))), draw(st.booleans()))


class ReferenceLoss(nn.Module):
    """The loss of every token, and the logits after it if they are reused."""

    def __init__(self, reuse: bool) -> None:
        super().__init__()
        self.reuse = reuse

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """[s, b, v] and [s, b] -> [s, b]."""
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)

    def forward(self, hidden: Tensor, targets: Tensor) -> Any:
        """``hidden`` are logits that a head has yet to hand over."""
        logits = hidden * 1.0
        loss = self.loss(logits, targets)
        return (loss, logits.detach()) if self.reuse else loss


class ParallelLoss(ReferenceLoss):
    """fairscale's."""

    def __init__(self, reuse: bool) -> None:
        super().__init__(reuse)
        begin()

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """[s, b, v / world_size] and [s, b] -> [s, b]."""
        loss: Tensor = vocab_parallel_cross_entropy(logits, targets)
        return loss


MAPPINGS = {
    "copy": mappings.copy_to_model_parallel_region,
    "reduce": mappings.reduce_from_model_parallel_region,
    "scatter": mappings.scatter_to_model_parallel_region,
    "gather": mappings.gather_from_model_parallel_region,
}

SUBJECTS = {
    "column_parallel_linear": Subject(
        name="fairscale.column_parallel_linear",
        reference=_linear,
        parallel=_column,
        configs=_linear_configs("out_features"),
        inputs=lambda c: {"x": Input((c.seq, c.batch, c.in_features))},
        placements={"*": Shard(0)},
        outputs=lambda c: Replicate() if c.whole else Shard(2),
        rejects=lambda c, world_size: c.out_features % world_size != 0,
        exact=True,
        script=lambda c: _layer_script("ColumnParallelLinear", c.in_features, c.out_features, bias=c.bias, gather_output=c.whole),
        **COMMON,
    ),
    "row_parallel_linear": Subject(
        name="fairscale.row_parallel_linear",
        reference=_linear,
        parallel=_row,
        configs=_linear_configs("in_features"),
        inputs=lambda c: {"x": Input((c.seq, c.batch, c.in_features), placement=Replicate() if c.whole else Shard(2))},
        placements={"weight": Shard(1), "*": Replicate()},
        rejects=lambda c, world_size: c.in_features % world_size != 0,
        exact=True,
        script=lambda c: _layer_script("RowParallelLinear", c.in_features, c.out_features, bias=c.bias, input_is_parallel=not c.whole),
        **COMMON,
    ),
    "vocab_parallel_embedding": Subject(
        name="fairscale.vocab_parallel_embedding",
        reference=lambda c: _table(nn.Embedding, c),
        parallel=lambda c: _parallel_table(layers.VocabParallelEmbedding, c),
        configs=_embedding_configs("vocab"),
        inputs=_ids,
        placements={"weight": Shard(0)},
        rejects=lambda c, world_size: c.vocab % world_size != 0,
        vocabulary=lambda c: Vocabulary(c.vocab, parameters=("weight",), ids="ids"),
        script=lambda c: _layer_script("VocabParallelEmbedding", c.vocab, c.hidden, **_table_options(c)),
        **COMMON,
    ),
    "parallel_embedding": Subject(
        name="fairscale.parallel_embedding",
        reference=lambda c: _table(nn.Embedding, c),
        parallel=lambda c: _parallel_table(layers.ParallelEmbedding, c),
        configs=_embedding_configs("hidden"),
        inputs=_ids,
        placements={"weight": Shard(1)},
        rejects=lambda c, world_size: c.hidden % world_size != 0,
        script=lambda c: _layer_script("ParallelEmbedding", c.vocab, c.hidden, **_table_options(c)),
        **COMMON,
    ),
    "vocab_parallel_cross_entropy": Subject(
        name="fairscale.vocab_parallel_cross_entropy",
        reference=lambda c: ReferenceLoss(c.reuse),
        parallel=lambda c: ParallelLoss(c.reuse),
        configs=_cross_entropy_configs,
        inputs=lambda c: {
            "logits": Input((c.seq, c.batch, c.vocab), placement=Shard(2)),
            "targets": Input((c.seq, c.batch), kind="integers", high=c.vocab),
        },
        outputs=lambda c: (Replicate(), Shard(2)) if c.reuse else Replicate(),
        vocabulary=lambda c: Vocabulary(c.vocab, targets="targets", logits="logits"),
        script=lambda c: PROGRAM.format(
            imported="", definitions=LOSS.format(returned="(loss, logits.detach())" if c.reuse else "loss"), module="Loss()"
        ),
        **COMMON,
    ),
    "mappings": region_mappings(
        "fairscale.mappings",
        MAPPINGS,
        begin,
        script=lambda c: PROGRAM.format(
            imported=", mappings", definitions=MAPPING.format(mapping=MAPPINGS[c.mapping].__name__), module="Mapping()"
        ),
        **COMMON,
    ),
}
