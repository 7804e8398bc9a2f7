"""Ranks that do not issue the same collectives, planted in layers whose numbers alone would not always tell."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from planted import plant
from planted_layers import PlantedCrossEntropy
from torch import Tensor

from tpverify.subjects.cross_entropy_subject import vocab_parallel_cross_entropy as cross_entropy
from tpverify.subjects.linear import RowParallelLinear
from tpverify.subjects.linear_subjects import row_parallel_linear
from tpverify.subjects.mappings import Group, apply, reduce_from_region


class SumThatDiffers(torch.autograd.Function):
    """all_reduce / identity, with an operation and a dtype that need not be the same on all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, op: dist.ReduceOp.RedOpType, dtype: torch.dtype) -> Tensor:
        output = x.to(dtype, copy=True)
        dist.all_reduce(output, op=op, group=group)
        return output.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad, None, None, None


class MaximumOnOneRank(RowParallelLinear):
    """The last rank asks for the maximum where the others ask for the sum."""

    def reduce(self, partial: Tensor) -> Tensor:
        """all_reduce with different operations."""
        odd = 0 < self.group.rank() == self.group.size() - 1
        return apply(SumThatDiffers, partial, self.group, dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM, partial.dtype)


class SinglePrecisionOnOneRank(RowParallelLinear):
    """The last rank sends half as many bytes."""

    def reduce(self, partial: Tensor) -> Tensor:
        """all_reduce in different dtypes."""
        odd = 0 < self.group.rank() == self.group.size() - 1
        return apply(SumThatDiffers, partial, self.group, dist.ReduceOp.SUM, torch.float32 if odd else partial.dtype)


class SkippedOnOneRank(RowParallelLinear):
    """The last rank takes its partial result for the whole."""

    def reduce(self, partial: Tensor) -> Tensor:
        """all_reduce, or nothing."""
        odd = 0 < self.group.rank() == self.group.size() - 1
        return partial if odd else apply(SumThatDiffers, partial, self.group, dist.ReduceOp.SUM, partial.dtype)


class SwappedOnOneRank(PlantedCrossEntropy):
    """Sum of exponentials and target logit, two all_reduces of one shape, in another order on the last rank."""

    def exponentials(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Their sum."""
        return reduce_from_region((logits - self.largest.unsqueeze(-1)).exp().sum(-1), self.group)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss, from sums taken beforehand."""
        own = logits[..., : self.shard.stop - self.shard.start]
        self.largest = self.shift(own)
        steps = [self.exponentials, super().of_target]
        odd = 0 < self.group.rank() == self.group.size() - 1
        self.sums = {step.__name__: step(own, targets) for step in (reversed(steps) if odd else steps)}
        return super().forward(logits, targets)

    def log_sum(self, logits: Tensor) -> Tensor:
        """Logarithm of the sum of all exponentials."""
        return self.largest + self.sums["exponentials"].log()

    def of_target(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The target's logit."""
        return self.sums["of_target"]


class SkippedWithoutTarget(PlantedCrossEntropy):
    """A rank that owns no target takes no part in the sum of the target logits."""

    def of_target(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The target's logit."""
        owned = (targets >= self.shard.start) & (targets < self.shard.stop)
        if not bool(owned.any()):
            return torch.zeros(targets.shape)
        return super().of_target(logits, targets)


maximum_on_one_rank = plant(row_parallel_linear, "maximum_on_one_rank", MaximumOnOneRank)
skipped_on_one_rank = plant(row_parallel_linear, "skipped_on_one_rank", SkippedOnOneRank)
single_precision_on_one_rank = plant(row_parallel_linear, "single_precision_on_one_rank", SinglePrecisionOnOneRank)
swapped_on_one_rank = plant(cross_entropy, "swapped_on_one_rank", SwappedOnOneRank)
skipped_without_target = plant(cross_entropy, "skipped_without_target", SkippedWithoutTarget)
