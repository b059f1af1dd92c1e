"""Statistics of blocks against numpy's of the whole."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from weighlock.sharing.statistics import Tally, has_statistics
from weighlock.tensors.arrays import byte_view
from weighlock.tensors.dtypes import DType
from weighlock.tensors.ref import ArrayRef

SMALL = [dtype for dtype in DType if dtype.bits <= 16 and has_statistics(dtype)]


def tallied(array, dtype=None, elements=1000):
    dtype = dtype or DType.of(array.dtype)
    tally = Tally(dtype)
    data = b"".join(bytes(piece) for piece in ArrayRef.of("a", array).pieces())
    step = elements * max(dtype.bits, 8) // 8
    for start in range(0, len(data), step):
        tally.add(memoryview(data)[start : start + step])
    return tally.statistics()


def check(array, found):
    """Everything against numpy, which sees the whole array at once, in double precision."""
    values = np.abs(array) if array.dtype.kind == "c" else array
    doubles = values.astype(np.float64).reshape(-1)
    finite = doubles[np.isfinite(doubles)]
    assert found.count == doubles.size
    assert found.nan == np.isnan(doubles).sum()
    assert found.inf == np.isinf(doubles).sum()
    assert found.zeros == (finite == 0).sum()
    if not finite.size:
        assert (found.min, found.max, found.mean, found.std) == (None,) * 4
        assert found.bins == ()
        return
    assert (found.min, found.max) == (finite.min(), finite.max())
    scale = max(abs(finite.min()), abs(finite.max()))
    assert found.mean == pytest.approx(finite.mean(), rel=1e-9, abs=1e-12 * scale)
    assert found.std == pytest.approx(finite.std(), rel=1e-6, abs=1e-9 * scale)
    assert 1 <= len(found.bins) <= 100
    assert found.bins[0]
    assert found.bins[-1]
    edges = found.start + found.width * np.arange(len(found.bins) + 1)
    # numpy counts the last edge in; ours is open, so nothing lies on it.
    assert finite.max() < edges[-1]
    assert list(found.bins) == np.histogram(finite, edges)[0].tolist()


@pytest.mark.parametrize(
    "dtype", [d for d in DType if d.bits > 16 and d.in_safetensors], ids=lambda d: d.value
)
def test_wide_types_agree_with_numpy(dtype):
    rng = np.random.default_rng(1)
    values = rng.standard_normal(10_007) * 1000
    if dtype.is_complex:
        values = values + 1j * rng.standard_normal(10_007)
    array = (np.abs(values) if dtype.value[0] == "U" else values).astype(dtype.numpy)
    found = tallied(array)
    check(array, found)
    assert found.of == ("magnitudes" if dtype.is_complex else "values")
    assert len(found.bins) > 50


@pytest.mark.parametrize("dtype", SMALL, ids=lambda d: d.value)
def test_narrow_types_agree_with_numpy(dtype):
    rng = np.random.default_rng(2)
    raw = rng.integers(0, 256, 8000, np.uint8)
    if dtype is DType.F4:
        array = (raw % 16).view(dtype.numpy)
    elif dtype is DType.BOOL:
        array = raw < 100
    else:
        array = raw.view(dtype.numpy)
    with np.errstate(invalid="ignore"):
        check(array, tallied(array, dtype))


def test_values_that_are_no_numbers_are_counted_apart():
    array = np.array([0, -0.0, 1, np.nan, np.inf, -np.inf, -3], np.float32)
    found = tallied(array)
    assert (found.count, found.nan, found.inf, found.zeros) == (7, 1, 2, 2)
    assert (found.min, found.max, found.mean) == (-3, 1, -0.5)
    check(np.full(5, np.nan), tallied(np.full(5, np.nan)))


def test_nothing_has_nothing():
    found = Tally(DType.F32).statistics()
    assert (found.count, found.min, found.bins) == (0, None, ())


@pytest.mark.parametrize(
    "values",
    [
        [5.0] * 7,
        [0.0] * 7,
        [0.0] * 2000 + [1e30],
        [1e300, -1e300] * 50,
        [1.7976931348623157e308, -1.7976931348623157e308],
        [5e-324, -5e-324, 0.0],
        [5e-324] * 1500 + [1e308],
        [1e6 + n * 1e-9 for n in range(3000)],
        [-(2.0**n) for n in range(-500, 500)],
    ],
)
def test_ranges_of_every_kind_are_sorted_without_loss(values):
    found = tallied(np.array(values), elements=500)
    assert sum(found.bins) == len(values)
    assert len(found.bins) <= 100
    assert found.start <= min(values)
    end = found.start + found.width * len(found.bins)
    assert max(values) < end or math.isinf(end)


def test_whole_numbers_keep_their_extremes_and_have_whole_bins():
    array = np.array([2**63 - 1, -(2**63), 0, 5], np.int64)
    assert (tallied(array).min, tallied(array).max) == (-(2**63), 2**63 - 1)
    found = tallied(np.array([3, 3, 4, 7], np.int32))
    assert (found.start, found.width, found.bins) == (3, 1, (2, 1, 0, 0, 1))


def test_mean_and_spread_keep_their_digits_far_from_zero():
    array = 1e9 + np.arange(5000) % 2
    found = tallied(array, elements=500)
    assert found.mean == 1e9 + 0.5
    assert found.std == pytest.approx(0.5, rel=1e-7)


@settings(max_examples=60)
@given(
    npst.arrays(st.sampled_from([np.float64, np.float32, np.int64, np.uint64]), st.integers(1, 60)),
    st.integers(1, 20),
)
def test_blocks_of_any_size_give_what_the_whole_gives(array, elements):
    with np.errstate(all="ignore"):
        found = tallied(array, elements=elements)
        whole = Tally(DType.of(array.dtype))
        whole.add(byte_view(array))
        expected = whole.statistics()
        finite = array[np.isfinite(array)]
    for name in ("count", "nan", "inf", "zeros", "min", "max"):
        assert getattr(found, name) == getattr(expected, name)
    assert found.count == array.size
    assert sum(found.bins) == finite.size
    # Where a block starts may decide how narrow the bins are, never what lies in them.
    for n, count in enumerate(found.bins):
        low, high = found.start + n * found.width, found.start + (n + 1) * found.width
        if math.isfinite(low) and math.isfinite(high) and abs(low) < 2**52:
            doubles = finite.astype(np.float64)
            assert count == ((low <= doubles) & (doubles < high)).sum()


def test_types_whose_elements_cannot_be_told_apart_have_none():
    assert [d for d in DType if not has_statistics(d)] == [DType.F6_E2M3, DType.F6_E3M2]
