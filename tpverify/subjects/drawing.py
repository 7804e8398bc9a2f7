"""How sizes of the built-in subjects are drawn: per rank and multiplied, small, rarely not divisible."""

from __future__ import annotations

from hypothesis import strategies as st

# Not an end of the range: Hypothesis likes ends.
rarely: st.SearchStrategy[bool] = st.integers(0, 19).map(lambda number: number == 13)


@st.composite
def divisible(draw: st.DrawFn, world_size: int, largest: int = 3) -> int:
    """A multiple of ``world_size``; once in about 20 draws one that is not, to be refused by the layer.

    Args:
        largest: largest size per rank.
    """
    size = draw(st.integers(1, largest)) * world_size
    if world_size > 1 and draw(rarely):
        size -= draw(st.integers(1, world_size - 1))
    return size


def sequence_lengths(world_size: int, sequence_parallel: bool) -> st.SearchStrategy[int]:
    """A sequence length, tokens: a multiple of ``world_size`` where the sequence is cut."""
    if sequence_parallel:
        return st.integers(1, 3).map(lambda tokens: tokens * world_size)
    return st.integers(1, 6)


def uneven_sizes(world_size: int, largest: int = 3) -> st.SearchStrategy[int]:
    """Any size up to ``largest`` per rank: uneven shards, and empty ones where it is less than ``world_size``."""
    return st.integers(1, largest * world_size)


def loss_vocabularies(world_size: int) -> st.SearchStrategy[int]:
    """Any number of ids from 2: with a single one the loss is constant and its gradient rounding noise."""
    return st.integers(2, 4 * world_size)


batch_sizes: st.SearchStrategy[int] = st.integers(1, 3)
