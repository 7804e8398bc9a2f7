"""The README is true: its programs run, and print what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from tpverify.checks.catalogue import CHECKS
from tpverify.cli import main

README = (Path(__file__).parents[2] / "README.md").read_text()
PROGRAMS = dict(re.findall(r"```python\n# (\S+)\n(.*?)```", README, re.DOTALL))
FIXED = ("(nn.functional.linear(x, self.weight, self.bias))", "(nn.functional.linear(x, self.weight)) + self.bias")


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run([sys.executable, "-m", *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_bug_is_reported_as_shown(folder: Path) -> None:
    shown = re.search(r"```text\n(tpverify: forward check failed.*?)```", README, re.DOTALL)
    assert shown is not None
    result = run(folder, "tpverify", "verify", "row_parallel:layer", "--quiet")
    assert result.returncode == 1
    assert shown.group(1) in result.stdout


def test_replay_shows_the_same(folder: Path) -> None:
    command = re.search(r'Replay: tpverify replay "(.*)"', README)
    assert command is not None
    result = run(folder, "tpverify", "replay", command.group(1))
    assert result.returncode == 1
    assert "every row holds bias 2 times" in result.stdout


def test_the_corrected_layer_passes(folder: Path) -> None:
    program = folder / "row_parallel.py"
    assert FIXED[0] in program.read_text()
    program.write_text(program.read_text().replace(*FIXED))
    assert run(folder, "tpverify", "verify", "row_parallel:layer", "--max-examples", "40", "--quiet").returncode == 0


def test_the_model_passes_in_pytest(folder: Path) -> None:
    result = run(folder, "pytest", "-q", "-p", "no:cacheprovider", "my_model.py", "--tpverify-world-sizes", "1,2")
    assert result.returncode == 0, result.stdout
    assert "1 passed" in result.stdout


def test_the_simulator_alone_names_the_mismatch(folder: Path) -> None:
    result = subprocess.run(
        [sys.executable, "simulated.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    assert "they differ in reduce op" in result.stdout
    assert result.stdout.count("simulated.py:") == 2


def test_every_check_stands_in_the_table() -> None:
    assert re.findall(r"^\| `([a-z-]+)` \|", README, re.MULTILINE) == list(CHECKS)


def test_every_command_stands_in_the_readme() -> None:
    documented = set(re.findall(r"^tpverify ([a-z]+) ", README, re.MULTILINE))
    assert documented == set(main.list_commands(click.Context(main)))
