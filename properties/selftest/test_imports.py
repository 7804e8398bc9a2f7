"""What importing costs: the package, the plugin and help need no torch; plain data stays plain."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "hypothesis", "numpy", "rich", "jinja2")


def loaded_after(code: str, cwd: Path) -> set[str]:
    """Which heavy packages a fresh interpreter has loaded after running some code."""
    script = f"import sys\n{code}\nprint('LOADED', *[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], cwd=cwd, capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.split("LOADED")[-1].split())


@pytest.mark.parametrize(
    "module",
    [
        "tpverify",
        "tpverify.pytest_plugin",
        "tpverify.errors",
        "tpverify.case",
        "tpverify.violation",
        "tpverify.result",
        "tpverify.ledger.record",
        "tpverify.report",
    ],
)
def test_import_loads_nothing_heavy(module: str, tmp_path: Path) -> None:
    assert loaded_after(f"import {module}", tmp_path) == set()


def test_command_line_help_loads_no_torch(tmp_path: Path) -> None:
    code = "from tpverify.cli import main\nmain(['verify', '--help'], standalone_mode=False)"
    assert loaded_after(code, tmp_path).isdisjoint({"torch", "hypothesis"})


def test_pytest_run_without_properties_loads_no_torch(tmp_path: Path) -> None:
    (tmp_path / "test_plain.py").write_text("def test_plain():\n    assert True\n")
    code = "import pytest\nassert pytest.main(['-q', '-p', 'no:hypothesispytest', '-p', 'no:cacheprovider', 'test_plain.py']) == 0"
    assert loaded_after(code, tmp_path).isdisjoint({"torch", "hypothesis", "rich", "jinja2"})


def test_the_measure_sees_what_is_loaded(tmp_path: Path) -> None:
    assert loaded_after("import numpy", tmp_path) == {"numpy"}
