"""Subject: vocab-parallel cross-entropy beside the loss written from log-probabilities of whole logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from tpverify.current_group import tp_group
from tpverify.subjects.cross_entropy import VocabParallelCrossEntropy, at_least_float32
from tpverify.subjects.drawing import activations, loss_vocabularies
from tpverify.subjects.embedding import vocab_multiples, vocab_placement
from tpverify.subjects.subject import Collective, Input, Subject, Vocabulary


@dataclass(frozen=True)
class VocabParallelCrossEntropyConfig:
    """Sizes, elements, and options of a loss over logits [seq, batch, vocab]; ``multiple=0`` leaves the vocabulary uneven."""

    seq: int = 1
    batch: int = 1
    vocab: int = 2
    multiple: int = 1
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    ignore_index: int = -100
    reduction: str = "none"


class ReferenceCrossEntropy(nn.Module):
    """The loss on one device."""

    def __init__(self, label_smoothing: float, z_loss: float, ignore_index: int, reduction: str) -> None:
        super().__init__()
        self.label_smoothing, self.z_loss = label_smoothing, z_loss
        self.ignore_index, self.reduction = ignore_index, reduction

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """logits [s, b, v], targets [s, b] -> [s, b], or [] for ``mean``."""
        counted = targets != self.ignore_index
        logits = at_least_float32(logits)
        log_probabilities = torch.log_softmax(logits, dim=-1)
        of_target = log_probabilities.gather(-1, targets.masked_fill(~counted, 0).unsqueeze(-1)).squeeze(-1)
        losses = -(1.0 - self.label_smoothing) * of_target - self.label_smoothing * log_probabilities.mean(-1)
        losses = losses + self.z_loss * torch.logsumexp(logits, dim=-1).square()
        losses = losses * counted
        return losses.sum() / max(1, int(counted.sum())) if self.reduction == "mean" else losses


label_smoothings: st.SearchStrategy[float] = st.sampled_from([0.0, 0.1, 0.5])
z_losses: st.SearchStrategy[float] = st.sampled_from([0.0, 0.01])
ignore_indices: st.SearchStrategy[int] = st.sampled_from([-100, -1, 0])
reductions: st.SearchStrategy[str] = st.sampled_from(["none", "mean"])


@st.composite
def vocab_parallel_cross_entropy_configs(draw: st.DrawFn, world_size: int) -> VocabParallelCrossEntropyConfig:
    """All options; padded and uneven vocabularies, also smaller than the world."""
    seq, batch, _ = draw(activations(world_size, False, ()))
    return VocabParallelCrossEntropyConfig(
        seq=seq,
        batch=batch,
        vocab=draw(loss_vocabularies(world_size)),
        multiple=draw(vocab_multiples),
        label_smoothing=draw(label_smoothings),
        z_loss=draw(z_losses),
        ignore_index=draw(ignore_indices),
        reduction=draw(reductions),
    )


def loss_communication(tokens: int, label_smoothing: float, module: str) -> list[Collective]:
    """The collectives of the loss of ``tokens`` tokens: maximum, sum of exponentials, target logit, and the mean logit."""
    return [
        Collective("all_reduce", "forward", module, 1, tokens, "MAX"),
        Collective("all_reduce", "forward", module, 3 if label_smoothing else 2, tokens, "SUM"),
    ]


def _communication(config: VocabParallelCrossEntropyConfig, world_size: int) -> list[Collective]:
    return [] if world_size == 1 else loss_communication(config.seq * config.batch, config.label_smoothing, "")


def _inputs(config: VocabParallelCrossEntropyConfig) -> dict[str, Input]:
    tokens = (config.seq, config.batch)
    return {
        "logits": Input((*tokens, config.vocab), placement=vocab_placement(2, config.multiple)),
        "targets": Input(tokens, kind="integers", high=config.vocab, ignore=config.ignore_index),
    }


vocab_parallel_cross_entropy = Subject(
    name="vocab_parallel_cross_entropy",
    reference=lambda c: ReferenceCrossEntropy(c.label_smoothing, c.z_loss, c.ignore_index, c.reduction),
    parallel=lambda c: VocabParallelCrossEntropy(
        c.vocab,
        group=tp_group(),
        multiple=c.multiple,
        label_smoothing=c.label_smoothing,
        z_loss=c.z_loss,
        ignore_index=c.ignore_index,
        reduction=c.reduction,
    ),
    configs=vocab_parallel_cross_entropy_configs,
    inputs=_inputs,
    communication=_communication,
    vocabulary=lambda c: Vocabulary(c.vocab, targets="targets", logits="logits", ignore=c.ignore_index),
    subgroups=True,
)
