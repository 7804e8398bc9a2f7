"""Calls in processes of their own: order, exceptions, processes that die, and an end to all of them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest

from tpverify.mutants.workers import Failure, each


def halved(number: int) -> int:
    """Half of an even number; other numbers raise, 13 ends the process, 100 takes forever."""
    if number == 13:
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 100:
        time.sleep(600)
    if number % 2:
        raise ValueError(f"{number} is odd\nand that is that")
    return number // 2


def process_of(number: int) -> int:
    """Which process runs it."""
    return os.getpid()


@pytest.mark.parametrize("jobs", [1, 2, 5])
def test_every_item_is_called_once(jobs: int) -> None:
    assert dict(each(halved, [2, 4, 6, 8], jobs)) == {0: 1, 1: 2, 2: 3, 3: 4}


def test_no_items_start_no_process() -> None:
    assert list(each(halved, [], 2)) == []


def test_no_more_processes_than_jobs() -> None:
    assert len({pid for _, pid in each(process_of, list(range(6)), 2)} - {os.getpid()}) == 2


def test_an_exception_is_a_failure_with_its_traceback_and_the_others_go_on() -> None:
    results = dict(each(halved, [2, 3, 4], 1))
    failure = results.pop(1)
    assert results == {0: 1, 2: 2}
    assert isinstance(failure, Failure)
    assert failure.message == "ValueError: 3 is odd"
    assert "in halved" in failure.traceback


def test_a_process_that_dies_is_a_failure_and_the_others_go_on() -> None:
    results = dict(each(halved, [2, 13, 4, 6], 1))
    assert results.pop(1) == Failure("its process ended with signal SIGKILL")
    assert results == {0: 1, 2: 2, 3: 3}


def test_leaving_ends_the_workers() -> None:
    before = set(multiprocessing.active_children())
    results = each(halved, [100, 2, 4], 2)
    assert next(results)[0] in (1, 2)
    assert len(set(multiprocessing.active_children()) - before) == 2
    results.close()  # type: ignore[attr-defined]
    assert set(multiprocessing.active_children()) <= before


def test_ctrl_c_is_as_it_was_and_reaches_no_worker() -> None:
    before = signal.getsignal(signal.SIGINT)
    assert dict(each(disposition, [0], 1)) == {0: True}
    assert signal.getsignal(signal.SIGINT) is before


def disposition(number: int) -> bool:
    """Whether Ctrl-C is ignored here."""
    return signal.getsignal(signal.SIGINT) is signal.SIG_IGN
