"""A published teaching block that "works because backward runs": each of its five faults is found and named, and all five at once."""

from __future__ import annotations

import planted_teaching_block as block
from planted import assert_minimal, broken_checks, the

import tpverify as tpv

CASES = 25
FEW_CHECKS = ("forward", "parameter-gradient", "communication")
NO_GRADIENT = "Expected attention.qkv.weight.grad to be there but rank 0 left None"
EXTRA = "Expected no further collective in backward but got all_reduce(SUM, float64[1, 1, 4]) in backward of mlp.fc2 at "
MISSING = "Expected 1 all_reduce of 4 elements in backward of {} but got 0: "
OTHER_FUNCTION = "Expected module attention to compute what the reference's does but, given the same input, it returns something else"
OTHER_INPUT = "Expected module norm1 to be given what the reference's is given but its input differs, and no module before it is at fault"


def verify(subject: tpv.Subject, *checks: str) -> tpv.Result:
    """What verifying the subject came to."""
    return tpv.verify(subject, world_sizes=(1, 2), max_examples=CASES, seed=0, checks=checks or None)


def test_the_corrected_block_passes() -> None:
    result = tpv.verify(block.corrected, max_examples=CASES, seed=0)
    assert result.passed
    assert all(result.checks[check] > 0 for check in ("forward", "input-gradient", "parameter-gradient", "replication", "communication"))


def test_a_plain_gather_leaves_the_projections_without_gradient() -> None:
    result = verify(block.gather_without_gradient)
    found = the(result, "parameter-gradient", "attention.qkv.weight.grad")
    assert found.message == NO_GRADIENT
    assert_minimal(found, world_size=1, seq=1, batch=1, heads=1, ffn=1)
    assert "forward" not in broken_checks(result)


def test_a_sum_that_is_its_own_adjoint_multiplies_the_gradients() -> None:
    result = verify(block.reduced_in_backward, *FEW_CHECKS)
    for tensor in ("mlp.fc1.weight.grad", "mlp.fc2.weight.grad"):
        found = the(result, "parameter-gradient", tensor)
        assert found.ranks == (0, 1)
        assert "every rank holds 2 times the expected value (the world size)" in found.diagnosis
        assert_minimal(found, seq=1, batch=1, heads=2, ffn=2)
    extra = the(result, "communication")
    assert extra.message.startswith(EXTRA) and "planted_teaching_block.py:" in extra.message
    assert "forward" not in broken_checks(result)


def test_an_input_gradient_that_nothing_reduces_differs_between_ranks() -> None:
    result = verify(block.input_gradient_not_reduced, "forward", "input-gradient", "replication", "communication")
    assert the(result, "input-gradient", "x.grad").ranks == (0, 1)
    assert the(result, "replication", "x.grad").ranks == (1,)
    messages = [violation.message for violation in result.violations if violation.check == "communication"]
    for module in ("attention.qkv", "mlp.fc1"):
        assert any(message.startswith(MISSING.format(module)) for message in messages)
    assert "forward" not in broken_checks(result)


def test_scores_across_heads_are_another_function_of_attention() -> None:
    result = verify(block.scores_across_heads, "forward")
    found = the(result, "forward", "attention")
    assert found.message == OTHER_FUNCTION
    assert [violation.tensor for violation in result.violations] == ["attention", "output"]


def test_scores_across_heads_depend_on_the_number_of_ranks() -> None:
    result = tpv.verify(block.scores_across_heads, world_sizes=(2,), max_examples=CASES, seed=0, checks=("forward",))
    assert the(result, "forward", "attention").ranks == (0, 1)


def test_norms_before_each_part_are_not_post_ln() -> None:
    result = verify(block.norm_before, "forward")
    found = the(result, "forward", "norm1")
    assert found.message == OTHER_INPUT
    assert found.diagnosis == "it is given the input x itself: modules in another order fit this"


def test_all_five_faults_of_the_published_block_are_named() -> None:
    result = verify(block.as_published, "forward", "parameter-gradient", "communication")
    lines = [line for violation in result.violations for line in violation.message.splitlines()]
    expected = [NO_GRADIENT, EXTRA, MISSING.format("attention.qkv"), MISSING.format("mlp.fc1"), OTHER_FUNCTION, OTHER_INPUT]
    named = {start: [line for line in lines if line.startswith(start)] for start in expected}
    assert all(len(found) == 1 for found in named.values()), named
