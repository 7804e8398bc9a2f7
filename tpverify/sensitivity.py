"""How many digits a case can be held to: what roundings of the inputs alone do to each of the reference's tensors."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch

from tpverify import values
from tpverify.checks.finding import gradient_scale
from tpverify.errors import SubjectError
from tpverify.low_precision import Spread, scale_of
from tpverify.options import CPU
from tpverify.run import Comparison, RankRun
from tpverify.runner import run_reference
from tpverify.tolerance import relative_error, row_errors, unit_roundoff

REPEATS = 5
"""How often the reference runs with values that are off by a rounding."""


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
    """Half precision, by tensor label: how far runs of the reference are off when all values are off by one rounding each.

    Args:
        group, device: as for :func:`sensitivity`.
    """
    subject, case = comparison.subject, comparison.case
    assert comparison.reference.oracle is not None
    base = dict(_tensors(comparison.reference.oracle))
    found = {label: Spread(torch.zeros_like(tensor), 0.0) for label, tensor in base.items() if tensor.is_floating_point()}
    for repeat in range(REPEATS):
        sides = []
        for dtype in (None, torch.float64):
            with values.shaken(repeat, 2 * unit_roundoff(comparison.dtype)), contextlib.suppress(SubjectError):
                sides.append(dict(_tensors(run_reference(subject, case, group, False, device, dtype).run.ranks[0])))
        if len(sides) < 2:
            continue  # the values as drawn do run; others are of no use then
        single, oracle = sides
        for label, known in found.items():
            tensors = [side.get(label) for side in (single, oracle)]
            if all(tensor is not None and tensor.shape == base[label].shape for tensor in tensors):
                found[label] = _wider(known, single[label], oracle[label], base[label])
    return found


def _wider(known: Spread, single: torch.Tensor, oracle: torch.Tensor, base: torch.Tensor) -> Spread:
    error, moved = ((a.double() - b.double()).abs().nan_to_num(nan=0.0) for a, b in ((single, oracle), (oracle, base)))
    scale = abs(scale_of(single, oracle) - 1.0)
    return Spread(torch.maximum(known.error, torch.maximum(error, moved)), max(known.scale, scale if math.isfinite(scale) else 0.0))


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
