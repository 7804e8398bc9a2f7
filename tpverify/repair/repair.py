"""What a repair is: one change of a running program, and what it would mean if that mended a case."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from tpverify.ledger.record import CallSite
from tpverify.simulator.exchange import Perturb

Sites = tuple[CallSite, ...]
"""The user's frames of one call, innermost first: what tells one place of a program from another."""


@dataclass(frozen=True)
class Repair:
    """One change.

    Attributes:
        change: in words, as in "with all_reduce(MAX) in place of all_reduce(SUM) at layer.py:12".
        meaning: the fault that it would take back.
        sites: the frames of what is changed, which tell apart what the text does not.
        perturb: changes what collectives hand to their ranks; None = nothing.
        around: surrounds the program of every rank, in its thread.
        circumstances: fields of the case that are changed.
    """

    change: str
    meaning: str
    sites: Sites = ()
    perturb: Perturb | None = None
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    circumstances: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, Sites]:
        """What tells it from other repairs, in any case."""
        return self.change, self.sites

    @property
    def diagnosis(self) -> str:
        """What is said of a tensor that it mends."""
        called = f" (called from {self.sites[1]})" if len(self.sites) > 1 and self.sites[1].filename != self.sites[0].filename else ""
        return f"right {self.change}{called}: {self.meaning} fits this"


def at(sites: Sites) -> str:
    """Where that is, in words."""
    return f" at {sites[0]}" if sites else ""
