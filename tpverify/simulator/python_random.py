"""Python's global random generator, of which each rank has its own; its memory is copied where it is known, tuples take long."""

from __future__ import annotations

import ctypes
import random
from typing import Any

_WORDS = 625
"""Of a Mersenne twister's memory: the position in it, and 624 of state."""


class _Generator:
    """A generator whose state can be taken and given back quickly.

    Args:
        generator: lives on.
    """

    def __init__(self, generator: random.Random) -> None:
        self._generator: Any = generator
        self._memory = _memory(generator)

    def state(self) -> Any:
        """What it draws from next."""
        if self._memory is None:
            return self._generator.getstate()
        return bytes(self._memory), self._generator.gauss_next

    def restore(self, state: Any) -> None:
        """Draw from there."""
        if self._memory is None:
            self._generator.setstate(state)
        else:
            words, self._generator.gauss_next = state
            ctypes.memmove(self._memory, words, len(words))

    def seed(self, seed: str) -> None:
        """Start anew."""
        self._generator.seed(seed)


def _memory(generator: random.Random) -> Any:
    """CPython's struct behind a generator; None if this interpreter has another."""
    start = object.__basicsize__
    if type(generator).__basicsize__ < start + 4 * _WORDS:
        return None
    memory = (ctypes.c_uint32 * _WORDS).from_address(id(generator) + start)
    position, *words = memory
    return memory if (*words, position) == generator.getstate()[1] else None


_global = _Generator(random._inst)
_scratch = _Generator(random.Random())


class PythonRandom:
    """The generators of one run's ranks, and the process's own.

    Args:
        world_size: number of ranks.
        seed: with a rank's number it decides what the rank draws.
    """

    def __init__(self, world_size: int, seed: int) -> None:
        self._outside = _global.state()
        self._ranks = [self._initial(f"{seed}/{rank}") for rank in range(world_size)]

    def leave(self, rank: int) -> None:
        """Save what the rank has changed."""
        self._ranks[rank] = _global.state()

    def enter(self, rank: int) -> None:
        """The rank's generator is the process's."""
        _global.restore(self._ranks[rank])

    def restore(self) -> None:
        """The process's own generator is back."""
        _global.restore(self._outside)

    def _initial(self, seed: str) -> Any:
        _scratch.seed(seed)
        return _scratch.state()
