"""Subjects: ColumnParallelLinear and RowParallelLinear with all their options, beside ``nn.Linear``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from tpverify.current_group import tp_group
from tpverify.sharding import Partial, Placement, PlacementLike, Replicate, Shard, UnevenShard
from tpverify.subjects.communication import finalization
from tpverify.subjects.drawing import activations, divisible, uneven_sizes
from tpverify.subjects.linear import ColumnParallelLinear, RowParallelLinear
from tpverify.subjects.parameters import finalize_gradients
from tpverify.subjects.subject import Collective, Input, Subject


@dataclass(frozen=True)
class ColumnParallelLinearConfig:
    """Sizes, elements, and options of a ColumnParallelLinear; its input is [seq, batch, in_features]."""

    seq: int = 1
    batch: int = 1
    in_features: int = 1
    out_features: int = 1
    bias: bool = True
    gather_output: bool = False
    skip_bias_add: bool = False
    sequence_parallel: bool = False
    uneven: bool = False


@dataclass(frozen=True)
class RowParallelLinearConfig:
    """Sizes, elements, and options of a RowParallelLinear; its input is [seq, batch, in_features]."""

    seq: int = 1
    batch: int = 1
    in_features: int = 1
    out_features: int = 1
    bias: bool = True
    input_is_parallel: bool = True
    skip_bias_add: bool = False
    sequence_parallel: bool = False
    uneven: bool = False


class ReferenceLinear(nn.Linear):
    """``nn.Linear`` that can hand back its bias instead of adding it."""

    def __init__(self, config: ColumnParallelLinearConfig | RowParallelLinearConfig) -> None:
        super().__init__(config.in_features, config.out_features, bias=config.bias)
        self.skip_bias_add = config.skip_bias_add

    def forward(self, x: Tensor) -> Any:
        """[..., in_features] -> [..., out_features], or ``(output, bias)``."""
        return (F.linear(x, self.weight), self.bias) if self.skip_bias_add else super().forward(x)


@st.composite
def column_parallel_linear_configs(draw: st.DrawFn, world_size: int) -> ColumnParallelLinearConfig:
    """All options; sizes that do not divide come with ``uneven`` or are rare, to be refused."""
    # Every option is drawn in every case, used or not, so that Hypothesis can take one back without redrawing the rest.
    bias, skip, gather, sequence_parallel, uneven = (draw(st.booleans()) for _ in range(5))
    seq, batch, flaw = draw(activations(world_size, sequence_parallel, () if uneven else ("out_features",), long=True))
    return ColumnParallelLinearConfig(
        seq=seq,
        batch=batch,
        in_features=draw(st.integers(1, 6)),
        out_features=draw(uneven_sizes(world_size) if uneven else divisible(world_size, flaw != "")),
        bias=bias,
        gather_output=gather and not sequence_parallel,
        skip_bias_add=bias and skip,
        sequence_parallel=sequence_parallel,
        uneven=uneven,
    )


@st.composite
def row_parallel_linear_configs(draw: st.DrawFn, world_size: int) -> RowParallelLinearConfig:
    """All options; sizes that do not divide come with ``uneven`` or are rare, to be refused."""
    bias, skip, whole, sequence_parallel, uneven = (draw(st.booleans()) for _ in range(5))
    seq, batch, flaw = draw(activations(world_size, sequence_parallel, () if uneven else ("in_features",), long=True))
    return RowParallelLinearConfig(
        seq=seq,
        batch=batch,
        in_features=draw(uneven_sizes(world_size) if uneven else divisible(world_size, flaw != "")),
        out_features=draw(st.integers(1, 6)),
        bias=bias,
        input_is_parallel=sequence_parallel or not whole,
        skip_bias_add=bias and skip,
        sequence_parallel=sequence_parallel,
        uneven=uneven,
    )


def _cut(dim: int, uneven: bool) -> PlacementLike:
    return UnevenShard(dim, "tensor_split") if uneven else Shard(dim)


def _column_outputs(config: ColumnParallelLinearConfig) -> PlacementLike | tuple[PlacementLike, ...]:
    output = Replicate() if config.gather_output else _cut(2, config.uneven)
    return (output, _cut(0, config.uneven)) if config.skip_bias_add else output


def _column_communication(config: ColumnParallelLinearConfig, world_size: int) -> list[Collective]:
    if world_size == 1:
        return []
    tokens = config.seq * config.batch
    message = tokens * config.in_features
    if config.sequence_parallel:
        return [
            Collective("all_gather", "forward", "", 1, message),
            Collective("all_gather", "backward", "", 1, message),
            Collective("reduce_scatter", "backward", "", 1, message),
        ]
    backward = [Collective("all_reduce", "backward", "", 1, message)]
    if config.gather_output:  # unequal parts travel padded to the largest
        largest = -(-config.out_features // world_size)
        return [Collective("all_gather", "forward", "", 1, tokens * largest * world_size), *backward]
    return backward


def _row_outputs(config: RowParallelLinearConfig) -> PlacementLike | tuple[PlacementLike, ...]:
    output = Shard(0) if config.sequence_parallel else Replicate()
    if not config.skip_bias_add:
        return output
    # Added to a part of the sequence, the bias gets the part's gradient.
    return output, Placement(Replicate(), Partial() if config.sequence_parallel else Replicate())


def _row_communication(config: RowParallelLinearConfig, world_size: int) -> list[Collective]:
    if world_size == 1:
        return []
    tokens = config.seq * config.batch
    message = tokens * config.out_features
    if config.sequence_parallel:
        return [
            Collective("reduce_scatter", "forward", "", 1, message),
            Collective("all_gather", "backward", "", 1, message),
            *finalization(config.out_features if config.bias else 0),
        ]
    forward = [Collective("all_reduce", "forward", "", 1, message)]
    if not config.input_is_parallel:
        largest = -(-config.in_features // world_size)
        return [*forward, Collective("all_gather", "backward", "", 1, tokens * largest * world_size)]
    return forward


column_parallel_linear = Subject(
    name="column_parallel_linear",
    reference=ReferenceLinear,
    parallel=lambda c: ColumnParallelLinear(
        c.in_features,
        c.out_features,
        group=tp_group(),
        bias=c.bias,
        gather_output=c.gather_output,
        skip_bias_add=c.skip_bias_add,
        sequence_parallel=c.sequence_parallel,
        uneven=c.uneven,
    ),
    configs=column_parallel_linear_configs,
    inputs=lambda c: {"x": Input((c.seq, c.batch, c.in_features), placement=Shard(0) if c.sequence_parallel else Replicate())},
    placements=lambda c: {"*": _cut(0, c.uneven)},
    outputs=_column_outputs,
    communication=_column_communication,
    rejects=lambda c, world_size: not c.uneven and c.out_features % world_size != 0,
    exact=True,
    subgroups=True,
)

row_parallel_linear = Subject(
    name="row_parallel_linear",
    reference=ReferenceLinear,
    parallel=lambda c: RowParallelLinear(
        c.in_features,
        c.out_features,
        group=tp_group(),
        bias=c.bias,
        input_is_parallel=c.input_is_parallel,
        skip_bias_add=c.skip_bias_add,
        sequence_parallel=c.sequence_parallel,
        uneven=c.uneven,
    ),
    configs=row_parallel_linear_configs,
    inputs=lambda c: {"x": Input((c.seq, c.batch, c.in_features), placement=_cut(2, c.uneven) if c.input_is_parallel else Replicate())},
    placements=lambda c: {"weight": _cut(1, c.uneven), "*": Replicate()},
    outputs=_row_outputs,
    finalize_gradients=finalize_gradients,
    communication=_row_communication,
    rejects=lambda c, world_size: not c.uneven and c.in_features % world_size != 0,
    exact=True,
    subgroups=True,
)
