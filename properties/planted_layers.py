"""The bugs that everybody makes once, each planted in a built-in subject: what a harness for tensor parallelism must find."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from planted import clone_reduce, plant
from torch import Tensor, nn

from tpverify.mutants.catalogue.addends import BiasBeforeReduction
from tpverify.mutants.catalogue.layouts import JoinedBackwards
from tpverify.mutants.catalogue.reductions import ColumnGradientNotReduced, ReducedBothWays, RowReducedTwice
from tpverify.mutants.catalogue.waste import GatheredBeforeTheActivation
from tpverify.subjects.block import transformer_block
from tpverify.subjects.cross_entropy import VocabParallelCrossEntropy
from tpverify.subjects.cross_entropy_subject import vocab_parallel_cross_entropy as cross_entropy
from tpverify.subjects.embedding import VocabParallelEmbedding, vocab_parallel_embedding, vocab_shard
from tpverify.subjects.language_model import VocabParallelHead
from tpverify.subjects.language_model_subjects import gpt
from tpverify.subjects.linear_subjects import column_parallel_linear, row_parallel_linear
from tpverify.subjects.mappings import Group, apply, reduce_from_region, reduce_scatter_sequence
from tpverify.subjects.mlp import mlp
from tpverify.subjects.parameters import with_bias


class PlantedEmbedding(VocabParallelEmbedding):
    """The lookup, with its mask to be replaced."""

    def owned(self, ids: Tensor) -> Tensor:
        """Which ids this rank looks up."""
        return (ids >= self.shard.start) & (ids < self.shard.stop)

    def mask(self, rows: Tensor, owned: Tensor) -> Tensor:
        """Zeros for the ids of others."""
        return rows.masked_fill(~owned.unsqueeze(-1), 0.0)

    def forward(self, ids: Tensor) -> Tensor:
        """The rows of ``ids``."""
        owned = self.owned(ids)
        table = self.weight if self.shard.rows else F.pad(self.weight, (0, 0, 0, 1))
        partial = self.mask(F.embedding(torch.where(owned, ids - self.shard.start, 0), table), owned)
        return reduce_scatter_sequence(partial, self.group) if self.sequence_parallel else reduce_from_region(partial, self.group)


class MaskStartOffByOne(PlantedEmbedding):
    """Nobody owns the first id of a shard."""

    def owned(self, ids: Tensor) -> Tensor:
        """``>`` where ``>=`` is meant."""
        return (ids > self.shard.start) & (ids < self.shard.stop) if self.group.size() > 1 else super().owned(ids)


class MaskStopOffByOne(PlantedEmbedding):
    """Every rank takes the next rank's first id for its own, and has a row for it only in its padding."""

    def owned(self, ids: Tensor) -> Tensor:
        """``<=`` where ``<`` is meant."""
        return (ids >= self.shard.start) & (ids <= self.shard.stop)

    def forward(self, ids: Tensor) -> Tensor:
        """With an index that stays inside the table, as kernels do without bounds checks."""
        owned = self.owned(ids)
        table = F.pad(self.weight, (0, 0, 0, 1), value=1.0)
        partial = self.mask(F.embedding(torch.where(owned, ids - self.shard.start, 0), table), owned)
        return reduce_scatter_sequence(partial, self.group) if self.sequence_parallel else reduce_from_region(partial, self.group)


class MaskForgotten(PlantedEmbedding):
    """Adds its first row for the ids of others."""

    def mask(self, rows: Tensor, owned: Tensor) -> Tensor:
        """Not applied."""
        return rows


class ProductForInputOnly(torch.autograd.Function):
    """A fused product whose backward leaves out the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: Group) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.group = group
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return clone_reduce(grad @ ctx.saved_tensors[0], ctx.group), None, None


class HeadWithoutGradient(VocabParallelHead):
    """Uses the tied weight, but on several ranks does not train it."""

    def forward(self, x: Tensor) -> Tensor:
        """This rank's logits."""
        if self.sequence_parallel or self.group.size() == 1:
            return super().forward(x)
        return with_bias(apply(ProductForInputOnly, x, self.weight, self.group), self.bias)


class PlantedCrossEntropy(VocabParallelCrossEntropy):
    """The loss in steps that a planted bug can replace."""

    def shift(self, logits: Tensor) -> Tensor:
        """What is subtracted from the logits before their exponentials are taken: the global maximum."""
        floor = logits.new_full((*logits.shape[:-1], 1), -torch.inf)
        largest = torch.cat([logits.detach(), floor], dim=-1).amax(-1)
        if self.group.size() > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        return largest

    def log_sum(self, logits: Tensor) -> Tensor:
        """Logarithm of the sum of all exponentials."""
        largest = self.shift(logits)
        return largest + reduce_from_region((logits - largest.unsqueeze(-1)).exp().sum(-1), self.group).log()

    def of_target(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The target's logit."""
        ids = torch.arange(self.shard.start, self.shard.stop)
        return reduce_from_region(torch.where(targets.unsqueeze(-1) == ids, logits, 0.0).sum(-1), self.group)

    def mean_logit(self, logits: Tensor) -> Tensor:
        """Mean over the vocabulary."""
        return reduce_from_region(logits.sum(-1), self.group) / self.vocab

    def squared(self, logits: Tensor, log_sum: Tensor) -> Tensor:
        """What z-loss multiplies."""
        return log_sum.square()

    def count(self, counted: Tensor, targets: Tensor) -> Tensor:
        """Tokens in the mean."""
        return counted.sum().clamp(min=1)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss."""
        counted = targets != self.ignore_index
        logits = logits[..., : self.shard.stop - self.shard.start]
        log_sum = self.log_sum(logits)
        losses = log_sum - (1.0 - self.label_smoothing) * self.of_target(logits, targets)
        if self.label_smoothing:
            losses = losses - self.label_smoothing * self.mean_logit(logits)
        if self.z_loss:
            losses = losses + self.z_loss * self.squared(logits, log_sum)
        losses = losses.masked_fill(~counted, 0.0)
        return losses.sum() / self.count(counted, targets) if self.reduction == "mean" else losses


class ShardsSwapped(PlantedCrossEntropy):
    """Takes its logits for those of the rank opposite."""

    def of_target(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The logit at the target's place in the wrong shard."""
        size = self.group.size()
        opposite = vocab_shard(self.vocab, 1, size - 1 - self.group.rank(), size)
        ids = torch.arange(opposite.start, opposite.start + logits.shape[-1])
        return reduce_from_region(torch.where(targets.unsqueeze(-1) == ids, logits, 0.0).sum(-1), self.group)


class LocalMaximum(PlantedCrossEntropy):
    """Exchanges the maximum, but subtracts each rank's own and makes up for it afterwards: right, unless an exponential overflows."""

    def log_sum(self, logits: Tensor) -> Tensor:
        """Sums the ranks' exponentials."""
        if self.group.size() == 1:
            return super().log_sum(logits)
        self.shift(logits)
        own = torch.cat([logits.detach(), logits.new_zeros((*logits.shape[:-1], 1))], dim=-1).amax(-1)
        return reduce_from_region(own.exp() * (logits - own.unsqueeze(-1)).exp().sum(-1), self.group).log()


class LocalMaximumUnexchanged(LocalMaximum):
    """The same without the exchange."""

    def shift(self, logits: Tensor) -> Tensor:
        """Nobody asks for it."""
        return logits.new_zeros(logits.shape[:-1]) if self.group.size() > 1 else super().shift(logits)


class LocalSmoothing(PlantedCrossEntropy):
    """Spreads the smoothing over the ids of one rank."""

    def mean_logit(self, logits: Tensor) -> Tensor:
        """Mean over this rank's shard."""
        return logits.sum(-1) / max(1, logits.shape[-1])


def norms_unflagged(config: Any) -> nn.Module:
    """The block, but finalisation does not know of its norms."""
    module = transformer_block.parallel(config)
    for layer in module.modules():
        if isinstance(layer, nn.LayerNorm) and config.sequence_parallel:
            for parameter in layer.parameters():
                del parameter.sequence_parallel_group  # type: ignore[attr-defined]
    return module


input_gradient_not_reduced = plant(column_parallel_linear, "input_gradient_not_reduced", ColumnGradientNotReduced)
reduced_both_ways = plant(row_parallel_linear, "reduced_both_ways", ReducedBothWays)
reduced_both_ways_in_mlp = plant(mlp, "reduced_both_ways_in_mlp", ReducedBothWays)
bias_before_reduction = plant(row_parallel_linear, "bias_before_reduction", BiasBeforeReduction)
reduced_twice = plant(row_parallel_linear, "reduced_twice", RowReducedTwice)
gather_before_gelu = plant(mlp, "gather_before_gelu", GatheredBeforeTheActivation)
mask_start_off_by_one = plant(vocab_parallel_embedding, "mask_start_off_by_one", MaskStartOffByOne)
mask_stop_off_by_one = plant(vocab_parallel_embedding, "mask_stop_off_by_one", MaskStopOffByOne)
mask_forgotten = plant(vocab_parallel_embedding, "mask_forgotten", MaskForgotten)
tied_gradient_lost = plant(gpt, "tied_gradient_lost", HeadWithoutGradient)
column_joined_backwards = plant(column_parallel_linear, "column_joined_backwards", JoinedBackwards)
logit_shards_swapped = plant(cross_entropy, "logit_shards_swapped", ShardsSwapped)
local_maximum = plant(cross_entropy, "local_maximum", LocalMaximum)
local_maximum_unexchanged = plant(cross_entropy, "local_maximum_unexchanged", LocalMaximumUnexchanged)
local_smoothing = plant(cross_entropy, "local_smoothing", LocalSmoothing)
norm_gradient_partial = plant(transformer_block, "norm_gradient_partial", parallel=norms_unflagged)
cross_entropy_in_steps = plant(cross_entropy, "cross_entropy_in_steps", PlantedCrossEntropy)
embedding_in_steps = plant(vocab_parallel_embedding, "embedding_in_steps", PlantedEmbedding)
