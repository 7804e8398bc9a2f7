"""``tpverify bench``: every way to run ranks computes the same, or is no peer; times are taken in turn; documents and tables say it all."""

from __future__ import annotations

import contextlib
import gc
import json
import re
import signal
import sys
import time

import pytest
import torch
import torch.distributed.distributed_c10d as c10d
from click.testing import CliRunner

from tpverify.bench import measurements
from tpverify.bench.case_parts import Parts, parts_of
from tpverify.bench.comparison import CONFIGS, FLOOR, NEW_PROCESSES, SIMULATOR, Row, compare, runners_of
from tpverify.bench.detection import Detection, Search, detect, searched
from tpverify.bench.gloo import Pool, processes_kept
from tpverify.bench.growth import Growth, Series, grow, measured, peak_bytes
from tpverify.bench.local_tensor import local_tensors
from tpverify.bench.measurements import Measurements
from tpverify.bench.runners import Runner, floor, simulator
from tpverify.bench.stuck import FAULTS, time_faults
from tpverify.bench.threaded import threads_anew, threads_kept
from tpverify.bench.throughput import Throughput
from tpverify.bench.timing import Spread, exponent, in_turn
from tpverify.bench.work import Work
from tpverify.cli import main
from tpverify.errors import SimulationError
from tpverify.lookup import builtin_subjects
from tpverify.mutants.catalogue import catalogue


def small(subject: str, world_size: int = 2) -> Work:
    """Work that takes milliseconds."""
    return Work(builtin_subjects()[subject], CONFIGS[subject](8), world_size)


def test_times_are_taken_in_turn_after_a_run_that_does_not_count() -> None:
    order: list[str] = []
    spreads = in_turn({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3)
    assert re.sub(r"(.)\1*", r"\1", "".join(order)) == "ab" * 4  # what is fast is called several times in a row
    assert all(spread.min <= spread.median <= spread.max for spread in spreads.values())


@pytest.mark.parametrize("frozen", [False, True])
def test_garbage_collection_is_left_as_it_was(frozen: bool) -> None:
    if frozen:
        gc.freeze()
    try:
        before = gc.get_freeze_count()
        in_turn({"a": lambda: None}, 1)
        assert gc.isenabled() and gc.get_freeze_count() == before and (before > 0) == frozen
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_an_exponent_is_that_of_the_power_law(power: float) -> None:
    sizes = [1, 2, 4, 8, 16]
    assert exponent(sizes, [3e-3 * size**power for size in sizes]) == pytest.approx(power)


@pytest.mark.parametrize("runner", [simulator, threads_kept, threads_anew], ids=lambda runner: runner.__name__)
@pytest.mark.parametrize("subject", CONFIGS)
def test_every_way_in_one_process_computes_the_same(runner: Runner, subject: str) -> None:
    work = small(subject)
    with runner(work) as run:
        work.check(runner.__name__, run.results())
        work.check(runner.__name__, run.results())
    assert torch.get_default_dtype() == torch.float32


def test_local_tensors_compute_the_same() -> None:
    pytest.importorskip("torch.distributed._local_tensor", reason="exists from torch 2.10")
    work = small("dtensor_mlp")
    with local_tensors(work) as run:
        work.check("LocalTensorMode", run.results())


def test_the_floor_does_the_ranks_work_without_their_communication() -> None:
    work = small("mlp")
    with floor(work) as run:
        found = run.results()
        with pytest.raises(SimulationError, match="Expected the floor to compute output of mlp but rank 0 does not"):
            work.check("the floor", found)
    assert [list(rank) for rank in found] == [list(rank) for rank in work.expected]
    alone = small("mlp", 1)
    with floor(alone) as run:
        alone.check("the floor", run.results())


@pytest.mark.parametrize("subject", ["gpt", "dtensor_mlp"])
def test_ways_can_be_open_side_by_side(subject: str) -> None:
    pytest.importorskip("torch.distributed._local_tensor", reason="exists from torch 2.10")
    world, hook, told = c10d._world, sys.excepthook, c10d._backend
    work = small(subject, 4)
    with Pool(2) as pool, contextlib.ExitStack() as stack:
        ways = {name: way for name, way in runners_of(subject, pool).items() if "gloo" not in name}
        assert len(ways) == 4 + (subject == "dtensor_mlp")
        runs = {name: stack.enter_context(way(work)) for name, way in ways.items()}
        for _ in range(2):
            for name, run in runs.items():
                run.once()
                if name != FLOOR:
                    work.check(name, run.results())
    assert c10d._world is world and sys.excepthook is hook and c10d._backend == told


def test_gloo_processes_compute_the_same_and_tell_what_they_raise() -> None:
    with Pool(2) as pool:
        for subject in ("mlp", "gpt"):
            work = small(subject)
            with processes_kept(pool)(work) as run:
                work.check("gloo", run.results())
                assert run.once() == [True, True]
        broken = small("mlp")
        broken.parts[1].weights.pop("fc2.bias")  # type: ignore[attr-defined]
        with processes_kept(pool)(broken) as run, pytest.raises(SimulationError, match=r"gloo rank 1 to compute but it raised KeyError"):
            run.once()


def test_an_interrupt_or_a_lost_process_ends_all_of_a_pool() -> None:
    processes = []

    def interrupted() -> None:
        with Pool(2) as pool:
            processes.extend(process for process, _ in pool._ranks)
            raise KeyboardInterrupt

    def lost() -> None:
        with Pool(2) as pool:
            pool._ranks[1][0].kill()
            pool._ranks[1][0].join()
            pool.tell([("run", None)] * 2)

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert time.monotonic() - started < 5
    assert [process.exitcode for process in processes] == [-signal.SIGKILL] * 2
    with pytest.raises(SimulationError, match="gloo rank 1 to (take an order|answer) but its process ended"):
        lost()


def test_a_threaded_rank_that_raises_is_heard_at_once() -> None:
    broken = small("gpt")
    broken.parts[1].weights.pop("word.weight")  # type: ignore[attr-defined]
    started = time.monotonic()
    with pytest.raises(KeyError, match="word.weight"), threads_kept(broken) as run:
        run.once()
    assert time.monotonic() - started < 20


def test_a_comparison_has_every_way_beside_the_floor() -> None:
    rows = list(compare(("mlp",), (2,), (8,), 1, lambda _: None))
    assert [row.runner for row in rows][:2] == [FLOOR, SIMULATOR]
    assert NEW_PROCESSES in {row.runner for row in rows} and len(rows) == 6
    assert rows[0].ratio == 1 and all(row.ratio > 0 for row in rows)
    keys = {"subject", "world_size", "hidden", "runner", "median_seconds", "min_seconds", "max_seconds", "ratio_to_floor"}
    assert all(set(row.as_dict()) == keys for row in rows)


def test_a_whole_case_is_drawn_as_well() -> None:
    times = [Spread(value, value, value) for value in (2.0, 1.0, 0.5, 5.0)]
    parts = Parts("mlp", 4, 32, floor=times[0], draw=1.0, reference=times[1], ranks=3.0, checks=times[2], whole=times[3])
    assert parts.ratio == 3.0
    seconds = {"floor": 2.0, "draw": 1.0, "reference": 1.0, "ranks": 3.0, "checks": 0.5, "whole": 6.0}
    assert parts.as_dict() == {"subject": "mlp", "world_size": 4, "hidden": 32, "seconds": seconds, "ratio_to_floor": 3.0}


def test_the_parts_of_a_case_are_timed() -> None:
    parts = parts_of("mlp", 2, 8, 2)
    assert min(parts.floor.min, parts.draw, parts.reference.min, parts.checks.min, parts.whole.min) > 0


def test_growth_is_measured_in_a_process_of_its_own() -> None:
    series = Series("mlp", "ranks", (1, 2, 4, 8))
    (growth,) = grow([series])
    assert growth.series == series and list(growth.peak_bytes) == sorted(growth.peak_bytes)
    assert 2**26 < growth.peak_bytes[0] < 2**31 and growth.seconds[-1] > growth.seconds[0]
    with pytest.raises(SimulationError, match=r"Expected mlp to run but its process reports RankError"):
        grow([Series("mlp", "ranks", (3,))])


def test_the_peak_is_of_this_process_and_does_not_fall() -> None:
    before = peak_bytes()
    block = torch.ones(before // 4 + 2**26)  # more than the process has ever had
    during = peak_bytes()
    assert during - before > 2**27
    del block
    assert peak_bytes() > 0.99 * during  # the kernel counts a little late


def test_collectives_and_features_grow() -> None:
    assert measured(Series("all_reduce on 2 ranks", "collectives", (2, 200))).exponent > 0.1
    assert len(measured(Series("mlp on 4 ranks", "hidden", (8, 16))).seconds) == 2


def test_stuck_runs_end_and_are_timed() -> None:
    found = time_faults((2, 3), 2)
    assert [(each.fault, each.world_size) for each in found] == [(fault, size) for size in (2, 3) for fault in FAULTS]
    assert all(0 < each.spread.min < 5 for each in found)


def test_cases_until_a_mutant_is_found_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = next(id for id, mutant in catalogue().items() if mutant.base == "row_parallel_linear" and not mutant.equivalent)
    found = searched(Search(chosen, (0, 1)))
    assert found.missed == 0 and len(found.cases) == 2 and min(found.cases) >= 1
    equivalent = next(id for id, mutant in catalogue().items() if mutant.equivalent)
    assert searched(Search(equivalent, (0,))).missed == 1
    monkeypatch.setattr("tpverify.bench.detection.catalogue", lambda: {chosen: catalogue()[chosen], equivalent: catalogue()[equivalent]})
    (alone,) = detect((0,), 1, lambda _: None)
    assert alone.id == chosen


SPREAD = Spread(0.002, 0.001, 0.003)
FOUND = Measurements(
    rows=(Row("mlp", 2, 32, FLOOR, SPREAD, 1.0), Row("mlp", 2, 32, SIMULATOR, Spread(0.005, 0.004, 0.009), 2.5)),
    parts=(),
    growth=(Growth(Series("mlp", "ranks", (1, 2, 4, 8)), (1.0, 1.0, 2.0, 4.0), (2**20,) * 4),),
    stuck=(),
    throughput=(Throughput(1, 100, 10.0), Throughput(2, 100, 5.0)),
    detection=(Detection("some-mutant", (1, 4, 100), (0.1, 0.2, 0.3), 0),),
)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """What the command asks for; nothing is measured."""
    asked: list[tuple[object, ...]] = []

    def measure(plan: measurements.Plan, jobs: int, progress: measurements.Progress) -> Measurements:
        asked.append((plan is measurements.QUICK_PLAN, jobs))
        progress("something")
        return FOUND

    monkeypatch.setattr(measurements, "measure", measure)
    return asked


def test_the_command_prints_tables_and_says_how_far_it_is(planned: list[tuple[object, ...]]) -> None:
    result = CliRunner().invoke(main, ["bench", "--quick"])
    assert result.exit_code == 0 and planned[0][0] is True
    assert "something" in result.stderr
    for told in ("simulator", "2.5", "1.00", "2.00", "some-mutant: 4 cases, at most 100", "4 cases in the median"):
        assert told in result.stdout, told
    assert "stuck" not in result.stdout  # nothing was measured of it
    assert CliRunner().invoke(main, ["bench", "-q"]).stderr == "" and planned[1][0] is False


def test_the_command_prints_one_document(planned: list[tuple[object, ...]]) -> None:
    document = json.loads(CliRunner().invoke(main, ["bench", "--json"]).stdout)
    assert set(document) == {"schema_version", "machine", "rows", "parts", "growth", "stuck", "throughput", "detection"}
    assert document["rows"][1] == FOUND.rows[1].as_dict()
    assert document["growth"][0]["exponent"] == 1.0
    assert set(document["machine"]) == {"cores", "processor", "python", "torch"}
