"""Ranks as bare processes: a program over the real backend, with nothing of this package between it and torch.distributed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener, wait
from typing import Any

from torch import Tensor

from tpverify.conformance.program import Program
from tpverify.errors import CaseError
from tpverify.processes.codec import decode

LAUNCHER = "tpverify.conformance.bare_rank"
MOST_RANKS = 64
START_SECONDS = 120.0
SETTLE_SECONDS = 0.5
"""Once a rank has been refused, how long the others may still answer."""


@dataclass(frozen=True)
class BareRank:
    """What one rank's process made of a program.

    Attributes:
        outputs: what the steps left, by label; empty if the rank did not finish.
        refused: names of the exception's classes, nearest first; () = none was raised.
        message: the exception's.
        finished: whether the rank has answered at all.
        flights: what the backend itself recorded, in order.
    """

    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    message: str = ""
    finished: bool = False
    flights: tuple[Mapping[str, Any], ...] = ()


class BareWorld:
    """Processes for worlds of any size, kept from program to program, and replaced when ranks may be out of step.

    Args:
        backend: ``gloo`` or ``nccl``.
        timeout: seconds for one program.
    """

    def __init__(self, backend: str, timeout: float = 20.0) -> None:
        self._backend = backend
        self._timeout = timeout
        self._launcher: subprocess.Popen[str] | None = None
        self._listener: Listener | None = None
        self._folder = ""
        self._starts = 0
        self._pids: dict[int, list[int]] = {}
        self._ranks: dict[int, dict[int, Connection]] = {}

    def run(self, program: Program) -> list[BareRank]:
        """Run a program; by rank.

        Raises:
            CaseError: the processes do not start.
        """
        size = program.world_size
        try:
            if size not in self._ranks:
                self._start(size)
            for connection in self._ranks[size].values():
                connection.send(program)
            answers = self._answers(size)
        except BaseException:
            self.close()
            raise
        ranks = [answers.get(rank, BareRank()) for rank in range(size)]
        if not all(rank.finished and not rank.refused for rank in ranks):
            self._kill(size)
        return ranks

    def close(self) -> None:
        """End all processes; they are started again when needed."""
        for size in list(self._ranks):
            self._kill(size)
        if self._launcher is not None and self._launcher.stdin is not None:
            self._launcher.stdin.close()
            self._launcher.wait()
        if self._listener is not None:
            self._listener.close()
        self._launcher = self._listener = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def _kill(self, size: int) -> None:
        for connection in self._ranks.pop(size, {}).values():
            connection.close()
        for pid in self._pids.pop(size, []):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _start(self, size: int) -> None:
        launcher, listener = self._launched()
        assert launcher.stdin is not None
        self._starts += 1
        for rank in range(size):
            store = os.path.join(self._folder, f"store{self._starts}")
            launcher.stdin.write(json.dumps([self._backend, rank, size, store]) + "\n")
        launcher.stdin.flush()
        self._ranks[size], self._pids[size] = {}, []
        for _ in range(size):
            connection = listener.accept()
            rank, pid = connection.recv()
            self._ranks[size][rank] = connection
            self._pids[size].append(pid)
        for rank, connection in sorted(self._ranks[size].items()):
            if not connection.poll(START_SECONDS) or connection.recv_bytes() != b"ready":
                raise CaseError(f"Expected rank {rank} to initialise {self._backend} within {START_SECONDS:g} seconds but it did not")

    def _launched(self) -> tuple[subprocess.Popen[str], Listener]:
        """What forks ranks, and where they report."""
        if self._launcher is None or self._listener is None:
            self._folder = tempfile.mkdtemp(prefix="tpverify-")
            address = os.path.join(self._folder, "controller")
            self._listener = Listener(address, "AF_UNIX", backlog=MOST_RANKS)
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-W", "ignore", "-m", LAUNCHER, address]
            self._launcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2, text=True, env=environment, start_new_session=True)
        return self._launcher, self._listener

    def _answers(self, size: int) -> dict[int, BareRank]:
        """By rank, of those that answer before it is clear that the others will not."""
        answers: dict[int, BareRank] = {}
        rank_of = {connection: rank for rank, connection in self._ranks[size].items()}
        deadline = time.monotonic() + self._timeout
        while rank_of and time.monotonic() < deadline:
            for ready in wait(list(rank_of), max(0.0, deadline - time.monotonic())):
                assert isinstance(ready, Connection)
                rank = rank_of.pop(ready)
                with contextlib.suppress(EOFError, ConnectionError):
                    answers[rank] = _read(ready.recv_bytes())
                    if answers[rank].refused:
                        deadline = min(deadline, time.monotonic() + SETTLE_SECONDS)
        return answers


def _read(answer: bytes) -> BareRank:
    content = decode(answer)
    flights = tuple(json.loads(content["flights"]))
    return BareRank(content["outputs"], content["refused"], content["message"], True, flights)
