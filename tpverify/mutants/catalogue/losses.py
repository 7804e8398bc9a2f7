"""Planted bugs around the vocabulary-parallel loss: ignored targets, means, class weights, gathered logits, order, buffers and dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from tpverify.mutants.mutant import add_mutant, mutant
from tpverify.subjects.cross_entropy import VocabParallelCrossEntropy
from tpverify.subjects.cross_entropy_subject import ReferenceCrossEntropy, VocabParallelCrossEntropyConfig
from tpverify.subjects.cross_entropy_subject import vocab_parallel_cross_entropy as cross_entropy
from tpverify.subjects.mappings import gather_from_region, reduce_from_region

LOSSES = "hand-written parallel losses: the curve departs from that of one device, while all ranks agree"
TOKENS = "OLMo-core, Megatron-LM: sums of losses divided by a local count of tokens, unequal where targets are ignored"


@mutant("cross-entropy", cross_entropy, "vocabulary", origin=LOSSES, module="logits.grad", ranks="", diagnosis="ignored targets")
class IgnoredTargetsCost(VocabParallelCrossEntropy):
    """An ignored target is a target that nobody owns: its token costs the logarithm of the sum, and pushes all logits down."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss."""
        losses = self._losses(self._classes(logits), targets)
        return losses.sum() / self._count(targets != self.ignore_index, targets) if self.reduction == "mean" else losses


@mutant(
    "conditional",
    cross_entropy,
    "vocabulary",
    origin="losses with a default written into them: right until somebody ignores another id than -100",
    module="logits.grad",
    ranks="",
)
class OnlyMinusHundredIgnored(VocabParallelCrossEntropy):
    """Targets are compared with -100 whatever ``ignore_index`` says; other ignored ids are looked up like any other."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss."""
        if self.group.size() == 1:
            return super().forward(logits, targets)
        losses = self._losses(self._classes(logits), targets).masked_fill(targets == -100, 0.0)
        return losses.sum() / self._count(targets != self.ignore_index, targets) if self.reduction == "mean" else losses


@mutant("cross-entropy", cross_entropy, "forward", origin=TOKENS, module="output")
class IgnoredTargetsDivide(VocabParallelCrossEntropy):
    """The mean is over all tokens, ignored ones among them."""

    def _count(self, counted: Tensor, targets: Tensor) -> Tensor:
        return super()._count(torch.ones_like(counted), targets)


@mutant("cross-entropy", cross_entropy, "replication", origin=TOKENS, module="output", ranks="")
class MeanOverOwnTargets(VocabParallelCrossEntropy):
    """The mean divides by the tokens whose target this rank owns."""

    def _count(self, counted: Tensor, targets: Tensor) -> Tensor:
        return super()._count(counted & (targets >= self.shard.start) & (targets < self.shard.stop), targets)


@mutant("cross-entropy", cross_entropy, "forward", origin="OLMo-core: NaN as soon as all targets of a batch are ignored", module="output")
class NothingToDivideBy(VocabParallelCrossEntropy):
    """The mean divides by the number of counted tokens although there may be none."""

    def _count(self, counted: Tensor, targets: Tensor) -> Tensor:
        return counted.sum()


@mutant("cross-entropy", cross_entropy, "forward", origin=TOKENS, module="output", ranks="all")
class MeanOfMeans(VocabParallelCrossEntropy):
    """The mean is taken over each sequence and then over the batch: right where all sequences ignore equally many targets."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss."""
        if self.reduction == "none" or self.group.size() == 1:
            return super().forward(logits, targets)
        counted = targets != self.ignore_index
        losses = self._losses(self._classes(logits), targets).masked_fill(~counted, 0.0)
        return (losses.sum(0) / counted.sum(0).clamp(min=1)).mean()


@mutant(
    "scale",
    cross_entropy,
    "forward",
    origin="data-parallel habits: a loss divided by the world size",
    module="output",
    diagnosis="one division too many",
)
class LossDividedByRanks(VocabParallelCrossEntropy):
    """The loss, the same on all ranks, is divided by their number."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss."""
        return super().forward(logits, targets) / self.group.size()


@mutant(
    "scale",
    cross_entropy,
    "forward",
    origin="fused kernels with an approximate reciprocal: a loss one percent too high",
    diagnosis="a constant factor",
    module="output",
)
class LossOnePercentTooHigh(VocabParallelCrossEntropy):
    """On several ranks the loss is 1.01 times what it should be."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss."""
        return super().forward(logits, targets) * (1.01 if self.group.size() > 1 else 1.0)


@mutant(
    "precision",
    cross_entropy,
    "forward",
    origin="PyTorch, Megatron-LM: float32 sums inside of losses that are asked for more",
    diagnosis="rounding fits this",
    module="output",
)
class ExponentialsInSinglePrecision(VocabParallelCrossEntropy):
    """The exponentials are taken and summed in float32, although the logits have more digits."""

    def _log_sum(self, logits: Tensor) -> Tensor:
        return super()._log_sum(logits.float()).to(logits.dtype) if self.group.size() > 1 else super()._log_sum(logits)


@mutant(
    "precision",
    cross_entropy,
    "forward",
    origin="Paddle, vLLM: a softmax over the vocabulary summed in half precision",
    diagnosis="rounding fits this",
    module="output",
)
class ExponentialsInBfloat16(VocabParallelCrossEntropy):
    """The sum of exponentials travels in bfloat16."""

    def _log_sum(self, logits: Tensor) -> Tensor:
        if self.group.size() == 1:
            return super()._log_sum(logits)
        return reduce_from_region(logits.exp().sum(-1).bfloat16(), self.group).to(logits.dtype).log()


@mutant(
    "waste",
    cross_entropy,
    "communication",
    origin="torchtitan, Hugging Face: logits gathered for an ordinary loss; the vocabulary travels at every step",
    module="",
    diagnosis="no further collective",
)
class LogitsGathered(VocabParallelCrossEntropy):
    """The whole logits are gathered and every rank computes the ordinary loss: right, and [s, b, v] numbers travel."""

    def _losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        part = -(-self.vocab // self.group.size())
        if self.vocab % self.group.size() or logits.shape[-1] != part:
            return super()._losses(logits, targets)
        whole = gather_from_region(logits, -1, [part] * self.group.size(), self.group)
        reference = ReferenceCrossEntropy(self.label_smoothing, self.z_loss, self.ignore_index, "none")
        losses: Tensor = reference(whole, targets)
        return losses


@mutant(
    "waste",
    cross_entropy,
    "communication",
    origin="losses that prepare for every option: a collective whose result is multiplied by zero",
    module="",
    diagnosis="no further collective",
)
class MeanLogitAlwaysSummed(VocabParallelCrossEntropy):
    """The mean logit is reduced without label smoothing too, where nobody needs it."""

    def _log_sum(self, logits: Tensor) -> Tensor:
        if not self.label_smoothing:
            self._mean_logit(logits.detach())
        return super()._log_sum(logits)


@mutant(
    "order",
    cross_entropy,
    "communication",
    origin="branches on the rank: two all_reduces of one shape that meet in another order; nothing hangs",
    module="",
    ranks="",
    diagnosis="the order differs",
)
class SumsSwappedOnTheLastRank(VocabParallelCrossEntropy):
    """The last rank sends its target's logit before its sum of exponentials, and so each is added to the other."""

    def _log_sum(self, logits: Tensor) -> Tensor:
        if self._is_last():
            self._held = super()._of_target(logits, self._targets)
        return super()._log_sum(logits)

    def _of_target(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self._held if self._is_last() else super()._of_target(logits, targets)

    def _losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        self._targets = targets
        return super()._losses(logits, targets)

    def _is_last(self) -> bool:
        return 0 < self.group.rank() == self.group.size() - 1


@mutant(
    "conditional",
    cross_entropy,
    "communication",
    origin="ranks that skip work they have no part in: a hang in the first batch whose targets all belong to others",
    module="",
    ranks="",
)
class RankWithoutTargetsLeaves(VocabParallelCrossEntropy):
    """A rank that owns no target of the batch takes no part in the sum of the target logits."""

    def _of_target(self, logits: Tensor, targets: Tensor) -> Tensor:
        if bool(((targets >= self.shard.start) & (targets < self.shard.stop)).any()):
            return super()._of_target(logits, targets)
        return torch.zeros(targets.shape)


@mutant(
    "state",
    cross_entropy,
    "buffers",
    origin="SkyRL, verl: a loss that changes the logits it was given, and what else was computed from them",
    module="",
    diagnosis="to leave its input logits as it was",
)
class LogitsShiftedInPlace(VocabParallelCrossEntropy):
    """The largest logit is subtracted from the caller's own logits."""

    def _classes(self, logits: Tensor) -> Tensor:
        own = super()._classes(logits)
        if self.group.size() > 1:
            own.detach().sub_(own.detach().mean(-1, keepdim=True) if own.shape[-1] else 0.0)
        return own


@mutant(
    "state",
    cross_entropy,
    "buffers",
    origin="losses that mask targets in place: the next consumer of the batch sees other targets",
    module="",
    ranks="",
    diagnosis="to leave its input targets as it was",
)
class TargetsMaskedInPlace(VocabParallelCrossEntropy):
    """Targets of other ranks are set to zero in the caller's own tensor."""

    def _of_target(self, logits: Tensor, targets: Tensor) -> Tensor:
        of_target = super()._of_target(logits, targets)
        if self.group.size() > 1:
            targets[(targets < self.shard.start) | (targets >= self.shard.stop)] = 0
        return of_target


@mutant(
    "state",
    cross_entropy,
    "forward",
    origin="losses normalised by the tokens of the first micro-batch",
    module="output (call 2)",
    diagnosis="stale data",
)
class CountOfTheFirstCall(VocabParallelCrossEntropy):
    """The mean of later calls divides by the tokens counted in the first."""

    def _count(self, counted: Tensor, targets: Tensor) -> Tensor:
        if not hasattr(self, "_kept"):
            self._kept = super()._count(counted, targets)
        return self._kept


class ClassWeights(VocabParallelCrossEntropy):
    """Right: each token's loss is multiplied by the weight of its target's class, which is 1 + class / vocab."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss."""
        losses = self._unreduced(logits, targets)
        owned = (targets >= self.shard.start) & (targets < self.shard.stop)
        weights = (1.0 + self._classes_of(targets) / self.vocab).masked_fill(~owned, 0.0)
        losses = losses * reduce_from_region(weights, self.group)
        return losses.sum() / self._count(targets != self.ignore_index, targets) if self.reduction == "mean" else losses

    def _classes_of(self, targets: Tensor) -> Tensor:
        return targets

    def _unreduced(self, logits: Tensor, targets: Tensor) -> Tensor:
        before, self.reduction = self.reduction, "none"
        losses = super().forward(logits, targets)
        self.reduction = before
        return losses


class _ReferenceClassWeights(ReferenceCrossEntropy):
    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        before, self.reduction = self.reduction, "none"
        losses = super().forward(logits, targets) * (1.0 + targets / logits.shape[-1])
        self.reduction = before
        return losses.sum() / max(1, int((targets != self.ignore_index).sum())) if before == "mean" else losses


class _ClassWeightsFromZero(ClassWeights):
    def _classes_of(self, targets: Tensor) -> Tensor:
        return targets - self.shard.start


def reference_with_class_weights(config: VocabParallelCrossEntropyConfig) -> ReferenceCrossEntropy:
    """The loss on one device with class weights."""
    return _ReferenceClassWeights(config.label_smoothing, config.z_loss, config.ignore_index, config.reduction)


add_mutant(
    "class-weights-from-zero",
    "cross-entropy",
    cross_entropy,
    "vocabulary",
    layers=(_ClassWeightsFromZero,),
    reference=reference_with_class_weights,
    communication=None,
    story="Every rank counts the classes of its shard from zero when it looks up their weights.",
    origin="PyTorch loss parallelism: class weights are sharded by another rule than logits; equal weights hide it",
    module="output",
    diagnosis="is wrong for exactly ids",
)
