"""Threads are kept from run to run, and no run can tell: whatever a program leaves in its thread ends the thread."""

from __future__ import annotations

import contextvars
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tpverify.errors import SimulationError
from tpverify.simulator import rank_threads
from tpverify.simulator.world import simulate

local = threading.local()
context: contextvars.ContextVar[int] = contextvars.ContextVar("context", default=0)


class Mode(TorchDispatchMode):  # type: ignore[misc]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Function(TorchFunctionMode):  # type: ignore[misc]
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def grad_mode_off() -> None:
    torch.set_grad_enabled(False)


def same(x: torch.Tensor) -> torch.Tensor:
    return x


LEFT: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "a local variable": (lambda: setattr(local, "value", 1), lambda: getattr(local, "value", 0)),
    "an attribute of the thread": (
        lambda: setattr(threading.current_thread(), "value", 1),
        lambda: getattr(threading.current_thread(), "value", 0),
    ),
    "gradients off": (grad_mode_off, torch.is_grad_enabled),
    "a dispatch mode": (lambda: Mode().__enter__(), torch._C._len_torch_dispatch_stack),
    "a function mode": (lambda: Function().__enter__(), torch._C._len_torch_function_stack),
    "autocast": (lambda: torch.set_autocast_enabled("cpu", True), lambda: torch.is_autocast_enabled("cpu")),
    "another dtype of autocast": (
        lambda: torch.set_autocast_dtype("cpu", torch.float16),
        lambda: torch.get_autocast_dtype("cpu"),
    ),
    "hooks of saved tensors": (
        lambda: torch.autograd.graph.saved_tensors_hooks(same, same).__enter__(),
        lambda: torch._C._autograd._top_saved_tensors_default_hooks(True) is None,
    ),
    "forward mode off": (lambda: torch._C._set_fwd_grad_enabled(False), torch._C._is_fwd_grad_enabled),
    "a watcher": (lambda: sys.setprofile(lambda *_: None), lambda: sys.getprofile() is None),
}


@pytest.fixture(autouse=True)
def _none_waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    waiting: list[rank_threads.RankThread] = []
    monkeypatch.setattr(rank_threads, "_waiting", waiting)
    yield
    rank_threads.dismiss(waiting)


def idents(program: Callable[[], Any] = lambda: None, world_size: int = 3) -> list[int]:
    """The threads on which the ranks ran, by rank."""

    def identified() -> threading.Thread:
        program()
        return threading.current_thread()

    return [id(thread) for thread in simulate(identified, world_size).results]


def plain() -> None:
    linear = torch.nn.Linear(3, 3)
    torch.autograd.backward(linear(torch.ones(2, 3)).sum())
    dist.all_reduce(torch.ones(3))
    repr([1, {2: 3}])


def test_a_rank_runs_on_the_thread_on_which_it_ran_before() -> None:
    first = idents(plain)
    assert len(set(first)) == 3
    assert idents(plain) == idents(plain, 2) + first[2:] == first


@pytest.mark.parametrize("what", LEFT)
def test_whatever_a_program_leaves_in_its_thread_goes_with_it(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    leave, look = LEFT[what]

    def program() -> None:
        if dist.get_rank() == 1:
            leave()

    clean = simulate(look, 3).results
    before = idents()
    idents(program)
    after = idents()
    assert simulate(look, 3).results == clean
    assert after[0] == before[0] and before[1] not in after  # rank 1's thread has ended, and no other has
    monkeypatch.setattr(rank_threads, "_contents", lambda: ())
    if what == "an attribute of the thread":
        monkeypatch.setattr(rank_threads, "vars", lambda thread: {}, raising=False)
    rank_threads.dismiss(rank_threads._waiting)
    rank_threads._waiting.clear()
    simulate(program, 3)
    assert simulate(look, 3).results != clean, "expected the next run to see it, if nobody looks"


def test_a_context_variable_is_gone_with_the_run() -> None:
    assert simulate(lambda: (context.get(), context.set(1))[0], 2).results == [0, 0]
    assert simulate(context.get, 2).results == [0, 0]


def test_a_thread_with_caches_of_dtensor_is_not_kept() -> None:
    def program() -> None:
        mesh = init_device_mesh("cpu", (2,))
        placed = distribute_tensor(torch.ones(2, 2), mesh, [Replicate()])
        assert (placed + placed).to_local().sum() == 8

    before = idents(world_size=2)
    idents(program, 2)
    assert not set(before) & set(idents(world_size=2))


def raises() -> None:
    dist.barrier()
    assert dist.get_rank()


def waits() -> None:
    if dist.get_rank():
        dist.barrier()


@pytest.mark.parametrize("program", [raises, waits])
def test_a_run_that_fails_keeps_no_thread(program: Callable[[], None]) -> None:
    before = idents()
    with pytest.raises(SimulationError):
        simulate(program, 3)
    assert rank_threads._waiting == []
    assert not set(before) & {id(thread) for thread in threading.enumerate()}


def test_no_more_threads_wait_than_are_kept() -> None:
    before = threading.active_count()
    simulate(plain, rank_threads.KEPT + 3)
    assert len(rank_threads._waiting) == rank_threads.KEPT
    assert threading.active_count() == before + rank_threads.KEPT
    assert {thread.name for thread in rank_threads._waiting} == {rank_threads.IDLE}


def test_a_thread_that_a_new_one_would_not_be_like_is_not_taken() -> None:
    before = idents()
    torch.set_num_threads(2)
    try:
        assert simulate(torch.get_num_threads, 2).results == [2, 2]
        other = idents()
    finally:
        torch.set_num_threads(1)
    assert not set(before) & set(other) and not set(other) & set(idents())


def test_who_watches_new_threads_sees_new_ones() -> None:
    idents()
    seen: set[str] = set()
    threading.setprofile(lambda frame, event, argument: seen.add(frame.f_code.co_name))
    try:
        simulate(plain, 2)
    finally:
        threading.setprofile(None)
    assert "plain" in seen
    assert simulate(sys.getprofile, 2).results == [None, None]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes are forked here")
def test_a_forked_process_starts_its_own_threads() -> None:
    # In a process of its own: what else this one has started may not survive a fork.
    script = """
import os, threading
import torch, torch.distributed as dist
from tpverify.simulator.world import simulate

def program():
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()

torch.set_num_threads(1)
assert simulate(program, 2).results == [2.0, 2.0]
child = os.fork()
if child == 0:
    os._exit(0 if simulate(program, 2, timeout=20).results == [2.0, 2.0] else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
