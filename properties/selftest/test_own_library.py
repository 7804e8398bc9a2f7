"""The README's adapter of an in-house library: short, true, and none of its lines is there for nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ADAPTER = re.findall(r"```python\n# house_adapter.py\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
LIBRARY = (ROOT / "properties" / "selftest" / "house.py").read_text()
BROKEN_LIBRARY = LIBRARY.replace('("norm.weight", "norm.bias", "down.bias")', '("norm.weight", "norm.bias")')


def verify(folder: Path, adapter: str, library: str) -> subprocess.CompletedProcess[str]:
    """Run ``tpverify verify`` on an adapter and a library in a folder of their own."""
    (folder / "house_adapter.py").write_text(adapter)
    (folder / "house.py").write_text(library)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "tpverify", "verify", "house_adapter:mlp", "--max-examples", "30", "--quiet"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def without(field: str) -> str:
    """The adapter without the line of a field; the call's closing bracket stays."""
    lines = [line for line in ADAPTER.splitlines() if not line.lstrip().startswith(f"{field}=")]
    assert len(lines) == len(ADAPTER.splitlines()) - 1
    return "\n".join([*lines, ")" if field == "precision" else "", ""])


def test_it_is_short_and_passes(tmp_path: Path) -> None:
    assert len([line for line in ADAPTER.splitlines() if line]) <= 25
    done = verify(tmp_path, ADAPTER, LIBRARY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "30 cases" in done.stdout and "0 violations" in done.stdout


@pytest.mark.parametrize(
    ("field", "code", "says"),
    [
        ("rank_local", 1, "initialized twice"),
        ("context", 1, "CUDA"),
        ("finalize_gradients", 1, "norm.weight.grad"),
        ("precision", 1, "the subject needs precision=torch.float32"),
        ("placements", 2, "Expected a placement for every parameter"),
    ],
)
def test_no_line_is_there_for_nothing(field: str, code: int, says: str, tmp_path: Path) -> None:
    done = verify(tmp_path, without(field), LIBRARY)
    assert done.returncode == code, done.stdout + done.stderr
    assert says in done.stdout + done.stderr


def test_a_bug_in_the_library_is_found(tmp_path: Path) -> None:
    assert BROKEN_LIBRARY != LIBRARY
    done = verify(tmp_path, ADAPTER, BROKEN_LIBRARY)
    assert done.returncode == 1 and "down.bias.grad" in done.stdout, done.stdout + done.stderr
