"""Independent calls side by side, one process a worker; a worker that dies is told apart from a call that raises."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")

CONTEXT = multiprocessing.get_context("spawn")
"""Fresh interpreters: what a parent has loaded or drawn before has no say in what a worker draws."""


@dataclass(frozen=True)
class Failure:
    """A call that returned nothing.

    Attributes:
        message: the exception in one line, or how the process ended.
        traceback: of the exception, or "".
    """

    message: str
    traceback: str = ""


@dataclass
class _Worker(Generic[T]):
    process: Any
    pipe: Connection
    index: int


def each(call: Callable[[T], R], items: Sequence[T], jobs: int) -> Iterator[tuple[int, R | Failure]]:
    """``call(item)`` of every item, as (index, result) in the order in which they finish.

    Ctrl-C is left to the caller; leaving the iterator ends all workers.

    Args:
        call: a module's function, whose arguments and results can be pickled.
        jobs: how many processes.
    """
    waiting = iter(range(len(items)))
    workers: list[_Worker[T]] = []
    try:
        for index in itertools.islice(waiting, jobs):
            workers.append(_start(call, items[index], index))
        while workers:
            ready = wait([worker.pipe for worker in workers])
            for worker in [worker for worker in workers if worker.pipe in ready]:
                result = _received(worker)
                index, following = worker.index, next(waiting, None)
                if isinstance(result, Failure) and not result.traceback or following is None:
                    _end(worker)
                    workers.remove(worker)
                    if following is not None:
                        workers.append(_start(call, items[following], following))
                else:
                    worker.index = following
                    worker.pipe.send(items[following])
                yield index, result
    finally:
        for worker in workers:
            worker.process.terminate()
            _end(worker)


def _start(call: Callable[[T], R], item: T, index: int) -> _Worker[T]:
    here, there = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_serve, args=(call, there), daemon=True)
    start_deaf(process)
    there.close()
    here.send(item)
    return _Worker(process, here, index)


def start_deaf(process: Any) -> None:
    """Start a process that leaves Ctrl-C to this one.

    Ctrl-C reaches every process of a terminal; whoever inherits that it is ignored ignores it from the first line on.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if threading.current_thread() is threading.main_thread() else None
    try:
        process.start()
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)


def _received(worker: _Worker[T]) -> Any:
    try:
        return worker.pipe.recv()
    except (EOFError, OSError):
        worker.process.join()
        code = worker.process.exitcode
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return Failure(f"its process ended with {how}")


def _end(worker: _Worker[T]) -> None:
    worker.pipe.close()
    worker.process.join()


def _serve(call: Callable[[T], R], pipe: Connection) -> None:
    """One worker's loop, until the other end is closed."""
    while True:
        try:
            item = pipe.recv()
        except (EOFError, OSError):
            return
        result: Any
        try:
            result = call(item)
        except Exception as error:
            result = Failure(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}", traceback.format_exc())
        with contextlib.suppress(BrokenPipeError):
            pipe.send(result)
