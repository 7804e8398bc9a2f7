"""Sizes that built-in subjects draw: what divides, and what must be refused."""

from __future__ import annotations

import warnings
from collections import Counter

import pytest
from hypothesis.errors import NonInteractiveExampleWarning

from tpverify.subjects.drawing import divisible

DRAWS = 300


def drawn(world_size: int, flawed: bool) -> Counter[int]:
    """How often which remainder of the world size comes."""
    strategy = divisible(world_size, flawed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NonInteractiveExampleWarning)
        return Counter(strategy.example() % world_size for _ in range(DRAWS))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6])
def test_a_size_divides(world_size: int) -> None:
    assert set(drawn(world_size, flawed=False)) == {0}


@pytest.mark.parametrize("world_size", [2, 3, 4, 6])
def test_a_flawed_size_does_not_and_its_double_often_does(world_size: int) -> None:
    remainders = drawn(world_size, flawed=True)
    assert set(remainders) == set(range(1, world_size))
    if world_size % 2 == 0:
        assert remainders[world_size // 2] > DRAWS / 4
