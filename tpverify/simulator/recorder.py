"""Where in the user's program a rank is: phase, module path and source lines of each collective."""

from __future__ import annotations

import bisect
import contextlib
import functools
import os
import sys
import threading
from collections.abc import Iterator
from types import CodeType
from typing import Any

import torch
import typing_extensions
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tpverify.ledger.record import CallSite

MAX_FRAMES = 8
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_HIDDEN = (os.path.dirname(os.path.abspath(torch.__file__)) + os.sep, _PACKAGE + os.sep)
_SHOWN = tuple(os.path.join(_PACKAGE, part) + os.sep for part in ("subjects", "mutants"))
_WRAPPERS = tuple(module.__file__ or "" for module in (threading, contextlib, functools, typing_extensions))
_ACCUMULATE_GRAD = 2**64 - 1

_is_hidden: dict[CodeType, bool] = {}
_sites: dict[tuple[CodeType, int], CallSite] = {}
_current = threading.local()


def _hidden(code: CodeType) -> bool:
    known = _is_hidden.get(code)
    if known is None:
        name = code.co_filename
        known = (name.startswith(_HIDDEN) and not name.startswith(_SHOWN)) or name in _WRAPPERS or name.startswith("<frozen")
        _is_hidden[code] = known
    return known


def call_sites() -> tuple[CallSite, ...]:
    """The user's frames on the stack, innermost first, at most ``MAX_FRAMES``; frames of torch and tpverify are left out."""
    sites: list[CallSite] = []
    frame = sys._getframe(1)
    while frame is not None and len(sites) < MAX_FRAMES:
        code = frame.f_code
        if not _hidden(code):
            key = (code, frame.f_lineno)
            site = _sites.get(key)
            if site is None:
                site = _sites[key] = CallSite(code.co_filename, frame.f_lineno, code.co_name)
            sites.append(site)
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(sites)


class Recorder:
    """Follows one rank's program through modules, backward and optimizer steps.

    A collective in backward belongs to the module whose forward created the autograd node that issues it: nodes carry
    a sequence number that grows with every operation of the thread, and the recorder notes that number at each module
    boundary. So no backward hook is needed and the code under test runs unmodified.
    """

    def __init__(self) -> None:
        self.base_phase = "other"
        self._names: dict[int, tuple[str, torch.nn.Module]] = {}
        self._owners: dict[int, str] = {}
        self._stack: list[str] = []
        self._marks: list[int] = [0]
        self._paths: list[str] = [""]

    def name_modules(self, root: torch.nn.Module, prefix: str = "") -> None:
        """Give ``root`` the path ``prefix`` and its descendants theirs below it."""
        for name, module in root.named_modules():
            path = ".".join(part for part in (prefix, name) if part)
            self._names.setdefault(id(module), (path, module))
            for parameter in module.parameters(recurse=False):
                self._owners.setdefault(id(parameter), path)

    def enter_module(self, module: torch.nn.Module) -> None:
        """A module's forward begins."""
        if id(module) not in self._names:
            name = type(module).__name__
            self.name_modules(module, f"{self._stack[-1]}.{name}".lstrip(".") if self._stack else name)
        self._stack.append(self._names[id(module)][0])
        self._mark()

    def leave_module(self) -> None:
        """A module's forward ends."""
        if self._stack:
            self._stack.pop()
            self._mark()

    def position(self) -> tuple[str, str]:
        """(phase, module path) of the line being run."""
        path = self._stack[-1] if self._stack else ""
        if torch._C._current_graph_task_id() != -1:
            # Backward runs without gradients; what needs them inside backward is a forward run again.
            return ("recompute", path) if torch.is_grad_enabled() else ("backward", self._backward_path())
        if self.base_phase == "other" and self._stack:
            return "forward", path
        return self.base_phase, path

    def _mark(self) -> None:
        self._marks.append(torch.autograd._get_sequence_nr())
        self._paths.append(self._stack[-1] if self._stack else "")

    def _backward_path(self) -> str:
        node: Any = torch._C._current_autograd_node()  # type: ignore[attr-defined]
        if node is None:
            return ""
        number = node._sequence_nr()
        if number >= _ACCUMULATE_GRAD:
            return self._owners.get(id(getattr(node, "variable", None)), "")
        return self._paths[bisect.bisect_right(self._marks, number) - 1]


def current() -> Recorder | None:
    """The recorder of the rank that runs on this thread, if any."""
    return getattr(_current, "recorder", None)


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Within the block, on this thread, modules and optimizers report to ``recorder``."""
    _current.recorder = recorder
    try:
        yield
    finally:
        _current.recorder = None


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Within the block, collectives outside backward carry this phase; does nothing outside a simulated rank."""
    recorder = current()
    if recorder is None:
        yield
        return
    before, recorder.base_phase = recorder.base_phase, name
    try:
        yield
    finally:
        recorder.base_phase = before


@contextlib.contextmanager
def hooks() -> Iterator[None]:
    """Install the process-wide module and optimizer hooks for the length of a run; other threads are not concerned."""

    def enter(module: torch.nn.Module, args: Any) -> None:
        recorder = current()
        if recorder is not None:
            recorder.enter_module(module)

    def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
        recorder = current()
        if recorder is not None:
            recorder.leave_module()

    steps: list[str] = []

    def before_step(*_: Any) -> None:
        recorder = current()
        if recorder is not None:
            steps.append(recorder.base_phase)
            recorder.base_phase = "optimizer"

    def after_step(*_: Any) -> None:
        recorder = current()
        if recorder is not None:
            recorder.base_phase = steps.pop()

    handles = [
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, always_call=True),
        register_optimizer_step_pre_hook(before_step),
        register_optimizer_step_post_hook(after_step),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
