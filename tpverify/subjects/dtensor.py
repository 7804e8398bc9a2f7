"""What subjects made by ``parallelize_module`` have in common: their mesh, layouts by name, and inputs that are DTensors."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.distributed.tensor.placement_types import Placement

from tpverify.current_group import tp_group
from tpverify.sharding import Replicate, Shard
from tpverify.subjects.subject import Collective

LAYOUTS: dict[str, Replicate | Shard] = {"replicate": Replicate(), "sequence": Shard(1), "hidden": Shard(2)}
"""Of an activation [batch, seq, hidden]."""


def tp_mesh() -> DeviceMesh:
    """The TP group as a mesh with one axis, made as users make it: from the world, or from a group that exists already."""
    group, device = tp_group(), torch.get_default_device().type
    if group is dist.group.WORLD:
        return init_device_mesh(device, (group.size(),), mesh_dim_names=("tp",))
    return DeviceMesh.from_group(group, device, mesh_dim_names=("tp",))


def take_dtensor(module: nn.Module, mesh: DeviceMesh, placement: Placement, shape: Sequence[int], position: int = 0) -> None:
    """Let a module's caller hand over its part of an argument, of any size: it becomes a DTensor of the given logical shape.

    The styles' own ``input_layouts`` do the same with ``DTensor.from_local``, but without the shape: that is then taken to be
    world_size times the local one, which is right only where the size divides.

    Args:
        position: which positional argument.
    """
    size = torch.Size(shape)
    stride = tuple(prod(size[dim + 1 :]) for dim in range(len(size)))

    def convert(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        local: Tensor = args[position].contiguous()
        whole = DTensor.from_local(local, mesh, (placement,), run_check=False, shape=size, stride=stride)
        return (*args[:position], whole, *args[position + 1 :])

    module.register_forward_pre_hook(convert)


def replicated_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A plain tensor that all ranks hold, as a replicated DTensor where it meets one: the two kinds do not mix."""
    if not isinstance(like, DTensor):
        return tensor
    return DTensor.from_local(tensor, like.device_mesh, (Replicate(),), run_check=False)


def padded_elements(shape: Sequence[int], placement: Replicate | Shard, world_size: int) -> int:
    """Elements of a message that carries a whole tensor: DTensor pads uneven parts to the largest one."""
    sizes = list(shape)
    if isinstance(placement, Shard):
        sizes[placement.dim] = -(-sizes[placement.dim] // world_size) * world_size
    return prod(sizes)


def block_communication(
    shape: Sequence[int],
    world_size: int,
    *,
    given: str,
    wanted: str,
    readers: int,
    shared_input: bool,
    reduced_whole: bool = False,
) -> list[Collective]:
    """The collectives of column-parallel layers, local work and a row-parallel layer.

    Args:
        shape: of the activation on both sides, [batch, seq, hidden].
        given, wanted: names of the layouts on both sides.
        readers: column-parallel layers that change the input's layout, each for itself.
        shared_input: they read one DTensor, so that its gradient is summed before it is reduced, where no layout changes.
        reduced_whole: the output is reduced as a whole and only then cut.
    """
    if world_size == 1:
        return []
    before, after = (padded_elements(shape, LAYOUTS[layout], world_size) for layout in (given, wanted))
    if wanted == "replicate" or reduced_whole:
        messages = [Collective("all_reduce", "forward", "*", 1, prod(shape))]
    else:
        messages = [Collective("reduce_scatter", "forward", "*", 1, after)]
    if wanted != "replicate":
        messages.append(Collective("all_gather", "backward", "*", 1, after))
    if given == "replicate":
        messages.append(Collective("all_reduce", "backward", "*", 1 if shared_input else readers, before))
    else:
        messages.append(Collective("all_gather", "forward", "*", readers, before))
        messages.append(Collective("reduce_scatter", "backward", "*", readers, before))
    return messages


@contextlib.contextmanager
def loss_parallel_outside() -> Iterator[None]:
    """``loss_parallel()`` for all ranks of a run at once.

    It installs handlers in a table that all of a process shares, and removes them when it is left. Entered by each simulated
    rank, it would be left by one while another still computes its loss. Nor are the handlers removed where an exception
    passes through it, as one does when a rank's error ends a run, so that this is done here.
    """
    handlers = DTensor._op_dispatcher._custom_op_handlers
    before = dict(handlers)
    try:
        with loss_parallel():
            yield
    finally:
        handlers.clear()
        handlers.update(before)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Where sizes do not fit, the sharding rules log the error that they also raise; the exception is enough."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before
