"""Subject: ``parallelize_module`` on a feed-forward network, with ColwiseParallel, RowwiseParallel and PrepareModuleInputOutput."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, PrepareModuleInputOutput, RowwiseParallel, parallelize_module

from tpverify.sharding import Replicate
from tpverify.subjects.drawing import activations, divisible, uneven_sizes
from tpverify.subjects.dtensor import LAYOUTS, block_communication, quietly, take_dtensor, tp_mesh
from tpverify.subjects.subject import Collective, Input, Subject

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu}


@dataclass(frozen=True)
class DTensorMLPConfig:
    """Sizes, elements, and options of a feed-forward network over [batch, seq, hidden].

    Attributes:
        input, output: layouts that the caller hands over and wants back: ``replicate``, ``sequence`` or ``hidden``.
        dtensor_input: the caller hands over a DTensor, so that its sharded dimension need not divide.
        local_hidden: ``use_local_output`` of the column-parallel layers: plain tensors between the layers.
        local_output: ``use_local_output`` of the network's output.
        prepare: layouts are changed by PrepareModuleInputOutput around the network, not by its layers.
    """

    batch: int = 1
    seq: int = 1
    hidden: int = 1
    ffn: int = 1
    activation: str = "gelu"
    bias: bool = True
    input: str = "replicate"
    output: str = "replicate"
    dtensor_input: bool = False
    local_hidden: bool = True
    local_output: bool = True
    prepare: bool = False


class FeedForward(nn.Module):
    """``w2(activation(w1(x)))``, or ``w2(silu(w1(x)) * w3(x))``: [b, s, hidden] -> the same."""

    def __init__(self, hidden: int, ffn: int, activation: str, bias: bool) -> None:
        super().__init__()
        self.activation = activation
        self.w1 = nn.Linear(hidden, ffn, bias=bias)
        self.w2 = nn.Linear(ffn, hidden, bias=bias)
        if activation == "swiglu":
            self.w3 = nn.Linear(hidden, ffn, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """The network, token by token."""
        h = self.w1(x)
        output: Tensor = self.w2(F.silu(h) * self.w3(x) if self.activation == "swiglu" else ACTIVATIONS[self.activation](h))
        return output


def mlp_plan(config: DTensorMLPConfig) -> dict[str, ParallelStyle]:
    """The plan for :class:`FeedForward`."""
    given, wanted = LAYOUTS[config.input], LAYOUTS[config.output]
    columns = ("w1", "w3") if config.activation == "swiglu" else ("w1",)
    if not config.prepare:
        return {
            **{name: ColwiseParallel(input_layouts=given, use_local_output=config.local_hidden) for name in columns},
            "w2": RowwiseParallel(output_layouts=wanted, use_local_output=config.local_output),
        }
    around = PrepareModuleInputOutput(
        input_layouts=(given,),
        desired_input_layouts=(Replicate(),),
        output_layouts=(Replicate(),),
        desired_output_layouts=(wanted,),
        use_local_output=config.local_output,
    )
    return {
        **{name: ColwiseParallel(use_local_output=config.local_hidden) for name in columns},
        "w2": RowwiseParallel(use_local_output=False),
        "": around,
    }


def _reference(config: DTensorMLPConfig) -> FeedForward:
    return FeedForward(config.hidden, config.ffn, config.activation, config.bias)


def parallel_mlp(config: DTensorMLPConfig, plan: dict[str, ParallelStyle]) -> nn.Module:
    """A network under a plan."""
    module, mesh = _reference(config), tp_mesh()
    if config.dtensor_input:
        take_dtensor(module, mesh, LAYOUTS[config.input], (config.batch, config.seq, config.hidden))
    return parallelize_module(module, mesh, plan)


@st.composite
def dtensor_mlp_configs(draw: st.DrawFn, world_size: int) -> DTensorMLPConfig:
    """All options; sizes need not divide wherever DTensors know the whole shape.

    Where a plain local tensor is handed over, its sharded dimension must divide: the styles take its size times the world size
    for the whole, and where that is not so, ranks disagree about every shape (see ``properties/test_dtensor_subjects.py``).
    """
    given, dtensor_input, local_hidden = draw(st.sampled_from(list(LAYOUTS))), draw(st.booleans()), draw(st.booleans())

    plain = "" if dtensor_input else given
    seq, batch, flaw = draw(activations(world_size, plain == "sequence", ("ffn",) if local_hidden else ()))
    # At least 2: released DTensor loses a sharded dimension of size 1 in reshapes, and refuses them, even on a single rank.
    ffn = max(2, draw(divisible(world_size, flaw == "ffn") if local_hidden else uneven_sizes(world_size)))
    return DTensorMLPConfig(
        batch=batch,
        seq=seq,
        hidden=draw(divisible(world_size) if plain == "hidden" else uneven_sizes(world_size, 2)),
        ffn=ffn,
        activation=draw(st.sampled_from(["gelu", "relu", "swiglu"])),
        bias=draw(st.booleans()),
        input=given,
        output=draw(st.sampled_from(list(LAYOUTS))),
        dtensor_input=dtensor_input,
        local_hidden=local_hidden,
        local_output=draw(st.booleans()),
        prepare=draw(st.booleans()),
    )


def _communication(config: DTensorMLPConfig, world_size: int) -> list[Collective] | None:
    if config.ffn < world_size:
        return None  # weights with fewer features than ranks are gathered instead of being used in parts
    return block_communication(
        (config.batch, config.seq, config.hidden),
        world_size,
        given=config.input,
        wanted=config.output,
        readers=2 if config.activation == "swiglu" and not config.prepare else 1,
        shared_input=config.dtensor_input,
        reduced_whole=config.prepare,
    )


dtensor_mlp = Subject(
    name="dtensor_mlp",
    reference=_reference,
    parallel=lambda c: parallel_mlp(c, mlp_plan(c)),
    configs=dtensor_mlp_configs,
    inputs=lambda c: {"x": Input((c.batch, c.seq, c.hidden), placement=LAYOUTS[c.input])},
    outputs=lambda c: LAYOUTS[c.output],
    communication=_communication,
    rejects=lambda c, world_size: c.local_hidden and c.ffn % world_size != 0,
    refusal=RuntimeError,
    context=lambda c: quietly(),
    # Not with a bias: each rank adds its part of it, bias / world_size, to its partial sums before they are reduced.
    exact=lambda c: c.activation == "relu" and not c.bias,
    subgroups=True,
)
