"""The 22 dtypes and every way to name them."""

import ml_dtypes
import numpy as np
import pytest
import torch
from unit_samples import FORMAT

import weighlock
from weighlock.errors import UnsupportedDType
from weighlock.tensors.dtypes import DType

TABLE = [
    # name, bits, numpy type of a loaded array, torch's name for it
    ("BOOL", 8, np.bool_, "bool"),
    ("F4", 4, ml_dtypes.float4_e2m1fn, "float4_e2m1fn_x2"),
    ("F6_E2M3", 6, np.uint8, "uint8"),
    ("F6_E3M2", 6, np.uint8, "uint8"),
    ("U8", 8, np.uint8, "uint8"),
    ("I8", 8, np.int8, "int8"),
    ("F8_E5M2", 8, ml_dtypes.float8_e5m2, "float8_e5m2"),
    ("F8_E4M3", 8, ml_dtypes.float8_e4m3fn, "float8_e4m3fn"),
    ("F8_E8M0", 8, ml_dtypes.float8_e8m0fnu, "float8_e8m0fnu"),
    ("F8_E4M3FNUZ", 8, ml_dtypes.float8_e4m3fnuz, "float8_e4m3fnuz"),
    ("F8_E5M2FNUZ", 8, ml_dtypes.float8_e5m2fnuz, "float8_e5m2fnuz"),
    ("I16", 16, np.int16, "int16"),
    ("U16", 16, np.uint16, "uint16"),
    ("F16", 16, np.float16, "float16"),
    ("BF16", 16, ml_dtypes.bfloat16, "bfloat16"),
    ("I32", 32, np.int32, "int32"),
    ("U32", 32, np.uint32, "uint32"),
    ("F32", 32, np.float32, "float32"),
    ("C64", 64, np.complex64, "complex64"),
    ("F64", 64, np.float64, "float64"),
    ("I64", 64, np.int64, "int64"),
    ("U64", 64, np.uint64, "uint64"),
]
# F6 has no type of its own in numpy or torch: uint8 means U8.
OWN_TYPE = [row for row in TABLE if not row[0].startswith("F6_")]
by_name = pytest.mark.parametrize(
    ("name", "bits", "numpy_type", "torch_name"), TABLE, ids=[row[0] for row in TABLE]
)
by_own_type = pytest.mark.parametrize(
    ("name", "bits", "numpy_type", "torch_name"), OWN_TYPE, ids=[row[0] for row in OWN_TYPE]
)


def test_there_are_exactly_the_22_of_the_format():
    assert len(FORMAT) == 22
    assert [row[0] for row in TABLE] == FORMAT
    assert [dtype.value for dtype in DType][:22] == FORMAT
    assert weighlock.DType is DType


@by_name
def test_the_safetensors_name_in_any_case(name, bits, numpy_type, torch_name):
    assert DType.of(name) is DType(name)
    assert DType.of(name.lower()) is DType(name)
    assert DType.of(DType(name)) is DType(name)
    assert DType(name) == name


@by_own_type
def test_the_torch_name_with_and_without_its_module(name, bits, numpy_type, torch_name):
    assert DType.of(torch_name) is DType(name)
    assert DType.of(f"torch.{torch_name}") is DType(name)


@by_own_type
def test_the_torch_dtype(name, bits, numpy_type, torch_name):
    assert DType.of(getattr(torch, torch_name)) is DType(name)


@by_own_type
def test_the_numpy_type_dtype_and_name(name, bits, numpy_type, torch_name):
    assert DType.of(numpy_type) is DType(name)
    assert DType.of(np.dtype(numpy_type)) is DType(name)
    assert DType.of(np.dtype(numpy_type).name) is DType(name)


@pytest.mark.parametrize("code", ["i2", "u2", "f2", "i4", "u4", "f4", "c8", "f8", "i8", "u8"])
def test_numpy_dtypes_of_either_byte_order(code):
    assert DType.of(np.dtype(f"<{code}")) is DType.of(np.dtype(f">{code}"))


@by_name
def test_width_and_numpy_type(name, bits, numpy_type, torch_name):
    dtype = DType(name)
    assert dtype.bits == bits
    assert dtype.numpy == np.dtype(numpy_type)
    assert dtype.numpy.newbyteorder("<") == dtype.numpy
    assert dtype.torch_name == torch_name
    assert hasattr(torch, torch_name)
    assert dtype.alignment == max(1, bits // 8)
    assert dtype.is_packed == (bits < 8)
    if not dtype.is_packed:
        assert dtype.numpy.itemsize * 8 == bits
        assert getattr(torch, torch_name).itemsize * 8 == bits


@by_name
def test_what_kind_of_number_it_is(name, bits, numpy_type, torch_name):
    dtype = DType(name)
    assert dtype.is_complex == (name == "C64")
    assert dtype.is_float == (name.startswith("F") or name == "BF16")


@pytest.mark.parametrize(
    ("spelling", "dtype"),
    [
        ("half", "F16"),
        ("float", "F32"),
        ("double", "F64"),
        ("cfloat", "C64"),
        ("short", "I16"),
        ("int", "I32"),
        ("long", "I64"),
        ("torch.half", "F16"),
        ("torch.long", "I64"),
        ("fp16", "F16"),
        ("fp32", "F32"),
        ("FP8_E4M3", "F8_E4M3"),
        ("fp4", "F4"),
        ("Torch.BFloat16", "BF16"),
    ],
)
def test_short_names(spelling, dtype):
    assert DType.of(spelling) is DType(dtype)


@pytest.mark.parametrize("short", ["half", "float", "double", "cfloat", "short", "int", "long"])
def test_short_names_mean_what_torch_means(short):
    assert DType.of(short) is DType.of(getattr(torch, short))


@pytest.mark.parametrize(
    "stranger",
    [
        "",
        "float128",
        "complex256",
        "F7",
        "torch.",
        "torch.qint8",
        "float8_e4m3",  # another type than float8_e4m3fn: with infinities
        np.clongdouble,
        np.longdouble,
        np.dtype("datetime64[s]"),
        np.dtype("S4"),
        np.dtype(object),
        np.dtype([("x", "f4")]),
        ml_dtypes.float8_e4m3,
        ml_dtypes.int4,
        torch.complex32,
        torch.qint8,
        torch.uint4,
        None,
        5,
        {},
        [],
        ...,
    ],
    ids=repr,
)
def test_what_is_no_safetensors_type_is_refused(stranger):
    with pytest.raises(UnsupportedDType, match="no safetensors type"):
        DType.of(stranger)


def test_the_error_lists_what_there_is():
    with pytest.raises(UnsupportedDType) as caught:
        DType.of("float7")
    assert all(name in str(caught.value) for name in FORMAT)
