"""What a module does in a case, on one device or as one rank: build, load, forward, backward, finalise, collect."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from tpverify import modules, values
from tpverify.case import Case, call_label
from tpverify.current_group import tp_group, use_tp_group
from tpverify.description import check_lookup, checked_module
from tpverify.device import on_device, random_state
from tpverify.errors import SubjectError
from tpverify.logical import Logical, in_order, leaves_of
from tpverify.run import ModuleCall, Placed, RankRun
from tpverify.sharding import Partial, Placement, shard
from tpverify.simulator import recorder
from tpverify.subjects.subject import Subject
from tpverify.tolerance import bitwise_equal
from tpverify.trace import tracing


def group_layouts(case: Case) -> list[tuple[int, ...]]:
    """The global ranks of each TP group of the case's world."""
    size = case.world_size
    if case.groups == "blocks":
        return [tuple(range(size)), tuple(range(size, 2 * size))]
    if case.groups == "strided":
        return [tuple(range(0, 2 * size, 2)), tuple(range(1, 2 * size, 2))]
    return [tuple(range(size))]


def is_rejected(subject: Subject, case: Case) -> bool:
    """Whether the subject says that the case must be refused."""
    return subject.rejects is not None and subject.rejects(case.config, case.world_size)


def program_of(subject: Subject, case: Case, logical: Mapping[int, Logical], traced: int, device: str) -> Callable[[], RankRun]:
    """What every rank runs, once ``torch.distributed`` is there.

    Args:
        logical: what the ranks of each TP group start from, by the group's index.
        traced: the call, from 1, in which to capture the first call of every submodule; 0 = in none.
        device: where the ranks compute, unless a process of their own has decided that.
    """
    layouts = group_layouts(case)
    run = try_rank if is_rejected(subject, case) else run_rank

    def program() -> RankRun:
        torch.set_default_dtype(subject.working_dtype(case.dtype))
        me = dist.get_rank()
        with on_device(device):
            groups = [dist.new_group(list(members)) for members in layouts] if len(layouts) > 1 else [None]
            index = next(i for i, members in enumerate(layouts) if me in members)
            with use_tp_group(groups[index]):
                return run(subject, case, logical[index], layouts[index].index(me), traced)

    return program


def try_rank(subject: Subject, case: Case, logical: Logical, rank: int, traced: int) -> RankRun:
    """One rank's program for a case that must be refused: build, and run forward if the inputs can be cut at all."""
    module = subject.parallel(case.config)
    with contextlib.suppress(SubjectError):
        module(*leaves_of(subject, case, logical, rank)[0].values())
    return RankRun()


def run_rank(subject: Subject, case: Case, logical: Logical, rank: int, traced: int) -> RankRun:
    """One rank's program: build, load, forward, backward, finalise, collect."""
    size = case.world_size
    module = checked_module("parallel", subject.parallel(case.config))
    check_lookup(subject, case, module)
    current = recorder.current()
    if current is not None:
        current.name_modules(module)
    patterns = subject.placements_for(case.config)
    placements = modules.placements_of(modules.named_parameters(module), patterns, logical.parameters)
    modules.check_complete(logical.parameters, placements, patterns, rank)
    owners = _owners(patterns, placements, size)
    modules.load_shards(module, logical.parameters, placements, rank, size, owners)
    calls = Calls(module, leaves_of(subject, case, logical, rank), case.layout, traced)
    declared: dict[int, dict[str, Placement]] = {}

    def forward(call: int) -> None:
        with recorder.phase("forward"):
            outputs = calls.forward(call)
        declared[call] = _output_placements(subject, case, outputs, list(logical.cotangents[call]))

    def backward(call: int) -> None:
        cotangents = {
            label: shard(cotangent, declared[call][label].of_gradient, rank, size)
            for label, cotangent in logical.cotangents[call].items()
            if label in declared[call]
        }
        with recorder.phase("backward"):
            calls.backward(call, cotangents, declared[call])

    in_order(case, forward, backward, lambda: modules.load_shards(module, logical.stepped, placements, rank, size, owners))
    with recorder.phase("optimizer"):
        if subject.finalize_gradients is not None:
            subject.finalize_gradients(module)
    return calls.collect(logical, placements)


def _owners(declared: Mapping[str, Placement], placements: Mapping[str, Placement], size: int) -> dict[str, int]:
    """By name of a Partial parameter, the lowest rank of the TP group that has it; only asked for if one is declared."""
    if size == 1 or not any(isinstance(placement.value, Partial) for placement in declared.values()):
        return {}
    held: list[Any] = [None] * size
    dist.all_gather_object(held, [name for name, placement in placements.items() if isinstance(placement.value, Partial)], tp_group())
    return {name: rank for rank in reversed(range(size)) for name in held[rank]}


class Calls:
    """The calls of one module, and what came out of them, on the CPU.

    Args:
        leaves: of each call, the inputs by name.
        layout: memory layout of the cotangents.
        traced: the call, from 1, in which to capture the first call of every submodule; 0 = in none.
    """

    def __init__(self, module: nn.Module, leaves: Sequence[Mapping[str, torch.Tensor]], layout: str, traced: int) -> None:
        self.module = module
        self.leaves = leaves
        self.layout = layout
        self.traced = traced
        self.random = False
        self.depth = 1
        self.outputs: dict[str, Placed] = {}
        self.changed_outputs: list[str] = []
        self.submodules: dict[str, ModuleCall] = {}
        self._device = torch.get_default_device().type
        self._buffers = self._read_buffers()
        self._before = [{name: leaf.detach().clone() for name, leaf in of_call.items()} for of_call in leaves]
        self._pending: dict[int, dict[str, torch.Tensor]] = {}
        self._returned: dict[str, torch.Tensor] = {}

    def forward(self, call: int) -> dict[str, torch.Tensor]:
        """The outputs of the call, by label."""
        before = random_state(self._device)
        with tracing(self.module, self.submodules) if self.traced == call + 1 else contextlib.nullcontext():
            self._pending[call] = modules.named_tensors(self.module(*self.leaves[call].values()))
        after = random_state(self._device)
        self.random = self.random or not all(map(torch.equal, before, after))
        for label, output in self._pending[call].items():
            self._returned[call_label(label, call)] = modules.on_host(modules.local_of(output))
        return self._pending[call]

    def backward(self, call: int, cotangents: Mapping[str, torch.Tensor], placements: Mapping[str, Placement]) -> None:
        """Backward of the call; its outputs must have kept their values, and must have them since forward returned."""
        outputs = self._pending.pop(call)
        start_backward(outputs, cotangents, self.layout)
        for label, output in outputs.items():
            name = call_label(label, call)
            returned, kept = self._returned.pop(name), modules.on_host(modules.local_of(output))
            if not bitwise_equal(returned, kept):
                self.changed_outputs.append(name)
            # What is not there yet is as wrong as what is there no longer.
            self.outputs[name] = Placed(returned if bool(returned.isnan().any()) else kept, placements[label].value)

    def changed_inputs(self) -> tuple[str, ...]:
        """Labels of the inputs that the module wrote to."""
        return tuple(
            call_label(name, call)
            for call, before in enumerate(self._before)
            for name, value in before.items()
            if not torch.equal(self.leaves[call][name].detach(), value)
        )

    def changed_buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that have other values than before the first call, by name."""
        return {
            name: buffer
            for name, buffer in self._read_buffers().items()
            if name not in self._buffers or not bitwise_equal(buffer, self._buffers[name])
        }

    def _read_buffers(self) -> dict[str, torch.Tensor]:
        return {name: modules.on_host(modules.local_of(buffer)) for name, buffer in self.module.named_buffers()}

    def collect(self, logical: Logical, placements: Mapping[str, Placement]) -> RankRun:
        """What all calls together came to.

        Args:
            placements: of the module's parameters, by name.
        """
        parameters = modules.named_parameters(self.module)
        return RankRun(
            outputs=self.outputs,
            input_gradients={
                call_label(name, call): modules.gradient_of(leaves[name], spec.placements)
                for call, leaves in enumerate(self.leaves)
                for name, spec in logical.specs.items()
                if spec.requires_grad
            },
            parameters={
                name: Placed(modules.on_host(modules.local_of(parameter)), placements[name].value) for name, parameter in parameters.items()
            },
            parameter_gradients={name: modules.gradient_of(parameter, placements[name]) for name, parameter in parameters.items()},
            ties=modules.ties(self.module),
            changed_inputs=self.changed_inputs(),
            changed_outputs=tuple(self.changed_outputs),
            buffers=self._read_buffers(),
            calls=self.submodules,
        )


def start_backward(outputs: Mapping[str, torch.Tensor], cotangents: Mapping[str, torch.Tensor], layout: str) -> None:
    """Start backward from a cotangent for each differentiable output; an output of a wrong shape has none, and forward tells."""
    roots, starts = [], []
    for label, output in outputs.items():
        local = modules.local_of(output)
        if local.requires_grad and label in cotangents and cotangents[label].shape == local.shape:
            roots.append(local)
            starts.append(values.laid_out(cotangents[label].to(local), layout))
    if roots:
        torch.autograd.backward(roots, starts)


def _output_placements(subject: Subject, case: Case, outputs: Mapping[str, torch.Tensor], labels: Sequence[str]) -> dict[str, Placement]:
    """By output label: a DTensor's own placement, otherwise the declared one; outputs nobody expects count as Replicate."""
    declared = subject.outputs_for(case.config)
    if isinstance(declared, tuple) and len(declared) != len(labels):
        raise SubjectError(
            f"Expected one output placement per output of the reference but got {len(declared)} placements for {', '.join(labels)}"
        )
    each = declared if isinstance(declared, tuple) else (declared,) * len(labels)
    by_label = {**dict.fromkeys(outputs, Placement(Replicate())), **dict(zip(labels, each, strict=True))}
    own = {label: modules.mesh_placement(output, label) for label, output in outputs.items() if isinstance(output, DTensor)}
    # A DTensor of summands is summed before it is used, so that each summand's gradient is the whole one.
    return by_label | {label: Placement(p.value, Replicate()) if isinstance(p.value, Partial) else p for label, p in own.items()}
