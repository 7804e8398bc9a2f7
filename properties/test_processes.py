"""Ranks as gloo processes: the runs are the simulator's, and whatever a rank does ends in a named error and a pool that works."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import planted_schedules as bugs
import pytest
import torch
from planted_processes import Behaviour, behaving

import tpverify as tpv
from tpverify.case import Case
from tpverify.lookup import addressed, builtin_subjects
from tpverify.processes.world import ProcessWorld
from tpverify.run import Comparison, RankRun
from tpverify.runner import run_both
from tpverify.verification import typical_case

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated.*:FutureWarning")

SUBJECT = addressed(behaving)
SOON = 30.0
"""Seconds; below the timeout of a case and any timeout of a backend, however busy the machine is."""


@pytest.fixture(scope="module")
def world() -> Iterator[ProcessWorld]:
    """One pool for this module."""
    world = ProcessWorld("gloo")
    yield world
    world.close()


def run(world: ProcessWorld | None, what: str, world_size: int = 2, timeout: float = 60.0) -> Comparison:
    """One case of the subject that misbehaves."""
    return run_both(SUBJECT, Case(SUBJECT.name, Behaviour(what), world_size), timeout, world=world)[0]


def tensors(run: RankRun) -> dict[str, Any]:
    """Everything in a rank's run that a check may look at."""
    parts = {field.name: getattr(run, field.name) for field in dataclasses.fields(RankRun)}
    placed = {f"{part}.{name}": item for part, items in parts.items() if isinstance(items, dict) for name, item in items.items()}
    return {"ties": run.ties, **placed}


def assert_same(ours: Any, theirs: Any) -> None:
    """Equal, tensors bitwise."""
    if isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    elif dataclasses.is_dataclass(ours) and not isinstance(ours, (tpv.Shard, tpv.Replicate, tpv.Partial)):
        assert type(ours) is type(theirs)
        for field in dataclasses.fields(ours):
            assert_same(getattr(ours, field.name), getattr(theirs, field.name))
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs)
        for name in ours:
            assert_same(ours[name], theirs[name])
    elif isinstance(ours, (tuple, list)):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    else:
        assert ours == theirs


def assert_same_run(simulated: Comparison, real: Comparison) -> None:
    """Same results, same collectives in the same order on every rank, payloads included."""
    assert simulated.parallel.error is None and real.parallel.error is None
    for ours, theirs in zip(simulated.parallel.ranks, real.parallel.ranks, strict=True):
        assert_same(tensors(ours), tensors(theirs))
    assert len(real.parallel.ledger) == len(simulated.parallel.ledger)
    for rank in simulated.members:
        ours_issued, theirs_issued = simulated.parallel.ledger.rank(rank).records, real.parallel.ledger.rank(rank).records
        assert ours_issued == theirs_issued
        assert_same([record.payload for record in ours_issued], [record.payload for record in theirs_issued])


@pytest.mark.parametrize("groups", ["world", "blocks", "strided"])
@pytest.mark.parametrize("name", ["column_parallel_linear", "vocab_parallel_embedding", "transformer_block", "gpt"])
def test_a_run_is_the_simulators(world: ProcessWorld, name: str, groups: str) -> None:
    subject = builtin_subjects()[name]
    # On two ranks gloo adds in the same order as the simulator, or in one that gives the same bits.
    case = dataclasses.replace(typical_case(subject, 2), groups=groups, values="normal")
    for simulated, real in zip(run_both(subject, case, traced=True), run_both(subject, case, traced=True, world=world), strict=True):
        assert_same_run(simulated, real)


def test_every_kind_of_collective_gives_the_simulators_values_and_records(world: ProcessWorld) -> None:
    simulated = run(None, "every kind", 3)
    assert_same_run(simulated, run(world, "every kind", 3))
    assert len({record.kind for record in simulated.parallel.ledger}) == 10


def test_the_store_is_every_cases_own(world: ProcessWorld) -> None:
    for world_size in (2, 3, 2):
        real = run(world, "store", world_size)
        assert_same_run(run(None, "store", world_size), real)
        assert [int(placed.local) for placed in list(real.parallel.ranks[0].outputs.values())[:-1] if placed.local is not None] == [
            10 * rank for rank in range(world_size)
        ]


@pytest.mark.parametrize("what", ["never waited", "written in flight", "never received"])
def test_unsound_use_of_buffers_is_found_as_in_the_simulator(world: ProcessWorld, what: str) -> None:
    simulated, real = run(None, what).parallel, run(world, what).parallel
    assert what in {hazard for record in real.ledger for hazard in record.hazards}
    assert [set(record.hazards) for record in real.ledger.rank(0)] == [set(record.hazards) for record in simulated.ledger.rank(0)]


@pytest.mark.parametrize("what", ["skip", "maximum", "bigger", "groups that differ", "received from nobody", "finally", "raise"])
def test_errors_are_the_simulators(world: ProcessWorld, what: str) -> None:
    simulated = run(None, what).parallel.error
    started = time.monotonic()
    real = run(world, what).parallel.error
    assert time.monotonic() - started < SOON
    assert type(real) is type(simulated) and str(real) == str(simulated) and real.ranks == simulated.ranks
    if isinstance(real, tpv.RankError) and isinstance(simulated, tpv.RankError):
        assert isinstance(real.exception, ValueError) and str(real.exception) == str(simulated.exception)
    assert run(world, "nothing").parallel.error is None


def test_planted_bugs_are_found_on_the_same_smallest_case(world: ProcessWorld) -> None:
    def violations(world: str) -> tuple[tpv.Violation, ...]:
        return tpv.verify(bugs.maximum_on_one_rank, max_examples=10, seed=0, world_sizes=(2,), world=world).violations

    assert violations("gloo") == violations("simulator") != ()


def test_a_rank_that_raises_costs_nobody_the_pool_unless_others_wait_for_it(world: ProcessWorld) -> None:
    assert run(world, "nothing").parallel.error is None
    before = world.pids[:2]
    subject = builtin_subjects()["row_parallel_linear"]
    refused = Case(subject.name, type(typical_case(subject, 2).config)(in_features=3), 2)
    error = run_both(subject, refused, world=world)[0].parallel.error
    assert isinstance(error, tpv.RankError) and isinstance(error.exception, ValueError)
    assert world.pids[:2] == before
    assert isinstance(run(world, "raise").parallel.error, tpv.RankError)
    assert run(world, "nothing").parallel.error is None
    assert not set(world.pids) & set(before)


@pytest.mark.parametrize(("what", "how"), [("kill", "was ended by SIGKILL"), ("exit", "ended with exit status 3")])
def test_a_rank_whose_process_dies_is_named_and_replaced(world: ProcessWorld, what: str, how: str) -> None:
    assert run(world, "nothing").parallel.error is None
    before = world.pids
    started = time.monotonic()
    error = run(world, what).parallel.error
    assert time.monotonic() - started < SOON
    assert isinstance(error, tpv.RankError) and error.rank == 1
    first, *lines = str(error).splitlines()
    assert first == f"Expected rank 1 to finish but its process {how}"
    assert lines[0].startswith("  rank 0  waits in #1 all_reduce(SUM, float64[2])") and lines[0].endswith("for rank 1")
    assert not any(alive(pid) for pid in before)
    assert run(world, "nothing").parallel.error is None


def test_a_rank_that_loops_is_stopped_and_says_where_it_was(world: ProcessWorld) -> None:
    error = run(world, "loop", timeout=1.0).parallel.error
    assert isinstance(error, tpv.RankTimeout) and error.ranks == (1,)
    first, second = str(error).splitlines()
    assert "timeout=1 seconds" in first and "rank 1 was running at " in first and "planted_processes.py:" in first
    assert second.startswith("  rank 0  waits in #1 all_reduce")
    assert run(world, "nothing").parallel.error is None


def test_a_subject_that_others_cannot_import_is_refused(world: ProcessWorld) -> None:
    hidden = dataclasses.replace(behaving, name="hidden")
    with pytest.raises(tpv.CaseError, match="Expected a subject that other processes can import but got 'hidden'"):
        run_both(hidden, Case("hidden", Behaviour(), 2), world=world)
    imposter = dataclasses.replace(builtin_subjects()["mlp"], finalize_gradients=lambda module: None)
    with pytest.raises(tpv.CaseError, match="got 'mlp'"):
        run_both(imposter, typical_case(builtin_subjects()["mlp"], 2), world=world)


def alive(pid: int) -> bool:
    """Whether there is a process of that id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


SCRIPT = """
import sys
from tpverify.case import Case
from tpverify.lookup import load_subject
from tpverify.runner import run_both
from tpverify.processes.world import ProcessWorld
from planted_processes import Behaviour
subject = load_subject("planted_processes:behaving")
world = ProcessWorld("gloo")
assert run_both(subject, Case(subject.name, Behaviour(), 2), world=world)[0].parallel.error is None
print(*world.pids, world.launcher_pid, flush=True)
run_both(subject, Case(subject.name, Behaviour("sleep"), 2), world=world)
"""


def test_nothing_outlives_its_controller(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "properties")]), "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", SCRIPT], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as controller:
        assert controller.stdout is not None
        pids = [int(pid) for pid in controller.stdout.readline().split()]
        assert len(pids) == 3 and all(map(alive, pids)) and list(tmp_path.glob("tpverify-*"))
        started = time.monotonic()
        controller.kill()
        while any(map(alive, pids)):
            assert time.monotonic() - started < SOON
            time.sleep(0.02)
    assert not list(tmp_path.glob("tpverify-*"))


def test_ctrl_c_ends_the_command_line_with_130_and_no_orphan(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "properties")]), "TMPDIR": str(tmp_path)}
    case = f"Case('{SUBJECT.name}', Behaviour(what='sleep'), world_size=2)"
    command = [sys.executable, "-m", "tpverify", "replay", case, "--world", "gloo"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as controller:
        while not (ranks := children(children(controller.pid))):
            assert controller.poll() is None
            time.sleep(0.05)
        time.sleep(0.5)
        os.killpg(controller.pid, signal.SIGINT)
        assert controller.wait(SOON) == 130
        assert not any(map(alive, ranks))
    assert not list(tmp_path.glob("tpverify-*"))


def children(parents: int | list[int]) -> list[int]:
    """Ids of the direct children of a process or several, from ``ps``."""
    wanted = [parents] if isinstance(parents, int) else parents
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in listing.splitlines()]
    return [pid for pid, parent in pairs if parent in wanted]
