"""DeepSpeed's layers over weights in which several lie one after the other: Q|K|V, gate|up, and Yuan's shared heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepspeed.module_inject.tp_shard import AutoTPMeta
from hypothesis import strategies as st
from torch import nn

from tpverify.adapters.deepspeed.environment import COMMON, Layer, as_called
from tpverify.sharding import Block, FusedShard, Replicate
from tpverify.subjects.drawing import activations
from tpverify.subjects.subject import Input, Subject


@dataclass(frozen=True)
class FusedConfig:
    """Sizes, elements, and options of a fused linear layer over [seq, batch, other], or onto it.

    Attributes:
        blocks: sizes of what lies one after the other in the fused dimension.
        other: the other dimension of the weight.
        kind: which layer, or how it is told its blocks.
        row: the fused dimension is the input's, and the layer row-parallel.
        frozen: the weight needs no gradient.
    """

    seq: int = 1
    batch: int = 1
    blocks: tuple[int, ...] = (1, 1)
    other: int = 1
    kind: str = "sizes"
    row: bool = False
    bias: bool = True
    frozen: bool = False

    @property
    def sizes(self) -> tuple[int, int]:
        """The input's features and the output's."""
        whole = sum(self.blocks)
        return (whole, self.other) if self.row else (self.other, whole)

    @property
    def cut(self) -> tuple[Block, ...]:
        """The blocks, each of which is cut by itself."""
        return tuple(Block(size) for size in self.blocks)


@st.composite
def sub_param_configs(draw: st.DrawFn, world_size: int) -> FusedConfig:
    """Sub-parameters told by their sizes, by their number, or by a shape of three dimensions."""
    seq, batch, _ = draw(activations(world_size, False, ()))
    bias, frozen, row = (draw(st.booleans()) for _ in range(3))
    kind = draw(st.sampled_from(["sizes", "count"] if row else ["sizes", "count", "view"]))
    sizes = [size * world_size for size in draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))]
    blocks = tuple(sizes) if kind == "sizes" else (sizes[0],) * len(sizes)
    return FusedConfig(seq, batch, blocks, draw(st.integers(1, 4)), kind, row, bias, frozen)


@st.composite
def qkv_configs(draw: st.DrawFn, world_size: int) -> FusedConfig:
    """Gate|up, and Q|K|V as the models whose layouts DeepSpeed knows have it, with heads that divide."""
    seq, batch, _ = draw(activations(world_size, False, ()))
    kind = draw(st.sampled_from(["gate_up", "MPTBlock", "BloomBlock", "Phi3DecoderLayer"] + ["GLMBlock"] * (2 % world_size == 0)))
    first, second = draw(st.integers(1, 3)) * world_size, draw(st.integers(1, 2)) * world_size
    blocks = {"gate_up": (first,) * 2, "MPTBlock": (first,) * 3, "BloomBlock": (3 * first,)}.get(kind, (first * second, second, second))
    if kind == "GLMBlock":  # two KV heads, however many query heads
        blocks = (2 * first, 2 * second, 2 * second)
    other = blocks[0] // second if kind == "Phi3DecoderLayer" else draw(st.integers(1, 4))
    return FusedConfig(seq, batch, blocks, other, kind, False, draw(st.booleans()), draw(st.booleans()))


@st.composite
def yuan_configs(draw: st.DrawFn, world_size: int) -> FusedConfig:
    """Value heads of size 1 in two halves, each of which is cut by itself; numbers that do not divide are rare, to be refused."""
    seq, batch, flaw = draw(activations(world_size, False, ("heads",)))
    odd = [size for size in range(world_size + 1, 2 * world_size) if 2 * size % world_size]
    half = draw(st.sampled_from(odd)) if flaw and odd else draw(st.integers(1, 3)) * world_size
    bias, row = draw(st.booleans()), draw(st.booleans())
    return FusedConfig(seq, batch, (half, half), draw(st.integers(1, 4)), "yuan", row, bias)


def _linear(config: FusedConfig) -> nn.Module:
    return nn.Linear(*config.sizes, bias=config.bias)


def _sub_param(config: FusedConfig) -> Layer:
    dim = 1 if config.row else 0
    spec: int | tuple[int, ...] = config.blocks if config.kind == "sizes" else len(config.blocks)
    shape: tuple[Any, ...] = (-1, spec) if config.row else (spec, -1)
    if config.kind == "view":
        dim, shape = 1, (len(config.blocks), -1, config.other)
    name = "SubParamLinearAllreduce" if config.row else "SubParamLinearLayer"
    return Layer(name, {"shape": shape, "partition_dim": dim}, frozen=config.frozen)


def _qkv(config: FusedConfig) -> Layer:
    if config.kind == "gate_up":
        return Layer("GateUpPack_LinearLayer", frozen=config.frozen)
    query, key = config.blocks[0], config.blocks[-1]
    meta = {
        "GLMBlock": AutoTPMeta(num_kv_heads=2, n_embd=query),
        "Phi3DecoderLayer": AutoTPMeta(num_kv_heads=key, num_attention_heads=config.other),
    }.get(config.kind, AutoTPMeta())
    return Layer("fused_LinearLayer", {"fused_module": config.kind, "tp_meta": meta}, frozen=config.frozen)


def _yuan(config: FusedConfig) -> Layer:
    name = "Yuan_LinearAllreduce" if config.row else "Yuan_LinearLayer"
    return Layer(name, {"tp_meta": AutoTPMeta(num_kv_heads=sum(config.blocks))})


def _odd_heads(config: FusedConfig, world_size: int) -> bool:
    """Whether a rank would hold other numbers of heads of the two halves."""
    return config.blocks[0] % world_size != 0


def _subject(name: str, layer: Any, configs: Any, **fields: Any) -> Subject:
    def inputs(config: FusedConfig) -> dict[str, Input]:
        placement = FusedShard(2, config.cut) if config.row else Replicate()
        return {"x": Input((config.seq, config.batch, config.sizes[0]), placement=placement)}

    return Subject(
        name=f"deepspeed.{name}",
        reference=lambda c: as_called(_linear(c), True, c.frozen),
        parallel=lambda c: layer(c).built(_linear(c)),
        configs=configs,
        inputs=inputs,
        placements=lambda c: {"weight": FusedShard(int(c.row), c.cut), "*": Replicate() if c.row else FusedShard(0, c.cut)},
        outputs=lambda c: Replicate() if c.row else FusedShard(2, c.cut),
        exact=True,
        script=lambda c: layer(c).source(f"torch.nn.Linear{(*c.sizes, c.bias)}"),
        **fields,
        **COMMON,
    )


SUBJECTS = {
    "sub_param_linear": _subject("sub_param_linear", _sub_param, sub_param_configs),
    "fused_linear": _subject("fused_linear", _qkv, qkv_configs),
    "yuan_linear": _subject("yuan_linear", _yuan, yuan_configs, rejects=_odd_heads, refusal=AssertionError),
}
