"""Which process group the code under test should use: the world, unless the case puts two TP groups in one world."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from tpverify.thread_state import thread_state


def tp_group() -> dist.ProcessGroup:
    """The TP process group of this rank; call it inside ``Subject.parallel``."""
    group: dist.ProcessGroup | None = thread_state.group or dist.group.WORLD
    if group is None:
        raise RuntimeError("Expected an initialised torch.distributed world but got none: call tp_group() on a rank")
    return group


@contextlib.contextmanager
def use_tp_group(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Within the block, on this thread, :func:`tp_group` is ``group``."""
    before = thread_state.group
    thread_state.group = group
    try:
        yield
    finally:
        thread_state.group = before
