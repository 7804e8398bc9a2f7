"""Where a run's threads are carried out: on one core, since one of them runs at a time, and waking one on another core takes long."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterator

import torch

Cores = set[int]


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Within the block this thread, and each that it starts, stays on the core on which it is.

    On Linux only; and only if torch computes in one thread (``OMP_NUM_THREADS=1``), whose helpers would be put there too.
    """
    current = _core_finder()
    if current is None or torch.get_num_threads() > 1:
        yield
        return
    before = cores_of(0)
    stay_on({current()}, 0)
    try:
        yield
    finally:
        stay_on(before, 0)


def cores_of(thread: int) -> Cores:
    """Where a thread may run, by its number in the system, 0 = this one; none where the system does not tell."""
    return os.sched_getaffinity(thread) if hasattr(os, "sched_getaffinity") else set()


def stay_on(cores: Cores, thread: int) -> Cores:
    """Tell a thread where to run; where it may run then."""
    with contextlib.suppress(OSError):  # a container may forbid it
        os.sched_setaffinity(thread, cores)
    return cores_of(thread)


@functools.cache
def _core_finder() -> Callable[[], int] | None:
    """C's function that tells on which core the calling thread is; None where there is none, or threads cannot be told where to stay."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    return getattr(ctypes.CDLL(None), "sched_getcpu", None)
