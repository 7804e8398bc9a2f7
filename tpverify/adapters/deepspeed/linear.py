"""DeepSpeed's column- and row-parallel linear layers, in training and in inference, beside ``nn.Linear``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor, nn

from tpverify.adapters.deepspeed.environment import COMMON, Layer, as_called
from tpverify.sharding import PlacementLike, Replicate, UnevenShard
from tpverify.subjects.drawing import activations, uneven_sizes
from tpverify.subjects.subject import Input, Subject

ROWS, COLUMNS, LAST = UnevenShard(0, "tensor_split"), UnevenShard(1, "tensor_split"), UnevenShard(-1, "tensor_split")
"""Where a size does not divide, the first ranks take one more."""

WHOLE_INPUTS = {"whole": "LinearAllreduceWithReplicatedInput", "lm_head": "LmHeadLinearAllreduce"}
"""By what a row-parallel layer is given, its class, where it cuts the input itself."""


@dataclass(frozen=True)
class LinearConfig:
    """Sizes, elements, and options of a linear layer over [seq, batch, in_features].

    Attributes:
        flat: the input is [seq * batch, in_features].
        gather: the output of a column-parallel layer is gathered.
        given: what a row-parallel layer is given: its ``part`` of the input, or the ``whole``, in training or as an ``lm_head``.
        overlap: a column-parallel layer reduces the gradient of its input while it computes that of its weight.
        training: the mode of AutoTP; else the layer is called without autograd.
        frozen: the weight needs no gradient.
    """

    seq: int = 1
    batch: int = 1
    in_features: int = 1
    out_features: int = 1
    bias: bool = True
    flat: bool = False
    gather: bool = False
    given: str = "part"
    overlap: bool = False
    training: bool = True
    frozen: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the input."""
        return (self.seq * self.batch, self.in_features) if self.flat else (self.seq, self.batch, self.in_features)


@st.composite
def column_configs(draw: st.DrawFn, world_size: int) -> LinearConfig:
    """All options; any size, also less than one feature per rank."""
    seq, batch, _ = draw(activations(world_size, False, ()))
    bias, flat, gather, overlap, frozen = (draw(st.booleans()) for _ in range(5))
    training = draw(st.sampled_from([True, True, True, False]))
    return LinearConfig(
        seq=seq,
        batch=batch,
        in_features=draw(st.integers(1, 6)),
        out_features=draw(uneven_sizes(world_size)),
        bias=bias,
        flat=flat,
        gather=gather,
        overlap=overlap and training,
        training=training,
        frozen=frozen and training,
    )


@st.composite
def row_configs(draw: st.DrawFn, world_size: int) -> LinearConfig:
    """All options; any size, also less than one feature per rank."""
    seq, batch, _ = draw(activations(world_size, False, ()))
    bias, flat, frozen = (draw(st.booleans()) for _ in range(3))
    given = draw(st.sampled_from(["part", "whole", "lm_head"]))
    # AutoTP builds LmHeadLinearAllreduce, which takes three dimensions, for inference only.
    training = given != "lm_head" and draw(st.sampled_from([True, True, True, False]))
    return LinearConfig(
        seq=seq,
        batch=batch,
        in_features=draw(uneven_sizes(world_size)),
        out_features=draw(st.integers(1, 6)),
        bias=bias,
        flat=flat and given != "lm_head",
        given=given,
        training=training,
        frozen=frozen and training,
    )


def _linear(config: LinearConfig) -> nn.Module:
    return nn.Linear(config.in_features, config.out_features, config.bias)


def _linear_source(config: LinearConfig) -> str:
    return f"torch.nn.Linear({config.in_features}, {config.out_features}, bias={config.bias})"


def _reference(config: LinearConfig) -> nn.Module:
    return as_called(_linear(config), config.training, config.frozen)


def _column(config: LinearConfig) -> Layer:
    options = {"gather_output": True} if config.gather else {}
    return Layer("LinearLayer", options, config.training, config.frozen, config.overlap)


def _row(config: LinearConfig) -> Layer:
    return Layer(WHOLE_INPUTS.get(config.given, "LinearAllreduce"), {}, config.training, config.frozen)


def _input(config: LinearConfig, placement: PlacementLike) -> dict[str, Input]:
    return {"x": Input(config.shape, placement=placement, grad=config.training)}


@dataclass(frozen=True)
class ConvolutionConfig:
    """Sizes, elements, of a ``Conv1D`` of GPT-2, whose weight is [in_features, out_features]; ``row``: which kind of layer replaces it."""

    seq: int = 1
    batch: int = 1
    in_features: int = 1
    out_features: int = 1
    bias: bool = True
    row: bool = False


class Convolution(nn.Module):
    """``x @ weight + bias``. DeepSpeed's row-parallel layer turns its weight round, so the reference of that one holds it that way."""

    def __init__(self, config: ConvolutionConfig) -> None:
        super().__init__()
        self.turned = config.row and not dist.is_initialized()
        sizes = (config.out_features, config.in_features) if self.turned else (config.in_features, config.out_features)
        self.weight = nn.Parameter(torch.empty(sizes))
        self.bias = nn.Parameter(torch.empty(config.out_features)) if config.bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        output = x @ (self.weight.t() if self.turned else self.weight)
        return output if self.bias is None else output + self.bias


@st.composite
def convolution_configs(draw: st.DrawFn, world_size: int) -> ConvolutionConfig:
    """Both kinds, any size."""
    seq, batch, _ = draw(activations(world_size, False, ()))
    sizes = draw(uneven_sizes(world_size)), draw(uneven_sizes(world_size))
    return ConvolutionConfig(seq, batch, *sizes, bias=draw(st.booleans()), row=draw(st.booleans()))


def _convolution(config: ConvolutionConfig) -> Layer:
    return Layer("Conv_LinearALlreduce" if config.row else "conv_LinearLayer")


CONVOLUTION = """class Convolution(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty({in_features}, {out_features}))
        self.bias = {bias}

"""


def _convolution_source(config: ConvolutionConfig) -> str:
    bias = f"torch.nn.Parameter(torch.empty({config.out_features}))" if config.bias else None
    fields = {"in_features": config.in_features, "out_features": config.out_features, "bias": bias}
    return CONVOLUTION.format(**fields) + _convolution(config).source("Convolution()")


def _transposed(config: ConvolutionConfig) -> dict[str, PlacementLike]:
    return {"weight": COLUMNS, "*": Replicate() if config.row else ROWS}


SUBJECTS: dict[str, Subject] = {
    "linear_layer": Subject(
        name="deepspeed.linear_layer",
        reference=_reference,
        parallel=lambda c: _column(c).built(_linear(c)),
        configs=column_configs,
        inputs=lambda c: _input(c, Replicate()),
        placements={"*": ROWS},
        outputs=lambda c: Replicate() if c.gather else LAST,
        exact=True,
        script=lambda c: _column(c).source(_linear_source(c)),
        **COMMON,
    ),
    "linear_allreduce": Subject(
        name="deepspeed.linear_allreduce",
        reference=_reference,
        parallel=lambda c: _row(c).built(_linear(c)),
        configs=row_configs,
        inputs=lambda c: _input(c, LAST if c.given == "part" else Replicate()),
        placements={"weight": COLUMNS, "*": Replicate()},
        exact=True,
        script=lambda c: _row(c).source(_linear_source(c)),
        **COMMON,
    ),
    "conv_linear": Subject(
        name="deepspeed.conv_linear",
        reference=lambda c: Convolution(c),
        parallel=lambda c: _convolution(c).built(Convolution(c)),
        configs=convolution_configs,
        inputs=lambda c: {"x": Input((c.seq, c.batch, c.in_features), placement=LAST if c.row else Replicate())},
        placements=_transposed,
        outputs=lambda c: Replicate() if c.row else LAST,
        exact=True,
        script=_convolution_source,
        **COMMON,
    ),
}
