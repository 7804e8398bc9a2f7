"""The cases that show a planted bug: searched for in the simulator on the CPU, where a case costs milliseconds, then run elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import tpverify as tpv
from gpu_suite.drawing import search
from gpu_suite.places import Place
from tpverify.case import Case
from tpverify.lookup import addressed
from tpverify.strategies import cases

MOST = 100
"""Cases that are looked through for each choice of world sizes."""

PAIR = (2,)
LOOKED_FOR = (PAIR, (3, 4))
"""World sizes, in turn: two ranks are what every place with several has."""


class NotShownError(Exception):
    """No case among those that are drawn shows the bug."""


@dataclass
class _Shown:
    """Cases that show what is left of the checks, and what that is."""

    left: set[str]
    cases: list[Case] = field(default_factory=list)

    def take(self, case: Case, seen: set[str]) -> None:
        """Keep the case if it shows more."""
        if seen & self.left:
            self.cases.append(case)
            self.left -= seen


def broken(subject: tpv.Subject, some: Iterable[Case], world: str = "simulator", device: str = "cpu") -> set[str]:
    """Ids of the checks that do not hold in one case or another."""
    return {violation.check for case in some for violation in tpv.check_case(subject, case, world=world, device=device)}


@functools.cache
def showing(subject: tpv.Subject, checks: frozenset[str], dtype: str = "float64") -> tuple[Case, ...]:
    """A few cases that break these checks between them; of two TP groups, which take more ranks, only where one does not do.

    A case that raises is chosen only if ``execution`` is among them: an index out of range raises on the CPU, where on CUDA it leaves
    the process without a device.

    Raises:
        NotShownError: there is none among those that are drawn.
    """
    for sizes in LOOKED_FOR:
        one, any_groups = _Shown(set(checks)), _Shown(set(checks))

        def look(case: Case, one: _Shown = one, any_groups: _Shown = any_groups) -> bool:
            seen = broken(subject, [case])
            if "execution" in checks or "execution" not in seen:
                any_groups.take(case, seen)
                if case.groups == "world":
                    one.take(case, seen)
            return not one.left

        search(cases(addressed(subject), sizes, dtypes=(dtype,)), MOST, look)
        for shown in (one, any_groups):
            if not shown.left:
                return tuple(shown.cases)
    raise NotShownError(f"no case among {MOST} shows it to {', '.join(sorted(checks))}")


def ranks_needed(some: Sequence[Case]) -> int:
    """Of the largest world among the cases."""
    return max(case.world_size * (1 if case.groups == "world" else 2) for case in some)


def missed(subject: tpv.Subject, checks: Iterable[str], place: Place, dtype: str = "float64") -> set[str]:
    """Which of the checks find nothing at the place in the cases in which they do in the simulator on the CPU."""
    return set(checks) - broken(subject, showing(subject, frozenset(checks), dtype), place.world, place.device)
