"""Ranks that raise, loop or are interrupted: their own traceback first, peers unwound, and the next run works."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tpverify.errors import CaseError, RankError, RankTimeout, SimulationError
from tpverify.simulator import scheduler
from tpverify.simulator.world import simulate

Program = Callable[[int], Any]
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _the_next_run_works() -> Iterator[None]:
    yield
    x = simulate(lambda: (x := torch.ones(1), dist.all_reduce(x))[0], 3).results
    assert [value.item() for value in x] == [3.0] * 3
    assert not dist.is_initialized()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]


def fails(program: Program, world_size: int = 2, **options: Any) -> SimulationError:
    with pytest.raises(SimulationError) as caught:
        simulate(lambda: program(dist.get_rank()), world_size, **options)
    return caught.value


class RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(grad.clone())
        if dist.get_rank() == 1:
            raise LookupError("wrong")
        dist.barrier()
        return grad


def before(rank: int) -> None:
    if rank == 1:
        raise LookupError("wrong")
    dist.barrier()


def between(rank: int) -> None:
    dist.barrier()
    before(rank)


def after_the_others_finished(rank: int) -> None:
    dist.barrier()
    if rank == 1:
        dist.distributed_c10d._get_default_store().set("key", "value")
        raise LookupError("wrong")


def inside_a_collective(rank: int) -> None:
    x = WrongTensor() if rank == 1 else torch.ones(2)
    dist.all_reduce(x)


class WrongTensor(torch.Tensor):
    @property
    def shape(self) -> Any:
        raise LookupError("wrong")


def inside_backward(rank: int) -> None:
    RaiseInBackward.apply(torch.ones(2, requires_grad=True)).sum().backward()


def inside_new_group(rank: int) -> None:
    if rank == 1:
        before(rank)
    dist.new_group([0])
    dist.barrier()


def with_a_collective_in_finally(rank: int) -> None:
    try:
        if rank == 1:
            raise LookupError("wrong")
        dist.all_reduce(torch.ones(1))
    finally:
        dist.barrier()


def with_a_collective_that_deadlocks_in_finally(rank: int) -> None:
    try:
        before(rank)
    finally:
        if rank == 1:
            dist.all_reduce(torch.ones(1))


PROGRAMS = (
    before,
    between,
    after_the_others_finished,
    inside_a_collective,
    inside_backward,
    inside_new_group,
    with_a_collective_in_finally,
    with_a_collective_that_deadlocks_in_finally,
)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("schedule", [None, 0, 1, 2])
def test_a_rank_that_raises_is_shown_first_without_our_frames(program: Program, schedule: int | None) -> None:
    error = fails(program, 3, schedule=schedule)
    assert isinstance(error, RankError)
    assert error.rank == 1
    assert isinstance(error.exception, LookupError)
    assert error.__cause__ is error.exception
    text = str(error)
    assert text.startswith("rank 1 raised LookupError\nTraceback (most recent call last):\n")
    assert "LookupError: wrong" in text
    assert os.path.join("tpverify", "simulator") not in text
    assert __file__ in text


def test_a_consequence_is_told_after_the_cause() -> None:
    text = str(fails(with_a_collective_in_finally, 2))
    cause, consequence = text.split("LookupError: wrong")
    assert "they differ in kind" in consequence
    assert "barrier() at" in consequence


def test_a_chained_exception_keeps_its_cause() -> None:
    def program(rank: int) -> None:
        try:
            before(1)
        except LookupError as error:
            raise ValueError("outer") from error

    text = str(fails(program))
    assert text.index("LookupError: wrong") < text.index("ValueError: outer")


@pytest.mark.parametrize("exception", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_exceptions_that_end_programs_are_the_ranks_own(exception: BaseException) -> None:
    def program(rank: int) -> None:
        dist.barrier()
        if rank == 0:
            raise exception
        dist.barrier()

    error = fails(program)
    assert isinstance(error, RankError)
    assert error.exception is exception


def test_peers_run_their_finally_blocks_and_swallow_nothing() -> None:
    cleaned: list[int] = []
    swallowed: list[int] = []

    def program(rank: int) -> None:
        try:
            try:
                dist.barrier()
                if rank == 2:
                    raise LookupError("wrong")
                dist.barrier()
            except Exception:
                if rank != 2:
                    swallowed.append(rank)
                raise
        finally:
            cleaned.append(rank)

    fails(program, 4)
    assert sorted(cleaned) == [0, 1, 2, 3]
    assert swallowed == []


def test_collectives_in_finally_blocks_of_unwound_ranks_do_not_block() -> None:
    def program(rank: int) -> None:
        if rank == 0:
            raise LookupError("wrong")
        try:
            dist.barrier()
        finally:
            try:
                dist.all_reduce(torch.ones(1))
            finally:
                dist.distributed_c10d._get_default_store().wait(["never"])

    assert isinstance(fails(program, 3), RankError)


def test_a_rank_that_catches_everything_is_unwound_at_its_next_collective() -> None:
    def program(rank: int) -> None:
        if rank == 1:
            raise LookupError("wrong")
        for _ in range(5):
            try:
                dist.barrier()
            except BaseException:
                continue

    assert isinstance(fails(program, 3), RankError)


def spins(rank: int) -> None:
    while rank == 1:
        pass
    dist.barrier()


def communicates_for_ever(rank: int) -> None:
    while True:
        dist.barrier()


def polls_for_ever(rank: int) -> None:
    work = dist.all_reduce(torch.ones(1), async_op=True) if rank == 0 else None
    while work is not None and not work.is_completed():
        pass
    while rank:
        dist.distributed_c10d._get_default_store().check(["never"])


@pytest.mark.parametrize("program", [spins, communicates_for_ever, polls_for_ever])
def test_an_endless_loop_is_ended_by_the_timeout(program: Program) -> None:
    start = time.monotonic()
    error = fails(program, 3, timeout=0.3)
    assert isinstance(error, RankTimeout)
    assert "timeout=0.3" in str(error)
    assert __file__ in str(error)
    assert time.monotonic() - start < scheduler.GRACE_SECONDS


def test_the_finally_blocks_of_an_interrupted_rank_run_to_their_end() -> None:
    done: list[int] = []

    def program(rank: int) -> None:
        try:
            while True:
                pass
        finally:
            for number in range(20):
                time.sleep(0.005)
                done.append(number)

    assert isinstance(fails(program, 1, timeout=0.1), RankTimeout)
    assert done == list(range(20))


def test_a_call_that_does_not_come_back_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "GRACE_SECONDS", 0.3)
    cleaned: list[int] = []
    woken = threading.Event()

    def program(rank: int) -> None:
        try:
            dist.barrier()
            if rank == 1:
                time.sleep(1.5)
            dist.barrier()
        finally:
            cleaned.append(rank)
            if rank == 1:
                woken.set()

    start = time.monotonic()
    error = fails(program, 3, timeout=0.1)
    assert time.monotonic() - start < 1.4
    assert isinstance(error, RankTimeout)
    assert "rank 1 was running at" in str(error)
    assert "thread of rank 1 does not come back" in str(error)
    assert sorted(cleaned) == [0, 2]
    outside = dist.distributed_c10d._world
    assert simulate(dist.get_rank, 2).results == [0, 1]
    assert woken.wait(5.0)
    for thread in [thread for thread in threading.enumerate() if thread.name == "rank 1"]:
        thread.join(5.0)
    assert dist.distributed_c10d._world is outside


@pytest.mark.parametrize(
    "body", ["while True: pass", "while True: dist.barrier()", "dist.barrier() if dist.get_rank() else time.sleep(0.5)"]
)
def test_ctrl_c(body: str) -> None:
    code = f"""
import os, signal, sys, threading, time
import torch.distributed as dist
from tpverify.simulator.world import simulate
def program():
    try:
        dist.barrier()
        while True:
            {body}
    finally:
        print("cleaned", flush=True)
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
start = time.monotonic()
try:
    simulate(program, 3)
except KeyboardInterrupt:
    assert simulate(dist.get_rank, 2).results == [0, 1]
    print("interrupted", time.monotonic() - start < 4.0, flush=True)
    raise
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["cleaned"] * 3 + ["interrupted True"], done.stderr
    assert done.returncode == -signal.SIGINT
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")


def test_simulations_do_not_nest() -> None:
    error = fails(lambda rank: simulate(dist.get_rank, 2))
    assert isinstance(error, RankError)
    assert isinstance(error.exception, CaseError)
    assert "do not nest" in str(error)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 0}, "world_size=0"),
        ({"world_size": True}, "world_size=True"),
        ({"world_size": 2, "timeout": 0.0}, "timeout=0.0"),
        ({"world_size": 2, "reduction_order": "random"}, "reduction_order='random'"),
        ({"world_size": 2, "rank_local": ["no.such_module"]}, "rank_local='no.such_module'"),
    ],
)
def test_arguments_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CaseError, match=message):
        simulate(dist.get_rank, **options)
