"""Ranks that do not issue the same collectives are stopped at once, and the report names each rank's call and line."""

from __future__ import annotations

import inspect
import time

import planted_schedules as bugs
import pytest
from planted import assert_minimal, broken_checks, case_of, the, verified

import tpverify as tpv

EXCHANGED = inspect.getsourcelines(bugs.SumThatDiffers.forward)[1] + 3
LINE = f"{bugs.__file__}:{EXCHANGED}"
FASTEST = 0.1
"""Seconds from case to report; a real backend needs its timeout, minutes. Most of this is the case itself."""


@pytest.mark.parametrize(
    ("subject", "what", "calls"),
    [
        (bugs.maximum_on_one_rank, "reduce op", ("all_reduce(SUM, float64[1, 1, 1])", "all_reduce(MAX, float64[1, 1, 1])")),
        (bugs.single_precision_on_one_rank, "dtype", ("all_reduce(SUM, float64[1, 1, 1])", "all_reduce(SUM, float32[1, 1, 1])")),
    ],
    ids=["maximum", "single_precision"],
)
def test_different_calls_are_named_with_both_ranks_lines(subject: tpv.Subject, what: str, calls: tuple[str, str]) -> None:
    result = verified(subject)
    assert broken_checks(result) == {"communication"}
    found = the(result, "communication")
    assert found.ranks == (0, 1)
    assert found.message.splitlines() == [
        f"Expected all ranks of group default_pg to issue the same collective #1 but they differ in {what}:",
        f"  rank 0  {calls[0]} in forward at {LINE}",
        f"  rank 1  {calls[1]} in forward at {LINE}",
    ]
    assert_minimal(found, seq=1, batch=1, in_features=2, out_features=1, bias=False, sequence_parallel=False)


def test_a_skipped_collective_is_named_with_the_line_that_waits() -> None:
    result = verified(bugs.skipped_on_one_rank)
    assert broken_checks(result) == {"communication"}
    found = the(result, "communication")
    assert found.ranks == (0,)
    assert f"  rank 0  waits in #1 all_reduce(SUM, float64[1, 1, 1]) in forward at {LINE} for rank 1" in found.message
    assert "  rank 1  has finished" in found.message
    assert_minimal(found, seq=1, batch=1, in_features=2, out_features=1, bias=False, sequence_parallel=False)


def test_a_rank_that_skips_its_last_collective_leaves_the_others_waiting() -> None:
    result = verified(bugs.skipped_without_target)
    assert broken_checks(result) == {"communication"}
    found = the(result, "communication")
    assert found.ranks == (1,)
    first, *lines = found.message.splitlines()
    assert first == "Expected every rank to go on but no rank can: each waits for a rank that will not come"
    assert lines[0] == "  rank 0  has finished"
    assert lines[1].startswith("  rank 1  waits in #3 all_reduce(SUM, float64[1, 1]) in forward at ")
    assert lines[1].endswith(" for rank 0")
    assert_minimal(found, seq=1, batch=1, vocab=2, label_smoothing=0.0)


def test_two_swapped_collectives_of_one_shape_are_named_with_both_orders() -> None:
    result = verified(bugs.swapped_on_one_rank)
    assert broken_checks(result) == {"communication"}
    found = the(result, "communication")
    assert found.ranks == (0, 1)
    first, *lines = found.message.splitlines()
    assert first == "Expected rank 1 to issue its collectives in the order of rank 0 but the order differs:"
    assert [line.split("  ")[1] for line in lines] == ["#2 rank 0", "#2 rank 1", "#3 rank 0", "#3 rank 1"]
    assert all("all_reduce(SUM, float64[1, 1]) in forward at " in line for line in lines)
    assert_minimal(found, seq=1, batch=1, vocab=2, label_smoothing=0.0, z_loss=0.0)


@pytest.mark.parametrize(
    "subject",
    [bugs.maximum_on_one_rank, bugs.skipped_on_one_rank, bugs.skipped_without_target, bugs.swapped_on_one_rank],
    ids=lambda subject: subject.name,
)
def test_a_mismatch_is_found_within_milliseconds(subject: tpv.Subject) -> None:
    case = case_of(the(verified(subject), "communication"))
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        assert [violation.check for violation in tpv.check_case(subject, case)] == ["communication"]
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < FASTEST
