"""What every process of a torchrun job is, rank 0 included: the parent of its own rank, which the controller on rank 0 commands."""

from __future__ import annotations

import contextlib
import signal
import socket
from types import FrameType
from typing import Any, NoReturn

import torch

from tpverify.processes.channel import Channel
from tpverify.processes.job_rank import JobRank
from tpverify.processes.launcher import Launcher
from tpverify.processes.link import Address
from tpverify.processes.worker import Machine


class Left(Exception):
    """A signal ends this process.

    Attributes:
        number: of the signal, which the message names.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def leave(number: int, frame: FrameType | None) -> NoReturn:
    """As a signal's handler: end what this process does."""
    raise Left(number)


class JobLauncher(Launcher):
    """Forks, kills and forks again the one rank of this process.

    Args:
        me: which rank that is.
        address: of the controller.

    Attributes:
        code: what the controller wants the process to exit with; None = it is gone without a word.

    Raises:
        OSError: the controller cannot be reached.
    """

    def __init__(self, me: JobRank, address: Address) -> None:
        control = Channel(address.connect())
        super().__init__(control)
        self.code: int | None = None
        self._me = me
        self._address = address
        about = {"host": socket.gethostname(), "local_rank": me.local_rank, "local_world_size": me.local_world_size}
        control.send("launcher", me.rank, about | {"gpus": torch.cuda.device_count(), "release": str(torch.__version__)})

    def run(self) -> None:
        """Answer the controller until it is gone or has no more use for this process.

        Raises:
            Left: a signal has ended it; the controller has been told.
        """
        try:
            super().run()
        except Left as left:
            with contextlib.suppress(OSError):
                self._control.send("leaving", str(left))
            raise

    def _spawn(self, rank: int, settings: dict[str, Any]) -> None:
        connection = self._address.connect()
        variables = {"MASTER_ADDR": self._me.master, "MASTER_PORT": str(self._me.port)}
        machine = Machine(self._me.local_rank, self._me.local_world_size, variables)
        pid = self.fork(rank, connection, machine=machine, **settings)
        Channel(connection).send("worker", rank, pid, settings["store"])
        connection.close()

    def _exit(self, code: int) -> None:
        self.code = code
        self.end_all()
        self._control.close()
