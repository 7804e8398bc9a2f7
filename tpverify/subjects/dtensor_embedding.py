"""Subject: ``parallelize_module`` on an embedding, cut by ids (RowwiseParallel) or by features (ColwiseParallel)."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from tpverify.sharding import PlacementLike, Replicate, Shard
from tpverify.subjects.drawing import activations, uneven_sizes
from tpverify.subjects.dtensor import LAYOUTS, padded_elements, quietly, take_dtensor, tp_mesh
from tpverify.subjects.subject import Collective, Input, Subject, Vocabulary

ID_LAYOUTS: dict[str, Replicate | Shard] = {"replicate": Replicate(), "batch": Shard(0), "sequence": Shard(1)}
"""Of ids [batch, seq]."""


@dataclass(frozen=True)
class DTensorEmbeddingConfig:
    """Sizes, elements, and options of an embedding of ids [batch, seq].

    Attributes:
        style: ``row``: each rank holds some ids; ``column``: each rank holds some features of every id.
        input: layout of the ids that the caller hands over: ``replicate``, ``batch`` or ``sequence``.
        output: layout that the caller wants back: ``replicate``, ``sequence`` or ``hidden``.
        dtensor_input: the caller hands over a DTensor, so that its sharded dimension need not divide.
        padding: ``padding_idx``, whose row gets no gradient; -1 = none.
        by_frequency: ``scale_grad_by_freq``.
    """

    batch: int = 1
    seq: int = 1
    vocab: int = 1
    hidden: int = 1
    style: str = "row"
    input: str = "replicate"
    output: str = "replicate"
    dtensor_input: bool = False
    local_output: bool = True
    padding: int = -1
    by_frequency: bool = False


def _reference(config: DTensorEmbeddingConfig) -> nn.Embedding:
    padding = None if config.padding < 0 else config.padding
    return nn.Embedding(config.vocab, config.hidden, padding_idx=padding, scale_grad_by_freq=config.by_frequency)


def _parallel(config: DTensorEmbeddingConfig) -> nn.Module:
    module, mesh = _reference(config), tp_mesh()
    if config.dtensor_input:
        take_dtensor(module, mesh, ID_LAYOUTS[config.input], (config.batch, config.seq))
    return parallelize_module(module, mesh, embedding_style(config))


def embedding_style(config: DTensorEmbeddingConfig) -> ParallelStyle:
    """The style for the embedding."""
    style = RowwiseParallel if config.style == "row" else ColwiseParallel
    return style(input_layouts=ID_LAYOUTS[config.input], output_layouts=LAYOUTS[config.output], use_local_output=config.local_output)


def empty_vocabulary_shard(vocab: int, world_size: int) -> bool:
    """Whether ``torch.chunk`` leaves a rank without ids although there are as many ids as ranks.

    Released DTensor then looks ids up in an empty table, and the rank raises while the others wait. With fewer ids than ranks
    it gathers the table instead.
    """
    part = -(-vocab // world_size)
    return vocab >= world_size and part * (world_size - 1) >= vocab


def fitting_vocabularies(world_size: int, largest: int = 4, least: int = 1) -> st.SearchStrategy[int]:
    """Numbers of ids, up to ``largest`` per rank, without those that :func:`empty_vocabulary_shard` is about."""
    sizes = [size for size in range(least, largest * world_size + 1) if not empty_vocabulary_shard(size, world_size)]
    return st.sampled_from(sizes)


@st.composite
def dtensor_embedding_configs(draw: st.DrawFn, world_size: int) -> DTensorEmbeddingConfig:
    """All options, and uneven sizes wherever DTensors know the whole shape."""
    given, dtensor_input, style = draw(st.sampled_from(list(ID_LAYOUTS))), draw(st.booleans()), draw(st.sampled_from(["row", "column"]))
    plain = "" if dtensor_input else given
    seq, batch, _ = draw(activations(world_size, plain == "sequence", ()))
    vocab = draw(fitting_vocabularies(world_size) if style == "row" else uneven_sizes(world_size, 4))
    return DTensorEmbeddingConfig(
        batch=batch * world_size if plain == "batch" else batch,
        seq=seq,
        vocab=vocab,
        hidden=draw(uneven_sizes(world_size)),
        style=style,
        input=given,
        output=draw(st.sampled_from(list(LAYOUTS))),
        dtensor_input=dtensor_input,
        local_output=draw(st.booleans()),
        padding=draw(st.integers(-1, vocab - 1)),
        by_frequency=draw(st.booleans()),
    )


def _communication(config: DTensorEmbeddingConfig, world_size: int) -> list[Collective] | None:
    if world_size == 1:
        return []
    # A table with less than one row or column for each rank is gathered; how features become tokens depends on the backend.
    cut = config.vocab if config.style == "row" else config.hidden
    if cut < world_size or (config.style == "column" and config.output == "sequence"):
        return None
    shape = (config.batch, config.seq, config.hidden)
    wanted = padded_elements(shape, LAYOUTS[config.output], world_size)
    messages = []
    if config.input != "replicate":
        ids = padded_elements((config.batch, config.seq), ID_LAYOUTS[config.input], world_size)
        messages.append(Collective("all_gather", "forward", "*", 1, ids))
    if config.style == "row":
        if config.output == "replicate":
            messages.append(Collective("all_reduce", "forward", "*", 1, prod(shape)))
        else:
            messages.append(Collective("reduce_scatter", "forward", "*", 1, wanted))
            messages.append(Collective("all_gather", "backward", "*", 1, wanted))
    elif config.output == "replicate":
        messages.append(Collective("all_gather", "forward", "*", 1, padded_elements(shape, LAYOUTS["hidden"], world_size)))
    return messages


def _placements(config: DTensorEmbeddingConfig) -> dict[str, PlacementLike]:
    return {"weight": Shard(0 if config.style == "row" else 1)}


def _vocabulary(config: DTensorEmbeddingConfig) -> Vocabulary:
    # What travels in parts of the sequence or of the features is in another order than the ids.
    whole = config.input == config.output == "replicate"
    return Vocabulary(config.vocab, parameters=("weight",), ids="ids", lookup="*" if whole else "")


dtensor_embedding = Subject(
    name="dtensor_embedding",
    reference=_reference,
    parallel=_parallel,
    configs=dtensor_embedding_configs,
    inputs=lambda c: {"ids": Input((c.batch, c.seq), kind="integers", high=c.vocab, placement=ID_LAYOUTS[c.input])},
    placements=_placements,
    outputs=lambda c: LAYOUTS[c.output],
    communication=_communication,
    context=lambda c: quietly(),
    vocabulary=_vocabulary,
    exact=lambda c: not c.by_frequency,
    subgroups=True,
)
