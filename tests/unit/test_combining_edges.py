"""Numbers at the edges of their types, and what must not depend on how the work was cut."""

import json
import warnings

import ml_dtypes
import numpy as np
import pytest

import weighlock
from unit.combining_samples import BF16
from weighlock.combining.rounding import narrow
from weighlock.errors import CombineError, PeerLost
from weighlock.tensors.dtypes import DType

LARGEST = 2**63 - 1


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def alone(*values, dtype):
    """Models of one tensor with one number each."""
    return [{"a": np.array([value], dtype)} for value in values]


def number(catalog):
    return catalog["a"].load().item()


def raw_file(path, dtype, shape, content):
    header = {"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, len(content)]}}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)
    return path


# Two models are both needed.


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("made", [weighlock.difference, weighlock.apply])
def test_of_two_models_none_can_be_left_out(made, lost, tmp_path):
    pair = [{"a": np.ones(3, np.float32)}] * 2
    pair[lost] = str(tmp_path / "gone.safetensors")
    with pytest.raises(CombineError, match="neither can be left out"):
        made(*pair, on_lost="exclude")
    with pytest.raises((OSError, PeerLost)):
        made(*pair)


@pytest.mark.parametrize("scale", [3, True, np.int64(3), np.float32(3), np.array(3.0)])
@pytest.mark.parametrize("dtype", [BF16, np.float32])
def test_a_step_may_be_any_number(scale, dtype):
    ones = {"a": np.ones(3, dtype)}
    assert weighlock.apply(ones, ones, scale)["a"].load()[0] == 1 + float(scale)


def test_what_overflows_is_named():
    large = {"a": np.array([0, 0, 0, 1.7e308])}
    with pytest.raises(CombineError, match=r"overflows \(element 3 of 4\)"):
        weighlock.difference(large, {"a": -large["a"]})


# Integers of 64 bits are not floats.


@pytest.mark.parametrize(
    "made", [weighlock.median, lambda m, **o: weighlock.trimmed_mean(m, 0, **o)]
)
@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (np.int64, LARGEST),
        (np.int64, -(2**63)),
        (np.int64, 2**53 + 1),
        (np.uint64, 2**64 - 1),
        (np.uint64, 2**63),
        (np.uint64, 0),
    ],
)
def test_integers_on_which_all_agree_stay_what_they_are(made, dtype, value):
    assert number(made(alone(value, value, value, dtype=dtype), integers="round")) == value
    assert number(weighlock.mean(alone(value, value, dtype=dtype), integers="round")) == value


@pytest.mark.parametrize(
    ("dtype", "values", "middle"),
    [
        (np.int64, (5, -7, 6), 5),
        (np.int64, (LARGEST, 3, -(2**63)), 3),
        (np.int64, (2**60 + 3, 2**60 + 1), 2**60 + 2),
        (np.int64, (1, 2), 2),
        (np.int64, (2, 3), 2),
        (np.int32, (1, 2), 2),
        (np.int32, (2, 3), 2),
        (np.uint64, (2**64 - 1, 2**64 - 3), 2**64 - 2),
        (np.uint64, (2**64 - 1, 0, 1), 1),
    ],
)
def test_the_median_of_integers(dtype, values, middle):
    assert number(weighlock.median(alone(*values, dtype=dtype), integers="round")) == middle


def test_the_mean_of_far_integers_is_near(tmp_path):
    found = number(
        weighlock.trimmed_mean(alone(0, 2**64 - 1, dtype=np.uint64), 0, integers="round")
    )
    assert abs(found - 2**63) <= 2**11


@pytest.mark.parametrize("value", [2**53 + 1, -(2**53) - 1, LARGEST])
def test_an_accumulator_refuses_what_it_cannot_hold(value, tmp_path):
    with weighlock.Mean(tmp_path, integers="round") as mean:
        mean.add({"a": np.array([2**53], np.int64)})
        with pytest.raises(CombineError, match=r"beyond 2\*\*53"):
            mean.add({"a": np.array([value], np.int64)})
        assert number(mean.finish()) == 2**53


def test_an_accumulator_of_float32_keeps_integers(tmp_path):
    with weighlock.Mean(tmp_path, "f32", integers="round") as mean:
        mean.add({"a": np.array([2**24 + 1], np.int32)})
        mean.add({"a": np.array([2**24 + 1], np.int32)})
        assert number(mean.finish()) == 2**24 + 1


@pytest.mark.parametrize("made", [weighlock.difference, weighlock.apply])
def test_a_sum_that_went_around_is_refused(made):
    with pytest.raises(CombineError, match="beyond"):
        made({"a": np.array([5], np.int32)}, {"a": np.array([2**64 - 1], np.uint64)})


# Whatever byte is not 0 is true.


@pytest.mark.parametrize("made", [weighlock.mean, weighlock.median])
@pytest.mark.parametrize("integers", ["equal", "first", "max", "round"])
def test_bools_that_are_written_differently_agree(made, integers, tmp_path):
    one = raw_file(tmp_path / "one", "BOOL", [3], b"\1\1\0")
    other = raw_file(tmp_path / "other", "BOOL", [3], b"\1\2\0")
    found = made([one, other], integers=integers)["a"].load()
    assert found.view(np.uint8).tolist() == [1, 1, 0]


def test_an_accumulator_takes_such_bools_for_what_they_are(tmp_path):
    odd = raw_file(tmp_path / "odd", "BOOL", [2], b"\7\0")
    with weighlock.Mean(tmp_path / "mean", integers="round") as mean:
        mean.add(odd)
        mean.add(odd)
        assert mean.finish()["a"].load().tolist() == [True, False]
    assert weighlock.difference(odd, odd)["a"].load().tolist() == [0, 0]


# The same bytes whatever the number of threads.


@pytest.mark.parametrize("length", [2**17 + 1, 2**20 + 1])
def test_a_lone_last_number_is_summed_as_beside_others(length):
    rng = np.random.default_rng(5)
    bytes_ = [{"a": rng.integers(0, 255, length, np.uint8)} for _ in range(40)]
    numbers = [{"a": rng.standard_normal(length)} for _ in range(16)]
    weights = rng.random(40)
    for made in (
        lambda threads: weighlock.mean(bytes_, weights, integers="round", threads=threads),
        lambda threads: weighlock.trimmed_mean(numbers, 0.0, threads=threads),
        lambda threads: weighlock.median(numbers, threads=threads),
    ):
        found = {made(threads)["a"].load().tobytes() for threads in (1, 3)}
        assert len(found) == 1


# Weights at the ends of float32.


@pytest.mark.parametrize("scale", [1e39, 1e300, 1e-40, 1e-60])
def test_a_step_in_bf16_is_that_in_float32(scale):
    delta = np.array([0, 1e-30, 1e-2, 1e-5], np.float64)
    if scale > 1:
        delta = delta / scale
    base = {"a": np.zeros(4, BF16)}
    found = weighlock.apply(base, {"a": delta.astype(BF16)}, scale)["a"].load()
    exact = delta.astype(BF16).astype(np.float64) * scale
    assert (found == exact.astype(np.float32).astype(BF16)).all()


def test_a_share_that_float32_rounds_coarsely():
    models = [{"a": np.array([1e38], BF16)}, {"a": np.array([0], BF16)}]
    found = weighlock.mean(models, [1e-45, 1])["a"].load().astype(np.float64)
    exact = float(np.array(1e38, BF16)) * 1e-45
    assert abs(found[0] - exact) <= 0.51 * 2.0 ** (np.floor(np.log2(exact)) - 7)


# Small floats are rounded once.


@pytest.mark.parametrize(
    ("dtype", "value", "rounded"),
    [
        (DType.F8_E4M3, 1.0625 + 1e-12, 1.125),
        (DType.F8_E4M3, 1.0625 - 1e-12, 1.0),
        (DType.F8_E4M3, 1.0625, 1.0),
        (DType.F8_E5M2, -1.125 - 1e-12, -1.25),
    ],
)
def test_a_number_beside_a_tie_is_rounded_to_its_side(dtype, value, rounded):
    out = np.empty(1, np.uint8)
    narrow(np.array([value]), dtype, out)
    assert out.view(dtype.numpy).astype(np.float64)[0] == rounded


def test_four_bits_are_rounded_once_too():
    out = np.empty(1, np.uint8)
    narrow(np.array([1.25 + 1e-12, 1.25 - 1e-12]), DType.F4, out)
    codes = np.array([out[0] & 15, out[0] >> 4], np.uint8).view(ml_dtypes.float4_e2m1fn)
    assert codes.astype(np.float64).tolist() == [1.5, 1.0]


# What a result is.


@pytest.mark.parametrize("made", [weighlock.mean, weighlock.median])
def test_packed_numbers_stay_what_they_are_in_memory(made, tmp_path):
    path = raw_file(tmp_path / "f6", "F6_E2M3", [4, 4], bytes(range(12)))
    found = made([path, path])["a"]
    assert (found.dtype, found.shape) == ("F6_E2M3", (4, 4))
    assert found.load().tobytes() == bytes(range(12))


def test_weights_that_are_too_much_together_are_refused(tmp_path):
    with weighlock.Mean(tmp_path) as mean:
        mean.add({"a": np.ones(2, np.float32)}, 1e308)
        with pytest.raises(CombineError, match="too much"):
            mean.add({"a": np.ones(2, np.float32)}, 1e308)
        assert mean.finish()["a"].load().tolist() == [1, 1]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_something_is_left_of_a_trimmed_mean(count):
    models = [{"a": np.array([n], np.float32)} for n in range(count)]
    found = number(weighlock.trimmed_mean(models, 0.4999999999))
    assert found == number(weighlock.median(models))


def test_the_ledger_is_nobody_elses(tmp_path):
    with weighlock.Mean(tmp_path) as mean:
        mean.add({"a": np.ones(2, np.float32)})
        assert not mean.finish(metadata=None).metadata
        assert mean.finish(metadata={"by": "us"}).metadata == {"by": "us"}
