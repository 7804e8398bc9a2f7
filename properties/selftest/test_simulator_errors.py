"""Programs whose ranks disagree or wait for ever: each is named with the lines of both sides, without a timer."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from tpverify.errors import CollectiveMismatch, Deadlock, SimulationError
from tpverify.simulator.world import simulate

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated.*:FutureWarning")

Program = Callable[[int], Any]
SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX


def fails(program: Program, world_size: int = 2, **options: Any) -> SimulationError:
    with pytest.raises(SimulationError) as caught:
        simulate(lambda: program(dist.get_rank()), world_size, **options)
    return caught.value


def lines_of(error: SimulationError) -> list[int]:
    return [int(number) for number in re.findall(re.escape(__file__) + r":(\d+)", str(error))]


def line_of(function: Callable[..., Any]) -> int:
    return function.__code__.co_firstlineno


MISMATCHES: list[tuple[str, Callable[[], Any], Callable[[], Any]]] = [
    ("kind", lambda: dist.all_reduce(torch.ones(2)), lambda: dist.broadcast(torch.ones(2), 0)),
    ("kind", lambda: dist.barrier(), lambda: dist.all_reduce(torch.ones(2))),
    ("reduce op", lambda: dist.all_reduce(torch.ones(2), SUM), lambda: dist.all_reduce(torch.ones(2), MAX)),
    ("dtype", lambda: dist.all_reduce(torch.ones(2)), lambda: dist.all_reduce(torch.ones(2).double())),
    (
        "dtype",
        lambda: dist.gather(torch.ones(2), [torch.ones(2), torch.ones(2)], dst=0),
        lambda: dist.gather(torch.ones(2).double(), dst=0),
    ),
    ("shape", lambda: dist.all_reduce(torch.ones(2)), lambda: dist.all_reduce(torch.ones(3))),
    ("shape", lambda: dist.all_reduce(torch.ones(2, 3)), lambda: dist.all_reduce(torch.ones(3, 2))),
    (
        "shape",
        lambda: dist.all_gather_into_tensor(torch.ones(4), torch.ones(2)),
        lambda: dist.all_gather_into_tensor(torch.ones(6), torch.ones(3)),
    ),
    ("root", lambda: dist.broadcast(torch.ones(2), 0), lambda: dist.broadcast(torch.ones(2), 1)),
    (
        "size",
        lambda: dist.all_to_all_single(torch.ones(2), torch.ones(3), [1, 1], [1, 2]),
        lambda: dist.all_to_all_single(torch.ones(2), torch.ones(2), [1, 1], [1, 1]),
    ),
    ("size", lambda: dist.scatter(torch.ones(2), [torch.ones(2)] * 2, src=0), lambda: dist.scatter(torch.ones(3), src=0)),
]


def coalesced(*sizes: int) -> None:
    with dist._coalescing_manager():
        for size in sizes:
            dist.all_reduce(torch.ones(size))


@pytest.mark.parametrize(("what", "first", "second"), MISMATCHES, ids=[f"{index}-{case[0]}" for index, case in enumerate(MISMATCHES)])
@pytest.mark.parametrize("schedule", [None, 3])
def test_a_mismatch_names_the_difference_and_both_lines(
    what: str, first: Callable[[], Any], second: Callable[[], Any], schedule: int | None
) -> None:
    error = fails(lambda rank: (dist.barrier(), (first, second)[rank]()), schedule=schedule)
    assert isinstance(error, CollectiveMismatch)
    assert f"they differ in {what}:" in str(error)
    assert "collective #2" in str(error)
    assert error.ranks == (0, 1)
    assert {line_of(first), line_of(second)} <= set(lines_of(error))


@pytest.mark.parametrize("sizes", [(2, 1), (1,)])
def test_coalesced_collectives_must_agree_one_by_one(sizes: tuple[int, ...]) -> None:
    assert "they differ in shape:" in str(fails(lambda rank: coalesced(*((1, 2), sizes)[rank])))


def test_send_and_recv_must_agree_on_the_size() -> None:
    error = fails(lambda rank: dist.send(torch.ones(2), 1) if rank == 0 else dist.recv(torch.ones(3), 0))
    assert isinstance(error, CollectiveMismatch)
    assert "send and recv" in str(error)
    assert len(lines_of(error)) == 2


def test_a_list_of_gathers_with_one_wrong_buffer() -> None:
    def program(rank: int) -> None:
        dist.all_gather([torch.ones(2), torch.ones(2), torch.ones(2 if rank else 3)], torch.ones(2))

    assert "rank 0 has room for [2, 2, 3] elements and is sent [2, 2, 2]" in str(fails(program, 3))


def test_group_membership() -> None:
    def program(rank: int) -> None:
        dist.new_group([0, 1] if rank != 1 else [1, 2])

    error = fails(program, 3)
    assert isinstance(error, CollectiveMismatch)
    assert "new_group([0, 1])" in str(error)
    assert "new_group([1, 2])" in str(error)


def swapped_lines(rank: int) -> None:
    a, b = torch.ones(2), torch.zeros(2)
    if rank == 0:
        reduce_first(a)
        reduce_second(b)
    else:
        reduce_second(b)
        reduce_first(a)


def reduce_first(x: torch.Tensor) -> None:
    dist.all_reduce(x)


def reduce_second(x: torch.Tensor) -> None:
    dist.all_reduce(x)


def shared_helper(x: torch.Tensor) -> None:
    dist.all_reduce(x)


def swapped_through_a_helper(rank: int) -> None:
    def query() -> None:
        shared_helper(torch.ones(2))

    def key() -> None:
        shared_helper(torch.zeros(2))

    for call in (query, key) if rank == 0 else (key, query):
        call()


class ReduceInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Branch(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ReduceInBackward.apply(x)


class Branches(torch.nn.Module):
    def __init__(self, reverse: bool) -> None:
        super().__init__()
        self.query, self.key, self.reverse = Branch(), Branch(), reverse

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Backward visits what was created last first: the order of creation decides.
        branches = (self.key, self.query) if self.reverse else (self.query, self.key)
        return sum(branch(x) for branch in branches)


def swapped_in_backward(rank: int) -> None:
    Branches(rank == 1)(torch.ones(2, requires_grad=True)).sum().backward()


def one_reduction() -> None:
    dist.all_reduce(torch.ones(2))


def another_reduction() -> None:
    dist.all_reduce(torch.ones(2))


def swapped_in_arms(rank: int) -> None:
    if rank == 1:
        another_reduction()
        one_reduction()
    else:
        one_reduction()
        another_reduction()


@pytest.mark.parametrize("program", [swapped_lines, swapped_through_a_helper, swapped_in_backward, swapped_in_arms])
@pytest.mark.parametrize("world_size", [2, 4])
def test_equal_collectives_in_another_order_are_crossed(program: Program, world_size: int) -> None:
    error = fails(program, world_size)
    assert isinstance(error, CollectiveMismatch)
    assert "the order differs" in str(error)
    assert len(lines_of(error)) == 4 * (2 if program is swapped_through_a_helper else 1)  # a helper's line and its caller's


def legitimate_root_and_peers(rank: int) -> None:
    for _ in range(3):
        if rank == 0:
            dist.broadcast(torch.ones(2), 0)
        else:
            dist.broadcast(torch.zeros(2), 0)


def legitimate_own_lines(rank: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(2))
        dist.all_reduce(torch.zeros(2))
    else:
        for _ in range(2):
            dist.all_reduce(torch.ones(2))


def legitimate_loop(rank: int) -> None:
    for source in range(2):
        shared_helper(torch.ones(2) * (source == rank))


def legitimate_branches(rank: int) -> None:
    Branches(False)(torch.ones(2, requires_grad=True)).sum().backward()


def legitimate_turns(rank: int) -> None:
    for step in range(3):
        if step == rank:
            dist.all_reduce(torch.ones(2))
        else:
            dist.all_reduce(torch.zeros(2))


def legitimate_turns_in_helpers(rank: int) -> None:
    for step in range(3):
        if step == rank:
            one_reduction()
        else:
            another_reduction()


LEGITIMATE = [
    legitimate_root_and_peers,
    legitimate_own_lines,
    legitimate_loop,
    legitimate_branches,
    legitimate_turns,
    legitimate_turns_in_helpers,
]


@pytest.mark.parametrize("program", LEGITIMATE)
def test_rank_dependent_lines_are_no_crossing(program: Program) -> None:
    for schedule in (None, 1, 2):
        simulate(lambda: program(dist.get_rank()), 3, schedule=schedule)


def skips_the_last(rank: int) -> None:
    dist.all_reduce(torch.ones(2))
    if rank != 1:
        dist.barrier()


def skips_one_in_the_middle(rank: int) -> None:
    if rank != 1:
        dist.all_reduce(torch.ones(2))
    dist.all_reduce(torch.ones(2))


def receives_what_nobody_sends(rank: int) -> None:
    if rank == 2:
        dist.recv(torch.ones(1), 0)


def sends_head_on(rank: int) -> None:
    if rank < 2:
        dist.send(torch.ones(1), 1 - rank)
        dist.recv(torch.ones(1), 1 - rank)


def waits_in_the_store(rank: int) -> None:
    if rank == 1:
        dist.distributed_c10d._get_default_store().wait(["never"])


def waits_crosswise(rank: int) -> None:
    left, right = dist.new_group([0, 1]), dist.new_group([1, 2])
    if rank == 0:
        dist.barrier(group=left)
        dist.barrier()
    if rank == 1:
        dist.barrier(group=right)
        dist.barrier(group=left)
    if rank == 2:
        dist.barrier()
        dist.barrier(group=right)


def waits_for_a_handle(rank: int) -> None:
    if rank == 0:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        work.wait()


def waits_for_a_promise(rank: int) -> None:
    if rank == 0:
        assert funcol.all_reduce(torch.ones(1), "sum", dist.group.WORLD) + 1


@pytest.mark.parametrize(
    ("program", "waiting", "text"),
    [
        (skips_the_last, (0, 2), "waits in #2 barrier() at"),
        (skips_one_in_the_middle, (0, 2), "for rank 1"),
        (receives_what_nobody_sends, (2,), "for rank 0"),
        (sends_head_on, (0, 1), "waits in send(float32[1], peer=1)"),
        (waits_in_the_store, (1,), "waits in the store for"),
        (waits_crosswise, (0, 1, 2), "waits in #1 barrier() at"),
        (waits_for_a_handle, (0,), "for ranks 1, 2"),
        (waits_for_a_promise, (0,), "for ranks 1, 2"),
    ],
)
@pytest.mark.parametrize("schedule", [None, 0, 1])
def test_a_deadlock_says_who_waits_for_what_and_who_has_finished(
    program: Program, waiting: tuple[int, ...], text: str, schedule: int | None
) -> None:
    error = fails(program, 3, schedule=schedule)
    assert isinstance(error, Deadlock)
    assert error.ranks == waiting
    assert text in str(error)
    for rank in range(3):
        said = next(line for line in str(error).splitlines() if line.startswith(f"  rank {rank}  "))
        assert ("has finished" in said) == (rank not in waiting)
        assert (__file__ in said) == (rank in waiting)
    first = line_of(program)
    assert all(first < line <= first + 12 for line in lines_of(error))


def test_messages_show_the_users_line_phase_and_module() -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(x)
            return x

    error = fails(lambda rank: torch.nn.Sequential(Layer())(torch.ones(2 + rank)))
    assert "all_reduce(SUM, float32[2]) in forward of Sequential.0 at " in str(error)
    assert lines_of(error)[0] == line_of(Layer.forward) + 1


def test_failures_are_found_without_a_timer() -> None:
    for program in (skips_the_last, swapped_lines):
        start = time.monotonic()
        fails(program, 3, timeout=60.0)
        assert time.monotonic() - start < 5.0


@pytest.mark.parametrize(("size", "whole"), [(1_000, True), (10_000_000, False)])
def test_a_huge_message_is_shortened(size: int, whole: bool) -> None:
    def program(rank: int) -> None:
        raise ValueError("first " + "x" * size + " last")

    text = str(fails(program))
    assert len(text) < 12_000
    assert "ValueError: first x" in text and text.endswith("x last")
    assert ("characters left out" not in text) is whole
    assert ("x" * size in text) is whole
