"""numpy's global random generator, of which each rank has its own; they are kept from run to run, since making one takes long."""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
import zlib
from typing import Any, NamedTuple

_WORDS = 625
"""Of a Mersenne twister's memory: 624 of state, and the position in it."""
_OWN_REFERENCES = 2
"""To a twister's bits: its attribute, and the one that counts."""


class _Twister:
    """A Mersenne twister that can be seeded quickly.

    Args:
        number: tells the sequences of bits that it spawns from those of others.
    """

    def __init__(self, number: int) -> None:
        import numpy

        self.bits: Any = numpy.random.MT19937(number)
        self._sequence = self.bits.seed_seq
        self._memory = _memory(self.bits)

    def seed(self, seed: int) -> None:
        """Start anew, without forgetting where new sequences come from."""
        scratch, memory = _scratch()
        scratch.seed(seed)
        ctypes.memmove(self._memory, memory, 4 * _WORDS)

    @property
    def held(self) -> bool:
        """Whether it is not as a new one is, or somebody else has it by now: a program may have returned it, or be stuck in it."""
        used = self.bits.seed_seq is not self._sequence or self._sequence.n_children_spawned > 0
        if used or sys.getrefcount(self.bits) > _OWN_REFERENCES or not self.bits.lock.acquire(blocking=False):
            return True
        self.bits.lock.release()
        return False


_kept: list[_Twister] = []


def _memory(bits: Any) -> Any:
    return (ctypes.c_uint32 * _WORDS).from_address(bits.ctypes.state_address)


@functools.cache
def _scratch() -> tuple[Any, Any]:
    import numpy

    generator = numpy.random.RandomState(numpy.random.MT19937(0))
    return generator, _memory(generator._bit_generator)


class _Gauss(ctypes.Structure):
    """How a legacy generator keeps what is left over: a flag and a number."""

    _fields_ = (("present", ctypes.c_int), ("value", ctypes.c_double))


@functools.cache
def _left_over() -> _Gauss | None:
    """Where the process's legacy generator keeps it; None if it cannot be found, since numpy lays it out otherwise."""
    import numpy

    generator, number = numpy.random.RandomState(0), 7.0625e-37
    memory = (ctypes.c_char * type(generator).__basicsize__).from_address(id(generator))
    state = generator.get_state(legacy=False)
    generator.set_state(state | {"has_gauss": 1, "gauss": number})
    start = bytes(memory).find(struct.pack("d", number)) - _Gauss.value.offset
    if start < 0 or not _Gauss.from_buffer_copy(memory, start).present:
        return None
    generator.set_state(state | {"has_gauss": 0, "gauss": number})
    if _Gauss.from_buffer_copy(memory, start).present:
        return None
    return _Gauss.from_address(id(numpy.random.mtrand._rand) + start)


class _State(NamedTuple):
    """A bit generator; and what numpy has left over, which makes Gaussians in pairs and keeps the second outside of it."""

    bits: Any
    gauss: tuple[int, float]


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
        _kept[:] = [_Twister(rank) if twister.held else twister for rank, twister in enumerate(_kept)]
        _kept.extend(_Twister(rank) for rank in range(len(_kept), world_size))
        for rank, twister in enumerate(_kept[:world_size]):
            twister.seed(zlib.crc32(f"{seed}/{rank}".encode()))
        self._ranks = [_State(twister.bits, (0, 0.0)) for twister in _kept[:world_size]]

    def leave(self, rank: int) -> None:
        """Save what the rank has changed."""
        if self._numpy is not None:
            self._ranks[rank] = self._present()

    def enter(self, rank: int) -> None:
        """The rank's generator is the process's."""
        if self._numpy is not None:
            self._restore(self._ranks[rank])

    def restore(self) -> None:
        """The process's own generator is back."""
        if self._numpy is not None:
            self._restore(self._outside)

    def _present(self) -> _State:
        random = self._numpy.random  # type: ignore[union-attr]
        bits, kept = random.get_bit_generator(), _left_over()
        if kept is not None:
            return _State(bits, (kept.present, kept.value))
        if not isinstance(bits, random.MT19937):
            return _State(bits, (0, 0.0))
        state = random.get_state(legacy=False)
        return _State(bits, (state["has_gauss"], state["gauss"]))

    def _restore(self, state: _State) -> None:
        random = self._numpy.random  # type: ignore[union-attr]
        random.set_bit_generator(state.bits)  # which forgets what is left over
        if not state.gauss[0]:
            return
        kept = _left_over()
        if kept is not None:
            kept.present, kept.value = state.gauss
        else:
            random.set_state(random.get_state(legacy=False) | dict(zip(("has_gauss", "gauss"), state.gauss, strict=True)))
