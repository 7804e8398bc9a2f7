"""Subject: ``loss_parallel`` with ``cross_entropy`` over logits that are cut along the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor.parallel import PrepareModuleInput, parallelize_module

from tpverify.sharding import Shard
from tpverify.subjects.drawing import activations
from tpverify.subjects.dtensor import loss_parallel_outside, take_dtensor, tp_mesh
from tpverify.subjects.subject import Collective, Input, Subject, Vocabulary


@dataclass(frozen=True)
class DTensorLossConfig:
    """Sizes, elements, and options of a loss over logits [batch, seq, vocab].

    Attributes:
        form: how ``cross_entropy`` gets its logits: ``tokens``: [batch * seq, vocab]; ``channels``: [batch, vocab, seq].
        weighted: classes have different weights.
        dtensor_input: the caller hands over a DTensor, so that the vocabulary need not divide.
    """

    batch: int = 1
    seq: int = 1
    vocab: int = 2
    reduction: str = "mean"
    ignore_index: int = -100
    form: str = "tokens"
    weighted: bool = False
    dtensor_input: bool = False


class CrossEntropy(nn.Module):
    """``F.cross_entropy``: logits [b, s, v], targets [b, s] -> [], or [b * s] or [b, s] without reduction."""

    weight: Tensor | None

    def __init__(self, config: DTensorLossConfig) -> None:
        super().__init__()
        self.form, self.reduction, self.ignore_index = config.form, config.reduction, config.ignore_index
        self.register_buffer("weight", torch.linspace(0.5, 2.0, config.vocab) if config.weighted else None)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss."""
        if self.form == "tokens":
            logits, targets = logits.flatten(0, 1), targets.flatten()
        else:
            logits = logits.transpose(1, 2)
        return F.cross_entropy(logits, targets, self.weight, reduction=self.reduction, ignore_index=self.ignore_index)


def _parallel(config: DTensorLossConfig) -> nn.Module:
    module, mesh = CrossEntropy(config), tp_mesh()
    if config.dtensor_input:
        take_dtensor(module, mesh, Shard(2), (config.batch, config.seq, config.vocab))
        return module
    plan = PrepareModuleInput(input_layouts=(Shard(2), None), desired_input_layouts=(Shard(2), None))
    return parallelize_module(module, mesh, plan)


def filled_vocabularies(world_size: int, largest: int = 4) -> st.SearchStrategy[int]:
    """Numbers of ids, from 2 up to ``largest`` per rank, of which ``torch.chunk`` gives every rank at least one.

    In released DTensor a rank without ids leaves out ``loss_parallel``'s reduction of the maximum, so that from there on its
    reductions meet other ones of the other ranks (see ``properties/test_dtensor_subjects.py``).
    """
    sizes = range(max(2, world_size), largest * world_size + 1)
    return st.sampled_from([size for size in sizes if -(-size // world_size) * (world_size - 1) < size])


@st.composite
def dtensor_loss_configs(draw: st.DrawFn, world_size: int) -> DTensorLossConfig:
    """All options; a vocabulary that does not divide wherever the DTensor knows the whole shape."""
    dtensor_input, weighted = draw(st.booleans()), draw(st.booleans())
    # In released DTensor, backward looks up the weight of ignored targets too: they must be ids.
    ignored = [0] if weighted else [-100, -1, 0]
    seq, batch, _ = draw(activations(world_size, False, ()))
    per_rank = st.integers(2 if world_size == 1 else 1, 4)
    return DTensorLossConfig(
        batch=batch,
        seq=seq,
        vocab=draw(filled_vocabularies(world_size)) if dtensor_input else draw(per_rank) * world_size,
        reduction=draw(st.sampled_from(["mean", "sum", "none"])),
        ignore_index=draw(st.sampled_from(ignored)),
        form=draw(st.sampled_from(["tokens", "channels"])),
        weighted=weighted,
        dtensor_input=dtensor_input,
    )


def loss_collectives(tokens: int) -> list[Collective]:
    """The collectives of ``loss_parallel``: maximum, sum of exponentials and target logit of each token, nothing in backward."""
    return [Collective("all_reduce", "forward", "*", 3, tokens)]


def _inputs(config: DTensorLossConfig) -> dict[str, Input]:
    tokens = (config.batch, config.seq)
    return {
        "logits": Input((*tokens, config.vocab), placement=Shard(2)),
        "targets": Input(tokens, kind="integers", high=config.vocab, ignore=config.ignore_index),
    }


dtensor_loss = Subject(
    name="dtensor_loss",
    reference=CrossEntropy,
    parallel=_parallel,
    configs=dtensor_loss_configs,
    inputs=_inputs,
    communication=lambda c, world_size: [] if world_size == 1 else loss_collectives(c.batch * c.seq),
    context=lambda c: loss_parallel_outside(),
    vocabulary=lambda c: Vocabulary(c.vocab, targets="targets", logits="logits", ignore=c.ignore_index),
    subgroups=True,
)
