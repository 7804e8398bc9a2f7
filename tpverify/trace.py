"""What goes into and comes out of every submodule, captured only when a failed check has to be explained."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tpverify.errors import SubjectError
from tpverify.modules import local_of, named_tensors
from tpverify.run import ModuleCall, RankRun
from tpverify.sharding import Layout, Replicate, Shard, unshard

REPLICAS = 1e-3
"""How far replicas may be apart and still be taken for one tensor: half precision's rounding."""


@contextlib.contextmanager
def tracing(module: nn.Module, calls: dict[str, ModuleCall]) -> Iterator[None]:
    """Within the block, the first call of every submodule is captured into ``calls``, by path, in order of the calls' starts.

    Gradients of what a submodule takes and returns follow when backward reaches them. Every submodule is given aliases of its
    inputs, so that the gradient of an input is what this submodule alone contributes to it.
    """
    handles = []
    for path, submodule in module.named_modules():
        if path:
            handles.append(submodule.register_forward_pre_hook(_before(path, calls)))
            handles.append(submodule.register_forward_hook(_after(path, calls)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _before(path: str, calls: dict[str, ModuleCall]) -> Any:
    def hook(module: nn.Module, args: Any) -> Any:
        if path in calls:
            return None
        aliases = tuple(_alias(arg) for arg in args)
        tensors = _tensors(aliases)
        calls[path] = ModuleCall(_copied(tensors), None, _gradients(tensors))
        return aliases

    return hook


def _alias(value: Any) -> Any:
    """The same tensor to its user, a node of its own to autograd."""
    plain = isinstance(value, torch.Tensor) and value.requires_grad and not isinstance(value, nn.Parameter)
    return value.view_as(value) if plain and torch.is_grad_enabled() else value


def _after(path: str, calls: dict[str, ModuleCall]) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        call = calls.get(path)
        if call is not None and call.outputs is None:
            tensors = _tensors(output)
            calls[path] = ModuleCall(call.inputs, _copied(tensors), call.input_gradients, _gradients(tensors))

    return hook


def _tensors(value: Any) -> list[torch.Tensor] | None:
    """The tensors in a value; None where it holds something else."""
    if isinstance(value, (tuple, list)) and any(item is not None and not isinstance(item, torch.Tensor) for item in value):
        return None
    try:
        return list(named_tensors(value).values())
    except SubjectError:
        return None


def _copied(tensors: Sequence[torch.Tensor] | None) -> tuple[torch.Tensor, ...] | None:
    return None if tensors is None else tuple(local_of(tensor).detach().cpu().clone() for tensor in tensors)


def _gradients(tensors: Sequence[torch.Tensor] | None) -> list[torch.Tensor | None]:
    """One place for each tensor's gradient, filled when backward has added up all of its uses."""
    gradients: list[torch.Tensor | None] = [None] * len(tensors or ())
    for place, tensor in enumerate(tensors or ()):
        if tensor.requires_grad:
            tensor.register_hook(_keeping(gradients, place))  # type: ignore[no-untyped-call]
    return gradients


def _keeping(gradients: list[torch.Tensor | None], place: int) -> Any:
    def hook(gradient: torch.Tensor) -> None:
        gradients[place] = local_of(gradient).detach().cpu().clone()

    return hook


def guess_layout(logical: Sequence[int], local: Sequence[int], world_size: int) -> Layout | None:
    """The layout that explains a local shape: the same, or one dimension cut evenly; None = no such layout."""
    if tuple(logical) == tuple(local):
        return Replicate()
    if len(logical) != len(local):
        return None
    cut = [dim for dim, (whole, part) in enumerate(zip(logical, local, strict=True)) if whole != part]
    return Shard(cut[0]) if len(cut) == 1 and local[cut[0]] * world_size == logical[cut[0]] else None


def replay(module: nn.Module, reference: Mapping[str, ModuleCall], ranks: Sequence[RankRun]) -> dict[str, tuple[torch.Tensor, ...]]:
    """What each of the reference's submodules returns when it is given the *parallel* module's inputs."""
    replayed = {}
    submodules = dict(module.named_modules())
    for path, call in ranks[0].calls.items():
        expected = reference.get(path)
        if expected is None or expected.inputs is None or path not in submodules:
            continue
        inputs = _logical_inputs(expected.inputs, [run.calls[path].inputs for run in ranks if path in run.calls], len(ranks))
        if inputs is None or call.inputs is None:
            continue
        with torch.no_grad(), contextlib.suppress(Exception):
            outputs = _copied(_tensors(submodules[path](*(tensor.to(torch.get_default_device()) for tensor in inputs))))
            if outputs is not None:
                replayed[path] = outputs
    return replayed


def _logical_inputs(
    logical: Sequence[torch.Tensor], locals_: Sequence[Sequence[torch.Tensor] | None], world_size: int
) -> list[torch.Tensor] | None:
    if len(locals_) != world_size or any(local is None or len(local) != len(logical) for local in locals_):
        return None
    inputs = []
    for index, whole in enumerate(logical):
        parts = [local[index] for local in locals_ if local is not None]
        layout = guess_layout(whole.shape, parts[0].shape, world_size)
        if layout is None or any(part.shape != parts[0].shape for part in parts):
            return None
        inexact = whole.is_floating_point()
        if inexact and isinstance(layout, Replicate) and not all(torch.allclose(part, parts[0], rtol=REPLICAS) for part in parts):
            return None  # replicas that differ are no input of one device
        inputs.append(unshard(parts, layout, whole.shape))
    return inputs
