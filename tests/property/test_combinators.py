"""Generated models of mixed dtypes, combined in every way, against numpy in float64."""

import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import weighlock
from property.strategies import names, shapes, steady
from unit.combining_samples import DIGITS, ulps_off
from weighlock import DType
from weighlock.tensors.ref import ArrayRef

FLOATS = [DType(name) for name in DIGITS if name != "F4"]
INTEGERS = [DType.I8, DType.U8, DType.I16, DType.I32, DType.I64, DType.BOOL]


def numbers(draw, dtype, shape):
    seed = draw(st.integers(0, 2**32))
    rng = np.random.default_rng(seed)
    scale = draw(st.sampled_from([1.0, 1e-3, 30.0]))
    return (rng.standard_normal(shape) * scale).astype(dtype.numpy)


@st.composite
def models(draw, most=6):
    """Several models of the same specs."""
    specs = []
    for name in draw(st.lists(names, min_size=1, max_size=4, unique=True)):
        dtype = draw(st.sampled_from(FLOATS + INTEGERS))
        specs.append((name, dtype, draw(shapes(dtype, max_rank=3, max_side=9))))
    whole = {name: np.ones(shape, dtype.numpy) for name, dtype, shape in specs if dtype in INTEGERS}
    return [
        {
            name: whole[name] if name in whole else numbers(draw, dtype, shape)
            for name, dtype, shape in specs
        }
        for _ in range(draw(st.integers(1, most)))
    ]


def wide(model, name):
    return np.asarray(model[name]).astype(np.float64)


def check(found, expected, given_models):
    assert list(found) == list(given_models[0])
    for name, ref in found.items():
        array = given_models[0][name]
        assert (ref.dtype, ref.shape) == (DType.of(array.dtype), array.shape)
        if ref.dtype in INTEGERS:
            assert (ref.load() == array).all()
            continue
        want = expected(name)
        # Where the terms cancel, float64 is off itself, by that much of what they were.
        size = max((np.abs(wide(m, name)).max(initial=0) for m in given_models), default=0)
        told = np.abs(want) > 1e-13 * size
        bound = 0.51 if ref.dtype != "F64" else 64
        assert ulps_off(ref.load()[told], want[told], ref.dtype.value) <= bound


def formats(model, directory, number):
    """The same model in another format each."""
    path = Path(directory) / f"{number}.safetensors"
    if number % 3 == 0:
        return model
    if number % 3 == 1:
        weighlock.save(path, model, durable=False)
        return path
    torch = pytest.importorskip("torch")
    path = path.with_suffix(".pt")
    refs = {name: ArrayRef.of(name, array) for name, array in model.items()}
    torch.save({name: ref.torch() for name, ref in refs.items()}, path)
    return path


@given(models(), st.data())
@steady(40)
def test_means(given_models, data):
    weights = [data.draw(st.floats(0.01, 100)) for _ in given_models]
    total = math.fsum(weights)
    with tempfile.TemporaryDirectory() as directory:
        places = [formats(model, directory, n) for n, model in enumerate(given_models)]
        with weighlock.mean(places, weights, Path(directory) / "out", durable=False) as found:

            def expected(name):
                parts = zip(weights, given_models, strict=True)
                return sum(w / total * wide(m, name) for w, m in parts)

            check(found, expected, given_models)


@given(models(), st.floats(0, 0.49))
@steady(30)
def test_order_statistics(given_models, share):
    def stacked(name):
        return np.sort([wide(model, name) for model in given_models], axis=0)

    count = len(given_models)
    check(
        weighlock.median(given_models),
        lambda name: np.median(stacked(name), axis=0),
        given_models,
    )
    cut = math.floor(share * count + 1e-9)
    check(
        weighlock.trimmed_mean(given_models, share),
        lambda name: stacked(name)[cut : count - cut].mean(axis=0),
        given_models,
    )


@given(models(most=1), st.floats(-3, 3), st.integers(0, 2**32))
@steady(30)
def test_differences_and_steps(given_models, scale, seed):
    (base,) = given_models
    rng = np.random.default_rng(seed)
    delta = {
        name: rng.standard_normal(array.shape).astype(array.dtype)
        if DType.of(array.dtype) in FLOATS
        else np.zeros_like(array)
        for name, array in base.items()
    }
    check(
        weighlock.apply(base, delta, scale),
        lambda name: wide(base, name) + scale * wide(delta, name),
        [base],
    )
    found = weighlock.difference(base, delta)
    floats = [name for name in base if DType.of(base[name].dtype) in FLOATS]
    for name in floats:
        want = wide(base, name) - wide(delta, name)
        bound = 0.51 if found[name].dtype != "F64" else 1
        assert ulps_off(found[name].load(), want, found[name].dtype.value) <= bound
