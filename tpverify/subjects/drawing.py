"""How sizes of the built-in subjects are drawn: per rank and multiplied, small, rarely one that must be refused."""

from __future__ import annotations

from hypothesis import strategies as st


@st.composite
def activations(draw: st.DrawFn, world_size: int, sequence_parallel: bool, flaws: tuple[str, ...]) -> tuple[int, int, str]:
    """(seq, batch, flaw): the activation's first two sizes, and which of ``flaws`` to draw so that it must be refused.

    A flaw comes in one of 10 or 19 draws and is "" otherwise. It shares one choice with the sizes, since a choice of its own that
    mostly changes nothing would make Hypothesis draw most cases twice.

    Args:
        sequence_parallel: make ``seq`` a multiple of ``world_size``.
        flaws: names of sizes; one rank has none.
    """
    lengths = [tokens * world_size for tokens in (1, 2, 3)] if sequence_parallel else [1, 2, 3, 4, 5, 6]
    sizes = [(seq, batch) for batch in (1, 2, 3) for seq in lengths]
    index = draw(st.integers(0, len(sizes) if world_size > 1 and flaws else len(sizes) - 1))
    if index < len(sizes):
        return (*sizes[index], "")
    return lengths[0], 1, draw(st.sampled_from(flaws))


@st.composite
def divisible(draw: st.DrawFn, world_size: int, flawed: bool = False, largest: int = 3) -> int:
    """A multiple of ``world_size``, or if ``flawed`` some other positive number.

    Args:
        largest: largest size per rank.
    """
    size = draw(st.integers(1, largest)) * world_size
    return size - draw(st.integers(1, world_size - 1)) if flawed else size


def uneven_sizes(world_size: int, largest: int = 3) -> st.SearchStrategy[int]:
    """Any size up to ``largest`` per rank: uneven shards, and empty ones where it is less than ``world_size``."""
    return st.integers(1, largest * world_size)


def loss_vocabularies(world_size: int) -> st.SearchStrategy[int]:
    """Any number of ids from 2: with a single one the loss is constant and its gradient rounding noise."""
    return st.integers(2, 4 * world_size)
