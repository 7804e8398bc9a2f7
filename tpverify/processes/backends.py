"""The real process groups behind a rank's recorded ones: connected once, kept from case to case."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# The controller ends a case that takes too long; the backend's own timeout must not come first.
BACKEND_TIMEOUT = timedelta(days=1)

_bindings: Any = torch._C._distributed_c10d


class Backends:
    """The real process groups of this process. They outlive a case: connecting costs more than a small case.

    Every case numbers the groups that it creates over the same members; so all ranks take the same one.

    Args:
        backend: ``gloo`` or ``nccl``.
        device: where this rank's tensors are.
        store: through which the processes find each other.
        rank: of this process.
    """

    def __init__(self, backend: str, device: torch.device, store: Any, rank: int) -> None:
        self.name = backend
        self.device = device
        self.store = store
        self._rank = rank
        self._groups: dict[tuple[tuple[int, ...], int], Any] = {}
        self._taken: Counter[tuple[int, ...]] = Counter()

    def start_case(self) -> None:
        """All groups are free again."""
        self._taken.clear()

    def take(self, members: tuple[int, ...], before_connecting: Callable[[], None]) -> Any:
        """A group over these global ranks that the running case does not use yet."""
        key = (members, self._taken[members])
        self._taken[members] += 1
        if key not in self._groups:
            before_connecting()
            self._groups[key] = self._connect(*key)
        return self._groups[key]

    def _connect(self, members: tuple[int, ...], number: int) -> Any:
        store = _bindings.PrefixStore(f"{'-'.join(map(str, members))}/{number}", self.store)
        group_rank, size = members.index(self._rank), len(members)
        group: Any = dist.ProcessGroup(store, group_rank, size)
        if self.name == "gloo":
            kind = dist.ProcessGroup.BackendType.GLOO
            backend = _bindings.ProcessGroupGloo(store, group_rank, size, timeout=BACKEND_TIMEOUT)
        else:
            kind = dist.ProcessGroup.BackendType.NCCL
            options = _bindings.ProcessGroupNCCL.Options()
            options._timeout = BACKEND_TIMEOUT
            backend = _bindings.ProcessGroupNCCL(store, group_rank, size, options)
        group._set_default_backend(kind)
        for device in dict.fromkeys((self.device, torch.device("cpu")) if self.name == "gloo" else (self.device,)):
            group._register_backend(device, kind, backend)
        return group
