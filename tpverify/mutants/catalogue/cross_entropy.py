"""Planted bugs of the vocabulary-parallel cross-entropy: shift, sum, target, smoothing, z-loss, and what the mean divides by."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tpverify.mutants.catalogue.vocabulary import reduced_by
from tpverify.mutants.mutant import mutant
from tpverify.subjects.cross_entropy import VocabParallelCrossEntropy
from tpverify.subjects.cross_entropy_subject import vocab_parallel_cross_entropy as cross_entropy
from tpverify.subjects.embedding import vocab_shard
from tpverify.subjects.mappings import reduce_from_region

LOSSES = "hand-written parallel losses: the curve departs from that of one device, while all ranks agree"
OVERFLOW = "hand-written parallel losses: infinite or NaN as soon as one logit is large"


def own_maximum(logits: Tensor) -> Tensor:
    """[..., v] -> [...]: this rank's largest logit, or 0 where it has none."""
    return logits.detach().amax(-1) if logits.shape[-1] else logits.new_zeros(logits.shape[:-1])


@mutant("cross-entropy", cross_entropy, "forward", origin=LOSSES, diagnosis="a local statistic", module="output")
class OwnMaximumSubtracted(VocabParallelCrossEntropy):
    """Each rank subtracts its own largest logit before its exponentials go into the common sum."""

    def _maximum(self, logits: Tensor) -> Tensor:
        super()._maximum(logits)
        return own_maximum(logits)


@mutant("cross-entropy", cross_entropy, "forward", origin=OVERFLOW, module="output", ranks="")
class OwnMaximumMadeUpFor(VocabParallelCrossEntropy):
    """Each rank subtracts its own largest logit and multiplies its sum by the exponential of it: right, unless that overflows."""

    def _log_sum(self, logits: Tensor) -> Tensor:
        own = own_maximum(logits + self._largest.unsqueeze(-1))
        rest = (logits + (self._largest - own).unsqueeze(-1)).exp().sum(-1)
        return reduce_from_region(own.exp() * rest, self.group).log() - self._largest if self.group.size() > 1 else super()._log_sum(logits)

    def _maximum(self, logits: Tensor) -> Tensor:
        self._largest = super()._maximum(logits)
        return self._largest


@mutant("cross-entropy", cross_entropy, "forward", origin=OVERFLOW, module="output", ranks="")
class MaximumNotSubtracted(VocabParallelCrossEntropy):
    """The largest logit is exchanged and then forgotten: right for logits of ordinary size."""

    def _maximum(self, logits: Tensor) -> Tensor:
        largest = super()._maximum(logits)
        return torch.zeros_like(largest) if self.group.size() > 1 else largest


@mutant(
    "wrong reduce op",
    cross_entropy,
    "communication",
    origin="tt-xla: the maxima of the shards are combined by a sum, and every exponential underflows; logits near zero hide it",
    diagnosis="a wrong reduce op",
    module="",
)
class MaximumBySum(VocabParallelCrossEntropy):
    """What is subtracted from the logits is the sum of the ranks' largest logits: harmless until that is large."""

    def _maximum(self, logits: Tensor) -> Tensor:
        return reduced_by(dist.ReduceOp.SUM, own_maximum(logits), self.group) if self.group.size() > 1 else super()._maximum(logits)


@mutant(
    "cross-entropy",
    cross_entropy,
    "input-gradient",
    origin="losses whose softmax backward is fed from what the rank has at hand: losses are right, gradients are not",
    diagnosis="a detached branch",
    module="logits.grad",
    ranks="",
)
class MaximumDifferentiated(VocabParallelCrossEntropy):
    """The shift is not detached: each rank's largest logit gets a gradient that cancels only over all ranks together."""

    def _maximum(self, logits: Tensor) -> Tensor:
        largest = super()._maximum(logits)
        if self.group.size() == 1 or not logits.shape[-1]:
            return largest
        own = logits.amax(-1)
        return own + (largest - own).detach()


@mutant("missing reduction", cross_entropy, "forward", origin=LOSSES, diagnosis="a local statistic", module="output")
class OwnExponentialsOnly(VocabParallelCrossEntropy):
    """The sum of exponentials is each rank's own."""

    def _log_sum(self, logits: Tensor) -> Tensor:
        others = reduce_from_region(logits.detach().exp().sum(-1), self.group)
        return (logits.exp().sum(-1) if logits.shape[-1] else others).log()


@mutant(
    "doubled reduction",
    cross_entropy,
    "forward",
    origin="Megatron-LM: labels are passed while logits are gathered already; the loss is too high by exactly the logarithm of the TP size",
    module="output",
)
class LossTooHighByLogRanks(VocabParallelCrossEntropy):
    """Each class is counted once per rank in the denominator."""

    def _log_sum(self, logits: Tensor) -> Tensor:
        return super()._log_sum(logits) + math.log(self.group.size())


@mutant(
    "cross-entropy",
    cross_entropy,
    "input-gradient",
    origin="losses with a backward of their own that keeps the local softmax: values are right, and gradients do not add up to zero",
    diagnosis="a detached branch",
    module="logits.grad",
    ranks="",
)
class GradientOfOwnSoftmax(VocabParallelCrossEntropy):
    """Forward is right, but backward takes the softmax over this rank's logits only."""

    def _log_sum(self, logits: Tensor) -> Tensor:
        right = super()._log_sum(logits)
        if self.group.size() == 1 or not logits.shape[-1]:
            return right
        own = torch.logsumexp(logits, -1)
        return own + (right - own).detach()


@mutant(
    "detached",
    cross_entropy,
    "input-gradient",
    origin="ms-swift: the target's log-probability comes by a plain all_reduce that autograd does not follow",
    diagnosis="a detached branch",
    module="logits.grad",
    ranks="",
)
class TargetLogitDetached(VocabParallelCrossEntropy):
    """The target's logit is exchanged outside autograd, so that nothing pushes it up."""

    def _of_target(self, logits: Tensor, targets: Tensor) -> Tensor:
        return super()._of_target(logits.detach() if self.group.size() > 1 else logits, targets)


@mutant("missing reduction", cross_entropy, "replication", origin=LOSSES, module="output", ranks="", diagnosis="a local statistic")
class TargetLogitNotExchanged(VocabParallelCrossEntropy):
    """Only the rank that owns a target subtracts its logit; the others report the logarithm of the sum."""

    def _of_target(self, logits: Tensor, targets: Tensor) -> Tensor:
        super()._of_target(logits.detach(), targets)
        ids = torch.arange(self.shard.start, self.shard.stop)
        return torch.where(targets.unsqueeze(-1) == ids, logits, 0.0).sum(-1)


@mutant("wrong reduce op", cross_entropy, "communication", origin=LOSSES, diagnosis="a wrong reduce op", module="")
class TargetLogitByMaximum(VocabParallelCrossEntropy):
    """The target's logit is the maximum over the ranks, where those that do not own it say 0, the largest there is after the shift."""

    def _of_target(self, logits: Tensor, targets: Tensor) -> Tensor:
        if self.group.size() == 1:
            return super()._of_target(logits, targets)
        ids = torch.arange(self.shard.start, self.shard.stop)
        return reduced_by(dist.ReduceOp.MAX, torch.where(targets.unsqueeze(-1) == ids, logits, 0.0).sum(-1), self.group)


@mutant(
    "vocabulary",
    cross_entropy,
    "vocabulary",
    origin="off-by-one masks of targets, see the lookup's",
    module="output",
    diagnosis="is wrong for exactly ids",
)
class TargetFirstOfShardUnowned(VocabParallelCrossEntropy):
    """The first id of a shard is nobody's target: its tokens cost the whole logarithm of the sum."""

    def _of_target(self, logits: Tensor, targets: Tensor) -> Tensor:
        if self.group.size() > 1:
            targets = targets.masked_fill(targets == self.shard.start, -1)
        return super()._of_target(logits, targets)


@mutant("vocabulary", cross_entropy, "forward", origin=LOSSES, module="output")
class TargetOfOppositeRank(VocabParallelCrossEntropy):
    """A rank takes its shard for that of the rank opposite, counted from the end, when it looks for the targets."""

    def _of_target(self, logits: Tensor, targets: Tensor) -> Tensor:
        size = self.group.size()
        opposite = vocab_shard(self.vocab, 1, size - 1 - self.group.rank(), size)
        ids = torch.arange(opposite.start, opposite.start + logits.shape[-1])
        return reduce_from_region(torch.where(targets.unsqueeze(-1) == ids, logits, 0.0).sum(-1), self.group)


@mutant(
    "cross-entropy",
    cross_entropy,
    "forward",
    origin="Megatron-LM: the smoothing coefficient is computed from the size of the partition",
    diagnosis="a wrong reduce op",
    module="output",
    ranks="",
)
class SmoothingOverOneShard(VocabParallelCrossEntropy):
    """The summed logits are divided by the ids of one shard instead of those of the vocabulary."""

    def _mean_logit(self, logits: Tensor) -> Tensor:
        return super()._mean_logit(logits) * self.vocab / max(1, self.shard.stop - self.shard.start)


@mutant(
    "conditional",
    cross_entropy,
    "forward",
    origin="losses that know the padded size only: smoothing is off where there is padding",
    module="output",
)
class SmoothingOverPadding(VocabParallelCrossEntropy):
    """Smoothing spreads over the padded vocabulary."""

    def _mean_logit(self, logits: Tensor) -> Tensor:
        return super()._mean_logit(logits) * self.vocab / (self._rows * self.group.size())

    def _classes(self, logits: Tensor) -> Tensor:
        self._rows = max(logits.shape[-1], -(-self.vocab // self.group.size()))
        return super()._classes(logits)


@mutant(
    "cross-entropy",
    cross_entropy,
    "forward",
    origin="mirage and others: padded classes have logit 0 and take part of the probability",
    module="output",
)
class PaddingIsAClass(VocabParallelCrossEntropy):
    """Padded logits are summed like those of any other class."""

    def _classes(self, logits: Tensor) -> Tensor:
        self._padding = logits.shape[-1] - (self.shard.stop - self.shard.start)
        return super()._classes(logits)

    def _maximum(self, logits: Tensor) -> Tensor:
        self._largest = super()._maximum(logits)
        return self._largest

    def _log_sum(self, logits: Tensor) -> Tensor:
        padding = (-self._largest).unsqueeze(-1).expand(*logits.shape[:-1], self._padding)
        return super()._log_sum(torch.cat([logits, padding], -1))


@mutant("cross-entropy", cross_entropy, "replication", origin=LOSSES, diagnosis="a local statistic", module="output", ranks="")
class ZLossOfOwnLogits(VocabParallelCrossEntropy):
    """The z-loss is that of each rank's own logits."""

    def _squared(self, logits: Tensor, log_sum: Tensor) -> Tensor:
        return torch.logsumexp(F.pad(logits, (0, 1), value=-50.0), -1).square()


@mutant(
    "cross-entropy",
    cross_entropy,
    "forward",
    origin="MoE and z-loss code in many places: an auxiliary loss that is summed over ranks that all computed the same one",
    module="output",
)
class ZLossOncePerRank(VocabParallelCrossEntropy):
    """The z-loss, the same on all ranks, is summed over them."""

    def _squared(self, logits: Tensor, log_sum: Tensor) -> Tensor:
        return super()._squared(logits, log_sum) * self.group.size()


@mutant(
    "conditional",
    cross_entropy,
    "forward",
    origin="options that are tested one by one: with both at once, one factor is applied to all",
    module="output",
)
class ZLossSmoothedToo(VocabParallelCrossEntropy):
    """With label smoothing and z-loss together on several ranks, the z-loss is multiplied by one minus the smoothing as well."""

    def _squared(self, logits: Tensor, log_sum: Tensor) -> Tensor:
        factor = 1.0 - self.label_smoothing if self.group.size() > 1 else 1.0
        return super()._squared(logits, log_sum) * factor


@mutant(
    "cross-entropy",
    cross_entropy,
    "forward",
    origin="a variant that is found in many repositories, and right",
    equivalent="What an ignored target finds is replaced by 0 afterwards, and nothing flows back from there.",
)
class IgnoredTargetsWrap(VocabParallelCrossEntropy):
    """Ignored targets are looked up modulo the vocabulary like any other, and masked at the end."""

    def _of_target(self, logits: Tensor, targets: Tensor) -> Tensor:
        return super()._of_target(logits, targets % self.vocab)


@mutant(
    "cross-entropy",
    cross_entropy,
    "forward",
    origin="a variant of the shift, and right",
    equivalent="The loss does not depend on the shift as long as it is near the maximum: exponentials neither overflow nor all vanish.",
)
class ShiftedBeyondTheMaximum(VocabParallelCrossEntropy):
    """One more than the largest logit is subtracted."""

    def _maximum(self, logits: Tensor) -> Tensor:
        return super()._maximum(logits) + 1.0
