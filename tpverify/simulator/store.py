"""The key-value store of a simulated world: waiting for a key gives the baton away instead of blocking the process."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from tpverify.simulator.recorder import call_sites
from tpverify.simulator.scheduler import Scheduler

_Store: Any = torch._C._distributed_c10d.Store


@dataclass(eq=False)
class _KeyWait:
    data: dict[str, bytes]
    keys: tuple[str, ...]
    site: str

    @property
    def done(self) -> bool:
        return all(key in self.data for key in self.keys)

    def describe(self, rank: int) -> str:
        missing = [key for key in self.keys if key not in self.data]
        return f"waits in the store for {', '.join(missing)}{self.site}"


class SharedKeys:
    """What all ranks' stores share."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.data: dict[str, bytes] = {}
        self._waits: list[_KeyWait] = []

    def put(self, key: str, value: bytes) -> None:
        """Set a key and wake the ranks that waited for it."""
        self.data[key] = value
        for wait in [wait for wait in self._waits if wait.done]:
            self._waits.remove(wait)
            self.scheduler.wake(wait)

    def wait(self, rank: int, keys: tuple[str, ...]) -> None:
        """Block the rank until all keys are set."""
        sites = call_sites()
        wait = _KeyWait(self.data, keys, f" at {sites[0]}" if sites else "")
        if not wait.done:
            self._waits.append(wait)
        self.scheduler.wait_until(rank, wait)


class RankStore(_Store):  # type: ignore[misc]
    """One rank's view of the world's store, with c10d's interface."""

    def __init__(self, shared: SharedKeys, rank: int) -> None:
        super().__init__()
        self._shared = shared
        self._rank = rank

    def set(self, key: str, value: str | bytes) -> None:
        """Set ``key``."""
        self._shared.put(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """The value of ``key``; waits until it is set."""
        self._shared.wait(self._rank, (key,))
        return self._shared.data[key]

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; the new value."""
        value = int(self._shared.data.get(key, b"0")) + amount
        self._shared.put(key, str(value).encode())
        return value

    def append(self, key: str, value: str | bytes) -> None:
        """Append to ``key``."""
        self.set(key, self._shared.data.get(key, b"") + (value.encode() if isinstance(value, str) else bytes(value)))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set ``key`` to ``desired`` if it is ``expected``, or if it is absent and ``expected`` is empty; the value afterwards."""
        wanted = expected.encode() if isinstance(expected, str) else bytes(expected)
        if self._shared.data.get(key, b"") == wanted:
            self.set(key, desired)
        return self._shared.data.get(key, wanted)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are set."""
        return all(key in self._shared.data for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set; a deadlock is found without a timeout."""
        self._shared.wait(self._rank, tuple(keys))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of ``keys``; waits for all."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        """Set several keys."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def delete_key(self, key: str) -> bool:
        """Delete ``key``; whether it was there."""
        return self._shared.data.pop(key, None) is not None

    def num_keys(self) -> int:
        """How many keys are set."""
        return len(self._shared.data)

    # The names under which c10d's C++ side looks for these two.
    deleteKey = delete_key
    getNumKeys = num_keys

    def has_extended_api(self) -> bool:
        """append, multi_get and multi_set exist."""
        return True
