"""How many digits a case can be held to: what roundings of the inputs alone do to each of the reference's tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from tpverify import values
from tpverify.checks.finding import gradient_scale
from tpverify.errors import SubjectError
from tpverify.low_precision import Spread, scale_of
from tpverify.options import CPU
from tpverify.rounding import RandomRounding
from tpverify.run import Comparison, RankRun
from tpverify.runner import run_reference
from tpverify.tolerance import relative_error, row_errors, unit_roundoff

REPEATS = 5
"""How often the reference runs with values that are off by a rounding."""
ROUNDED = 10
"""How often it runs with operations that round at random, of which each does so in one place of six."""


def measure(comparisons: Sequence[Comparison], device: str = CPU) -> None:
    """Find out what roundings do to the references of one case, one for each TP group, and hold the comparisons to that."""
    for group, comparison in enumerate(comparisons):
        if comparison.reference.oracle is not None:
            comparison.reference.spread = spread(comparison, group, device)
        elif comparison.reference.ranks:
            comparison.reference.sensitivity = sensitivity(comparison, group, device)


def hold_alike(comparisons: Sequence[Comparison], measured: Sequence[Comparison]) -> None:
    """Hold the comparisons of a case to what was measured of it before."""
    for comparison, known in zip(comparisons, measured, strict=True):
        comparison.reference.sensitivity = known.reference.sensitivity
        comparison.reference.spread = known.reference.spread


def spread(comparison: Comparison, group: int, device: str = CPU) -> dict[str, Spread]:
    """Half precision, by tensor label: how far runs of the reference are off when all values, or all results of operations, are.

    Values that are off by a rounding leave alike what is alike: repeated tokens have equal keys, whose differences stay zero. In
    the second place each operation rounds at random, as correct code of another order does. The scale comes of the first alone: a
    rounding of a loss, which is one number, is a factor.

    Args:
        group, device: as for :func:`sensitivity`.
    """
    subject, case = comparison.subject, comparison.case
    assert comparison.reference.oracle is not None
    base = dict(_tensors(comparison.reference.oracle))
    found = {label: _nothing(tensor) for label, tensor in base.items() if tensor.is_floating_point()}
    rounding = 2 * unit_roundoff(comparison.dtype)

    def tensors(values_as: AbstractContextManager[None], dtype: torch.dtype | None, arithmetic: Any = None) -> dict[str, torch.Tensor]:
        """Of a further run; none where the reference does not take other values, or other arithmetic."""
        with values_as, contextlib.suppress(SubjectError):
            return dict(_tensors(run_reference(subject, case, group, False, device, dtype, arithmetic).run.ranks[0]))
        return {}

    for repeat in range(REPEATS):
        single, oracle = (tensors(values.shaken(repeat, rounding), dtype) for dtype in (None, torch.float64))
        for label, known in found.items():
            found[label] = _wider(known, base[label], single.get(label), oracle.get(label))
    for repeat in range(ROUNDED):
        inside = tensors(contextlib.nullcontext(), None, RandomRounding(repeat))
        for label, known in found.items():
            found[label] = dataclasses.replace(known, inside=_farther(known.inside, inside.get(label), base[label]))
    return found


def _nothing(tensor: torch.Tensor) -> Spread:
    return Spread(torch.zeros_like(tensor), torch.zeros_like(tensor), 0.0)


def _wider(known: Spread, base: torch.Tensor, single: torch.Tensor | None, oracle: torch.Tensor | None) -> Spread:
    if single is None or oracle is None or not single.shape == oracle.shape == base.shape:
        return known  # the values as drawn do run; others are of no use then
    apart = abs(scale_of(single, oracle) - 1.0)
    error = _farther(_farther(known.error, single, oracle), oracle, base)
    return Spread(error, known.inside, max(known.scale, apart if math.isfinite(apart) else 0.0))


def _farther(known: torch.Tensor, one: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """By element, the larger of what is known and how far two tensors are apart, if there are two."""
    if one is None or one.shape != other.shape:
        return known
    return torch.maximum(known, (one.double() - other.double()).abs().nan_to_num(nan=0.0))


def sensitivity(comparison: Comparison, group: int, device: str = CPU) -> dict[str, float]:
    """By tensor label, the largest relative change when parameters, inputs and cotangents are off by one rounding each.

    Correct parallel code makes errors of that size inside, where nobody can see them; a tensor that amplifies them cannot
    be held to more. Errors are taken as :func:`tpverify.tolerance.compare` takes them, over the whole and over the worst row.

    Args:
        group: index of the TP group.
        device: where the reference computes.
    """
    subject, case = comparison.subject, comparison.case
    base = dict(_tensors(comparison.reference.ranks[0]))
    rms = gradient_scale(comparison)
    worst = dict.fromkeys(base, 0.0)
    for repeat in range(REPEATS):
        with values.shaken(repeat, 2 * unit_roundoff(comparison.dtype)):
            try:
                moved = dict(_tensors(run_reference(subject, case, group, False, device).run.ranks[0]))
            except SubjectError:
                continue  # the values as drawn do run; others are of no use then
        for label, tensor in base.items():
            other = moved.get(label)
            if other is not None and other.shape == tensor.shape and tensor.numel() and tensor.is_floating_point():
                scale = rms * tensor.numel() ** 0.5 if label.endswith(".grad") else None
                rows = float(row_errors(other, tensor, scale=scale).max())
                worst[label] = max(worst[label], rows, relative_error(other, tensor, scale=scale))
    return worst


def _tensors(run: RankRun) -> Iterator[tuple[str, torch.Tensor]]:
    for kind, pattern in (("outputs", "{}"), ("input_gradients", "{}.grad"), ("parameter_gradients", "{}.grad")):
        for name, placed in getattr(run, kind).items():
            if placed.local is not None:
                yield pattern.format(name), placed.local
