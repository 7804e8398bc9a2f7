"""How soon planted bugs are found: cases and seconds until each mutant's own check first fires, over many seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tpverify.errors import SimulationError
from tpverify.mutants import campaign
from tpverify.mutants.catalogue import catalogue
from tpverify.mutants.fate import MAX_EXAMPLES, fate_of
from tpverify.mutants.workers import Failure, each


@dataclass(frozen=True)
class Search:
    """What one worker does: one mutant, with every seed."""

    id: str
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Detection:
    """How soon one mutant is found.

    Attributes:
        id: of the mutant.
        cases, seconds: until its own check first fired, by seed; where it did not, as many as are drawn.
        missed: seeds with which it did not.
    """

    id: str
    cases: tuple[int, ...]
    seconds: tuple[float, ...]
    missed: int

    @property
    def median_cases(self) -> float:
        """The median over seeds."""
        return statistics.median(self.cases)

    def as_dict(self) -> dict[str, Any]:
        """The detection as JSON-ready data."""
        return {
            "id": self.id,
            "median_cases": self.median_cases,
            "most_cases": max(self.cases),
            "median_seconds": round(statistics.median(self.seconds), 6),
            "missed": self.missed,
        }


def detect(seeds: Sequence[int], jobs: int, progress: Callable[[str], None]) -> list[Detection]:
    """All mutants that are no equivalents, in the catalogue's order.

    Args:
        jobs: processes.
        progress: told how far it has come.

    Raises:
        SimulationError: a mutant cannot be tried.
    """
    searches = [Search(id, tuple(seeds)) for id, mutant in catalogue().items() if not mutant.equivalent]
    found: dict[int, Detection] = {}
    for index, result in each(searched, searches, jobs):
        if isinstance(result, Failure):
            raise SimulationError(f"Expected the mutant {searches[index].id} to run but its process reports {result.message}")
        found[index] = result
        if len(found) % 50 == 0:
            progress(f"{len(found)} of {len(searches)} mutants")
    return [found[index] for index in range(len(searches))]


def searched(search: Search) -> Detection:
    """One mutant, in a worker."""
    campaign.ready()
    fates = [fate_of(catalogue()[search.id], seed=seed, shrink=False) for seed in search.seeds]
    missed = sum(not fate.by_named_check for fate in fates)
    cases = tuple(fate.cases if fate.by_named_check else MAX_EXAMPLES for fate in fates)
    return Detection(search.id, cases, tuple(fate.seconds for fate in fates), missed)
