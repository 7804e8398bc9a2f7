"""Draws programs: right ones, ones that are refused by every rank, and ones on which the ranks do not agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from tpverify.conformance.calls import CALLS
from tpverify.conformance.interpreter import DISAGREEMENTS
from tpverify.conformance.program import DTYPES, LAYOUTS, OPS, RARE_DTYPES, Program, Step

SHAPES = ((2,), (1,), (3,), (0,), (), (2, 3), (3, 1), (0, 2), (2, 0), (1, 5, 2), (17,), (1031,))
"""Small, empty and odd ones, and one that backends send in pieces."""
FLOATS = ("float32", "float64")
COLLECTIVES = tuple(
    call for call in CALLS if "." not in call and "object" not in call and call not in ("ring", "batch", "send_recv", "recv_from_any")
)
LISTS = ("all_gather", "reduce_scatter", "gather", "scatter", "all_to_all")
_SEPARATE = ("all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor", "gather", "all_to_all_single")
APPLICABLE: dict[str, tuple[str, ...]] = {
    "output size": (*_SEPARATE, "scatter"),
    "output dtype": (*_SEPARATE, "scatter"),
    "output shape": (*_SEPARATE, "scatter"),
    "list length": LISTS,
    "no list": ("gather", "scatter"),
    "list everywhere": ("gather", "scatter"),
    "root": ("broadcast", "reduce", "gather", "scatter"),
    "splits": ("all_to_all_single", "functional.all_to_all_single"),
    "split count": ("all_to_all_single", "functional.all_to_all_single"),
    "self": ("ring", "send_recv", "batch"),
    "scalar": ("all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor"),
    "outsiders": COLLECTIVES,
    "own shape": ("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "all_to_all_single"),
    "own dtype": ("all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "reduce_scatter_tensor"),
    "own op": ("all_reduce", "reduce", "reduce_scatter_tensor", "functional.all_reduce"),
    "own root": ("broadcast", "reduce"),
    "own call": ("all_reduce", "broadcast", "all_gather_into_tensor"),
    "absent": ("all_reduce", "barrier", "all_gather"),
}
"""The calls that a fault can be in."""


@st.composite
def programs(draw: Any, world_sizes: Sequence[int] = (2, 3, 4), *, calls: Sequence[str] | None = None, most_steps: int = 6) -> Program:
    """Programs; about one in seven has a step that is wrong, its last.

    Args:
        world_sizes: to draw from; shrinks to the first.
        calls: names in ``CALLS`` to draw from; None = all.
        most_steps: most steps of a program.
    """
    world_size = draw(st.sampled_from(list(world_sizes)))
    ranks = st.lists(st.integers(0, world_size - 1), min_size=1, max_size=world_size, unique=True)
    groups = tuple(draw(st.lists(ranks.map(tuple), max_size=2)))
    values = draw(st.sampled_from(("integers", "integers", "normal")))
    count = draw(st.integers(1, most_steps))
    steps = [draw(right_steps(len(groups), values, tuple(calls or CALLS))) for _ in range(count)]
    if calls is None and draw(st.integers(0, 6)) == 6:
        steps.append(draw(wrong_steps(len(groups), values)))
    return Program(world_size, _exact_only(steps, world_size), groups, values, draw(st.integers(0, 99)))


def _exact_only(steps: Sequence[Step], world_size: int) -> tuple[Step, ...]:
    """The steps, where none reads what may be a mean over three ranks: that is rounded, though of integers."""
    averaged = next((place for place, step in enumerate(steps) if step.op == "AVG" and world_size > 2), len(steps))
    return tuple(replace(step, reuse=step.reuse and place <= averaged) for place, step in enumerate(steps))


@st.composite
def right_steps(draw: Any, groups: int, values: str, calls: Sequence[str]) -> Step:
    """Steps that a backend can refuse for their dtype, op or layout only."""
    call = draw(st.sampled_from(list(calls)))
    return draw(_steps(call, groups, values))  # type: ignore[no-any-return]


@st.composite
def wrong_steps(draw: Any, groups: int, values: str) -> Step:
    """Steps with a fault."""
    fault = draw(st.sampled_from([fault for fault in APPLICABLE if groups or fault != "outsiders"]))
    call = draw(st.sampled_from(list(APPLICABLE[fault])))
    step: Step = draw(_steps(call, groups, values))
    fields: dict[str, Any] = {name: getattr(step, name) for name in ("group", "root")}
    if fault == "outsiders":
        fields["group"] = max(1, step.group)
    if fault == "splits" or fault == "split count":
        fields["splits"] = draw(_splits)
    fields |= {"op": step.op if step.op in ("SUM", "MAX") else "SUM"} if step.reduces else {}
    fields |= {} if fault in DISAGREEMENTS else {"wait_after": step.wait_after}
    return Step(call, shape=step.shape or (2,), dtype=draw(st.sampled_from(FLOATS)), fault=fault, **fields)


_splits = st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple)


@st.composite
def _steps(draw: Any, call: str, groups: int, values: str) -> Step:
    plain = Step(call)
    differentiable = call.startswith(("autograd.", "nn."))
    scalars = not differentiable and call not in ("functional.all_gather_last",)
    fields: dict[str, Any] = {
        "group": draw(st.integers(0, groups)),
        "shape": draw(st.sampled_from([shape for shape in SHAPES if shape or scalars])),
        "dtype": draw(_dtypes(call)),
    }
    if plain.reduces or call == "coalescing_manager":
        fields["op"] = "SUM" if differentiable else draw(st.sampled_from(("SUM", "SUM", *OPS)))
    if plain.rooted or call in ("ring", "batch", "send_recv"):
        fields["root"] = draw(st.integers(0, 3))
    if call in COLLECTIVES or call.startswith("functional.") or call in ("ring", "batch"):
        fields["wait_after"] = draw(st.none() | st.integers(0, 3))
    if plain.kind in ("all_to_all", "all_to_all_single") and not call.startswith("nn.") and fields["shape"]:
        fields["splits"] = draw(st.just(()) | _splits)
    if call in COLLECTIVES or call.startswith("functional."):
        fields["layout"] = draw(st.sampled_from(("contiguous",) * 8 + LAYOUTS))
    # Numbers that have been rounded differently must not flow on: only exact results are read again.
    fields["reuse"] = values == "integers" and not differentiable and draw(st.booleans())
    return Step(call, **fields)


def _dtypes(call: str) -> st.SearchStrategy[str]:
    if call.startswith(("autograd.", "nn.")):
        return st.sampled_from(FLOATS)
    if "object" in call:
        return st.sampled_from(("float64", "int64"))
    return st.sampled_from(DTYPES * 6 + RARE_DTYPES)
