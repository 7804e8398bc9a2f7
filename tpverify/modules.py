"""Reading and loading a module under test: names, placements, DTensors, ties; values are copied in, never replaced."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import _StridedShard

from tpverify.errors import SubjectError
from tpverify.run import Placed
from tpverify.sharding import Block, FusedShard, Partial, Placement, as_placement, describe, local_shape, shard


def named_tensors(output: Any) -> dict[str, torch.Tensor]:
    """The tensors of a (nested) output by label: ``output`` if there is one only, else ``output[0]``, ``output[logits]``.

    None and plain numbers are passed over, so that ``(output, None)`` compares with ``output``.

    Raises:
        SubjectError: anything but tensors, tuples, lists, mappings and dataclasses.
    """
    found = dict(_walk(output, "output"))
    return {"output": next(iter(found.values()))} if len(found) == 1 else found


def _walk(output: Any, label: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(output, torch.Tensor):
        yield label, output
    elif isinstance(output, (tuple, list)):
        for index, item in enumerate(output):
            yield from _walk(item, f"{label}[{index}]")
    elif isinstance(output, Mapping):
        for key, item in output.items():
            yield from _walk(item, f"{label}[{key}]")
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from _walk(getattr(output, field.name), f"{label}[{field.name}]")
    elif output is not None and not isinstance(output, (bool, int, float, str)):
        kinds = "tensors, tuples, lists, mappings and dataclasses"
        raise SubjectError(f"Expected an output of {kinds} but got {label} of type {type(output).__name__}")


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters under all their names, tied ones included."""
    return dict(module.named_parameters(remove_duplicate=False))


def ties(module: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Groups of at least two names that stand for one parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in named_parameters(module).items():
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The rank's own part of a tensor, waited for."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU, where checks look at tensors, without its history."""
    return tensor.detach().to("cpu", copy=True)


def mesh_placement(tensor: DTensor, name: str) -> Placement:
    """The placement of a DTensor on the one axis of its mesh that has more than one rank.

    Raises:
        SubjectError: more than one axis has.
    """
    axes = [axis for axis, size in enumerate(tensor.device_mesh.shape) if size > 1]
    if len(axes) > 1:
        got = f"{name} with placements={tensor.placements} on a mesh of shape {tuple(tensor.device_mesh.shape)}"
        raise SubjectError(f"Expected a DTensor on a mesh with one axis of more than one rank but got {got}")
    placement: Any = tensor.placements[axes[0]] if axes else Replicate()
    if isinstance(placement, _StridedShard):  # DTensor's private word for blocks of equal size, each of which is sharded
        count = placement.split_factor
        return Placement(FusedShard(placement.dim, (Block(tensor.shape[placement.dim] // count),) * count))
    return as_placement(placement)


def placements_of(
    parameters: Mapping[str, nn.Parameter], declared: Mapping[str, Placement], logical: Iterable[str]
) -> dict[str, Placement]:
    """The placement of every parameter: its own if it is a DTensor, otherwise the first pattern that matches its name.

    Args:
        logical: names of the reference's parameters; a pattern for a parameter that lives on another rank matches one of them.

    Raises:
        SubjectError: a parameter without a placement, or a pattern that matches nothing.
    """
    found: dict[str, Placement] = {}
    unused = set(declared)
    for name, parameter in parameters.items():
        matching = [pattern for pattern in declared if fnmatchcase(name, pattern)]
        unused.difference_update(matching)
        if isinstance(parameter, DTensor):
            found[name] = mesh_placement(parameter, name)
        elif matching:
            found[name] = declared[matching[0]]
        else:
            patterns = ", ".join(declared) or "none"
            raise SubjectError(
                f"Expected a placement for every parameter but got none for {name!r}: add it to placements (patterns: {patterns})"
            )
    unused = {pattern for pattern in unused if not any(fnmatchcase(name, pattern) for name in logical)}
    if unused:
        names = ", ".join(parameters) or "none"
        raise SubjectError(f"Expected every placement pattern to match a parameter but {sorted(unused)} match none of: {names}")
    return found


def load_logical(module: nn.Module, logical: Mapping[str, torch.Tensor]) -> None:
    """Copy logical values into a module on one device."""
    with torch.no_grad():
        for name, parameter in named_parameters(module).items():
            parameter.copy_(logical[name])


def load_shards(
    module: nn.Module,
    logical: Mapping[str, torch.Tensor],
    placements: Mapping[str, Placement],
    rank: int,
    world_size: int,
    owners: Mapping[str, int],
) -> None:
    """Copy each parameter's part of the logical value into it.

    Args:
        owners: the rank that gets the value of a Partial parameter, where it is not rank 0; the others get zeros.

    Raises:
        SubjectError: a name that the reference does not have, or a shape that contradicts the placement.
    """
    for name, parameter in named_parameters(module).items():
        if name not in logical:
            raise SubjectError(
                f"Expected the reference to have every parameter of the parallel module but got {name!r}; it has: {', '.join(logical)}"
            )
        layout = placements[name].value
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        expected = local_shape(logical[name].shape, layout, rank, world_size)
        if tuple(local.shape) != expected:
            raise SubjectError(
                f"Expected {name!r} to have the local shape {expected} on rank {rank} of {world_size}, by {describe(layout, world_size)} "
                f"of {tuple(logical[name].shape)}, but got {tuple(local.shape)}"
            )
        with torch.no_grad():
            if isinstance(layout, Partial) and rank != owners.get(name, 0):
                local.zero_()
            else:
                local.copy_(shard(logical[name], layout, 0 if isinstance(layout, Partial) else rank, world_size))


def check_complete(logical: Iterable[str], held: Iterable[str], declared: Mapping[str, Placement], rank: int) -> None:
    """Every parameter of the reference must exist on every rank; one whose value is Partial may live on one rank only.

    Raises:
        SubjectError: a parameter of the reference that the parallel module lacks.
    """
    present = set(held)
    for name in logical:
        if name in present:
            continue
        layout = next((placement.value for pattern, placement in declared.items() if fnmatchcase(name, pattern)), None)
        if not isinstance(layout, Partial):
            names = ", ".join(sorted(present)) or "none"
            raise SubjectError(
                f"Expected the parallel module to have every parameter of the reference but rank {rank} lacks {name!r}; it has: {names}"
            )


def gradient_of(tensor: torch.Tensor, placement: Placement) -> Placed:
    """A leaf's gradient as it lies on this rank; a DTensor gradient brings its own placement."""
    gradient = tensor.grad
    if isinstance(gradient, DTensor):
        return Placed(on_host(gradient.to_local()), mesh_placement(gradient, "a gradient").value)
    return Placed(None if gradient is None else on_host(gradient), placement.of_gradient)


def graph_depth(outputs: Iterable[torch.Tensor]) -> int:
    """The most operations that follow one another on the way to an output, as autograd has recorded them."""
    depth: dict[Any, int] = {None: 0}
    todo: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    while todo:
        node = todo[-1]
        before = [] if node in depth else [following for following, _ in node.next_functions if following not in depth]
        if before:
            todo += before
            continue
        todo.pop()
        if node not in depth:
            depth[node] = 1 + max((depth[following] for following, _ in node.next_functions), default=0)
    return max(depth.values())


@contextlib.contextmanager
def parameters_replaced(module: nn.Module, parameters: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Within the block the module has other parameters, one for each name, so that tied ones are several."""
    replaced = []
    for name in parameters:
        path, _, own = name.rpartition(".")
        owner = module.get_submodule(path)
        replaced.append((owner, own, owner._parameters[own]))
        owner._parameters[own] = parameters[name]  # type: ignore[assignment]
    try:
        yield
    finally:
        for owner, own, parameter in replaced:
            owner._parameters[own] = parameter
