"""What grows with what: time and peak memory over the number of ranks, of collectives and of features, each series in its own process."""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tpverify.bench.comparison import CONFIGS
from tpverify.bench.runners import simulator
from tpverify.bench.timing import exponent, seconds
from tpverify.bench.work import Work
from tpverify.errors import SimulationError
from tpverify.lookup import builtin_subjects
from tpverify.mutants.workers import Failure, each
from tpverify.simulator.world import simulate
from tpverify.subjects.language_model import LanguageModelConfig
from tpverify.subjects.mlp import MLPConfig

TIMES = 3
"""Runs of each size; the least counts, as the machine's other work only adds."""


@dataclass(frozen=True)
class Series:
    """One quantity that grows.

    Attributes:
        name: what is run.
        over: what grows.
        sizes: how large, ascending.
    """

    name: str
    over: str
    sizes: tuple[int, ...]


SERIES = (
    Series("mlp", "ranks", (1, 2, 4, 8, 16, 32, 64, 128, 256)),
    Series("gpt", "ranks", (1, 2, 4, 8, 16, 32, 64)),
    Series("all_reduce on 2 ranks", "collectives", (10, 100, 1000, 10_000)),
    Series("mlp on 4 ranks", "hidden", (16, 32, 64, 128, 256, 512, 1024, 2048)),
)
QUICK = (Series("mlp", "ranks", (1, 4, 16, 64)), Series("all_reduce on 2 ranks", "collectives", (10, 100, 1000)))


@dataclass(frozen=True)
class Growth:
    """A measured series.

    Attributes:
        series: what was measured.
        seconds: of one run, by size.
        peak_bytes: the process's largest resident memory so far, bytes, by size.
    """

    series: Series
    seconds: tuple[float, ...]
    peak_bytes: tuple[int, ...]

    @property
    def exponent(self) -> float:
        """b of seconds = a * size ** b, fitted to the larger half of the sizes: below, what is the same for all sizes counts most."""
        half = (len(self.series.sizes) - 1) // 2
        return exponent(self.series.sizes[half:], self.seconds[half:])

    def as_dict(self) -> dict[str, Any]:
        """The series as JSON-ready data."""
        return {
            "name": self.series.name,
            "over": self.series.over,
            "sizes": list(self.series.sizes),
            "seconds": [round(value, 6) for value in self.seconds],
            "peak_bytes": list(self.peak_bytes),
            "exponent": round(self.exponent, 3),
        }


def grow(series: Sequence[Series]) -> list[Growth]:
    """Measure, one series after another.

    Raises:
        SimulationError: a series does not come to its end.
    """
    found: dict[int, Growth] = {}
    for item in range(len(series)):
        for _, result in each(measured, [series[item]], 1):
            if isinstance(result, Failure):
                raise SimulationError(f"Expected {series[item].name} to run but its process reports {result.message}")
            found[item] = result
    return [found[item] for item in range(len(series))]


def measured(series: Series) -> Growth:
    """One series, in this process, from small to large."""
    torch.set_num_threads(1)
    times: list[float] = []
    peaks: list[int] = []
    for size in series.sizes:
        times.append(_seconds(series, size))
        peaks.append(max([peak_bytes(), *peaks]))  # the kernel counts a little late
    return Growth(series, tuple(times), tuple(peaks))


def peak_bytes() -> int:
    """The largest resident memory that this process has had, bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # on Linux getrusage() counts what the process was before it started another program
        return 1024 * int(re.search(r"VmHWM:\s*(\d+) kB", status.read_text())[1])  # type: ignore[index]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _seconds(series: Series, size: int) -> float:
    if series.over == "collectives":
        return min(seconds(lambda: simulate(_reductions, 2, args=(size,))) for _ in range(TIMES))
    work = _work(series, size)
    with simulator(work) as run:
        run.once()
        return min(seconds(run.once) for _ in range(TIMES))


def _reductions(count: int) -> None:
    tensor = torch.zeros(64)
    for _ in range(count):
        dist.all_reduce(tensor)


def _work(series: Series, size: int) -> Work:
    """Ranks get less each as they become more, of a model whose sizes all divide; features grow on four ranks."""
    subjects = builtin_subjects()
    if series.over == "hidden":
        return Work(subjects["mlp"], CONFIGS["mlp"](size), 4)
    if series.name == "mlp":
        return Work(subjects["mlp"], MLPConfig(seq=16, batch=2, hidden=32, ffn=1024), size)
    config = LanguageModelConfig(seq=16, batch=2, hidden=128, heads=64, kv_heads=64, ffn=512, layers=2, vocab=256, positions=16, tied=True)
    return Work(subjects["gpt"], config, size)
