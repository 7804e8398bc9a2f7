"""Subject: ``parallelize_module`` on an attention block whose heads are cut, with plain tensors or DTensors between its layers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, PrepareModuleInput, RowwiseParallel, parallelize_module

from tpverify.sharding import Replicate
from tpverify.subjects.drawing import activations, divisible
from tpverify.subjects.dtensor import LAYOUTS, block_communication, quietly, replicated_like, take_dtensor, tp_mesh
from tpverify.subjects.subject import Collective, Input, Subject


@dataclass(frozen=True)
class DTensorAttentionConfig:
    """Sizes, elements, and options of attention over [batch, seq, hidden], hidden = heads * head_dim.

    Attributes:
        input, output: layouts that the caller hands over and wants back: ``replicate``, ``sequence`` or ``hidden``.
        dtensor_input: the caller hands over a DTensor, so that its sharded dimension need not divide.
        local_heads: ``use_local_output`` of wq, wk and wv: each rank computes its heads with plain tensors.
        local_output: ``use_local_output`` of the block's output.
        prepare: the input's layout is changed once by PrepareModuleInput, not by wq, wk and wv each.
        fused: ``scaled_dot_product_attention`` instead of its three steps; on a CPU, DTensor has no sharding rule for it.
    """

    batch: int = 1
    seq: int = 1
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 1
    bias: bool = False
    causal: bool = True
    input: str = "replicate"
    output: str = "replicate"
    dtensor_input: bool = False
    local_heads: bool = True
    local_output: bool = True
    prepare: bool = False
    fused: bool = False


class Attention(nn.Module):
    """Grouped-query attention with a projection for each of Q, K, V and the output: [b, s, hidden] -> the same."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, *, bias: bool, causal: bool, fused: bool) -> None:
        super().__init__()
        hidden, keys = heads * head_dim, kv_heads * head_dim
        self.head_dim, self.groups, self.causal, self.fused = head_dim, heads // kv_heads, causal, fused
        self.wq = nn.Linear(hidden, hidden, bias=bias)
        self.wk = nn.Linear(hidden, keys, bias=bias)
        self.wv = nn.Linear(hidden, keys, bias=bias)
        self.wo = nn.Linear(hidden, hidden, bias=bias)

    def forward(self, x: Tensor, rotation: Tensor | None = None) -> Tensor:
        """Attention over the sequence; ``rotation`` [s, head_dim / 2, 2] holds cosines and sines of position embeddings."""
        query, key, value = self._by_head(self.wq(x)), self._by_head(self.wk(x)), self._by_head(self.wv(x))
        if rotation is not None:
            query, key = rotate(query, rotation), rotate(key, rotation)
        key, value = repeat_heads(key, self.groups), repeat_heads(value, self.groups)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        attend = F.scaled_dot_product_attention if self.fused else attention_in_steps
        context = attend(query, key, value, is_causal=self.causal).transpose(1, 2).flatten(2)
        output: Tensor = self.wo(context)
        return output

    def _by_head(self, x: Tensor) -> Tensor:
        """[b, s, heads * d] -> [b, s, heads, d], of as many heads as there are."""
        return x.reshape(*x.shape[:-1], x.shape[-1] // self.head_dim, self.head_dim)


def attention_in_steps(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
    """softmax(Q K^T / sqrt(d)) V: [b, heads, s, d] each -> the same."""
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.shape[-1])
    if is_causal:
        later = torch.full((scores.shape[-1], scores.shape[-1]), -math.inf, device=scores.device).triu(1)
        scores = scores + replicated_like(later, scores)
    return torch.matmul(torch.softmax(scores, dim=-1), value)


def repeat_heads(x: Tensor, groups: int) -> Tensor:
    """[b, s, kv_heads, d] -> [b, s, kv_heads * groups, d]: each head as often as queries share it."""
    batch, seq, heads, width = x.shape
    return x if groups == 1 else x.unsqueeze(3).expand(batch, seq, heads, groups, width).reshape(batch, seq, heads * groups, width)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotary position embedding of [b, s, heads, d]: neighbouring pairs are turned by the angles of their position."""
    cosine, sine = rotation[: x.shape[1], :, 0].unsqueeze(1), rotation[: x.shape[1], :, 1].unsqueeze(1)
    even, odd = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2).unbind(-1)
    return torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], dim=-1).flatten(-2)


def attention_plan(config: DTensorAttentionConfig) -> dict[str, ParallelStyle]:
    """The plan for :class:`Attention`."""
    given, wanted = LAYOUTS[config.input], LAYOUTS[config.output]
    plan: dict[str, ParallelStyle] = {"wo": RowwiseParallel(output_layouts=wanted, use_local_output=config.local_output)}
    if config.prepare:
        plan[""] = PrepareModuleInput(input_layouts=(given,), desired_input_layouts=(Replicate(),))
    for name in ("wq", "wk", "wv"):
        plan[name] = ColwiseParallel(input_layouts=None if config.prepare else given, use_local_output=config.local_heads)
    return plan


def _reference(c: DTensorAttentionConfig) -> Attention:
    return Attention(c.heads, c.kv_heads, c.head_dim, bias=c.bias, causal=c.causal, fused=c.fused)


def _parallel(config: DTensorAttentionConfig) -> nn.Module:
    module, mesh = _reference(config), tp_mesh()
    if config.dtensor_input:
        take_dtensor(module, mesh, LAYOUTS[config.input], (config.batch, config.seq, config.heads * config.head_dim))
    return parallelize_module(module, mesh, attention_plan(config))


@st.composite
def dtensor_attention_configs(draw: st.DrawFn, world_size: int) -> DTensorAttentionConfig:
    """All options; heads that do not divide are rare, to be refused."""
    given, dtensor_input, local_heads = draw(st.sampled_from(list(LAYOUTS))), draw(st.booleans()), draw(st.booleans())
    # Heads that are DTensors and do not divide are refused, or gathered where they have fewer features than there are ranks.
    flaws = ("heads",) if local_heads else ()
    seq, batch, flaw = draw(activations(world_size, given == "sequence" and not dtensor_input, flaws))
    # At least 2: released DTensor loses a sharded dimension of size 1 in reshapes, and refuses them, even on a single rank.
    kv_heads = max(2, draw(divisible(world_size, flaw == "heads", largest=2)))
    heads, head_dim = kv_heads * draw(st.integers(1, 2)), draw(st.integers(1, 4))
    if given == "hidden" and not dtensor_input and heads * head_dim % world_size:
        # Released DTensor takes plain tensors for equal parts: unequal ones meet in an all_gather before the heads are refused.
        given = "replicate"
    return DTensorAttentionConfig(
        batch=batch,
        seq=seq,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        bias=draw(st.booleans()),
        causal=draw(st.booleans()),
        input=given,
        output=draw(st.sampled_from(list(LAYOUTS))),
        dtensor_input=dtensor_input,
        local_heads=local_heads,
        local_output=draw(st.booleans()),
        prepare=draw(st.booleans()),
        fused=local_heads and draw(st.booleans()),
    )


def _communication(config: DTensorAttentionConfig, world_size: int) -> list[Collective]:
    return block_communication(
        (config.batch, config.seq, config.heads * config.head_dim),
        world_size,
        given=config.input,
        wanted=config.output,
        readers=1 if config.prepare else 3,
        shared_input=config.dtensor_input,
    )


dtensor_attention = Subject(
    name="dtensor_attention",
    reference=_reference,
    parallel=_parallel,
    configs=dtensor_attention_configs,
    inputs=lambda c: {"x": Input((c.batch, c.seq, c.heads * c.head_dim), placement=LAYOUTS[c.input])},
    outputs=lambda c: LAYOUTS[c.output],
    communication=_communication,
    rejects=lambda c, world_size: c.kv_heads % world_size != 0,
    refusal=RuntimeError,
    context=lambda c: quietly(),
    subgroups=True,
)
