"""Whether what a subject says about one case can be used: its own functions' faults must not pass for those of the code under test."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch

from tpverify.case import Case, short_repr
from tpverify.errors import SubjectError
from tpverify.subjects.subject import Collective, Input, Subject, Vocabulary

T = TypeVar("T")
PLAIN = (bool, int, float, complex, str, bytes, type(None))


def check_subject(subject: object) -> None:
    """Raises :class:`SubjectError` unless ``subject`` is a :class:`Subject` whose precision is a floating-point dtype."""
    if not isinstance(subject, Subject):
        raise SubjectError(f"Expected a tpverify.Subject but got {subject!r}")
    if not isinstance(subject.precision, torch.dtype) or not subject.precision.is_floating_point:
        raise SubjectError(f"Expected a floating-point dtype but got precision={subject.precision!r} in subject {subject.name}")


def check_description(subject: Subject, case: Case) -> None:
    """Ask each of the subject's functions about the case once, before anything runs.

    Raises:
        SubjectError: the config cannot be written down and read back, or a function raises or returns what cannot be used.
    """
    _check_config(case.config)
    config, world_size = case.config, case.world_size

    def asked(name: str, function: Callable[[], T]) -> T:
        try:
            return function()
        except SubjectError as error:
            raise SubjectError(f"{name} of subject {subject.name}: {error}") from error
        except (Exception, SystemExit) as error:
            what = f"{name} of subject {subject.name}"
            got = f"{type(error).__name__}: {error}"
            raise SubjectError(f"Expected {what} to answer for {short_repr(config)} but it raised {got}") from error

    inputs = asked("inputs", lambda: subject.inputs(config))
    asked("inputs", lambda: _check_inputs(inputs))
    asked("exact", lambda: subject.exact_for(config))
    if subject.vocabulary is not None:
        vocabulary = asked("vocabulary", lambda: subject.vocabulary and subject.vocabulary(config))
        asked("vocabulary", lambda: _check_vocabulary(vocabulary, inputs))
    if asked("rejects", lambda: subject.rejects is not None and subject.rejects(config, world_size)):
        return  # there need not be a way to place what is refused
    asked("placements", lambda: subject.placements_for(config))
    asked("outputs", lambda: subject.outputs_for(config))
    if subject.communication is not None:
        expected = asked("communication", lambda: subject.communication and subject.communication(config, world_size))
        asked("communication", lambda: _check_communication(expected))


def checked_module(side: str, built: Any) -> torch.nn.Module:
    """What the subject's ``side`` (reference, parallel) built; raises :class:`SubjectError` unless it is a module."""
    if not isinstance(built, torch.nn.Module):
        raise SubjectError(f"Expected {side}(config) to return a torch.nn.Module but got {built!r}")
    return built


def check_lookup(subject: Subject, case: Case, module: torch.nn.Module) -> None:
    """A path that matches no module would switch the ``vocabulary`` check off without a word: raise :class:`SubjectError`."""
    lookup = subject.vocabulary(case.config).lookup if subject.vocabulary else ""
    paths = [path for path, _ in module.named_modules()]
    if lookup and not any(fnmatchcase(path, lookup) for path in paths):
        raise SubjectError(f"Expected the vocabulary's lookup={lookup!r} to match a module's path but got {', '.join(map(repr, paths))}")


def _check_config(config: Any) -> None:
    if not hasattr(type(config), "__dataclass_params__") or not type(config).__dataclass_params__.frozen:
        raise SubjectError(f"Expected a config that is a frozen dataclass but got config={config!r} of type {type(config).__name__}")
    for field in dataclasses.fields(config):
        _check_plain(f"config.{field.name}", getattr(config, field.name))
    try:
        pickle.dumps(config)
    except Exception as error:
        raise SubjectError(f"Expected a config of plain values that pickle can store but got config={config!r}: {error}") from error


def _check_plain(name: str, value: Any) -> None:
    """Only plain values can be read back from a failure report; a set's order changes from process to process."""
    if isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            _check_plain(f"{name}[{index}]", item)
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_plain(f"a key of {name}", key)
            _check_plain(f"{name}[{key!r}]", item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _check_plain(f"{name}.{field.name}", getattr(value, field.name))
    elif type(value) not in PLAIN and not isinstance(value, Enum):
        plain = "numbers, strings, enums, tuples, lists, dicts and dataclasses of these"
        raise SubjectError(f"Expected a config of plain values ({plain}) but got {name}={value!r} of type {type(value).__name__}")


def _check_inputs(inputs: Any) -> None:
    if not isinstance(inputs, Mapping):
        raise SubjectError(f"Expected {{name: tpverify.Input}} but got {inputs!r}")
    for name, spec in inputs.items():
        if not isinstance(name, str) or not isinstance(spec, Input):
            raise SubjectError(f"Expected a name and a tpverify.Input but got {name!r}: {spec!r}")
        shape = spec.shape
        if not isinstance(shape, Sequence) or not all(isinstance(size, int) and size >= 0 for size in shape):
            raise SubjectError(f"Expected a shape of sizes of at least 0 but got {name!r} with shape={shape!r}")
        if spec.placements.value is None:
            raise SubjectError(f"Expected a placement but got {name!r} with placement={spec.placement!r}")


def _check_vocabulary(vocabulary: Any, inputs: Mapping[str, Input]) -> None:
    if not isinstance(vocabulary, Vocabulary):
        raise SubjectError(f"Expected a tpverify.Vocabulary but got {vocabulary!r}")
    for field in ("ids", "targets", "logits"):
        name = getattr(vocabulary, field)
        if name and name not in inputs:
            raise SubjectError(f"Expected the name of an input ({', '.join(inputs) or 'none'}) but got {field}={name!r}")


def _check_communication(expected: Any) -> None:
    if expected is None:
        return  # only recorded
    if expected is None:
        return
    if not isinstance(expected, Sequence) or not all(isinstance(collective, Collective) for collective in expected):
        raise SubjectError(f"Expected a list of tpverify.Collective but got {expected!r}")
