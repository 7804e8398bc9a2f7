"""How soon a run that cannot go on is ended: from the last rank's getting stuck to the error in the caller's hands."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tpverify.bench.timing import Spread
from tpverify.errors import SimulationError
from tpverify.simulator.world import simulate


@dataclass(frozen=True)
class Stuck:
    """One way to get stuck.

    Attributes:
        fault: which.
        world_size: number of ranks.
        spread: seconds.
    """

    fault: str
    world_size: int
    spread: Spread

    def as_dict(self) -> dict[str, Any]:
        """The times as JSON-ready data."""
        return {"fault": self.fault, "world_size": self.world_size, **self.spread.as_dict()}


def _mismatch() -> None:
    dist.all_reduce(torch.zeros(3 if dist.get_rank() == dist.get_world_size() - 1 else 2))


def _deadlock() -> None:
    if dist.get_rank() != dist.get_world_size() - 1:
        dist.all_reduce(torch.zeros(2))
    else:
        dist.recv(torch.zeros(2), src=0)


FAULTS: dict[str, Callable[[], None]] = {"mismatch": _mismatch, "deadlock": _deadlock}


def time_faults(world_sizes: Sequence[int], rounds: int) -> list[Stuck]:
    """Time every fault on worlds of these sizes."""
    return [Stuck(fault, size, Spread.of([_seconds(fault, size) for _ in range(rounds)])) for size in world_sizes for fault in FAULTS]


def _seconds(fault: str, world_size: int) -> float:
    last = 0.0

    def program() -> None:
        nonlocal last
        last = time.perf_counter()
        FAULTS[fault]()

    try:
        simulate(program, world_size)
    except SimulationError:
        return time.perf_counter() - last
    raise AssertionError(f"Expected a {fault} of {world_size} ranks to end the run but it did not")
