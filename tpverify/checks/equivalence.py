"""Checks ``forward``, ``input-gradient`` and ``parameter-gradient``: is it still the same function?"""

from __future__ import annotations

import torch

from tpverify.checks.finding import Finding, compare_placed, gradient_scale, is_nan, parts_of, started_backward
from tpverify.checks.inside import modules_at_fault, modules_at_fault_in_backward
from tpverify.run import Comparison, Placed
from tpverify.sharding import shard
from tpverify.trace import guess_layout

AFTERWARDS = " after the run"
"""How the label of a tensor ends that is left in the module."""

SAME = 1e-9
"""Relative difference of values that are told by their order only."""


def forward(comparison: Comparison) -> list[Finding] | None:
    """Every output equals the reference's, on every rank."""
    if not comparison.parallel.ranks or not comparison.reference.ranks:
        return None
    expected = comparison.reference.ranks[0].outputs
    if all(is_nan(placed) for placed in expected.values()):
        return None
    other: dict[tuple[str, ...], list[int]] = {}
    for rank, run in enumerate(comparison.parallel.ranks):
        if set(run.outputs) != set(expected):
            other.setdefault(tuple(run.outputs), []).append(rank)
    findings = [
        Finding(tuple(ranks), "output", f"Expected the outputs {', '.join(expected)} but got {', '.join(labels) or 'none'}")
        for labels, ranks in other.items()
    ]
    for label, placed in expected.items():
        assert placed.local is not None
        actual = parts_of(comparison, lambda rank: comparison.parallel.ranks[rank].outputs, label)
        findings += compare_placed(comparison, label, placed.local, actual)
    return findings + modules_at_fault(comparison) if findings else _state(comparison)


def _state(comparison: Comparison) -> list[Finding]:
    """What is left in the module: parameters, which most modules leave alone, and the buffers that the reference changes.

    In half precision there is nothing that says how far these may be off.
    """
    if comparison.reference.oracle is not None:
        return []
    findings: list[Finding] = []
    ranks = comparison.parallel.ranks
    for name, placed in comparison.reference.ranks[0].parameters.items():
        actual = parts_of(comparison, lambda rank: ranks[rank].parameters, name)
        if placed.local is not None and actual and not _as_loaded(comparison, placed.local, actual):
            findings += compare_placed(comparison, f"{name}{AFTERWARDS}", placed.local, actual)
    for name, expected in comparison.reference.ranks[0].buffers.items():
        held = {rank: run.buffers[name] for rank, run in enumerate(ranks) if name in run.buffers}
        layout = guess_layout(expected.shape, held[0].shape, len(ranks)) if len(held) == len(ranks) else None
        if len(ranks) > 1 and _same_values(expected, list(held.values()), len(ranks)):
            continue  # cut in some way that nothing tells, as fused ones are
        if layout is not None and all(buffer.shape == held[0].shape and buffer.dtype == expected.dtype for buffer in held.values()):
            label = f"buffer {name}{AFTERWARDS}"
            findings += compare_placed(comparison, label, expected, {rank: Placed(buffer, layout) for rank, buffer in held.items()})
    return findings


def _same_values(expected: torch.Tensor, held: list[torch.Tensor], size: int) -> bool:
    together = torch.cat([buffer.reshape(-1) for buffer in held]) if len(held) == size else torch.empty(0)
    if together.numel() != expected.numel() or together.dtype != expected.dtype:
        return False
    pair = together.sort().values, expected.reshape(-1).sort().values
    return torch.allclose(*pair, rtol=SAME, atol=0.0) if expected.is_floating_point() else torch.equal(*pair)


def _as_loaded(comparison: Comparison, expected: torch.Tensor, actual: dict[int, Placed]) -> bool:
    """Whether all ranks still hold exactly their parts of it."""
    size = comparison.case.world_size
    return all(
        placed.local is not None and torch.equal(placed.local, shard(expected, placed.layout, rank, size))
        for rank, placed in actual.items()
    )


def input_gradient(comparison: Comparison) -> list[Finding] | None:
    """The gradient with respect to every input equals the reference's, on every rank."""
    if not comparison.parallel.ranks or not comparison.reference.ranks or not started_backward(comparison):
        return None
    expected = comparison.reference.ranks[0].input_gradients
    rms = gradient_scale(comparison)
    findings: list[Finding] = []
    for name, placed in expected.items():
        actual = parts_of(comparison, lambda rank: comparison.parallel.ranks[rank].input_gradients, name)
        findings += compare_gradient(comparison, f"{name}.grad", placed, actual, rms)
    if findings:
        return findings + modules_at_fault_in_backward(comparison)
    return findings if any(not is_nan(placed) for placed in expected.values()) else None


def parameter_gradient(comparison: Comparison) -> list[Finding] | None:
    """The gradient of every parameter, after ``finalize_gradients``, equals the reference's; None where it has one is a violation."""
    if not comparison.parallel.ranks or not comparison.reference.ranks or not started_backward(comparison):
        return None
    expected = comparison.reference.ranks[0].parameter_gradients
    aliases = {name for names in comparison.parallel.ranks[0].ties for name in names[1:]}
    rms = gradient_scale(comparison)
    findings: list[Finding] = []
    for name, placed in expected.items():
        if name not in aliases:
            actual = parts_of(comparison, lambda rank: comparison.parallel.ranks[rank].parameter_gradients, name)
            findings += compare_gradient(comparison, f"{name}.grad", placed, actual, rms)
    if findings and not input_gradient(comparison):  # which names the modules otherwise
        return findings + modules_at_fault_in_backward(comparison)
    return findings if any(not is_nan(placed) for placed in expected.values()) else None


def compare_gradient(comparison: Comparison, label: str, expected: Placed, actual: dict[int, Placed], rms: float) -> list[Finding]:
    """As :func:`compare_placed`; where the reference has no gradient, ranks must have none or zero."""
    if expected.local is not None:
        return compare_placed(comparison, label, expected.local, actual, rms)
    extra = [rank for rank, placed in actual.items() if placed.local is not None and bool(torch.any(placed.local != 0))]
    return [Finding(tuple(extra), label, f"Expected {label} to be None as in the reference but got a gradient")] if extra else []
