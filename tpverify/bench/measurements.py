"""All that is measured, in order, and what it is measured on."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tpverify.bench.case_parts import Parts, parts_of
from tpverify.bench.comparison import Row, compare
from tpverify.bench.detection import Detection, detect
from tpverify.bench.growth import QUICK, SERIES, Growth, Series, grow
from tpverify.bench.stuck import Stuck, time_faults
from tpverify.bench.throughput import Throughput, throughput

SCHEMA_VERSION = 1

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        subjects, world_sizes, hidden_sizes: of the comparison.
        rounds: samples of whatever is timed side by side.
        series: of the growth.
        seeds: of the detection; none = none.
        examples: cases of each test of the throughput; 0 = none.
    """

    subjects: tuple[str, ...] = ("mlp", "attention", "gpt", "dtensor_mlp")
    world_sizes: tuple[int, ...] = (2, 4, 8)
    hidden_sizes: tuple[int, ...] = (32, 512)
    rounds: int = 15
    series: tuple[Series, ...] = SERIES
    seeds: tuple[int, ...] = tuple(range(20))
    examples: int = 100


QUICK_PLAN = Plan(("mlp",), (4,), (32,), rounds=7, series=QUICK, seeds=(), examples=0)


@dataclass(frozen=True)
class Measurements:
    """What was measured; empty where the plan leaves it out."""

    rows: tuple[Row, ...]
    parts: tuple[Parts, ...]
    growth: tuple[Growth, ...]
    stuck: tuple[Stuck, ...]
    throughput: tuple[Throughput, ...]
    detection: tuple[Detection, ...]

    def as_dict(self) -> dict[str, Any]:
        """The document of ``--json``."""
        names = ("rows", "parts", "growth", "stuck", "throughput", "detection")
        return {
            "schema_version": SCHEMA_VERSION,
            "machine": machine(),
            **{name: [each.as_dict() for each in getattr(self, name)] for name in names},
        }


def machine() -> dict[str, Any]:
    """What the figures hold for."""
    return {"cores": os.cpu_count(), "processor": platform.machine(), "python": platform.python_version(), "torch": torch.__version__}


def measure(plan: Plan, jobs: int, progress: Progress) -> Measurements:
    """Measure what the plan says.

    Args:
        jobs: processes that try mutants; all else is timed in one, beside nothing.
        progress: told what comes next.

    Raises:
        SimulationError: what is measured does not run, or computes something else.
    """
    torch.set_num_threads(1)
    rows = tuple(compare(plan.subjects, plan.world_sizes, plan.hidden_sizes, plan.rounds, progress))
    progress("the parts of a case")
    parts = tuple(parts_of(subject, 4, hidden, plan.rounds) for subject in plan.subjects for hidden in plan.hidden_sizes)
    progress("growth")
    growth = tuple(grow(plan.series))
    progress("runs that get stuck")
    stuck = tuple(time_faults(plan.world_sizes, 50))
    if plan.examples:
        progress("test runs")
    rates = tuple(throughput(plan.examples)) if plan.examples else ()
    if plan.seeds:
        progress("mutants")
    found = tuple(detect(plan.seeds, jobs, progress)) if plan.seeds else ()
    return Measurements(rows, parts, growth, stuck, rates, found)
