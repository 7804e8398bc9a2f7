"""Which process group the code under test should use: the world, unless the case puts two TP groups in one world."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch.distributed as dist

_local = threading.local()


def tp_group() -> dist.ProcessGroup:
    """The TP process group of this rank; call it inside ``Subject.parallel``."""
    group = getattr(_local, "group", None) or dist.group.WORLD
    if group is None:
        raise RuntimeError("Expected an initialised torch.distributed world but got none: call tp_group() on a rank")
    return group


@contextlib.contextmanager
def use_tp_group(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Within the block, on this thread, :func:`tp_group` is ``group``."""
    before = getattr(_local, "group", None)
    _local.group = group
    try:
        yield
    finally:
        _local.group = before
