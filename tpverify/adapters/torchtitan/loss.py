"""torchtitan's cross-entropy over logits that are cut along the vocabulary, beside torch's."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torchtitan.components.loss import _LossParallelCrossEntropy, cross_entropy_loss

from tpverify.adapters.torchtitan.config import IGNORED, cut_sizes
from tpverify.adapters.torchtitan.environment import RANK_LOCAL, Environment, local, quietly
from tpverify.sharding import Replicate, Shard
from tpverify.subjects.drawing import activations
from tpverify.subjects.subject import Collective, Input, Subject, Vocabulary

BACKENDS = ("spmd_types", "partial_dtensor", "full_dtensor")


@dataclass(frozen=True)
class LossConfig:
    """Sizes, elements, and options of a loss over logits [batch, seq, vocab].

    Attributes:
        backend: ``spmd_backend``: what logits are, the rank's own tensor or a DTensor.
        reduction: ``sum``, or ``none``: the function beneath, called as its docstring says, with the loss of each token.
    """

    batch: int = 1
    seq: int = 1
    vocab: int = 2
    backend: str = "spmd_types"
    reduction: str = "sum"


@st.composite
def loss_configs(draw: st.DrawFn, world_size: int) -> LossConfig:
    """All options."""
    seq, batch, _ = draw(activations(world_size, False, ()))
    backend, reduction = draw(st.sampled_from(BACKENDS)), draw(st.sampled_from(["sum", "sum", "none"]))
    return LossConfig(batch, seq, draw(cut_sizes(world_size, 2)), backend, reduction)


class ReferenceLoss(nn.Module):
    """torch's."""

    def __init__(self, config: LossConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """[b, s, v], [b, s] -> [], or [b * s] without reduction."""
        flat, reduction = logits.flatten(0, 1), self.config.reduction
        return F.cross_entropy(flat, labels.flatten(), reduction=reduction, ignore_index=IGNORED)


class Loss(nn.Module):
    """torchtitan's, of a rank's logits."""

    def __init__(self, config: LossConfig) -> None:
        super().__init__()
        self.config, self.environment = config, Environment(config.backend, sequence_parallel=False)

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The rank's logits [b, s, v], labels [b, s] -> [], or [b * s] without reduction."""
        if self.config.reduction == "none":
            group = self.environment.dims.get_optional_mesh("tp", include_singleton_axes=True).get_group()
            found: Tensor = _LossParallelCrossEntropy.apply(logits.flatten(0, 1), labels.flatten(), group, self.config.vocab, "none")
            return found
        _, targets, _ = self.environment.given(labels, labels)
        return local(cross_entropy_loss(self._as_by_the_model(logits), targets, global_vocab_size=self.config.vocab))

    def _as_by_the_model(self, logits: Tensor) -> Tensor:
        """The logits as its last layer hands them over."""
        mesh = self.environment.mesh
        if mesh is None:
            return logits
        placements: list[Placement] = [Replicate()] * mesh.ndim
        if self.environment.dims.tp_enabled:
            placements[-1] = Shard(2)
        size = torch.Size((self.config.batch, self.config.seq, self.config.vocab))
        stride = tuple(prod(size[dim + 1 :]) for dim in range(3))
        return DTensor.from_local(logits.contiguous(), mesh, placements, run_check=False, shape=size, stride=stride)


def _communication(config: LossConfig, world_size: int) -> list[Collective]:
    """The maximum, the sum of exponentials and the target's logarithm of each token."""
    return [] if world_size == 1 else [Collective("all_reduce", "forward", "*", 3, config.batch * config.seq)]


cross_entropy = Subject(
    name="torchtitan.cross_entropy",
    reference=ReferenceLoss,
    parallel=Loss,
    configs=loss_configs,
    inputs=lambda config: {
        "logits": Input((config.batch, config.seq, config.vocab), placement=Shard(2)),
        "labels": Input((config.batch, config.seq), kind="integers", high=config.vocab, ignore=IGNORED),
    },
    communication=_communication,
    vocabulary=lambda config: Vocabulary(config.vocab, targets="labels", logits="logits", ignore=IGNORED),
    rank_local=RANK_LOCAL,
    precision=torch.float32,
    dtypes=("float64", "float32"),
    context=quietly,
)
