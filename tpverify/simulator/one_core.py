"""Where ranks run: all on one core, since one of them runs at a time, and waking a thread on another core takes long."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable

import torch


def core_to_stay_on() -> int | None:
    """The core on which the caller is; None = threads had better move.

    So it is if torch computes in several threads, whose helpers would be put there too; and where the system cannot tell.
    """
    current = _core_finder()
    return None if current is None or torch.get_num_threads() > 1 else current()


def stay_on(core: int | None) -> None:
    """Keep this thread there for good, if there is such a core."""
    if core is not None:
        with contextlib.suppress(OSError):  # a container may forbid it
            os.sched_setaffinity(0, {core})


@functools.cache
def _core_finder() -> Callable[[], int] | None:
    """C's function that tells on which core the calling thread is; None where there is none, or threads cannot be told where to stay."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    return getattr(ctypes.CDLL(None), "sched_getcpu", None)
