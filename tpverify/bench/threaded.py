"""Peer: torch's threaded process group, in which its own tests run; a thread for each rank, all of them at once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import HashStore, Store

from tpverify.bench.runners import Run
from tpverify.bench.work import Tensors, Work
from tpverify.device import default_dtype
from tpverify.simulator.c10d_hooks import initialisation_undone

_bindings: Any = torch._C._distributed_c10d
PATIENCE = 60.0
"""Seconds for all that a rank is told to do."""


@contextlib.contextmanager
def threads_kept(work: Work) -> Iterator[Run]:
    """Threads and groups that are kept from call to call."""
    with _installed(work):
        ranks = _started(work)
        try:
            yield Run(lambda: _told(ranks), lambda: _told(ranks))
        finally:
            _ended(ranks)


@contextlib.contextmanager
def threads_anew(work: Work) -> Iterator[Run]:
    """New threads, which initialise their world, for each call: how the group is used."""

    def run() -> list[Tensors]:
        ranks = _started(work)
        try:
            return _told(ranks)
        finally:
            _ended(ranks)

    with _installed(work):
        yield Run(run, run)


@contextlib.contextmanager
def _installed(work: Work) -> Iterator[None]:
    from torch.testing._internal.distributed import multi_threaded_pg

    threaded: Any = multi_threaded_pg
    if isinstance(c10d._world, threaded.ThreadLocalWorld):  # another such context surrounds this one
        yield
        return
    threaded._install_threaded_pg()
    _bindings._set_thread_isolation_mode(True)
    try:
        with default_dtype(work.dtype), initialisation_undone():
            yield
    finally:
        _bindings._set_thread_isolation_mode(False)
        threaded._uninstall_threaded_pg()


class _Rank(threading.Thread):
    """One rank, which works whenever it is told to."""

    def __init__(self, rank: int, work: Work, store: Store, answers: SimpleQueue[Any]) -> None:
        super().__init__(name=f"threaded rank {rank}", daemon=True)
        self.orders: SimpleQueue[bool] = SimpleQueue()
        self.answers = answers
        self._rank, self._work, self._store = rank, work, store

    def run(self) -> None:
        """Work until told to end."""
        try:
            dist.init_process_group("threaded", store=self._store, rank=self._rank, world_size=self._work.world_size)
            self.answers.put((self._rank, None))
            while self.orders.get():
                self.answers.put((self._rank, self._work()))
            dist.destroy_process_group()
        except BaseException as error:  # noqa: B036 - whatever it is, whoever waits must hear of it
            self.answers.put((self._rank, error))
            _group().exception_handle(error)  # the others wait for this rank


def _started(work: Work) -> list[_Rank]:
    store = HashStore()
    _group().reset()  # an earlier rank may have raised
    answers: SimpleQueue[Any] = SimpleQueue()
    ranks = [_Rank(rank, work, store, answers) for rank in range(work.world_size)]
    for rank in ranks:
        rank.start()
    _answers(ranks)  # until they are ready: nobody may replace c10d's world meanwhile
    return ranks


def _told(ranks: list[_Rank]) -> list[Tensors]:
    for rank in ranks:
        rank.orders.put(True)
    return _answers(ranks)


def _answers(ranks: list[_Rank]) -> list[Any]:
    answers: dict[int, Any] = {}
    while len(answers) < len(ranks):
        rank, answer = ranks[0].answers.get(timeout=PATIENCE)
        if isinstance(answer, BaseException):
            raise answer
        answers[rank] = answer
    return [answers[rank] for rank in range(len(ranks))]


def _group() -> Any:
    from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup

    return ProcessLocalGroup


def _ended(ranks: list[_Rank]) -> None:
    for rank in ranks:
        rank.orders.put(False)
    for rank in ranks:
        rank.join(PATIENCE)
