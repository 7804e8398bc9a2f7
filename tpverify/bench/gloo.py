"""Peer: bare gloo processes, one for each rank, which are kept from call to call or started for every one."""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from tpverify.bench.runners import Run, Runner
from tpverify.bench.work import Part, Tensors, Work
from tpverify.errors import SimulationError
from tpverify.mutants.workers import start_deaf

PATIENCE = 120.0
"""Seconds for all that a rank is told to do, its start included."""


class Pool:
    """Processes for a world of some size, a context; they start fresh interpreters, as ``torch.multiprocessing.spawn`` does.

    Args:
        world_size: how many.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._folder = tempfile.TemporaryDirectory(prefix="tpverify-")
        self._ranks: list[tuple[Any, Any]] = []

    def __enter__(self) -> Pool:
        context = get_context("spawn")
        store = os.path.join(self._folder.name, "store")
        try:
            for rank in range(self.world_size):
                here, there = context.Pipe()
                process = context.Process(target=serve, args=(there, store, rank, self.world_size), daemon=True)
                start_deaf(process)
                there.close()
                self._ranks.append((process, here))
        except BaseException:
            self._end(kill=True)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._end(kill=kind is not None)

    def _end(self, kill: bool) -> None:
        for process, connection in self._ranks:
            connection.close()
            if kill:
                process.kill()
        for process, _ in self._ranks:
            process.join(PATIENCE)
        self._folder.cleanup()

    def tell(self, orders: list[tuple[str, Part | None]]) -> list[Any]:
        """Give each rank an order; their answers.

        Raises:
            SimulationError: a rank raises, ends or does not answer.
        """
        for rank, order in enumerate(orders):
            try:
                self._ranks[rank][1].send_bytes(pickle.dumps(order))
            except OSError:
                self._raise("to take an order but its process ended", rank)
        awaited = {connection: rank for rank, (_, connection) in enumerate(self._ranks)}
        answers: dict[int, Any] = {}
        while awaited:
            ready: list[Any] = wait(list(awaited), PATIENCE)
            if not ready:
                self._raise(f"to answer within {PATIENCE:g} seconds but it did not", min(awaited.values()))
            for connection in ready:
                rank = awaited.pop(connection)
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    self._raise("to answer but its process ended", rank)
                if isinstance(answers[rank], str):
                    self._raise(f"to compute but it raised {answers[rank]}", rank)
        return [answers[rank] for rank in range(self.world_size)]

    def _raise(self, what: str, rank: int) -> NoReturn:
        """The others may wait for this rank for good."""
        for process, _ in self._ranks:
            process.kill()
        raise SimulationError(f"Expected gloo rank {rank} {what}", (rank,))


def processes_kept(pool: Pool) -> Runner:
    """Processes that are kept from call to call."""

    @contextlib.contextmanager
    def runner(work: Work) -> Iterator[Run]:
        pool.tell([("load", part) for part in work.parts])
        yield _run(pool)

    return runner


@contextlib.contextmanager
def processes_anew(work: Work) -> Iterator[Run]:
    """New processes for each call."""

    def results() -> list[Tensors]:
        with Pool(work.world_size) as pool:
            pool.tell([("load", part) for part in work.parts])
            return _run(pool).results()

    def once() -> None:
        with Pool(work.world_size) as pool:
            pool.tell([("load", part) for part in work.parts])
            _run(pool).once()

    yield Run(once, results)


def _run(pool: Pool) -> Run:
    return Run(lambda: pool.tell([("run", None)] * pool.world_size), lambda: pool.tell([("results", None)] * pool.world_size))


def serve(connection: Connection, store: str, rank: int, world_size: int) -> None:
    """What a rank's process runs, until the other end is closed."""
    torch.set_num_threads(1)
    work: Part | None = None
    dist.init_process_group("gloo", store=FileStore(store, world_size), rank=rank, world_size=world_size)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            order, part = pickle.loads(connection.recv_bytes())
            try:
                if part is not None:
                    work = part
                    torch.set_default_dtype(part.dtype)
                found = work() if work is not None and order != "load" else {}
                answer: Any = found if order == "results" else True
            except Exception as error:
                answer = f"{type(error).__name__}: {error}"
            connection.send_bytes(pickle.dumps(answer))
    dist.destroy_process_group()
