"""Tolerances: correct code in another order of summation passes with room, and small planted errors do not."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tpverify.tolerance import (
    bitwise_equal,
    compare,
    exact_limit,
    exact_magnitude,
    relative_error,
    row_errors,
    tolerance,
    unit_roundoff,
)

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
NAN, INF = math.nan, math.inf


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def row_parallel(x: torch.Tensor, w: torch.Tensor, order: list[int]) -> list[torch.Tensor]:
    """Partial products of a product cut along its inner dimension, over ``len(order)`` ranks, in that order."""
    cuts = list(zip(x.tensor_split(len(order), 1), w.tensor_split(len(order), 1), strict=True))
    return [cuts[rank][0] @ cuts[rank][1].T for rank in order]


def total(parts: list[torch.Tensor]) -> torch.Tensor:
    result = torch.zeros_like(parts[0])
    for part in parts:
        result = result + part
    return result


@pytest.mark.parametrize(("dtype", "limit"), [*zip(FLOATS, (2**53, 2**24, 2**11, 2**8), strict=True)])
def test_exact_limit_is_the_last_of_the_consecutive_integers(dtype: torch.dtype, limit: int) -> None:
    assert exact_limit(dtype) == limit
    assert torch.tensor(limit - 1, dtype=torch.int64).to(dtype).to(torch.int64).item() == limit - 1
    assert torch.tensor(limit + 1, dtype=torch.int64).to(dtype).to(torch.int64).item() != limit + 1
    one = torch.ones((), dtype=dtype)
    u = unit_roundoff(dtype)
    assert one + u == one
    assert one + 2 * u > one
    assert u == 1 / limit


@settings(deadline=None)
@given(st.integers(1, 2**20), st.sampled_from(FLOATS))
def test_exact_magnitude_is_the_largest_that_fits(terms: int, dtype: torch.dtype) -> None:
    m = exact_magnitude(terms, dtype)
    assert terms * m * m < exact_limit(dtype) <= terms * (m + 1) ** 2


@settings(deadline=None, max_examples=40)
@given(st.data(), st.sampled_from((torch.float64, torch.float32)), st.integers(1, 300), st.integers(0, 2**32))
def test_integers_in_the_exact_range_agree_bitwise_in_any_order(data: st.DataObject, dtype: torch.dtype, terms: int, seed: int) -> None:
    m = min(exact_magnitude(terms, dtype), 2**20)
    x, w = (torch.randint(-m, m + 1, (3, terms), generator=torch.Generator().manual_seed(seed + i)).to(dtype) for i in range(2))
    x[0], w[0] = m, m  # the largest sum there is
    order = data.draw(st.permutations(range(data.draw(st.integers(1, 8)))))
    assert torch.equal(total(row_parallel(x, w, order)), x @ w.T)


def test_integers_beyond_the_exact_range_do_not() -> None:
    m = 4 * exact_magnitude(64, torch.float32)
    x, w = (torch.randint(m // 2, m, (8, 64), generator=torch.Generator().manual_seed(i)).float() for i in range(2))
    assert any(not torch.equal(total(row_parallel(x, w, list(range(size)))), x @ w.T) for size in (2, 3, 5))


def reorder_error(dtype: torch.dtype, terms: int, world_size: int, positive: bool, order: list[int], seed: int) -> tuple[float, float]:
    """Largest error of a correct row-parallel product, over its bound: (as a whole, per row)."""
    x, w = normal(8, terms, seed=seed, dtype=dtype), normal(8, terms, seed=seed + 1, dtype=dtype)
    if positive:
        x, w = x.abs(), w.abs()
    actual, expected = total(row_parallel(x, w, order)), x @ w.T
    bound = tolerance(dtype, 1, terms)
    assert compare(actual, expected, bound=bound) is None
    return relative_error(actual, expected) / bound, float(row_errors(actual, expected).max()) / bound


@settings(deadline=None, max_examples=60)
@given(st.data(), st.sampled_from((torch.float64, torch.float32)), st.booleans(), st.integers(0, 2**32))
def test_another_order_of_summation_lies_well_under_the_bound(data: st.DataObject, dtype: torch.dtype, positive: bool, seed: int) -> None:
    terms = data.draw(st.sampled_from((1, 2, 7, 64, 500, 4096)))
    world_size = data.draw(st.integers(1, 8))
    order = data.draw(st.permutations(range(world_size)))
    whole, row = reorder_error(dtype, terms, world_size, positive, order, seed)
    assert whole < 0.1
    assert row < 0.1


@pytest.mark.parametrize("terms", [16, 256, 4096])
def test_one_term_after_the_other_lies_under_the_bound(terms: int) -> None:
    # The plainest order there is, and the least accurate one.
    x, w = normal(8, terms, seed=1), normal(8, terms, seed=2)
    parts = [x[:, k : k + 1] * w[:, k] for k in range(terms)]
    error = row_errors(total(parts), x @ w.T).max()
    assert 0 < error < 0.1 * tolerance(torch.float64, 1, terms)


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 8), st.sampled_from((8, 64, 1024)), st.integers(0, 2**32), st.data())
def test_planted_errors_lie_above_the_bound(world_size: int, terms: int, seed: int, data: st.DataObject) -> None:
    x, w, bias = normal(6, terms, seed=seed), normal(5, terms, seed=seed + 1), normal(5, seed=seed + 2)
    parts = row_parallel(x, w, list(range(world_size)))
    expected = x @ w.T + bias
    bound = tolerance(torch.float64, 1, terms)
    rank = data.draw(st.integers(0, world_size - 1))
    row, column = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 4))
    one_element = expected.clone()
    one_element[row, column] += 1e-10 * expected.norm()
    wrong = {
        "bias counted twice": total(parts) + 2 * bias,
        "bias on every rank": total(parts) + world_size * bias,
        "no bias": total(parts),
        "a rank's partial is missing": total(parts) - parts[rank] + bias,
        "a rank's partial is counted twice": total(parts) + parts[rank] + bias,
        "scaled by 1e-10": expected * (1 + 1e-10),
        "one element off by 1e-10": one_element,
    }
    assert compare(total(parts) + bias, expected, bound=bound) is None
    for name, actual in wrong.items():
        mismatch = compare(actual, expected, bound=bound)
        assert mismatch is not None, name
        assert max(mismatch.relative, mismatch.row_relative) > 5 * bound, name


def test_the_tolerance_grows_as_stated() -> None:
    assert tolerance(torch.float64, 1, 1) == 64 * 2**-53
    assert tolerance(torch.float64, 6, 100) == pytest.approx(64 * 2**-53 * 6 * 10)
    assert tolerance(torch.float32, 1, 1) / tolerance(torch.float64, 1, 1) == 2**29


@settings(deadline=None)
@given(st.floats(1e-150, 1e150), st.integers(0, 2**32), st.floats(1e-12, 1.0))
def test_errors_are_relative(factor: float, seed: int, size: float) -> None:
    expected = normal(4, 3, seed=seed)
    actual = expected + size * normal(4, 3, seed=seed + 1)
    assert relative_error(actual * factor, expected * factor) == pytest.approx(relative_error(actual, expected))
    assert torch.allclose(row_errors(actual * factor, expected * factor), row_errors(actual, expected))
    # Squares of these values leave the range of float64 at either end.
    assert relative_error(expected * 1e-200, expected * 2e-200) == pytest.approx(0.5)
    assert relative_error(expected * 1e200, expected * 2e200) == pytest.approx(0.5)


def test_row_errors_by_hand() -> None:
    expected = torch.tensor([[3.0, 4.0], [0.0, 0.0], [5.0, 0.0], [0.0, 7.0]])  # norms 5, 0, 5, 7; typical sqrt(99/4)
    actual = expected + torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0], [0.0, 7.0]])
    typical = math.sqrt(99 / 4)
    assert row_errors(actual, expected).tolist() == pytest.approx([1 / 5, 1 / typical, 0.0, 1.0])
    assert relative_error(actual, expected) == pytest.approx(math.sqrt(51 / 99))
    for shape in ((), (3,)):
        assert row_errors(torch.full(shape, 1.5), torch.ones(shape)).shape == ()
        assert row_errors(torch.full(shape, 1.5), torch.ones(shape)).item() == pytest.approx(0.5)
    assert row_errors(normal(2, 3, 4, seed=0), normal(2, 3, 4, seed=0)).tolist() == [[0.0] * 3] * 2


def test_one_wrong_row_among_many_weighs_as_if_alone() -> None:
    expected = normal(1000, 4, seed=0)
    actual = expected.clone()
    actual[567] *= 1 + 2e-13
    bound = 1e-13
    assert relative_error(actual, expected) < bound
    mismatch = compare(actual, expected, bound=bound)
    assert mismatch is not None
    assert mismatch.worst_index[0] == 567


@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        ([NAN, 1.0], [NAN, 1.0], 0.0),
        ([INF, -INF, 1.0], [INF, -INF, 1.0], 0.0),
        ([NAN, 2.0], [NAN, 1.0], 1.0),
        ([NAN, 1.0], [1.0, 1.0], INF),
        ([1.0, 1.0], [NAN, 1.0], INF),
        ([INF, 1.0], [-INF, 1.0], INF),
        ([INF, 1.0], [1e308, 1.0], INF),
        ([INF, 1.0], [NAN, 1.0], INF),
        ([1e308, 1e308], [-1e308, 1e308], INF),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.0, 1e-300], [0.0, 0.0], INF),
        ([0.0, 0.0], [0.0, 1e-300], 1.0),
        ([], [], 0.0),
    ],
)
def test_nan_infinity_zero_and_empty(actual: list[float], expected: list[float], error: float) -> None:
    a, e = torch.tensor(actual, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64)
    assert relative_error(a, e) == pytest.approx(error)
    assert row_errors(a, e).item() == pytest.approx(error)
    assert (compare(a, e, bound=1e-3) is None) == (error == 0.0)


def test_a_norm_that_overflows_hides_nothing() -> None:
    actual, expected = (torch.full((4,), value, dtype=torch.float64) for value in (1.4e308, 1.7e308))
    assert relative_error(actual, expected) > 0.1
    assert row_errors(actual, expected).item() > 0.1


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 3)])
def test_empty_tensors_agree(shape: tuple[int, ...]) -> None:
    empty = torch.empty(shape)
    assert compare(empty, empty, bound=0.0) is None
    assert relative_error(empty, empty) == 0.0
    assert row_errors(empty, empty).shape == shape[:-1]


@settings(deadline=None)
@given(st.floats(1e-100, 1e100), st.integers(0, 2**32))
def test_scale_excuses_noise_and_nothing_else(factor: float, seed: int) -> None:
    # The sum over a row of softmax's gradient is zero; what is left of it is rounding of the terms.
    terms = normal(6, 50, seed=seed) * factor
    terms = terms - terms.mean(1, keepdim=True)
    bound = tolerance(torch.float64, 1, 50)
    scale = float(terms.norm())
    noise, other_noise = terms.sum(1), terms.flip(1).cumsum(1)[:, -1]
    assert compare(noise, other_noise, bound=bound, scale=scale) is None
    assert compare(noise + 1e-10 * scale, other_noise, bound=bound, scale=scale) is not None
    assert compare(torch.zeros(3), torch.zeros(3), bound=bound) is None
    assert compare(torch.full((3,), 1e-20 * factor, dtype=torch.float64), torch.zeros(3), bound=bound) is not None


def test_scale_does_not_loosen_a_tensor_larger_than_it() -> None:
    expected = normal(4, 4, seed=3)
    actual = expected * (1 + 1e-3)
    for scale in (None, 0.0, 0.1):
        assert relative_error(actual, expected, scale=scale) == pytest.approx(1e-3)
    # A scale over four rows is worth half of it in each.
    assert row_errors(actual, expected, scale=1e6).max() == pytest.approx(1e-3 * float(expected.norm(dim=1).max()) / 5e5)


def test_mismatch_names_the_worst_element() -> None:
    expected = torch.ones(2, 3, 4, dtype=torch.float64)
    actual = expected.clone()
    actual[1, 2, 0] = 1.5
    actual[0, 1, 3] = 1.25
    mismatch = compare(actual, expected, bound=1e-3)
    assert mismatch is not None
    assert mismatch.worst_index == (1, 2, 0)
    assert (mismatch.actual_value, mismatch.expected_value) == (1.5, 1.0)
    assert (mismatch.mismatched, mismatch.total) == (2, 24)
    assert mismatch.row_relative == pytest.approx(0.25)
    assert mismatch.bound == 1e-3
    assert mismatch.relative == pytest.approx(math.hypot(0.5, 0.25) / math.sqrt(24))


def test_mismatch_of_a_scalar_of_integers_and_of_complex_numbers() -> None:
    scalar = compare(torch.tensor(2.0), torch.tensor(1.0), bound=1e-3)
    assert scalar is not None
    assert scalar.worst_index == ()
    assert scalar.relative == 1.0
    integers = compare(torch.tensor([5, 7]), torch.tensor([5, 8]), bound=1e-3)
    assert integers is not None
    assert integers.worst_index == (1,)
    assert integers.actual_value == 7
    turned = compare(torch.tensor([1j]), torch.tensor([1.0 + 0j]), bound=1e-3)
    assert turned is not None
    assert turned.relative == pytest.approx(math.sqrt(2))


def test_tensors_of_other_shapes_are_refused() -> None:
    # Broadcasting would find them equal.
    for function in (relative_error, row_errors):
        with pytest.raises(ValueError, match=r"actual=\(3,\), expected=\(1, 3\)"):
            function(torch.ones(3), torch.ones(1, 3))
    with pytest.raises(ValueError, match="one shape"):
        compare(torch.ones(()), torch.ones(2), bound=1.0)


def test_arguments_out_of_range_are_refused() -> None:
    with pytest.raises(TypeError, match=r"dtype=torch\.int64"):
        unit_roundoff(torch.int64)
    with pytest.raises(ValueError, match="terms=0"):
        tolerance(torch.float64, 1, 0)
    with pytest.raises(ValueError, match="depth=0"):
        tolerance(torch.float64, 0, 1)
    with pytest.raises(ValueError, match="terms=0"):
        exact_magnitude(0, torch.float64)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64, torch.float8_e4m3fn])
def test_bitwise_equality(dtype: torch.dtype) -> None:
    a = torch.tensor([[1.0, -2.0, NAN], [0.0, 4.0, 0.5]]).to(dtype)
    assert bitwise_equal(a, a.clone())
    assert bitwise_equal(a.T, a.T.clone(memory_format=torch.contiguous_format))
    for changed in (1.125, NAN, -0.0):
        b = a.clone()
        b[1, 0] = changed
        assert not bitwise_equal(a, b)
        assert not bitwise_equal(b, a)
    assert not bitwise_equal(a, a[:1])
    assert not bitwise_equal(a, a.to(torch.complex128))


def test_bitwise_equality_takes_any_nan_for_another() -> None:
    a, b = (torch.tensor([bits, 0x3F800000], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert a.isnan().tolist() == b.isnan().tolist() == [True, False]
    assert bitwise_equal(a, b)


def test_bitwise_equality_sees_the_last_bit() -> None:
    a = normal(5, seed=0)
    b = a.clone()
    b[3] = torch.nextafter(a[3], torch.tensor(INF, dtype=torch.float64))
    assert not bitwise_equal(a, b)
    assert bitwise_equal(torch.tensor([1, 2]), torch.tensor([1, 2]))
    assert not bitwise_equal(torch.tensor([1, 2]), torch.tensor([1, 3]))
