"""A subject whose ranks misbehave on demand, for worlds of real processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from test_simulator_gloo import collectives
from torch import Tensor, nn

import tpverify as tpv


@dataclass(frozen=True)
class Behaviour:
    """What the last rank does before, or instead of, the collective that all others issue."""

    what: str = "nothing"


class Scaled(nn.Module):
    """[n] -> [n]: times the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Any:
        """[3] -> [3]"""
        return x * self.weight


class Behaving(Scaled):
    """The same on every rank, with one all_reduce that must come to one."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> Any:
        """[3] -> [3]"""
        last = dist.get_rank() == dist.get_world_size() - 1
        share = torch.ones(2) / dist.get_world_size()
        if self.what in PROGRAMS:
            return PROGRAMS[self.what](share), x * self.weight
        if last and self.what in FAULTS:
            FAULTS[self.what](share)
        else:
            dist.all_reduce(share)
        return x * self.weight * share[0]


def _kill(share: Tensor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raise(share: Tensor) -> None:
    raise RefusedError("no such shape")


def _loop(share: Tensor) -> None:
    while True:
        pass


def _collective_in_finally(share: Tensor) -> None:
    try:
        raise RefusedError("no such shape")
    finally:
        dist.all_reduce(share, dist.ReduceOp.MAX)


class RefusedError(ValueError):
    """A class that only this module knows."""


FAULTS: dict[str, Callable[[Tensor], Any]] = {
    "kill": _kill,
    "exit": lambda share: os._exit(3),
    "raise": _raise,
    "loop": _loop,
    "sleep": lambda share: time.sleep(1000),
    "skip": lambda share: None,
    "maximum": lambda share: dist.all_reduce(share, dist.ReduceOp.MAX),
    "bigger": lambda share: dist.all_reduce(torch.ones(5)),
    "finally": _collective_in_finally,
}


def _every_kind(share: Tensor) -> Any:
    results: dict[str, Any] = {}
    torch.set_default_dtype(torch.float32)
    collectives(results)
    torch.set_default_dtype(torch.float64)
    return {name: value for name, value in results.items() if name != "objects"}


def _groups_that_differ(share: Tensor) -> Tensor:
    dist.new_group([0] if dist.get_rank() == 0 else [0, 1])
    return share


def _never_waited(share: Tensor) -> Tensor:
    dist.all_reduce(share.clone(), async_op=True)
    return torch.ones(1)


def _written_in_flight(share: Tensor) -> Tensor:
    joined = torch.zeros(2 * dist.get_world_size())
    work = dist.all_gather_into_tensor(joined, share, async_op=True)
    assert work is not None
    share += 1
    work.wait()
    return torch.ones(1)


def _never_received(share: Tensor) -> Tensor:
    if dist.get_rank() == 0:
        dist.isend(share, 1)
    return torch.ones(1)


def _received_from_nobody(share: Tensor) -> Tensor:
    dist.recv(share, 1 - dist.get_rank())
    return share


def _values_in_the_store(share: Tensor) -> Any:
    store: Any = dist.distributed_c10d._get_default_store()
    assert store.add("visits", 1) <= dist.get_world_size()
    store.set(f"from {dist.get_rank()}", str(10 * dist.get_rank()))
    return [torch.tensor(int(store.get(f"from {rank}"))) for rank in range(dist.get_world_size())]


PROGRAMS: dict[str, Callable[[Tensor], Any]] = {
    "every kind": _every_kind,
    "store": _values_in_the_store,
    "groups that differ": _groups_that_differ,
    "never waited": _never_waited,
    "written in flight": _written_in_flight,
    "never received": _never_received,
    "received from nobody": _received_from_nobody,
}

behaving = tpv.Subject(
    name="behaving",
    reference=lambda config: Scaled(),
    parallel=lambda config: Behaving(config.what),
    configs=st.sampled_from(["nothing", *FAULTS]).map(Behaviour),
    inputs=lambda config: {"x": tpv.Input((3,))},
    placements={"weight": tpv.Replicate()},
)
