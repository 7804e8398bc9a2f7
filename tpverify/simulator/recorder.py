"""Where in the user's program a rank is: phase, module path and source lines of each collective."""

from __future__ import annotations

import bisect
import contextlib
import functools
import os
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint as checkpoint_module
import typing_extensions
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tpverify.ledger.record import CallSite
from tpverify.thread_state import thread_state

MAX_FRAMES = 8
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_HIDDEN = (os.path.dirname(os.path.abspath(torch.__file__)) + os.sep, _PACKAGE + os.sep)
_SHOWN = tuple(os.path.join(_PACKAGE, part) + os.sep for part in ("subjects", "mutants"))
_WRAPPERS = tuple(module.__file__ or "" for module in (threading, contextlib, functools, typing_extensions))
_CHECKPOINT_FILE = checkpoint_module.__file__
_ACCUMULATE_GRAD = 2**64 - 1

# By file name and not by code object: code objects of two files may compare equal.
_is_hidden: dict[str, bool] = {}
_sites: dict[tuple[str, int, str], CallSite] = {}


def _hidden(filename: str) -> bool:
    ours = filename.startswith(_HIDDEN) and not filename.startswith(_SHOWN)
    return ours or filename in _WRAPPERS or filename.startswith("<frozen")


def call_sites(frame: FrameType | None = None) -> tuple[CallSite, ...]:
    """The user's frames on the stack, innermost first, at most ``MAX_FRAMES``; frames of torch and tpverify are left out.

    Args:
        frame: where to start; the caller by default.
    """
    sites: list[CallSite] = []
    if frame is None:
        frame = sys._getframe(1)
    while frame is not None and len(sites) < MAX_FRAMES:
        code = frame.f_code
        hidden = _is_hidden.get(code.co_filename)
        if hidden is None:
            hidden = _is_hidden[code.co_filename] = _hidden(code.co_filename)
        if not hidden:
            key = (code.co_filename, frame.f_lineno, code.co_name)
            site = _sites.get(key)
            if site is None:
                site = _sites[key] = CallSite(*key)
            sites.append(site)
        frame = frame.f_back
    return tuple(sites)


def _runs_forward_again(node: Any) -> bool:
    """Whether what runs inside backward, outside any module, is a checkpoint's forward.

    Gradients alone do not tell: they are off inside an autograd function's forward, and on in a backward that was asked
    for its own graph (``create_graph=True``).
    """
    if node is not None and "Checkpoint" in node.name():
        return True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == _CHECKPOINT_FILE:
            return True
        if code.co_name == "_engine_run_backward":
            arguments = frame.f_locals.get("args", ())
            return torch.is_grad_enabled() and not (len(arguments) > 2 and arguments[2])
        frame = frame.f_back
    return False


class Recorder:
    """Follows one rank's program through modules, backward and optimizer steps.

    A collective in backward belongs to the module whose forward created the autograd node that issues it: nodes carry
    a sequence number that grows with every operation of the thread, and the recorder notes that number at each module
    boundary. So no backward hook is needed and the code under test runs unmodified.
    """

    def __init__(self) -> None:
        self.base_phase = "other"
        self._names: dict[int, tuple[str, torch.nn.Module]] = {}
        self._owners: dict[int, tuple[str, torch.Tensor]] = {}
        self._steps: list[str] = []
        self._stack: list[str] = []
        self._tasks: list[int] = []
        self._marks: list[int] = [0]
        self._paths: list[str] = [""]

    def name_modules(self, root: torch.nn.Module, prefix: str = "") -> None:
        """Give ``root`` the path ``prefix`` and its descendants theirs below it."""
        for name, module in root.named_modules():
            path = ".".join(part for part in (prefix, name) if part)
            self._names.setdefault(id(module), (path, module))
            self._own_parameters(path, module)

    def enter_module(self, module: torch.nn.Module) -> None:
        """A module's forward begins."""
        if id(module) not in self._names:
            name = type(module).__name__
            self.name_modules(module, f"{self._stack[-1]}.{name}".lstrip(".") if self._stack else name)
        self._stack.append(self._names[id(module)][0])
        self._tasks.append(torch._C._current_graph_task_id())
        self._mark()

    def leave_module(self) -> None:
        """A module's forward ends."""
        if self._stack:
            self._stack.pop()
            self._tasks.pop()
            self._mark()

    def position(self) -> tuple[str, str]:
        """(phase, module path) of the line being run."""
        path = self._stack[-1] if self._stack else ""
        task = torch._C._current_graph_task_id()
        if task != -1:
            if self._tasks and self._tasks[-1] == task:  # a module called inside this backward
                return "recompute", path
            node = torch._C._current_autograd_node()
            return "recompute" if _runs_forward_again(node) else "backward", self._owner_of_node(node)
        if self.base_phase in ("other", "optimizer") and self._stack:
            return "forward", path
        return self.base_phase, path

    def enter_step(self) -> None:
        """An optimizer step begins."""
        self._steps.append(self.base_phase)
        self.base_phase = "optimizer"

    def leave_step(self) -> None:
        """An optimizer step ends."""
        if self._steps:
            self.base_phase = self._steps.pop()

    def _own_parameters(self, path: str, module: torch.nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            # The parameter is kept: another one could get the id of a dead one.
            self._owners.setdefault(id(parameter), (path, parameter))

    def _mark(self) -> None:
        self._marks.append(torch._C._autograd._get_sequence_nr())
        self._paths.append(self._stack[-1] if self._stack else "")

    def _owner_of_node(self, node: Any) -> str:
        if node is None:
            return ""
        number = node._sequence_nr()
        if number >= _ACCUMULATE_GRAD:
            return self._owner_of_parameter(getattr(node, "variable", None))
        return self._paths[bisect.bisect_right(self._marks, number) - 1]

    def _owner_of_parameter(self, parameter: torch.Tensor | None) -> str:
        if id(parameter) not in self._owners:
            for path, module in list(self._names.values()):  # a parameter may have been replaced since
                self._own_parameters(path, module)
        return self._owners.get(id(parameter), ("", parameter))[0]


def current() -> Recorder | None:
    """The recorder of the rank that runs on this thread, if any."""
    recorder: Recorder | None = thread_state.recorder
    return recorder


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Within the block, on this thread, modules and optimizers report to ``recorder``."""
    thread_state.recorder = recorder
    try:
        yield
    finally:
        thread_state.recorder = None


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

    def before_step(*_: Any) -> None:
        recorder = current()
        if recorder is not None:
            recorder.enter_step()

    def after_step(*_: Any) -> None:
        recorder = current()
        if recorder is not None:
            recorder.leave_step()

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
