"""Reports on planted bugs of the kinds that public reports tell of: the rank, the tensor, the module and the line of code."""

from __future__ import annotations

from planted import the

import tpverify as tpv
from tpverify.mutants.catalogue import catalogue

CASES = 100
SURVEYED = (
    "shared-heads-not-reduced",
    "shared-bias-not-reduced",
    "heads-shared-by-group-ranks",
    "triples-per-head",
    "head-constants-from-zero",
    "padded-rows-trained",
    "vocabulary-rounded-down",
    "padding-is-a-class",
    "z-loss-of-own-logits",
    "mean-over-own-targets",
    "target-logit-detached",
    "maximum-by-sum",
    "ignored-targets-cost",
    "targets-masked-in-place",
    "positions-of-the-first-part",
    "tied-copies",
)
BUGS = {id: (catalogue()[id].subject, {catalogue()[id].check}) for id in SURVEYED}
"""Subjects and the check that kills each: what is looked for on other devices too."""


def test_shared_heads_are_reported_on_the_rank_that_holds_the_copy() -> None:
    result = tpv.verify(catalogue()["shared-bias-not-reduced"].subject, max_examples=CASES, seed=0)
    found = the(result, "replication", "qkv.bias.grad (units shared with rank 0)")
    assert (found.world_size, found.ranks) == (2, (1,))
    assert {violation.tensor for violation in result.violations if violation.check == "parameter-gradient"} == {"qkv.bias.grad"}


def test_constants_of_other_heads_are_reported_at_the_module_that_applies_them() -> None:
    result = tpv.verify(catalogue()["head-constants-from-zero"].subject, max_examples=CASES, seed=0, checks=("forward",))
    assert the(result, "forward", "qkv").world_size == 2


def test_an_overwritten_saved_tensor_is_explained() -> None:
    result = tpv.verify(catalogue()["saved-tensor-reduced"].subject, max_examples=CASES, seed=0, checks=("execution",))
    assert "in place over a tensor that autograd saved fits this" in the(result, "execution").diagnosis


def test_a_handle_that_nobody_waits_for_is_named() -> None:
    result = tpv.verify(catalogue()["never-waited"].subject, max_examples=CASES, seed=0, checks=("buffers",))
    found = the(result, "buffers")
    assert found.ranks == (0, 1)
    assert "an asynchronous collective whose Work was never waited for" in found.message
    assert "async_.py:" in found.message
