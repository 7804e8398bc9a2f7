"""Planted bugs of constants that belong to a head, such as ALiBi slopes: each rank must take those of its own heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpverify.mutants.mutant import add_mutant
from tpverify.subjects.attention import QKVParallelLinear
from tpverify.subjects.attention_subject import AttentionConfig, ReferenceAttention, attention


def with_constants(qkv: Tensor, heads: Tensor, of: int, head_dim: int) -> Tensor:
    """Q|K|V whose queries are multiplied by 1 + head / heads, the constant of their head.

    Args:
        heads: numbers of the heads in ``qkv``, from 0.
        of: number of all heads.
    """
    constants = (1.0 + heads / of).to(qkv.dtype).repeat_interleave(head_dim)
    width = len(constants)
    return torch.cat([qkv[..., :width] * constants, qkv[..., width:]], dim=-1)


def reference_with_constants(config: AttentionConfig) -> ReferenceAttention:
    """Attention on one device with a constant per head."""
    module = ReferenceAttention(config.hidden, config.heads, config.kv_heads, config.causal, config.bias)
    heads = torch.arange(config.heads)
    module.qkv.register_forward_hook(lambda _, __, qkv: with_constants(qkv, heads, config.heads, module.head_dim))
    return module


class HeadConstants(QKVParallelLinear):
    """Right: the constants of this rank's heads."""

    def forward(self, x: Tensor) -> Any:
        """[s, b, hidden] -> this rank's Q|K|V."""
        qkv = super().forward(x)
        assert isinstance(qkv, Tensor)
        return self._scaled(qkv)

    def _scaled(self, qkv: Tensor) -> Tensor:
        return with_constants(qkv, self._own(), self._all(), self.head_dim)

    def _own(self) -> Tensor:
        return self.group.rank() * self.heads + torch.arange(self.heads)

    def _all(self) -> int:
        return self.heads * self.group.size()


class _CountedFromZero(HeadConstants):
    def _own(self) -> Tensor:
        return torch.arange(self.heads)


class _DealtInTurn(HeadConstants):
    def _own(self) -> Tensor:
        return self.group.rank() + self.group.size() * torch.arange(self.heads)


class _OfLocalNumber(HeadConstants):
    def _all(self) -> int:
        return self.heads


class _AlongTokens(HeadConstants):
    def _scaled(self, qkv: Tensor) -> Tensor:
        if len(qkv) != self.heads or self.group.size() == 1:
            return super()._scaled(qkv)
        width = self.heads * self.head_dim
        constants = (1.0 + self._own() / self._all()).to(qkv.dtype).reshape(-1, 1, 1)
        return torch.cat([qkv[..., :width] * constants, qkv[..., width:]], dim=-1)


add_mutant(
    "head-constants-from-zero",
    "heads",
    attention,
    "forward",
    layers=(_CountedFromZero,),
    reference=reference_with_constants,
    story="Every rank counts its heads from zero, and takes the constants of the first rank's heads.",
    origin="Megatron-DeepSpeed, flashinfer: ALiBi slopes are right on the first rank only",
    module="qkv",
    ranks="",
)

add_mutant(
    "head-constants-dealt-in-turn",
    "heads",
    attention,
    "forward",
    layers=(_DealtInTurn,),
    reference=reference_with_constants,
    story="Constants are dealt to the ranks in turn, while heads are given out in blocks.",
    origin="CTranslate2, T5: relative position biases cut along another order of heads; right with one head per rank",
    module="qkv",
    ranks="",
)

add_mutant(
    "head-constants-of-local-number",
    "heads",
    attention,
    "forward",
    layers=(_OfLocalNumber,),
    reference=reference_with_constants,
    story="The formula for a head's constant is given the number of local heads instead of all.",
    origin="kernels that derive slopes from the heads they see: another geometric series for every TP degree",
    module="qkv",
    ranks="",
)

add_mutant(
    "head-constants-along-tokens",
    "conditional",
    attention,
    "forward",
    layers=(_AlongTokens,),
    reference=reference_with_constants,
    story="The constants are broadcast along the tokens instead of the heads, where a rank has as many heads as there are tokens.",
    origin="a missing unsqueeze: an error for most shapes, silent where two sizes coincide or a rank has one head",
    module="qkv",
    ranks="",
)
