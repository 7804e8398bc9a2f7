"""Vocab-parallel cross-entropy: a loss over logits that no rank ever holds whole; only [s, b] numbers travel."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpverify.subjects.embedding import VocabShard, check_ids, vocab_shard
from tpverify.subjects.mappings import Group, reduce_from_region

REDUCTIONS = ("none", "mean")


class VocabParallelCrossEntropy(nn.Module):
    """``-log softmax(logits)[target]`` with the logits cut along the vocabulary over the ranks of ``group``.

    With label smoothing e the target distribution is ``(1 - e) * onehot + e / vocab``; ``z_loss * logsumexp**2`` is added. Padded
    logits are no classes: they have zero probability and zero gradient. A token whose target is ``ignore_index`` costs 0.

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
        """The loss."""
        counted = targets != self.ignore_index
        check_ids(targets[counted], self.vocab, "targets")
        losses = vocab_parallel_cross_entropy(
            logits, targets, self.shard, self.vocab, self.group, label_smoothing=self.label_smoothing, z_loss=self.z_loss
        )
        losses = losses.masked_fill(~counted, 0.0)
        return losses.sum() / counted.sum().clamp(min=1) if self.reduction == "mean" else losses


def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    shard: VocabShard,
    vocab: int,
    group: Group,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """The loss of each token: logits [..., shard.rows], targets [...] -> [...]; targets that nobody owns count as logit 0.

    Three all_reduces of [...] numbers, a fourth with label smoothing, none in backward: each rank's gradient is its own.
    """
    logits = logits[..., : shard.stop - shard.start]
    largest = _global_maximum(logits, group)
    logits = logits - largest.unsqueeze(-1)  # from here on relative to the largest, so that exp cannot overflow
    log_sum = reduce_from_region(logits.exp().sum(-1), group).log()
    ids = torch.arange(shard.start, shard.stop, device=targets.device)
    of_target = torch.where(targets.unsqueeze(-1) == ids, logits, 0.0).sum(-1)
    losses = log_sum - (1.0 - label_smoothing) * reduce_from_region(of_target, group)
    if label_smoothing:
        losses = losses - label_smoothing / vocab * reduce_from_region(logits.sum(-1), group)
    if z_loss:
        losses = losses + z_loss * (log_sum + largest).square()
    return losses


def _global_maximum(logits: Tensor, group: Group) -> Tensor:
    """[..., v] -> [...], over all ranks; a constant for autograd, as the loss does not depend on it."""
    owns_ids = logits.shape[-1] > 0
    largest = logits.detach().amax(-1) if owns_ids else logits.new_full(logits.shape[:-1], -math.inf)
    if group.size() > 1:
        largest = largest.contiguous()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest
