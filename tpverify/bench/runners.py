"""Ways to run ranks: each is a context within which the ranks of one piece of work can be run. The simulator, and its floor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from tpverify.bench.work import Tensors, Work
from tpverify.device import default_dtype
from tpverify.simulator.c10d_hooks import initialisation_undone
from tpverify.simulator.rank_world import RankWorld
from tpverify.simulator.world import simulate

_groups: Any = torch._C._distributed_c10d


class Run(NamedTuple):
    """One way to run the ranks of one piece of work.

    Attributes:
        once: runs them; this is what is timed.
        results: runs them; what each has computed.
    """

    once: Callable[[], object]
    results: Callable[[], list[Tensors]]


Runner = Callable[[Work], AbstractContextManager[Run]]


@contextlib.contextmanager
def simulator(work: Work) -> Iterator[Run]:
    """tpverify's simulator."""

    def run() -> list[Tensors]:
        return simulate(work, work.world_size).results

    with default_dtype(work.dtype):
        yield Run(run, run)


@contextlib.contextmanager
def floor(work: Work) -> Iterator[Run]:
    """The ranks one after another, with collectives that do nothing: what whoever simulates on one core has to pay at least."""
    worlds = [silent_world(rank, work.world_size) for rank in range(work.world_size)]

    def run() -> list[Tensors]:
        found = []
        for world in worlds:
            with within(world):
                found.append(work())
        return found

    with default_dtype(work.dtype):
        yield Run(run, run)


def silent_world(rank: int, world_size: int) -> Any:
    """c10d's registry of a world with torch's group for dry runs, whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    outside = c10d._world
    c10d._world = world = RankWorld()
    try:
        with initialisation_undone():
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    finally:
        c10d._world = outside
        _groups._unregister_all_process_groups()
    return world


@contextlib.contextmanager
def within(world: Any) -> Iterator[None]:
    """Within the block ``torch.distributed`` is initialised: as this world's rank."""
    outside = c10d._world
    c10d._world = world
    _groups._register_process_group(world.pg_names[world.default_pg], world.default_pg)
    try:
        yield
    finally:
        c10d._world = outside
        _groups._unregister_all_process_groups()
