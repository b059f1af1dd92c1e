"""What calls are asked for by mistake: each is told what was meant, before anything is made."""

import numpy as np
import pytest

import weighlock
from weighlock.errors import CombineError

torch = pytest.importorskip("torch")

A, B = {"w": np.full(3, 1.0)}, {"w": np.full(3, 3.0)}


def result(catalog):
    return catalog["w"].load().tolist()


def test_models_may_come_from_a_generator():
    for made in (weighlock.mean, weighlock.median):
        assert result(made(model for model in (A, B))) == [2.0] * 3
    assert result(weighlock.trimmed_mean(iter([A, B, B]), 0.4)) == [3.0] * 3
    assert result(weighlock.mean([A, B], (weight for weight in (1, 3)))) == [2.5] * 3


LINEAR = torch.nn.Linear(2, 2)

MISTAKES = {
    "a path as weights": (
        lambda: weighlock.mean([A, B], "o.safetensors"),
        CombineError,
        r"weights='o.safetensors': they are numbers.*out=$",
    ),
    "digits as weights": (lambda: weighlock.mean([A, B], "12"), CombineError, "weights='12'"),
    "one number as weights": (lambda: weighlock.mean([A, B], 2), CombineError, "weights=2: they"),
    "weights as text": (
        lambda: weighlock.mean([A, B], ["1", 2]),
        CombineError,
        "contributor 1 of 2: has the weight '1'; a weight is a number",
    ),
    "a state dict": (
        lambda: weighlock.mean(A),
        CombineError,
        "these are tensors, not models: pass a list of models",
    ),
    "a state dict of torch": (
        lambda: weighlock.mean(LINEAR.state_dict()),
        CombineError,
        "these are tensors, not models",
    ),
    "refs": (lambda: weighlock.median(dict(weighlock.mean([A]))), CombineError, "are tensors"),
    "two state dicts": (lambda: weighlock.mean(A, B), CombineError, r"a list .* such as \[a, b\]"),
    "two paths": (
        lambda: weighlock.mean("a.safetensors", "b.safetensors"),
        CombineError,
        r"such as \[a, b\], or a mapping of names to models, not one model",
    ),
    "a module": (lambda: weighlock.mean(LINEAR), CombineError, "not one model"),
    "modules": (
        lambda: weighlock.mean([LINEAR]),
        TypeError,
        r"contributor 1 of 1: is a Linear: pass its state_dict\(\)",
    ),
    "a module to step from": (
        lambda: weighlock.apply(LINEAR, A),
        TypeError,
        r"base: is a Linear: pass its state_dict\(\)",
    ),
    "tensors": (
        lambda: weighlock.mean([A["w"], B["w"]]),
        TypeError,
        "contributor 1 of 2: is a tensor: a model is a mapping",
    ),
    "a number": (lambda: weighlock.mean(3), TypeError, "cannot combine a int: pass a list"),
    "weights of a median": (
        lambda: weighlock.median([A, B], [1, 2]),
        TypeError,
        "out is a list: the result goes to a path, a spool, or memory",
    ),
    "a path as scale": (
        lambda: weighlock.apply(A, B, "o.safetensors"),
        CombineError,
        "scale='o.safetensors': it is a number; the file to write is out=",
    ),
    "a path as share": (
        lambda: weighlock.trimmed_mean([A, B], "o.safetensors"),
        CombineError,
        "share='o.safetensors': it is a number",
    ),
    "equal names": (
        lambda: weighlock.mean({1: A, "1": B}),
        CombineError,
        "two contributors are called '1'",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_was_meant_is_told(mistake):
    call, kind, says = MISTAKES[mistake]
    with pytest.raises(kind, match=says):
        call()


@pytest.mark.parametrize("dtype", ["I8", np.int32, "bool", "F4", "F6_E2M3", "C64", np.complex128])
def test_differences_are_made_in_floats(dtype):
    with pytest.raises(CombineError, match=r"^dtype=.*floating-point dtype that is not packed"):
        weighlock.difference(A, B, dtype=dtype)


def test_other_mistakes_when_adding(tmp_path):
    with weighlock.Mean(tmp_path, durable=False) as mean:
        for weight in ("1", b"1", None):
            with pytest.raises(CombineError, match="a weight is a number from 0 on"):
                mean.add(A, weight)
        with pytest.raises(TypeError, match=r"pass its state_dict\(\)"):
            mean.add(LINEAR)
        assert len(mean) == 0


# What the delta lacks.


@pytest.mark.parametrize("dtype", ["F16", "F32", "F64", "BF16", "F8_E4M3", "C64", "I64", "BOOL"])
def test_what_the_delta_lacks_stays_bit_for_bit(dtype, tmp_path):
    kind = weighlock.DType(dtype).numpy
    values = np.array([-0.0, 0.0, 1.0, np.nan if kind.kind not in "ib" else 1], np.float64)
    base = {"w": A["w"], "kept": values.astype(kind)}
    for out in (None, tmp_path / "out"):
        found = weighlock.apply(base, B, 2, out, missing="skip")
        assert found["kept"].load().tobytes() == base["kept"].tobytes()
        assert found["kept"].dtype == dtype
        assert result(found) == [7.0] * 3
