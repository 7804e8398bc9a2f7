"""Where the time of a whole case goes: drawing it, its reference, its ranks, its checks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings

from tpverify.bench.comparison import CONFIGS
from tpverify.bench.runners import floor
from tpverify.bench.timing import Spread, in_turn
from tpverify.bench.work import Work
from tpverify.case import Case
from tpverify.checks.catalogue import apply, selected
from tpverify.lookup import builtin_subjects
from tpverify.runner import run_both, run_reference
from tpverify.session import Session
from tpverify.strategies import cases
from tpverify.subjects.subject import Subject

DRAWN = 100
"""Cases that are drawn to find out what that takes."""


@dataclass(frozen=True)
class Parts:
    """What one case costs, in seconds.

    Attributes:
        subject, world_size, hidden: of the case.
        floor: the ranks one after another, with collectives that do nothing.
        draw: drawing a case from its strategy, without running it.
        reference: one device, logical tensors included.
        ranks: building and running the ranks in the simulator, from the same tensors.
        checks: applying all checks.
        whole: reference, ranks and checks, as a session runs them.
    """

    subject: str
    world_size: int
    hidden: int
    floor: Spread
    draw: float
    reference: Spread
    ranks: float
    checks: Spread
    whole: Spread

    @property
    def ratio(self) -> float:
        """The whole case, drawing included, over the floor."""
        return (self.whole.median + self.draw) / self.floor.median

    def as_dict(self) -> dict[str, Any]:
        """The parts as JSON-ready data."""
        seconds = {
            "floor": self.floor.median,
            "draw": self.draw,
            "reference": self.reference.median,
            "ranks": self.ranks,
            "checks": self.checks.median,
            "whole": self.whole.median + self.draw,
        }
        of_what = {"subject": self.subject, "world_size": self.world_size, "hidden": self.hidden}
        return {**of_what, "seconds": {name: round(value, 6) for name, value in seconds.items()}, "ratio_to_floor": round(self.ratio, 3)}


def parts_of(subject: str, world_size: int, hidden: int, rounds: int) -> Parts:
    """Time the parts of one case side by side."""
    chosen, config = builtin_subjects()[subject], CONFIGS[subject](hidden)
    work, case = Work(chosen, config, world_size), Case(subject, config, world_size)
    session, checks, comparisons = Session(chosen), selected(None), run_both(chosen, case)
    with floor(work) as least:
        spreads = in_turn(
            {
                "floor": least.once,
                "reference": lambda: run_reference(chosen, case, 0, 0),
                "both": lambda: run_both(chosen, case),
                "checks": lambda: [apply(checks, comparison, None) for comparison in comparisons],
                "whole": lambda: session.again(case),
            },
            rounds,
        )
    ranks = spreads["both"].median - spreads["reference"].median
    draw = _seconds_to_draw(chosen, (world_size,))
    return Parts(subject, world_size, hidden, spreads["floor"], draw, spreads["reference"], ranks, spreads["checks"], spreads["whole"])


def _seconds_to_draw(subject: Subject, world_sizes: Sequence[int]) -> float:
    """One case, Hypothesis' own work included."""
    count = 0

    def nothing(case: Case) -> None:
        nonlocal count
        count += 1

    quiet = settings(max_examples=DRAWN, deadline=None, database=None, phases=(Phase.generate,), suppress_health_check=list(HealthCheck))
    drive = hypothesis.seed(0)(quiet(given(cases(subject, world_sizes))(nothing)))
    started = time.perf_counter()
    drive()
    return (time.perf_counter() - started) / max(count, 1)
