"""Runs a program on the present rank, through torch.distributed's public functions only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpverify.conformance.program import Program, Step
from tpverify.conformance.tensors import COTANGENT, fitted, laid_out, numbers, small

FAULTS = {
    "output size": "an output has a row too many",
    "output dtype": "an output is of another dtype than the input",
    "output shape": "an output has its elements in another shape",
    "list length": "a list has a tensor too few",
    "no list": "the root has no list",
    "list everywhere": "ranks other than the root have a list as well",
    "root": "there is no such root",
    "splits": "split sizes do not add up",
    "split count": "there is a split size too many",
    "self": "a message to oneself",
    "scalar": "a tensor without dimensions",
    "outsiders": "ranks that are no members call as well",
    "own shape": "the last rank's tensor has a row more",
    "own dtype": "the last rank's tensor is of another dtype",
    "own op": "the last rank reduces with another op",
    "own root": "the last rank means another root",
    "own call": "the last rank issues a barrier instead",
    "absent": "the last rank does not call",
}
"""What can be wrong with a step."""
DISAGREEMENTS = tuple(fault for fault in FAULTS if fault.startswith("own ")) + ("absent",)
"""Faults that no rank can see by itself."""


@dataclass
class Site:
    """One step on this rank.

    Attributes:
        program, step, index: what runs, and which of its steps.
        group: as given to torch.distributed; None = the world.
        members: the group's global ranks.
        me: this rank's position in the group; -1 = not a member.
        source: numbers to read instead of fresh ones, or None.
    """

    program: Program
    step: Step
    index: int
    group: Any
    members: tuple[int, ...]
    me: int
    rank: int
    source: Tensor | None = None
    outputs: list[Tensor] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.members)

    @property
    def deviates(self) -> bool:
        """Whether this rank is the one that does otherwise."""
        return self.me == self.size - 1

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensors that are read."""
        other = torch.int64 if self.step.dtype == "float32" else torch.float32
        found: torch.dtype = other if self.step.fault == "own dtype" and self.deviates else getattr(torch, self.step.dtype)
        return found

    @property
    def op(self) -> Any:
        """The reduce op."""
        other = "MIN" if self.step.op == "MAX" else "MAX"
        return getattr(dist.ReduceOp, other if self.step.fault == "own op" and self.deviates else self.step.op)

    @property
    def root(self) -> int:
        """Group rank of the root."""
        shift = 1 if self.step.fault == "own root" and self.deviates else 0
        return self.size + 3 if self.step.fault == "root" else (self.step.root + shift) % self.size

    @property
    def root_rank(self) -> int:
        """Global rank of the root."""
        return self.members[self.root] if self.root < self.size else self.program.world_size + 3

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what this rank contributes for one peer."""
        shape = self.step.shape
        if self.step.fault == "scalar":
            return ()
        return (shape[0] + 1, *shape[1:]) if self.step.fault == "own shape" and self.deviates and shape else shape

    def rows(self, count: int) -> tuple[int, ...]:
        """The shape of ``count`` blocks one below the other."""
        return (count * self.shape[0], *self.shape[1:]) if self.shape else (count,) if self.step.fault != "scalar" else ()

    def read(self, shape: tuple[int, ...], part: int = 0) -> Tensor:
        """A tensor to be read, number ``part`` of this step."""
        if self.source is not None and self.source.dtype == self.dtype and part == 0:
            if self.source.shape == shape and self.step.layout == "contiguous":
                return small(self.source)
            return laid_out(fitted(small(self.source.clone()), shape), self.step.layout)
        return laid_out(numbers(self.program, self.index, self.rank * 10 + part, shape, self.dtype), self.step.layout)

    def room(self, shape: tuple[int, ...]) -> Tensor:
        """A tensor to be written."""
        fault = self.step.fault
        if fault == "output size" and shape:
            shape = (shape[0] + 1, *shape[1:])
        if fault == "output shape":
            shape = (*shape[1:], shape[0]) if len(shape) > 1 else (*shape, 1)
        dtype = (torch.float64 if self.dtype != torch.float64 else torch.float32) if fault == "output dtype" else self.dtype
        return torch.zeros(shape, dtype=dtype)

    def listed(self, tensors: list[Tensor]) -> list[Tensor]:
        """One tensor per rank."""
        return tensors[:-1] if self.step.fault == "list length" else tensors

    def cotangent(self, like: Tensor) -> Tensor:
        """Where backward starts."""
        return numbers(self.program, self.index + COTANGENT, self.rank, tuple(like.shape), like.dtype)


Waiting = Callable[[], Any]
"""Waits for an asynchronous call."""


@dataclass
class _Flight:
    site: Site
    due: int
    wait: Waiting


MakeGroup = Callable[[Sequence[int]], Any]
Calls = Mapping[str, Callable[[Site], Waiting | None]]


def run_program(program: Program, calls: Calls, make_group: MakeGroup | None = None) -> dict[str, Tensor]:
    """Run this rank's part.

    Args:
        calls: what each call's name stands for: ``calls.CALLS``.
        make_group: creates the program's groups; None = ``dist.new_group``.

    Returns:
        What every step left in this rank's tensors when it was complete, by label: ``0 all_reduce[0]``.
    """
    rank = dist.get_rank()
    create: MakeGroup = make_group or (lambda members: dist.new_group(list(members)))
    groups = [None, *(create(members) for members in program.groups)]
    results: dict[str, Tensor] = {}
    newest: Tensor | None = None
    flying: list[_Flight] = []

    def land(flight: _Flight) -> None:
        nonlocal newest
        flight.wait()
        outputs = flight.site.outputs
        for number, output in enumerate(outputs):
            results[f"{flight.site.index} {flight.site.step.call}[{number}]"] = output.detach().clone()
        if outputs and outputs[0].is_contiguous() and not outputs[0].requires_grad:
            newest = outputs[0]

    for index, step in enumerate(program.steps):
        members = program.members(step)
        me = members.index(rank) if rank in members else -1
        site = Site(program, step, index, groups[step.group], members, me, rank, newest if step.reuse else None)
        called = me >= 0 or step.fault == "outsiders"
        if called and not (step.fault == "absent" and site.deviates):
            if site.source is not None:
                newest = None  # this step may write it
            name = "barrier" if step.fault == "own call" and site.deviates else step.call
            wait = calls[name](site)
            flying.append(_Flight(site, index + (step.wait_after or 0), wait or (lambda: None)))
        for flight in [flight for flight in reversed(flying) if flight.due <= index]:
            flying.remove(flight)
            land(flight)
    for flight in reversed(flying):
        land(flight)
    return dict(sorted(results.items()))
