"""The logical tensors of a case: what the reference and every rank start from, call by call, and in which order the calls go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from tpverify import modules, values
from tpverify.case import Case, call_label
from tpverify.device import default_dtype, on_cpu
from tpverify.sharding import Layout, Replicate, local_indices, shard, sharded_dim
from tpverify.subjects.subject import Input, Subject


@dataclass(frozen=True)
class Logical:
    """What both sides of one TP group start from.

    Attributes:
        parameters: values by name; a tied parameter stands under each of its names.
        stepped: the same after a step of an optimizer, which leaves alone what needs no gradient.
        inputs: of each call, values by name.
        specs: how each input is drawn and placed.
        cotangents: of each call, by output label; filled when the reference has run.
        dtype: of the leaves that floating-point inputs become.
    """

    parameters: dict[str, torch.Tensor]
    stepped: dict[str, torch.Tensor]
    inputs: tuple[dict[str, torch.Tensor], ...]
    specs: Mapping[str, Input]
    cotangents: tuple[dict[str, torch.Tensor], ...]
    dtype: torch.dtype

    @property
    def labelled_inputs(self) -> dict[str, torch.Tensor]:
        """The inputs of all calls, by label."""
        return {call_label(name, call): tensor for call, drawn in enumerate(self.inputs) for name, tensor in drawn.items()}


def draw(subject: Subject, case: Case, group: int, module: nn.Module, dtype: torch.dtype | None = None) -> Logical:
    """The parameters of a module and the inputs of every call, from the case's seed, as numbers of the working dtype.

    They lie on the CPU, in float64.

    Args:
        group: index of the TP group.
        module: the reference.
        dtype: of the leaves; None = the working dtype.
    """
    with on_cpu(), default_dtype(torch.float64):  # a generator gives other numbers for another dtype
        return _drawn(subject, case, group, module, dtype)


def _drawn(subject: Subject, case: Case, group: int, module: nn.Module, dtype: torch.dtype | None) -> Logical:
    working = subject.working_dtype(case.dtype)
    parameters: dict[str, torch.Tensor] = {}
    stepped: dict[str, torch.Tensor] = {}
    drawn: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for name, parameter in modules.named_parameters(module).items():
        if id(parameter) not in drawn:
            first = values.rounded(values.draw_parameter(case, group, name, parameter.shape), working)
            moves = case.calls == "twice" and parameter.requires_grad
            later = values.rounded(values.draw_parameter(case, group, call_label(name, 1), parameter.shape), working) if moves else first
            drawn[id(parameter)] = first, later
        parameters[name], stepped[name] = drawn[id(parameter)]
    specs = subject.inputs(case.config)
    vocabulary = subject.vocabulary(case.config) if subject.vocabulary else None
    shards = _id_shards(subject, case, specs, parameters) if specs else []
    inputs: tuple[dict[str, torch.Tensor], ...] = tuple({} for _ in range(case.call_count))
    for call, of_call in enumerate(inputs):
        for name, spec in specs.items():
            spiked = vocabulary is not None and name == vocabulary.logits
            of_call[name] = values.rounded(values.draw_input(case, group, call_label(name, call), spec, shards, spiked), working)
    return Logical(parameters, stepped, inputs, specs, tuple({} for _ in inputs), dtype or working)


def leaves_of(subject: Subject, case: Case, logical: Logical, rank: int | None = None) -> list[dict[str, torch.Tensor]]:
    """Of each call, the inputs by name, as leaves of their own for autograd.

    Args:
        rank: whose part of the inputs; None = the whole of them.
    """
    return [
        {
            name: _leaf(
                of_call[name] if rank is None else shard(of_call[name], spec.placements.value, rank, case.world_size),
                spec,
                case.layout,
                logical.dtype,
            )
            for name, spec in logical.specs.items()
        }
        for of_call in logical.inputs
    ]


def in_order(case: Case, forward: Callable[[int], None], backward: Callable[[int], None], step: Callable[[], None]) -> None:
    """Make the case's calls: ``forward`` and ``backward`` are given the number of the call, from 0; ``step`` changes parameters."""
    late = case.calls == "interleaved"
    for call in range(case.call_count):
        if call and not late:
            step()
        forward(call)
        if not late:
            backward(call)
    for call in range(case.call_count if late else 0):
        backward(call)


def _leaf(tensor: torch.Tensor, spec: Input, layout: str, dtype: torch.dtype) -> torch.Tensor:
    if spec.kind != "normal":
        return tensor.to(torch.get_default_device(), copy=True)
    return values.laid_out(tensor.to(torch.get_default_device(), dtype, copy=True), layout).requires_grad_(spec.requires_grad)


def _id_shards(subject: Subject, case: Case, specs: Mapping[str, Input], parameters: Iterable[str]) -> list[list[int]]:
    """The vocabulary ids that each rank owns."""
    vocabulary = subject.vocabulary(case.config) if subject.vocabulary else None
    if vocabulary is None:
        highest = max((spec.high for spec in specs.values()), default=0)
        return [list(range(highest))]
    names = [name for name in parameters if any(fnmatchcase(name, pattern) for pattern in vocabulary.parameters)]
    placements = subject.placements_for(case.config) if names else {}
    layouts = [placement.value for name in names for pattern, placement in placements.items() if fnmatchcase(name, pattern)]
    if vocabulary.logits:
        layouts.append(specs[vocabulary.logits].placements.value)
    layout: Layout = layouts[0] if layouts else Replicate()
    if sharded_dim(layout) is None:
        return [list(range(vocabulary.size))]
    owned = [local_indices(vocabulary.size, layout, rank, case.world_size) for rank in range(case.world_size)]
    return [[index for index in indices if index >= 0] for indices in owned]
