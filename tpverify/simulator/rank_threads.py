"""The threads on which ranks run: starting one takes long, so they are kept, but for those in which a program has left something."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tpverify.simulator.one_core import cores_of, stay_on
from tpverify.thread_state import thread_state

KEPT = 8
"""Threads that wait for the next run at most."""
IDLE = "tpverify: waits for a rank"

_dict_of_thread = ctypes.pythonapi.PyThreadState_GetDict
_dict_of_thread.restype = ctypes.c_void_p  # borrowed, which py_object would not know
_waiting: list[RankThread] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_waiting.clear)  # a child has none of its parent's threads


class RankThread(threading.Thread):
    """A thread that carries out one program after the other, each as if it were new."""

    def __init__(self) -> None:
        super().__init__(name=IDLE, daemon=True)
        self.untouched = True
        self.inherited = _inherited()
        self._cores = cores_of(0)
        self._program: Callable[[], None] | None = None
        self._dismissed = False
        self._order, self._done = threading.Lock(), threading.Lock()
        self._order.acquire()

    def perform(self, name: str, program: Callable[[], None]) -> None:
        """Begin with a program, on the cores of whoever asks; the thread must have finished the last."""
        cores = cores_of(0)
        if cores != self._cores:
            self._cores = stay_on(cores, self.native_id or 0)
        self.name, self._program = name, program
        self._done.acquire()
        self._order.release()

    def finished(self, timeout: float) -> bool:
        """Wait until the program has returned; whether it has."""
        if not self._done.acquire(timeout=timeout):
            return False
        self._done.release()
        return True

    def dismiss(self) -> None:
        """End, once the present program has returned."""
        self._dismissed = True
        with contextlib.suppress(RuntimeError):  # it has not even begun with its program
            self._order.release()

    def run(self) -> None:
        """Wait for programs until dismissed, or until one has left something behind."""
        thread_state.session = None  # so that tpverify's own state is there already, and what repr() keeps
        repr([0])
        attributes, at_first = set(vars(self)), _contents()
        while self.untouched and not self._dismissed:
            self._order.acquire()
            program, self._program = self._program, None
            if program is None:
                return
            try:
                self.untouched = False
                contextvars.Context().run(program)
                self.untouched = set(vars(self)) == attributes and _contents() == at_first
            finally:
                del program
                self.name = IDLE
                self._done.release()


def take(count: int) -> list[RankThread]:
    """So many threads that are as new ones would be."""
    taken: list[RankThread] = []
    try:
        inherited = _inherited()
        outdated = [thread for thread in _waiting if thread.inherited != inherited]
        _waiting[:] = [thread for thread in _waiting if thread not in outdated]
        dismiss(outdated)
        while len(taken) < count:
            taken.append(_waiting.pop() if _waiting else RankThread())
            if not taken[-1].is_alive():
                taken[-1].start()
    except BaseException:
        dismiss(taken)
        raise
    return taken


def give_back(threads: Sequence[RankThread]) -> None:
    """The threads' programs have returned: keep those that are as before."""
    keep = not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # each thread then has its own device, stream and handles
    untouched = [thread for thread in threads if keep and thread.untouched][: KEPT - len(_waiting)]
    _waiting.extend(reversed(untouched))  # the first is taken first again
    dismiss([thread for thread in threads if thread not in untouched])


def dismiss(threads: Sequence[RankThread]) -> None:
    """End these threads, once their programs have returned."""
    for thread in threads:
        thread.dismiss()
    for thread in threads:
        if thread.is_alive() and thread.finished(0):
            thread.join()


def _inherited() -> tuple[Any, ...]:
    """What a thread has from whoever starts it: torch's number of helpers, how the processor treats the smallest numbers, watchers."""
    smallest = sys.float_info.min
    return torch.get_num_threads(), smallest * 0.5 > 0.0, threading.gettrace(), threading.getprofile()


def _contents() -> tuple[Any, ...]:
    """All that a program can change for the thread alone: its local variables, torch's modes and switches, and who watches it."""
    hooks: Any = torch._C._autograd
    return (
        set(ctypes.cast(_dict_of_thread(), ctypes.py_object).value),  # threading.local and DTensor's caches
        _inherited(),
        sys.gettrace(),
        sys.getprofile(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch._C._is_multithreading_enabled(),
        torch._C._is_view_replay_enabled(),
        torch._C._is_fwd_grad_enabled(),
        [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")],
        torch.is_autocast_cache_enabled(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        torch._C._is_torch_function_enabled(),
        torch._C._dispatch_tls_local_include_set().raw_repr(),
        torch._C._dispatch_tls_local_exclude_set().raw_repr(),
        torch._C._functorch.peek_interpreter_stack(),
        hooks._top_saved_tensors_default_hooks(True),
        hooks._profiler_enabled(),
    )
