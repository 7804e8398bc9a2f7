"""Repairs of the case instead of the program: what is right in plainer circumstances depends on them."""

from __future__ import annotations

from collections.abc import Iterator

from tpverify.case import Case
from tpverify.repair.repair import Repair

PLAIN = (
    ("calls", "once", "if the module is called once only", "what an earlier call left behind, stale data"),
    ("layout", "contiguous", "if all tensors are contiguous", "memory read without regard to its strides"),
    ("groups", "world", "if there is one TP group in the world", "a wrong group or rank"),
)
"""Fields of a case, the plainer value, in words, and what it means if that is right."""


def of_cases(case: Case) -> Iterator[Repair]:
    """All plainer circumstances."""
    for field, value, change, meaning in PLAIN:
        if getattr(case, field) != value:
            yield Repair(change, meaning, circumstances={field: value})
