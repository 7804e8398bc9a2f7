"""Planted bugs of the vocabulary-parallel lookup: who owns an id, what the others add, and how the table is padded."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tpverify.mutants.mappings import mapping, same, summed
from tpverify.mutants.mutant import mutant
from tpverify.subjects.embedding import VocabParallelEmbedding
from tpverify.subjects.embedding import vocab_parallel_embedding as embedding
from tpverify.subjects.mappings import Group, apply, gather_from_region, reduce_from_region


def reduced_by(op: Any, x: Tensor, group: Group) -> Tensor:
    """all_reduce by any operation / identity; shapes: any -> the same."""
    return mapping(x, lambda partial: summed(partial, group, op), same) if group.size() > 1 else x


ONE_ID = "hand-written vocabulary masks: single ids, first or last of a shard, are read as zero or as another id"


@mutant("vocabulary", embedding, "vocabulary", origin=ONE_ID, module="*", ranks="", diagnosis="contributes nothing to")
class IdsFirstOfShardUnowned(VocabParallelEmbedding):
    """Ids are owned from above the start of a shard instead of from its start, so that nobody looks up the first id of a shard."""

    def _owned(self, ids: Tensor) -> Tensor:
        return super()._owned(ids) & ((ids != self.shard.start) | (self.group.size() == 1))


@mutant("vocabulary", embedding, "vocabulary", origin=ONE_ID, ranks="", diagnosis="contributes nothing to")
class IdsLastOfShardUnowned(VocabParallelEmbedding):
    """A shard's stop is taken for its last id minus one: nobody looks up the last id of a shard."""

    def _owned(self, ids: Tensor) -> Tensor:
        return super()._owned(ids) & ((ids != self.shard.stop - 1) | (self.group.size() == 1))


@mutant("vocabulary", embedding, "vocabulary", origin=ONE_ID, ranks="", diagnosis="exactly zero for ids of other ranks")
class IdsOfTheNextShardOwned(VocabParallelEmbedding):
    """The stop of a shard counts as an id of its own: two ranks contribute to the first id of a shard, one of them from a row too far."""

    def _owned(self, ids: Tensor) -> Tensor:
        return (ids >= self.shard.start) & (ids <= self.shard.stop)

    def _rows(self, ids: Tensor, owned: Tensor) -> Tensor:
        beyond = F.pad(self.weight, (0, 0, 0, 1), value=1.0)  # what kernels without a bounds check find there
        return F.embedding(torch.where(owned, ids - self.shard.start, 0), beyond)


@mutant(
    "vocabulary",
    embedding,
    "vocabulary",
    origin="first ports of the Megatron lookup: an embedding that shifts foreign ids to row 0 and forgets to blank what it finds there",
    ranks="",
    diagnosis="the padding rows of weight.grad",
)
class ForeignRowsNotZeroed(VocabParallelEmbedding):
    """Ids of other ranks are looked up in row 0, and the rows found there go into the sum."""

    def _mask(self, rows: Tensor, owned: Tensor) -> Tensor:
        return rows


@mutant(
    "vocabulary",
    embedding,
    "parameter-gradient",
    origin="lookups that blank foreign rows under no_grad or in place on .data: values are right, and row 0 trains on everybody's tokens",
    module="weight.grad",
    ranks="",
)
class ForeignRowsTrained(VocabParallelEmbedding):
    """Rows of foreign ids are subtracted again as constants: values are right, but row 0 of a rank gets the gradient of all foreign ids."""

    def _mask(self, rows: Tensor, owned: Tensor) -> Tensor:
        return rows - rows.detach() * ~owned.unsqueeze(-1)


@mutant(
    "vocabulary",
    embedding,
    "vocabulary",
    origin="lookups that leave the padded tail of a table in reach of foreign ids: padding rows leave zero after the first step",
    module="weight.grad",
    ranks="",
    diagnosis="the padding rows of weight.grad",
)
class PaddedRowsTrained(VocabParallelEmbedding):
    """Foreign ids are looked up in the last row, padding on some ranks, and only their values are blanked: padding rows are trained."""

    def _rows(self, ids: Tensor, owned: Tensor) -> Tensor:
        table = self.weight if self.shard.rows else F.pad(self.weight, (0, 0, 0, 1))
        return F.embedding(torch.where(owned, ids - self.shard.start, len(table) - 1), table)

    def _mask(self, rows: Tensor, owned: Tensor) -> Tensor:
        return rows - rows.detach() * ~owned.unsqueeze(-1)


@mutant(
    "vocabulary",
    embedding,
    "vocabulary",
    origin="TensorRT-LLM and others: ids that are negative after the shift by a shard's start pass, and wrap to the table's end",
    ranks="",
    diagnosis="the padding rows of weight.grad",
)
class NegativeIndexWraps(VocabParallelEmbedding):
    """Only ids beyond the shard are blanked; those before it are negative indices, and give rows counted from the table's end."""

    def _rows(self, ids: Tensor, owned: Tensor) -> Tensor:
        rows = self.shard.rows
        return self.weight[(ids - self.shard.start).clamp(-rows, rows - 1)] if rows else super()._rows(ids, owned)

    def _mask(self, rows: Tensor, owned: Tensor) -> Tensor:
        return rows.masked_fill(~(owned | self._before).unsqueeze(-1), 0.0)

    def _owned(self, ids: Tensor) -> Tensor:
        self._before = ids < self.shard.start
        return super()._owned(ids)


@mutant(
    "vocabulary",
    embedding,
    "vocabulary",
    origin="vocabularies that do not divide, in loaders of Hugging Face style: the last rows of the checkpoint belong to no rank",
    ranks="",
    diagnosis="contributes nothing to",
)
class VocabularyRoundedDown(VocabParallelEmbedding):
    """Every rank owns vocab // world_size ids (floor where ceil is meant): the remainder belongs to nobody."""

    def _owned(self, ids: Tensor) -> Tensor:
        return super()._owned(ids) & (ids < self.shard.start + self.vocab // self.group.size())


@mutant(
    "vocabulary",
    embedding,
    "vocabulary",
    origin="SGLang, vLLM: embedding and loader pad by different multiples, so that ids and rows no longer belong together",
    diagnosis="contributes nothing to",
    ranks="",
)
class StartOfUnpaddedShard(VocabParallelEmbedding):
    """Rows are counted from the start that the shard had without padding: ids of all ranks but the first read rows further down."""

    def _rows(self, ids: Tensor, owned: Tensor) -> Tensor:
        start = self.group.rank() * -(-self.vocab // self.group.size())
        local = (ids - start).clamp(0, max(0, self.shard.rows - 1))
        return F.embedding(local, self.weight) if self.shard.rows else super()._rows(ids, owned)


@mutant(
    "conditional",
    embedding,
    "vocabulary",
    origin="padding computed only where the vocabulary does not divide: round vocabularies are read in another layout",
    ranks="",
)
class PaddingSkippedIfDivisible(VocabParallelEmbedding):
    """Where the vocabulary divides by the ranks it is cut without padding, although the table is padded to its multiple all the same."""

    def _owned(self, ids: Tensor) -> Tensor:
        part, rest = divmod(self.vocab, self.group.size())
        if rest or part > self.shard.rows:
            return super()._owned(ids)
        return (ids >= self.group.rank() * part) & (ids < (self.group.rank() + 1) * part)

    def _rows(self, ids: Tensor, owned: Tensor) -> Tensor:
        part, rest = divmod(self.vocab, self.group.size())
        if rest or part > self.shard.rows:
            return super()._rows(ids, owned)
        return F.embedding(torch.where(owned, ids - self.group.rank() * part, 0), self.weight)


@mutant(
    "conditional",
    embedding,
    "vocabulary",
    origin="MinivLLM: the mask of foreign ids is unsqueezed at the wrong place; an error for most shapes, silent where two sizes coincide",
    ranks="",
    diagnosis="exactly zero for ids of other ranks",
)
class MaskAlongHidden(VocabParallelEmbedding):
    """The mask of [s, b] ids is broadcast as [s, 1, b]: it runs along the hidden dimension if that is as large as the batch."""

    def _mask(self, rows: Tensor, owned: Tensor) -> Tensor:
        if rows.shape[1] != rows.shape[2]:
            return super()._mask(rows, owned)
        return rows.masked_fill(~owned.unsqueeze(1), 0.0)


class _RepeatedRowsOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.size = len(weight)
        return weight[rows]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        rows: Tensor = ctx.saved_tensors[0]
        table = grad.new_zeros((ctx.size, grad.shape[-1]))
        table[rows.flatten()] = grad.flatten(0, -2)
        return table, None


@mutant(
    "vocabulary",
    embedding,
    "parameter-gradient",
    origin="hand-written embedding backward passes: index assignment where addition is meant, unseen with all ids different",
    module="weight.grad",
    ranks="",
)
class RepeatedIdsTrainedOnce(VocabParallelEmbedding):
    """Backward assigns the rows' gradients instead of adding them: an id that occurs twice is trained by one of its occurrences."""

    def _rows(self, ids: Tensor, owned: Tensor) -> Tensor:
        if not self.shard.rows or self.group.size() == 1:
            return super()._rows(ids, owned)
        return apply(_RepeatedRowsOnce, F.pad(self.weight, (0, 0, 0, 1)), torch.where(owned, ids - self.shard.start, self.shard.rows))


@mutant(
    "wrong reduce op",
    embedding,
    "forward",
    origin="XLA and compiler back ends that combine shards by a hard-coded reduction: all negative activations come out as zero",
    diagnosis="a wrong reduce op",
    module="output",
)
class RowsCombinedByMaximum(VocabParallelEmbedding):
    """The masked rows are combined by their maximum: right for positive numbers, while negative ones lose to the others' zeros."""

    def _reduce(self, partial: Tensor) -> Tensor:
        if self.sequence_parallel or self.group.size() == 1:
            return super()._reduce(partial)
        return reduced_by(dist.ReduceOp.MAX, partial, self.group)


@mutant(
    "wrong reduce op",
    embedding,
    "forward",
    origin="layers that average where they should sum, as data-parallel helpers do: activations 1 / TP of what they were",
    diagnosis="one division too many",
    module="output",
)
class RowsAveraged(VocabParallelEmbedding):
    """The rows are averaged over the ranks, of which only one contributes."""

    def _reduce(self, partial: Tensor) -> Tensor:
        return super()._reduce(partial) / self.group.size()


@mutant(
    "doubled reduction",
    embedding,
    "forward",
    origin="sequence parallelism added to a lookup that already reduces: hidden states TP times too large from the first layer on",
    diagnosis="one reduction too many",
    module="output",
)
class SummedThenScattered(VocabParallelEmbedding):
    """Under sequence parallelism the rows are summed by an all_reduce, and then by the reduce_scatter once more."""

    def _reduce(self, partial: Tensor) -> Tensor:
        return super()._reduce(reduce_from_region(partial, self.group) if self.sequence_parallel else partial)


@mutant(
    "sequence parallel",
    embedding,
    "parameter-gradient",
    origin="Megatron-style embeddings that split the sequence by a plain slice: forward is right, and most tokens do not train the table",
    module="weight.grad",
    ranks="",
)
class SequenceSliced(VocabParallelEmbedding):
    """Under sequence parallelism the whole sequence is reduced and sliced, and nobody gathers the gradient of the other slices."""

    def _reduce(self, partial: Tensor) -> Tensor:
        whole = reduce_from_region(partial, self.group)
        if not self.sequence_parallel:
            return whole
        part = len(whole) // self.group.size()
        return whole.narrow(0, self.group.rank() * part, part)


@mutant(
    "sequence parallel",
    embedding,
    "forward",
    origin="sequence scatter with a rank that defaults to 0: every rank works on the first tokens",
    diagnosis="parts taken in the wrong order",
    module="output",
    ranks="all but first",
)
class FirstTokensEverywhere(VocabParallelEmbedding):
    """Under sequence parallelism every rank keeps the first part of the reduced sequence."""

    def _reduce(self, partial: Tensor) -> Tensor:
        if not self.sequence_parallel:
            return super()._reduce(partial)
        whole = reduce_from_region(partial, self.group)
        return whole.narrow(0, 0, len(whole) // self.group.size())


@mutant(
    "waste",
    embedding,
    "communication",
    origin="embeddings that gather their table at every step: correct, and slower by the size of the vocabulary",
    module="",
    diagnosis="a wrong kind of collective",
)
class TableGathered(VocabParallelEmbedding):
    """The ranks' tables are joined and looked up whole, instead of summing the rows that each rank looked up."""

    def forward(self, ids: Tensor) -> Tensor:
        """The rows of ``ids``."""
        size = self.group.size()
        if self.sequence_parallel or self.vocab % size or size == 1:
            return super().forward(ids)
        return F.embedding(ids, gather_from_region(self.weight, 0, [self.shard.rows] * size, self.group))


@mutant(
    "conditional",
    embedding,
    "communication",
    origin="ranks that skip empty work: a hang as soon as the vocabulary is smaller than the number of ranks",
    module="",
    ranks="",
)
class RankWithoutIdsLeaves(VocabParallelEmbedding):
    """A rank that owns no ids sees nothing to do, and takes no part in the reduction either."""

    def _reduce(self, partial: Tensor) -> Tensor:
        if self.shard.start < self.shard.stop or self.group.size() == 1:
            return super()._reduce(partial)
        return partial[: len(partial) // self.group.size()] if self.sequence_parallel else partial


@mutant(
    "state",
    embedding,
    "forward",
    origin="lookups that keep the mask of the first micro-batch: training goes wrong from the second one on",
    diagnosis="stale",
    module="output*",
    ranks="",
)
class MaskOfTheFirstCall(VocabParallelEmbedding):
    """The mask of foreign ids is computed in the first call, and kept for later calls of the same shape."""

    def _mask(self, rows: Tensor, owned: Tensor) -> Tensor:
        kept: Tensor | None = getattr(self, "_kept", None)
        if kept is None or kept.shape != owned.shape:
            kept = self._kept = owned
        return super()._mask(rows, kept)


@mutant(
    "precision",
    embedding,
    "forward",
    origin="automatic mixed precision and pipeline transports that cast everything they carry: ids above 256 come out rounded",
)
class IdsThroughBfloat16(VocabParallelEmbedding):
    """Ids travel in bfloat16, in which whole numbers are exact up to 256 only."""

    def _owned(self, ids: Tensor) -> Tensor:
        return super()._owned(ids.bfloat16().long())

    def _rows(self, ids: Tensor, owned: Tensor) -> Tensor:
        return super()._rows(ids.bfloat16().long(), owned)


@mutant(
    "vocabulary",
    embedding,
    "vocabulary",
    origin="a variant that is found in many repositories, and right",
    equivalent="A row times 0.0 is zero, as is a blanked one, for every table without infinities; its gradient is zero as well.",
)
class MaskByMultiplication(VocabParallelEmbedding):
    """Rows of foreign ids are multiplied by zero instead of being replaced by it."""

    def _mask(self, rows: Tensor, owned: Tensor) -> Tensor:
        return rows * owned.unsqueeze(-1)
