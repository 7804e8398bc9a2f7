"""Check ``tied``: a tied parameter is one parameter, and its gradient is the sum over its uses."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tpverify.checks.diagnosing import is_diagnosed, undiagnosed
from tpverify.checks.finding import Finding, compare_placed, gradient_scale, parts_of
from tpverify.run import Comparison, Placed


def tied(comparison: Comparison) -> list[Finding] | None:
    """Parameters are tied on every rank where the reference ties them, and their gradient is the sum of their uses' gradients."""
    if not comparison.parallel.ranks or not comparison.reference.ranks:
        return None
    findings = _wrongly_tied(comparison)
    if not findings and not comparison.reference.ranks[0].ties:
        return None
    for names in comparison.reference.ranks[0].ties:
        findings += _untied(comparison, names)
        findings += _wrong_sum(comparison, names)
    return findings


def _untied(comparison: Comparison, names: Sequence[str]) -> list[Finding]:
    apart = [
        rank
        for rank, run in enumerate(comparison.parallel.ranks)
        if set(names) <= set(run.parameters) and not any(set(names) <= set(group) for group in run.ties)
    ]
    if not apart:
        return []
    return [
        Finding(
            tuple(apart),
            names[0],
            f"Expected {' and '.join(names)} to be one parameter, as in the reference, but they are separate parameters",
        )
    ]


def _wrongly_tied(comparison: Comparison) -> list[Finding]:
    apart = comparison.reference.ranks[0].ties
    found: dict[tuple[str, ...], list[int]] = {}
    for rank, run in enumerate(comparison.parallel.ranks):
        for names in run.ties:
            if not any(set(names) <= set(group) for group in apart):
                found.setdefault(names, []).append(rank)
    return [
        Finding(tuple(ranks), names[0], f"Expected {' and '.join(names)} to be separate, as in the reference, but they are one parameter")
        for names, ranks in found.items()
    ]


def _wrong_sum(comparison: Comparison, names: Sequence[str]) -> list[Finding]:
    name = next((name for name in names if name in comparison.parallel.ranks[0].parameter_gradients), None)
    if name is None:
        return []
    actual = parts_of(comparison, lambda rank: comparison.parallel.ranks[rank].parameter_gradients, name)
    uses = {use: comparison.reference.uses[use] for use in names if use in comparison.reference.uses}
    if not uses:
        return []  # no use has a gradient, as without autograd
    rms = gradient_scale(comparison)
    label = f"{name}.grad"
    total = sum(uses.values(), torch.zeros(()))
    wrong = compare_placed(comparison, label, total, actual, rms)
    diagnosis = _diagnose(comparison, label, uses, actual, rms) if wrong and is_diagnosed() else ""
    return [
        Finding(finding.ranks, label, f"{finding.message}\n(the sum of the gradients of its uses {', '.join(uses)})", diagnosis)
        for finding in wrong
    ]


def _diagnose(comparison: Comparison, label: str, uses: dict[str, torch.Tensor], actual: dict[int, Placed], rms: float) -> str:
    """Whether leaving out or repeating one use explains the gradient."""
    total = sum(uses.values(), torch.zeros(()))
    candidates = {f"the gradient of its use as {use} is missing": total - gradient for use, gradient in uses.items()}
    candidates |= {f"the gradient of its use as {use} is counted twice": total + gradient for use, gradient in uses.items()}
    candidates |= {"the gradient is halved": total / 2, "the gradient is doubled": total * 2}
    with undiagnosed():
        for text, candidate in candidates.items():
            if not compare_placed(comparison, label, candidate, actual, rms, candidate.double()):
                return f"{text}: that fits exactly"
    return ""
