"""How times are taken: side by side in one run, one after another in turn, so that a busy moment of the machine meets all of them."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

LEAST_SAMPLE = 0.05
"""Seconds a sample takes at least: what is faster is called several times in a row, as cases are. A single call after garbage has been
collected finds nothing in the processor's caches and takes two to three times as long."""


@dataclass(frozen=True)
class Spread:
    """Seconds that one call took, of several samples."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """The spread of at least one sample."""
        return cls(statistics.median(samples), min(samples), max(samples))

    def as_dict(self) -> dict[str, float]:
        """The spread as JSON-ready data, to the microsecond."""
        return {f"{name}_seconds": round(getattr(self, name), 6) for name in ("median", "min", "max")}


def in_turn(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Spread]:
    """Time the calls A B C A B C ...; each has run once before, untimed.

    Garbage is collected between samples, and not within them.

    Args:
        calls: by name.
        rounds: samples of each.
    """
    times = {name: _times(call) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    enabled = gc.isenabled()
    gc.collect()
    frozen = gc.get_freeze_count() > 0  # by somebody else, and to stay so
    if not frozen:
        gc.freeze()  # what is there by now need not be looked through every time
    try:
        for _ in range(rounds):
            for name, call in calls.items():
                gc.collect()
                gc.disable()
                samples[name].append(seconds(call, times[name]))
                if enabled:
                    gc.enable()
    finally:
        if not frozen:
            gc.unfreeze()
        if enabled:
            gc.enable()
    return {name: Spread.of(taken) for name, taken in samples.items()}


def seconds(call: Callable[[], object], times: int = 1) -> float:
    """What one of so many calls in a row takes."""
    started = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - started) / times


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """b of the power law a * size ** b that fits the values best: the slope of the least squares line through the logarithms."""
    import numpy

    slope: float = numpy.polyfit(numpy.log(sizes), numpy.log(values), 1)[0]
    return float(slope)


def _times(call: Callable[[], object]) -> int:
    call()
    once = seconds(call)
    return max(1, int(LEAST_SAMPLE / max(once, 1e-9)))
