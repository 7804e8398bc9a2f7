"""The parent of all rank processes: imports torch once and forks a rank when asked, so that a killed pool is back at once.

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
from collections.abc import Callable
from typing import Any

from tpverify.lookup import load_subject
from tpverify.processes.channel import Channel
from tpverify.processes.worker import enter_place, serve

_PR_SET_PDEATHSIG = 1


class Launcher:
    """Forks, kills and reaps rank processes.

    Args:
        connection: to the controller.
        folder: what the processes share; removed in the end, since the controller may not be there to do it.
    """

    def __init__(self, connection: socket.socket, folder: str) -> None:
        self._connection = connection
        self._folder = folder
        self._control = Channel(connection)
        self._children: dict[int, int] = {}

    def run(self) -> None:
        """Answer the controller until it is gone."""
        handlers: dict[str, Callable[..., None]] = {"load": self._load, "spawn": self._spawn, "kill": self._kill}
        try:
            while (message := self._control.receive()) is not None:
                kind, *arguments = message
                handlers[kind](*arguments)
        finally:
            self._end_all()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _load(self, path: list[str], folder: str, subject: str) -> None:
        """Import what all ranks will need; a rank that cannot import it says so itself."""
        with contextlib.suppress(Exception):
            enter_place(path, folder)
            load_subject(subject)

    def _spawn(self, rank: int, *arguments: Any) -> None:
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                self._control.close()
                theirs.close()
                _die_with(parent)
                serve(Channel(ours), rank, *arguments)
            finally:
                os._exit(1)
        self._children[pid] = rank
        socket.send_fds(self._connection, [b"f"], [theirs.fileno()])
        ours.close()
        theirs.close()
        self._control.send("spawned", pid)

    def _kill(self) -> None:
        self._control.send("killed", self._end_all())

    def _end_all(self) -> list[tuple[int, int]]:
        """Kill every child and wait for it; (rank, exit status), negative for a signal: those that had ended by themselves keep theirs."""
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        ended = [(rank, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) for pid, rank in self._children.items()]
        self._children.clear()
        return ended


def _die_with(parent: int) -> None:
    """Be killed with the parent, where the system can do that; elsewhere the controller's hanging up ends this process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


if __name__ == "__main__":
    Launcher(socket.socket(fileno=int(sys.argv[1])), sys.argv[2]).run()
    os._exit(0)  # an interpreter full of libraries takes its time to go
