"""The bugs everybody makes once are caught by the check that is there for them, shrunk, and reported with rank, tensor and cause."""

from __future__ import annotations

import planted_layers as bugs
import pytest
from planted import assert_minimal, broken_checks, the, verified

import tpverify as tpv
from tpverify.subjects.block import transformer_block
from tpverify.subjects.language_model_subjects import gpt
from tpverify.subjects.linear_subjects import column_parallel_linear, row_parallel_linear
from tpverify.subjects.mlp import mlp
from tpverify.verification import read_case
from tpverify.violation import failure_report

FEW = 30
"""Cases drawn from subjects that are slow to run."""


@pytest.mark.parametrize("subject", [mlp, column_parallel_linear, row_parallel_linear], ids=lambda subject: subject.name)
def test_nothing_is_found_in_layers_where_nothing_is_planted(subject: tpv.Subject) -> None:
    assert verified(subject).violations == ()


@pytest.mark.parametrize("subject", [bugs.cross_entropy_in_steps, bugs.embedding_in_steps], ids=lambda subject: subject.name)
def test_nothing_is_found_along_the_vocabulary_where_nothing_is_planted(subject: tpv.Subject) -> None:
    assert verified(subject).violations == ()


@pytest.mark.parametrize("subject", [transformer_block, gpt], ids=lambda subject: subject.name)
def test_nothing_is_found_in_models_where_nothing_is_planted(subject: tpv.Subject) -> None:
    assert verified(subject, FEW).violations == ()


def test_a_report_holds_what_is_needed_to_see_and_repeat_the_failure() -> None:
    violation = the(verified(bugs.reduced_twice), "forward", "output")
    report = failure_report(violation)
    first, *_, case, replay = report.splitlines()
    assert first == "tpverify: forward check failed: planted_layers:reduced_twice, world_size=2, ranks 0 and 1"
    assert "expected -0.947584 but got -1.89517" in report
    assert case.startswith("Failing test case: Case('planted_layers:reduced_twice', RowParallelLinearConfig(in_features=2, ")
    assert replay.startswith("Replay: tpverify replay ")


def test_input_gradient_of_a_column_parallel_layer_is_not_reduced() -> None:
    result = verified(bugs.input_gradient_not_reduced)
    found = the(result, "input-gradient", "x.grad")
    assert found.ranks == (0, 1)
    assert found.diagnosis == "rank 0 + rank 1 equals the expected value: a missing all_reduce(SUM) in backward fits this"
    assert_minimal(found, seq=1, batch=1, in_features=1, out_features=2, bias=False, sequence_parallel=False)
    message = "Expected 1 all_reduce of 1 elements in backward but got 0: no collective in backward at all"
    assert the(result, "communication").message == message
    assert the(result, "replication", "x.grad").ranks == (1,)
    assert "forward" not in broken_checks(result)


def test_output_of_a_row_parallel_layer_is_reduced_in_backward_too() -> None:
    result = verified(bugs.reduced_both_ways)
    found = the(result, "parameter-gradient", "weight.grad")
    assert found.ranks == (0, 1)
    assert found.diagnosis == "every rank holds 2 times the expected value (the world size): one reduction too many in backward fits this"
    assert_minimal(found, seq=1, batch=1, in_features=2, out_features=1, bias=False, sequence_parallel=False)
    assert "Expected no further collective in backward but got all_reduce(SUM, float64[1, 1, 1])" in the(result, "communication").message
    assert broken_checks(result) == {"input-gradient", "parameter-gradient", "communication"}


def test_output_of_the_second_layer_of_an_mlp_is_reduced_in_backward_too() -> None:
    result = verified(bugs.reduced_both_ways_in_mlp)
    for tensor in ("fc1.weight.grad", "fc2.weight.grad"):
        found = the(result, "parameter-gradient", tensor)
        assert found.ranks == (0, 1)
        assert "(the world size): one reduction too many in backward fits this" in found.diagnosis
    message = the(result, "communication").message
    assert "in backward of fc2 at " in message and "mutants/mappings.py:" in message and message.endswith(", which nothing declares")


def test_bias_of_a_row_parallel_layer_is_added_before_the_reduction() -> None:
    result = verified(bugs.bias_before_reduction)
    found = the(result, "forward", "output")
    assert found.ranks == (0, 1)
    assert found.diagnosis == "every row holds bias 2 times instead of once: added on every rank before a reduction fits this"
    assert_minimal(found, batch=1, in_features=2, out_features=1, bias=True, skip_bias_add=False)
    assert broken_checks(result) <= {"forward", "parameter-gradient"}


def test_output_of_a_row_parallel_layer_is_reduced_twice() -> None:
    result = verified(bugs.reduced_twice)
    found = the(result, "forward", "output")
    assert found.ranks == (0, 1)
    assert found.diagnosis == "every rank holds 2 times the expected value (the world size): one reduction too many in forward fits this"
    assert_minimal(found, seq=1, batch=1, in_features=2, out_features=1, bias=False, sequence_parallel=False)
    extra = the(result, "communication")
    assert extra.ranks == (0, 1)
    assert extra.message.startswith("Expected no further collective in forward but got all_reduce(SUM, float64[1, 1, 1])")
    assert extra.message.endswith(", once more than declared")
    assert_minimal(extra, in_features=2, out_features=1)


def test_features_are_gathered_before_the_activation() -> None:
    result = verified(bugs.gather_before_gelu)
    assert broken_checks(result) == {"communication"}
    assert {violation.ranks for violation in result.violations} == {(0, 1)}
    messages = [violation.message for violation in result.violations]
    for phase in ("forward", "backward"):
        expected = f"Expected no further collective in {phase} but got all_gather(float64[1, 1, 1]) in {phase}"
        assert any(message.startswith(expected) and message.endswith(", which nothing declares") for message in messages)
    assert_minimal(the(result, "communication"), seq=1, batch=1, hidden=1, ffn=2, bias=False, sequence_parallel=False)


@pytest.mark.parametrize(
    ("subject", "message"),
    [
        (bugs.mask_start_off_by_one, "Expected rank 0 to contribute the rows of its own ids but it contributes nothing to ids 0"),
        (bugs.mask_stop_off_by_one, "Expected rank 0 to contribute exactly zero for ids of other ranks but it contributes to ids 1"),
        (bugs.mask_forgotten, "Expected rank 0 to contribute exactly zero for ids of other ranks but it contributes to ids 1"),
    ],
    ids=lambda value: value.name if isinstance(value, tpv.Subject) else "",
)
def test_vocabulary_mask_is_wrong(subject: tpv.Subject, message: str) -> None:
    result = verified(subject)
    found = the(result, "vocabulary", "ids")
    assert (found.ranks, found.message) == ((0,), message)
    vocab = 1 if subject is bugs.mask_start_off_by_one else 2
    assert_minimal(found, seq=1, batch=1, vocab=vocab, hidden=1, multiple=1, sequence_parallel=False)
    assert the(result, "forward", "output").ranks == (0, 1)


def test_a_forgotten_mask_trains_the_padding() -> None:
    found = the(verified(bugs.mask_forgotten), "vocabulary", "weight.grad")
    assert (found.ranks, found.message) == ((1,), "Expected the padding rows of weight.grad to be exactly zero but they are not")
    assert_minimal(found, seq=1, batch=1, vocab=1, hidden=1, multiple=1)


def test_output_side_of_a_tied_gradient_is_lost() -> None:
    result = verified(bugs.tied_gradient_lost, FEW)
    found = the(result, "tied", "word.weight.grad")
    assert found.ranks == (0, 1)
    assert found.diagnosis == "the gradient of its use as head.weight is missing: that fits exactly"
    assert "(the sum of the gradients of its uses word.weight, head.weight)" in found.message
    assert_minimal(found, tied=True, layers=1, vocab=2, sequence_parallel=False, label_smoothing=0.0, z_loss=0.0)
    assert broken_checks(result) == {"tied", "parameter-gradient"}


def test_logit_shards_are_swapped() -> None:
    result = verified(bugs.logit_shards_swapped)
    found = the(result, "forward", "output")
    assert found.ranks == (0, 1)
    assert_minimal(found, seq=1, batch=1, vocab=2, label_smoothing=0.0, z_loss=0.0)
    assert the(result, "input-gradient", "logits.grad").ranks == (0, 1)
    assert "communication" not in broken_checks(result)


def test_joined_features_are_in_the_wrong_order() -> None:
    result = verified(bugs.column_joined_backwards)
    found = the(result, "forward")
    assert found.ranks == (0, 1)
    assert found.diagnosis == ("the parts of the ranks stand in reverse order along dimension 2: a gather in the wrong order fits this")
    assert_minimal(found, seq=1, batch=1, in_features=1, out_features=2, gather_output=True)


@pytest.mark.parametrize("subject", [bugs.local_maximum, bugs.local_maximum_unexchanged], ids=lambda subject: subject.name)
def test_local_maximum_overflows_where_one_shard_holds_a_huge_logit(subject: tpv.Subject) -> None:
    result = verified(subject)
    found = the(result, "forward", "output")
    assert found.ranks == (0, 1)
    assert "but got inf" in found.message
    assert_minimal(found, but=("values",), seq=1, batch=1, vocab=2, label_smoothing=0.0, z_loss=0.0)
    assert "values='spike'" in found.case  # nothing else finds it
    assert the(result, "input-gradient", "logits.grad").ranks == (0,)


def test_a_local_maximum_is_missed_by_ordinary_values() -> None:
    found = the(verified(bugs.local_maximum), "forward", "output")
    ordinary = found.case.replace(", values='spike'", "")
    assert tpv.check_case(bugs.local_maximum, read_case(ordinary)[1]) == []


def test_label_smoothing_uses_the_local_shard() -> None:
    result = verified(bugs.local_smoothing)
    found = the(result, "forward", "output")
    assert found.ranks == (0, 1)
    assert_minimal(found, seq=1, batch=1, vocab=2, label_smoothing=0.1, z_loss=0.0)
    assert the(result, "replication", "output").ranks == (1,)
    assert "Expected 3 all_reduces (SUM) of 1 elements in forward but got 2" in the(result, "communication").message


def test_norm_gradients_stay_partial_under_sequence_parallelism() -> None:
    result = verified(bugs.norm_gradient_partial, FEW)
    for tensor in ("norm1.weight.grad", "norm1.bias.grad", "norm2.weight.grad", "norm2.bias.grad"):
        found = the(result, "replication", tensor)
        assert found.ranks == (1,)
        assert_minimal(found, seq=2, batch=1, sequence_parallel=True)
        summed = the(result, "parameter-gradient", tensor)
        assert summed.ranks == (0, 1)
        assert summed.diagnosis == "rank 0 + rank 1 equals the expected value: a missing all_reduce(SUM) in backward fits this"
    assert "in optimizer but got 0" in the(result, "communication").message
    assert broken_checks(result) == {"replication", "parameter-gradient", "communication"}
