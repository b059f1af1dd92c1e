"""Numbers that a dtype hardly has, or has not: results are exact, or refused, never another."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

import weighlock
from unit.combining_samples import BF16
from weighlock.errors import CombineError

E8M0 = ml_dtypes.float8_e8m0fnu
F4 = ml_dtypes.float4_e2m1fn


def alone(*values, dtype):
    """Models of one tensor with one number each."""
    return [{"a": np.array([value], dtype)} for value in values]


def number(catalog):
    return catalog["a"].load().item()


def largest(dtype):
    return ml_dtypes.finfo(dtype).max


# Steps.


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, BF16])
@pytest.mark.parametrize(("scale", "sign"), [(0.0005, 1), (-0.0005, -1), (0.01, 1)])
def test_a_small_step_from_the_largest_number_overflows_by_name(dtype, scale, sign):
    most = largest(dtype)
    if dtype is BF16:
        scale *= 10  # less is not half of its last place
    base, delta = alone(most, sign * most, dtype=dtype)
    with pytest.raises(CombineError, match="tensor 'a' overflows"):
        weighlock.apply(base, delta, scale)
    assert np.isinf(number(weighlock.apply(base, delta, scale, finite=False)))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, BF16])
def test_a_step_that_is_rounded_away_does_not_overflow(dtype):
    base, delta = alone(largest(dtype), largest(dtype), dtype=dtype)
    assert number(weighlock.apply(base, delta, 2.0**-60)) == largest(dtype)


def test_a_step_that_is_nearly_nothing_is_no_mean():
    """Weights of 1 and next to nothing are not shares: the result lies beyond both."""
    base, delta = alone(1.0, 1.0, dtype=np.float64)
    assert number(weighlock.apply(base, delta, 2.0**-40)) == 1 + 2.0**-40


@pytest.mark.parametrize(("value", "overflows"), [(0.5, False), (1, True), (6, True)])
def test_what_is_too_large_for_four_bits_is_refused(value, overflows):
    six, more = {"a": np.array([1, 6], F4)}, {"a": np.array([0.5, value], F4)}
    if not overflows:
        assert weighlock.apply(six, more)["a"].load().tolist() == [1.5, 6]
        return
    with pytest.raises(CombineError, match=r"overflows \(element 0 of 2\)"):
        weighlock.apply(six, more)
    assert weighlock.apply(six, more, finite=False)["a"].load().tolist() == [1.5, 6]


@pytest.mark.parametrize(("a", "b", "becomes"), [(2, 2, "0"), (2, 4, "-2")])
def test_scales_have_no_zero_and_no_sign(a, b, becomes):
    with pytest.raises(CombineError, match=f"becomes {becomes}: F8_E8M0 has only powers of two"):
        weighlock.difference(*alone(a, b, dtype=E8M0))
    with pytest.raises(CombineError, match="overflows"):
        weighlock.apply(*alone(2.0**127, 2.0**127, dtype=E8M0), 4)


# Integers.


@pytest.mark.parametrize(
    ("dtype", "base", "delta", "scale"),
    [
        (np.uint64, 0, 2**62 + 2**58, 2),
        (np.uint64, 7, 2**64 - 8, 1),
        (np.uint64, 2**64 - 1, 2**63 - 1, -2),
        (np.int64, 0, 2**53 + 1, 2),
        (np.int64, 0, 2**60 + 1, -3),
        (np.int64, 5, -(2**60) - 1, 7),
        (np.int64, -1, 2**63 - 1, -1),
        (np.int64, 2**60 + 1, 2**60 + 3, 0),
        (np.int64, 3, 2**53, 0.5),
        (np.int64, 2**60 + 1, 7, 0.25),
        (np.int32, 2**31 - 1, 2**30, -3),
        (np.uint8, 200, 11, 5),
    ],
)
def test_steps_of_integers_are_exact(dtype, base, delta, scale):
    exact = round(base + Fraction(scale) * delta)
    assert number(weighlock.apply(*alone(base, delta, dtype=dtype), scale)) == exact


@pytest.mark.parametrize(
    ("dtype", "base", "delta", "scale"),
    [
        (np.uint64, 0, 2**63, 2),
        (np.uint64, 0, 1, -1),
        (np.uint64, 2**63, 2**62, 3),
        (np.int64, 0, 2**62, 2),
        (np.int64, 0, 3, 2.0**100),
        (np.int64, 0, 2**60, 1e300),
        (np.int32, 0, 2**30, 2),
        (np.int32, 0, 1, 2.0**64),
    ],
)
def test_steps_of_integers_that_do_not_fit_are_refused(dtype, base, delta, scale):
    with pytest.raises(CombineError, match=r"tensor 'a' becomes .* beyond"):
        weighlock.apply(*alone(base, delta, dtype=dtype), scale)


@pytest.mark.parametrize(
    ("dtype", "delta", "scale"),
    [
        (np.int64, 2**53 + 1, 0.5),
        (np.int64, -(2**53) - 1, 0.5),
        (np.uint64, 2**63 + 1, 0.25),
        (np.int64, 2**53 - 1, 1.5),
    ],
)
def test_steps_of_integers_that_floats_do_not_tell_are_refused(dtype, delta, scale):
    with pytest.raises(CombineError, match=f"delta: tensor 'a' holds {delta}: times"):
        weighlock.apply(*alone(0, delta, dtype=dtype), scale)


# Means.


@pytest.mark.parametrize("count", [2, 3, 7, 41])
@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
def test_the_mean_of_equal_models_is_the_model(dtype, count, tmp_path):
    values = np.random.default_rng(count).standard_normal(2000) * 1e3
    values[:4] = 5e-324, -5e-324, np.finfo(np.float64).max, -np.finfo(np.float64).max
    model = {"a": values.astype(dtype), "b": np.zeros(3)}
    for weights in (None, np.random.default_rng(count).random(count)):
        found = weighlock.mean([model] * count, weights)
        assert found["a"].load().tobytes() == model["a"].tobytes()
    with weighlock.Mean(tmp_path, durable=False) as mean:
        for _ in range(count):
            mean.add(model)
        assert mean.finish()["a"].load().tobytes() == model["a"].tobytes()


@pytest.mark.parametrize("count", [2, 3, 7, 41])
def test_and_so_it_is_in_float32(count):
    values = np.random.default_rng(count).standard_normal(2000).astype(np.float32)
    values[:3] = 1e-45, np.finfo(np.float32).max, -np.finfo(np.float32).max
    found = weighlock.mean([{"a": values}] * count, accumulate="f32")
    assert found["a"].load().tobytes() == values.tobytes()


def test_where_models_nearly_agree_their_mean_lies_between():
    rng = np.random.default_rng(5)
    first = rng.standard_normal(5000)
    rows = [first + rng.integers(-1, 2, 5000) * np.spacing(first) for _ in range(3)]
    found = weighlock.mean([{"a": row} for row in rows])["a"].load()
    assert (found >= np.min(rows, axis=0)).all()
    assert (found <= np.max(rows, axis=0)).all()
    alone = [
        number(weighlock.mean([{"a": row[n : n + 1].copy()} for row in rows])) for n in range(50)
    ]
    assert found[:50].tolist() == alone


def test_what_is_not_finite_stays_so_if_asked():
    rows = np.array([[np.inf, np.nan, -np.inf, 1.7e308], [1, 1, np.inf, 1.7e308], [1, 2, 3, 4]])
    found = weighlock.mean([{"a": row} for row in rows], finite=False)["a"].load()
    assert found[:3].tolist() == pytest.approx([np.inf, np.nan, np.nan], nan_ok=True)
    assert found[3] == pytest.approx(1.7e308 / 3 * 2)


# Medians.


@pytest.mark.parametrize("beside", [1.0, np.inf, np.nan])
def test_a_median_does_not_depend_on_the_number_beside_it(beside):
    large = 1.7e308
    models = [{"a": np.array([beside, large, 1.0])}, {"a": np.array([2.0, large, 3.0])}]
    for made in (weighlock.median, lambda m, **o: weighlock.trimmed_mean(m, 0, **o)):
        assert made(models, finite=False)["a"].load()[1:].tolist() == [large, 2.0]


@pytest.mark.parametrize(("weights", "exact"), [((4, 1), 1.2), ((2, 1), 4 / 3), ((1, 4), 1.8)])
def test_the_least_powers_of_two_are_rounded_to_the_nearest(weights, exact):
    kind = ml_dtypes.float8_e8m0fnu
    models = [{"s": np.array([2.0**power], kind)} for power in (-127, -126)]
    found = weighlock.mean(models, weights)["s"].load().astype(np.float64) * 2.0**127
    assert found == (1 if exact < 1.5 else 2)


def test_numbers_that_no_float_is_are_refused_by_name():
    models = [{"s": np.ones(2)}, {"s": np.ones(2)}]
    with pytest.raises(CombineError, match="contributor 1 of 2: has the weight 1000"):
        weighlock.mean(models, [10**400, 1])
    with pytest.raises(CombineError, match="scale=1000"):
        weighlock.apply(*models, 10**400)
    with pytest.raises(CombineError, match="contributor 1 of 1: has the weight"):
        weighlock.mean(models[:1], [10**400])


def test_integers_too_far_apart_are_told_by_how_much():
    ends = np.iinfo(np.int64)
    models = [{"s": np.array([end])} for end in (ends.max, ends.min)]
    with pytest.raises(CombineError, match=r"2 of 2: .*differs from the first by -1\.845e\+19"):
        weighlock.mean(models, integers="round")
