"""What is right must pass, however much it looks like a bug; and what makes it right is needed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import tpverify as tpv
from tpverify.mutants.campaign import pass_of
from tpverify.mutants.control import Control
from tpverify.mutants.controls import controls
from tpverify.mutants.controls.biases import ZERO_ELSEWHERE, BiasBeforeReduction, added_bias, bias_on, partial_bias
from tpverify.mutants.controls.collectives import NO_GRADIENT, STATISTICS
from tpverify.mutants.controls.layouts import HOOKED, SCATTERED, UNFINALISED
from tpverify.mutants.mutant import planted
from tpverify.sharding import Replicate
from tpverify.subjects.block import transformer_block
from tpverify.subjects.linear_subjects import column_parallel_linear, row_parallel_linear

CONTROLS = controls()
CASES = 30
"""Of each control; the campaign draws more."""


def test_there_are_enough_controls_and_each_says_why_it_is_right() -> None:
    assert len(CONTROLS) >= 15
    assert all(len(control.looks_like.split()) >= 4 and len(control.because.split()) >= 4 for control in CONTROLS.values())


@pytest.mark.parametrize("id", CONTROLS)
def test_a_control_is_not_flagged(id: str) -> None:
    done = pass_of(dataclasses.replace(CONTROLS[id], max_examples=CASES))
    assert done.violations == ()
    assert done.passed and done.cases == CASES
    assert "forward" in done.applied and {"input-gradient", "parameter-gradient"} & set(done.applied)


@pytest.mark.parametrize(
    ("control", "change", "check"),
    [
        (ZERO_ELSEWHERE, {"placements": row_parallel_linear.placements}, "forward"),
        (SCATTERED, {"placements": {"*": Replicate()}}, "parameter-gradient"),
        (NO_GRADIENT, {"inputs": column_parallel_linear.inputs}, "input-gradient"),
        (STATISTICS, {"communication": row_parallel_linear.communication}, "communication"),
        (HOOKED, {"parallel": transformer_block.parallel}, "parameter-gradient"),
        (UNFINALISED, {"placements": row_parallel_linear.placements}, "replication"),
    ],
    ids=lambda value: value.id if isinstance(value, Control) else "",
)
def test_a_control_is_flagged_once_what_makes_it_right_is_missing(control: Control, change: dict[str, Any], check: str) -> None:
    changed = planted(control.subject, f"{control.subject.name}_undeclared", **change)
    assert {violation.check for violation in tpv.verify(changed, max_examples=60, seed=0, checks=(check,)).violations} == {check}


class BiasHeldTwice(BiasBeforeReduction):
    """The last rank has the bias, and adds it once for every rank."""

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """With a multiple of this rank's bias."""
        product = super().multiply(x)
        return product if self.bias is None else product + self.bias * (self.group.size() - 1)


def test_a_bias_that_the_last_rank_adds_more_than_once_is_flagged() -> None:
    wrong = planted(
        row_parallel_linear, "held_twice", BiasHeldTwice, parallel=bias_on(first=False), configs=added_bias, placements=partial_bias
    )
    done = pass_of(Control(id="held-twice", looks_like="", because="", subject=wrong))
    assert "forward" in {violation.check for violation in done.violations}
