"""Numpy arrays as the bytes a file holds, and back."""

import pickle

import ml_dtypes
import numpy as np
import pytest
import torch
from unit_samples import WHOLE_BYTES, same_bits, sample

from weighlock.errors import UnsupportedDType
from weighlock.tensors.arrays import (
    SlicedArray,
    array_pieces,
    byte_view,
    empty,
    pack_f4,
    unpack_f4,
)
from weighlock.tensors.dtypes import DType


def joined(array, max_bytes=64):
    pieces = []
    for piece in array_pieces(array, DType.of(array.dtype), max_bytes):
        assert piece.format == "B"
        assert piece.ndim == 1
        pieces.append(bytes(piece))
    return pieces


@pytest.mark.parametrize("dtype", WHOLE_BYTES)
@pytest.mark.parametrize(
    "seen",
    [
        lambda a: a,
        lambda a: a.T,
        lambda a: a[::2],
        lambda a: a[:, ::-1],
        lambda a: a[1:, 2:5],
        lambda a: a[0, 0],
        lambda a: a[:0],
        lambda a: np.broadcast_to(a[0], (3, 10)),
        lambda a: np.asfortranarray(a),
    ],
    ids=["plain", "T", "step", "back", "inner", "0-dim", "empty", "broadcast", "fortran"],
)
def test_pieces_are_the_row_major_bytes_of_any_view(dtype, seen):
    array = np.asarray(seen(sample(dtype, (8, 10))))
    assert b"".join(joined(array)) == np.ascontiguousarray(array).tobytes()


@pytest.mark.parametrize("code", ["i2", "u2", "f2", "i4", "u4", "f4", "c8", "f8", "i8", "u8"])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (5, 9)])
def test_big_endian_arrays_are_turned(code, shape):
    little_endian = sample(np.dtype(code), shape)
    big = little_endian.astype(np.dtype(code).newbyteorder(">"))
    assert b"".join(joined(big)) == little_endian.tobytes()
    assert b"".join(joined(big.T)) == np.ascontiguousarray(little_endian.T).tobytes()


def test_a_contiguous_array_is_one_view_of_its_own_memory():
    array = np.zeros((100, 100), np.float32)
    (piece,) = array_pieces(array, DType.F32, 64)
    array[0, 0] = 1
    assert len(piece) == array.nbytes
    assert bytes(piece[:4]) == np.float32(1).tobytes()


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F8_E5M2", "C64"])
def test_other_arrays_come_in_pieces_of_the_buffer_s_size(dtype):
    array = sample(dtype, (40, 30)).T
    pieces = joined(array, 64)
    assert max(map(len, pieces)) <= 64
    assert len(pieces) >= array.nbytes // 64


def test_a_buffer_smaller_than_an_element_holds_one():
    array = sample("F64", (3, 2)).T
    assert [len(piece) for piece in joined(array, 1)] == [8] * 6


def test_byte_view_is_the_array_s_own_memory():
    array = np.zeros((2, 2), ml_dtypes.bfloat16)
    byte_view(array)[0:2] = b"\x80\x3f"
    assert array[0, 0] == 1


def test_f4_is_packed_two_to_a_byte_the_first_in_the_low_half():
    codes = np.array([1, 2, 3, 15], np.uint8)
    packed = pack_f4(codes)
    assert packed.tobytes() == b"\x21\xf3"
    again = np.empty(4, np.uint8)
    unpack_f4(packed, again)
    assert np.array_equal(again, codes)


def test_bits_above_the_code_do_not_reach_a_file():
    assert pack_f4(np.array([0xF1, 0x02], np.uint8)).tobytes() == b"\x21"


@pytest.mark.parametrize("seen", [lambda a: a, lambda a: a.T, lambda a: a[:, ::-1]])
def test_f4_pieces_of_any_view(seen):
    array = seen(sample("F4", (6, 10)))
    codes = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    wanted = (codes[0::2] | codes[1::2] << 4).tobytes()
    pieces = joined(array, 8)
    assert b"".join(pieces) == wanted
    assert max(map(len, pieces)) <= 8


@pytest.fixture
def sliced():
    return np.arange(6, dtype=np.float32).reshape(2, 3).view(SlicedArray)


def test_arithmetic_with_a_slice_gives_plain_arrays(sliced):
    for result in (
        sliced + 1,
        1 - sliced,
        sliced * sliced,
        -sliced,
        sliced @ sliced.T,
        sliced > 2,
        np.sqrt(sliced),
        np.add.reduce(sliced),
        sliced.sum(axis=0),
        sliced.mean(axis=1),
        np.add.outer(sliced, sliced),
        np.concatenate([sliced, sliced]),
    ):
        assert type(result) is np.ndarray
    assert np.array_equal(sliced + 1, np.arange(1, 7).reshape(2, 3))


def test_reductions_of_a_slice_to_one_number_give_numpy_s_scalars(sliced):
    for result in (sliced.sum(), sliced.max(), sliced.mean(), np.sum(sliced)):
        assert isinstance(result, np.floating)
    assert sliced.sum() == 15


def test_a_slice_of_bfloat16_computes_too():
    sliced = np.ones(4, ml_dtypes.bfloat16).view(SlicedArray)
    assert type(sliced + sliced) is np.ndarray
    assert (sliced + sliced).dtype == ml_dtypes.bfloat16


def test_a_slice_is_an_array_that_can_become_a_tensor(sliced):
    tensor = sliced.to(device="cpu", dtype=torch.float16)
    assert tensor.dtype is torch.float16
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert sliced.to().dtype is torch.float32
    assert sliced.to("cpu").shape == (2, 3)
    assert sliced[0].to(dtype=torch.float64).tolist() == [0, 1, 2]


def test_a_tensor_of_a_slice_shares_its_memory(sliced):
    tensor = sliced.to()
    sliced[0, 0] = 9
    assert tensor[0, 0] == 9


@pytest.mark.parametrize("dtype", WHOLE_BYTES)
@pytest.mark.parametrize("seen", [lambda a: a, lambda a: a.T, lambda a: a[0, 0], lambda a: a[:0]])
def test_a_slice_of_any_dtype_becomes_the_same_tensor(dtype, seen):
    array = np.asarray(seen(sample(dtype, (4, 6))))
    tensor = array.view(SlicedArray).to(device="cpu")
    assert tensor.dtype is getattr(torch, dtype.torch_name)
    assert tuple(tensor.shape) == array.shape
    raw = tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor
    assert bytes(raw.numpy() if tensor.numel() else b"") == np.ascontiguousarray(array).tobytes()


def test_a_slice_of_f4_says_how_to_get_a_tensor():
    with pytest.raises(UnsupportedDType, match=r"ref\.torch\(\)"):
        sample("F4", (4,)).view(SlicedArray).to()


def test_a_read_only_slice_becomes_a_tensor_of_its_own(sliced):
    sliced.flags.writeable = False
    tensor = sliced.to()
    tensor += 1
    assert sliced[0, 0] == 0


def test_a_slice_can_be_pickled(sliced):
    assert same_bits(pickle.loads(pickle.dumps(sliced)), sliced)


MIB = 1024 * 1024


@pytest.mark.parametrize("shape", [(4 * MIB,), (2048, 4096), (33 * MIB,), (1, 64, MIB)])
def test_a_large_array_begins_on_a_huge_page(shape):
    array = empty(shape, np.dtype(np.uint8))
    assert array.ctypes.data % (2 * MIB) == 0
    assert array.shape == shape
    assert array.flags.c_contiguous
    assert array.flags.writeable


@pytest.mark.parametrize("nbytes", [0, 1, 4 * MIB - 1, 4 * MIB + 1, 5 * MIB])
def test_an_array_that_would_waste_a_huge_page_is_numpys_own(nbytes):
    assert empty((nbytes,), np.dtype(np.uint8)).flags.owndata
