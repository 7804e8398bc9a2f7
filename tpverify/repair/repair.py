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
        perturb: changes what collectives hand to their ranks; None = nothing.
        around: surrounds the program of every rank, in its thread.
        circumstances: fields of the case that are changed.
    """

    change: str
    meaning: str
    perturb: Perturb | None = None
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    circumstances: Mapping[str, Any] = field(default_factory=dict)

    @property
    def diagnosis(self) -> str:
        """What is said of a tensor that it mends."""
        return f"right {self.change}: {self.meaning} fits this"


def at(sites: Sites) -> str:
    """Where that is, in words."""
    return f" at {sites[0]}" if sites else ""
