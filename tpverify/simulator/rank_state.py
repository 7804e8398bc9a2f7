"""Process-wide state that a rank must have for itself, swapped whenever the baton changes hands."""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
import torch.distributed.tensor._random as dtensor_random

from tpverify.errors import CaseError

_NOT_STATE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)


class RankWorld(c10d._World):
    """PyTorch's registry of process groups, for one rank."""

    def __init__(self) -> None:
        super().__init__()
        self._maps: dict[str, Any] = {name: {} for name in ("map", "names", "ranks", "backends", "tags", "to_tag")}
        self._count = 0

    pg_map = property(lambda self: self._maps["map"])
    pg_names = property(lambda self: self._maps["names"])
    pg_group_ranks = property(lambda self: self._maps["ranks"])
    pg_backend_config = property(lambda self: self._maps["backends"])
    tags_to_pg = property(lambda self: self._maps["tags"])
    pg_to_tag = property(lambda self: self._maps["to_tag"])

    @property
    def group_count(self) -> int:
        """How many groups this rank has created or skipped; decides group names."""
        return self._count

    @group_count.setter
    def group_count(self, value: int) -> None:
        """Set by c10d at every new group."""
        self._count = value


@dataclass
class _State:
    world: c10d._World
    torch_rng: torch.Tensor
    python_rng: Any
    numpy_rng: Any
    default_dtype: torch.dtype
    launcher: dict[str, str]
    modules: list[dict[str, Any]] = field(default_factory=list)


def _module_state(module: types.ModuleType) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if not name.startswith("__") and not isinstance(value, _NOT_STATE)}


def _copied(value: Any, known: dict[int, Any]) -> Any:
    """Containers are changed in place, so every rank starts with its own; two names for one container stay one."""
    if type(value) not in (dict, list, set):
        return value
    if id(value) not in known:
        copy = known[id(value)] = type(value)()
        if isinstance(copy, dict):
            copy.update((key, _copied(item, known)) for key, item in value.items())
        elif isinstance(copy, list):
            copy.extend(_copied(item, known) for item in value)
        else:
            copy.update(value)
    return known[id(value)]


def _set_module_state(module: types.ModuleType, state: dict[str, Any]) -> None:
    current = vars(module)
    for name in [name for name in _module_state(module) if name not in state]:
        del current[name]
    current.update(state)


def _module(name: str) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CaseError(f"Expected names of modules that can be imported but got rank_local={name!r}: {error}") from error


class RankState:
    """The rank-local state of a whole world.

    Swapped: c10d's registry of groups, the CPU generators of torch, Python and (if imported) numpy, torch's default dtype,
    the launcher's environment variables of a rank, and the global variables of ``rank_local`` modules and of DTensor's
    random module. torch's generator starts from ``seed`` on every rank, as in processes that nobody seeded; Python's and
    numpy's, which such processes take from the system, start differently on each rank.

    Args:
        world_size: number of ranks.
        seed: of torch's generator.
        rank_local: names of modules whose global variables belong to a rank.

    Raises:
        CaseError: a module cannot be imported.
    """

    def __init__(self, world_size: int, seed: int, rank_local: Sequence[str] = ()) -> None:
        self._modules = list(dict.fromkeys((dtensor_random, *map(_module, rank_local))))
        self._numpy = sys.modules.get("numpy")
        self._outside = self._capture()
        sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world_size))
        self._launcher = {**sizes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        self._states = [self._initial(rank, seed) for rank in range(world_size)]

    def leave(self, rank: int) -> None:
        """Save what the rank has changed."""
        state = self._states[rank]
        state.world = c10d._world
        state.torch_rng = torch.default_generator.get_state()
        state.python_rng = random.getstate()
        state.default_dtype = torch.get_default_dtype()
        for index, module in enumerate(self._modules):
            state.modules[index] = _module_state(module)

    def enter(self, rank: int) -> None:
        """Make the rank's state the process's state."""
        self._restore(self._states[rank])

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """After the block the process's own state is back, all environment variables included."""
        before = os.environ.copy()
        os.environ.update(self._launcher)
        try:
            yield
        finally:
            self._restore(self._outside)
            for name in [name for name in os.environ if name not in before]:
                del os.environ[name]
            os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})

    def _capture(self) -> _State:
        return _State(
            world=c10d._world,
            torch_rng=torch.default_generator.get_state(),
            python_rng=random.getstate(),
            numpy_rng=None if self._numpy is None else self._numpy.random.get_bit_generator(),
            default_dtype=torch.get_default_dtype(),
            launcher={},
            modules=[_module_state(module) for module in self._modules],
        )

    def _initial(self, rank: int, seed: int) -> _State:
        known: dict[int, Any] = {}
        return _State(
            world=RankWorld(),
            torch_rng=torch.Generator().manual_seed(seed).get_state(),
            python_rng=random.Random(f"{seed}/{rank}").getstate(),
            numpy_rng=None if self._numpy is None else self._numpy.random.MT19937((seed, rank)),
            default_dtype=self._outside.default_dtype,
            launcher={"RANK": str(rank), "LOCAL_RANK": str(rank)},
            modules=[_copied(state, known) for state in self._outside.modules],
        )

    def _restore(self, state: _State) -> None:
        c10d._world = state.world
        torch.default_generator.set_state(state.torch_rng)
        random.setstate(state.python_rng)
        if self._numpy is not None:
            self._numpy.random.set_bit_generator(state.numpy_rng)
        if torch.get_default_dtype() != state.default_dtype:
            torch.set_default_dtype(state.default_dtype)
        for name, value in state.launcher.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        for module, values in zip(self._modules, state.modules, strict=True):
            _set_module_state(module, values)
