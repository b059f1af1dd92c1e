"""Tensors in a source: which bytes are read for what."""

import itertools

import numpy as np
import pytest
from unit_samples import Memory, same_bits, sample

from weighlock.errors import LayoutError, ShortRead, SourceError
from weighlock.tensors.dtypes import DType
from weighlock.tensors.spec import Layout, Span, TensorSpec
from weighlock.tensors.stored import GATHERED_BYTES, StoredRef


def stored(array, offset=0, **source):
    data = b"-" * offset + array.tobytes() + b"-" * 16
    spec = TensorSpec("weight", array.dtype, array.shape)
    return StoredRef(spec, Memory(data, **source), Span(offset, array.nbytes))


def test_making_a_ref_reads_nothing():
    ref = stored(sample("F32", (4, 6)))
    ref.renamed("other").identity()
    repr(ref)
    assert ref.source.reads == []


def test_loading_is_one_read():
    ref = stored(sample("F32", (4, 6)), offset=10)
    ref.load()
    ref.torch()
    ref.load(out=bytearray(96))
    assert ref.source.reads == [(10, 96)] * 3


@pytest.mark.parametrize(
    ("index", "reads"),
    [
        (2, [(10 + 48, 24)]),
        (slice(1, 3), [(10 + 24, 48)]),
        ((2, 3), [(10 + 60, 4)]),
        ((2, slice(1, 4)), [(10 + 52, 12)]),
        (..., [(10, 96)]),
        (slice(3, 1), []),
        ((slice(None), 5), [(10 + 20, 76)]),  # from the first wanted element to the last
        (slice(None, None, -1), [(10, 96)]),
        ((slice(1, 4, 2), slice(2, 4)), [(10 + 32, 56)]),
    ],
    ids=repr,
)
def test_a_slice_reads_its_bytes_once_and_no_others(index, reads):
    array = sample("F32", (4, 6))
    ref = stored(array, offset=10)
    assert same_bits(ref[index], array[index])
    assert ref.source.reads == reads


def cover(array, index):
    """First byte and number of bytes of the smallest run that holds a slice."""
    positions = np.arange(array.size).reshape(array.shape)[index]
    low, high = positions.min(), positions.max()
    return int(low) * array.itemsize, int(high - low + 1) * array.itemsize


def test_no_slice_ever_reads_more_than_what_covers_it():
    array = sample("U16", (6, 5, 7))
    keys = [slice(None), slice(1, 4), slice(None, None, 2), slice(None, None, -2), 2, slice(3, 4)]
    for index in itertools.product(keys, repeat=3):
        ref = stored(array)
        assert same_bits(ref[index], array[index])
        first, count = cover(array, index)
        assert sum(length for _, length in ref.source.reads) <= count
        for offset, length in ref.source.reads:
            assert first <= offset
            assert offset + length <= first + count


def test_wide_rows_are_read_apart():
    # 160 kB from row to row: reading over the gaps would cost more than a read for each.
    array = sample("F32", (8, 40_000))
    ref = stored(array)
    assert same_bits(ref[:, 100:200], array[:, 100:200])
    assert ref.source.reads == [(row * 160_000 + 400, 400) for row in range(8)]


def test_a_large_gather_goes_through_a_bounded_buffer():
    array = np.arange(6 << 20, dtype=np.uint32).reshape(-1, 1024)
    ref = stored(array)
    assert np.array_equal(ref[:, ::2], array[:, ::2])
    assert max(length for _, length in ref.source.reads) <= 8 << 20
    assert sum(length for _, length in ref.source.reads) <= array.nbytes


def test_f4_slices_read_the_bytes_that_hold_them():
    array = sample("F4", (4, 6))
    codes = array.view(np.uint8).reshape(-1)
    packed = (codes[0::2] | codes[1::2] << 4).tobytes()
    spec = TensorSpec("weight", "F4", (4, 6))

    def ref():
        return StoredRef(spec, Memory(packed), Span(0, 12))

    for index, reads in [(1, [(3, 3)]), ((1, 3), [(4, 1)]), ((1, slice(1, 4)), [(3, 2)])]:
        made = ref()
        assert same_bits(made[index], array[index])
        assert made.source.reads == reads
    keys = [slice(None), slice(1, 3), slice(None, None, -1), slice(1, None, 2), 3]
    for index in itertools.product(keys, repeat=2):
        assert same_bits(ref()[index], array[index])


def test_pieces_fill_one_buffer_again_and_again():
    array = sample("U8", (100,))
    ref = stored(array, offset=3)
    pieces = [bytes(piece) for piece in ref.pieces(32)]
    assert [len(piece) for piece in pieces] == [32, 32, 32, 4]
    assert b"".join(pieces) == array.tobytes()
    assert ref.source.reads == [(3, 32), (35, 32), (67, 32), (99, 4)]


def test_pieces_of_a_strided_tensor_are_no_longer_than_asked_for():
    array = sample("F32", (30, 40))
    spec, layout = TensorSpec("a", "F32", (40, 30)), Layout(0, (40, 30), (1, 40))
    ref = StoredRef(spec, Memory(array.tobytes()), Span(0, 4800), layout)
    pieces = [bytes(piece) for piece in ref.pieces(1003)]
    assert [len(piece) for piece in pieces] == [1000, 1000, 1000, 1000, 800]
    assert b"".join(pieces) == np.ascontiguousarray(array.T).tobytes()
    assert ref.source.reads == [(0, 4800)]  # gathered once, however it is handed on


@pytest.mark.parametrize("rows", [9000, 30_000])
def test_a_large_transposed_tensor_takes_a_read_for_each_column_and_part(rows):
    columns = 45_000_000 // rows  # two parts
    array = np.arange(rows * columns, dtype=np.uint16).astype(np.uint8).reshape(columns, rows)
    spec, layout = TensorSpec("a", "U8", (rows, columns)), Layout(0, (rows, columns), (1, rows))
    ref = StoredRef(spec, Memory(array.data.cast("B")), Span(0, array.nbytes), layout)
    expected = iter(array.T)
    for piece in ref.pieces(columns):
        assert piece == next(expected).tobytes()
    assert GATHERED_BYTES < array.nbytes <= 2 * GATHERED_BYTES
    assert len(ref.source.reads) <= 2 * columns
    # Gaps up to a page are read over, and longer ones where what they part is longer still.
    assert sum(length for _, length in ref.source.reads) <= 2 * array.nbytes


def test_the_bytes_of_a_file_copy_only_where_they_lie_in_order():
    array = sample("F32", (4, 6))
    source = Memory(array.tobytes())
    whole = StoredRef(TensorSpec("a", "F32", (4, 6)), source, Span(0, 96))
    assert whole.contiguous_span == Span(0, 96)
    rows = StoredRef(TensorSpec("a", "F32", (2, 6)), source, Span(0, 96), Layout(6, (2, 6), (6, 1)))
    assert rows.contiguous_span == Span(24, 48)
    assert same_bits(rows.load(), array[1:3])
    columns = StoredRef(
        TensorSpec("a", "F32", (6, 4)), source, Span(0, 96), Layout(0, (6, 4), (1, 6))
    )
    assert columns.contiguous_span is None
    assert same_bits(columns.load(), array.T)
    assert same_bits(columns[1:3, ::-1], array.T[1:3, ::-1])
    assert b"".join(map(bytes, columns.pieces(20))) == np.ascontiguousarray(array.T).tobytes()
    backwards = StoredRef(
        TensorSpec("a", "F32", (24,)), source, Span(0, 96), Layout(23, (24,), (-1,))
    )
    assert same_bits(backwards.load(), array.reshape(-1)[::-1])
    repeated = StoredRef(
        TensorSpec("a", "F32", (3, 6)), source, Span(0, 96), Layout(6, (3, 6), (0, 1))
    )
    assert same_bits(repeated.load(), np.broadcast_to(array[1], (3, 6)))


@pytest.mark.parametrize(
    ("length", "layout"),
    [
        (95, None),
        (97, None),
        (96, Layout(1, (4, 6), (6, 1))),
        (96, Layout(0, (4, 6), (7, 1))),
        (96, Layout(0, (4, 6), (-6, 1))),
        (96, Layout(0, (6, 4), (4, 1))),
        (96, Layout(-1, (4, 6), (6, 1))),
    ],
)
def test_a_layout_outside_its_span_is_refused_by_name(length, layout):
    with pytest.raises(LayoutError, match="'weight'"):
        StoredRef(TensorSpec("weight", "F32", (4, 6)), Memory(b""), Span(0, length), layout)


def test_f6_cannot_be_gathered():
    spec = TensorSpec("weight", DType.F6_E2M3, (4, 4))
    ref = StoredRef(spec, Memory(bytes(12)), Span(0, 12), Layout(0, (4, 4), (1, 4)))
    with pytest.raises(LayoutError, match="'weight'"):
        list(ref.pieces())


def test_errors_of_the_source_pass():
    failing = stored(sample("F32", (4, 6)), fails_at=40)
    failing[0]
    with pytest.raises(SourceError):
        failing.load()
    with pytest.raises(SourceError):
        failing[:, 5]
    short = StoredRef(TensorSpec("a", "U8", (100,)), Memory(bytes(50)), Span(0, 100))
    with pytest.raises(ShortRead):
        short.load()


def test_the_same_bytes_of_one_source_are_the_same_tensor():
    source = Memory(bytes(200))
    spec = TensorSpec("a", "F32", (4, 6))
    ref = StoredRef(spec, source, Span(8, 96))
    assert ref.identity() == StoredRef(spec.renamed("b"), source, Span(8, 96)).identity()
    layout = Layout.contiguous((4, 6), start=1)
    assert ref.identity() == StoredRef(spec, source, Span(4, 100), layout).identity()
    for other in (
        StoredRef(spec, source, Span(12, 96)),
        StoredRef(spec, Memory(bytes(200)), Span(8, 96)),
        StoredRef(TensorSpec("a", "I32", (4, 6)), source, Span(8, 96)),
        StoredRef(TensorSpec("a", "F32", (6, 4)), source, Span(8, 96)),
        StoredRef(TensorSpec("a", "F32", (6, 4)), source, Span(8, 96), Layout(0, (6, 4), (1, 6))),
    ):
        assert other.identity() != ref.identity()
