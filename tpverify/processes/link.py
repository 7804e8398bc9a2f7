"""How the processes of a job over several machines find the controller: a port, and a secret that every connection starts with."""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
import socket
import sys
from dataclasses import dataclass
from typing import Any

from tpverify.processes.channel import Channel

TOKEN_BYTES = 32
LOOPBACKS = ("lo", "lo0")
CONNECT_SECONDS = 30.0
HELLO_SECONDS = 5.0
"""How long a connection gets to prove that it is one of ours."""
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""Seconds, seconds, times: a machine that is cut off counts as gone after half a minute."""
UNANSWERED_MILLISECONDS = 30_000
"""How long what was sent may stay unanswered by the other machine's system."""


@dataclass(frozen=True)
class Address:
    """Where the controller listens, and the secret."""

    host: str
    port: int
    token: bytes

    def connect(self) -> socket.socket:
        """A connection to the controller, accepted as one of ours.

        Raises:
            OSError: the controller cannot be reached.
        """
        connection = socket.create_connection((self.host, self.port), CONNECT_SECONDS)
        connection.sendall(self.token)
        return _lasting(connection)


class Listener:
    """The controller's port.

    Args:
        host: the controller's machine, as the others call it; a loopback address keeps the port from the network.
    """

    def __init__(self, host: str) -> None:
        if is_loopback(host):
            self._socket = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=128)
        elif socket.has_dualstack_ipv6():
            self._socket = socket.create_server(("", 0), family=socket.AF_INET6, backlog=128, dualstack_ipv6=True)
        else:
            self._socket = socket.create_server(("", 0), backlog=128)
        self.address = Address(host, self._socket.getsockname()[1], secrets.token_bytes(TOKEN_BYTES))

    def fileno(self) -> int:
        """For ``selectors``."""
        return self._socket.fileno()

    def accept(self) -> tuple[Channel, tuple[Any, ...]] | None:
        """The next connection and its first message; None if it is a stranger's."""
        connection, _ = self._socket.accept()
        connection.settimeout(HELLO_SECONDS)
        channel = Channel(connection)
        try:
            known = hmac.compare_digest(connection.recv(TOKEN_BYTES, socket.MSG_WAITALL), self.address.token)
        except OSError:
            known = False
        hello = channel.receive() if known else None
        if hello is None:
            channel.close()
            return None
        _lasting(connection)
        return channel, hello

    def close(self) -> None:
        """Nobody else may connect."""
        self._socket.close()


def is_loopback(host: str) -> bool:
    """Whether a host's name says that it cannot be reached from other machines."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def use_loopback(host: str) -> None:
    """Where the controller is on this machine only, let gloo look for no other way than the machine's own, unless told to."""
    names = [name for _, name in socket.if_nameindex() if name in LOOPBACKS]
    if names and is_loopback(host):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])


def _lasting(connection: socket.socket) -> socket.socket:
    """Small messages at once, no end of patience, but none with a machine that is cut off."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        for name, value in KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNANSWERED_MILLISECONDS)
    return connection
