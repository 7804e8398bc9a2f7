"""What is right must pass, however much it looks like a bug."""

from __future__ import annotations

import planted_controls as controls
import pytest
from planted import broken_checks, plant

import tpverify as tpv
from tpverify.sharding import Replicate
from tpverify.subjects.linear_subjects import column_parallel_linear, row_parallel_linear

PLANTED = [
    controls.zero_elsewhere,
    controls.rank_zero_only,
    controls.last_rank_only,
    controls.bias_divided,
    controls.sequence_scattered,
    controls.input_needs_no_gradient,
    controls.chatty,
]


@pytest.mark.parametrize("subject", PLANTED, ids=lambda subject: subject.name)
def test_a_control_passes(subject: tpv.Subject) -> None:
    result = tpv.verify(subject, max_examples=60, seed=0)
    assert result.violations == ()
    assert result.checks["forward"] > 30 and sum(count for size, count in result.world_sizes.items() if size > 1) > 15


@pytest.mark.parametrize(
    ("subject", "change", "check"),
    [
        (controls.zero_elsewhere, {"placements": row_parallel_linear.placements}, "forward"),
        (controls.sequence_scattered, {"placements": {"*": Replicate()}}, "parameter-gradient"),
        (controls.input_needs_no_gradient, {"inputs": column_parallel_linear.inputs}, "input-gradient"),
        (controls.chatty, {"communication": row_parallel_linear.communication}, "communication"),
    ],
    ids=["zero_elsewhere", "sequence_scattered", "input_needs_no_gradient", "chatty"],
)
def test_a_control_fails_once_what_makes_it_right_is_not_declared(subject: tpv.Subject, change: dict[str, object], check: str) -> None:
    changed = plant(subject, f"{subject.name}_undeclared", **change)
    assert broken_checks(tpv.verify(changed, max_examples=60, seed=0, checks=(check,))) == {check}


def test_a_bias_that_the_last_rank_adds_more_than_once_fails() -> None:
    assert "forward" in broken_checks(tpv.verify(controls.last_rank_repeats, max_examples=60, seed=0))
