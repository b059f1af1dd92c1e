"""Where the mean so far lies, in what, and under whose names."""

import gc
import os
from fractions import Fraction

import numpy as np
import pytest

import weighlock
from unit.combining_samples import ulps_off
from weighlock.combining.ledger import Ledger
from weighlock.errors import CombineError, FormatError, NoSpace, SpoolClosed
from weighlock.tensors.dtypes import DType

F32 = np.float32


def complex_models(count, size=300):
    rng = np.random.default_rng(count)
    made = [rng.standard_normal(size) + 1j * rng.standard_normal(size) for _ in range(count)]
    return [{"c": array.astype(np.complex64), "s": np.complex64(array[0])} for array in made]


def parts(array):
    return np.atleast_1d(array).view(np.float32 if array.dtype == np.complex64 else np.float64)


# Complex numbers.


@pytest.mark.parametrize("accumulate", [None, "f64"])
def test_complex_numbers_are_accumulated_in_float64(accumulate, tmp_path):
    models = complex_models(100)
    mean = weighlock.Mean(tmp_path, accumulate, durable=False)
    for model in models[:50]:
        mean.add(model)
    mean = weighlock.Mean(tmp_path, accumulate, durable=False)  # taken up again
    for model in models[50:]:
        mean.add(model)
    with weighlock.open(tmp_path / "accumulator.safetensors") as held:
        assert (held["c"].dtype, held["c"].shape) == ("F64", (300, 2))
        assert (held["s"].dtype, held["s"].shape) == ("F64", (2,))
    for out in (None, tmp_path / "out"):
        found = mean.finish(out)
        for name in models[0]:
            assert found[name].dtype == "C64"
            assert found[name].shape == np.shape(models[0][name])
            want = np.mean([parts(model[name]).astype(np.float64) for model in models], axis=0)
            told = np.abs(want) > 1e-6  # below, what float64 is off itself counts for more
            assert ulps_off(parts(found[name].load())[told], want[told], "F32") <= 0.51
    mean.close()


def test_in_float32_if_asked(tmp_path):
    models = complex_models(3)
    with weighlock.Mean(tmp_path, "f32", durable=False) as mean:
        for model in models:
            mean.add(model)
        with weighlock.open(tmp_path / "accumulator.safetensors") as held:
            assert (held["c"].dtype, held["c"].shape) == ("F32", (300, 2))
        want = np.mean([model["c"] for model in models], axis=0)
        assert np.abs(mean.finish()["c"].load() - want).max() < 1e-6


def test_complex_numbers_of_128_bits_have_a_mean_in_memory(tmp_path):
    values = np.array([1 / 3 + 2j / 3, 1e300 - 1e-300j])
    with weighlock.Mean(tmp_path, durable=False) as mean:
        for _ in range(3):
            mean.add({"c": values})
        assert mean.finish()["c"].load().tobytes() == values.tobytes()


def test_what_is_wrong_with_complex_numbers_is_found_where_it_is(tmp_path):
    with weighlock.Mean(tmp_path, durable=False) as mean:
        mean.add({"c": np.zeros(3, np.complex64)}, name="a")
        with pytest.raises(CombineError, match=r"b: tensor 'c' holds NaN \(element 2 of 3\)"):
            mean.add({"c": np.array([0, 0, np.nan * 1j], np.complex64)}, name="b")
        with pytest.raises(CombineError, match=r"b: tensor 'c' is C64 \[4\], but \[3\] in what"):
            mean.add({"c": np.zeros(4, np.complex64)}, name="b")


def test_an_accumulator_of_complex_numbers_is_gone_on_with(tmp_path):
    """Once they were kept as they came."""
    text = Ledger({"a": 1.0}, {"c": DType.C64}).text()
    early = {"c": np.array([1 + 2j], np.complex64)}
    path = tmp_path / "accumulator.safetensors"
    weighlock.save(path, early, metadata={"weighlock.mean": text})
    with weighlock.Mean(tmp_path, durable=False) as mean:
        mean.add({"c": np.array([3 + 4j], np.complex64)}, name="b")
        assert mean.finish()["c"].load().tolist() == [2 + 3j]
    weighlock.save(path, {"c": np.zeros(3, F32)}, metadata={"weighlock.mean": text})
    with pytest.raises(FormatError, match=r"tensor 'c' is F32 \[3\], not pairs"):
        weighlock.Mean(tmp_path)


# Spools.


def test_a_spool_lives_as_long_as_the_mean_in_it(tmp_path, no_leaks):
    mean = weighlock.Mean(weighlock.Spool(tmp_path))
    gc.collect()
    mean.add({"w": np.ones(3, F32)})
    mean.add({"w": np.full(3, 3, F32)})
    assert mean.finish()["w"].load().tolist() == [2, 2, 2]
    del mean
    gc.collect()
    assert os.listdir(tmp_path) == []


def test_what_is_accumulated_counts_against_the_quota(tmp_path, no_leaks):
    with weighlock.Spool(tmp_path, quota_bytes=20_000) as spool:
        mean = weighlock.Mean(spool)
        mean.add({"w": np.ones(1000)}, name="a")
        assert 8000 <= spool.used_bytes < 10_000
        mean.add({"w": np.ones(1000)}, name="b")  # two lie there meanwhile
        assert 8000 <= spool.used_bytes < 10_000
        with pytest.raises(NoSpace, match="quota of 20,000"):
            weighlock.Mean(spool).add({"w": np.ones(3000)})
        with weighlock.Mean(spool) as other:
            other.add({"w": np.ones(100)})
            assert len(mean) == 2
            other.finish()
        assert spool.used_bytes < 10_000
        weighlock.save(spool, {"x": np.ones(500)}).close()
        held = weighlock.save(spool, {"x": np.ones(500)})
        with pytest.raises(NoSpace):
            mean.add({"w": np.ones(1000)}, name="c")
        assert list(mean.weights) == ["a", "b"]
        assert (mean.finish()["w"].load() == 1).all()
        held.close()
        mean.close()
        assert spool.used_bytes == 0


def test_what_comes_over_the_network_counts_meanwhile(tmp_path, no_leaks):
    with weighlock.Server() as server, weighlock.Spool(tmp_path, quota_bytes=10_000) as spool:
        mean = weighlock.Mean(spool)
        with pytest.raises(NoSpace, match="quota of 10,000"):
            mean.add(server.share({"w": np.ones(2000)}).url)
        mean.add(server.share({"w": np.ones(500)}).url)
        assert 4000 <= spool.used_bytes < 5000


def test_a_closed_spool_holds_no_mean(tmp_path, no_leaks):
    spool = weighlock.Spool(tmp_path)
    with weighlock.Mean(spool) as mean:
        mean.add({"w": np.ones(3, F32)})
        mean.finish()
        spool.close()
        for ask in (lambda: mean.add({"w": np.ones(3, F32)}), mean.finish):
            with pytest.raises(SpoolClosed, match="the spool was closed"):
                ask()
    with pytest.raises(SpoolClosed, match="the spool was closed"):
        weighlock.Mean(spool)
    assert os.listdir(tmp_path) == []


# Names and weights.


def test_a_contribution_without_a_name_is_another_one(tmp_path):
    with weighlock.Mean(tmp_path, durable=False) as mean:
        mean.add({"w": np.zeros(1)}, name="contribution 2")
        mean.add({"w": np.zeros(1)})
        mean.add({"w": np.full(1, 3.0)}, name="")
        assert list(mean.weights) == ["contribution 2", "contribution 3", "contribution 4"]
        assert mean.finish()["w"].load().tolist() == [1]


def test_another_shape_is_told_in_the_dtype_that_was_given(tmp_path):
    with weighlock.Mean(tmp_path, durable=False) as mean:
        mean.add({"w": np.zeros(3, F32)})
        says = r"late: tensor 'w' is F32 \[4\], but \[3\] in what was added before$"
        with pytest.raises(CombineError, match=says):
            mean.add({"w": np.zeros(4, F32)}, name="late")


class Counting(dict):
    """Notes how often all of it was looked at."""

    looks = 0

    def values(self):
        self.looks += 1
        return super().values()

    def items(self):
        self.looks += 1
        return super().items()


def test_weights_are_added_up_once_for_all_tensors():
    weights = Counting({f"site-{n}": 1 / 3 for n in range(50)})
    ledger = Ledger(weights, {f"t{n}": DType.F32 for n in range(1000)}, {"t0": ("site-1",)})
    before = weights.looks
    found = {ledger.weight_of(f"t{n}") for n in range(1000)}
    assert weights.looks <= before + 1
    assert found == {sum([1 / 3] * 50), sum([1 / 3] * 49)}
    assert float(Fraction(1, 3) * 50) == pytest.approx(ledger.total)
