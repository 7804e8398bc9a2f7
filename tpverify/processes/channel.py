"""Whole messages over a socket between the controller and one rank, wherever that rank runs."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from typing import Any

from tpverify.processes.codec import decode, encode

_LENGTH = 8
_CHUNK = 1 << 16


class Channel:
    """One end of a connection.

    Args:
        connection: a connected stream socket; the channel closes it.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._received = bytearray()
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """For ``selectors``."""
        return self._socket.fileno()

    def send(self, *message: Any) -> None:
        """Send one message, whole.

        Raises:
            OSError: the other end is gone.
            TypeError: the message is not plain data.
        """
        content = encode(message)
        with self._sending:
            self._socket.sendall(len(content).to_bytes(_LENGTH, "big") + content)

    def receive(self) -> tuple[Any, ...] | None:
        """The next message; None when the other end is gone."""
        while True:
            message = self._next()
            if message is not None:
                return message
            if not self._read():
                return None

    def available(self) -> tuple[list[tuple[Any, ...]], bool]:
        """The messages that have come once the socket is readable, and whether the other end is still there."""
        alive = self._read()
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        return messages, alive

    def has_something(self) -> bool:
        """Whether there is something to read, the end included."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def close(self) -> None:
        """Hang up."""
        with contextlib.suppress(OSError):
            self._socket.close()

    def _read(self) -> bool:
        try:
            part = self._socket.recv(_CHUNK)
        except OSError:
            return False
        self._received += part
        return bool(part)

    def _next(self) -> tuple[Any, ...] | None:
        if len(self._received) < _LENGTH:
            return None
        end = _LENGTH + int.from_bytes(self._received[:_LENGTH], "big")
        if len(self._received) < end:
            return None
        content = bytes(self._received[_LENGTH:end])
        del self._received[:end]
        message: tuple[Any, ...] = decode(content)
        return message
