"""Check ``contribution``: in half precision, how often each rank's part of a sum and each bias count, as a number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tpverify.checks.finding import Finding
from tpverify.checks.margin import note
from tpverify.run import Comparison, Placed
from tpverify.sharding import Replicate, unshard
from tpverify.tolerance import unit_roundoff

PER_UNKNOWN = 8
"""Different numbers that a tensor must have for each coefficient: with fewer, noise fits anything."""

HALF_A_TIME, ERRORS = 0.5, 8.0
"""A coefficient is a finding where it is beyond half a contribution, beyond so many of its standard errors, and beyond what it
would be if all roundings together looked like what that addend has and the others have not: they do where few numbers are distinct,
and where all addends are functions of one number, so that they are nearly alike, and roundings one more such function."""


def contribution(comparison: Comparison) -> list[Finding] | None:
    """In half precision, every rank's part of a reduction and every bias count once in its result.

    What a result ``t`` is off by, ``t - o``, is split by least squares into the ranks' parts, as captured where they were
    reduced, and the biases. In correct code it is rounding noise, which has next to nothing of any of them. A part that is
    missing has the coefficient -1, one that counts twice +1, and a bias that W ranks have added, W - 1. No norm comes into it,
    so that a small contribution among large ones is seen as well.
    """
    run, oracle = comparison.parallel, comparison.reference.oracle
    if not run.ranks or oracle is None or len(run.ranks) == 1 or comparison.case.calls != "once" or comparison.case.layout == "expanded":
        return None  # tokens that are equal are off by equal amounts, which is no noise
    found: list[Finding] = []
    looked = False
    biases = {name: placed.local for name, placed in comparison.reference.ranks[0].parameters.items() if placed.local is not None}
    for phase, pattern, expected, held in (
        ("forward", "{}", oracle.outputs, [rank.outputs for rank in run.ranks]),
        ("backward", "{}.grad", oracle.input_gradients, [rank.input_gradients for rank in run.ranks]),
    ):
        for name, placed in expected.items():
            result = _logical(placed.local, [part.get(name) for part in held])
            parts = _parts(comparison, phase, placed.local)
            if result is None or placed.local is None or not parts:
                continue
            addends = {f"the part of rank {rank}": part for rank, part in enumerate(parts)}
            addends |= {bias: value for bias, value in biases.items() if phase == "forward" and value.shape == placed.local.shape[-1:]}
            texts = _counted(result.double() - placed.local.double(), addends, unit_roundoff(comparison.dtype))
            looked = looked or texts is not None
            label = pattern.format(name)
            found += [
                Finding(tuple(range(len(run.ranks))), label, f"Expected each contribution to {label} once but {text}")
                for text in texts or ()
            ]
    return found if looked else None


def _logical(whole: torch.Tensor | None, parts: Sequence[Placed | None]) -> torch.Tensor | None:
    locals_ = [part.local for part in parts if part is not None and part.local is not None]
    if whole is None or len(locals_) != len(parts) or parts[0] is None:
        return None
    layout = parts[0].layout
    if isinstance(layout, Replicate):
        return locals_[0] if locals_[0].shape == whole.shape else None
    try:
        return unshard(locals_, layout, whole.shape)
    except ValueError:
        return None


def _parts(comparison: Comparison, phase: str, result: torch.Tensor | None) -> list[torch.Tensor]:
    """What each rank brought to the last sum of the phase that has the result's shape."""
    parts = []
    for rank in comparison.members:
        records = [
            record
            for record in comparison.parallel.ledger.rank(rank)
            if record.payload and record.phase == phase and record.group_ranks == comparison.members and record.reduce_op == "SUM"
        ]
        fitting = [record.payload[0] for record in records if result is not None and record.payload[0].shape == result.shape]
        parts += fitting[-1:]
    return parts if len(parts) == len(comparison.members) else []


def _counted(difference: torch.Tensor, addends: Mapping[str, torch.Tensor], u: float) -> list[str] | None:
    """What counts too often or not at all; None if the tensor is too small to tell."""
    if len(set(difference.flatten().tolist())) < PER_UNKNOWN * len(addends) or not bool(difference.isfinite().all()):
        return None
    addends = {name: addend for name, addend in addends.items() if bool(addend.any())}
    if not addends:
        return []
    columns = torch.stack([addend.double().expand(difference.shape).reshape(-1) for addend in addends.values()], dim=1)
    sizes = columns.norm(dim=0)
    if not bool(columns.isfinite().all()):
        return None
    coefficients, errors, weights = (scaled / sizes for scaled in _least_squares(columns / sizes, difference.reshape(-1)))
    roundings = 2 * len(addends) ** 0.5 * u * float(sizes.norm()) * weights
    texts = []
    for name, coefficient, error, alike in zip(addends, coefficients.tolist(), errors.tolist(), roundings.tolist(), strict=True):
        limit = max(HALF_A_TIME, ERRORS * error, alike)
        note(abs(coefficient) / limit)
        if abs(coefficient) > limit:
            texts.append(f"{name} counts {1 + coefficient:.2f} times (by least squares, standard error {error:.1g})")
    return texts


def _least_squares(columns: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The coefficients of the columns in ``values``, their standard errors, and how large values of norm 1 can make them.

    Errors of rounding grow with the number that is rounded, so that no one size of noise holds for all elements: each
    element's own residual stands for its noise, the larger the more that element alone decides (White's estimate, as HC3).
    """
    inverse = torch.linalg.pinv(columns, rtol=1e-6)
    coefficients = inverse @ values
    leverage = (columns * inverse.T).sum(1).clamp(max=1 - 1e-6)
    residuals = (values - columns @ coefficients) / (1 - leverage)
    return coefficients, (inverse * residuals).norm(dim=1), inverse.norm(dim=1)
