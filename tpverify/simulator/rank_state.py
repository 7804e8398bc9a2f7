"""Process-wide state that a rank must have for itself, swapped whenever the baton changes hands."""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import importlib
import os
import types
from collections import UserDict, UserList, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch
import torch.distributed.distributed_c10d as c10d
import torch.distributed.tensor._random as dtensor_random

from tpverify.device import generators
from tpverify.errors import CaseError
from tpverify.options import CPU
from tpverify.simulator.numpy_random import NumpyRandom
from tpverify.simulator.python_random import PythonRandom
from tpverify.simulator.rank_world import RankWorld

_NOT_STATE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)
_CONTAINERS = (dict, list, set, bytearray, deque, UserDict, UserList, WeakKeyDictionary, WeakValueDictionary, WeakSet)
_CACHED = functools._lru_cache_wrapper
_Owner: TypeAlias = types.ModuleType | type


@dataclass
class _State:
    world: c10d._World
    torch_rng: list[torch.Tensor]
    default_dtype: torch.dtype
    launcher: dict[str, str]
    rng_tracker: Any = None
    owners: list[dict[str, Any]] = field(default_factory=list)


def _is_state(owner: _Owner, value: Any) -> bool:
    if isinstance(owner, types.ModuleType):
        return not isinstance(value, _NOT_STATE)
    if isinstance(value, (staticmethod, classmethod)):
        return isinstance(value.__func__, _CACHED)
    return isinstance(value, _CACHED) or not (isinstance(value, _NOT_STATE) or hasattr(type(value), "__get__"))


def _state_of(owner: _Owner, before: Collection[str] = ()) -> dict[str, Any]:
    """Variables of a module or a class; a name that was state ``before`` stays state, even if it is a function by now."""
    found = vars(owner).items()
    return {name: value for name, value in found if not name.startswith("__") and (name in before or _is_state(owner, value))}


def _set_state(owner: _Owner, state: Mapping[str, Any]) -> None:
    current = vars(owner)
    for name in [name for name in _state_of(owner) if name not in state]:
        delattr(owner, name)
    for name, value in state.items():
        if name not in current or current[name] is not value:
            setattr(owner, name, value)


class _Copies:
    """One rank's own containers and caches.

    Args:
        homes: names of the modules whose caches belong to a rank.
    """

    def __init__(self, homes: Collection[str]) -> None:
        self._homes = homes
        self._known: dict[int, Any] = {}

    def of(self, value: Any) -> Any:
        """Containers and caches are changed in place, so every rank starts with its own; two names for one stay one."""
        if id(value) in self._known:
            return self._known[id(value)]
        if isinstance(value, _CACHED) and value.__module__ in self._homes:
            cached = self._known[id(value)] = functools.lru_cache(**value.cache_parameters())(value.__wrapped__)
            vars(cached).update({name: item for name, item in vars(value).items() if name not in vars(cached)})
            return cached
        if isinstance(value, (staticmethod, classmethod)):
            return type(value)(self.of(value.__func__))
        return self._container(value) if isinstance(value, _CONTAINERS) else value

    def _container(self, value: Any) -> Any:
        own = self._known[id(value)] = copy.copy(value)
        if isinstance(value, (dict, UserDict)):
            places: list[tuple[Any, Any]] = list(value.items())
        else:
            places = list(enumerate(value)) if isinstance(value, (list, deque, UserList)) else []
        for place, item in places:
            if (own_item := self.of(item)) is not item:
                own[place] = own_item
        return own


def _classes(owner: _Owner, home: str) -> Iterator[type]:
    """The classes that a module defines, those within classes included; members of an enumeration cannot be set."""
    for value in list(vars(owner).values()):
        if isinstance(value, type) and value.__module__ == home and not isinstance(value, enum.EnumMeta) and value is not owner:
            yield value
            yield from _classes(value, home)


def _module(name: str) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CaseError(f"Expected names of modules that can be imported but got rank_local={name!r}: {error}") from error


_ENVIRONMENT = os.environ
"""The process's own; somebody may have put another mapping in its place for a while."""


class RankState:
    """The rank-local state of a whole world.

    Swapped: c10d's registry of groups, the generators of torch (the GPU's too, if ranks compute there), Python and (if imported)
    numpy, torch's default dtype, the launcher's environment variables of a rank, and the global variables of DTensor's random
    module and of ``rank_local`` modules, with the class attributes and ``functools`` caches that these define. torch's
    generators start from ``seed`` on every rank, as in processes that nobody seeded; Python's and numpy's, which such processes
    take from the system, start differently on each rank.

    Args:
        world_size: number of ranks.
        seed: of torch's generator.
        rank_local: names of modules whose global variables, class attributes and caches belong to a rank.
        device: where the ranks compute.

    Raises:
        CaseError: a module cannot be imported.
    """

    def __init__(self, world_size: int, seed: int, rank_local: Sequence[str] = (), device: str = CPU) -> None:
        modules = [_module(name) for name in rank_local]
        self._homes = {module.__name__ for module in modules}
        classes = [found for module in modules for found in _classes(module, module.__name__)]
        self._owners: list[_Owner] = list(dict.fromkeys((*modules, *classes)))
        self._python = PythonRandom(world_size, seed)
        self._numpy = NumpyRandom(world_size, seed)
        self._generators = generators(device)
        self._outside = self._capture()
        sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world_size))
        self._launcher = {**sizes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        seeded = [torch.Generator(generator.device).manual_seed(seed).get_state() for generator in self._generators]
        self._states = [self._initial(rank, seeded) for rank in range(world_size)]

    def leave(self, rank: int) -> None:
        """Save what the rank has changed."""
        state = self._states[rank]
        state.world = c10d._world
        state.torch_rng = [generator.get_state() for generator in self._generators]
        self._python.leave(rank)
        self._numpy.leave(rank)
        state.default_dtype = torch.get_default_dtype()
        state.rng_tracker = dtensor_random._rng_tracker
        for index, owner in enumerate(self._owners):
            state.owners[index] = _state_of(owner, state.owners[index])

    def enter(self, rank: int) -> None:
        """Make the rank's state the process's state."""
        self._python.enter(rank)
        self._numpy.enter(rank)
        self._restore(self._states[rank])

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """After the block the process's own state is back, all environment variables included."""
        bytewise = os.environ is _ENVIRONMENT and os.supports_bytes_environ
        environment: Any = os.environb if bytewise else os.environ  # bytes need no decoding
        before = dict(environment)
        os.environ.update(self._launcher)
        try:
            yield
        finally:
            self._python.restore()
            self._numpy.restore()
            self._restore(self._outside)
            self._states.clear()  # a world holds its groups, and they the run
            after = dict(environment)
            for name in after.keys() - before.keys():
                del environment[name]
            environment.update({name: value for name, value in before.items() if after.get(name) != value})

    def _capture(self) -> _State:
        return _State(
            world=c10d._world,
            torch_rng=[generator.get_state() for generator in self._generators],
            default_dtype=torch.get_default_dtype(),
            launcher={},
            rng_tracker=dtensor_random._rng_tracker,
            owners=[_state_of(owner) for owner in self._owners],
        )

    def _initial(self, rank: int, torch_rng: list[torch.Tensor]) -> _State:
        copies = _Copies(self._homes)
        return _State(
            world=RankWorld(),
            torch_rng=torch_rng,
            default_dtype=self._outside.default_dtype,
            launcher={"RANK": str(rank), "LOCAL_RANK": str(rank)},
            rng_tracker=self._outside.rng_tracker,
            owners=[{name: copies.of(value) for name, value in state.items()} for state in self._outside.owners],
        )

    def _restore(self, state: _State) -> None:
        c10d._world = state.world
        for generator, torch_state in zip(self._generators, state.torch_rng, strict=True):
            generator.set_state(torch_state)
        if torch.get_default_dtype() != state.default_dtype:
            torch.set_default_dtype(state.default_dtype)
        dtensor_random._rng_tracker = state.rng_tracker
        for name, value in state.launcher.items():  # update() takes several times as long
            os.environ[name] = value
        for owner, values in zip(self._owners, state.owners, strict=True):
            _set_state(owner, values)
