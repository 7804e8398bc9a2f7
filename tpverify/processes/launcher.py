"""The parent of rank processes: imports torch once and forks a rank when asked, so that a killed pool is back at once.

It ends, and its children with it, when the controller hangs up or dies in whatever way.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tpverify.lookup import load_subject
from tpverify.processes.channel import Channel
from tpverify.processes.devices import MOST_RANKS
from tpverify.processes.worker import Machine, enter_place, serve

_PR_SET_PDEATHSIG = 1


class Launcher:
    """Forks, kills and reaps rank processes.

    Args:
        control: to the controller.
    """

    def __init__(self, control: Channel) -> None:
        self._control = control
        self._children: dict[int, int] = {}

    def run(self) -> None:
        """Answer the controller until it is gone."""
        handlers: dict[str, Callable[..., None]] = {
            "load": self._load,
            "spawn": self._spawn,
            "kill": self._kill,
            "exit": self._exit,
        }
        try:
            while (message := self._control.receive()) is not None:
                kind, *arguments = message
                handlers[kind](*arguments)
        finally:
            self.end_all()

    def end_all(self) -> list[tuple[int, int]]:
        """Kill every child and wait for it; (rank, exit status), negative for a signal: those that had ended by themselves keep theirs."""
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        ended = [(rank, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) for pid, rank in self._children.items()]
        self._children.clear()
        return ended

    def fork(self, rank: int, connection: socket.socket, foreign: Sequence[socket.socket] = (), **settings: Any) -> int:
        """Start a rank's process, which talks to the controller over ``connection``; its process id.

        Args:
            foreign: open sockets that are not the rank's business, and would keep it from seeing others hang up.
        """
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                self._control.close()
                for other in foreign:
                    other.close()
                die_with(parent)
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # concerns those who can end this process
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                serve(Channel(connection), rank, **settings)
            finally:
                os._exit(1)
        self._children[pid] = rank
        return pid

    def _load(self, subject: str, place: tuple[list[str], str] | None) -> None:
        """Import what all ranks will need; a rank that cannot import it says so itself."""
        with contextlib.suppress(Exception):
            enter_place(place)
            load_subject(subject)

    def _spawn(self, rank: int, settings: dict[str, Any]) -> None:
        raise NotImplementedError

    def _kill(self) -> None:
        self._control.send("killed", self.end_all())

    def _exit(self, code: int) -> None:
        raise NotImplementedError


class LocalLauncher(Launcher):
    """Forks ranks for a controller on the same machine, which gets the other end of a socket pair.

    Args:
        connection: to the controller, able to carry file descriptors.
    """

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(Channel(connection))
        self._connection = connection

    def _spawn(self, rank: int, settings: dict[str, Any]) -> None:
        ours, theirs = socket.socketpair()
        pid = self.fork(rank, ours, [theirs], machine=Machine(rank, MOST_RANKS), **settings)
        socket.send_fds(self._connection, [b"f"], [theirs.fileno()])
        ours.close()
        theirs.close()
        self._control.send("spawned", pid)


def die_with(parent: int, how: signal.Signals = signal.SIGKILL) -> None:
    """Be ended with the parent, where the system can do that; elsewhere the controller's hanging up ends this process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, how)
        if os.getppid() != parent:
            os._exit(1)


def main(descriptor: int, folder: str) -> None:
    """Serve the controller that started this process; then remove the folder, since the controller may not be there to do it."""
    try:
        LocalLauncher(socket.socket(fileno=descriptor)).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
    os._exit(0)  # an interpreter full of libraries takes its time to go
