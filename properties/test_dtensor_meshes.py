"""DTensors on meshes of two axes, of which one has a single rank: tensor parallelism beside FSDP as users write it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tpverify as tpv
from tpverify.modules import mesh_placement
from tpverify.simulator.world import simulate


class TwoLayers(nn.Module):
    """Column, then row."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.a = nn.Linear(config.hidden, config.ffn)
        self.b = nn.Linear(config.ffn, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> the same."""
        return self.b(torch.relu(self.a(x))).clone()


def planned(config: Any, fsdp: bool, last: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
    module = parallelize_module(TwoLayers(config), mesh["tp"], {"a": ColwiseParallel(), "b": last})
    return fully_shard(module, mesh=mesh["dp"]) if fsdp else module  # type: ignore[return-value]


def subject(fsdp: bool, last: Callable[[], Any] = RowwiseParallel) -> tpv.Subject:
    return tpv.Subject(
        name="two_axes",
        reference=TwoLayers,
        parallel=lambda config: planned(config, fsdp, last()),
        configs=tpv.configs(hidden=st.integers(2, 5), ffn=tpv.per_rank(2, 4)),
        inputs=lambda config: {"x": tpv.Input((3, config.hidden))},
    )


@pytest.mark.parametrize("fsdp", [False, True])
def test_a_plan_on_one_of_two_axes_is_verified(fsdp: bool) -> None:
    options: dict[str, Any] = {"world_sizes": (1, 2, 4), "max_examples": 12, "seed": 1}
    assert tpv.verify(subject(fsdp), **options).violations == ()
    wrong = tpv.verify(subject(fsdp, lambda: RowwiseParallel(output_layouts=Partial(), use_local_output=True)), **options)
    assert "forward" in {violation.check for violation in wrong.violations}


def test_the_axis_with_several_ranks_decides() -> None:
    def program() -> list[Any]:
        size = dist.get_world_size()
        found = []
        for shape, placements in (((1, size), [Shard(1), Shard(0)]), ((size, 1), [Shard(0), Partial()]), ((1, 1, size), [Replicate()] * 3)):
            mesh = init_device_mesh("cpu", shape)
            found.append(mesh_placement(distribute_tensor(torch.ones(4, 4), mesh, placements), "x").value)
        return found

    assert simulate(program, 2).results == [[Shard(0), Shard(0), Replicate()]] * 2
    assert simulate(program, 1).results == [[Replicate()] * 3]


def test_two_axes_with_several_ranks_are_refused() -> None:
    def program() -> str:
        placed = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2, 2)), [Shard(0), Shard(1)])
        with pytest.raises(tpv.SubjectError) as raised:
            mesh_placement(placed, "weight")
        return str(raised.value)

    (message,) = set(simulate(program, 4).results)
    assert "Expected a DTensor on a mesh with one axis of more than one rank but got weight with placements=" in message
    assert "shape (2, 2)" in message
