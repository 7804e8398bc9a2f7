"""Where a run's threads are carried out: on one core, since one of them runs at a time, and waking one on another core takes long."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterator

import torch


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Within the block this thread, and each that it starts, stays on the core on which it is.

    On Linux only; and only if torch computes in one thread (``OMP_NUM_THREADS=1``), whose helpers would be put there too.
    """
    current = _core_finder()
    if current is None or torch.get_num_threads() > 1:
        yield
        return
    before = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):  # a container may forbid it
        os.sched_setaffinity(0, {current()})
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, before)


@functools.cache
def _core_finder() -> Callable[[], int] | None:
    """C's function that tells on which core the calling thread is; None where there is none, or threads cannot be told where to stay."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    return getattr(ctypes.CDLL(None), "sched_getcpu", None)
