"""Planted bugs of normalisation: statistics over a dimension that is cut, epsilon, and norms of whole blocks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpverify.current_group import tp_group
from tpverify.mutants.mutant import add_mutant, mutant
from tpverify.subjects.attention import QKVParallelLinear
from tpverify.subjects.attention_subject import AttentionConfig, ReferenceAttention, attention
from tpverify.subjects.block import ParallelTransformerBlock, around_residual, transformer_block
from tpverify.subjects.mappings import copy_to_region, reduce_from_region

EPSILON = 1e-3


def reference_with_query_norm(config: AttentionConfig) -> ReferenceAttention:
    """Attention on one device with a norm over all heads' queries."""
    module = ReferenceAttention(config.hidden, config.heads, config.kv_heads, config.causal, config.bias)

    def normalize(_: nn.Module, __: object, qkv: Tensor) -> Tensor:
        query, rest = qkv[..., : config.hidden], qkv[..., config.hidden :]
        return torch.cat([F.rms_norm(query, (config.hidden,), eps=EPSILON), rest], -1)

    module.qkv.register_forward_hook(normalize)
    return module


class QueryNorm(QKVParallelLinear):
    """Right: the query is divided by its root mean square over the features of all heads, which the ranks hold in parts."""

    def forward(self, x: Tensor) -> Any:
        """[s, b, hidden] -> this rank's Q|K|V."""
        qkv = super().forward(x)
        assert isinstance(qkv, Tensor)
        width = self.heads * self.head_dim
        query, rest = qkv[..., :width], qkv[..., width:]
        return torch.cat([query * (self._mean_square(query) + EPSILON).rsqrt(), rest], -1)

    def _mean_square(self, query: Tensor) -> Tensor:
        return self._over_ranks(query.square().sum(-1, keepdim=True)) / (query.shape[-1] * self.group.size())

    def _over_ranks(self, squares: Tensor) -> Tensor:
        # Each rank goes on with its own part, so the gradient of the sum is a sum as well.
        return copy_to_region(reduce_from_region(squares, self.group), self.group)


class _OwnHeads(QueryNorm):
    def _mean_square(self, query: Tensor) -> Tensor:
        return query.square().mean(-1, keepdim=True)


class _OwnWidth(QueryNorm):
    def _mean_square(self, query: Tensor) -> Tensor:
        return super()._mean_square(query) * self.group.size()


class _EpsilonPerRank(QueryNorm):
    def _over_ranks(self, squares: Tensor) -> Tensor:
        return super()._over_ranks(squares + EPSILON) - EPSILON


class _StatisticDetached(QueryNorm):
    def _over_ranks(self, squares: Tensor) -> Tensor:
        return super()._over_ranks(squares.detach()) if self.group.size() > 1 else squares


class _StatisticByG(QueryNorm):
    def _over_ranks(self, squares: Tensor) -> Tensor:
        return reduce_from_region(squares, self.group)


class _RootsAveraged(QueryNorm):
    def _mean_square(self, query: Tensor) -> Tensor:
        roots = query.square().mean(-1, keepdim=True).add(1e-30).sqrt()
        return (self._over_ranks(roots) / self.group.size()).square()


class _InSinglePrecision(QueryNorm):
    def _over_ranks(self, squares: Tensor) -> Tensor:
        return super()._over_ranks(squares.float()).to(squares.dtype) if self.group.size() > 1 else squares


def _norm_mutant(id: str, layer: type[QueryNorm], check: str, story: str, origin: str, kind: str = "normalisation", **fields: Any) -> None:
    fields = {"module": "qkv", **fields}
    add_mutant(
        id,
        kind,
        attention,
        check,
        layers=(layer,),
        reference=reference_with_query_norm,
        communication=None,
        story=story,
        origin=origin,
        **fields,
    )


_norm_mutant(
    "query-norm-of-own-heads",
    _OwnHeads,
    "forward",
    "The query is normalised over this rank's heads instead of over all.",
    "exllamav3, neuronx-distributed: query-key norms that span all heads, with a variance per rank; equal heads hide it",
    diagnosis="a local statistic",
)
_norm_mutant(
    "query-norm-of-own-width",
    _OwnWidth,
    "forward",
    "The sum of squares is taken over all ranks, but divided by the features of one.",
    "mamba: one of two sizes is the local one, the other global",
    diagnosis="a wrong reduce op",
)
_norm_mutant(
    "epsilon-once-per-rank",
    _EpsilonPerRank,
    "forward",
    "Epsilon is added to each rank's sum of squares before these are summed.",
    "fused norms whose epsilon sits inside of the part that is computed per rank",
)
_norm_mutant(
    "query-norm-statistic-detached",
    _StatisticDetached,
    "parameter-gradient",
    "The statistic is exchanged outside autograd, as if it were a constant.",
    "norms patched for tensor parallelism by an in-place all_reduce: values are right, gradients miss one term",
    kind="detached",
    diagnosis="a detached branch",
    module="qkv.*.grad",
)
_norm_mutant(
    "query-norm-statistic-not-copied",
    _StatisticByG,
    "parameter-gradient",
    "The statistic is summed with g, whose backward is the identity, although every rank goes on with another part of the query.",
    "Paddle, xtuner: all-reduces that are right between two layers, and wrong for a statistic; nobody sees it in the loss",
    kind="wrong adjoint",
    module="qkv.*.grad",
)
_norm_mutant(
    "query-norm-roots-averaged",
    _RootsAveraged,
    "forward",
    "The ranks' root mean squares are averaged, instead of the mean squares.",
    "statistics combined by the mean, as for losses: nearly right where ranks hold alike features",
    diagnosis="a local statistic",
)
_norm_mutant(
    "query-norm-in-single-precision",
    _InSinglePrecision,
    "forward",
    "The sum of squares travels in float32.",
    "norms that compute in float32 whatever they are given",
    kind="precision",
    diagnosis="rounding fits this",
)


@mutant(
    "normalisation",
    transformer_block,
    "forward",
    origin="mamba, and norms whose hidden size is divided although activations are whole: one group per rank",
    module="norm*",
)
class NormInOneGroupPerRank(nn.LayerNorm):
    """Hidden states are normalised in as many groups as there are ranks, each by its own mean and variance."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., hidden] -> the same."""
        groups = tp_group().size()
        if input.shape[-1] % groups or input.shape[-1] < 2 * groups:
            return super().forward(input)
        parts = input.reshape(*input.shape[:-1], groups, -1)
        return F.layer_norm(parts, parts.shape[-1:], eps=self.eps).flatten(-2) * self.weight + self.bias


@mutant(
    "normalisation",
    transformer_block,
    "forward",
    origin="fused norm kernels that add epsilon to the root: differences in the sixth digit that pass every loose tolerance",
    module="norm*",
)
class EpsilonOutsideTheRoot(nn.LayerNorm):
    """On several ranks another kernel runs, which adds epsilon to the standard deviation instead of the variance."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., hidden] -> the same."""
        if tp_group().size() == 1:
            return super().forward(input)
        deviation = input.var(-1, correction=0, keepdim=True).sqrt()
        return (input - input.mean(-1, keepdim=True)) / (deviation + self.eps) * self.weight + self.bias


@mutant(
    "conditional",
    transformer_block,
    "forward",
    origin="two implementations of one norm, for whole and for cut sequences: one of them divides by n - 1",
    module="norm*",
)
class UnbiasedUnderSequenceParallelism(nn.LayerNorm):
    """Under sequence parallelism the variance is the unbiased one."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., hidden] -> the same."""
        if not hasattr(self.weight, "sequence_parallel_group") or tp_group().size() == 1:
            return super().forward(input)
        variance = input.var(-1, correction=1, keepdim=True)
        return (input - input.mean(-1, keepdim=True)) * (variance + self.eps).rsqrt() * self.weight + self.bias


@mutant(
    "order",
    transformer_block,
    "forward",
    origin="conversions that map a checkpoint's two norms by position: the model still answers, worse",
    diagnosis="modules in another order",
    module="norm*",
)
class NormsExchanged(ParallelTransformerBlock):
    """On several ranks the norm of the feed-forward network stands before attention, and the other way round."""

    def forward(self, x: Tensor) -> Tensor:
        """The block."""
        if self.attention.qkv.group.size() == 1:
            return super().forward(x)
        x = around_residual(x, self.attention, self.norm2, self.arrangement)
        return around_residual(x, self.mlp, self.norm1, self.arrangement)


@mutant(
    "conditional",
    transformer_block,
    "forward",
    origin="arrangements of BERT that one of two code paths knows: with sequence parallelism the residual is taken before the norm",
    module="norm2",
)
class ResidualBeforeNormIfSequenceParallel(ParallelTransformerBlock):
    """Under sequence parallelism the residual is the input of the norm also where it should be its output."""

    def forward(self, x: Tensor) -> Tensor:
        """The block."""
        parallel = self.attention.qkv.sequence_parallel and self.attention.qkv.group.size() > 1
        arrangement = "pre_ln" if parallel and self.arrangement == "normalized_residual" else self.arrangement
        x = around_residual(x, self.attention, self.norm1, arrangement)
        return around_residual(x, self.mlp, self.norm2, arrangement)
