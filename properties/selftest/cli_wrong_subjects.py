"""Subjects whose authors made a mistake that no layer is to blame for; the tests of the command line's errors name them."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tpverify as tpv


def build(config: tpv.Config) -> nn.Module:
    """Two linear layers."""
    return nn.Sequential(nn.Linear(config.hidden, config.ffn), nn.Linear(config.ffn, config.hidden))


def planned(*names: str) -> tpv.Subject:
    """The layers under a plan that gives its two styles to these names."""

    def parallel(config: tpv.Config) -> nn.Module:
        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        return parallelize_module(build(config), mesh, dict(zip(names, (ColwiseParallel(), RowwiseParallel()), strict=True)))

    return tpv.Subject(
        name="planned",
        reference=build,
        parallel=parallel,
        configs=tpv.configs(hidden=st.integers(1, 3), ffn=tpv.per_rank(1, 3)),
        inputs=lambda c: {"x": tpv.Input((2, c.hidden))},
    )


class Heads(nn.Module):
    """Scales each head by a parameter of its own; every rank has the same number of heads."""

    def __init__(self, config: tpv.Config, ranks: int) -> None:
        super().__init__()
        self.heads = config.heads // ranks
        self.scale = nn.Parameter(torch.ones(self.heads))
        self.width = config.width

    def forward(self, x: Tensor) -> Tensor:
        """[b, heads * width] -> [b, heads * width]."""
        return (x.view(-1, self.heads, self.width) * self.scale[:, None]).flatten(1)


right_plan = planned("0", "1")
plan_of_nothing = planned("layers.0", "layers.1")
no_such_globals = dataclasses.replace(right_plan, rank_local=("no_such_package.parallel_state",))
uneven_heads = tpv.Subject(
    name="uneven_heads",
    reference=lambda c: Heads(c, 1),
    parallel=lambda c: Heads(c, dist.get_world_size()),
    configs=tpv.configs(heads=st.just(3), width=st.just(2)),
    inputs=lambda c: {"x": tpv.Input((1, c.heads * c.width), placement=tpv.Shard(1))},
    placements={"scale": tpv.Shard(0)},
    outputs=tpv.Shard(1),
)
