"""Planted bugs of attention: which heads a rank has, and how Q|K|V lie."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from tpverify.mutants.mutant import add_mutant, mutant
from tpverify.sharding import Shard
from tpverify.subjects.attention import ParallelAttention
from tpverify.subjects.attention_subject import AttentionConfig, attention, attention_placements
from tpverify.subjects.mappings import gather_from_region, scatter_to_region

LAYOUT = "DeepSpeed AutoTP, Automodel: fused projections of unknown order, cut as if they were one matrix; text is fluent nonsense"


def configs_with(world_size: int, **changes: Any) -> SearchStrategy[AttentionConfig]:
    """Configs of attention, some fields of which are fixed."""
    assert callable(attention.configs)
    return attention.configs(world_size).map(lambda config: replace(config, **changes))


@mutant("fused layout", attention, "forward", origin=LAYOUT, module="proj", ranks="all")
class TriplesPerHead(ParallelAttention):
    """Q|K|V is read as (q, k, v) of one head after the other, the order of other model families."""

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.qkv.kv_heads != self.qkv.heads:
            return super()._heads(qkv)
        query, key, value = qkv.reshape(*qkv.shape[:-1], self.qkv.heads, 3, self.qkv.head_dim).permute(3, 1, 2, 0, 4)
        return query, key, value


add_mutant(
    "fused-projection-cut-plainly",
    "fused layout",
    attention,
    "forward",
    configs=lambda world_size: configs_with(world_size).map(lambda c: replace(c, kv_heads=c.heads)),
    placements=lambda c: {**attention_placements(c.hidden, c.heads, c.kv_heads), "*qkv.*": Shard(0)},
    story="The loader cuts the fused Q|K|V matrix into equal blocks of rows, so that the first ranks hold queries only.",
    origin=LAYOUT,
    module="proj",
)

add_mutant(
    "fused-bias-cut-plainly",
    "fused layout",
    attention,
    "forward",
    configs=lambda world_size: configs_with(world_size, bias=True).map(lambda c: replace(c, kv_heads=c.heads)),
    placements=lambda c: {"*qkv.bias": Shard(0), **attention_placements(c.hidden, c.heads, c.kv_heads)},
    story="The loader cuts the weight of Q|K|V block by block, but its bias into equal parts.",
    origin="weight loaders with a special case for matrices: a zero bias hides it, as freshly initialised models have",
    module="proj",
)


@mutant(
    "fused layout",
    attention,
    "forward",
    origin="vLLM, TGI: key and value exchanged where a checkpoint stores K|V per head",
    module="proj",
    ranks="all",
)
class KeysAndValuesInterleaved(ParallelAttention):
    """With several key-value heads on a rank, K|V is read as (k, v) of one head after the other."""

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads, keys, width = self.qkv.heads, self.qkv.kv_heads, self.qkv.head_dim
        pairs = qkv[..., heads * width :].reshape(*qkv.shape[:-1], keys, 2, width).transpose(-3, -2).flatten(-3)
        return super()._heads(torch.cat([qkv[..., : heads * width], pairs], -1))


@mutant(
    "heads",
    attention,
    "forward",
    origin="grouped-query ports that tile keys instead of repeating them: right for one key-value head per rank",
    module="proj",
)
class KeysTiled(ParallelAttention):
    """Query head i uses key-value head i modulo their number, instead of the one of its group."""

    def _repeat(self, shared: Tensor) -> Tensor:
        return shared.repeat(1, self.qkv.heads // self.qkv.kv_heads, 1, 1)


@mutant(
    "heads",
    attention,
    "forward",
    origin="key-value caches and projections that a rank indexes with its own number: every query group reads the first head",
    module="proj",
)
class FirstKeyForAll(ParallelAttention):
    """All query heads of a rank use its first key-value head."""

    def _repeat(self, shared: Tensor) -> Tensor:
        return shared[:, :1].repeat_interleave(self.qkv.heads, dim=1)


@mutant(
    "heads",
    attention,
    "forward",
    origin="a published teaching block: tokens and heads not transposed, so a result that depends on the number of ranks",
    module="proj",
)
class ScoresAcrossHeads(ParallelAttention):
    """Scores are taken between the heads of one token, of which a rank sees its own only."""

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2)


@mutant(
    "order",
    attention,
    "forward",
    origin="reshapes without a transpose back: with one head on a rank, or heads of size 1, nothing is wrong",
    module="proj",
    diagnosis="in another order",
)
class FeaturesBeforeHeads(ParallelAttention):
    """The context is flattened with the features of a head outside and the heads inside."""

    def _join(self, context: Tensor) -> Tensor:
        return context.permute(2, 0, 3, 1).flatten(2)


@mutant("scale", attention, "forward", origin="sizes derived from local ones: a head size that shrinks with the TP degree", module="proj")
class ScaledByLocalSize(ParallelAttention):
    """Scores are divided by the root of local hidden size / heads, which is the head size divided by the ranks."""

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return super()._attend(query * self.qkv.group.size() ** 0.5, key, value)


@mutant(
    "conditional",
    attention,
    "forward",
    origin="masks built in another code path: encoders become causal once sequence parallelism is on",
    module="proj",
    ranks="",
)
class CausalUnderSequenceParallelism(ParallelAttention):
    """Under sequence parallelism attention is causal whether it should be or not."""

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        causal = self.causal or (self.qkv.sequence_parallel and self.qkv.group.size() > 1)
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal)


@mutant(
    "conditional",
    attention,
    "forward",
    origin="early fixed-size kernels: one TP degree takes another path, in which scores are not scaled",
    module="proj",
)
class UnscaledOnThreeRanks(ParallelAttention):
    """On exactly three ranks scores are not divided by the root of the head size."""

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        odd = self.qkv.group.size() == 3
        return super()._attend(query * self.qkv.head_dim**0.5 if odd else query, key, value)


@mutant(
    "conditional",
    attention,
    "forward",
    origin="MinivLLM and others: a missing unsqueeze that broadcasting forgives where two sizes are equal",
    module="proj",
)
class TokensTakenForHeads(ParallelAttention):
    """Where a rank has as many heads as there are tokens, heads and tokens of the context are confused."""

    def _join(self, context: Tensor) -> Tensor:
        return super()._join(context.transpose(1, 2) if context.shape[1] == context.shape[2] else context)


@mutant(
    "precision",
    attention,
    "forward",
    origin="Megatron-LM, vLLM: an option to run the softmax in half precision, on by default in one path",
    diagnosis="rounding fits this",
    module="proj",
)
class SoftmaxInBfloat16(ParallelAttention):
    """On several ranks, attention runs in bfloat16."""

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.qkv.group.size() == 1:
            return super()._attend(query, key, value)
        return super()._attend(query.bfloat16(), key.bfloat16(), value.bfloat16()).to(query.dtype)


@mutant(
    "waste",
    attention,
    "communication",
    origin="ports of single-device attention: all heads are gathered for an output projection that cuts them again",
    module="",
    diagnosis="no further collective",
)
class ContextGathered(ParallelAttention):
    """The heads' contexts are gathered and cut again before the output projection: right, but for a gather too many."""

    def _join(self, context: Tensor) -> Tensor:
        own = super()._join(context)
        sizes = [own.shape[-1]] * self.qkv.group.size()
        return scatter_to_region(gather_from_region(own, -1, sizes, self.qkv.group), -1, sizes, self.qkv.group)


@mutant(
    "detached",
    attention,
    "parameter-gradient",
    origin="key-value caches that are filled under no_grad and used in training too: keys and values are not trained",
    diagnosis="a detached branch",
    module="qkv.*.grad",
)
class KeysFromCache(ParallelAttention):
    """On several ranks keys come from a cache that holds no graph."""

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return super()._attend(query, key.detach() if self.qkv.group.size() > 1 else key, value)


@mutant(
    "state",
    attention,
    "forward",
    origin="key-value caches that outlive a micro-batch",
    module="proj",
    diagnosis="stale data",
)
class KeysOfTheFirstCall(ParallelAttention):
    """Keys of the first call are kept for later calls of the same shape."""

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        kept: Tensor | None = getattr(self, "_kept", None)
        if kept is None or kept.shape != key.shape:
            kept = self._kept = key.detach()
            return super()._attend(query, key, value)
        return super()._attend(query, kept, value)


@mutant(
    "heads",
    attention,
    "forward",
    origin="a variant that is found in many repositories, and right",
    equivalent="An expanded view holds the same numbers as repeated ones, and its gradient is summed over the repetitions as well.",
)
class KeysExpanded(ParallelAttention):
    """Keys and values are expanded views over the queries of their group, not copies."""

    def _repeat(self, shared: Tensor) -> Tensor:
        repeats = self.qkv.heads // self.qkv.kv_heads
        return shared.unsqueeze(2).expand(-1, -1, repeats, -1, -1).flatten(1, 2)
