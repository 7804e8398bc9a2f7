"""When a result in half precision is right: by its error, and by its scale, each beside that of the single-device run."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tpverify.tolerance import unit_roundoff

ROW, TYPICAL = 8.0, 4.0
"""Roundings of a row's own norm, and of the typical row's, that nobody need answer for; see :func:`allowed_errors`."""

SCALE = 0.64
"""Roundings by which the scale of even a large tensor may be off: 2.5e-3 in bfloat16; see :func:`allowed_scale`."""


TAIL = 2.0
"""What a rare row is off by, relative to the largest error that five runs show."""

LEFT = 1 / 8
"""Of a row's norm: with a larger error the row has less than three bits."""

INDEPENDENT = 4.0
"""Standard deviations of a sum of errors of independent sign."""


@dataclass(frozen=True)
class Spread:
    """How far the single-device run is from the oracle, and the oracle from itself, when all values are off by a rounding.

    Attributes:
        error: by element, the largest such difference, float64.
        inside: by element, the largest error of single-device runs whose operations round at random, float64.
        scale: the largest error of the scale of a single-device run, see :func:`scale_of`.
    """

    error: torch.Tensor
    inside: torch.Tensor
    scale: float


def allowed_errors(
    single: torch.Tensor, oracle: torch.Tensor, world_size: int, dtype: torch.dtype, spread: Spread | None = None
) -> torch.Tensor:
    """By row, the norm that the error of correct parallel code may have: ``(1 + 2 sqrt(W)) |s - o| + 8u |o| + 4u |o|_F / sqrt(rows)``.

    In half precision values say little: two correct runs differ in every second digit that there is. What correct code has in
    common is the size of its error. ``o``, the oracle, is the reference in float64 from the same rounded values, ``s`` the same
    reference in the working dtype. The parallel run does what ``s`` does, and beyond that rounds each of the W partial results
    to the working dtype, and each of the W - 1 sums of them: 2W roundings of independent sign, each no larger than those of
    the single-device run, which add up like a random walk: ``2 sqrt(W)`` times one. (A factor that does not grow with W fails
    in correct code at W = 8.) A single-device run that happens to hit the oracle would leave no room at all; so a row has 8
    roundings of its own norm, three bits of the eight in bfloat16, and 4 of the typical row's, since a row that nearly
    cancels is as wrong as the terms that cancelled. Nothing here depends on which tensor it is.

    That is enough where a row holds some numbers. In a tensor of very few, all of which nearly cancel, the norms of ``s - o``
    and ``o`` are both far below the terms'. A case that fails is therefore looked at again with a ``spread``: the largest error
    of single-device runs from values that are off by a rounding, and the largest change of the oracle for the same values.
    The first is ``|s - o|`` without its luck, the second has the size of a rounding of the terms. Both count twice: the largest
    of five is a bit more than one standard deviation of a row's error, and a case has hundreds of rows, a campaign millions.

    What is equal stays equal when values move: where tokens repeat, so do keys, and the gradients of their queries are differences
    of equal numbers, zero by luck in ``s`` and noise in other correct code. That shows in single-device runs whose operations
    round at random (:class:`tpverify.rounding.RandomRounding`). They count where they leave a row less than three bits.

    Args:
        single, oracle: ``s`` and ``o``, of one shape.
        world_size: W.
        dtype: the working dtype; u is its unit roundoff.
        spread: of these rows; taken in the place of ``|s - o|`` where it is the larger.

    Returns:
        float64, of shape ``oracle.shape[:-1]``; a tensor of less than two dimensions is one row.
    """
    wide = _rows(oracle.double())
    own = _norms(wide)
    typical = _norms(own.flatten()) / math.sqrt(max(1, own.numel()))
    error = _differences(single, oracle)
    if spread is not None:
        inside = _rows(spread.inside)
        cancelled = _norms(inside) > LEFT * own
        error = torch.maximum(error, TAIL * torch.maximum(_rows(spread.error), torch.where(cancelled.unsqueeze(-1), inside, 0.0)))
    u = unit_roundoff(dtype)
    return (1 + 2 * math.sqrt(world_size)) * _norms(error) + ROW * u * own + TYPICAL * u * typical


def scale_of(actual: torch.Tensor, oracle: torch.Tensor) -> float:
    """``<t, o> / <o, o>``: the factor by which ``actual`` is the oracle, everything else left out; 1 where the oracle is zero."""
    o, t = oracle.double().flatten(), actual.double().flatten()
    square = float(o @ o)
    return float(t @ o) / square if square > 0 else 1.0


def allowed_scale(
    actual: torch.Tensor,
    single: torch.Tensor,
    oracle: torch.Tensor,
    elements: int,
    world_size: int,
    dtype: torch.dtype,
    spread: Spread | None = None,
) -> float:
    """How far the scales of two correct runs may be apart: ``max(8e / sqrt(n), 0.64e) + (1 + 2 sqrt(W)) |scale of s - 1|``.

    A loss that is 1 % too large makes every gradient 1 % too large: less than two roundings of bfloat16, so that no norm
    of an error tells it from noise. Roundings are as often up as down, though, and a factor of everything is not: of n
    elements' roundings ``8u / sqrt(n)`` is left in the scale, while the factor stays. Errors that whole tensors share (of one
    weight, in all tokens) do not average out with n; hence a floor of 0.64u, 2.5e-3 in bfloat16, four times below one per cent.

    Where layers follow one another, errors are larger than a rounding, and their share in the scale with them. How large, the
    single-device run shows: e is its relative error, or u where that is the larger. What its own scale is off by, the
    parallel run's may be too, with the factor of :func:`allowed_errors`.

    As there, a case that fails is looked at again, and then ``4 |t - o| / (|o| sqrt(n))`` is allowed as well, where that is more
    than the first term: errors of independent sign have a share of about ``1 / sqrt(n)`` of their norm in the direction of ``o``,
    four times that in one case of 16,000; a factor has all of its norm there. Of up to 16 elements this tells nothing.

    Args:
        actual, single, oracle: ``t``, ``s`` and ``o``, of one shape; replicas may stand there more than once.
        elements: n, how many numbers the tensor has.
        spread: from further runs of the reference; None = at first sight.
    """
    t, s, o = (tensor.double().flatten() for tensor in (actual, single, oracle))
    size = float(o.norm())
    if not size > 0:
        return math.inf
    e = max(unit_roundoff(dtype), float((s - o).norm()) / size)
    own = abs(scale_of(single, oracle) - 1.0)
    averaged = ROW * e
    if spread is not None:
        own = max(own, spread.scale)
        averaged = max(averaged, INDEPENDENT * float((t - o).norm()) / size)
    return max(averaged / math.sqrt(elements), SCALE * e) + (1 + 2 * math.sqrt(world_size)) * own


def error_norms(actual: torch.Tensor, oracle: torch.Tensor) -> torch.Tensor:
    """By row, the norm of ``actual - oracle``; infinite where only one side is a number, or both are other infinities."""
    return _norms(_differences(actual, oracle))


def row_ratios(
    actual: torch.Tensor,
    single: torch.Tensor,
    oracle: torch.Tensor,
    world_size: int,
    dtype: torch.dtype,
    spread: Spread | None = None,
    noise: float = 0.0,
) -> torch.Tensor:
    """By row, the error relative to what is allowed: beyond 1 it is a violation; see :func:`allowed_errors`.

    Args:
        actual, single, oracle: ``t``, ``s`` and ``o``, of one shape, on the CPU.
        noise: norm of one rounding in a row of the terms, where those cancel: a gradient that is smaller, over the whole tensor,
            than a rounding of the case's largest gradient is the difference of equal numbers, as that of a key's bias, which
            softmax does not see. ``s`` and ``t`` then hold nothing but roundings of what cancelled.
    """
    allowed = allowed_errors(single, oracle, world_size, dtype, spread) + noise
    error = error_norms(actual, oracle)
    # Where the single-device run is infinitely wrong, anything is allowed.
    return torch.where((error == 0) | ~allowed.isfinite(), 0.0, error / allowed)


def _differences(actual: torch.Tensor, oracle: torch.Tensor) -> torch.Tensor:
    a, o = _rows(actual.double()), _rows(oracle.double())
    return torch.where((a == o) | (a.isnan() & o.isnan()), 0.0, (a - o).abs().nan_to_num(nan=math.inf))


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(tensor.shape or (1,))


def _norms(rows: torch.Tensor) -> torch.Tensor:
    norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=-1)
    return norms
