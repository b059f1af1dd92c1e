"""The arithmetic of one block: sums of bf16 that are float64's, integers, order statistics."""

import numpy as np
import pytest

from unit.combining_samples import BF16, ulps_off
from weighlock import DType
from weighlock.combining.desk import SPARE_BYTES, Desk, Fault
from weighlock.combining.integers import Agreed, IntegerSum
from weighlock.combining.sorting import TrimmedMean
from weighlock.combining.sums import WeightedSum


def combined(how, rows, dtype):
    """What comes of a block."""
    width = max(row.nbytes for row in rows)
    table = np.zeros((len(rows), width + SPARE_BYTES), np.uint8)
    for number, row in enumerate(rows):
        table[number, : row.nbytes] = row.reshape(-1).view(np.uint8)
    out = np.full(rows[0].size * dtype.itemsize + SPARE_BYTES, 0xEE, np.uint8)
    how.combine(table, rows[0].size, out, Desk())
    assert (out[rows[0].size * dtype.itemsize :] == 0xEE).all()
    return out[: rows[0].size * dtype.itemsize].view(dtype)


def bf16_sum(rows, weights, **options):
    how = WeightedSum((DType.BF16,) * len(rows), tuple(weights), DType.BF16, **options)
    return combined(how, rows, np.dtype(BF16))


def reference(rows, weights):
    sums = np.zeros(rows[0].size)
    for weight, row in zip(weights, rows, strict=True):
        sums += weight * row.astype(np.float64)
    return sums


def shares(count, seed=0):
    weights = np.random.default_rng(seed).random(count) + 0.1
    return tuple((weights / weights.sum()).tolist())


CASES = {
    "like each other": lambda rng, n: [
        (1 + rng.standard_normal(n) * 0.01).astype(BF16) for _ in range(8)
    ],
    "independent": lambda rng, n: [rng.standard_normal(n).astype(BF16) for _ in range(8)],
    "cancelling": lambda rng, n: [
        (sign * row).astype(BF16) for row in rng.standard_normal((4, n)) for sign in (1, -1)
    ],
    "mostly zero": lambda rng, n: [
        (rng.standard_normal(n) * (rng.random(n) < 0.1)).astype(BF16) for _ in range(5)
    ],
    "of any exponent": lambda rng, n: [
        rng.integers(0, 0x7F80, n, dtype=np.uint16).view(BF16) for _ in range(3)
    ],
    "next to nothing": lambda rng, n: [
        rng.integers(0, 300, n, dtype=np.uint16).view(BF16) for _ in range(3)
    ],
    "sixty-four": lambda rng, n: [rng.standard_normal(n).astype(BF16) for _ in range(64)],
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [1, 2, 4097])
def test_sums_of_bf16_are_the_float64_sum_rounded_once(case, size):
    rows = CASES[case](np.random.default_rng(1), size)
    weights = shares(len(rows))
    found = bf16_sum(rows, weights)
    assert ulps_off(found, reference(rows, weights), "BF16") <= 0.5


@pytest.mark.parametrize("dtype", ["BF16", "F32", "F64"])
def test_a_number_is_summed_alone_as_it_is_beside_others(dtype):
    kind = DType(dtype).numpy
    rng = np.random.default_rng(7)
    rows = [rng.integers(128, 256, 400).astype(kind) for _ in range(3)]
    rows += [(rng.standard_normal(400) * 1e-3).astype(kind) for _ in range(5)]
    weights = shares(8)
    how = WeightedSum((DType(dtype),) * 8, weights, DType(dtype))
    together = combined(how, rows, kind)
    alone = [combined(how, [row[n : n + 1].copy() for row in rows], kind)[0] for n in range(400)]
    assert together.tobytes() == np.array(alone, kind).tobytes()


@pytest.mark.parametrize("spread", [1, 64])
def test_very_many_ties_are_rounded_like_few(spread):
    """Nearly all, and one in so many."""
    rng = np.random.default_rng(2)
    ties = rng.integers(128, 256, 40_000 * min(spread, 4)).astype(np.float64) + 0.5
    rows = [(ties + 0.5).astype(BF16), (ties - 0.5).astype(BF16)]  # halves between are ties
    exact = rng.random(ties.size) >= 1 / spread
    rows[0][exact] = rows[1][exact]
    found = bf16_sum(rows, (0.5, 0.5))
    assert ulps_off(found, reference(rows, (0.5, 0.5)), "BF16") <= 0.5
    even = found.view(np.uint16)[~exact]
    assert not (even & 1).any()


def test_ties_alone_are_those_beside_others():
    rng = np.random.default_rng(3)
    rows = [rng.integers(128, 256, 2000).astype(BF16) for _ in range(3)]
    weights = (1 / 6, 2 / 6, 3 / 6)  # whose sums lie on a tie, or next to one by how they are made
    together = bf16_sum(rows, weights)
    alone = [bf16_sum([row[n : n + 1].copy() for row in rows], weights) for n in range(2000)]
    assert together.tobytes() == b"".join(each.tobytes() for each in alone)


def test_float32_alone_would_not_do():
    """What the second look is for: where numbers cancel, float32 is off by many places."""
    rows = [np.full(9, value, BF16) for value in (2.0, -1.0)]
    weights = (1 / 3 + 1e-8, 2 / 3 - 1e-8)
    single = bf16_sum(rows, weights, single=True)
    assert ulps_off(single, reference(rows, weights), "BF16") > 0.51
    found = bf16_sum(rows, weights)
    assert ulps_off(found, reference(rows, weights), "BF16") <= 0.5


def test_blocks_of_zeros_give_zeros():
    assert not bf16_sum([np.zeros(9, BF16)] * 3, (0.5, 0.25, 0.25)).any()


def test_numbers_near_the_largest_do_not_overflow():
    large = np.array([3.38e38, -3.38e38], BF16)
    assert (bf16_sum([large] * 3, (1 / 3,) * 3) == large).all()
    found = bf16_sum([large, -large], (1.0, -1.0), finite=False)
    assert (found.astype(np.float32) == [np.inf, -np.inf]).all()
    with pytest.raises(Fault, match="overflows"):
        bf16_sum([large, -large], (1.0, -1.0))


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F8_E5M2"])
def test_what_is_not_finite_is_blamed_on_its_row(dtype):
    kind = DType(dtype).numpy
    rows = [np.ones(100, kind) for _ in range(3)]
    rows[1][42] = np.nan if dtype != "BF16" else np.inf
    how = WeightedSum((DType(dtype),) * 3, (0.2, 0.3, 0.5), DType(dtype))
    with pytest.raises(Fault) as caught:
        combined(how, rows, kind)
    assert (caught.value.row, caught.value.unit) == (1, 42)
    assert caught.value.what == ("holds Inf" if dtype == "BF16" else "holds NaN")
    let = WeightedSum((DType(dtype),) * 3, (0.2, 0.3, 0.5), DType(dtype), finite=False)
    found = combined(let, rows, kind).astype(np.float64)
    assert not np.isfinite(found[42])
    assert np.isfinite(np.delete(found, 42)).all()


def test_rows_of_several_dtypes():
    rng = np.random.default_rng(2)
    rows = [rng.standard_normal(50_000).astype(t) for t in (BF16, np.float32, np.float16)]
    how = WeightedSum((DType.BF16, DType.F32, DType.F16), (1.0, -0.5, 2.0), DType.F32)
    found = combined(how, rows, np.dtype(np.float32))
    assert ulps_off(found, reference(rows, (1.0, -0.5, 2.0)), "F32") <= 0.5


def test_integers_by_every_policy():
    rows = [np.array(row, np.int16) for row in ([1, 5, -3], [1, 8, 4], [1, 5, -9])]
    weights = (0.5, 0.25, 0.25)

    def by(policy):
        return combined(Agreed(DType.I16, weights, policy), rows, rows[0].dtype).tolist()

    assert by("first") == [1, 5, -3]
    assert by("max") == [1, 8, 4]
    assert by("round") == [1, 6, -3]  # 5.75, and -2.75
    with pytest.raises(Fault, match="is 8 where others have 5") as caught:
        by("equal")
    assert (caught.value.row, caught.value.unit) == (1, 1)


def test_large_integers_are_rounded_exactly():
    near = 2**62 + 12345
    rows = [np.array([near]), np.array([near + 3])]
    assert combined(Agreed(DType.I64, (0.5, 0.5), "round"), rows, rows[0].dtype) == [near + 1]
    apart = [np.array([2**63 - 1]), np.array([-(2**63)])]
    with pytest.raises(Fault, match="beyond 64 bits"):
        combined(Agreed(DType.I64, (0.5, 0.5), "round"), apart, rows[0].dtype)
    unsigned = [np.array([2**64 - 1], np.uint64), np.array([2**64 - 3], np.uint64)]
    found = combined(Agreed(DType.U64, (0.5, 0.5), "round"), unsigned, unsigned[0].dtype)
    assert found == [2**64 - 2]


def test_bools_by_every_policy():
    rows = [np.array(row) for row in ([True, False], [False, False], [True, False])]
    weights = (1 / 3,) * 3
    assert combined(Agreed(DType.BOOL, weights, "max"), rows, rows[0].dtype).tolist() == [1, 0]
    assert combined(Agreed(DType.BOOL, weights, "round"), rows, rows[0].dtype).tolist() == [1, 0]


def test_integer_sums_are_exact_or_refused():
    rows = [np.array([2**62, -5]), np.array([1, 2**40])]
    how = IntegerSum((DType.I64, DType.I64), (1.0, -1.0), DType.I64)
    assert combined(how, rows, rows[0].dtype).tolist() == [2**62 - 1, -5 - 2**40]
    with pytest.raises(Fault, match="beyond 64 bits"):
        combined(how, [np.array([2**62]), np.array([-(2**63)])], rows[0].dtype)
    small = IntegerSum((DType.U8, DType.U8), (1.0, -1.0), DType.U8)
    with pytest.raises(Fault, match="becomes -1, beyond uint8"):
        combined(small, [np.array([3], np.uint8), np.array([4], np.uint8)], np.dtype(np.uint8))


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_trimmed_means_are_numpys(count):
    rows = [np.random.default_rng(n).standard_normal(333).astype(np.float32) for n in range(count)]
    for cut in range((count + 1) // 2):
        found = combined(TrimmedMean((DType.F32,) * count, cut), rows, rows[0].dtype)
        left = np.sort(np.stack(rows).astype(np.float64), axis=0)[cut : count - cut]
        assert ulps_off(found, left.mean(axis=0), "F32") <= 0.5


def test_a_median_with_nan_is_nan_or_refused():
    rows = [np.array([1, v, 3], np.float32) for v in (1, np.nan, 2)]
    with pytest.raises(Fault) as caught:
        combined(TrimmedMean((DType.F32,) * 3, 1), rows, rows[0].dtype)
    assert (caught.value.row, caught.value.unit) == (1, 1)
    found = combined(TrimmedMean((DType.F32,) * 3, 1, finite=False), rows, rows[0].dtype)
    assert np.isnan(found).tolist() == [False, True, False]


@pytest.mark.parametrize("numbers", [8191, 8192, 8193, 3 * 8192, 3 * 8192 + 1])
def test_an_outlier_does_not_change_its_neighbours(numbers):
    """Pieces of a block have bounds of their own, the last one may be short."""
    rng = np.random.default_rng(5)
    rows = [rng.standard_normal(numbers).astype(BF16) for _ in range(4)]
    weights = shares(4)
    plain = bf16_sum(rows, weights)
    rows[2][numbers // 2] = 1e30
    found = bf16_sum(rows, weights)
    assert ulps_off(found, reference(rows, weights), "BF16") <= 0.5
    others = np.arange(numbers) != numbers // 2
    assert (found[others] == plain[others]).all()
