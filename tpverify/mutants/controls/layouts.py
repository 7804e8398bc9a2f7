"""Controls: unequal cuts, partial gradients and unequal beginnings, each declared or without consequence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis.strategies import SearchStrategy
from torch import Tensor, nn

from tpverify.current_group import tp_group
from tpverify.mutants.control import add_control
from tpverify.mutants.controls.biases import with_bias_placement
from tpverify.sharding import Partial, Placement, PlacementLike, Replicate, Shard, UnevenShard
from tpverify.strategies import configs_of
from tpverify.subjects.block import BlockConfig, transformer_block
from tpverify.subjects.linear import ColumnParallelLinear
from tpverify.subjects.linear_subjects import (
    ColumnParallelLinearConfig,
    RowParallelLinearConfig,
    column_parallel_linear,
    row_parallel_linear,
)
from tpverify.subjects.mappings import Group, copy_to_region, reduce_from_region, scatter_to_region
from tpverify.subjects.mlp import ParallelMLP, ReferenceMLP, activate, mlp
from tpverify.subjects.subject import Input


class ScatteredLinear(nn.Linear):
    """A linear layer on this rank's part of a replicated sequence: the gradient of the input is gathered."""

    def __init__(self, config: RowParallelLinearConfig, group: Group) -> None:
        super().__init__(config.in_features, config.out_features, bias=config.bias)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, in_features] -> [s / world_size, b, out_features]."""
        part = len(x) // self.group.size()
        return super().forward(scatter_to_region(x, 0, [part] * self.group.size(), self.group))


class ReferenceNormedMLP(ReferenceMLP):
    """A norm over all hidden features, between the two layers."""

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, hidden] -> the same."""
        h = F.gelu(self.fc1(x))
        output: Tensor = self.fc2(h / (h.square().mean(-1, keepdim=True) + 1.0).sqrt())
        return output


class NormOverRanks(ParallelMLP):
    """The same norm, whose mean square is taken over the features of all ranks."""

    def forward(self, x: Tensor) -> Tensor:
        """One more reduction each way, of a number a token."""
        h = activate(self.fc1(x), self.activation)
        group = self.fc1.group
        total = copy_to_region(reduce_from_region(h.square().sum(-1, keepdim=True), group), group)
        output: Tensor = self.fc2(h / (total / (h.shape[-1] * group.size()) + 1.0).sqrt())
        return output


def sequences(world_size: int) -> SearchStrategy[RowParallelLinearConfig]:
    """Plain configs with a sequence that divides."""
    return configs_of(row_parallel_linear, world_size).map(
        lambda c: replace(c, seq=c.seq * world_size, skip_bias_add=False, sequence_parallel=False, input_is_parallel=False, uneven=True)
    )


def without_gather(world_size: int) -> SearchStrategy[ColumnParallelLinearConfig]:
    """Configs that leave the output cut, at any size."""
    return configs_of(column_parallel_linear, world_size).map(
        lambda c: replace(c, gather_output=False, skip_bias_add=False, sequence_parallel=False, uneven=True)
    )


def rest_on_last(config: ColumnParallelLinearConfig) -> nn.Module:
    """A layer whose last rank holds what does not divide."""
    group = tp_group()
    part, last = config.out_features // group.size(), group.rank() == group.size() - 1
    rows = range(group.rank() * part, config.out_features if last else (group.rank() + 1) * part)
    return ColumnParallelLinear(config.in_features, config.out_features, group=group, bias=config.bias, rows=[rows])


def hooked(config: BlockConfig) -> nn.Module:
    """A block whose norms and biases reduce their gradients as soon as they have them."""
    module: Any = transformer_block.parallel(config)

    def summed(group: Group) -> Any:
        def hook(grad: Tensor) -> Tensor:
            total = grad.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(total, group=group)
            return total

        return hook

    for parameter in module.parameters():
        group: Group | None = getattr(parameter, "sequence_parallel_group", None)
        if group is not None and group.size() > 1:
            parameter.register_hook(summed(group))
    built: nn.Module = module
    return built


def seeded_by_rank(config: RowParallelLinearConfig) -> nn.Module:
    """A layer that every rank begins with numbers of its own."""
    torch.manual_seed(1000 + dist.get_rank())
    return row_parallel_linear.parallel(config)


def partial_under_sequence(config: RowParallelLinearConfig) -> dict[str, PlacementLike]:
    """Placements of a layer whose bias is left with the gradient of this rank's tokens."""
    return with_bias_placement(config, Placement(Replicate(), Partial() if config.sequence_parallel else Replicate()))


SCATTERED = add_control(
    "sequence-scattered",
    row_parallel_linear,
    looks_like="a scatter of the sequence whose backward gathers (reported against Megatron-LM)",
    because="its input is replicated: each rank has the gradient of its own tokens, and the input's is all of them",
    parallel=lambda c: ScatteredLinear(c, tp_group()),
    configs=sequences,
    inputs=lambda c: {"x": Input((c.seq, c.batch, c.in_features))},
    outputs=Shard(0),
    placements={"*": Placement(Replicate(), Partial())},
    finalize_gradients=None,
    communication=None,
)
add_control(
    "rest-on-last-rank",
    column_parallel_linear,
    looks_like="shards of unequal sizes, one of them far larger",
    because="placement and output say that the last rank holds the rest",
    parallel=rest_on_last,
    configs=without_gather,
    placements={"*": UnevenShard(0, "last")},
    outputs=UnevenShard(2, "last"),
)
HOOKED = add_control(
    "finalised-by-hooks",
    transformer_block,
    looks_like="gradients of norms that nothing finalises after backward",
    because="hooks sum them over the ranks during backward; the collectives are only recorded",
    parallel=hooked,
    finalize_gradients=None,
    communication=None,
)
UNFINALISED = add_control(
    "gradient-left-partial",
    row_parallel_linear,
    looks_like="a replicated bias whose gradient differs from rank to rank",
    because="its gradient is declared Partial: whoever finalises it comes later",
    placements=partial_under_sequence,
    finalize_gradients=None,
    communication=None,
)
add_control(
    "norm-over-all-ranks",
    mlp,
    layers=(NormOverRanks,),
    looks_like="a reduction between the column-parallel and the row-parallel layer, where none is needed (proposed to be dropped in vLLM)",
    because="the norm spans the features of all ranks, as the reference's does",
    reference=lambda c: ReferenceNormedMLP(c.hidden, c.ffn, c.activation, c.bias),
    configs=lambda world_size: configs_of(mlp, world_size).map(lambda c: replace(c, activation="gelu")),
    communication=None,
)
add_control(
    "seeded-by-rank",
    row_parallel_linear,
    looks_like="ranks that begin with unequal models, and a loss that depends on the TP degree (reported against torchtitan)",
    because="the harness gives both sides the same logical parameters, whatever they were initialised to",
    parallel=seeded_by_rank,
)
add_control(
    "computed-in-half-precision",
    row_parallel_linear,
    looks_like="results that differ from the reference's in the third digit (reported against PyTorch)",
    because="both sides compute in half precision, and sums over ranks round where one device does not",
    dtypes=("bfloat16", "float16"),
)
add_control(
    "computed-in-float32",
    transformer_block,
    looks_like="results that differ from the reference's in the seventh digit",
    because="both sides compute in float32",
    dtypes=("float32",),
    max_examples=30,
)
