"""What a check answers, and the comparisons that several checks share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from tpverify.checks.diagnosis import diagnose
from tpverify.run import Comparison, Placed
from tpverify.sharding import Partial, Replicate, describe, local_shape, shard
from tpverify.tolerance import compare, tolerance, unit_roundoff
from tpverify.values import SPIKE

SENSITIVITY = 64
"""The safety factor of the tolerance, for the same reasons."""

MOST_SHARED = 1e-8
"""Far below any bug: planted ones are off by 1e-2 or more."""

LOOSEST = 0.25
"""No bound may let a tensor pass that is zero, doubled or another one."""

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
    """Largest relative error of correct code; 0 where arithmetic is exact, which half precisions are not even on small integers.

    A case that failed is looked at again (traced), and then the bound is at least ``SENSITIVITY`` times what roundings of
    the inputs alone do to the tensor: where a normalisation saturates or terms cancel, correct code cannot agree to more
    digits than that. What such a case does to one tensor loosens the others by ``MOST_SHARED`` at most.
    """
    precision = comparison.subject.precision
    wide = unit_roundoff(precision) <= 2.0**-24
    if wide and comparison.case.values == "integers" and comparison.subject.exact_for(comparison.case.config):
        return 0.0
    bound = tolerance(precision, comparison.reference.depth, comparison.reference.terms)
    if comparison.case.values == "spike":
        bound *= SPIKE  # a relative error u of x is an absolute one of u * |x|, and exp makes that a relative one again
    moved = comparison.reference.sensitivity
    shared = min(SENSITIVITY * max(moved.values(), default=0.0), MOST_SHARED)
    return min(max(bound, shared if wide else 0.0, SENSITIVITY * moved.get(label, 0.0)), LOOSEST)


def is_finite(comparison: Comparison) -> bool:
    """Whether the reference's outputs and gradients are numbers at all: what it turns into NaN cannot be compared."""
    reference = comparison.reference.ranks[0]
    held = (*reference.outputs.values(), *reference.input_gradients.values(), *reference.parameter_gradients.values())
    return not any(bool(placed.local.isnan().any()) for placed in held if placed.local is not None)


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
    comparison: Comparison, label: str, expected: torch.Tensor, actual: Mapping[int, Placed], rms: float = 0.0
) -> list[Finding]:
    """Compare every rank's part of a tensor with its part of the logical value; a Partial one by the sum over ranks.

    Args:
        label: how the tensor is called in the message.
        expected: the logical tensor.
        actual: by rank; ranks that hold none may be absent.
        rms: root mean square below which differences are noise, see :func:`tpverify.tolerance.compare`.
    """
    if comparison.reference.sensitivity.get(label, 0.0) * SENSITIVITY >= LOOSEST:
        return []  # nothing but rounding: any value is as right as another
    size = comparison.case.world_size
    missing = [rank for rank, placed in actual.items() if placed.local is None and shard(expected, placed.layout, rank, size).numel()]
    if missing and not (len(missing) < len(actual) and all(isinstance(placed.layout, Partial) for placed in actual.values())):
        return [Finding(tuple(missing), label, f"Expected {label} to be there but rank{_s(missing)} {_listed(missing)} left None")]
    held = {rank: placed for rank, placed in actual.items() if placed.local is not None}
    summed = [placed.local for placed in held.values() if isinstance(placed.layout, Partial) and placed.local is not None]
    if summed and len(summed) == len(held):
        total = torch.stack(list(summed)).sum(0) if len({t.shape for t in summed}) == 1 else summed[0]
        held = {rank: Placed(total, Replicate()) for rank in held}
    findings: dict[str, list[int]] = {}
    for rank, placed in held.items():
        assert placed.local is not None
        text = _difference(comparison, label, shard(expected, placed.layout, rank, size), placed.local, rms)
        if text:
            where = f"{describe(placed.layout, size)}, " if not summed else "Partial, summed over ranks, "
            findings.setdefault(f"{text}\n({where}world size {size})", []).append(rank)
    diagnosis = _diagnosis(comparison, label, expected, actual, rms) if findings else ""
    return [Finding(tuple(ranks), label, message, diagnosis) for message, ranks in _merged(findings).items()]


def _diagnosis(comparison: Comparison, label: str, expected: torch.Tensor, actual: Mapping[int, Placed], rms: float) -> str:
    """What may explain a difference: chance, rounding, or else an exact pattern."""
    if comparison.reference.random:
        return "the reference draws random numbers in forward, as dropout does: results can agree only where both sides draw the same"
    wide = {rank: Placed(None if placed.local is None else _wide(placed.local), placed.layout) for rank, placed in actual.items()}
    return _rounding(comparison, expected, wide, rms) or diagnose(
        label, _wide(expected), wide, comparison.case.world_size, bound_of(comparison, label), _vectors(comparison)
    )


def _rounding(comparison: Comparison, expected: torch.Tensor, actual: Mapping[int, Placed], rms: float) -> str:
    """Whether the rounding of a narrower dtype, or of any dtype where exactness was promised, explains every difference."""
    exact = bound_of(comparison) == 0.0
    dtype = comparison.subject.precision if exact else torch.float32
    if not expected.is_floating_point() or (dtype is comparison.subject.precision and not exact):
        return ""
    bound = tolerance(dtype, comparison.reference.depth, comparison.reference.terms)
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
    return f"{dtype} rounding fits this: if the code is meant to compute in it, the subject needs precision={dtype}"


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_complex() else tensor.double()


def _vectors(comparison: Comparison) -> dict[str, torch.Tensor]:
    """The logical parameters that are vectors: biases, norm weights."""
    parameters = comparison.reference.ranks[0].parameters
    return {name: _wide(placed.local) for name, placed in parameters.items() if placed.local is not None and placed.local.dim() == 1}


def _difference(comparison: Comparison, label: str, expected: torch.Tensor, actual: torch.Tensor, rms: float) -> str:
    """The first line says what differs; empty if nothing does."""
    if expected.shape != actual.shape:
        hint = ": if it is sharded, say so in outputs" if label.startswith("output") else ""
        return f"Expected {label} to have the local shape {tuple(expected.shape)} but got {tuple(actual.shape)}{hint}"
    bound = bound_of(comparison, label) if expected.is_floating_point() or expected.is_complex() else 0.0
    mismatch = compare(actual, expected, bound=bound, scale=rms * expected.numel() ** 0.5 if bound else None)
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
