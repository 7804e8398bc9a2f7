"""When two tensors agree: exactly, to within the rounding of another order of summation, or bit by bit."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

SAFETY = 64.0
"""Factor between the typical rounding error and the bound; see :func:`tolerance`."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of one rounding to ``dtype``: 2**-53 for float64, 2**-24, 2**-11 (float16), 2**-8 (bfloat16).

    Raises:
        TypeError: ``dtype`` is not a floating-point dtype.
    """
    if not dtype.is_floating_point:
        raise TypeError(f"Expected a floating-point dtype but got dtype={dtype}")
    return torch.finfo(dtype).eps / 2


def exact_limit(dtype: torch.dtype) -> int:
    """Up to this magnitude every integer is a number of ``dtype``: 2**53 for float64, 2**24, 2**11 (float16), 2**8 (bfloat16).

    Sums of integers that stay below it are exact in every order, so that a TP result equals its reference bit by bit.

    Raises:
        TypeError: ``dtype`` is not a floating-point dtype.
    """
    return round(1 / unit_roundoff(dtype))


def exact_magnitude(terms: int, dtype: torch.dtype) -> int:
    """The largest m such that a sum of ``terms`` products of integers of magnitude m at most is exact in ``dtype``.

    Every partial sum, whatever the order and however the terms are dealt out to ranks, has magnitude ``terms * m * m`` at
    most; m is the largest integer that keeps this below :func:`exact_limit`. 0 means that no non-zero integers do.

    Raises:
        TypeError: ``dtype`` is not a floating-point dtype.
        ValueError: ``terms`` is less than 1.
    """
    _at_least_one("terms", terms)
    return math.isqrt((exact_limit(dtype) - 1) // terms)


def tolerance(dtype: torch.dtype, depth: int, terms: int) -> float:
    """Bound on the relative error between correct code and its reference: ``64 * u * depth * sqrt(terms)``.

    Tensor parallelism changes one thing about the arithmetic: the order in which sums are added up. A sum of K terms rounds
    K times, each time by at most u times the partial sum reached so far. Roundings are as often up as down, so their
    errors add up like a random walk. Terms of random sign: the partial sum after j terms has size sqrt(j), the errors
    add up to u * sqrt(1 + ... + K) = u * K / sqrt(2), relative to a result of size sqrt(K) that is u * sqrt(K / 2). Terms
    of one sign: partial sums grow like j, and u * sqrt(1 + 4 + ... + K*K) relative to K is u * sqrt(K / 3). Either way
    u * sqrt(K), not the worst case u * K. A layer hands its error on, with a factor near 1 as long as values are
    normalised, and adds its own: the errors of ``depth`` layers add up to ``depth`` times one layer's at most.

    The factor 64 covers what the walk leaves out: both sides round, the norm of the worst row is several times the typical
    one's, functions between the sums (exponentials, divisions by a spread) amplify, and backward goes through everything
    again. It need not be sharp: in float64 the bound is near 1e-13, where a missing, doubled or misplaced contribution is
    an error of the size of that contribution.

    Args:
        dtype: narrowest dtype on the path.
        depth: number of layers, or of matrix products, that follow one another.
        terms: length of the longest sum: hidden or ffn size, tokens for weight gradients, vocabulary for a loss.

    Raises:
        TypeError: ``dtype`` is not a floating-point dtype.
        ValueError: ``depth`` or ``terms`` is less than 1.
    """
    _at_least_one("depth", depth)
    _at_least_one("terms", terms)
    return SAFETY * unit_roundoff(dtype) * depth * math.sqrt(terms)


def relative_error(actual: torch.Tensor, expected: torch.Tensor, *, scale: float | None = None) -> float:
    """Frobenius norm of ``actual - expected`` relative to that of ``expected``, or to ``scale`` where that is larger.

    NaN and infinities count as equal where both sides hold the same at the same position, and make the error infinite
    elsewhere. Where ``expected`` is all zero and there is no ``scale``, any other ``actual`` has an infinite error. An empty
    tensor has the error 0.

    Args:
        actual, expected: tensors of one shape, any dtype or device; compared in double precision.
        scale: see :func:`compare`.

    Raises:
        ValueError: the shapes differ.
    """
    difference, magnitude = _difference(actual, expected)
    return float(_ratio(_norm(difference.flatten()), _norm(magnitude.flatten()).clamp(min=scale or 0.0)))


def row_errors(actual: torch.Tensor, expected: torch.Tensor, *, scale: float | None = None) -> torch.Tensor:
    """The error of each row relative to the larger of the expected row's norm and the tensor's typical row norm.

    A row runs along the last dimension; a 0-d or 1-d tensor is one row. The typical row norm is the root mean square over
    rows. Without it a row whose terms nearly cancel would be held to digits that it does not have; with it, one wrong
    row among many right ones still weighs as much as if it were alone.

    Args:
        actual, expected: as for :func:`relative_error`, and so are NaN, infinities and zeros.
        scale: see :func:`compare`; shared out evenly over rows.

    Returns:
        float64 errors on the CPU, of shape ``expected.shape[:-1]``.

    Raises:
        ValueError: the shapes differ.
    """
    difference, magnitude = _difference(actual, expected)
    return _ratio(_norm(difference), _row_size(magnitude, scale or 0.0))


@dataclass(frozen=True)
class Mismatch:
    """How two tensors differ beyond the bound.

    Attributes:
        relative: error over the whole tensor, see :func:`relative_error`.
        row_relative: largest error of a row, see :func:`row_errors`.
        bound: what neither may exceed.
        worst_index: index of the element that differs most, relative to its row.
        actual_value, expected_value: the two values there.
        mismatched: number of elements beyond their share of the bound: that of their row over sqrt(length of the row).
        total: number of elements.
    """

    relative: float
    row_relative: float
    bound: float
    worst_index: tuple[int, ...]
    actual_value: float | complex
    expected_value: float | complex
    mismatched: int
    total: int


def compare(actual: torch.Tensor, expected: torch.Tensor, *, bound: float, scale: float | None = None) -> Mismatch | None:
    """None if the tensors agree to within ``bound``, as a whole and row by row; otherwise how they differ.

    Some correct tensors are zero but for rounding, because their terms cancel: the gradient of a key bias, which softmax
    does not see, or of the input of a normalisation along its mean. Both sides then hold nothing but noise, and relative
    to noise every difference is large. ``scale`` is the Frobenius norm that the tensor would have without the cancellation
    (that of the terms that cancelled, such as the query bias's gradient); errors are taken relative to it where it is
    the larger. It comes from the data of the case. A constant would not do: it is too strict for large values and
    hides every bug in small ones.

    Args:
        actual, expected: tensors of one shape, any dtype or device.
        bound: largest relative error allowed, see :func:`tolerance`; 0 asks for equal values.
        scale: None (nothing is noise) unless the caller knows better.

    Raises:
        ValueError: the shapes differ.
    """
    if _clearly_equal(actual, expected, bound):
        return None
    difference, magnitude = _difference(actual, expected)
    if not difference.numel():
        return None
    relative = float(_ratio(_norm(difference.flatten()), _norm(magnitude.flatten()).clamp(min=scale or 0.0)))
    row_size = _row_size(magnitude, scale or 0.0)
    row_relative = float(_ratio(_norm(difference), row_size).max())
    if relative <= bound and row_relative <= bound:
        return None
    shares = _ratio(difference, row_size.unsqueeze(-1)) * math.sqrt(difference.shape[-1])
    worst = tuple(int(i) for i in torch.unravel_index(shares.argmax(), expected.shape)) if expected.dim() else ()
    return Mismatch(
        relative=relative,
        row_relative=row_relative,
        bound=bound,
        worst_index=worst,
        actual_value=actual[worst].item(),
        expected_value=expected[worst].item(),
        # The whole can exceed the bound by a hair while no row does; something differs all the same.
        mismatched=max(1, int((shares > bound).sum())),
        total=expected.numel(),
    )


def bitwise_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether dtype, shape and every bit agree; a NaN agrees with any NaN.

    Meant for replicas and for repeated runs, which do the same operations in the same order: there +0 and -0 differ, since
    they tell that something was computed differently. To compare a TP result with its reference exactly, by value, use
    ``torch.equal``: another order of summation may turn +0 into -0.
    """
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = (tensor.detach().cpu().resolve_conj().resolve_neg() for tensor in (a, b))
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if not a.is_floating_point():
        return torch.equal(a, b)
    bits = _BITS[a.element_size()]
    same = a.view(bits) == b.view(bits)
    return bool(same.all()) or bool((same | (a.isnan() & b.isnan())).all())


def _clearly_equal(actual: torch.Tensor, expected: torch.Tensor, bound: float) -> bool:
    """A cheap sufficient condition: the largest difference everywhere would still be within the bound, in every row.

    No row is held against less than the typical row norm, so ``d * sqrt(columns) <= bound * norm / sqrt(rows)`` is enough.
    """
    if actual.shape != expected.shape or actual.dtype != torch.float64 or expected.dtype != torch.float64 or not expected.numel():
        return False
    actual, expected = actual.detach(), expected.detach()
    largest = float((actual - expected).abs().max())
    if largest == 0.0:
        return True
    norm = float(torch.linalg.vector_norm(expected))
    # Below the smallest normal number squared, a norm is no longer to be trusted; NaN compares as false.
    return 1e-150 < norm < 1e150 and largest * math.sqrt(expected.numel()) <= bound * norm


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"Expected {name} to be at least 1 but got {name}={value}")


def _difference(actual: torch.Tensor, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """|actual - expected| and |expected| as float64, at least 1-d; infinite differences where only one side is finite."""
    if actual.shape != expected.shape:
        raise ValueError(f"Expected tensors of one shape but got actual={tuple(actual.shape)}, expected={tuple(expected.shape)}")
    wide = torch.complex128 if actual.is_complex() or expected.is_complex() else torch.float64
    a, e = (tensor.detach().to("cpu", wide).reshape(expected.shape or (1,)) for tensor in (actual, expected))
    difference = (a - e).abs()
    magnitude = e.abs()
    finite = a.isfinite() & e.isfinite()
    if not finite.all():
        equal = (a == e) | (a.isnan() & e.isnan())
        difference = torch.where(finite, difference, torch.where(equal, 0.0, math.inf).to(difference))
        magnitude = torch.where(finite, magnitude, 0.0)
    return difference, magnitude


def _norm(magnitudes: torch.Tensor) -> torch.Tensor:
    """2-norm along the last dimension; scaled, so that neither huge nor tiny values leave the range of float64 when squared."""
    if not magnitudes.shape[-1]:
        return magnitudes.new_zeros(magnitudes.shape[:-1])
    largest = magnitudes.amax(-1, keepdim=True)
    scaled = torch.where((largest > 0) & largest.isfinite(), magnitudes / largest, 0.0)
    return torch.where(largest.isfinite(), largest * torch.linalg.vector_norm(scaled, dim=-1, keepdim=True), largest).squeeze(-1)


def _row_size(magnitude: torch.Tensor, scale: float) -> torch.Tensor:
    """What the error of each row is relative to: the larger of its own norm, the typical one and its share of ``scale``."""
    rows = _norm(magnitude)
    share = 1 / math.sqrt(max(1, rows.numel()))
    typical = _norm(rows.flatten()) * share
    return torch.maximum(rows, typical).clamp(min=scale * share)


def _ratio(error: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """``error / size``, where 0 / 0 is 0; a size that overflowed must not make an error vanish."""
    return torch.where(error == 0, 0.0, error / size.clamp(max=torch.finfo(size.dtype).max))
