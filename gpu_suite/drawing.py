"""Cases and programs drawn one by one, the same in every run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

import tpverify as tpv
from gpu_suite.places import Place
from gpu_suite.plan import SEED
from tpverify.case import Case
from tpverify.lookup import addressed
from tpverify.strategies import cases

DRAWS_PER_CASE = 10
"""How many draws it may take to get one that differs from those before."""

T = TypeVar("T")


class _Enough(Exception):
    """No more are wanted."""


def search(strategy: SearchStrategy[T], most: int, enough: Callable[[T], bool]) -> None:
    """Hand different values of a strategy to ``enough`` until it says so.

    Args:
        most: how many at most.
    """
    seen: set[str] = set()
    done = False

    def look(value: T) -> None:
        nonlocal done
        if not done and repr(value) not in seen:
            seen.add(repr(value))
            done = enough(value) or len(seen) == most
        if done:  # also where Hypothesis comes back to the value that said so
            raise _Enough

    config = settings(
        max_examples=DRAWS_PER_CASE * most,
        phases=(Phase.generate,),
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    with contextlib.suppress(_Enough):
        hypothesis.seed(SEED)(config(given(strategy)(look)))()


def drawn(subject: tpv.Subject, place: Place, count: int) -> list[Case]:
    """Different cases of a subject that it must not refuse, on several ranks where the place has room for them.

    The simplest case, which is drawn first, is taken only where there is no other.
    """
    found: list[Case] = []

    def collect(case: Case) -> bool:
        if subject.rejects is None or not subject.rejects(case.config, case.world_size):
            found.append(case)
        return len(found) > count

    search(cases(addressed(subject), place.largest_sizes, place.most_ranks), DRAWS_PER_CASE * (count + 1), collect)
    return found[-count:]
