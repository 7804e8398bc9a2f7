"""The GPU tier as far as it can be held without a GPU: never green when nothing ran, nothing of the CPU tier forgotten, in time by plan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from gpu_suite import artifacts, places, plan, table  # noqa: E402
from gpu_suite.reused import NOT_REUSED, REUSED  # noqa: E402
from tpverify.verification import verify  # noqa: E402


def suite(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A run of it."""
    everything = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-m", "pytest", "gpu_suite", "-q", "-p", "no:cacheprovider", "--gpu-tier", "tiny", *options]
    return subprocess.run(command, cwd=ROOT, env=everything, capture_output=True, text=True, timeout=300)


def test_every_file_of_the_cpu_tier_is_reused_or_left_out_for_a_reason() -> None:
    files = {path.name for path in (ROOT / "properties").glob("test_*.py")}
    assert files == REUSED.keys() | NOT_REUSED.keys() and not REUSED.keys() & NOT_REUSED.keys()
    for where in REUSED.values():
        assert (ROOT / "gpu_suite" / where.partition(":")[0]).is_file()


def test_the_plan_keeps_to_its_budget() -> None:
    assert plan.START_SECONDS + sum(count.total for count in plan.COUNTS.values()) <= plan.DEADLINE_SECONDS < plan.BUDGET_SECONDS
    assert all(count.full >= count.tiny >= 1 for count in plan.COUNTS.values())


def test_a_gpu_that_is_asked_for_in_vain_is_exit_code_5(tmp_path: Path) -> None:
    done = suite(f"--gpu-artifacts={tmp_path}", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 5, done.stdout
    lines = done.stdout.rstrip().splitlines()
    assert lines[-1].startswith("gpu_suite: no CUDA device found") and "--gpu-device cpu" in lines[-1]
    assert lines[-2].startswith("0 tests ran, 0 cases, 0 violations")
    rows = json.loads((tmp_path / "table.json").read_text())
    assert rows and {row["what"] for row in rows} == set(plan.COUNTS) and all(row["missing"] for row in rows)


@pytest.mark.parametrize("options", [("-k", "nothing_of_that_name"), ("-k", "nccl and test_all_checks_hold")])
def test_nothing_run_is_exit_code_5_on_the_cpu_too(options: tuple[str, ...]) -> None:
    done = suite("--gpu-device", "cpu", *options)
    assert done.returncode == 5, done.stdout


def test_the_table_comes_last_and_counts_what_was_not_run() -> None:
    done = suite("--gpu-device", "cpu", "-k", "test_small_integers_are_exact and row_parallel_linear")
    assert done.returncode == 0, done.stdout
    assert done.stdout.rstrip().splitlines()[-1] == "2 tests ran, 2 cases, 0 violations, 0 of 0 planted bugs caught; 1 tests not run"
    assert "not run: the device is forced to the CPU" in done.stdout


@pytest.mark.parametrize(
    ("gpus", "version", "run", "missing"),
    [
        (8, (2, 28, 9), (1, 2, 4, 8), ()),
        (4, (2, 28, 9), (1, 2, 4), ()),
        (2, (2, 28, 9), (1, 2), (4,)),
        (1, (2, 28, 9), (1,), (2, 4)),
        (1, (2, 30, 3), (1, 2, 4), ()),
    ],
)
def test_ranks_over_nccl_by_gpus_and_version(
    gpus: int, version: tuple[int, ...], run: tuple[int, ...], missing: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    found = [place for place in places.places("cuda") if place.world == "nccl"]
    assert [place.sizes for place in found if not place.missing] == [run]
    assert [place.sizes for place in found if place.missing] == ([missing] if missing else [])
    assert all("NCCL 2.28.9" in place.missing and f"{gpus} GPU" in place.missing for place in found if place.missing)
    assert {place.device for place in places.places("cuda")} == {"cuda"}


def test_what_failed_stands_in_the_table() -> None:
    row = table.Row("subjects", "nccl", "cuda", "float64", (2,), cases=3)
    assert table.summarised([row])[0][-1] == "held"
    assert table.summarised([row, replace(row, violations=1)])[0][-1] == "FAILED"
    assert table.summarised([replace(row, planted=2, caught=1)])[0][-1] == "FAILED: 1 of 2 bugs missed"
    assert table.summarised([replace(row, planted=2, caught=2)])[0][-1] == "2 of 2 bugs caught"
    assert table.summarised([replace(row, missing="no GPU")])[0][4:] == ("2", "1", "-", "-", "not run: no GPU")


def test_a_failure_leaves_its_report_its_ledger_and_a_dump(tmp_path: Path) -> None:
    import planted_layers as bugs

    violation = verify(bugs.reduced_twice, max_examples=10, seed=0, world_sizes=(2,), checks=("forward",)).violations[0]
    folder = artifacts.save_failure(tmp_path, violation, places.Place("simulator", "cpu", (2,)))
    assert "forward check failed" in (folder / "report.txt").read_text()
    assert len(json.loads((folder / "ledger.json").read_text())["records"]) == 4
    assert sorted(path.name for path in (folder / "flight_recorder").iterdir()) == ["rank_0", "rank_1"]
