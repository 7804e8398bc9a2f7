"""VocabParallelEmbedding: which ids a rank owns, and a lookup in which exactly one rank contributes each row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from tpverify.current_group import tp_group
from tpverify.sharding import PaddedShard, PlacementLike, Replicate, Shard, UnevenShard
from tpverify.subjects.drawing import activations, vocabularies
from tpverify.subjects.mappings import Group, reduce_from_region, reduce_scatter_sequence
from tpverify.subjects.parameters import INIT_STD, initial_weight
from tpverify.subjects.subject import Collective, Input, Subject, Vocabulary


@dataclass(frozen=True)
class VocabShard:
    """One rank's part of the vocabulary.

    Attributes:
        start, stop: the ids that this rank owns, half-open; empty if they are equal.
        rows: rows that it stores: the ids it owns, then padding.
    """

    start: int
    stop: int
    rows: int


def vocab_shard(vocab: int, multiple: int, rank: int, world_size: int) -> VocabShard:
    """The part of ``vocab`` ids that ``rank`` holds.

    Args:
        multiple: pad the vocabulary to a multiple of ``multiple * world_size`` rows, so that all ranks store equally many;
            0: no padding, ceil-sized parts as ``torch.chunk``, the last ones smaller or empty.
    """
    part = -(-vocab // (multiple * world_size)) * multiple if multiple else -(-vocab // world_size)
    start, stop = min(vocab, rank * part), min(vocab, (rank + 1) * part)
    return VocabShard(start, stop, part if multiple else stop - start)


def vocab_weight(vocab: int, hidden: int, shard: VocabShard, std: float = INIT_STD) -> nn.Parameter:
    """This rank's rows of a [vocab, hidden] table; padding is zero."""
    owned = initial_weight(vocab, hidden, std, 0, [range(shard.start, shard.stop)])
    return nn.Parameter(F.pad(owned.detach(), (0, 0, 0, shard.rows - len(owned))))


def check_ids(ids: Tensor, vocab: int, name: str) -> None:
    """Refuse ids that no rank owns; a masked lookup would return zeros for them.

    Raises:
        IndexError: an id lies outside ``[0, vocab)``; padding rows are not ids.
    """
    outside = (ids < 0) | (ids >= vocab)
    if bool(outside.any()):
        raise IndexError(f"Expected {name} to lie in [0, {vocab}) but got {int(ids[outside][0])}")


class VocabParallelEmbedding(nn.Module):
    """Embedding with the ids cut over the ranks of ``group``: look up the ids it owns, zero elsewhere, then one reduction.

    Args:
        multiple: see :func:`vocab_shard`.
        sequence_parallel: return this rank's part of the sequence, dimension 0.

    Shapes: ids [s, b] -> [s, b, hidden], or [s / world_size, b, hidden] under sequence parallelism.

    Raises:
        IndexError: an id is not in the vocabulary (in ``forward``).
    """

    def __init__(self, vocab: int, hidden: int, *, group: Group, multiple: int = 1, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.vocab, self.group, self.sequence_parallel = vocab, group, sequence_parallel
        self.shard = vocab_shard(vocab, multiple, group.rank(), group.size())
        self.weight = vocab_weight(vocab, hidden, self.shard)

    def forward(self, ids: Tensor) -> Tensor:
        """The rows of ``ids``."""
        check_ids(ids, self.vocab, "ids")
        owned = self._owned(ids)
        return self._reduce(self._mask(self._rows(ids, owned), owned))

    def _owned(self, ids: Tensor) -> Tensor:
        """Which ids this rank looks up."""
        return (ids >= self.shard.start) & (ids < self.shard.stop)

    def _rows(self, ids: Tensor, owned: Tensor) -> Tensor:
        """The rows of the ids that it owns, any row for the others."""
        table = self.weight if self.shard.rows else F.pad(self.weight, (0, 0, 0, 1))  # an empty shard needs a row to mask
        return F.embedding(torch.where(owned, ids - self.shard.start, 0), table)

    def _mask(self, rows: Tensor, owned: Tensor) -> Tensor:
        """Zeros for the ids of others."""
        return rows.masked_fill(~owned.unsqueeze(-1), 0.0)

    def _reduce(self, partial: Tensor) -> Tensor:
        """The whole rows, each from the one rank that owns it."""
        return reduce_scatter_sequence(partial, self.group) if self.sequence_parallel else reduce_from_region(partial, self.group)


@dataclass(frozen=True)
class VocabParallelEmbeddingConfig:
    """Sizes, elements, and options of an embedding; ``multiple=0`` leaves the vocabulary uneven."""

    seq: int = 1
    batch: int = 1
    vocab: int = 1
    hidden: int = 1
    multiple: int = 1
    sequence_parallel: bool = False


def vocab_placement(dim: int, multiple: int) -> PlacementLike:
    """Placement of a tensor whose dimension ``dim`` runs over the ids."""
    return PaddedShard(dim, multiple) if multiple else UnevenShard(dim, "chunk")


vocab_multiples: st.SearchStrategy[int] = st.sampled_from([1, 0, 2, 3])


@st.composite
def vocab_parallel_embedding_configs(draw: st.DrawFn, world_size: int) -> VocabParallelEmbeddingConfig:
    """Padded and uneven vocabularies, also smaller than the world."""
    sequence_parallel = draw(st.booleans())
    seq, batch, _ = draw(activations(world_size, sequence_parallel, ()))
    return VocabParallelEmbeddingConfig(
        seq=seq,
        batch=batch,
        vocab=draw(vocabularies(world_size)),
        hidden=draw(st.integers(1, 5)),
        multiple=draw(vocab_multiples),
        sequence_parallel=sequence_parallel,
    )


def lookup_communication(elements: int, sequence_parallel: bool, module: str) -> list[Collective]:
    """The collectives of the lookup of ``elements`` numbers, seq * batch * hidden."""
    if sequence_parallel:
        return [Collective("reduce_scatter", "forward", module, 1, elements), Collective("all_gather", "backward", module, 1, elements)]
    return [Collective("all_reduce", "forward", module, 1, elements)]


def _communication(config: VocabParallelEmbeddingConfig, world_size: int) -> list[Collective]:
    if world_size == 1:
        return []
    return lookup_communication(config.seq * config.batch * config.hidden, config.sequence_parallel, "")


vocab_parallel_embedding = Subject(
    name="vocab_parallel_embedding",
    reference=lambda c: nn.Embedding(c.vocab, c.hidden),
    parallel=lambda c: VocabParallelEmbedding(
        c.vocab, c.hidden, group=tp_group(), multiple=c.multiple, sequence_parallel=c.sequence_parallel
    ),
    configs=vocab_parallel_embedding_configs,
    inputs=lambda c: {"ids": Input((c.seq, c.batch), kind="integers", high=c.vocab)},
    placements=lambda c: {"weight": vocab_placement(0, c.multiple)},
    outputs=lambda c: Shard(0) if c.sequence_parallel else Replicate(),
    communication=_communication,
    vocabulary=lambda c: Vocabulary(c.vocab, parameters=("weight",), ids="ids", lookup="*"),
    exact=True,
    subgroups=True,
)
