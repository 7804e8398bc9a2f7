"""Where inside a module the fault lies: every submodule is held against the reference's submodule of the same path."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from tpverify.checks.finding import Finding, bound_of, explain, gradient_scale
from tpverify.run import Comparison, ModuleCall, Placed
from tpverify.sharding import Replicate, shard
from tpverify.tolerance import compare
from tpverify.trace import guess_layout

UNKNOWN, RIGHT, SUMMANDS, WRONG = range(4)
"""What ranks hold: nothing that can be told; their parts of the expected value; summands of it, for a reduction that may still
come; something else."""


def modules_at_fault(comparison: Comparison) -> list[Finding]:
    """Submodules that compute another function than the reference's, and the first one that is given another input.

    The two are told apart by giving the reference's submodule the parallel module's own input: if it then returns
    the same, the submodule is right and what it was given is not. Of nested submodules only the innermost is named.
    Empty unless the run was traced.
    """
    known = comparison.reference.ranks[0].calls
    paths = _paths(comparison)
    faulty = [
        path
        for path in paths
        if path in comparison.reference.replayed and _state(comparison, path, "outputs", comparison.reference.replayed[path]) == WRONG
    ]
    findings = [
        Finding(
            _all(comparison),
            path,
            f"Expected module {path} to compute what the reference's does but, given the same input, it returns something else",
            _explain_output(comparison, path),
        )
        for path in _innermost(faulty)
    ]
    first = _first_misfed(comparison, [path for path in paths if known[path].inputs], faulty)
    if first is not None:
        message = (
            f"Expected module {first} to be given what the reference's is given but its input differs, and no module before it is at fault"
        )
        findings.insert(0, Finding(_all(comparison), first, message, _explain_input(comparison, first)))
    return findings


def modules_at_fault_in_backward(comparison: Comparison) -> list[Finding]:
    """Submodules that are given the right gradient in backward and hand on a wrong one, in backward order.

    A submodule may well hand on summands, if a module around it hands on their sum. Of nested submodules only the innermost is
    named. Empty unless the run was traced.
    """
    if not _same_inside(comparison):
        return []
    states: dict[str, int] = {}
    for path in reversed(_paths(comparison)):
        call = comparison.reference.ranks[0].calls[path]
        if _gradient_state(comparison, path, "output_gradients", call.output_gradients) == RIGHT:
            states[path] = _gradient_state(comparison, path, "input_gradients", call.input_gradients)
    mended = [path for path, state in states.items() if state == RIGHT]
    at_fault = [path for path, state in states.items() if state >= SUMMANDS and not any(path.startswith(f"{m}.") for m in mended)]
    innermost = _innermost(at_fault)
    wrong = [path for path in innermost if states[path] == WRONG]
    alone = [path for path in innermost if states[path] == SUMMANDS]
    return [_hands_on(comparison, path, "a wrong gradient") for path in wrong] + [
        _hands_on(comparison, path, "only a summand of the gradient on each rank") for path in alone
    ]


def _hands_on(comparison: Comparison, path: str, what: str) -> Finding:
    message = f"Expected module {path} to hand on the reference's gradient but, given the right one in backward, it hands on {what}"
    return Finding(_all(comparison), path, message, _explain_gradient(comparison, path))


def _explain_gradient(comparison: Comparison, path: str) -> str:
    """The first pattern that fits what the ranks hand on."""
    for index, whole in enumerate(comparison.reference.ranks[0].calls[path].input_gradients):
        held = [run.calls[path].input_gradients[index] for run in comparison.parallel.ranks]
        parts = [part for part in held if part is not None]
        layout = guess_layout(whole.shape, parts[0].shape, len(held)) if whole is not None and len(parts) == len(held) else None
        if whole is not None and layout is not None:
            placed = {rank: Placed(part, layout) for rank, part in enumerate(parts)}
            if line := explain(comparison, "its input.grad", whole, placed):
                return line
    return ""


def _paths(comparison: Comparison) -> list[str]:
    """The submodules that both sides call, in order of the calls' starts."""
    ranks = comparison.parallel.ranks
    known = comparison.reference.ranks[0].calls
    return [path for path in (ranks[0].calls if ranks else {}) if path in known]


def _innermost(paths: Sequence[str]) -> list[str]:
    return [path for path in paths if not any(other.startswith(f"{path}.") for other in paths)]


def _all(comparison: Comparison) -> tuple[int, ...]:
    return tuple(range(len(comparison.members)))


def _same_inside(comparison: Comparison) -> bool:
    """Whether every submodule returned what the reference's did: gradients at other values are other gradients."""
    known = comparison.reference.ranks[0].calls
    return all(_state(comparison, path, "outputs", known[path].outputs or ()) != WRONG for path in _paths(comparison))


def _explain_output(comparison: Comparison, path: str) -> str:
    """The first pattern that fits what the module returns instead of what the reference's would."""
    return _explain(comparison, path, "outputs", comparison.reference.replayed[path])


def _explain(comparison: Comparison, path: str, side: str, expected: Sequence[torch.Tensor]) -> str:
    """The first pattern that fits any of a call's tensors."""
    for index, whole in enumerate(expected):
        parts = [(_side(run.calls[path], side) or ())[index : index + 1] for run in comparison.parallel.ranks]
        layout = guess_layout(whole.shape, parts[0][0].shape, len(parts)) if all(parts) else None
        if layout is not None:
            placed = {rank: Placed(part[0], layout) for rank, part in enumerate(parts)}
            if line := explain(comparison, path, whole, placed):
                return line
    return ""


def _first_misfed(comparison: Comparison, paths: Sequence[str], faulty: Sequence[str]) -> str | None:
    for path in paths:
        if _state(comparison, path, "inputs", comparison.reference.ranks[0].calls[path].inputs or ()) == WRONG:
            return path
        if path in faulty:
            return None
    return None


def _state(comparison: Comparison, path: str, side: str, expected: Sequence[torch.Tensor]) -> int:
    """The worst of a call's tensors; layouts that cannot be guessed are given the benefit of the doubt."""
    held = [_side(run.calls.get(path), side) for run in comparison.parallel.ranks]
    worst = UNKNOWN
    for index, whole in enumerate(expected):
        parts = [tensors[index] for tensors in held if tensors is not None and len(tensors) == len(expected)]
        if whole.is_floating_point() and len(parts) == len(held):
            worst = max(worst, _part_state(comparison, whole, parts))
    return worst


def _gradient_state(comparison: Comparison, path: str, side: str, expected: Iterable[torch.Tensor | None]) -> int:
    """The same for a call's gradients; one that backward did not reach is wrong where the reference has one that is not zero."""
    held = [getattr(run.calls[path], side) for run in comparison.parallel.ranks if path in run.calls]
    scale = gradient_scale(comparison)
    worst = UNKNOWN
    for index, whole in enumerate(expected):
        parts = [gradients[index] for gradients in held if index < len(gradients)]
        if whole is None or len(parts) != len(comparison.parallel.ranks):
            continue
        there = [part for part in parts if part is not None]
        if len(there) < len(parts):
            worst = max(worst, WRONG if not there and bool(whole.any()) else UNKNOWN)
        else:
            worst = max(worst, _part_state(comparison, whole, there, scale))
    return worst


def _side(call: ModuleCall | None, side: str) -> tuple[torch.Tensor, ...] | None:
    return None if call is None else call.inputs if side == "inputs" else call.outputs


def _part_state(comparison: Comparison, whole: torch.Tensor, parts: Sequence[torch.Tensor], rms: float = 0.0) -> int:
    size = comparison.case.world_size
    bound = max(bound_of(comparison), 1e-12)
    layout = guess_layout(whole.shape, parts[0].shape, size)
    if layout is None:
        return UNKNOWN
    if all(_agree(part, shard(whole, layout, rank, size), bound, rms) for rank, part in enumerate(parts)):
        return RIGHT
    if isinstance(layout, Replicate):
        # Summands of a reduction that is still to come are right as they are.
        return SUMMANDS if _agree(torch.stack(list(parts)).sum(0), whole, bound, rms) else WRONG
    # The same values in another order may be another (fused, say) layout.
    together = torch.cat([part.reshape(-1) for part in parts]).sort().values
    return RIGHT if _agree(together, whole.reshape(-1).sort().values, bound, rms) else WRONG


def _agree(actual: torch.Tensor, expected: torch.Tensor, bound: float, rms: float = 0.0) -> bool:
    scale = rms * expected.numel() ** 0.5
    return actual.shape == expected.shape and compare(actual, expected, bound=bound, scale=scale or None) is None


def _explain_input(comparison: Comparison, path: str) -> str:
    """Whose input or output the module was given instead, or what was done to its own."""
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
    return _explain(comparison, path, "inputs", comparison.reference.ranks[0].calls[path].inputs or ())
