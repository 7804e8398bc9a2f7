"""A survey: of the kinds of bugs that public reports tell of, which are found, and by which checks."""

from __future__ import annotations

import planted_linear
import planted_models
import pytest
from planted import broken_checks, the
from planted_registry import BUGS

import tpverify as tpv
from tpverify.verification import describe_checks

CASES = 100
SLOW, FEW = ("PositionsOfRankZero", "TiedCopies"), 20
"""Bugs of whole models, and how many cases are drawn of them."""


def test_the_survey_is_broad() -> None:
    modules = {layer.__module__ for layer in (planted_linear.RowAveraged, planted_models.TriplesPerHead)}
    assert len(BUGS) >= 35 and len(modules) == 2
    assert {check for _, checks in BUGS.values() for check in checks} == set(describe_checks())


@pytest.mark.parametrize("name", BUGS)
def test_a_surveyed_bug_is_found_by_its_checks(name: str) -> None:
    subject, checks = BUGS[name]
    result = tpv.verify(subject, max_examples=FEW if name in SLOW else CASES, seed=1, checks=checks)
    assert broken_checks(result) == checks


def test_constants_of_the_own_heads_are_right() -> None:
    assert tpv.verify(planted_models.head_constants, max_examples=CASES // 2, seed=0).passed


def test_shared_heads_are_reported_on_the_rank_that_holds_the_copy() -> None:
    result = tpv.verify(BUGS["SharedBiasNotReduced"][0], max_examples=CASES, seed=0)
    found = the(result, "replication", "qkv.bias.grad (units shared with rank 0)")
    assert (found.world_size, found.ranks) == (2, (1,))
    assert {violation.tensor for violation in result.violations if violation.check == "parameter-gradient"} == {"qkv.bias.grad"}


def test_constants_of_other_heads_are_reported_at_the_module_that_applies_them() -> None:
    result = tpv.verify(BUGS["HeadConstantsOfRankZero"][0], max_examples=CASES, seed=0, checks=("forward",))
    assert the(result, "forward", "qkv").world_size == 2


def test_an_overwritten_saved_tensor_is_explained() -> None:
    result = tpv.verify(BUGS["SavedTensorReduced"][0], max_examples=CASES, seed=0, checks=("execution",))
    assert "in place over a tensor that autograd saved fits this" in the(result, "execution").diagnosis


def test_a_handle_that_nobody_waits_for_is_named() -> None:
    result = tpv.verify(BUGS["NeverWaited"][0], max_examples=CASES, seed=0, checks=("buffers",))
    found = the(result, "buffers")
    assert found.ranks == (0, 1)
    assert "an asynchronous collective whose Work was never waited for" in found.message
    assert "planted_linear.py:" in found.message
