"""DeepSpeed's embeddings, cut by vocabulary or by hidden size, alone and tied to the output head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepspeed.module_inject import layers
from hypothesis import strategies as st
from torch import Tensor, nn

from tpverify.adapters.deepspeed.environment import COMMON, WITHOUT_AUTOGRAD, as_called, begin, program
from tpverify.adapters.deepspeed.linear import COLUMNS, LAST, ROWS
from tpverify.sharding import Replicate
from tpverify.subjects.drawing import activations, uneven_sizes
from tpverify.subjects.subject import Input, Subject, Vocabulary


@dataclass(frozen=True)
class EmbeddingConfig:
    """Sizes, elements, and options of a table over ids [seq, batch].

    Attributes:
        columns: the table is cut by hidden size, not by vocabulary.
        tied: an output head shares the table, and logits are returned.
        training: the mode of AutoTP; else the layer is called without autograd.
    """

    seq: int = 1
    batch: int = 1
    vocab: int = 1
    hidden: int = 1
    columns: bool = False
    tied: bool = False
    padding_idx: int | None = None
    scale_grad_by_freq: bool = False
    bias: bool = True
    training: bool = True

    @property
    def options(self) -> dict[str, Any]:
        """Of ``nn.Embedding``, those that are not the default."""
        options = {"padding_idx": self.padding_idx, "scale_grad_by_freq": self.scale_grad_by_freq}
        return {name: value for name, value in options.items() if value not in (None, False)}


@st.composite
def embedding_configs(draw: st.DrawFn, world_size: int) -> EmbeddingConfig:
    """All options; any size, also less than one row or column per rank."""
    seq, batch, _ = draw(activations(world_size, False, ()))
    columns, tied, bias = (draw(st.booleans()) for _ in range(3))
    cut, other = draw(uneven_sizes(world_size)), draw(st.integers(1, 6))
    vocab, hidden = (other, cut) if columns else (cut, other)
    return EmbeddingConfig(
        seq=seq,
        batch=batch,
        vocab=vocab,
        hidden=hidden,
        columns=columns,
        tied=tied,
        padding_idx=draw(st.none() | st.integers(0, vocab - 1)),
        scale_grad_by_freq=columns and not tied and draw(st.booleans()),  # by vocabulary it is refused
        bias=bias,
        training=draw(st.sampled_from([True, True, True, False])),
    )


class Tied(nn.Module):
    """Ids [s, b] -> logits [s, b, vocab], or this rank's, by one table."""

    def __init__(self, embedding: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding
        self.head = head

    def forward(self, ids: Tensor) -> Tensor:
        """Looks up, and projects back."""
        logits: Tensor = self.head(self.embedding(ids))
        return logits


def _head(config: EmbeddingConfig, embedding: nn.Module) -> nn.Module:
    head = nn.Linear(config.hidden, config.vocab, config.bias)
    head.register_parameter("weight", embedding.get_parameter("weight"))
    return head


def _reference(config: EmbeddingConfig) -> nn.Module:
    embedding = nn.Embedding(config.vocab, config.hidden, **config.options)
    return as_called(Tied(embedding, _head(config, embedding)) if config.tied else embedding, config.training)


def _parallel(config: EmbeddingConfig) -> nn.Module:
    group = begin(config.training)
    embedding = nn.Embedding(config.vocab, config.hidden, **config.options)
    module: nn.Module
    if not config.tied:
        module = (layers.HiddenParallelEmbedding if config.columns else layers.VocabParallelEmbedding)(embedding, group)
    elif config.columns:
        head = layers.LinearAllreduceWithReplicatedInput(_head(config, embedding), group)
        module = Tied(layers.HiddenParallelEmbedding(embedding, group, tied_row_parallel_linear=head), head)
    else:
        head = layers.VocabParallelLinear(_head(config, embedding), group)
        module = Tied(layers.VocabParallelEmbedding(embedding, group, tied_vocab_parallel_linear=head), head)
    return as_called(module, config.training)


TIED = """class Tied(torch.nn.Module):
    def __init__(self, embedding, head):
        super().__init__()
        self.embedding, self.head = embedding, head

    def forward(self, ids):
        return self.head(self.embedding(ids))

"""


def _source(config: EmbeddingConfig) -> str:
    options = "".join(f", {name}={value!r}" for name, value in config.options.items())
    layer = "HiddenParallelEmbedding" if config.columns else "VocabParallelEmbedding"
    statements = [f"embedding = torch.nn.Embedding({config.vocab}, {config.hidden}{options})"]
    if config.tied:
        kind, name = ("LinearAllreduceWithReplicatedInput", "row") if config.columns else ("VocabParallelLinear", "vocab")
        statements += [
            f"head = torch.nn.Linear({config.hidden}, {config.vocab}, bias={config.bias})",
            "head.weight = embedding.weight",
            f"head = layers.{kind}(head, dist.group.WORLD)",
            f"module = Tied(layers.{layer}(embedding, dist.group.WORLD, tied_{name}_parallel_linear=head), head)",
        ]
    else:
        statements += [f"module = layers.{layer}(embedding, dist.group.WORLD)"]
    if not config.training:
        statements += WITHOUT_AUTOGRAD
    return (TIED if config.tied else "") + program(*statements, training=config.training)


def _vocabulary(config: EmbeddingConfig) -> Vocabulary:
    return Vocabulary(config.vocab, parameters=() if config.columns else ("*weight",), ids="ids")


SUBJECTS = {
    "embedding": Subject(
        name="deepspeed.embedding",
        reference=_reference,
        parallel=_parallel,
        configs=embedding_configs,
        inputs=lambda c: {"ids": Input((c.seq, c.batch), kind="integers", high=c.vocab)},
        placements=lambda c: {"*weight": COLUMNS, "*": Replicate()} if c.columns else {"*": ROWS},
        outputs=lambda c: LAST if c.tied and not c.columns else Replicate(),
        rejects=lambda c, world_size: c.tied and not c.columns and c.vocab < world_size,
        vocabulary=_vocabulary,
        script=_source,
        **COMMON,
    ),
}
