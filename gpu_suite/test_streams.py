"""Results that are used before they are there: by a missing wait, on the wrong stream, or because a buffer is written in flight."""

from __future__ import annotations

from dataclasses import replace

import pytest

import tpverify as tpv
from gpu_suite import reused, streams
from gpu_suite.conftest import Rows
from gpu_suite.places import Place
from gpu_suite.showing import broken
from gpu_suite.test_planted import caught
from tpverify.case import Case
from tpverify.lookup import addressed
from tpverify.subjects.linear_subjects import RowParallelLinearConfig

CONFIG = RowParallelLinearConfig(seq=3, batch=2, in_features=8, out_features=5)
ON_STREAMS = ("unsynchronised", "synchronised")


def cases(subject: tpv.Subject, size: int) -> list[Case]:
    """The same numbers in one call and in two."""
    one = Case(subject.name, CONFIG, size, seed=1)
    return [one, replace(one, calls="interleaved")]


@pytest.mark.row("streams")
@pytest.mark.parametrize(
    ("name", "checks"), [("never_waited", {"buffers", "forward"}), ("unsynchronised", {"forward"})], ids=["missing wait", "side stream"]
)
def test_a_result_that_is_read_too_early_is_caught(name: str, checks: set[str], place: Place, rows: Rows) -> None:
    if name in ON_STREAMS:
        rows.need_cuda()
    size = rows.need_several()[0]
    subject = addressed(getattr(streams, name))
    caught(rows, name, 2, checks - broken(subject, cases(subject, size), place.world, place.device))


@pytest.mark.row("streams")
@pytest.mark.parametrize("name", ["waited", "synchronised", "promised_sum"], ids=["wait", "side stream", "functional"])
def test_its_twin_that_waits_passes(name: str, place: Place, rows: Rows) -> None:
    if name in ON_STREAMS:
        rows.need_cuda()
    subject = addressed(getattr(streams, name))
    rows.check(subject, cases(subject, place.largest_sizes[0]))


@pytest.mark.row("streams")
def test_a_buffer_that_is_written_in_flight_is_caught(place: Place, rows: Rows) -> None:
    size = rows.need_several()[0]
    subject = addressed(reused.behaving)
    case = Case(subject.name, reused.Behaviour("written in flight"), size)
    caught(rows, "written in flight", 1, {"buffers"} - broken(subject, [case], place.world, place.device))
