"""How sizes of the built-in subjects are drawn: per rank and multiplied, small, rarely one that must be refused."""

from __future__ import annotations

from hypothesis import strategies as st

LONG = 2048
"""Tokens of a long sequence: its activations are beyond the sizes up to which programs treat small messages in another way."""


@st.composite
def activations(
    draw: st.DrawFn, world_size: int, sequence_parallel: bool, flaws: tuple[str, ...], long: bool = False
) -> tuple[int, int, str]:
    """(seq, batch, flaw): the activation's first two sizes, and which of ``flaws`` to draw so that it must be refused.

    A flaw comes in one of 10 or 19 draws and is "" otherwise. It shares one choice with the sizes, since a choice of its own that
    mostly changes nothing would make Hypothesis draw most cases twice.

    Args:
        sequence_parallel: make ``seq`` a multiple of ``world_size``.
        flaws: names of sizes; one rank has none.
        long: draw a long sequence now and then.
    """
    lengths = [tokens * world_size for tokens in (1, 2, 3)] if sequence_parallel else [1, 2, 3, 4, 5, 6]
    sizes = [(seq, batch) for batch in (1, 2, 3) for seq in lengths]
    sizes += [(-(-LONG // world_size) * world_size, 1)] if long else []
    index = draw(st.integers(0, len(sizes) if world_size > 1 and flaws else len(sizes) - 1))
    if index < len(sizes):
        return (*sizes[index], "")
    return lengths[0], 1, draw(st.sampled_from(flaws))


@st.composite
def divisible(draw: st.DrawFn, world_size: int, flawed: bool = False, largest: int = 3) -> int:
    """A multiple of ``world_size``, or if ``flawed`` some other positive number: every other time one whose double is a multiple.

    Such a size passes where two blocks are asked for at once, a fused gate and up, say.

    Args:
        largest: largest size per rank.
    """
    size: int = draw(st.integers(1, largest)) * world_size
    if not flawed:
        return size
    any_number = [*range(1, world_size)]
    halves = [] if world_size % 2 else [world_size // 2] * (world_size - 2)
    missing: int = draw(st.sampled_from(any_number + halves))
    return size - missing


def uneven_sizes(world_size: int, largest: int = 3) -> st.SearchStrategy[int]:
    """Any size up to ``largest`` per rank: uneven shards, and empty ones where it is less than ``world_size``."""
    return st.integers(1, largest * world_size)


LARGE_VOCABULARY = 300
"""More ids than bfloat16 has integers."""


def vocabularies(world_size: int) -> st.SearchStrategy[int]:
    """Any number of ids up to 4 per rank, also fewer than ranks, and now and then a large one."""
    return _some_large(1, 4 * world_size)


def loss_vocabularies(world_size: int) -> st.SearchStrategy[int]:
    """The same from 2: with a single id the loss is constant and its gradient rounding noise."""
    return _some_large(2, 4 * world_size)


def _some_large(smallest: int, largest: int) -> st.SearchStrategy[int]:
    return st.integers(smallest, largest + 1).map(lambda size: size if size <= largest else LARGE_VOCABULARY)
