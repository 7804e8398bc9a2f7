"""What a run takes over from earlier ones, or does in a shorter way, must not show."""

from __future__ import annotations

import os
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from tpverify.errors import RankError
from tpverify.simulator import numpy_random, python_random
from tpverify.simulator.world import simulate


def test_numpys_generators_are_kept_from_run_to_run_unless_a_program_holds_one() -> None:
    kept = numpy_random._kept
    simulate(lambda: np.random.rand(), 3)
    before = [id(twister) for twister in kept]
    simulate(lambda: np.random.rand(), 3, seed=1)
    assert [id(twister) for twister in kept] == before
    held = simulate(lambda: np.random.get_bit_generator() if dist.get_rank() == 1 else None, 3).results
    simulate(lambda: np.random.rand(), 3)
    assert [id(twister) == old for twister, old in zip(kept, before, strict=True)][:3] == [True, False, True], held


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


def test_a_run_stays_on_one_core_and_gives_the_others_back() -> None:
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("only Linux tells threads where to stay")
    before = os.sched_getaffinity(0)
    assert torch.get_num_threads() == 1
    found = simulate(lambda: os.sched_getaffinity(0), 3).results
    assert all(len(cores) == 1 and cores == found[0] for cores in found)
    assert os.sched_getaffinity(0) == before
    with pytest.raises(RankError):
        simulate(lambda: 1 / 0, 2)
    assert os.sched_getaffinity(0) == before


def test_a_run_whose_operations_have_helpers_has_all_cores() -> None:
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("only Linux tells threads where to stay")
    torch.set_num_threads(2)
    try:
        assert simulate(lambda: os.sched_getaffinity(0), 2).results == [os.sched_getaffinity(0)] * 2
    finally:
        torch.set_num_threads(1)


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
        dist.init_process_group("gloo")  # all ranks by c10d this time
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

    for _ in range(2):  # the second time none is initialised through c10d
        found = simulate(program, 3).results
        assert [read for read, _, _ in found] == [b"1", b"2", b"0"]
        assert not any(left for _, _, left in found)
        assert all("on the rank's own thread but got thread='helper'" in stuck[0] for _, stuck, _ in found)
