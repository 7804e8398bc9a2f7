"""The ranks of a torchrun job as the world: one verdict for all of its processes, whatever becomes of them."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

import tpverify as tpv
from tpverify import session, worker
from tpverify.case import Case
from tpverify.lookup import builtin_subjects
from tpverify.processes.channel import Channel
from tpverify.processes.devices import check_gpus
from tpverify.processes.job_pool import JobPool
from tpverify.processes.job_rank import VARIABLES
from tpverify.processes.link import TOKEN_BYTES, Address, Listener, is_loopback
from tpverify.processes.worker import Machine
from tpverify.processes.world import ProcessWorld
from tpverify.strategies import cases

ROOT = Path(__file__).parents[1]
PATH = os.pathsep.join([str(ROOT), str(ROOT / "properties")])
LONG = 180.0
"""Seconds; for a machine that has much else to do."""
PLANTED = "planted_schedules:maximum_on_one_rank"


def environment(**more: str) -> dict[str, str]:
    """This process's, without what says that it is part of a job."""
    inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return {**inherited, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1", **more}


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(commands: Sequence[Sequence[str]], environments: Sequence[dict[str, str]], folder: Path) -> Iterator[list[Any]]:
    """Processes of one job; their stdout and stderr are files in the folder, by position."""
    with ExitStack() as stack:
        processes = []
        for position, (command, variables) in enumerate(zip(commands, environments, strict=True)):
            streams = [stack.enter_context((folder / f"{name}{position}").open("w")) for name in ("out", "err")]
            started = subprocess.Popen(command, env=variables, stdout=streams[0], stderr=streams[1], cwd=folder)
            processes.append(started)
            stack.callback(started.wait)
            stack.callback(started.kill)
        yield processes


def agents(arguments: Sequence[str], folder: Path) -> list[int]:
    """Run a job of two torchrun agents with two ranks each; the agents' exit codes."""
    port = str(free_port())
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    commands = [
        [*torchrun, "--node-rank", node, "--master-addr", "127.0.0.1", "--master-port", port, "-m", "tpverify.worker", *arguments]
        for node in ("0", "1")
    ]
    with running(commands, [environment()] * 2, folder) as processes:
        return [process.wait(LONG) for process in processes]


@contextmanager
def two_ranks(arguments: Sequence[str], folder: Path, paths: tuple[str, str] = (PATH, PATH)) -> Iterator[list[Any]]:
    """A job of two processes that nothing but their environment ties together, as another launcher would start it."""
    port = str(free_port())
    common = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    each = [environment(RANK=str(rank), **common) | {"PYTHONPATH": path} for rank, path in enumerate(paths)]
    with running([[sys.executable, "-m", "tpverify.worker", *arguments]] * 2, each, folder) as processes:
        yield processes


def behaving(what: str) -> list[str]:
    """Replays one case of the subject that misbehaves."""
    return ["replay", f"Case('planted_processes:behaving', Behaviour(what='{what}'), world_size=2)"]


def test_two_agents_verify_the_gpt_subject_and_exit_with_0(tmp_path: Path) -> None:
    codes = agents(["gpt", "--max-examples", "3", "--world-sizes", "2,4", "--json"], tmp_path)
    assert codes == [0, 0], (tmp_path / "err0").read_text()
    document = json.loads((tmp_path / "out0").read_text())
    (subject,) = document["subjects"]
    assert document["passed"] and subject["name"] == "gpt" and subject["cases_run"] == 3 and "4" in subject["world_sizes"]
    assert (tmp_path / "out1").read_text() == ""


def test_a_planted_bug_makes_both_agents_exit_with_1(tmp_path: Path) -> None:
    codes = agents([PLANTED, "--max-examples", "3", "--world-sizes", "4", "-q"], tmp_path)
    assert codes == [1, 1], (tmp_path / "err0").read_text()
    report = (tmp_path / "out0").read_text()
    assert "communication check failed" in report and "rank 3  all_reduce(MAX, float64[" in report
    assert (tmp_path / "out1").read_text() == ""
    for node in "01":
        assert "exit code 1, a check failed: the report is on the stdout of rank 0" in (tmp_path / f"err{node}").read_text()


def test_a_rank_that_dies_is_a_violation_and_replaced(tmp_path: Path) -> None:
    with two_ranks(behaving("kill"), tmp_path) as processes:
        assert [process.wait(LONG) for process in processes] == [1, 1]
    # The case is run twice, the second time for its ledger: by ranks that have been forked anew.
    report = (tmp_path / "out0").read_text()
    assert "Expected rank 1 to finish but its process was ended by SIGKILL" in report and "1 violation" in report


def test_a_machine_that_dies_ends_the_job(tmp_path: Path) -> None:
    with two_ranks(behaving("sleep"), tmp_path) as processes:
        started = time.monotonic()
        while not (ranks := children(processes[1].pid)):
            assert processes[1].poll() is None and time.monotonic() - started < LONG
            time.sleep(0.1)
        killed = time.monotonic()
        processes[1].kill()
        assert processes[0].wait(LONG) == 3 and processes[1].wait(LONG) == -signal.SIGKILL
        assert time.monotonic() - killed < 30
    assert "Expected all 2 processes of the job to stay but lost rank 1" in (tmp_path / "err0").read_text()
    while any(map(alive, ranks)):
        assert time.monotonic() - killed < 40
        time.sleep(0.1)


def test_a_subject_that_one_machine_cannot_import_is_refused(tmp_path: Path) -> None:
    with two_ranks([PLANTED, "--max-examples", "1", "--world-sizes", "2"], tmp_path, (PATH, str(ROOT))) as processes:
        assert [process.wait(LONG) for process in processes] == [2, 2]
    message = (tmp_path / "err0").read_text()
    assert f"Expected {PLANTED!r} to be importable in other processes but got rank 1: CaseError" in message


def children(parent: int) -> list[int]:
    """Ids of the direct children of a process, from ``ps``."""
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    return [int(line.split()[0]) for line in listing.splitlines() if line.split()[1] == str(parent)]


def alive(pid: int) -> bool:
    """Whether a process runs: one whose parent has died and whom nobody has asked for its exit status does not."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
    return bool(state.strip()) and not state.startswith("Z")


def job_of(ranks: int, **member: Any) -> Any:
    """What a pool knows of a job, without any process."""
    about = SimpleNamespace(rank=0, host="node0", local_rank=0, local_world_size=ranks, gpus=0, **member)
    return SimpleNamespace(world_size=ranks, members={0: about}, lost={}, check=lambda: None)


def test_world_sizes_beyond_the_job_are_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    world = ProcessWorld("gloo", pool=JobPool(job_of(4), "gloo", "cpu"))
    monkeypatch.setattr(session, "process_world", lambda *_: world)
    with pytest.raises(tpv.CaseError, match="Expected world sizes up to the 4 processes of this torchrun job but got 8"):
        tpv.verify(builtin_subjects()["mlp"], world="gloo", world_sizes=(2, 8), max_examples=1)


def test_no_case_needs_more_ranks_than_the_job_has() -> None:
    drawn: set[tuple[int, str]] = set()

    @settings(max_examples=200, database=None, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(cases(builtin_subjects()["row_parallel_linear"], (2, 3), most_ranks=4))
    def draw(case: Case) -> None:
        drawn.add((case.world_size, case.groups))

    draw()
    assert drawn == {(2, "world"), (2, "blocks"), (2, "strided"), (3, "world")}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "Expected RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT in the environment but got none of them"),
        (dict.fromkeys(VARIABLES[:-1], "0"), "but got no MASTER_PORT: start with torchrun --nnodes N --nproc-per-node M"),
        (dict.fromkeys(VARIABLES, "0") | {"RANK": "first"}, "Expected a number but got RANK='first'"),
        (dict.fromkeys(VARIABLES, "0") | {"TORCHELASTIC_RESTART_COUNT": "1"}, "Expected the first start of a job but got"),
    ],
)
def test_outside_of_a_job_the_way_out_is_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variables: dict[str, str], message: str
) -> None:
    for name in (*VARIABLES, "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert worker.run(["gpt"]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.out == ""


@pytest.mark.parametrize(("ranks", "sizes"), [(1, [1]), (2, [1, 2]), (4, [1, 2, 3, 4]), (6, [1, 2, 3, 4, 6]), (16, [1, 2, 3, 4, 8, 16])])
def test_a_job_draws_few_ranks_and_all_of_them(ranks: int, sizes: list[int]) -> None:
    assert worker.world_sizes_for(ranks) == sizes


def test_a_rank_finds_its_own_machine_in_the_environment() -> None:
    machine = Machine(local_rank=1, ranks=2, variables={"MASTER_ADDR": "node0"})
    assert machine.environment(3, 4) == {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node0"}
    assert dataclasses.replace(machine, local_rank=0).environment(2, 3)["LOCAL_WORLD_SIZE"] == "1"


def test_too_few_gpus_are_counted() -> None:
    with pytest.raises(tpv.CaseError, match="Expected one GPU for each rank but got 2 ranks and 1 GPU on node1"):
        check_gpus(2, 1, "node1")
    with pytest.raises(tpv.CaseError, match="but got 4 ranks and 0 GPUs on node0"):
        JobPool(job_of(4), "nccl", "cuda")


@pytest.fixture
def listener() -> Iterator[Listener]:
    """A controller's port."""
    listener = Listener("127.0.0.1")
    yield listener
    listener.close()


def test_only_who_knows_the_secret_is_listened_to(listener: Listener) -> None:
    def say_nothing(address: Address) -> None:
        socket.create_connection((address.host, address.port)).close()

    def guess(address: Address) -> Any:
        return dataclasses.replace(address, token=bytes(TOKEN_BYTES)).connect()

    strangers: list[Callable[[Address], Any]] = [say_nothing, guess]
    for stranger in strangers:
        kept = stranger(listener.address)
        assert listener.accept() is None
        del kept
    ours = Channel(listener.address.connect())
    ours.send("launcher", 1, {})
    accepted = listener.accept()
    assert accepted is not None and accepted[1] == ("launcher", 1, {})
    ours.close()
    accepted[0].close()


def test_a_job_on_one_machine_stays_off_the_network(listener: Listener) -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "10.0.0.7", "node0")] == [True, True, True, False, False]
    assert listener.address.host == "127.0.0.1"
