"""The rank processes of a torchrun job, seen from its controller on rank 0."""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from tpverify.errors import CaseError, JobError
from tpverify.processes.channel import Channel
from tpverify.processes.devices import check_gpus, gpus_are_shared
from tpverify.processes.link import Listener
from tpverify.processes.pool import Worker

SPAWN_SECONDS = 180.0
"""How long the processes get to import a subject and to fork their ranks."""
KILL_SECONDS = 30.0
"""How long a process gets to kill its rank and to say how it ended; a machine that is cut off is noticed by then."""
LEAVE_SECONDS = 5.0
"""How long they get to end once there is a verdict."""


@dataclass(frozen=True)
class Member:
    """What one process of the job says of itself."""

    rank: int
    host: str
    local_rank: int
    local_world_size: int
    gpus: int
    release: str


class Job:
    """The processes of the job, one per rank.

    Args:
        listener: the port that they connect to.
        world_size: how many they are.
        store: host and port of the job's own store, in which the ranks' process groups meet, too.

    Attributes:
        members: by rank, what each says of itself.
        lost: by rank, how it went.
    """

    def __init__(self, listener: Listener, world_size: int, store: tuple[str, int]) -> None:
        self.world_size = world_size
        self.members: dict[int, Member] = {}
        self.lost: dict[int, str] = {}
        self._listener = listener
        self._links: dict[int, Channel] = {}
        self.store = store

    def join(self, seconds: float) -> None:
        """Wait until all processes are there.

        Raises:
            JobError: some do not come.
            CaseError: they do not go together.
        """
        limit = time.monotonic() + seconds
        while missing := [rank for rank in range(self.world_size) if rank not in self._links]:
            accepted = self._accepted(limit)
            if accepted is None:
                names = ", ".join(map(str, missing))
                raise JobError(f"Expected {self.world_size} processes to join within {seconds:g} seconds but rank {names} did not")
            channel, (_, rank, about) = accepted
            self._links[rank] = channel
            self.members[rank] = Member(rank, **about)
        releases = {member.release: member for member in reversed(self.members.values())}
        if len(releases) > 1:
            got = ", ".join(f"{release} on {member.host}" for release, member in sorted(releases.items()))
            raise CaseError(f"Expected the same torch on all machines but got {got}")

    def tell(self, rank: int, *message: Any) -> None:
        """Send a process a message; one that is gone does not get it."""
        try:
            self._links[rank].send(*message)
        except OSError:
            self.lost.setdefault(rank, "connection lost")

    def answer(self, rank: int, seconds: float) -> tuple[Any, ...] | None:
        """The next thing that a process has to say by then; None if it is gone."""
        limit = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._links[rank], selectors.EVENT_READ)
            while rank not in self.lost:
                if not selector.select(max(0.0, limit - time.monotonic())):
                    self.lost[rank] = f"no answer within {seconds:g} seconds"
                for message in self._heard(rank) if rank not in self.lost else ():
                    return message
        return None

    def spawned(self, ranks: Collection[int], store: Any, seconds: float = SPAWN_SECONDS) -> list[Worker]:
        """The ranks that are being forked, once all of them are there; of an earlier attempt some may come as well.

        Raises:
            JobError: a process is gone.
        """
        limit = time.monotonic() + seconds
        found: dict[int, Worker] = {}
        while missing := set(ranks) - found.keys():
            accepted = self._accepted(limit)
            if accepted is None:
                self.lost.update(dict.fromkeys(missing, f"no rank within {seconds:g} seconds"))
                self.check()
                continue
            channel, (kind, rank, pid, meeting) = accepted
            if kind == "worker" and rank in missing and meeting == store:
                found[rank] = Worker(rank, pid, channel)
            else:
                channel.close()
        return [found[rank] for rank in sorted(found)]

    def check(self, besides: str = "") -> None:
        """See that all processes are there.

        Args:
            besides: a signal whose victims do not count.

        Raises:
            JobError: one is gone.
        """
        for rank, link in self._links.items():
            if rank not in self.lost and link.has_something():
                self._heard(rank)
        gone = [f"rank {rank}{self._at(rank)} ({how})" for rank, how in sorted(self.lost.items()) if how != besides]
        if gone:
            raise JobError(f"Expected all {self.world_size} processes of the job to stay but lost {', '.join(gone)}")

    def _at(self, rank: int) -> str:
        return f" on {self.members[rank].host}" if rank in self.members else ""

    def end(self, code: int) -> None:
        """Let every process exit with a code, and wait until they have."""
        for rank in self._links:
            self.tell(rank, "exit", code)
        limit = time.monotonic() + LEAVE_SECONDS
        for rank in self._links:
            while rank not in self.lost and self.answer(rank, max(0.0, limit - time.monotonic())):
                pass
            self._links[rank].close()
        self._listener.close()

    def _accepted(self, limit: float) -> tuple[Channel, tuple[Any, ...]] | None:
        """The next process to connect; None when time is up or a process is gone."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            for rank, link in self._links.items():
                if rank not in self.lost:
                    selector.register(link, selectors.EVENT_READ, rank)
            while ready := selector.select(max(0.0, limit - time.monotonic())):
                for key, _ in ready:
                    if key.data is not None:
                        self._heard(key.data)
                        self.check()
                    elif accepted := self._listener.accept():
                        return accepted
        return None

    def _heard(self, rank: int) -> list[tuple[Any, ...]]:
        """What a process has said, except that it leaves."""
        messages, alive = self._links[rank].available()
        for kind, *arguments in messages:
            if kind == "leaving":
                self.lost[rank] = str(arguments[0])
        if not alive:
            self.lost.setdefault(rank, "connection lost")
        return [message for message in messages if message[0] != "leaving"]


class JobPool:
    """A pool whose ranks are those of a job; see :class:`tpverify.processes.pool.Pool`.

    Args:
        job: whose processes fork the ranks.
        backend: ``gloo`` or ``nccl``.
        device: ``cpu`` or ``cuda``.

    Raises:
        CaseError: a machine has not enough GPUs.
    """

    place = None
    launcher_pid = None

    def __init__(self, job: Job, backend: str, device: str) -> None:
        for member in job.members.values():
            if device == "cuda":
                check_gpus(member.local_world_size if backend == "nccl" and not gpus_are_shared() else 1, member.gpus, member.host)
        self.most_ranks = job.world_size
        self._job = job
        self._settings = {"backend": backend, "device": device}
        self._workers: list[Worker] = []
        self._loaded: set[tuple[int, str]] = set()
        self._generation = 0

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids by rank, each of its own machine."""
        return tuple(worker.pid for worker in self._workers)

    def workers(self, count: int, subject: str) -> list[Worker]:
        """See :meth:`Pool.workers`.

        Raises:
            JobError: a process of the job is gone.
        """
        self.check_ranks(count)
        self._job.check()
        if any(worker.channel.has_something() for worker in self._workers):
            self.kill()
        if len(self._workers) < count:
            self._start(range(len(self._workers), count), subject)
        return self._workers[:count]

    def check_ranks(self, count: int) -> None:
        """See :meth:`Pool.check_ranks`."""
        if count > self.most_ranks:
            raise CaseError(f"Expected world sizes up to the {self.most_ranks} processes of this torchrun job but got {count}")

    def check_alive(self) -> None:
        """See :meth:`Pool.check_alive`."""
        self._job.check()

    def kill(self) -> dict[int, int]:
        """See :meth:`Pool.kill`."""
        self._generation += 1
        statuses: dict[int, int] = {}
        for worker in self._workers:
            worker.channel.close()
        self._workers.clear()
        asked = [rank for rank in range(self.most_ranks) if rank not in self._job.lost]
        for rank in asked:
            self._job.tell(rank, "kill")
        for rank in asked:
            answer = self._job.answer(rank, KILL_SECONDS)
            if answer is not None:
                statuses.update(answer[1])
        return statuses

    def close(self) -> None:
        """The processes are the job's."""
        with contextlib.suppress(OSError):
            self.kill()

    def _start(self, ranks: range, subject: str) -> None:
        host, port = self._job.store
        store = ("tcp", host, port, f"tpverify/pool{self._generation}")
        for rank in ranks:
            if (rank, subject) not in self._loaded:
                self._loaded.add((rank, subject))
                self._job.tell(rank, "load", subject, None)
            self._job.tell(rank, "spawn", rank, {**self._settings, "store": store})
        self._workers += self._job.spawned(ranks, store)


_job: list[Job] = []


def use_job(job: Job) -> None:
    """From now on, worlds of real processes are this job."""
    _job[:] = [job]


def current_job() -> Job | None:
    """The job that this process controls, if any."""
    return _job[0] if _job else None
