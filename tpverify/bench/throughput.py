"""Cases a second of whole test runs: one pytest process beside two, each with a core of its own."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpverify.errors import TpverifyError

SUBJECTS = ("mlp", "swiglu_mlp", "attention", "vocab_parallel_embedding", "column_parallel_linear", "row_parallel_linear")
COPIES = 4
"""Tests of each subject, so that none is so long that a worker is left alone with it."""

FILE = """
import pytest
from hypothesis import HealthCheck, seed, settings

import tpverify as tpv
from tpverify.lookup import builtin_subjects

settings.register_profile("bench", max_examples={examples}, deadline=None, database=None, suppress_health_check=list(HealthCheck))
settings.load_profile("bench")


@pytest.mark.parametrize("copy", range({copies}))
@pytest.mark.parametrize("name", {subjects})
def test_subject(name, copy):
    seed(copy)(tpv.property_test(builtin_subjects()[name]))()
"""


@dataclass(frozen=True)
class Throughput:
    """Test runs that draw the same cases.

    Attributes:
        processes: how many share the tests.
        cases: how many ran.
        seconds: of the whole run, the start of Python included.
    """

    processes: int
    cases: int
    seconds: float

    @property
    def rate(self) -> float:
        """Cases a second."""
        return self.cases / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """The run as JSON-ready data."""
        return {
            "processes": self.processes,
            "cases": self.cases,
            "seconds": round(self.seconds, 3),
            "cases_per_second": round(self.rate, 2),
        }


def throughput(examples: int) -> list[Throughput]:
    """One process, then two; only one where pytest-xdist is not installed.

    Args:
        examples: cases of each test.

    Raises:
        TpverifyError: a run fails.
    """
    processes = (1, 2) if importlib.util.find_spec("xdist") else (1,)
    with tempfile.TemporaryDirectory(prefix="tpverify-") as folder:
        path = Path(folder, "test_throughput.py")
        path.write_text(FILE.format(examples=examples, copies=COPIES, subjects=SUBJECTS))
        return [_run(path, count) for count in processes]


def _run(path: Path, processes: int) -> Throughput:
    share: Sequence[str] = ("-n", str(processes)) if processes > 1 else ()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *share, str(path)]
    started = time.perf_counter()
    done = subprocess.run(command, cwd=path.parent, capture_output=True, text=True)
    spent = time.perf_counter() - started
    shown = re.search(r"tpverify: .*?([\d,]+) cases", done.stdout)
    if done.returncode != 0 or shown is None:
        raise TpverifyError(
            f"Expected the test run to pass but pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return Throughput(processes, int(shown[1].replace(",", "")), spent)
