"""What a run takes over from earlier ones, or does in a shorter way, must not show."""

from __future__ import annotations

import gc
import os
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from tpverify.simulator import numpy_random, python_random
from tpverify.simulator.world import simulate


def bits_of_rank_one() -> Any:
    return np.random.get_bit_generator() if dist.get_rank() == 1 else None


def spawns() -> list[int]:
    return [child.random_raw() for child in np.random.get_bit_generator().spawn(2)] if dist.get_rank() == 1 else []


def seeds() -> None:
    if dist.get_rank() == 1:
        np.random.seed(3)


def left_in_the_lock() -> Any:
    if dist.get_rank() != 1:
        return None
    lock = np.random.get_bit_generator().lock
    lock.acquire()
    return lock


@pytest.mark.parametrize("program", [bits_of_rank_one, spawns, seeds, left_in_the_lock])
def test_numpys_generators_are_kept_from_run_to_run_unless_one_is_no_longer_as_new(program: Callable[[], Any]) -> None:
    kept = numpy_random._kept
    draws = simulate(lambda: np.random.rand(), 3).results
    before = [id(twister) for twister in kept]
    assert simulate(lambda: np.random.rand(), 3, seed=1).results != draws
    assert [id(twister) for twister in kept] == before
    held = simulate(program, 3).results
    assert simulate(lambda: np.random.rand(), 3).results == draws
    assert [id(twister) == old for twister, old in zip(kept, before, strict=True)][:3] == [True, False, True], held


def test_what_numpys_generator_spawns_is_the_ranks_own_and_reproducible() -> None:
    def program() -> tuple[int, ...]:
        return tuple(child.random_raw() for child in np.random.get_bit_generator().spawn(2))

    first = simulate(program, 3).results
    assert simulate(program, 3).results == first and len({number for numbers in first for number in numbers}) == 6


@pytest.mark.parametrize(("bits", "found"), [(np.random.MT19937, True), (np.random.MT19937, False), (np.random.PCG64, True)])
def test_a_gaussian_left_over_is_the_ranks_own(bits: Any, found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert numpy_random._left_over() is not None, "expected numpy's struct where this runs"
    if not found:
        monkeypatch.setattr(numpy_random, "_left_over", lambda: None)

    def program() -> list[float]:
        np.random.set_bit_generator(bits(7 + dist.get_rank()))
        values = [np.random.randn()]  # leaves a second one over
        dist.barrier()
        return [*values, np.random.randn(), np.random.randn()]

    outside = np.random.get_bit_generator()
    np.random.set_bit_generator(bits(5))
    try:
        own = [np.random.randn()]
        assert simulate(program, 3).results == [np.random.RandomState(bits(7 + rank)).randn(3).tolist() for rank in range(3)]
        assert own + np.random.randn(2).tolist() == np.random.RandomState(bits(5)).randn(3).tolist()
    finally:
        np.random.set_bit_generator(outside)


def test_a_gaussian_put_there_before_anything_was_drawn_stays() -> None:
    def program() -> float:
        np.random.set_state(np.random.get_state(legacy=False) | {"has_gauss": 1, "gauss": 7.0 + dist.get_rank()})
        dist.barrier()
        return float(np.random.randn())

    assert simulate(program, 3).results == [7.0, 8.0, 9.0]


@pytest.mark.parametrize("known", [True, False])
def test_pythons_generator_is_saved_with_and_without_knowing_its_memory(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for generator in (python_random._global, python_random._scratch):
        assert generator._memory is not None, "expected CPython's struct where this runs"
        if not known:
            monkeypatch.setattr(generator, "_memory", None)

    def program(rank: int) -> list[float]:
        values = [random.gauss(0, 1)]  # leaves a second one over
        dist.barrier()
        return [*values, random.gauss(0, 1), random.random()]

    random.seed(11)
    expected = [random.gauss(0, 1) for _ in range(3)]
    random.seed(11)
    first = random.gauss(0, 1)
    found = simulate(lambda: program(dist.get_rank()), 3).results
    assert [first, random.gauss(0, 1), random.gauss(0, 1)] == expected
    for rank, values in enumerate(found):
        own = random.Random(f"0/{rank}")
        assert values == [own.gauss(0, 1), own.gauss(0, 1), own.random()]


def test_an_interpreter_whose_generators_are_laid_out_otherwise_is_noticed() -> None:
    class Shifted(random.Random):
        def getstate(self) -> Any:
            version, words, gauss = super().getstate()
            return version, (words[-1], *words[:-1]), gauss

    assert python_random._memory(random.Random(3)) is not None
    assert python_random._memory(Shifted(3)) is None


linux = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="only Linux tells threads where to stay")


@linux
def test_ranks_stay_on_one_core_and_nobody_else_does() -> None:
    before = os.sched_getaffinity(0)
    assert torch.get_num_threads() == 1
    found = simulate(lambda: os.sched_getaffinity(0), 3).results
    assert all(len(cores) == 1 and cores == found[0] for cores in found)
    assert os.sched_getaffinity(0) == before


@linux
def test_ranks_whose_operations_have_helpers_have_all_cores() -> None:
    torch.set_num_threads(2)
    try:
        assert simulate(lambda: os.sched_getaffinity(0), 2).results == [os.sched_getaffinity(0)] * 2
    finally:
        torch.set_num_threads(1)


@linux
def test_where_threads_may_not_be_told_they_run_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: int, cores: set[int]) -> None:
        raise PermissionError(1, "not here")

    monkeypatch.setattr(os, "sched_setaffinity", refused)
    assert simulate(lambda: os.sched_getaffinity(0), 2).results == [os.sched_getaffinity(0)] * 2


def test_every_rank_knows_of_its_world_what_the_first_was_told_by_c10d() -> None:
    def known() -> dict[str, Any]:
        world, own = c10d._world, dist.group.WORLD
        (backend, _) = world.pg_map[own]
        return {
            "backend": backend,
            "names": list(world.pg_names.values()),
            "ranks": world.pg_group_ranks[own],
            "config": world.pg_backend_config[own],
            "tags": {tag: [group is own for group in groups] for tag, groups in world.tags_to_pg.items()},
            "tag": world.pg_to_tag[own],
            "count": world.group_count,
            "desc": own.group_desc,
            "by name": c10d._resolve_process_group(own.group_name) is own,
            "members": dist.get_process_group_ranks(own),
        }

    def program() -> tuple[dict[str, Any], dict[str, Any]]:
        first = known()
        dist.destroy_process_group()
        dist.init_process_group("gloo")  # every rank by c10d this time
        return first, known()

    (first, again), *others = simulate(program, 3).results
    assert first == again | {"names": first["names"], "tags": first["tags"], "tag": first["tag"], "count": first["count"]}
    assert others == [(first, again)] * 2
    assert first["by name"] and first["members"] == [0, 1, 2]


def test_the_first_group_s_store_is_the_ranks_own_and_shared_by_all() -> None:
    def program() -> tuple[bytes, list[str], bool]:
        store = c10d._get_default_store()
        store.set(f"of {dist.get_rank()}", str(dist.get_rank()))
        read = store.get(f"of {(dist.get_rank() + 1) % dist.get_world_size()}")
        stuck: list[str] = []

        def wait() -> None:
            try:
                store.get("nobody sets this")
            except RuntimeError as error:
                stuck.append(str(error))

        helper = threading.Thread(target=wait, name="helper")
        helper.start()
        helper.join()
        dist.barrier()
        return read, stuck, store.check(["tpverify"])

    found = simulate(program, 3).results
    assert [read for read, _, _ in found] == [b"1", b"2", b"0"]
    assert not any(left for _, _, left in found)
    assert all("on the rank's own thread but got thread='helper'" in stuck[0] for _, stuck, _ in found)


def test_a_run_is_gone_at_its_end_without_garbage_being_collected() -> None:
    gc.collect()
    gc.disable()
    try:
        worlds = simulate(lambda: weakref.ref(c10d._world), 3).results
        assert [world() for world in worlds] == [None] * 3
    finally:
        gc.enable()
