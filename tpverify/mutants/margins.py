"""The margin of a check: how far its weakest killed mutant lies above the worst that correct code does, both relative to the bound."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tpverify.checks.catalogue import CHECKS
from tpverify.options import DTYPES

LEAST = 10.0
"""A check whose margin is smaller has its bound in a place where chance decides."""

WIDE = ("float64", "float32")
"""Dtypes in which that is asked for. In half precision a single number is rounded by as much as some bugs are large: nothing that
looks at one case can have such a margin there, and what is printed says how far such bugs stand out."""

Ratios = Mapping[tuple[str, str], float]
"""By check and working dtype: the largest error of any tensor relative to its bound."""


@dataclass(frozen=True)
class Strength:
    """How clearly a mutant is killed.

    Attributes:
        id: of the mutant.
        check, dtype: what killed it, and the working dtype of the case.
        ratio: the largest error relative to its bound on the shrunk case; above 1. In half precision on any case that was drawn:
            shrinking goes on until a bug hardly stands out.
    """

    id: str
    check: str
    dtype: str
    ratio: float


@dataclass(frozen=True)
class Margin:
    """Of one check in one working dtype.

    Attributes:
        check, dtype: which.
        clean: the largest error of correct code relative to its bound; below 1.
        weakest: the mutant killed least clearly; None where none is killed by this check in this dtype.
    """

    check: str
    dtype: str
    clean: float
    weakest: Strength | None

    @property
    def value(self) -> float:
        """Weakest killed over largest clean; infinite where nothing is killed, or correct code has no error at all."""
        return self.weakest.ratio / self.clean if self.weakest and self.clean else math.inf

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready data; numbers that are not finite as None."""
        known = self.weakest is not None and math.isfinite(self.value)
        return {
            "check": self.check,
            "dtype": self.dtype,
            "clean": float(f"{self.clean:.4g}"),
            "weakest": self.weakest.id if self.weakest else "",
            "killed": float(f"{self.weakest.ratio:.4g}") if self.weakest else None,
            "margin": float(f"{self.value:.4g}") if known else None,
        }


def margins_of(strengths: Iterable[Strength], clean: Iterable[Ratios]) -> tuple[Margin, ...]:
    """The margin of every check and dtype in which correct code was measured or a mutant killed, in their order.

    Args:
        clean: of each correct subject.
    """
    largest: dict[tuple[str, str], float] = {}
    for ratios in clean:
        for key, ratio in ratios.items():
            largest[key] = max(ratio, largest.get(key, 0.0))
    weakest: dict[tuple[str, str], Strength] = {}
    for strength in strengths:
        key = (strength.check, strength.dtype)
        if key not in weakest or strength.ratio < weakest[key].ratio:
            weakest[key] = strength
    keys = [(check, dtype) for check in CHECKS for dtype in DTYPES if (check, dtype) in largest or (check, dtype) in weakest]
    return tuple(Margin(*key, largest.get(key, 0.0), weakest.get(key)) for key in keys)
