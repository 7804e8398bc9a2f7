"""Which rank runs: one thread per rank and one baton, handed over only when a rank has to wait."""

from __future__ import annotations

import contextlib
import ctypes
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

from tpverify.errors import CollectiveMismatch, Deadlock, RankTimeout, SimulationError
from tpverify.simulator.failures import deadlock, rank_error
from tpverify.simulator.one_core import core_to_stay_on, stay_on
from tpverify.simulator.recorder import call_sites


class Unwind(BaseException):
    """Raised on ranks that must stop because the run has ended; a BaseException, so that user code does not swallow it."""


class Wait(Protocol):
    """What a rank waits for."""

    @property
    def done(self) -> bool:
        """Whether the rank may go on."""

    def describe(self, rank: int) -> str:
        """One line for the deadlock report."""


class Switch(Protocol):
    """Process-wide state that belongs to a rank."""

    def leave(self, rank: int) -> None:
        """Save the state before the baton is given up."""

    def enter(self, rank: int) -> None:
        """Restore the state after the baton was taken."""


GRACE_SECONDS = 5.0
"""How long an unwinding rank gets before its thread is abandoned."""
INTERRUPT_SECONDS = 1.0
"""How long an interrupted rank gets for its ``finally`` blocks before it is interrupted again."""


class Scheduler:
    """Runs one program per rank, one rank at a time, deterministically.

    Args:
        world_size: number of ranks.
        switch: rank-local state, saved and restored at every hand-over.
        schedule: None = ranks take turns in the order in which they became able to run; an integer seeds a random order.
    """

    def __init__(self, world_size: int, switch: Switch, schedule: int | None = None) -> None:
        self.world_size = world_size
        self.aborting = False
        self.failure: SimulationError | None = None
        self._switch = switch
        self._random = None if schedule is None else random.Random(schedule)
        self._batons = [threading.Lock() for _ in range(world_size)]
        for baton in self._batons:
            baton.acquire()
        self._runnable: list[int] = []
        self._waits: dict[int, Wait] = {}
        self._handled: dict[int, BaseException] = {}
        self._idents: dict[int, int] = {}
        self._finished: set[int] = set()
        self._abandoned: set[int] = set()
        self._started = False
        self._ended = threading.Event()
        self._over = False
        # Guards who runs, who may be interrupted and who was abandoned against the thread that interrupts ranks.
        self._lock = threading.Lock()
        self._running: int | None = None

    def run(self, programs: list[Callable[[], None]], timeout: float) -> None:
        """Run ``programs[rank]`` on every rank until all have finished or the first one fails.

        Raises:
            SimulationError: what ended the run early.
        """
        __tracebackhide__ = True
        core = core_to_stay_on()
        threads = [
            threading.Thread(target=self._main, args=(rank, program, core), name=f"rank {rank}", daemon=True)
            for rank, program in enumerate(programs)
        ]
        try:
            for rank, thread in enumerate(threads):
                thread.start()
                self._runnable.append(rank)
            self._started = True
            self._pass_on()
            if not self._ended.wait(timeout):
                self._time_out(timeout)
        except BaseException:
            self._stop()
            self._over = True
            for baton in self._batons:  # of threads that nobody has counted yet
                if baton.locked():
                    with contextlib.suppress(RuntimeError):
                        baton.release()
            raise
        for rank, thread in enumerate(threads):
            if rank not in self._abandoned:
                thread.join(GRACE_SECONDS)
        self._over = True
        if self.failure is not None:
            raise self.failure

    def admit(self, rank: int) -> None:
        """Let a rank's call in.

        Raises:
            Unwind: the run has ended.
            RuntimeError: the call comes from a helper thread, which cannot give up the rank's turn, or from a later run.
        """
        if self._over and rank not in self._abandoned:
            way_out = "create groups anew, or name the module that keeps them in the subject's rank_local"
            raise RuntimeError(
                f"Expected a process group of this run but got one that an earlier run created, on its rank {rank}: {way_out}"
            )
        if self.aborting:
            raise Unwind
        if threading.get_ident() != self._idents.get(rank):
            name = threading.current_thread().name
            way_out = "let the helper hand its data to the rank"
            raise RuntimeError(f"Expected collectives of rank {rank} on the rank's own thread but got thread={name!r}: {way_out}")

    def wait_until(self, rank: int, wait: Wait) -> None:
        """Block ``rank`` until ``wait.done``, letting other ranks run meanwhile.

        Raises:
            Unwind: the run has ended.
        """
        self.admit(rank)
        if wait.done:
            return
        self._waits[rank] = wait
        self._yield(rank)

    def pause(self, rank: int) -> None:
        """Let every other runnable rank run before ``rank`` goes on."""
        self.admit(rank)
        self._runnable.append(rank)
        self._yield(rank)

    def wake(self, wait: Wait) -> None:
        """Mark every rank that waits for ``wait`` as able to run."""
        woken = [rank for rank, waiting in self._waits.items() if waiting is wait]
        for rank in sorted(woken):
            del self._waits[rank]
            self._runnable.append(rank)

    def fail(self, error: SimulationError) -> None:
        """End the run with ``error``, unless it has failed before."""
        self._note_handled(self._running)
        if self.failure is None:
            self.failure = self._root_cause(error)
        self.aborting = True

    def waiting(self) -> dict[int, str]:
        """What each waiting rank waits for."""
        return {rank: wait.describe(rank) for rank, wait in sorted(self._waits.items())}

    def abandoned(self, rank: int) -> bool:
        """Whether the rank was given up on: process-wide state is no longer its own."""
        return rank in self._abandoned

    def _note_handled(self, rank: int | None) -> None:
        """Remember what exception the rank is handling: a collective in its ``finally`` block may meet no one."""
        handled = sys.exc_info()[1]
        if rank is not None and threading.get_ident() == self._idents.get(rank):
            self._handled.pop(rank, None)
            if handled is not None and not isinstance(handled, Unwind):
                self._handled[rank] = handled

    def _root_cause(self, error: SimulationError) -> SimulationError:
        handling = [rank for rank in error.ranks if rank in self._handled]
        if isinstance(error, (CollectiveMismatch, Deadlock)) and handling:
            rank = handling[0]
            return rank_error(rank, self._handled[rank], f"While rank {rank} handled this exception:\n{error}")
        return error

    def _yield(self, rank: int) -> None:
        self._note_handled(rank)
        self._switch.leave(rank)
        with self._lock:
            if self.aborting:
                self._waits.pop(rank, None)
                raise Unwind
            self._running = None
        if not self._pass_on():
            self._running = rank
            self._deadlock()
            self._waits.pop(rank, None)
            raise Unwind
        self._batons[rank].acquire()
        self._enter(rank)
        if self.aborting:
            raise Unwind

    def _enter(self, rank: int) -> None:
        self._running = rank
        self._switch.enter(rank)

    def _pass_on(self) -> bool:
        """Hand the baton to the next runnable rank; False if there is none."""
        if not self._runnable:
            return False
        index = 0 if self._random is None else self._random.randrange(len(self._runnable))
        self._batons[self._runnable.pop(index)].release()
        return True

    def _main(self, rank: int, program: Callable[[], None], core: int | None) -> None:
        stay_on(core)
        self._batons[rank].acquire()
        if self._over:
            return
        try:
            self._idents[rank] = threading.get_ident()
            self._enter(rank)
            if not self.aborting:
                program()
        except Unwind:
            pass
        except BaseException as exception:  # noqa: B036 - whatever a rank raises ends the run and is reported
            if not self.aborting:
                self.fail(rank_error(rank, exception))
        finally:
            self._shield(rank)
            self._finish(rank)

    def _shield(self, rank: int) -> None:
        """From here on the thread is not interrupted, and a pending interrupt has been raised."""
        while True:
            try:
                with self._lock:
                    self._idents.pop(rank, None)
                for _ in range(2):  # a pending interrupt is raised at a backward jump
                    pass
                return
            except Unwind:
                continue

    def _finish(self, rank: int) -> None:
        with self._lock:
            if rank in self._abandoned:
                return
            self._finished.add(rank)
            self._handled.pop(rank, None)
            self._running = None
        self._go_on()

    def _go_on(self) -> None:
        """The running rank is gone: let the next one run, or end."""
        if self._pass_on():
            return
        if self._waits:
            if not self.aborting:
                self._deadlock()
            blocked = min(self._waits)
            del self._waits[blocked]
            self._batons[blocked].release()
            return
        self._ended.set()

    def _deadlock(self) -> None:
        self.fail(deadlock(self.waiting(), self.world_size))

    def _time_out(self, timeout: float) -> None:
        rank = self._running
        message = f"Expected the run to end within timeout={timeout:g} seconds but it did not"
        if rank is not None:
            frame = sys._current_frames().get(self._idents.get(rank, 0))
            sites = call_sites(frame) if frame is not None else ()
            message += f": rank {rank} was running" + (f" at {sites[0]}" if sites else "")
        lines = [f"\n  rank {rank}  {text}" for rank, text in self.waiting().items()]
        ranks = () if rank is None else (rank,)
        failure = RankTimeout(message + "".join(lines), ranks)
        self.fail(failure)
        self._stop()
        if self._abandoned and self.failure is failure:
            left = ", ".join(str(rank) for rank in sorted(self._abandoned))
            self.failure = RankTimeout(f"{failure}\nThe thread of rank {left} does not come back from its call and was left behind", ranks)

    def _stop(self) -> None:
        """Unwind every rank; called from the thread that started them."""
        self.aborting = True
        if not self._started:
            self._go_on()
        rank, since, interrupted = self._running, time.monotonic(), 0.0
        while not self._ended.wait(0.01):
            now = time.monotonic()
            if self._running != rank:
                rank, since, interrupted = self._running, now, 0.0
            if now - since > GRACE_SECONDS:
                self._abandon(rank)
            elif now - interrupted > INTERRUPT_SECONDS:
                interrupted = now
                with self._lock:
                    if rank is not None and rank == self._running and rank in self._idents:
                        _interrupt(self._idents[rank], Unwind)

    def _abandon(self, rank: int | None) -> None:
        with self._lock:
            if rank is None:
                self._ended.set()
                return
            if rank != self._running:
                return
            self._abandoned.add(rank)
            self._running = None
        self._go_on()


def _interrupt(ident: int, exception: type[BaseException]) -> None:
    """Make a thread raise ``exception`` at its next bytecode.

    Never to be taken back with NULL: that leaves the interpreter's flag for pending exceptions set for good, which slows all
    threads down and makes CPython 3.11 loop for ever under ``sys.settrace`` (debuggers, coverage, Hypothesis).
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(exception))
