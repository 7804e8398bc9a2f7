"""Planted bugs that show only if two TP groups share a world: default groups, and ranks counted across groups."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from tpverify.mutants.mutant import mutant
from tpverify.subjects.attention import QKVParallelLinear
from tpverify.subjects.attention_subject import attention
from tpverify.subjects.cross_entropy import VocabParallelCrossEntropy
from tpverify.subjects.cross_entropy_subject import vocab_parallel_cross_entropy as cross_entropy
from tpverify.subjects.embedding import VocabParallelEmbedding
from tpverify.subjects.embedding import vocab_parallel_embedding as embedding
from tpverify.subjects.language_model import ParallelGPT
from tpverify.subjects.language_model_subjects import gpt
from tpverify.subjects.mappings import Group, copy_to_region, reduce_from_region

DEFAULT = "Megatron-LM and many more: a code path that falls back to the default group; invisible while the world is the TP group"


def world() -> Group:
    """The default group."""
    group = dist.group.WORLD
    assert group is not None
    return group


@mutant("isolation", embedding, "forward", origin=DEFAULT, diagnosis="a wrong group", module="output")
class RowsSummedInTheWorld(VocabParallelEmbedding):
    """Rows are summed over the world: two TP groups get the sum of both groups' embeddings."""

    def _reduce(self, partial: Tensor) -> Tensor:
        return super()._reduce(partial) if self.sequence_parallel else reduce_from_region(partial, world())


@mutant(
    "isolation",
    embedding,
    "forward",
    origin="Megatron-LM: a batch broadcast from rank 0 of the world instead of that of the TP group",
    module="output",
    ranks="all",
    diagnosis="a wrong group",
)
class IdsFromTheFirstRankOfTheWorld(VocabParallelEmbedding):
    """Ids are broadcast from the world's first rank, so that another TP group looks up the first group's ids."""

    def forward(self, ids: Tensor) -> Tensor:
        """The rows of ``ids``."""
        ids = ids.clone(memory_format=torch.contiguous_format)
        if world().size() > self.group.size():
            dist.broadcast(ids, src=0)
        return super().forward(ids)


@mutant("isolation", cross_entropy, "forward", origin=DEFAULT, diagnosis="a wrong group", module="output")
class ExponentialsSummedInTheWorld(VocabParallelCrossEntropy):
    """The exponentials of all TP groups of the world go into one sum."""

    def _log_sum(self, logits: Tensor) -> Tensor:
        return reduce_from_region(logits.exp().sum(-1), world()).log()


@mutant("isolation", cross_entropy, "communication", origin=DEFAULT, diagnosis="a wrong group", module="")
class MaximumOverTheWorld(VocabParallelCrossEntropy):
    """The largest logit is that of all TP groups of the world: right, unless another group's logits are larger by hundreds."""

    def _maximum(self, logits: Tensor) -> Tensor:
        before, self.group = self.group, world()
        largest = super()._maximum(logits)
        self.group = before
        return largest


@mutant(
    "isolation",
    cross_entropy,
    "forward",
    origin="losses normalised by a count of tokens over all data-parallel replicas, in one place too many",
    module="output",
    diagnosis="a wrong group",
)
class TokensCountedInTheWorld(VocabParallelCrossEntropy):
    """The mean divides by the tokens per TP group on average over the world, instead of by this group's own."""

    def _count(self, counted: Tensor, targets: Tensor) -> Tensor:
        count = super()._count(counted, targets).to(torch.float64)
        if world().size() > self.group.size():
            dist.all_reduce(count)
            count /= world().size()
        return count


@mutant("wrong group", attention, "parameter-gradient", origin=DEFAULT, diagnosis="a wrong group", module="qkv.*.grad", ranks="")
class SharedHeadsSummedInTheWorld(QKVParallelLinear):
    """If all ranks of the TP group hold the one key-value head, its gradient is summed over the world."""

    def _share(self, parameter: Tensor) -> Tensor:
        if self.kv_group is not self.group:
            return super()._share(parameter)
        query = self.heads * self.head_dim
        return torch.cat([parameter[:query], copy_to_region(parameter[query:], world())])


@mutant(
    "wrong group",
    gpt,
    "forward",
    origin="ranks within the TP group computed as rank modulo TP degree: right for neighbours, not for every n-th rank",
    module="*",
    ranks="",
    diagnosis="a wrong group or rank",
)
class PartOfRankModuloSize(ParallelGPT):
    """The rank within the TP group is taken to be the world's modulo the group's size, when positions are cut along the sequence."""

    def own_part(self, sequence: Tensor) -> Tensor:
        """[s, ...] -> this rank's part."""
        if not self.sequence_parallel:
            return sequence
        part = len(sequence) // self.group.size()
        return sequence.narrow(0, dist.get_rank() % self.group.size() * part, part)
