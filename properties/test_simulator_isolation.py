"""What belongs to a rank stays with it, and nothing of a run outlives it, however it ended."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.distributed_c10d as c10d
from torch.nn.modules import module as module_hooks

from tpverify.errors import RankError, SimulationError
from tpverify.simulator import recorder
from tpverify.simulator.world import simulate

MODULE = "tpverify_rank_local_state"


@pytest.fixture
def state() -> Iterator[types.ModuleType]:
    module = types.ModuleType(MODULE)
    module.GROUP = None
    module.TABLE = {"shared": [0]}
    module.ALIAS = module.TABLE["shared"]
    module.SEEN = set()
    module.function = lambda: None
    sys.modules[MODULE] = module
    yield module
    del sys.modules[MODULE]


def run(program: Callable[[int], Any], world_size: int = 3, **options: Any) -> list[Any]:
    return simulate(lambda: program(dist.get_rank()), world_size, **options).results


def test_torchs_generator_starts_equal_and_goes_its_own_way() -> None:
    def program(rank: int) -> tuple[float, float, float]:
        first = torch.rand(()).item()
        for _ in range(rank):
            torch.rand(1)
        dist.barrier()
        second = torch.rand(()).item()
        torch.manual_seed(7)
        dist.barrier()
        return first, second, torch.rand(()).item()

    expected = torch.Generator().manual_seed(5)
    stream = [torch.rand((), generator=expected).item() for _ in range(4)]
    seeded = torch.rand((), generator=torch.Generator().manual_seed(7)).item()
    assert run(program, seed=5) == [(stream[0], stream[1 + rank], seeded) for rank in range(3)]


def test_pythons_and_numpys_generators_are_the_ranks_own_and_reproducible() -> None:
    def program(rank: int) -> tuple[float, ...]:
        values = [random.random(), np.random.rand()]
        dist.barrier()
        return (*values, random.random(), np.random.rand())

    first = run(program)
    assert len({value for values in first for value in values}) == 12
    assert run(program) == first
    assert run(program, seed=1) != first


def test_the_callers_generators_go_on_undisturbed() -> None:
    def draws() -> list[float]:
        return [torch.rand(()).item(), random.random(), np.random.rand(), random.gauss(0, 1)]

    def disturb(rank: int) -> None:
        draws()
        torch.manual_seed(rank)
        random.seed(rank)
        np.random.seed(rank)
        dist.barrier()
        draws()

    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    expected = draws() + draws()
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    first = draws()
    run(disturb)
    assert first + draws() == expected


def test_globals_of_named_modules_are_the_ranks_own(state: types.ModuleType) -> None:
    def program(rank: int) -> None:
        state.GROUP = rank
        state.TABLE[rank] = rank
        state.TABLE["shared"].append(rank)
        state.SEEN.add(rank)
        state.fresh = rank
        dist.barrier()
        assert rank == state.GROUP
        table = state.TABLE
        assert table == {"shared": [0, rank], rank: rank}
        assert state.ALIAS is state.TABLE["shared"]
        assert {rank} == state.SEEN
        assert state.fresh == rank

    table = state.TABLE
    run(program, rank_local=[MODULE])
    assert state.TABLE is table
    assert state.ALIAS is table["shared"]
    group, table, seen = state.GROUP, state.TABLE, state.SEEN
    assert (group, table, seen) == (None, {"shared": [0]}, set())
    assert not hasattr(state, "fresh")
    assert callable(state.function)


def test_globals_of_other_modules_are_shared(state: types.ModuleType) -> None:
    def program(rank: int) -> Any:
        state.GROUP = rank
        dist.barrier()
        return state.GROUP

    assert len(set(run(program))) == 1


def test_a_variable_that_one_rank_turns_into_a_function_is_still_there_when_it_comes_back(state: types.ModuleType) -> None:
    def program(rank: int) -> Any:
        if rank == 0:
            state.GROUP = fine
        dist.barrier()
        return state.GROUP

    assert run(program, rank_local=[MODULE]) == [fine, None, None]


def test_default_dtype_and_environment_are_the_ranks_own() -> None:
    def program(rank: int) -> tuple[Any, ...]:
        if rank == 1:
            torch.set_default_dtype(torch.float64)
        os.environ["TPVERIFY_TEST_LEFTOVER"] = "set"
        dist.barrier()
        return torch.ones(1).dtype, os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"], "MASTER_ADDR" in os.environ

    results = run(program)
    assert [result[0] for result in results] == [torch.float32, torch.float64, torch.float32]
    assert [result[1:] for result in results] == [(str(rank), str(rank), "3", True) for rank in range(3)]
    assert torch.get_default_dtype() == torch.float32


def snapshot() -> dict[str, Any]:
    """Everything process-wide that a run touches."""
    optimizers = sys.modules["torch.optim.optimizer"]
    return {
        "threads": threading.active_count(),
        "excepthook": sys.excepthook,
        "world": c10d._world,
        "backend": (c10d._backend, c10d._default_pg_init_method),
        "initialise": (dist.init_process_group, c10d.init_process_group, dist.init_process_group.__closure__[0].cell_contents),
        "helper": c10d._new_process_group_helper,
        "hooks": (len(module_hooks._global_forward_hooks), len(module_hooks._global_forward_pre_hooks)),
        "always": len(module_hooks._global_forward_hooks_always_called),
        "optimizer": (len(optimizers._global_optimizer_pre_hooks), len(optimizers._global_optimizer_post_hooks)),
        "environment": dict(os.environ),
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
        "dtype": torch.get_default_dtype(),
        "works": torch._C._distributed_c10d._get_work_registry_size(),
        "recorder": recorder.current(),
    }


def fine(rank: int) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    optimizer.step()
    torch.nn.Linear(2, 2)(torch.ones(2))
    dist.barrier()


def raises(rank: int) -> None:
    torch.set_default_dtype(torch.float64)
    os.environ["RANK"] = "changed"
    os.environ.pop("PATH", None)
    dist.barrier()
    assert rank


def disagrees(rank: int) -> None:
    dist.all_reduce(torch.ones(1 + rank))


def deadlocks(rank: int) -> None:
    funcol.all_reduce(torch.ones(1), "sum", dist.group.WORLD)
    if rank:
        dist.barrier()


def loops(rank: int) -> None:
    while True:
        pass


def destroys(rank: int) -> None:
    dist.destroy_process_group()


@pytest.mark.parametrize("program", [fine, raises, disagrees, deadlocks, loops, destroys])
def test_nothing_outlives_a_run(program: Callable[[int], None]) -> None:
    before = snapshot()
    try:
        run(program, timeout=0.2 if program is loops else 60.0)
    except SimulationError:
        assert program is not fine
    after = snapshot()
    for name, value in before.items():
        assert after[name] == value, name


def test_a_real_process_group_of_the_caller_goes_on_working(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        own = dist.new_group([0])
        world = dist.group.WORLD

        def program(rank: int) -> float:
            assert dist.group.WORLD is not world
            return funcol.all_reduce(torch.ones(1), "sum", dist.group.WORLD).item()

        def works() -> None:
            x = torch.ones(1)
            dist.all_reduce(x, group=own)
            assert dist.group.WORLD is world
            assert dist.get_backend() == "gloo"
            assert funcol.all_reduce(x, "sum", world).item() == 1.0
            gathered = [None]
            dist.all_gather_object(gathered, "mine")
            assert gathered == ["mine"]

        works()
        assert run(program) == [3.0] * 3
        works()
        with pytest.raises(SimulationError):
            run(deadlocks)
        works()
        assert dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()


def test_simulations_from_two_threads_take_turns() -> None:
    results: dict[int, list[Any]] = {}

    def program(rank: int) -> tuple[float, int]:
        x = torch.ones(1)
        for _ in range(10):
            dist.all_reduce(x)
        return x.item(), dist.get_world_size()

    def start(world_size: int) -> None:
        results[world_size] = run(program, world_size)

    threads = [threading.Thread(target=start, args=(world_size,)) for world_size in (2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert results == {size: [(float(size) ** 10, size)] * size for size in (2, 3, 4)}


def resident_bytes() -> int:
    """Memory of this process, bytes (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.parametrize("fails", [False, True])
def test_many_runs_do_not_grow(fails: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(4, 1024), mesh, [Shard(0)])
        torch.nn.Linear(4, 4)(torch.ones(4, requires_grad=True)).sum().backward()
        funcol.all_reduce(torch.ones(1024), "sum", dist.group.WORLD)
        assert x.full_tensor().shape == (4, 1024)
        dist.all_reduce(torch.ones(1024 + (rank if fails else 0)), async_op=True)

    def repeat(times: int) -> tuple[int, int]:
        for _ in range(times):
            try:
                run(program, 2)
            except SimulationError:
                assert fails
        gc.collect()
        return len(gc.get_objects()), resident_bytes()

    repeat(20)
    objects, memory = repeat(20)
    more_objects, more_memory = repeat(100)
    assert more_objects - objects < 100
    assert more_memory - memory < 4 * 2**20


@pytest.mark.parametrize("before", ["held", "failed"])
def test_a_group_of_an_earlier_run_is_refused(before: str) -> None:
    """Programs keep groups in module-level dictionaries; what an earlier run left there must not pass for this run's."""
    kept: dict[int, dist.ProcessGroup] = {}

    def program() -> torch.Tensor:
        group = kept.setdefault(dist.get_rank(), dist.new_group([0, 1]))
        total = torch.ones(2)
        if before == "failed" and dist.get_rank() == 1 and len(kept) == 2 and not failed:
            failed.append(True)
            raise ValueError("planted")
        dist.all_reduce(total, group=group)
        return total

    failed: list[bool] = []
    if before == "held":
        simulate(program, 2)
    else:
        with pytest.raises(RankError, match="planted"):
            simulate(program, 2)
    with pytest.raises(RankError, match="process group of this run but got one that an earlier run created"):
        simulate(program, 2)


def test_an_environment_that_stands_in_for_the_processs_is_restored_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"A": "1", "B": "2"})
    assert simulate(lambda: (os.environ.pop("B", ""), os.environ["RANK"]), 2).results == [("2", "0"), ("", "1")]
    assert os.environ == {"A": "1", "B": "2"}


def test_numpys_left_over_gaussian_stays_where_it_is() -> None:
    def program() -> list[float]:
        np.random.seed(3)
        first = np.random.randn()
        dist.all_reduce(torch.ones(1))
        return [first, *np.random.randn(2).tolist()]

    np.random.seed(3)
    expected = np.random.randn(3).tolist()
    assert simulate(program, 3).results == [expected] * 3
    np.random.seed(3)
    first = np.random.randn()
    simulate(program, 2)
    assert [first, *np.random.randn(2).tolist()] == expected


def test_a_bit_generator_that_a_rank_chooses_is_its_own_until_the_end() -> None:
    def program() -> str:
        np.random.set_bit_generator(np.random.PCG64(dist.get_rank()))
        dist.all_reduce(torch.ones(1))
        return type(np.random.get_bit_generator()).__name__

    before = np.random.get_bit_generator()
    assert simulate(program, 2).results == ["PCG64", "PCG64"]
    assert np.random.get_bit_generator() is before


def test_a_run_leaves_the_generators_of_earlier_runs_alone() -> None:
    kept = simulate(lambda: np.random.get_bit_generator(), 2).results
    states = [str(generator.state) for generator in kept]
    simulate(lambda: np.random.rand(), 2, seed=9)
    assert [str(generator.state) for generator in kept] == states


def test_an_interrupt_while_ranks_are_started_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def interrupted(self: threading.Thread) -> None:
        start(self)
        if self.name == "rank 1":
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    world, rank = c10d._world, os.environ.get("RANK")
    ran: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        simulate(lambda: ran.append(dist.get_rank()), 4)
    monkeypatch.undo()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and any(thread.name.startswith("rank ") for thread in threading.enumerate()):
        time.sleep(0.01)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("rank ")]
    assert ran == []
    assert c10d._world is world and os.environ.get("RANK") == rank  # no rank has taken over the process after its end
