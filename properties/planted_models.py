"""Bugs of attention, embeddings, losses and whole models, of the kinds that public reports tell of."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from planted import built_in_configs, clone_reduce, plant
from planted_layers import PlantedCrossEntropy, PlantedEmbedding
from planted_registry import add_bug, bug
from torch import Tensor, nn

from tpverify.subjects.attention import ParallelAttention, QKVParallelLinear
from tpverify.subjects.attention_subject import AttentionConfig, ReferenceAttention, attention
from tpverify.subjects.cross_entropy_subject import vocab_parallel_cross_entropy as cross_entropy
from tpverify.subjects.embedding import vocab_parallel_embedding
from tpverify.subjects.language_model import ParallelGPT
from tpverify.subjects.language_model_subjects import gpt
from tpverify.subjects.mappings import reduce_from_region, reduce_scatter_sequence


@bug(attention, "parameter-gradient", "replication")
class SharedHeadsNotReduced(QKVParallelLinear):
    """Ranks that hold one key-value head each keep their own part of its gradient."""

    def _share(self, parameter: Tensor) -> Tensor:
        return parameter


@bug(attention, "parameter-gradient", "replication")
class SharedBiasNotReduced(QKVParallelLinear):
    """The same, for the bias only."""

    def local_parameters(self) -> tuple[Tensor, Tensor | None]:
        return self._share(self.weight), self.bias


def sharing_group_of_group_ranks(config: AttentionConfig) -> nn.Module:
    """Attention whose ranks take their number within the group for their number in the world."""
    module: Any = attention.parallel(config)
    group = module.qkv.group
    if module.qkv.kv_group is not None:
        sharing = module.qkv.kv_group.size()
        start = group.rank() // sharing * sharing
        ranks = list(range(start, start + sharing))
        module.qkv.kv_group = dist.new_group(ranks, use_local_synchronization=True) if dist.get_rank() in ranks else None
    return module  # type: ignore[no-any-return]


add_bug(
    "SharingGroupOfGroupRanks",
    attention,
    "parameter-gradient",
    "replication",
    parallel=sharing_group_of_group_ranks,
    configs=lambda world_size: built_in_configs(attention, world_size).map(lambda c: replace(c, kv_heads=1)),
)


@bug(attention, "forward")
class TriplesPerHead(ParallelAttention):
    """Takes Q|K|V for (q, k, v) of one head after the other."""

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv
        if qkv.kv_heads != qkv.heads:
            return super().forward(x)
        query, key, value = qkv(x).unflatten(-1, (qkv.heads, 3, qkv.head_dim)).permute(3, 1, 2, 0, 4)
        context = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        output: Tensor = self.proj(context.permute(2, 0, 1, 3).flatten(2))
        return output


def scaled_query(qkv: Tensor, first: int, heads: int, head_dim: int) -> Tensor:
    """Q|K|V with each head's query scaled by the head's own constant."""
    scale = 1.0 + torch.arange(first, first + heads, dtype=qkv.dtype).repeat_interleave(head_dim)
    query = heads * head_dim
    return torch.cat([qkv[..., :query] * scale, qkv[..., query:]], dim=-1)


class ReferenceHeadConstants(ReferenceAttention):
    """Attention in which each head has a constant of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.qkv.register_forward_hook(lambda _, __, output: scaled_query(output, 0, self.heads, self.head_dim))


class HeadConstants(QKVParallelLinear):
    """The constants of this rank's heads."""

    def first(self) -> int:
        return self.group.rank() * self.heads

    def forward(self, x: Tensor) -> Any:
        qkv = super().forward(x)
        assert isinstance(qkv, Tensor)
        return scaled_query(qkv, self.first(), self.heads, self.head_dim)


class HeadConstantsOfRankZero(HeadConstants):
    """Every rank counts its heads from zero."""

    def first(self) -> int:
        return 0


def with_head_constants(config: AttentionConfig) -> nn.Module:
    """The reference."""
    return ReferenceHeadConstants(config.hidden, config.heads, config.kv_heads, config.causal, config.bias)


add_bug("HeadConstantsOfRankZero", attention, "forward", layers=(HeadConstantsOfRankZero,), reference=with_head_constants)
head_constants = plant(attention, "head_constants", HeadConstants, reference=with_head_constants)


@bug(vocab_parallel_embedding, "vocabulary", "parameter-gradient")
class MaskForgottenInBackward(PlantedEmbedding):
    """Foreign ids are looked up in the last row, and only their values are masked."""

    def forward(self, ids: Tensor) -> Tensor:
        owned = self.owned(ids)
        if not self.shard.rows:
            return super().forward(ids)
        rows = F.embedding(torch.where(owned, ids - self.shard.start, self.shard.rows - 1), self.weight)
        partial = rows - (rows.detach() * ~owned.unsqueeze(-1))
        return reduce_scatter_sequence(partial, self.group) if self.sequence_parallel else reduce_from_region(partial, self.group)


@bug(vocab_parallel_embedding, "communication")
class EmptyShardLeaves(PlantedEmbedding):
    """A rank without ids sees nothing to do."""

    def forward(self, ids: Tensor) -> Tensor:
        if self.shard.start == self.shard.stop:
            part = len(ids) // self.group.size() if self.sequence_parallel else len(ids)
            return self.weight.new_zeros((part, *ids.shape[1:], self.weight.shape[1]))
        return super().forward(ids)


@bug(vocab_parallel_embedding, "forward", "vocabulary")
class PartsRoundedDown(PlantedEmbedding):
    """Every rank's part is vocab // ranks; the rest belongs to nobody."""

    def owned(self, ids: Tensor) -> Tensor:
        part = self.vocab // self.group.size()
        return super().owned(ids) & (ids < self.shard.start + part)


@bug(cross_entropy, "forward")
class PaddingCounted(PlantedCrossEntropy):
    """Padded logits are classes like any other."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        own = logits.shape[-1]
        self.padding = own - (self.shard.stop - self.shard.start)
        return super().forward(logits, targets)

    def log_sum(self, logits: Tensor) -> Tensor:
        return super().log_sum(F.pad(logits, (0, self.padding)))


@bug(cross_entropy, "forward", "replication")
class LocalZLoss(PlantedCrossEntropy):
    """The z-loss of each rank's own logits."""

    def squared(self, logits: Tensor, log_sum: Tensor) -> Tensor:
        return torch.logsumexp(torch.cat([logits, logits.new_full((*logits.shape[:-1], 1), -50.0)], -1), -1).square()


@bug(cross_entropy, "forward", "replication")
class MeanOfLocalTokens(PlantedCrossEntropy):
    """Divides by the tokens whose target this rank owns."""

    def count(self, counted: Tensor, targets: Tensor) -> Tensor:
        owned = (targets >= self.shard.start) & (targets < self.shard.stop)
        return (counted & owned).sum().clamp(min=1)


@bug(cross_entropy, "input-gradient")
class TargetOutsideAutograd(PlantedCrossEntropy):
    """The target's logit comes by a plain all_reduce."""

    def of_target(self, logits: Tensor, targets: Tensor) -> Tensor:
        return super().of_target(logits.detach(), targets)


@bug(cross_entropy, "forward")
class MaximumBySum(PlantedCrossEntropy):
    """The shift is the sum of the ranks' maxima: harmless until it is large."""

    def shift(self, logits: Tensor) -> Tensor:
        own = torch.cat([logits.detach(), logits.new_zeros((*logits.shape[:-1], 1))], dim=-1).amax(-1)
        return clone_reduce(own, self.group) if self.group.size() > 1 else super().shift(logits)


@bug(cross_entropy, "forward")
class IgnoredCounted(PlantedCrossEntropy):
    """An ignored target costs as much as one that nobody owns."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        before, self.ignore_index = self.ignore_index, -math.inf  # type: ignore[assignment]
        loss = super().forward(logits, targets)
        self.ignore_index = before
        return loss


@bug(cross_entropy, "buffers")
class TargetsOverwritten(PlantedCrossEntropy):
    """Leaves the caller's targets changed."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        loss = super().forward(logits, targets)
        targets.fill_(0)
        return loss


@bug(gpt, "forward")
class PositionsOfRankZero(ParallelGPT):
    """Every rank takes its part of the sequence for the first one."""

    def own_part(self, sequence: Tensor) -> Tensor:
        return sequence.narrow(0, 0, len(sequence) // self.group.size()) if self.sequence_parallel else sequence


def untied(config: Any) -> nn.Module:
    """GPT with a copy where a tie is meant."""
    module: Any = gpt.parallel(config)
    module.head.weight = nn.Parameter(module.head.weight.detach().clone())
    return module  # type: ignore[no-any-return]


add_bug("TiedCopies", gpt, "tied", parallel=untied)
