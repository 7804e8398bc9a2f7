"""What a check answers, and the comparisons that several checks share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from tpverify.case import without_call
from tpverify.checks.diagnosing import is_diagnosed
from tpverify.checks.diagnosis import DETACHED, diagnose, narrower
from tpverify.checks.errors import Errors, oracle_of
from tpverify.checks.margin import is_measured, note
from tpverify.checks.rearranged import same
from tpverify.checks.summands import explain_by_summands
from tpverify.run import Comparison, Placed
from tpverify.sharding import Partial, Replicate, describe, local_shape, shard
from tpverify.tolerance import compare, relative_error, row_errors, tolerance, unit_roundoff
from tpverify.values import SPIKE

SENSITIVITY = 64
"""The safety factor of the tolerance, for the same reasons."""

WIDE = 2.0**-24
"""Unit roundoff up to which values are compared with values; beyond, errors with errors."""

MOST_SHARED = 1e-8
"""Far below any bug: planted ones are off by 1e-2 or more."""

LOOSEST = 0.25
"""No bound may let a tensor pass that is zero, doubled or another one."""

FIT = 16.0
"""Roundings of half precision to which a pattern must explain a difference."""

SINGLE = "fits this: if the code is meant to compute in it"
"""Said of errors that are as small as those of single precision."""

ROUNDING = 2e-5
"""Relative errors beyond this are no sign of single precision, however deep the model."""

NOT_ROUNDING = 1e4
"""An error of fewer times the bound is no sign of a narrower dtype, which is coarser by 5e8."""


@dataclass(frozen=True)
class Finding:
    """One broken check, before the case is added.

    Attributes:
        ranks: ranks within the TP group.
        tensor: label of the tensor concerned, or "".
        message: what was expected and what was found.
        diagnosis: one line where an exact pattern fits, or "".
    """

    ranks: tuple[int, ...]
    tensor: str
    message: str
    diagnosis: str = ""


Check = Callable[[Comparison], "list[Finding] | None"]
"""A check: its findings, or None where the case holds nothing for it to look at."""


def bound_of(comparison: Comparison, label: str = "") -> float:
    """Largest relative error of correct code; 0 where arithmetic is exact, which it need not be in half precision on small integers.

    In half precision it is a rough one; :func:`compare_placed` then goes by :mod:`tpverify.low_precision` instead.

    A case that failed is looked at again (traced), and then the bound is at least ``SENSITIVITY`` times what roundings of
    the inputs alone do to the tensor: where a normalisation saturates or terms cancel, correct code cannot agree to more
    digits than that. What such a case does to one tensor loosens the others by ``MOST_SHARED`` at most.
    """
    wide = unit_roundoff(comparison.dtype) <= WIDE
    promised = comparison.case.values == "integers" and comparison.subject.exact_for(comparison.case.config)
    if promised and (wide or comparison.reference.exact):
        return 0.0
    bound = tolerance(comparison.dtype, comparison.reference.depth, comparison.reference.terms)
    if comparison.case.values == "spike":
        bound *= SPIKE  # a relative error u of x is an absolute one of u * |x|, and exp makes that a relative one again
    moved = comparison.reference.sensitivity
    shared = min(SENSITIVITY * max(moved.values(), default=0.0), MOST_SHARED)
    return min(max(bound, shared if wide else 0.0, SENSITIVITY * moved.get(label, 0.0)), LOOSEST)


def fit_of(comparison: Comparison, label: str = "") -> float:
    """Largest relative error of a pattern that explains a difference."""
    bound = bound_of(comparison, label)
    return bound if unit_roundoff(comparison.dtype) <= WIDE else min(bound, FIT * unit_roundoff(comparison.dtype))


def is_finite(comparison: Comparison) -> bool:
    """Whether all of the reference's outputs and gradients are numbers."""
    for reference in (comparison.reference.ranks[0], comparison.reference.oracle or comparison.reference.ranks[0]):
        held = (*reference.outputs.values(), *reference.input_gradients.values(), *reference.parameter_gradients.values())
        if any(is_nan(placed) for placed in held):
            return False
    return True


def is_nan(placed: Placed) -> bool:
    """Whether a tensor holds anything that is no number."""
    return placed.local is not None and bool(placed.local.isnan().any())


def started_backward(comparison: Comparison) -> bool:
    """Whether backward could start everywhere: not from an output of a wrong shape, whose gradients mean nothing."""
    size = comparison.case.world_size
    for rank, run in enumerate(comparison.parallel.ranks):
        for label, placed in comparison.reference.ranks[0].outputs.items():
            held = run.outputs.get(label)
            if placed.local is None or held is None or held.local is None:
                return False
            if tuple(held.local.shape) != local_shape(placed.local.shape, held.layout, rank, size):
                return False
    return True


def gradient_scale(comparison: Comparison) -> float:
    """Largest root mean square of any logical gradient of the case: what a gradient that cancels to zero is noise against."""
    reference = comparison.reference.ranks[0]
    gradients = [placed.local for placed in (*reference.input_gradients.values(), *reference.parameter_gradients.values())]
    sizes = [float(g.norm()) / g.numel() ** 0.5 for g in gradients if g is not None and g.numel()]
    return max((size for size in sizes if size == size and size != float("inf")), default=0.0)


def compare_placed(
    comparison: Comparison,
    label: str,
    expected: torch.Tensor,
    actual: Mapping[int, Placed],
    rms: float = 0.0,
    oracle: torch.Tensor | None = None,
) -> list[Finding]:
    """Compare every rank's part of a tensor with its part of the logical value; a Partial one by the sum over ranks.

    Args:
        label: how the tensor is called in the message.
        expected: the logical tensor.
        actual: by rank; ranks that hold none may be absent.
        rms: root mean square below which differences are noise, see :func:`tpverify.tolerance.compare`.
        oracle: half precision only: the logical tensor in float64; None = that of the reference's oracle.
    """
    oracle = oracle_of(comparison, label) if oracle is None else oracle
    if bool(expected.isnan().any()) or (oracle is not None and bool(oracle.isnan().any())):
        return []  # no number, so nothing to be held to
    if comparison.reference.sensitivity.get(label, 0.0) * SENSITIVITY >= LOOSEST:
        return []  # nothing but rounding: any value is as right as another
    size = comparison.case.world_size
    missing = [rank for rank, placed in actual.items() if placed.local is None and shard(expected, placed.layout, rank, size).numel()]
    if missing and not (len(missing) < len(actual) and all(isinstance(placed.layout, Partial) for placed in actual.values())):
        text = f"Expected {label} to be there but rank{_s(missing)} {_listed(missing)} left None"
        return [Finding(tuple(missing), label, text, DETACHED if label.endswith(".grad") else "")]
    held = {rank: placed for rank, placed in actual.items() if placed.local is not None}
    summed = [placed.local for placed in held.values() if isinstance(placed.layout, Partial) and placed.local is not None]
    if summed and len(summed) == len(held):
        total = torch.stack([_wide(part) for part in summed]).sum(0) if len({t.shape for t in summed}) == 1 else summed[0]
        held = {rank: Placed(total, Replicate()) for rank in held}
    findings: dict[str, list[int]] = {}
    errors = None if oracle is None or not bound_of(comparison) else Errors(comparison, label, expected, oracle, rms)
    for rank, placed in held.items():
        assert placed.local is not None
        part = shard(expected, placed.layout, rank, size)
        text = _shape_difference(label, part, placed.local)
        if not text:
            text = errors.of_rows(placed, rank) if errors else _difference(comparison, label, part, placed.local, rms)
        if text:
            where = f"{describe(placed.layout, size)}, " if not summed else "Partial, summed over ranks, "
            findings.setdefault(f"{text}\n({where}world size {size})", []).append(rank)
    if errors and not findings and (text := errors.of_scale(held)):
        findings[text] = list(held)
    diagnosis = _diagnosis(comparison, label, expected, actual, rms) if findings and is_diagnosed() else ""
    return [Finding(tuple(ranks), label, message, diagnosis) for message, ranks in _merged(findings).items()]


def _diagnosis(comparison: Comparison, label: str, expected: torch.Tensor, actual: Mapping[int, Placed], rms: float) -> str:
    """What may explain a difference: chance, rounding, or else an exact pattern."""
    if comparison.reference.random:
        return "the reference draws random numbers in forward, as dropout does: results can agree only where both sides draw the same"
    wide = {rank: Placed(None if placed.local is None else _wide(placed.local), placed.layout) for rank, placed in actual.items()}
    return _rounding(comparison, expected, wide, rms) or explain(comparison, label, expected, wide)


def explain(comparison: Comparison, label: str, expected: torch.Tensor, actual: Mapping[int, Placed]) -> str:
    """The first exact pattern that fits, in words; "" if none does.

    Args:
        label: how the tensor is called; a gradient's ends with ``.grad``.
        expected: the logical tensor.
        actual: every rank's part, in one layout.
    """
    ids = not expected.is_floating_point() and not expected.is_complex()
    fit = fit_of(comparison, label)
    expected = _wide(expected)
    actual = {rank: Placed(None if placed.local is None else _wide(placed.local), placed.layout) for rank, placed in actual.items()}
    addends = {name: tensor for name, tensor in _addends(comparison).items() if not label.endswith(".grad")}
    unwritten = comparison.case.layout != "contiguous" or any(record.is_async for record in comparison.parallel.ledger)
    line = diagnose(label, expected, actual, comparison.case.world_size, fit, {} if ids else addends, unwritten, ids)
    if line or ids:
        return line
    whole = {rank: placed.local for rank, placed in actual.items() if placed.local is not None and isinstance(placed.layout, Replicate)}
    phase = "backward" if label.endswith(".grad") else "forward"
    return (
        explain_by_summands(comparison, phase, expected, whole if len(whole) == len(actual) else {}, max(fit, 1e-12))
        or _of_another_call(comparison, label, actual, max(fit, 1e-12))
        or narrower(actual, expected, comparison.dtype)
    )


def _of_another_call(comparison: Comparison, label: str, actual: Mapping[int, Placed], fit: float) -> str:
    """Whether ranks hold what belongs to another call of the module."""
    reference, size = comparison.reference.ranks[0], comparison.case.world_size
    for tensors in (reference.outputs, reference.input_gradients):
        for name, placed in tensors.items():
            if (
                name == label.removesuffix(".grad")
                or without_call(name) != without_call(label.removesuffix(".grad"))
                or placed.local is None
            ):
                continue
            parts = {
                rank: shard(placed.local, held.layout, rank, size) for rank, held in actual.items() if not isinstance(held.layout, Partial)
            }
            if parts and all(actual[rank].local is not None and same(_wide(actual[rank].local), _wide(parts[rank]), fit) for rank in parts):  # type: ignore[arg-type]
                return f"it is what {name} should be: stale or never written data fits this"
    return ""


def _rounding(comparison: Comparison, expected: torch.Tensor, actual: Mapping[int, Placed], rms: float) -> str:
    """Whether the rounding of a narrower dtype, or of any dtype where exactness was promised, explains every difference."""
    exact = bound_of(comparison) == 0.0
    dtype = comparison.dtype if exact else torch.float32
    if not expected.is_floating_point() or (dtype is comparison.dtype and not exact) or unit_roundoff(comparison.dtype) > WIDE:
        return ""
    bound = tolerance(dtype, comparison.reference.depth, comparison.reference.terms)
    bound = bound if exact else min(bound, ROUNDING)
    coarse = exact
    for rank, placed in actual.items():
        part = shard(expected, placed.layout, rank, comparison.case.world_size)
        if placed.local is None or isinstance(placed.layout, Partial) or placed.local.shape != part.shape:
            return ""
        scale = rms * part.numel() ** 0.5
        if compare(placed.local, part, bound=bound, scale=scale) is not None:
            return ""
        coarse = coarse or compare(placed.local, part, bound=NOT_ROUNDING * bound_of(comparison), scale=scale) is not None
    if not coarse:
        return ""
    if exact:
        return f"{dtype} rounding fits this: exact=True promises arithmetic without rounding on small integers"
    return f"{dtype} rounding {SINGLE}, the subject needs precision={dtype}"


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_complex() else tensor.double()


def _addends(comparison: Comparison) -> dict[str, torch.Tensor]:
    """What may have been added more or less often than once: biases, rows of tables (positions), activations (residuals)."""
    parameters = comparison.reference.ranks[0].parameters
    vectors = {name: _wide(placed.local) for name, placed in parameters.items() if placed.local is not None and placed.local.dim() == 1}
    tables = {
        f"rows of {name}": _wide(placed.local)
        for name, placed in parameters.items()
        if placed.local is not None and placed.local.dim() == 2
    }
    inputs = {name: _wide(tensor) for name, tensor in comparison.reference.inputs.items() if tensor.is_floating_point()}
    calls = comparison.reference.ranks[0].calls.items()
    activations = {
        f"the input of {path}": _wide(call.inputs[0]) for path, call in calls if call.inputs and call.inputs[0].is_floating_point()
    }
    return vectors | inputs | activations | tables


def _shape_difference(label: str, expected: torch.Tensor, actual: torch.Tensor) -> str:
    if expected.shape == actual.shape:
        return ""
    hint = ": if it is sharded, say so in outputs" if label.startswith("output") else ""
    return f"Expected {label} to have the local shape {tuple(expected.shape)} but got {tuple(actual.shape)}{hint}"


def _difference(comparison: Comparison, label: str, expected: torch.Tensor, actual: torch.Tensor, rms: float) -> str:
    """The first line says what differs; empty if nothing does."""
    bound = bound_of(comparison, label) if expected.is_floating_point() or expected.is_complex() else 0.0
    scale = rms * expected.numel() ** 0.5 if bound else None
    _measure(actual, expected, bound, scale)
    mismatch = compare(actual, expected, bound=bound, scale=scale)
    if mismatch is None:
        return ""
    wanted, got = mismatch.expected_value, mismatch.actual_value
    shown = ".6g" if f"{wanted:.6g}" != f"{got:.6g}" else ".17g"
    allowed = f"at most {bound:.1e}" if bound else "0 (exact on small integers)"
    return (
        f"Expected {label} to equal the reference but {mismatch.mismatched} of {mismatch.total} elements differ\n"
        f"Largest difference at index {mismatch.worst_index}: expected {wanted:{shown}} but got {got:{shown}}\n"
        f"Relative error: {mismatch.relative:.1e}, of the worst row {mismatch.row_relative:.1e} ({allowed} allowed)"
    )


def _measure(actual: torch.Tensor, expected: torch.Tensor, bound: float, scale: float | None) -> None:
    if is_measured() and expected.numel():
        error = max(relative_error(actual, expected, scale=scale), float(row_errors(actual, expected, scale=scale).max()))
        note(0.0 if error == 0.0 else error / bound if bound else math.inf)


def _merged(findings: dict[str, list[int]]) -> dict[str, list[int]]:
    """Ranks with their own numbers stay one finding: the first rank's numbers stand for all."""
    if len(findings) < 2:
        return findings
    ranks = sorted(rank for group in findings.values() for rank in group)
    return {min(findings.items(), key=lambda item: item[1])[0]: ranks}


def parts_of(comparison: Comparison, part: Callable[[int], Mapping[str, Placed]], label: str) -> dict[int, Placed]:
    """One tensor on all the ranks that have it."""
    return {rank: part(rank)[label] for rank in range(len(comparison.parallel.ranks)) if label in part(rank)}


def _s(items: Iterable[object]) -> str:
    return "s" if len(list(items)) > 1 else ""


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)
