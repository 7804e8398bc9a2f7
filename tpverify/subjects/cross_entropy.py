"""Vocab-parallel cross-entropy: a loss over logits that no rank ever holds whole; only [s, b] numbers travel."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpverify.subjects.embedding import check_ids, vocab_shard
from tpverify.subjects.mappings import Group, reduce_from_region

REDUCTIONS = ("none", "mean")


def at_least_float32(logits: Tensor) -> Tensor:
    """The same numbers with digits enough to sum exponentials and to square logarithms."""
    return logits.float() if logits.dtype.itemsize < torch.float32.itemsize else logits


class VocabParallelCrossEntropy(nn.Module):
    """``-log softmax(logits)[target]`` with the logits cut along the vocabulary over the ranks of ``group``.

    With label smoothing e the target distribution is ``(1 - e) * onehot + e / vocab``; ``z_loss * logsumexp**2`` is added. Padded
    logits are no classes: they have zero probability and zero gradient. A token whose target is ``ignore_index`` costs 0.
    Logits of half precision are widened to float32 first, and so is the loss: a sum of many exponentials, and a small
    difference of large numbers, need the digits.

    Args:
        multiple: see :func:`tpverify.subjects.embedding.vocab_shard`.
        reduction: ``none``: a loss per token; ``mean``: over tokens not ignored, and 0 (not NaN) if all are ignored.

    Shapes: logits [s, b, rows of this rank], targets [s, b] -> [s, b], or [] for ``mean``.

    Raises:
        ValueError: an option is out of range.
        IndexError: a target is neither in the vocabulary nor ``ignore_index`` (in ``forward``).
    """

    def __init__(
        self,
        vocab: int,
        *,
        group: Group,
        multiple: int = 1,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        ignore_index: int = -100,
        reduction: str = "none",
    ) -> None:
        super().__init__()
        if not 0.0 <= label_smoothing <= 1.0:
            raise ValueError(f"Expected 0 <= label_smoothing <= 1 but got label_smoothing={label_smoothing}")
        if reduction not in REDUCTIONS:
            raise ValueError(f"Expected one of {', '.join(REDUCTIONS)} but got reduction={reduction!r}")
        self.vocab, self.group = vocab, group
        self.shard = vocab_shard(vocab, multiple, group.rank(), group.size())
        self.label_smoothing, self.z_loss = label_smoothing, z_loss
        self.ignore_index, self.reduction = ignore_index, reduction

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss: all_reduces of [s, b] numbers only, and none in backward, as each rank's gradient is its own."""
        counted = targets != self.ignore_index
        check_ids(targets[counted], self.vocab, "targets")
        losses = self._losses(self._classes(at_least_float32(logits)), targets)
        losses = losses.masked_fill(~counted, 0.0)
        return losses.sum() / self._count(counted, targets) if self.reduction == "mean" else losses

    def _classes(self, logits: Tensor) -> Tensor:
        """Without padding."""
        return logits[..., : self.shard.stop - self.shard.start]

    def _losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        largest = self._maximum(logits)
        logits = logits - largest.unsqueeze(-1)  # from here on relative to the largest, so that exp cannot overflow
        log_sum = self._log_sum(logits)
        losses = log_sum - (1.0 - self.label_smoothing) * self._of_target(logits, targets)
        if self.label_smoothing:
            losses = losses - self.label_smoothing * self._mean_logit(logits)
        return losses + self.z_loss * self._squared(logits, log_sum + largest) if self.z_loss else losses

    def _maximum(self, logits: Tensor) -> Tensor:
        """[..., v] -> [...], over all ranks; a constant for autograd, as the loss does not depend on it."""
        owns_ids = logits.shape[-1] > 0
        largest = logits.detach().amax(-1) if owns_ids else logits.new_full(logits.shape[:-1], -math.inf)
        if self.group.size() > 1:
            largest = largest.contiguous()
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        return largest

    def _log_sum(self, logits: Tensor) -> Tensor:
        """Logarithm of the sum of all exponentials."""
        return reduce_from_region(logits.exp().sum(-1), self.group).log()

    def _of_target(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The target's logit, from the rank that owns it; 0 for targets that nobody owns."""
        ids = torch.arange(self.shard.start, self.shard.stop, device=targets.device)
        return reduce_from_region(torch.where(targets.unsqueeze(-1) == ids, logits, 0.0).sum(-1), self.group)

    def _mean_logit(self, logits: Tensor) -> Tensor:
        """Over the vocabulary."""
        return reduce_from_region(logits.sum(-1), self.group) / self.vocab

    def _squared(self, logits: Tensor, log_sum: Tensor) -> Tensor:
        """What z-loss multiplies."""
        return log_sum.square()

    def _count(self, counted: Tensor, targets: Tensor) -> Tensor:
        """Tokens in the mean."""
        return counted.sum().clamp(min=1)
