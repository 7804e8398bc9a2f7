"""Subject: one linear layer under ``parallelize_module``, with every layout of its input and output, and a SequenceParallel norm."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tpverify.sharding import Partial, Placement, PlacementLike, Replicate, Shard
from tpverify.subjects.drawing import activations, divisible, uneven_sizes
from tpverify.subjects.dtensor import quietly, take_dtensor, tp_mesh
from tpverify.subjects.subject import Input, Subject

LAYOUTS: dict[str, Replicate | Shard | Partial] = {
    "replicate": Replicate(),
    "batch": Shard(0),
    "sequence": Shard(1),
    "hidden": Shard(-1),
    "partial": Partial(),
}
"""Of an activation [batch, seq, hidden]. The gradient of one whose value is a sum over ranks is whole."""


@dataclass(frozen=True)
class DTensorLinearConfig:
    """Sizes, elements, and options of a linear layer over [batch, seq, in_features].

    Attributes:
        style: ``column`` or ``row``.
        input, output: layouts that the caller hands over and wants back; keys of ``LAYOUTS``.
        dtensor_input: the caller hands over a DTensor, so that its sharded dimension need not divide.
        local_output: ``use_local_output`` of what hands the output over.
        norm: a LayerNorm comes first, under SequenceParallel along the batch or the sequence: ``""``, ``batch`` or ``sequence``.
        local_norm: ``use_local_output`` of it.
        prepare_input, prepare_output: layouts are changed by PrepareModuleInput and PrepareModuleOutput around the module.
        local_input: ``use_local_output`` of PrepareModuleInput.
        bias: whether the layer has one.
        frozen: its weight needs no gradient.
    """

    batch: int = 1
    seq: int = 1
    in_features: int = 1
    out_features: int = 1
    style: str = "column"
    input: str = "replicate"
    output: str = "replicate"
    dtensor_input: bool = False
    local_output: bool = True
    norm: str = ""
    local_norm: bool = False
    prepare_input: bool = False
    prepare_output: bool = False
    local_input: bool = False
    bias: bool = True
    frozen: bool = False


class Projection(nn.Module):
    """``linear(norm(x))``: [b, s, in_features] -> [b, s, out_features]."""

    def __init__(self, config: DTensorLinearConfig) -> None:
        super().__init__()
        if config.norm:
            self.norm = nn.LayerNorm(config.in_features)
        self.linear = nn.Linear(config.in_features, config.out_features, bias=config.bias)
        self.linear.weight.requires_grad_(not config.frozen)

    def forward(self, x: Tensor) -> Tensor:
        """The layer, token by token."""
        output: Tensor = self.linear(self.norm(x) if hasattr(self, "norm") else x)
        return output


def linear_plan(config: DTensorLinearConfig) -> tuple[dict[str, ParallelStyle], ...]:
    """Plans for :class:`Projection`, to be applied one after the other."""
    given, wanted = LAYOUTS[config.input], LAYOUTS[config.output]
    inside = LAYOUTS[config.norm] if config.norm else given
    own = LAYOUTS["replicate" if config.style == "column" else "hidden"]
    if config.prepare_input:
        inside = inside if config.norm else own
    style = ColwiseParallel if config.style == "column" else RowwiseParallel
    between = LAYOUTS["hidden" if config.style == "column" else "replicate"]
    last = between if config.prepare_output else wanted
    local = config.local_output and not config.prepare_output
    plan: dict[str, ParallelStyle] = {"linear": style(input_layouts=inside, output_layouts=last, use_local_output=local)}
    if config.norm:
        dim = 0 if config.norm == "batch" else 1
        plan["norm"] = SequenceParallel(sequence_dim=dim, use_local_output=config.local_norm)
    plans = [plan]
    if config.prepare_input:
        plans.append({"": PrepareModuleInput(input_layouts=given, desired_input_layouts=inside, use_local_output=config.local_input)})
    if config.prepare_output:
        around = PrepareModuleOutput(output_layouts=between, desired_output_layouts=wanted, use_local_output=config.local_output)
        plans.append({"": around})
    return tuple(plans)


def _parallel(config: DTensorLinearConfig) -> nn.Module:
    mesh = tp_mesh()
    module: nn.Module = Projection(config)
    if config.dtensor_input:
        take_dtensor(module, mesh, LAYOUTS[config.input], (config.batch, config.seq, config.in_features))
    for plan in linear_plan(config):
        module = parallelize_module(module, mesh, plan)
    return module


@st.composite
def dtensor_linear_configs(draw: st.DrawFn, world_size: int) -> DTensorLinearConfig:
    """All options; sizes need not divide wherever DTensors know the whole shape.

    A norm takes what it is handed for its part of the sequence, so that a plain tensor comes in that layout, or through
    PrepareModuleInput.
    """
    style, norm = draw(st.sampled_from(["column", "row"])), draw(st.sampled_from(["", "", "batch", "sequence"]))
    dtensor_input, prepare_input = draw(st.booleans()), draw(st.booleans())
    local_input, local_norm = prepare_input and draw(st.booleans()), norm != "" and draw(st.booleans())
    given = draw(st.sampled_from(list(LAYOUTS)))
    if norm and not prepare_input and not dtensor_input:
        given = norm
    # Where a plain tensor is handed over, here or between the layers, DTensor takes its sharded dimension to be even.
    even = {given if not dtensor_input else "", norm if local_norm or local_input else ""}
    even |= {"hidden"} if style == "row" and local_input and not norm else set()
    # A sequence that does not divide leaves strided parts where it is exchanged for features, and the product refuses them.
    even |= {"sequence"} if style == "row" and (norm or given) == "sequence" else set()
    seq, batch, _ = draw(activations(world_size, "sequence" in even, ()))
    output, local_output = draw(st.sampled_from([name for name in LAYOUTS if name != "partial" or style == "row"])), draw(st.booleans())
    cut = {given, output, norm}
    # With fewer features than ranks the weight is gathered, and there are no summands to hand out.
    least = max(2, world_size) if output == "partial" else 2
    return DTensorLinearConfig(
        # At least 2: released DTensor refuses to reshape a tensor whose sharded dimension has size 1, even on a single rank.
        batch=max(batch * world_size if "batch" in even else batch, 2 if "batch" in cut else 1),
        seq=max(seq, 2 if "sequence" in cut else 1),
        in_features=max(least, draw(divisible(world_size) if "hidden" in even else uneven_sizes(world_size))),
        out_features=max(2, draw(uneven_sizes(world_size))),
        style=style,
        input=given,
        output=output,
        dtensor_input=dtensor_input,
        local_output=local_output or output == "partial",
        norm=norm,
        local_norm=local_norm,
        prepare_input=prepare_input,
        prepare_output=draw(st.booleans()) and output != "partial",
        local_input=local_input,
        bias=draw(st.booleans()),
        frozen=draw(st.booleans()),
    )


def _placement(layout: str) -> PlacementLike:
    return Placement(Partial(), Replicate()) if layout == "partial" else LAYOUTS[layout]


dtensor_linear = Subject(
    name="dtensor_linear",
    reference=Projection,
    parallel=_parallel,
    configs=dtensor_linear_configs,
    inputs=lambda c: {"x": Input((c.batch, c.seq, c.in_features), placement=_placement(c.input))},
    outputs=lambda c: _placement(c.output),
    context=lambda c: quietly(),
    # Not where each rank adds its part of a bias, bias / world_size, to its partial sums.
    exact=lambda c: not c.norm and (c.style == "column" or not c.bias),
    subgroups=True,
)
