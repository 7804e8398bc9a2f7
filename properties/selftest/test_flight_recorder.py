"""Ledgers as Flight Recorder dumps: torch's own analyser reads them and finds what is wrong, without a false alarm."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import tpverify as tpv
from tpverify.report.flight_recorder import flight_recorder_dumps, write_flight_recorder
from tpverify.simulator.world import run_world
from tpverify.verification import builtin_subjects, run_case, typical_case

ANALYSER = "torch.distributed.flight_recorder.fr_trace"


def analysed(folder: Path, ledgers: dict[str, tpv.Ledger]) -> str:
    """What `torchfrtrace` says of the dumps."""
    write_flight_recorder(folder / "rank_", ledgers)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", ANALYSER, str(folder), "--prefix", "rank_", "--verbose"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def every_kind() -> None:
    """Each kind of collective once, a group of two, and a message."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.ones(2, 3)
    dist.all_reduce(x)
    dist.broadcast(x, 1)
    dist.reduce(x, 0)
    dist.all_gather([torch.empty(2, 3) for _ in range(size)], x)
    dist.reduce_scatter(torch.empty(2, 3), [torch.ones(2, 3) for _ in range(size)])
    dist.scatter(x, [torch.ones(2, 3) for _ in range(size)] if rank == 0 else None)
    dist.gather(x, [torch.empty(2, 3) for _ in range(size)] if rank == 0 else None)
    dist.all_to_all_single(torch.empty(size), torch.ones(size))
    dist.barrier()
    pair = dist.new_group([0, 2])
    if rank != 1:
        dist.all_reduce(x, group=pair)
    if rank == 0:
        dist.send(x, 1)
    elif rank == 1:
        dist.recv(x, 0)


def test_right_programs_are_read_without_a_complaint(tmp_path: Path) -> None:
    ledgers = {"every kind": tpv.simulate(every_kind, 3).ledger}
    for name in ("mlp", "gpt", "dtensor_mlp"):
        subject = builtin_subjects()[name]
        ledgers[name] = run_case(subject, typical_case(subject, 2)).parallel.ledger
    said = analysed(tmp_path, ledgers)
    assert "error" not in said.lower() and "Not all ranks" not in said
    collectives = sum(1 for ledger in ledgers.values() for record in ledger.rank(0) if record.kind not in ("send", "recv"))
    assert said.count("Collective(") == collectives > 20


def skipping(x: torch.Tensor) -> None:
    if dist.get_rank() != 1:
        dist.all_reduce(x)


def narrower(x: torch.Tensor) -> None:
    dist.all_reduce(x[:2].clone() if dist.get_rank() == 1 else x)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [(skipping, ("Not all ranks joining", "missing ranks: {1}")), (narrower, ("Culprit rank 1", "SIZE_OR_SYNTAX_MISMATCH"))],
    ids=["skipped", "narrower"],
)
def test_what_is_wrong_is_found(fault: object, expected: tuple[str, ...], tmp_path: Path) -> None:
    def program() -> None:
        dist.all_reduce(torch.ones(3))
        fault(torch.ones(3))  # type: ignore[operator]

    ledger, _, failure = run_world(program, 3, args=(), seed=0, timeout=60.0)
    assert failure is not None
    said = analysed(tmp_path, {"wrong": ledger})
    assert all(part in said for part in expected), said
    assert "test_flight_recorder.py:" in said


def test_a_dump_is_what_flight_recorder_writes(tmp_path: Path) -> None:
    """Field by field, against a dump of torch's own."""
    ledger = tpv.simulate(lambda: dist.all_reduce(torch.ones(3)), 2).ledger
    (entry,) = flight_recorder_dumps({"one": ledger})[1]["entries"]
    path = write_flight_recorder(tmp_path / "rank_", {"one": ledger})[1]
    assert path.name == "rank_1" and pickle.loads(path.read_bytes())["entries"] == [entry]
    assert (entry["profiling_name"], entry["state"], entry["collective_seq_id"]) == ("gloo:all_reduce", "completed", 1)
    real = flown()
    assert set(real) - {"thread_name", "thread_id"} <= set(entry)
    assert {name: type(value) for name, value in real.items() if name in entry and value is not None} == {
        name: type(value) for name, value in entry.items() if name in real and real[name] is not None
    }


FLY = """
import torch, torch.distributed as dist, pickle, sys
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 1), rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
sys.stdout.buffer.write(torch._C._distributed_c10d._dump_fr_trace())
"""


def flown() -> dict[str, object]:
    """An entry of torch's own recorder of gloo."""
    if not hasattr(torch._C._distributed_c10d, "_dump_fr_trace"):
        pytest.skip("this torch keeps no recorder of gloo")
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": "10", "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, "-W", "ignore", "-c", FLY, os.path.join(folder, "store")]
        done = subprocess.run(command, env=environment, capture_output=True, timeout=120)
    entries = pickle.loads(done.stdout)["entries"]
    found: dict[str, object] = entries[0]
    return found
