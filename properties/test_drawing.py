"""Sizes that built-in subjects draw: what divides, and what must be refused."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import Phase, given, settings

from tpverify.subjects.drawing import divisible


def drawn(world_size: int, flawed: bool) -> Counter[int]:
    """How often which remainder of the world size comes."""
    found: Counter[int] = Counter()

    @settings(max_examples=300, database=None, derandomize=True, deadline=None, phases=(Phase.generate,))
    @given(divisible(world_size, flawed))
    def collect(size: int) -> None:
        assert size > 0
        found[size % world_size] += 1

    collect()
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6])
def test_a_size_divides(world_size: int) -> None:
    assert set(drawn(world_size, flawed=False)) == {0}


@pytest.mark.parametrize("world_size", [2, 3, 4, 6, 8])
def test_a_flawed_size_does_not_and_its_double_often_does(world_size: int) -> None:
    remainders = drawn(world_size, flawed=True)
    assert set(remainders) == set(range(1, world_size))
    if world_size % 2 == 0:
        assert remainders[world_size // 2] >= remainders.total() / 2
