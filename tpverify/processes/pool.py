"""The rank processes of one controller: started when first needed, kept from case to case, killed together, gone when it is gone."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import Protocol

from tpverify.errors import CaseError
from tpverify.processes.channel import Channel
from tpverify.processes.devices import MOST_RANKS, check_gpus
from tpverify.processes.link import LOOPBACKS

LAUNCHER = "tpverify.processes.launcher"
LAUNCHER_SECONDS = 10.0
"""How long the launcher gets to kill the ranks and to say how they ended."""
CLOSE_SECONDS = 1.0
"""How long the launcher gets to end by itself before it is killed, which ends the ranks too."""


@dataclass(frozen=True)
class Worker:
    """One rank's process."""

    rank: int
    pid: int
    channel: Channel


class Pool(Protocol):
    """Rank processes 0 to n - 1, for worlds of up to n ranks."""

    @property
    def most_ranks(self) -> int:
        """How many ranks there may be."""

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the ranks that are there, by rank."""

    @property
    def launcher_pid(self) -> int | None:
        """Process id of the parent of the ranks on this machine, if there is one."""

    @property
    def place(self) -> tuple[list[str], str] | None:
        """Where ranks import from and which folder they work in; None = where they were started."""

    def workers(self, count: int, subject: str) -> list[Worker]:
        """The first ``count`` ranks, started where they are not there yet.

        Args:
            subject: address of what they will run; imported once for all ranks that are started from now on.

        Raises:
            CaseError: there are not that many.
        """

    def check_ranks(self, count: int) -> None:
        """See that there may be so many ranks.

        Raises:
            CaseError: there may not.
        """

    def check_alive(self) -> None:
        """See that ranks that died can be replaced.

        Raises:
            JobError: a machine or its part of the job is gone.
        """

    def kill(self) -> dict[int, int]:
        """End every rank; exit status by rank, negative for a signal. The next case gets new ones."""

    def close(self) -> None:
        """End every process; a pool that is closed starts again when it is needed."""


class LocalPool:
    """A pool on this machine.

    Args:
        backend: ``gloo`` or ``nccl``.
        device: ``cpu`` or ``cuda``.
        most_ranks: how many there may be.
    """

    def __init__(self, backend: str, device: str, most_ranks: int) -> None:
        self.most_ranks = most_ranks
        self._backend = backend
        self._device = device
        self._owner = os.getpid()
        self._workers: list[Worker] = []
        self._loaded: set[str] = set()
        self._folder = ""
        self._stores = 0
        self._launcher: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    @property
    def place(self) -> tuple[list[str], str]:
        """The controller's, as it is now."""
        return list(sys.path), os.getcwd()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids by rank."""
        return tuple(worker.pid for worker in self._workers)

    @property
    def launcher_pid(self) -> int | None:
        """Process id of the ranks' parent, if there is one."""
        return None if self._launcher is None else self._launcher.pid

    def workers(self, count: int, subject: str) -> list[Worker]:
        """See :meth:`Pool.workers`."""
        self.check_ranks(count)
        if any(worker.channel.has_something() for worker in self._workers):
            self.kill()  # between cases, ranks have nothing to say: one has ended
        if len(self._workers) < count:
            try:
                self._start(count, subject)
            except BaseException:
                self.close()  # an answer may be left unread
                raise
        return self._workers[:count]

    def check_ranks(self, count: int) -> None:
        """See :meth:`Pool.check_ranks`."""
        if self._backend == "nccl" and self.most_ranks < MOST_RANKS:
            check_gpus(count, self.most_ranks)
        if count > self.most_ranks:
            raise CaseError(f"Expected at most {self.most_ranks} ranks on one machine but got {count}")

    def check_alive(self) -> None:
        """This machine is there."""

    def kill(self) -> dict[int, int]:
        """See :meth:`Pool.kill`."""
        for worker in self._workers:
            worker.channel.close()
        self._workers.clear()
        self._stores += 1
        if self._connection is None:
            return {}
        self._connection.settimeout(LAUNCHER_SECONDS)
        control = Channel(self._connection)
        with contextlib.suppress(OSError):
            control.send("kill")
            answer = control.receive()
            if answer is not None:
                self._connection.settimeout(None)
                return dict(answer[1])
        self.close()
        return {}

    def close(self) -> None:
        """End every process and remove what they shared; a pool that is closed starts again when it is needed."""
        if os.getpid() != self._owner:
            return
        for worker in self._workers:
            worker.channel.close()
        self._workers.clear()
        self._loaded.clear()
        launcher, self._launcher = self._launcher, None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if launcher is not None:
            try:
                launcher.wait(CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                launcher.kill()
                launcher.wait()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = ""

    def _start(self, count: int, subject: str) -> None:
        control = self._control()
        if subject not in self._loaded:
            self._loaded.add(subject)
            control.send("load", subject, self.place)
        while len(self._workers) < count:
            self._workers.append(self._spawn(control, len(self._workers)))

    def _control(self) -> Channel:
        if self._launcher is not None and self._launcher.poll() is not None:
            self.close()
        if self._connection is None:
            ours, theirs = socket.socketpair()
            self._folder = tempfile.mkdtemp(prefix="tpverify-")
            self._launcher = subprocess.Popen(
                [sys.executable, "-m", LAUNCHER, str(theirs.fileno()), self._folder],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # the controller's stdout is its result
                start_new_session=True,  # Ctrl-C concerns the controller, which ends the ranks
                env=_environment(),
            )
            theirs.close()
            self._connection = ours
        return Channel(self._connection)

    def _spawn(self, control: Channel, rank: int) -> Worker:
        assert self._connection is not None
        store = ("file", os.path.join(self._folder, f"store{self._stores}"), self.most_ranks, "")
        control.send("spawn", rank, {"backend": self._backend, "device": self._device, "store": store})
        _, descriptors, _, _ = socket.recv_fds(self._connection, 1, 1)
        answer = control.receive() if descriptors else None
        if answer is None:
            raise CaseError(f"Expected {LAUNCHER} to start rank {rank} but it ended: see its message on stderr")
        os.set_inheritable(descriptors[0], False)
        return Worker(rank, answer[1], Channel(socket.socket(fileno=descriptors[0])))


def _environment() -> dict[str, str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PYTHONSAFEPATH": "1"}
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # the other way to count GPUs cannot be followed by a fork
    loopback = [name for _, name in socket.if_nameindex() if name in LOOPBACKS]
    if loopback:
        environment.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    return environment
