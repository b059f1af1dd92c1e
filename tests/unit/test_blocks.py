"""A tensor as equal blocks of elements, whatever pieces it comes in."""

import numpy as np
import pytest
from unit_samples import Memory, file_bytes, same_bits, sample, tensor_of

from weighlock.tensors.blocks import blocks
from weighlock.tensors.convert import CastRef, as_ref
from weighlock.tensors.dtypes import DType
from weighlock.tensors.spec import Layout, Span, TensorSpec
from weighlock.tensors.stored import StoredRef


def stored(array):
    data = file_bytes(array)
    spec = TensorSpec("a", array.dtype, array.shape)
    return StoredRef(spec, Memory(data), Span(0, len(data)))


def column_major(array):
    data = np.ascontiguousarray(array.T).tobytes()
    spec = TensorSpec("a", array.dtype, array.shape)
    layout = Layout(0, array.shape, (1, array.shape[0]))
    return StoredRef(spec, Memory(data), Span(0, len(data)), layout)


def refs(array):
    yield as_ref("a", array)
    yield as_ref("a", np.asfortranarray(array))
    yield as_ref("a", tensor_of(array))
    yield stored(array)
    if DType.of(array.dtype) is not DType.F4:
        yield as_ref("a", tensor_of(array.T.copy()).T)
        yield column_major(array)


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F8_E4M3", "F64", "BOOL", "C64", "F4"])
@pytest.mark.parametrize("elements", [2, 8, 14, 100, 1000])
def test_blocks_are_equal_whatever_the_ref(dtype, elements):
    array = sample(dtype, (10, 14))
    flat = array.reshape(-1)
    for ref in refs(array):
        found = [block.copy() for block in blocks(ref, elements)]
        sizes = [min(elements, 140 - first) for first in range(0, 140, elements)]
        assert [block.size for block in found] == sizes
        assert same_bits(np.concatenate(found), flat)


def test_an_odd_number_of_f4_is_rounded_up_to_whole_bytes():
    array = sample("F4", (10,))
    found = [block.copy() for block in blocks(stored(array), 3)]
    assert [block.size for block in found] == [4, 4, 2]
    assert same_bits(np.concatenate(found), array)


def test_blocks_of_one_number_and_of_nothing():
    for ref in (as_ref("a", np.float32(5)), stored(np.array(5, np.float32))):
        (block,) = blocks(ref, 4)
        assert block.tolist() == [5]
    empty = np.empty((0, 3), np.float32)
    for ref in (as_ref("a", empty), as_ref("a", tensor_of(empty)), stored(empty)):
        assert list(blocks(ref, 4)) == []
        assert list(blocks(CastRef.of(ref, DType.F16), 4)) == []


@pytest.mark.parametrize("elements", [1, 3, 5, 64])
def test_blocks_of_a_cast(elements):
    array = np.arange(50, dtype=np.float64)
    for original in (as_ref("a", array), stored(array), as_ref("a", array[::-1])):
        ref = CastRef.of(original, DType.BF16)
        found = np.concatenate([block.copy() for block in blocks(ref, elements)])
        assert same_bits(found, original.load().astype(DType.BF16.numpy))


def test_f6_comes_as_packed_bytes():
    data = bytes(range(24))
    ref = StoredRef(TensorSpec("a", "F6_E3M2", (32,)), Memory(data), Span(0, 24))
    assert [bytes(block) for block in blocks(ref, 16)] == [data[:16], data[16:]]


def test_reading_stays_within_a_block_at_a_time():
    ref = stored(sample("F32", (1000,)))
    for _ in blocks(ref, 100):
        pass
    assert max(length for _, length in ref.source.reads) <= 400
