"""Where inside a module the fault lies: every submodule is held against the reference's submodule of the same path."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tpverify.checks.finding import Finding, bound_of
from tpverify.run import Comparison, ModuleCall
from tpverify.sharding import Replicate, shard
from tpverify.tolerance import compare
from tpverify.trace import guess_layout


def modules_at_fault(comparison: Comparison) -> list[Finding]:
    """Submodules that compute another function than the reference's, and the first one that is given another input.

    The two are told apart by giving the reference's submodule the parallel module's own input: if it then returns
    the same, the submodule is right and what it was given is not. Of nested submodules only the innermost is named.
    Empty unless the run was traced.
    """
    ranks = comparison.parallel.ranks
    known = comparison.reference.ranks[0].calls
    paths = [path for path in (ranks[0].calls if ranks else {}) if path in known]
    faulty = [
        path
        for path in paths
        if path in comparison.reference.replayed and _differs(comparison, path, "outputs", comparison.reference.replayed[path])
    ]
    innermost = [path for path in faulty if not any(other.startswith(path + ".") for other in faulty)]
    findings = [
        Finding(
            _all(comparison),
            path,
            f"Expected module {path} to compute what the reference's does but, given the same input, it returns something else",
        )
        for path in innermost
    ]
    first = _first_misfed(comparison, paths, faulty)
    if first is not None:
        message = (
            f"Expected module {first} to be given what the reference's is given but its input differs, and no module before it is at fault"
        )
        findings.insert(0, Finding(_all(comparison), first, message, _explain_input(comparison, first)))
    return findings


def _all(comparison: Comparison) -> tuple[int, ...]:
    return tuple(range(len(comparison.members)))


def _first_misfed(comparison: Comparison, paths: Sequence[str], faulty: Sequence[str]) -> str | None:
    for path in paths:
        inputs = comparison.reference.ranks[0].calls[path].inputs
        if inputs and _differs(comparison, path, "inputs", inputs):
            return path
        if path in faulty:
            return None
    return None


def _differs(comparison: Comparison, path: str, side: str, expected: Sequence[torch.Tensor]) -> bool:
    """Whether some rank's tensors certainly differ; layouts that cannot be guessed are given the benefit of the doubt."""
    held = [_side(run.calls.get(path), side) for run in comparison.parallel.ranks]
    for index, whole in enumerate(expected):
        if not whole.is_floating_point():
            continue
        parts = [tensors[index] for tensors in held if tensors is not None and len(tensors) == len(expected)]
        if len(parts) == len(held) and _part_differs(comparison, whole, parts):
            return True
    return False


def _side(call: ModuleCall | None, side: str) -> tuple[torch.Tensor, ...] | None:
    return None if call is None else call.inputs if side == "inputs" else call.outputs


def _part_differs(comparison: Comparison, whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> bool:
    size = comparison.case.world_size
    bound = max(bound_of(comparison), 1e-12)
    layout = guess_layout(whole.shape, parts[0].shape, size)
    if layout is None:
        return False
    if all(_agree(part, shard(whole, layout, rank, size), bound) for rank, part in enumerate(parts)):
        return False
    if isinstance(layout, Replicate):
        # Summands of a reduction that is still to come are right as they are.
        return not _agree(torch.stack(list(parts)).sum(0), whole, bound)
    # The same values in another order may be another (fused, say) layout.
    together = torch.cat([part.reshape(-1) for part in parts]).sort().values
    return not _agree(together, whole.reshape(-1).sort().values, bound)


def _agree(actual: torch.Tensor, expected: torch.Tensor, bound: float) -> bool:
    return actual.shape == expected.shape and compare(actual, expected, bound=bound) is None


def _explain_input(comparison: Comparison, path: str) -> str:
    """Whose input or output the module was given instead."""
    call = comparison.parallel.ranks[0].calls[path]
    if not call.inputs:
        return ""
    given = call.inputs[0]
    bound = max(bound_of(comparison), 1e-12)
    for name, tensor in comparison.reference.inputs.items():
        if _agree(given, tensor, bound):
            return f"it is given the input {name} itself: modules in another order fit this"
    for other, reference in comparison.reference.ranks[0].calls.items():
        for side, tensors in (("the input", reference.inputs), ("the output", reference.outputs)):
            if other != path and tensors and _agree(given, tensors[0], bound):
                return f"it is given {side} of {other}: modules in another order fit this"
    return ""
