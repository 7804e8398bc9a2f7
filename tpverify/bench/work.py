"""What is timed: what a rank does with one module, as a user's script has it, without anything of the harness in it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpverify import modules
from tpverify.case import Case
from tpverify.errors import SimulationError
from tpverify.logical import leaves_of
from tpverify.lookup import load_subject
from tpverify.run import RankRun
from tpverify.runner import run_both, run_reference
from tpverify.simulator.plain_tensors import waited
from tpverify.subjects.subject import Subject

Tensors = dict[str, Tensor]
"""What a rank computes: its outputs, and its parts of the gradients of inputs and parameters, by label."""


@dataclass(frozen=True)
class Part:
    """One rank's forward and backward: build the module, copy its part of the weights in, call it, start backward.

    Attributes:
        subject, config: name, sizes and options of what is built.
        weights: by name, the rank's part of each parameter.
        inputs: arguments, leaves.
        cotangents: of the outputs, which are replicated.
        dtype: torch's default dtype meanwhile.
    """

    subject: str
    config: Any
    weights: Mapping[str, Tensor]
    inputs: Sequence[Tensor]
    cotangents: Sequence[Tensor]
    dtype: torch.dtype

    def __call__(self) -> Tensors:
        """What it computes, within an initialised world."""
        module = _builder(self.subject)(self.config)
        parameters = modules.named_parameters(module)
        with torch.no_grad():
            for name, parameter in parameters.items():
                modules.local_of(parameter).copy_(self.weights[name])
        leaves = [given.detach().requires_grad_(given.requires_grad) for given in self.inputs]
        outputs = {label: modules.local_of(output) for label, output in modules.named_tensors(module(*leaves)).items()}
        torch.autograd.backward(list(outputs.values()), self.cotangents)
        found = {label: waited(output).detach() for label, output in outputs.items()}
        tensors = parameters | {f"input[{index}]": leaf for index, leaf in enumerate(leaf for leaf in leaves if leaf.requires_grad)}
        return found | {
            f"{name}.grad": waited(modules.local_of(tensor.grad)) for name, tensor in tensors.items() if tensor.grad is not None
        }


class Work:
    """What all ranks of a world do; all that the ways to run ranks have in common is prepared here once.

    Args:
        subject: a built-in subject.
        config: sizes and options, with replicated outputs.
        world_size: number of ranks.

    Attributes:
        parts: by rank, what it does.
        expected: by rank, what it computes in a run that agrees with the reference.

    Raises:
        SimulationError: the ranks cannot run.
    """

    def __init__(self, subject: Subject, config: Any, world_size: int) -> None:
        case = Case(subject.name, config, world_size)
        dtype = subject.working_dtype(case.dtype)
        logical = run_reference(subject, case, 0, 0).logical
        run = run_both(subject, case)[0].parallel
        if run.error is not None:
            raise run.error
        cotangents = [cotangent.to(dtype) for cotangent in logical.cotangents[0].values()]
        self.subject, self.config, self.world_size, self.dtype = subject, config, world_size, dtype
        self.parts = [
            Part(
                subject.name,
                config,
                {name: placed.local for name, placed in rank.parameters.items() if placed.local is not None},
                list(leaves_of(subject, case, logical, number)[0].values()),
                cotangents,
                dtype,
            )
            for number, rank in enumerate(run.ranks)
        ]
        self.expected = [_computed(rank) for rank in run.ranks]

    def __call__(self) -> Tensors:
        """What the rank does whose number ``torch.distributed`` says."""
        return self.parts[dist.get_rank()]()

    def check(self, runner: str, found: Sequence[Tensors]) -> None:
        """See that a way to run ranks computes what it should: it is no peer otherwise.

        Raises:
            SimulationError: it does not.
        """
        for rank, (expected, computed) in enumerate(zip(self.expected, found, strict=True)):
            for label, tensor in expected.items():
                if label not in computed or not torch.allclose(computed[label], tensor, rtol=1e-6, atol=1e-9):
                    raise SimulationError(f"Expected {runner} to compute {label} of {self.subject.name} but rank {rank} does not")


def _computed(rank: RankRun) -> Tensors:
    inputs = enumerate(rank.input_gradients.values())
    placed = {
        **rank.outputs,
        **{f"{name}.grad": gradient for name, gradient in rank.parameter_gradients.items()},
        **{f"input[{index}].grad": gradient for index, gradient in inputs},
    }
    return {label: each.local for label, each in placed.items() if each.local is not None}


@functools.cache
def _builder(subject: str) -> Callable[[Any], nn.Module]:
    return load_subject(subject).parallel
