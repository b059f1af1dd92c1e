"""Sums of bf16 made in float32: the bits of float64's, whichever way that was shown."""

import itertools

import numpy as np
import pytest

from unit.combining_samples import BF16
from unit.test_combining_sums import CASES, reference, shares
from weighlock import DType
from weighlock.combining.bf16 import add_one_by_one, add_rows, sum_bf16
from weighlock.combining.desk import Desk
from weighlock.combining.rounding import narrow


def summed(rows, weights, desk=None):
    """The bits, or None where float32 was not good for it."""
    bits = np.stack([row.view(np.uint16) for row in rows])
    result = np.full(bits.shape[1], 0xEEEE, np.uint16)
    return result if sum_bf16(tuple(weights), bits, result, desk or Desk()) else None


def rounded(rows, weights):
    out = np.empty(rows[0].nbytes, np.uint8)
    narrow(reference(rows, weights), DType.BF16, out)
    return out.view(np.uint16)


def halves(count):
    """Weights that are multiples of 1/128, all different where there are few."""
    numbers = np.arange(1, count + 1) if count < 12 else np.ones(count)
    return tuple((numbers / 128).tolist())


WEIGHTS = {
    "any": shares,
    "equal": lambda count: (1 / count,) * count,
    "multiples of 1/128": halves,
    "some zero": lambda count: (0.0, *(0.25,) * (count - 1)),
    "opposite": lambda count: tuple((-0.5) ** (n % 3) for n in range(count)),
}


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [1, 777, 2 * 8192 + 1])
def test_where_float32_is_good_for_it_bits_are_those_of_float64(case, size, weights):
    rows = CASES[case](np.random.default_rng(4), size)
    chosen = WEIGHTS[weights](len(rows))
    found = summed(rows, chosen)
    assert found is None or (found == rounded(rows, chosen)).all()


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("case", ["like each other", "independent", "mostly zero"])
def test_means_of_two_four_or_eight_models_are_made_in_float32(case, count):
    """Of models that are like each other, most of them lie half-way between two numbers."""
    rows = (CASES[case](np.random.default_rng(6), 50_000) * 2)[:count]
    weights = (1 / count,) * count
    assert (summed(rows, weights) == rounded(rows, weights)).all()


def test_small_numbers_beside_large_ones_are_not_taken_for_exact():
    """In float32 they vanish; beside a tie they say which way it goes."""
    rows = [np.full(6, 1.0, BF16), np.full(6, 1.0078125, BF16)]  # two neighbours
    hair = np.array([0.0, 2.0**-40, -(2.0**-40), 2.0**-130, -(2.0**-130), 0.0], np.float64)
    rows.append(hair.astype(BF16))
    weights = (0.5, 0.5, 0.5)
    assert (summed(rows, weights) == rounded(rows, weights)).all()
    assert len(set(rounded(rows, weights).tolist())) == 2


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_the_edge_of_what_is_exact(order):
    """What is left of two small numbers decides a tie; float32 loses it from some size on."""
    ways = set()
    for exponent in range(1, 40):
        small = 2.0**-exponent
        numbers = 1.0, 2.0**-8, small * (1 + 2.0**-7), -small
        rows = [np.array([numbers[n]], BF16) for n in order]
        found = summed(rows, (1.0,) * 4)
        assert (found == rounded(rows, (1.0,) * 4)).all(), exponent
        ways.add(found[0])
    assert ways >= {0x3F81}


def test_products_below_what_float32_has_are_not_exact():
    small = 2.0**-20
    rows = [np.array([n], BF16) for n in (2.0**-8, small * (1 + 2.0**-7), -small)]
    weights = (2.0**-126,) * 3  # half of the least number of bf16, and a hair more
    assert summed(rows, weights) == rounded(rows, weights) == 1


def test_ties_that_float32_cannot_tell_are_left_to_float64_for_a_while():
    rng = np.random.default_rng(3)
    rows = [rng.integers(128, 256, 20_000).astype(BF16) for _ in range(3)]
    weights = (1 / 6, 2 / 6, 3 / 6)
    desk = Desk()
    assert summed(rows, weights, desk) is None
    plain = [np.ones(100, BF16)] * 3
    assert summed(plain, weights) is not None
    assert summed(plain, (0.2, 0.3, 0.5), desk) is not None
    tries = [summed(plain, weights, desk) is not None for _ in range(40)]
    assert not any(tries[:16])
    assert all(tries[16:])


def test_more_are_summed_again_than_at_once():
    """Beside a tie by less than float32 tells, one in 34."""
    rows = [np.ones(1_200_000, BF16), np.ones(1_200_000, BF16)]
    rows[1][::34] = 1.0078125  # its neighbour
    for hair in (1e-12, -1e-12):
        weights = (0.5 + hair, 0.5 - hair)
        found = summed(rows, weights)
        assert (found == rounded(rows, weights)).all()
        assert (found[::34] == (0x3F80 if hair > 0 else 0x3F81)).all()


def test_weights_of_a_fine_grain_are_shown_by_a_margin():
    rng = np.random.default_rng(8)
    rows = [rng.standard_normal(100_000).astype(BF16) for _ in range(2)]
    weights = 1001 / 1024, 23 / 1024
    assert (summed(rows, weights) == rounded(rows, weights)).all()


def test_where_hardly_a_sum_is_exact_there_is_still_the_margin():
    """Small numbers beside large ones in half of the columns; in the others, ties."""
    rng = np.random.default_rng(9)
    rows = [rng.standard_normal(50_000).astype(BF16) for _ in range(2)]
    rows[1][::2] *= BF16(2.0**-30)
    assert (summed(rows, (0.5, 0.5)) == rounded(rows, (0.5, 0.5))).all()


def test_zeros_are_decided():
    desk = Desk()
    for weights in ((0.2, 0.3, 0.5), (0.25, 0.25, 0.5)):
        found = summed([np.zeros(20_000, BF16)] * 3, weights, desk)
        assert not found.any()
    assert not desk.hints


@pytest.mark.parametrize("kind", [BF16, np.float16, np.float32, np.float64])
@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_float64_sums_have_the_same_bits_where_numpy_multiplies_and_adds_in_one_step(kind, size):
    rows = np.random.default_rng(size).standard_normal((9, size)).astype(kind)
    weights = np.array(shares(9))
    together, one_by_one = np.empty(size), np.empty(size)
    add_rows(weights, rows, together)
    add_one_by_one(weights, rows, one_by_one)
    assert together.tobytes() == one_by_one.tobytes()
