"""Subject: ``parallelize_module`` on a small Llama-like decoder, by the plans that training frameworks use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tpverify.sharding import Replicate, Shard
from tpverify.subjects.drawing import activations, divisible
from tpverify.subjects.dtensor import loss_parallel_outside, padded_elements, quietly, tp_mesh
from tpverify.subjects.dtensor_attention import Attention
from tpverify.subjects.dtensor_loss import filled_vocabularies, loss_collectives
from tpverify.subjects.dtensor_mlp import FeedForward
from tpverify.subjects.subject import Collective, Input, Subject, Vocabulary


@dataclass(frozen=True)
class DTensorLlamaConfig:
    """Sizes, elements, and options of a decoder over ids [batch, seq], hidden = heads * head_dim.

    Attributes:
        plan: ``tensor``: activations between blocks are replicated; ``sequence``: cut along the sequence, as plain tensors;
            ``dtensor``: likewise, as DTensors, so that the sequence need not divide.
        local_heads: each rank computes its heads with plain tensors.
        tied: the output layer's weight is the embedding's.
        loss: the decoder returns the mean cross-entropy by ``loss_parallel`` instead of logits.
    """

    batch: int = 1
    seq: int = 1
    layers: int = 1
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 2
    ffn: int = 1
    vocab: int = 2
    plan: str = "tensor"
    local_heads: bool = True
    tied: bool = False
    loss: bool = False

    @property
    def hidden(self) -> int:
        """Features of an activation."""
        return self.heads * self.head_dim


class Block(nn.Module):
    """Pre-norm attention and SwiGLU network, each added to its input: [b, s, hidden] -> the same."""

    def __init__(self, config: DTensorLlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden)
        self.attention = Attention(config.heads, config.kv_heads, config.head_dim, bias=False, causal=True, fused=config.local_heads)
        self.ffn_norm = nn.RMSNorm(config.hidden)
        self.feed_forward = FeedForward(config.hidden, config.ffn, "swiglu", bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """The block."""
        x = x + self.attention(self.attention_norm(x), rotation)
        output: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return output


class Llama(nn.Module):
    """Decoder: ids [b, s] -> logits [b, s, vocab]; with targets [b, s] -> their mean cross-entropy []."""

    rotation: Tensor

    def __init__(self, config: DTensorLlamaConfig) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden)
        self.output = nn.Linear(config.hidden, config.vocab, bias=False)
        if config.tied:
            self.output.weight = self.tok_embeddings.weight
        frequencies = 10000.0 ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
        angles = torch.outer(torch.arange(config.seq).to(frequencies), frequencies)
        self.register_buffer("rotation", torch.stack([angles.cos(), angles.sin()], dim=-1))

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits or loss."""
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x, self.rotation)
        logits: Tensor = self.output(self.norm(x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def llama_plan(config: DTensorLlamaConfig) -> dict[str, ParallelStyle]:
    """The plan for :class:`Llama`."""
    sequence = config.plan != "tensor"
    between = Shard(1) if sequence else Replicate()
    local = config.plan != "dtensor"
    plan: dict[str, ParallelStyle] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=between, use_local_output=local),
        "layers.*.attention.w[qkv]": ColwiseParallel(use_local_output=config.local_heads),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=between, use_local_output=local),
        "layers.*.feed_forward.w[13]": ColwiseParallel(),
        "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=between, use_local_output=local),
        "output": ColwiseParallel(
            input_layouts=between, output_layouts=Shard(2) if config.loss else Replicate(), use_local_output=not config.loss
        ),
    }
    # Heads that are DTensors meet the rotation, which must be one too.
    rotation = None if config.local_heads else Replicate()
    if sequence or not config.local_heads:
        plan["layers.*.attention"] = PrepareModuleInput(input_layouts=(between, rotation), desired_input_layouts=(Replicate(), rotation))
    if sequence:
        plan["layers.*.feed_forward"] = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))
        plan |= {"layers.*.*_norm": SequenceParallel(), "norm": SequenceParallel()}
    return plan


def parallel_llama(config: DTensorLlamaConfig, plan: dict[str, ParallelStyle]) -> nn.Module:
    """A decoder under a plan."""
    model = Llama(config)
    parallelize_module(model, tp_mesh(), plan)
    if config.tied:
        # parallelize_module gives each layer a parameter of its own, and so unties them without a word.
        model.output.weight = model.tok_embeddings.weight
    return model


@st.composite
def dtensor_llama_configs(draw: st.DrawFn, world_size: int) -> DTensorLlamaConfig:
    """All options; heads and ffn that do not divide are rare, to be refused; any vocabulary that leaves no rank empty."""
    plan = draw(st.sampled_from(["tensor", "sequence", "dtensor"]))
    local_heads = draw(st.booleans())
    seq, batch, flaw = draw(activations(world_size, plan == "sequence", ("heads", "ffn") if local_heads else ("ffn",)))
    # At least 2: released DTensor loses a sharded dimension of size 1 in reshapes, and refuses them, even on a single rank.
    kv_heads = max(2, draw(divisible(world_size, flaw == "heads", largest=2)))
    return DTensorLlamaConfig(
        batch=batch,
        seq=seq,
        layers=draw(st.integers(1, 2)),
        heads=kv_heads * draw(st.integers(1, 2)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([2, 4])),
        ffn=max(2, draw(divisible(world_size, flaw == "ffn"))),
        vocab=draw(filled_vocabularies(world_size)),
        plan=plan,
        local_heads=local_heads,
        tied=draw(st.booleans()),
        loss=draw(st.booleans()),
    )


def _communication(config: DTensorLlamaConfig, world_size: int) -> list[Collective]:
    """Every activation that changes layout is one message; without PrepareModuleInput each layer that reads it is one in backward."""
    if world_size == 1:
        return []
    tokens, logits = config.batch * config.seq, (config.batch, config.seq, config.vocab)
    activation = (config.batch, config.seq, config.hidden)
    if config.plan == "tensor":
        size = tokens * config.hidden
        backward = (3 if config.local_heads else 1) + 2
        messages = [
            Collective("all_reduce", "forward", "*", 1 + 2 * config.layers, size),
            Collective("all_reduce", "backward", "*", backward * config.layers + 1, size),
        ]
    else:
        size = padded_elements(activation, Shard(1), world_size)
        messages = [
            Collective(kind, phase, "*", 2 * config.layers + 1, size)
            for kind in ("all_gather", "reduce_scatter")
            for phase in ("forward", "backward")
        ]
    if config.loss:
        return messages + loss_collectives(tokens)
    return [*messages, Collective("all_gather", "forward", "*", 1, padded_elements(logits, Shard(2), world_size))]


def _inputs(config: DTensorLlamaConfig) -> dict[str, Input]:
    ids = Input((config.batch, config.seq), kind="integers", high=config.vocab)
    return {"ids": ids, "targets": ids} if config.loss else {"ids": ids}


@contextlib.contextmanager
def _context(config: DTensorLlamaConfig) -> Iterator[None]:
    with quietly(), loss_parallel_outside() if config.loss else contextlib.nullcontext():
        yield


def _vocabulary(config: DTensorLlamaConfig) -> Vocabulary:
    lookup = "tok_embeddings" if config.plan == "tensor" else ""  # parts of the sequence travel in another order than the ids
    return Vocabulary(config.vocab, ("tok_embeddings.weight",), "ids", lookup, targets="targets" if config.loss else "")


dtensor_llama = Subject(
    name="dtensor_llama",
    reference=Llama,
    parallel=lambda c: parallel_llama(c, llama_plan(c)),
    configs=dtensor_llama_configs,
    inputs=_inputs,
    placements={"tok_embeddings.weight": Shard(0), "*norm.weight": Replicate()},
    communication=_communication,
    rejects=lambda c, world_size: c.kv_heads % world_size != 0 or c.ffn % world_size != 0,
    refusal=RuntimeError,
    context=_context,
    vocabulary=_vocabulary,
    subgroups=True,
)
