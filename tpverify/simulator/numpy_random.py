"""numpy's global random generator, of which each rank has its own; they are kept from run to run, since making one takes long."""

from __future__ import annotations

import ctypes
import sys
import zlib
from typing import Any, NamedTuple

_WORDS = 625
"""Of a Mersenne twister's memory: 624 of state, and the position in it."""


class _Twister:
    """A Mersenne twister that tells whether anybody has drawn from it."""

    def __init__(self) -> None:
        import numpy

        self.bits = numpy.random.MT19937()
        self._legacy = numpy.random.RandomState(self.bits)
        self._memory = (ctypes.c_uint32 * _WORDS).from_address(self.bits.ctypes.state_address)
        self._start = b""

    def seed(self, seed: int) -> None:
        """Start anew."""
        self._legacy.seed(seed)
        self._start = bytes(self._memory)

    @property
    def held(self) -> bool:
        """Whether somebody else has it by now: a program may have returned it."""
        return sys.getrefcount(self.bits) > _OWN_REFERENCES

    @property
    def untouched(self) -> bool:
        """Whether it is as it was seeded."""
        return bytes(self._memory) == self._start


_kept: list[_Twister] = []
_OWN_REFERENCES = 3
"""To a twister's bits: its attribute, the legacy generator's, and the one that counts."""


class _State(NamedTuple):
    """A bit generator; and what numpy has left over, which makes Gaussians in pairs and keeps the second outside of it."""

    bits: Any
    gauss: dict[str, Any]


class NumpyRandom:
    """The generators of one run's ranks, and the process's own; nothing as long as nobody has imported numpy.

    Args:
        world_size: number of ranks.
        seed: with a rank's number it decides what the rank draws.
    """

    def __init__(self, world_size: int, seed: int) -> None:
        self._numpy = sys.modules.get("numpy")
        if self._numpy is None:
            return
        self._outside = self._present()
        _kept[:] = [_Twister() if twister.held else twister for twister in _kept]
        _kept.extend(_Twister() for _ in range(world_size - len(_kept)))
        self._twisters = _kept[:world_size]
        for rank, twister in enumerate(self._twisters):
            twister.seed(zlib.crc32(f"{seed}/{rank}".encode()))
        self._ranks = [_State(twister.bits, {}) for twister in self._twisters]

    def leave(self, rank: int) -> None:
        """Save what the rank has changed."""
        if self._numpy is None:
            return
        state, twister = self._ranks[rank], self._twisters[rank]
        if state.bits is not twister.bits or not twister.untouched or self._numpy.random.get_bit_generator() is not state.bits:
            self._ranks[rank] = self._present()

    def enter(self, rank: int) -> None:
        """The rank's generator is the process's."""
        if self._numpy is not None:
            self._restore(self._ranks[rank])

    def restore(self) -> None:
        """The process's own generator is back, and the run is over."""
        if self._numpy is not None:
            self._restore(self._outside)
            self._ranks.clear()  # not to hold them until garbage is collected

    def _present(self) -> _State:
        random = self._numpy.random  # type: ignore[union-attr]
        bits = random.get_bit_generator()
        if not isinstance(bits, random.MT19937):
            return _State(bits, {})
        state = random.get_state(legacy=False)
        return _State(bits, {name: state[name] for name in ("has_gauss", "gauss")} if state["has_gauss"] else {})

    def _restore(self, state: _State) -> None:
        random = self._numpy.random  # type: ignore[union-attr]
        random.set_bit_generator(state.bits)
        if state.gauss:
            random.set_state(random.get_state(legacy=False) | state.gauss)
