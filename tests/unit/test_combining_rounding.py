"""Floats to the bytes of a file: rounded to nearest, once."""

from fractions import Fraction

import numpy as np
import pytest

from weighlock import DType
from weighlock.combining.rounding import narrow, units_of, widen
from weighlock.tensors.spec import TensorSpec


def bf16_bits(values):
    values = np.array(values, np.float64)
    out = np.empty(2 * values.size, np.uint8)
    narrow(values, DType.BF16, out)
    return out.view(np.uint16)


def bf16_values(bits):
    values = np.empty(len(bits))
    widen(np.array(bits, np.uint16).view(np.uint8), DType.BF16, values)
    return values


FINITE = np.arange(0x7F80, dtype=np.uint16)


def test_every_bf16_comes_back():
    for sign in (0, 0x8000):
        bits = FINITE | np.uint16(sign)
        assert (bf16_bits(bf16_values(bits)) == bits).all()


def test_halfway_goes_to_even_and_a_hair_beside_it_does_not():
    below = bf16_values(FINITE[:-1])
    above = bf16_values(FINITE[1:])
    middle = (below + above) / 2  # exact in float64
    hair = middle * 2.0**-40
    even = FINITE[:-1] + (FINITE[:-1] & 1)
    assert (bf16_bits(middle) == even).all()
    assert (bf16_bits(-middle) == even | 0x8000).all()
    # In float32 these are the middle itself: who rounds twice gets half of them wrong.
    assert (bf16_bits(middle - hair) == FINITE[:-1]).all()
    assert (bf16_bits(middle + hair) == FINITE[1:]).all()
    assert (bf16_bits(-middle - hair) == FINITE[1:] | 0x8000).all()


def test_what_is_not_finite_stays_so():
    assert bf16_bits([np.inf, -np.inf, 3.4e38, -1e300]).tolist() == [0x7F80, 0xFF80, 0x7F80, 0xFF80]
    nans = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32)
    out = np.empty(6, np.uint8)
    narrow(nans, DType.BF16, out)
    assert np.isnan(bf16_values(out.view(np.uint16))).all()


def test_f4_is_packed_two_to_a_byte():
    out = np.empty(2, np.uint8)
    narrow(np.array([0.5, -6.0, 1.0, 100.0]), DType.F4, out)
    values = np.empty(4)
    widen(out, DType.F4, values)
    assert values.tolist() == [0.5, -6.0, 1.0, 6.0]


@pytest.mark.parametrize(
    ("dtype", "units"), [("C64", 12), ("F4", 3), ("F6_E2M3", 6), ("I64", 6), ("BF16", 6)]
)
def test_units_are_parts_of_complex_numbers_and_bytes_of_packed_ones(dtype, units):
    shape = (8,) if dtype == "F6_E2M3" else (2, 3)
    assert units_of(TensorSpec("a", dtype, shape)) == units


def test_an_exact_reference_agrees():
    rng = np.random.default_rng(0)
    values = rng.standard_normal(2000) * 10.0 ** rng.integers(-44, 38, 2000)
    found = bf16_values(bf16_bits(values))
    for value, rounded in zip(values.tolist(), found.tolist(), strict=True):
        bits = int(bf16_bits([rounded])[0]) & 0x7FFF
        around = bf16_values([max(bits, 1) - 1, bits, bits + 1]).tolist()
        exact = abs(Fraction(value))
        best = min(abs(exact - Fraction(near)) for near in around)
        assert abs(exact - abs(Fraction(rounded))) == best
