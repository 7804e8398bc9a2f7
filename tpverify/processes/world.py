"""The ranks of a case as processes over gloo or NCCL: hands out plain data, follows the ranks, and names what went wrong."""

from __future__ import annotations

import atexit
import selectors
import signal
import threading
import time
from collections.abc import Sequence
from functools import cache

from tpverify.case import Case, parse_case
from tpverify.errors import CaseError, RankError, RankTimeout, SimulationError, TpverifyError
from tpverify.lookup import config_types, load_subject
from tpverify.processes.devices import device_for, local_ranks
from tpverify.processes.job_pool import JobPool, current_job
from tpverify.processes.monitor import Monitor
from tpverify.processes.pool import LocalPool, Pool, Worker
from tpverify.rank_program import group_layouts
from tpverify.run import RankRun
from tpverify.subjects.subject import Subject
from tpverify.world import WorldRun

SETTLE_SECONDS = 0.3
"""Once a rank has raised or died, how long the others may still say what explains it."""
ANSWER_SECONDS = 1.0
"""How long a rank that has run out of time gets to say where it is."""


class ProcessWorld:
    """Executes ranks in processes: of this machine, or of a job over several.

    The processes are kept from case to case, and replaced when a rank did not come back or the backend may be out of step.

    Args:
        backend: ``gloo`` or ``nccl``.
        device: ``cpu`` or ``cuda``, where the ranks' tensors are; None = ``cpu`` for gloo and ``cuda`` for NCCL.
        pool: of rank processes; None = one on this machine.

    Raises:
        CaseError: this machine or this torch cannot do that.
    """

    def __init__(self, backend: str, device: str | None = None, pool: Pool | None = None) -> None:
        kind = device_for(backend, device)
        self._pool: Pool = LocalPool(backend, kind, local_ranks(backend, kind)) if pool is None else pool
        self._lock = threading.Lock()
        self._cases = 0

    @property
    def most_ranks(self) -> int:
        """How many ranks a world may have."""
        return self._pool.most_ranks

    def check_ranks(self, count: int) -> None:
        """See :meth:`tpverify.world.World.check_ranks`."""
        self._pool.check_ranks(count)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the ranks that are there, by rank."""
        return self._pool.pids

    @property
    def launcher_pid(self) -> int | None:
        """Process id of the ranks' parent, if there is one."""
        return self._pool.launcher_pid

    def run(self, subject: Subject, case: Case, *, traced: int, timeout: float) -> WorldRun:
        """Run the parallel side of a case; see :class:`tpverify.world.World`."""
        text = _sendable(subject, case)
        world_size = sum(map(len, group_layouts(case)))
        with self._lock:
            try:
                workers = self._pool.workers(world_size, subject.name)
                self._cases += 1
                task = {"number": self._cases, "subject": subject.name, "case": text, "traced": traced}
                task["place"] = self._pool.place
                return self._execute(workers, task, timeout)
            except BaseException:
                self._pool.kill()
                raise

    def close(self) -> None:
        """End all processes."""
        self._pool.close()

    def _execute(self, workers: Sequence[Worker], task: dict[str, object], timeout: float) -> WorldRun:
        with _Watch(workers) as watch:
            monitor = watch.monitor
            for worker in workers:
                watch.tell(worker.rank, "run", task)
            timed_out = watch.follow(time.monotonic() + timeout)
            if timed_out:
                watch.ask_where()
            left = [rank for rank in monitor.unfinished if rank not in watch.gone]
        reusable = not monitor.unfinished and monitor.failure is None and monitor.idle and not watch.gone
        statuses = {} if reusable else self._pool.kill()
        if watch.gone:
            self._pool.check_alive()
        if monitor.unusable:
            raise CaseError(f"Expected {task['subject']!r} to be importable in other processes but got {monitor.unusable}")
        failure = monitor.disagreement()
        if failure is None and watch.gone:
            failure = _died(min(watch.gone), statuses, monitor)
        elif failure is None and monitor.raised:
            failure = monitor.raised[min(monitor.raised)]
        elif failure is None and timed_out:
            failure = _timed_out(timeout, left, monitor)
        elif failure is None and monitor.unfinished:
            failure = monitor.deadlock()
        results: list[RankRun | None] = [monitor.returned.get(rank) for rank in range(len(workers))]
        return monitor.ledger(), results, failure


class _Watch:
    """Reads what the ranks announce until the case is decided.

    Attributes:
        gone: ranks whose process has ended.
        monitor: what is known about the case.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.gone: set[int] = set()
        self.monitor = Monitor(len(workers), lambda rank: self.tell(rank, "admit"))
        self._workers = workers
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> _Watch:
        for worker in self._workers:
            self._selector.register(worker.channel, selectors.EVENT_READ, worker)
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()

    def tell(self, rank: int, *message: object) -> None:
        """Send a rank a message."""
        try:
            self._workers[rank].channel.send(*message)
        except OSError:
            self.gone.add(rank)

    def follow(self, deadline: float) -> bool:
        """Until all ranks have answered, they disagree, or none can go on; True if the deadline passed instead."""
        settled = None
        while not self._decided():
            limit = deadline if settled is None else min(deadline, settled)
            if not self._read(limit) and time.monotonic() >= limit:
                return settled is None
            if settled is None and (self.gone or self.monitor.raised or self.monitor.failure):
                settled = time.monotonic() + SETTLE_SECONDS
        return False

    def ask_where(self) -> None:
        """Let the ranks that still run say where they are."""
        running = {rank for rank in self.monitor.unfinished if not self.monitor.blocked(rank)}
        for rank in running - self.gone:
            self.tell(rank, "where")
        limit = time.monotonic() + ANSWER_SECONDS
        while running - self.gone - self.monitor.places.keys() and time.monotonic() < limit:
            self._read(limit)

    def _decided(self) -> bool:
        running = [rank for rank in self.monitor.unfinished if rank not in self.gone]
        return self.monitor.disputed or all(self.monitor.blocked(rank) for rank in running)

    def _read(self, limit: float) -> bool:
        """Take in what has come by then; whether anything has."""
        ready = self._selector.select(max(0.0, limit - time.monotonic()))
        for key, _ in ready:
            worker: Worker = key.data
            messages, alive = worker.channel.available()
            for message in messages:
                self.monitor.take(worker.rank, message)
            if not alive:
                self.gone.add(worker.rank)
                self._selector.unregister(worker.channel)
        return bool(ready)


def _sendable(subject: Subject, case: Case) -> str:
    """The case's text, from which a rank makes the same case of the same subject.

    Raises:
        CaseError: it would not.
    """
    try:
        found = load_subject(subject.name)
    except TpverifyError:
        found = None
    if found != subject:
        raise CaseError(
            f"Expected a subject that other processes can import but got {subject.name!r}: make it an attribute of an importable module"
        )
    text = repr(case)
    if parse_case(text, config_types(subject)) != case:
        raise CaseError(f"Expected a case that can be read back from its text but got {text}")
    return text


def _died(rank: int, statuses: dict[int, int], monitor: Monitor) -> SimulationError:
    status = statuses.get(rank)
    how = "ended" if status is None else f"ended with exit status {status}" if status >= 0 else f"was ended by {_signal_name(-status)}"
    last = monitor.last_call(rank)
    lines = [f"Expected rank {rank} to finish but its process {how}" + (f", after {last}" if last else "")]
    lines += [f"  rank {other}  {text}" for other, text in monitor.waiting().items() if other != rank]
    return RankError("\n".join(lines), rank, ChildProcessError(lines[0]))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _timed_out(timeout: float, left: Sequence[int], monitor: Monitor) -> SimulationError:
    running = [rank for rank in left if not monitor.blocked(rank)]
    message = f"Expected the run to end within timeout={timeout:g} seconds but it did not"
    for rank in running:
        sites = monitor.places.get(rank)
        where = " and does not answer" if sites is None else f" at {sites[0]}" if sites else ""
        message += f"{': ' if rank == running[0] else '; '}rank {rank} was running{where}"
    lines = [f"\n  rank {rank}  {text}" for rank, text in monitor.waiting().items()]
    return RankTimeout(message + "".join(lines), tuple(running))


@cache
def process_world(backend: str, device: str | None = None) -> ProcessWorld:
    """The one world of a backend and device in this process; closed when the process ends.

    Raises:
        CaseError: see :class:`ProcessWorld`.
    """
    job = current_job()
    world = ProcessWorld(backend, device, None if job is None else JobPool(job, backend, device_for(backend, device)))
    atexit.register(world.close)
    return world
