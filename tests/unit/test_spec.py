"""Specs, spans and layouts: values that cannot be wrong."""

import itertools
import pickle

import numpy as np
import pytest
import torch

import weighlock
from weighlock.errors import LayoutError, UnsupportedDType
from weighlock.tensors.dtypes import DType
from weighlock.tensors.spec import Layout, Span, TensorSpec


@pytest.mark.parametrize(
    "dtype", ["BF16", "bf16", "bfloat16", "torch.bfloat16", torch.bfloat16, DType.BF16]
)
@pytest.mark.parametrize("made", [tuple, list, torch.Size, np.array, iter])
def test_dtype_and_shape_in_any_form(dtype, made):
    spec = TensorSpec("a", dtype, made([2, 3]))
    assert spec == TensorSpec("a", DType.BF16, (2, 3))
    assert all(type(size) is int for size in spec.shape)
    assert type(spec.shape) is tuple


def test_size_and_bytes():
    assert TensorSpec("a", "F32", ()).size == 1
    assert TensorSpec("a", "F32", ()).nbytes == 4
    assert TensorSpec("a", "F32", (3, 0)).nbytes == 0
    assert TensorSpec("a", "C64", (3, 2)).nbytes == 48
    assert TensorSpec("a", "F4", (3, 2)).nbytes == 3
    assert TensorSpec("a", "F6_E2M3", (4,)).nbytes == 3


def test_a_spec_from_a_triple():
    spec = TensorSpec("a", DType.I8, (2,))
    assert TensorSpec.of(("a", "int8", [2])) == spec
    assert TensorSpec.of(spec) is spec


def test_specs_are_values():
    spec = TensorSpec("a", "I8", (2,))
    with pytest.raises(AttributeError):
        spec.name = "b"
    assert spec.renamed("b") == TensorSpec("b", "I8", (2,))
    assert spec.name == "a"
    assert len({spec, TensorSpec("a", "i8", [2])}) == 1
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert weighlock.TensorSpec is TensorSpec


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "empty"),
        ("a\0b", "NUL"),
        ("__metadata__", "reserved"),
        ("a\ud800", "surrogate"),
        (5, "int"),
        (None, "NoneType"),
        (b"a", "bytes"),
    ],
)
def test_what_cannot_name_a_tensor(name, says):
    with pytest.raises(LayoutError, match=says):
        TensorSpec(name, "F32", ())


@pytest.mark.parametrize(
    "name", ["a", "größe", "a b", "../x", "a\nb", "\x1b[31m", "😀", "a" * 4096]
)
def test_any_other_text_can(name):
    assert TensorSpec(name, "F32", ()).name == name


@pytest.mark.parametrize(
    ("dtype", "shape", "says"),
    [
        ("F32", (-1,), "negative"),
        ("F32", (2, -3), "negative"),
        ("F32", (2.0,), "not an integer"),
        ("F32", (True,), "not an integer"),
        ("F32", ("2",), "not an integer"),
        ("F32", (None,), "not an integer"),
        ("F32", (1,) * 65, "dimensions"),
        ("F32", (2**62,), "larger than any file"),
        ("U8", (2**31, 2**32), "larger than any file"),
        ("F4", (3,), "whole bytes"),
        ("F4", (), "whole bytes"),
        ("F6_E3M2", (3,), "whole bytes"),
    ],
)
def test_shapes_no_file_can_hold_are_refused_by_name(dtype, shape, says):
    with pytest.raises(LayoutError, match=says) as caught:
        TensorSpec("encoder.weight", dtype, shape)
    assert "'encoder.weight'" in str(caught.value)


def test_an_unknown_dtype_is_refused():
    with pytest.raises(UnsupportedDType):
        TensorSpec("a", "float128", ())


def test_the_most_dimensions_pass():
    assert TensorSpec("a", "U8", (1,) * 64).size == 1


def test_spans():
    assert Span(3, 4).end == 7
    assert Span(0, 0).end == 0
    for wrong in [(-1, 1), (1, -1)]:
        with pytest.raises(LayoutError):
            Span(*wrong)


SHAPES = [(), (0,), (1,), (5,), (3, 0), (2, 3), (2, 1, 3), (1, 1), (4, 1, 2, 3)]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_contiguous_layout_is_numpy_s(shape):
    layout = Layout.contiguous(shape, start=7)
    assert layout.is_contiguous
    assert layout.size == np.prod(shape)
    assert layout.cover() == (7, layout.size)
    if layout.size:
        array = np.empty(shape, np.uint8)
        assert layout.strides == array.strides


def test_what_is_contiguous():
    assert Layout(0, (1, 3), (99, 1)).is_contiguous  # the stride of one row is never walked
    assert Layout(0, (0, 3), (99, 7)).is_contiguous  # nothing lies nowhere
    assert not Layout(0, (3, 2), (1, 3)).is_contiguous
    assert not Layout(2, (3,), (-1,)).is_contiguous
    assert not Layout(0, (3,), (0,)).is_contiguous


def test_the_cover_is_the_smallest_run_that_holds_every_element():
    for shape, strides in [((3, 2), (1, 3)), ((3,), (-2,)), ((2, 3), (-5, 2)), ((3,), (0,))]:
        layout = Layout(20, shape, strides)
        positions = {
            20 + sum(i * step for i, step in zip(index, strides, strict=True))
            for index in itertools.product(*map(range, shape))
        }
        assert layout.cover() == (min(positions), max(positions) - min(positions) + 1)


@pytest.mark.parametrize(
    "given",
    [
        {"x": TensorSpec("x", "F32", (2,))},
        {"x": TensorSpec("old", "F32", (2,))},
        {"x": ("f32", (2,))},
        {"x": ("x", "f32", (2,))},
        {"x": np.zeros(2, np.float32)},
        {"x": torch.zeros(2)},
        weighlock.Catalog.of({"x": np.zeros(2, np.float32)}),
        weighlock.Catalog.of({"x": np.zeros(2, np.float32)}).values(),
        [["x", "f32", [2]]],
        iter([("x", torch.float32, torch.Size([2]))]),
    ],
)
def test_several_specs_in_whatever_holds_them(given):
    assert TensorSpec.several(given) == [TensorSpec("x", "F32", (2,))]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([("a", "F32")], r"a spec is \(name, dtype, shape\).* not \('a', 'F32'\)"),
        ([("a", "F32", 3)], "tensor 'a': a shape is several sizes.* not 3"),
        ([("a", "F32", "33")], "tensor 'a': a shape is several sizes.* not '33'"),
        (["a"], r"not 'a'; of a mapping, pass its values\(\)"),
        ([7], "a spec is .* not 7"),
        ({"x": 7}, "a spec is .* not 7"),
        ("abc", "specs= takes specs .*not a str"),
        (7, "specs= takes specs .*not a int"),
    ],
)
def test_what_is_no_spec_is_told_what_one_is(given, told):
    with pytest.raises(LayoutError, match=told):
        TensorSpec.several(given)


def test_a_shape_that_is_one_number_is_told_what_one_is():
    with pytest.raises(LayoutError, match="a shape is several sizes"):
        TensorSpec("a", "F32", 3)
