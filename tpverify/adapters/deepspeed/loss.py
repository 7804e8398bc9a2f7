"""DeepSpeed's loss over logits that are cut by vocabulary, with all its reductions, and as a causal language model calls it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.sequence.cross_entropy import VocabParallelCausalLMLoss, vocab_parallel_cross_entropy
from hypothesis import strategies as st
from torch import Tensor, nn

from tpverify.adapters.deepspeed.environment import COMMON, begin, program
from tpverify.adapters.deepspeed.linear import LAST
from tpverify.sharding import local_indices
from tpverify.subjects.drawing import activations, uneven_sizes
from tpverify.subjects.subject import Input, Subject, Vocabulary

ITEMS = 3
"""Tokens by which a sum is divided where the trainer gives their number."""


@dataclass(frozen=True)
class LossConfig:
    """Sizes, elements, and options of a loss over logits [batch, seq, vocab].

    Attributes:
        reduction: ``none``, ``sum`` or ``mean``; of the causal loss also ``items``, a sum divided by a number that is given.
        causal: targets are the next token's ids.
        bounds: whether the rank's range of ids is given.
        ignored: whether targets may be ``ignore_index``.
    """

    batch: int = 1
    seq: int = 2
    vocab: int = 2
    reduction: str = "none"
    causal: bool = False
    bounds: bool = True
    ignored: bool = False


@st.composite
def loss_configs(draw: st.DrawFn, world_size: int) -> LossConfig:
    """All options; any vocabulary, also one that leaves ranks without an id, to be refused."""
    seq, batch, _ = draw(activations(world_size, False, ()))
    causal, bounds = draw(st.booleans()), draw(st.booleans())
    reduction = draw(st.sampled_from(["mean", "items"] if causal else ["none", "sum", "mean"]))
    # A mean over no target at all is NaN on one device.
    ignored = reduction != "mean" and draw(st.booleans())
    return LossConfig(batch, seq + causal, max(2, draw(uneven_sizes(world_size))), reduction, causal, bounds, ignored)


class ReferenceLoss(nn.Module):
    """torch's."""

    def __init__(self, config: LossConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """[b, s, v] and [b, s] -> [b, s] or []."""
        if self.config.causal:
            logits, targets = logits[:, :-1], targets[:, 1:]
        reduction = "sum" if self.config.reduction == "items" else self.config.reduction
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)
        if self.config.reduction == "items":
            return loss / ITEMS
        return loss.view_as(targets) if reduction == "none" else loss


class ParallelLoss(nn.Module):
    """DeepSpeed's."""

    def __init__(self, config: LossConfig) -> None:
        super().__init__()
        group = begin()
        options: dict[str, Any] = {"tp_group": group}
        if config.bounds:
            ids = local_indices(config.vocab, LAST, group.rank(), group.size())
            first = ids[0] if ids else config.vocab
            options |= {"vocab_start_index": first, "vocab_end_index": first + len(ids)}
        self.config = config
        self.options = options
        self.causal = VocabParallelCausalLMLoss(**options)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """[b, s, this rank's v] and [b, s] -> [b, s] or []."""
        loss: Tensor
        if self.config.causal:
            items = torch.tensor(ITEMS) if self.config.reduction == "items" else None
            loss = self.causal(logits, targets, num_items_in_batch=items)
        else:
            loss = vocab_parallel_cross_entropy(logits, targets, reduction=self.config.reduction, **self.options)
        return loss


def _source(config: LossConfig) -> str:
    options = f", reduction={config.reduction!r}, tp_group=dist.group.WORLD, **bounds"
    if config.causal:
        options = f", num_items_in_batch=torch.tensor({ITEMS})" if config.reduction == "items" else ""
    bounds = [
        f"sizes = [len(part) for part in torch.arange({config.vocab}).tensor_split(dist.get_world_size())]",
        "first = sum(sizes[: dist.get_rank()])",
        "bounds = {'vocab_start_index': first, 'vocab_end_index': first + sizes[dist.get_rank()]}",
    ]
    name = "VocabParallelCausalLMLoss" if config.causal else "vocab_parallel_cross_entropy"
    body = [
        f"loss = {name}{'(dist.group.WORLD, **bounds)' * config.causal}",
        "module = torch.nn.Module()",
        f"module.forward = lambda logits, targets: loss(logits, targets{options})",
    ]
    imported = f"from deepspeed.sequence.cross_entropy import {name}"
    return program(*(bounds if config.bounds else ["bounds = {}"]), *body, imports=imported)


SUBJECTS = {
    "vocab_parallel_cross_entropy": Subject(
        name="deepspeed.vocab_parallel_cross_entropy",
        reference=ReferenceLoss,
        parallel=ParallelLoss,
        configs=loss_configs,
        inputs=lambda c: {
            "logits": Input((c.batch, c.seq, c.vocab), placement=LAST),
            "targets": Input((c.batch, c.seq), kind="integers", high=c.vocab, ignore=-100 if c.ignored else None),
        },
        rejects=lambda c, world_size: c.vocab < world_size or (not c.bounds and c.vocab % world_size != 0),
        vocabulary=lambda c: Vocabulary(
            c.vocab, targets="targets", logits="" if c.causal else "logits", ignore=-100 if c.ignored else None
        ),
        precision=torch.float32,  # logits are cast to it
        script=_source,
        **COMMON,
    ),
}
