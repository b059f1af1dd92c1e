"""Anything that is a tensor as a ref; refs seen in another dtype."""

import pickle

import ml_dtypes
import numpy as np
import pytest
import torch
from unit_samples import Memory, same_bits, sample

import weighlock
from weighlock.errors import LayoutError, UnsupportedDType
from weighlock.tensors.catalog import Catalog
from weighlock.tensors.convert import CastRef, as_ref
from weighlock.tensors.dtypes import DType
from weighlock.tensors.ref import ArrayRef
from weighlock.tensors.spec import Span, TensorSpec
from weighlock.tensors.stored import StoredRef
from weighlock.tensors.torch import TorchRef


def test_arrays_tensors_scalars_and_refs():
    array = np.zeros((2, 3), np.float32)
    assert isinstance(as_ref("a", array), ArrayRef)
    assert as_ref("a", array).load() is array
    assert isinstance(as_ref("a", torch.zeros(2)), TorchRef)
    assert as_ref("a", np.float32(3)).shape == ()
    assert as_ref("a", ml_dtypes.bfloat16(3)).dtype is DType.BF16
    ref = as_ref("a", array)
    assert as_ref("a", ref) is ref
    assert as_ref("b", ref).name == "b"
    assert as_ref("a", np.array([[1.0]]).view(np.recarray)).shape == (1, 1)


@pytest.mark.parametrize("value", [1.0, [1.0, 2.0], "text", None, b"bytes", object(), {}])
def test_anything_else_is_refused_by_name(value):
    with pytest.raises(LayoutError, match=f"'a' is a {type(value).__name__}"):
        as_ref("a", value)


@pytest.mark.parametrize(
    "value",
    [
        np.array(["a"]),
        np.array([object()]),
        np.zeros(2, "M8[s]"),
        np.zeros(2, [("x", "f4")]),
        np.zeros(2, np.longdouble),
        torch.empty(2, dtype=torch.uint4),
    ],
    ids=lambda value: str(value.dtype),
)
def test_types_the_format_lacks_are_refused_by_name(value):
    with pytest.raises(UnsupportedDType, match=r"'a' is .*no type"):
        as_ref("a", value)


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        (np.array([object()]), "astype"),
        (np.zeros(2, "M8[s]"), r"view\(np.int64\)"),
        (np.zeros(2, "m8[s]"), r"view\(np.int64\)"),
        (np.rec.array([(1.0,)], dtype=[("x", "f4")]), r"array\['x'\]"),
        (np.zeros(2, [("x", "f4")])[0], r"array\['x'\]"),
        (np.array([b"text"]), "metadata"),
        (np.zeros(2, np.longdouble), "float64"),
        (np.zeros(2, ml_dtypes.int4), "convert it"),
    ],
    ids=lambda value: str(getattr(value, "dtype", "")),
)
def test_types_the_format_lacks_have_a_remedy(value, remedy):
    with pytest.raises(UnsupportedDType, match=f"no type: .*{remedy}"):
        as_ref("a", value)


def written(tensors):
    with weighlock.Writer("model") as writer:
        writer.write("a", tensors["a"])


def shared(tensors):
    with weighlock.Server() as server:
        server.share(tensors)


@pytest.mark.parametrize(
    "value",
    [np.ma.masked_array([1.0, 2.0], mask=[False, True]), np.ma.zeros(2), np.ma.masked],
    ids=["some", "none", "one"],
)
@pytest.mark.parametrize(
    "taken",
    [
        weighlock.Catalog.of,
        lambda tensors: weighlock.save("model", tensors),
        lambda tensors: weighlock.save("model", iter(tensors.items())),
        written,
        lambda tensors: weighlock.mean([tensors, tensors]),
        shared,
    ],
    ids=["of", "save", "save pairs", "write", "mean", "share"],
)
def test_masked_arrays_are_refused_by_name(taken, value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LayoutError, match=r"'a' is a masked array.*filled\(value\)"):
        taken({"a": value})
    assert not list(tmp_path.iterdir())


def test_who_has_no_masked_arrays_does_not_pay_for_them(run_python):
    run_python(
        "import sys, numpy, weighlock\n"
        "weighlock.Catalog.of({'a': numpy.float32(1), 'b': numpy.matrix([[1.0]])})\n"
        "assert 'numpy.ma' not in sys.modules"
    )


@pytest.mark.parametrize("name", ["", None, 5, "a\0"])
def test_names_are_checked(name):
    with pytest.raises(LayoutError):
        as_ref(name, np.zeros(1))


def kinds(array):
    spec = TensorSpec("a", array.dtype, array.shape)
    data = np.ascontiguousarray(array).tobytes()
    return [
        ArrayRef.of("a", array),
        ArrayRef.of("a", np.asfortranarray(array) if array.ndim else array),
        StoredRef(spec, Memory(data), Span(0, len(data))),
    ]


CASTS = [
    ("F32", "BF16"),
    ("F32", "F16"),
    ("F32", "F64"),
    ("F64", "F32"),
    ("BF16", "F32"),
    ("F16", "BF16"),
    ("F32", "F8_E4M3"),
    ("F32", "F8_E5M2"),
    ("F8_E5M2", "F32"),
    ("I64", "F32"),
    ("F32", "C64"),
    ("BOOL", "F16"),
]


@pytest.mark.parametrize(("stored", "wanted"), CASTS)
@pytest.mark.parametrize("shape", [(), (0,), (6,), (40, 50)])
def test_a_cast_ref_is_the_tensor_in_another_dtype(stored, wanted, shape):
    array = np.asarray(np.arange(int(np.prod(shape))).reshape(shape) % 7).astype(
        DType(stored).numpy
    )
    wanted_array = array.astype(DType(wanted).numpy)
    for original in kinds(array):
        ref = CastRef.of(original, DType(wanted))
        assert (ref.name, ref.dtype, ref.shape) == ("a", wanted, shape)
        assert ref.nbytes == wanted_array.nbytes
        assert same_bits(ref.load(), wanted_array)
        assert b"".join(map(bytes, ref.pieces(64))) == wanted_array.tobytes()
        assert max([len(piece) for piece in ref.pieces(64)], default=0) <= 64
        if shape:
            assert same_bits(ref[1:3], wanted_array[1:3])
            assert same_bits(ref[::-1], wanted_array[::-1])
        assert ref.torch().dtype is getattr(torch, DType(wanted).torch_name)
        target = np.zeros(shape, DType(wanted).numpy)
        ref.load(out=target)
        assert same_bits(target, wanted_array)


@pytest.mark.parametrize("max_bytes", [1, 2, 3, 6, 7, 100])
@pytest.mark.parametrize(("stored", "wanted"), [("F64", "BF16"), ("BF16", "F64"), ("F32", "F16")])
def test_pieces_of_any_size_hold_whole_elements(stored, wanted, max_bytes):
    array = np.arange(50).astype(DType(stored).numpy)
    for original in kinds(array):
        pieces = CastRef.of(original, DType(wanted)).pieces(max_bytes)
        assert b"".join(map(bytes, pieces)) == array.astype(DType(wanted).numpy).tobytes()


def test_the_same_dtype_is_the_ref_itself():
    ref = as_ref("a", np.zeros(2, np.float32))
    assert CastRef.of(ref, DType.F32) is ref


@pytest.mark.parametrize(
    ("stored", "wanted"), [("C64", "F32"), ("F4", "F32"), ("F32", "F4"), ("F32", "F6_E2M3")]
)
def test_casts_that_would_lose_a_part_are_refused_by_name(stored, wanted):
    ref = as_ref("a", sample(stored, (2,)))
    with pytest.raises(UnsupportedDType, match=f"'a': {stored} cannot be cast to {wanted}"):
        CastRef.of(ref, DType(wanted))


def test_what_overflows_becomes_infinite_without_a_warning():
    ref = CastRef.of(as_ref("a", np.array([1e300, -1e300, np.nan])), DType.F32)
    assert ref.load().tolist()[:2] == [np.inf, -np.inf]
    assert np.isnan(ref.load()[2])
    assert np.isinf(ref[0])


def test_a_cast_ref_renames_pickles_and_knows_its_kin():
    array = np.arange(4, dtype=np.float32)
    ref = CastRef.of(as_ref("a", array), DType.F16)
    assert ref.renamed("b").name == "b"
    assert ref.renamed("b").identity() == ref.identity()
    assert ref.identity() != CastRef.of(as_ref("a", array), DType.BF16).identity()
    assert ref.identity() != as_ref("a", array).identity()
    assert same_bits(pickle.loads(pickle.dumps(ref)).load(), array.astype(np.float16))
    twice = CastRef.of(ref, DType.F64)
    assert twice.load().dtype == np.float64


def test_casts_of_a_file_are_saved_and_tied(tmp_path):
    array = np.arange(6, dtype=np.float32)
    path = tmp_path / "a.safetensors"
    weighlock.save(path, {"a": array, "b": array}, tied="alias", durable=False)
    with weighlock.open(path) as catalog:
        half = catalog.map(lambda ref: CastRef.of(ref, DType.F16))
        weighlock.save(tmp_path / "b.safetensors", half, tied="alias", durable=False)
    with weighlock.open(tmp_path / "b.safetensors") as catalog:
        assert list(catalog) == ["a", "b"]
        assert catalog.nbytes == 12
        assert same_bits(catalog["b"].load(), array.astype(np.float16))


EIGHT_BITS = ["F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"]


@pytest.mark.parametrize("stored", EIGHT_BITS)
@pytest.mark.parametrize("wanted", EIGHT_BITS)
def test_every_float_of_eight_bits_becomes_every_other(stored, wanted):
    """Of which ml_dtypes itself knows not every pair."""
    array = np.array([1, 2, 4, 0.5], np.float32).astype(DType(stored).numpy)
    ref = CastRef.of(as_ref("a", array), DType(wanted))
    assert ref.load().astype(np.float32).tolist() == [1, 2, 4, 0.5]
    target = np.zeros(4, DType(wanted).numpy)
    Catalog({"a": as_ref("a", array)}).load_into({"a": target}, cast=True)
    assert target.astype(np.float32).tolist() == [1, 2, 4, 0.5]
