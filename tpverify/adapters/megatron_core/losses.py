"""megatron-core's vocabulary-parallel losses beside torch's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from megatron.core import parallel_state
from megatron.core import tensor_parallel as tp
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from torch import Tensor, nn

from tpverify.adapters.megatron_core.environment import COMMON, begin
from tpverify.adapters.megatron_core.script import script
from tpverify.sharding import Replicate, Shard
from tpverify.subjects.drawing import activations, loss_vocabularies
from tpverify.subjects.subject import Input, Subject, Vocabulary

IGNORED = -100
"""A target that no rank owns."""


@dataclass(frozen=True)
class CrossEntropyConfig:
    """Sizes, elements, and options of a loss over logits [seq, batch, vocab].

    Attributes:
        reuse: the logits are looked at again after the loss.
        masked: some targets are ``IGNORED``, and the caller masks their losses.
        fused: Megatron's fused loss.
    """

    seq: int = 1
    batch: int = 1
    vocab: int = 2
    label_smoothing: float = 0.0
    reuse: bool = False
    masked: bool = False
    fused: bool = False


@st.composite
def cross_entropy_configs(draw: st.DrawFn, world_size: int, fused: bool) -> CrossEntropyConfig:
    """All options; the vocabulary divides, as Megatron pads it."""
    seq, batch, _ = draw(activations(world_size, False, ()))
    vocab = draw(loss_vocabularies(world_size)) * world_size
    smoothing = 0.0 if fused else draw(st.sampled_from([0.0, 0.1, 0.5]))
    return CrossEntropyConfig(seq, batch, vocab, smoothing, draw(st.booleans()), draw(st.booleans()), fused)


class ReferenceLoss(nn.Module):
    """The loss of every token, and the logits after it if they are reused."""

    def __init__(self, config: CrossEntropyConfig) -> None:
        super().__init__()
        self.config = config

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """[s, b, v] and [s, b] -> [s, b]; smoothing is dealt out to the other ids only, not to the target as well."""
        vocab = logits.shape[-1]
        smoothing = self.config.label_smoothing * vocab / (vocab - 1)
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", label_smoothing=smoothing, ignore_index=IGNORED)
        return losses.view_as(targets)

    def forward(self, hidden: Tensor, targets: Tensor) -> Any:
        """``hidden`` are logits that a head has yet to hand over."""
        logits = hidden * 1.0
        loss = self.loss(logits, targets)
        loss = loss * (targets != IGNORED) if self.config.masked else loss
        return (loss, logits.detach()) if self.config.reuse else loss


class ParallelLoss(ReferenceLoss):
    """Megatron's."""

    def __init__(self, config: CrossEntropyConfig) -> None:
        super().__init__(config)
        begin()

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """[s, b, v / world_size] and [s, b] -> [s, b]."""
        if self.config.fused:
            losses: Tensor = fused_vocab_parallel_cross_entropy(logits, targets, parallel_state.get_tensor_model_parallel_group())
        else:
            losses = tp.vocab_parallel_cross_entropy(logits, targets, self.config.label_smoothing)
        return losses


LOSS = """class Loss(torch.nn.Module):
    def forward(self, hidden, targets):
        logits = hidden * 1.0  # by a head
        loss = {loss}
        return {returned}
"""


def _source(config: CrossEntropyConfig) -> str:
    imports = "from megatron.core.tensor_parallel import vocab_parallel_cross_entropy"
    loss = "vocab_parallel_cross_entropy(logits, targets" + f", {config.label_smoothing}" * (config.label_smoothing > 0) + ")"
    if config.fused:
        imports = "from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy"
        loss = "fused_vocab_parallel_cross_entropy(logits, targets, parallel_state.get_tensor_model_parallel_group())"
    loss += f" * (targets != {IGNORED})" * config.masked
    definition = LOSS.format(loss=loss, returned="(loss, logits.detach())" if config.reuse else "loss")
    return script("module = Loss()", imports=imports, definitions=(definition,), finalized=False)


def _subject(name: str, fused: bool) -> Subject:
    return Subject(
        name=f"megatron_core.{name}",
        reference=ReferenceLoss,
        parallel=ParallelLoss,
        configs=lambda world_size: cross_entropy_configs(world_size, fused),
        inputs=lambda c: {
            "logits": Input((c.seq, c.batch, c.vocab), placement=Shard(2)),
            "targets": Input((c.seq, c.batch), kind="integers", high=c.vocab, ignore=IGNORED if c.masked else None),
        },
        outputs=lambda c: (Replicate(), Shard(2)) if c.reuse else Replicate(),
        vocabulary=lambda c: Vocabulary(c.vocab, targets="targets", logits="logits", ignore=IGNORED if c.masked else None),
        precision=torch.float32,  # the loss is computed in it
        script=_source,
        **COMMON,
    )


SUBJECTS = {
    "vocab_parallel_cross_entropy": _subject("vocab_parallel_cross_entropy", False),
    "fused_vocab_parallel_cross_entropy": _subject("fused_vocab_parallel_cross_entropy", True),
}
