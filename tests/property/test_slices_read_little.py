"""Slices equal numpy's, and read no byte they could do without.

The reads are counted by a source that stands between the refs and the bytes; that one passes the
suite of all sources.
"""

import math

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

import weighlock
from hostile.make import entry, file_bytes
from property.strategies import DTYPES, WHOLE, f4_of, indices, shapes, steady
from suites.counting import CountingSource
from weighlock import DType
from weighlock.errors import LayoutError
from weighlock.sources.local import BytesSource
from weighlock.tensors.slicing import GAP_BYTES, PIECE_BYTES, narrow, plan
from weighlock.tensors.spec import Layout, Span, TensorSpec
from weighlock.tensors.stored import StoredRef

SLICEABLE = [*WHOLE, DType.F4]


def payload(dtype, count, seed=0):
    raw = np.random.default_rng([seed, count]).integers(0, 256, count, np.uint8)
    return (raw % 2 if dtype is DType.BOOL else raw).tobytes()


def stored(dtype, shape):
    """A ref into a counted source, and the array it should load as."""
    raw = payload(dtype, math.prod(shape) * dtype.bits // 8)
    header = {
        "before": entry("U8", (3,), (0, 3)),
        "t": entry(dtype.value, shape, (3, 3 + len(raw))),
        "after": entry("U8", (5,), (3 + len(raw), 8 + len(raw))),
    }
    source = CountingSource(BytesSource(file_bytes(header, b"abc" + raw + b"defgh")))
    ref = weighlock.open(source)["t"]
    source.taken()
    elements = f4_of(raw) if dtype is DType.F4 else raw
    return ref, np.frombuffer(elements, np.uint8).view(dtype.numpy).reshape(shape)


def positions(shape, index):
    """Which elements of a row-major tensor an index chooses."""
    return np.arange(math.prod(shape)).reshape(shape)[index]


def covering_bytes(ref, chosen):
    """The smallest run of bytes of the source that holds the chosen elements."""
    if chosen.size == 0:
        return ref.span.offset, ref.span.offset
    low, high = int(chosen.min()), int(chosen.max()) + 1
    bits = ref.dtype.bits
    return ref.span.offset + low * bits // 8, ref.span.offset + -(-high * bits // 8)


def assert_same_bits(found, expected):
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert np.asarray(found).tobytes() == np.asarray(expected).tobytes()


def assert_disjoint(reads):
    reached = 0
    for offset, length in sorted(reads):
        assert offset >= reached
        reached = offset + length


@pytest.mark.parametrize("dtype", SLICEABLE)
@steady(40)
@given(data=st.data())
def test_slices_equal_those_of_numpy_and_stay_within_their_cover(dtype, data):
    shape = data.draw(shapes(dtype, max_rank=5))
    index = data.draw(indices(shape))
    ref, expected = stored(dtype, shape)
    found = ref[index]
    reads = ref.source.taken()
    assert_same_bits(found, np.asarray(expected[index]))
    low, high = covering_bytes(ref, positions(shape, index))
    assert all(low <= offset and offset + length <= high for offset, length in reads)
    assert_disjoint(reads)
    assert_same_bits(ref.load(), expected)
    assert ref.source.taken() == ([(ref.span.offset, ref.nbytes)] if ref.nbytes else [])


@pytest.mark.parametrize("dtype", WHOLE)
@steady(15)
@given(data=st.data())
def test_rows_are_one_read_of_exactly_their_bytes(dtype, data):
    shape = data.draw(shapes(dtype).filter(len))
    first, last = sorted(data.draw(st.tuples(*[st.integers(0, shape[0])] * 2)))
    ref, expected = stored(dtype, shape)
    row_bytes = ref.nbytes // shape[0] if shape[0] else 0
    assert_same_bits(ref[first:last], expected[first:last])
    wanted = (ref.span.offset + first * row_bytes, (last - first) * row_bytes)
    assert ref.source.taken() == ([wanted] if wanted[1] else [])
    if first < shape[0]:
        assert_same_bits(ref[first], np.asarray(expected[first]))
        wanted = (ref.span.offset + first * row_bytes, row_bytes)
        assert ref.source.taken() == ([wanted] if row_bytes else [])


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.bits == 6])
@steady(40)
@given(data=st.data())
def test_slices_of_six_bits_are_whole_bytes_or_refused(dtype, data):
    shape = data.draw(shapes(dtype))
    index = data.draw(indices(shape))
    raw = payload(dtype, math.prod(shape) * 6 // 8)
    ref = weighlock.open(file_bytes({"t": entry(dtype.value, shape, (0, len(raw)))}, raw))["t"]
    assert ref.load().tobytes() == raw
    chosen = positions(shape, index).reshape(-1)
    try:
        found = ref[index].tobytes()
    except LayoutError:
        whole = chosen.size and chosen[0] * 6 % 8 == 0 and chosen.size * 6 % 8 == 0
        assert not (whole and (np.diff(chosen) == 1).all())
        return
    first = int(chosen[0]) * 6 // 8 if chosen.size else 0
    assert found == raw[first : first + chosen.size * 6 // 8]


BIG_BYTES = 24 * 1024 * 1024


@pytest.fixture(scope="module")
def big():
    """Many megabytes to slice: more than a gap, and more than a piece."""
    return CountingSource(BytesSource(np.random.default_rng(0).bytes(BIG_BYTES)))


BIG_SHAPES = [
    *((BIG_BYTES,), (24, 1024, 1024), (3, 8 * 1024 * 1024), (2048, 12 * 1024), (BIG_BYTES // 8, 8)),
    *((4, 3, 2, 1024 * 1024), (6, 1, 4 * 1024 * 1024), (12 * 1024 * 1024, 2)),
]


@steady(80)
@given(st.data())
def test_slices_of_big_tensors_skip_gaps_and_read_nothing_twice(big, data):
    shape = data.draw(st.sampled_from(BIG_SHAPES))
    index = data.draw(indices(shape))
    chosen = Layout.contiguous(shape)
    narrowed = narrow(chosen, index)
    assume(narrowed.size <= 1_000_000)
    ref = StoredRef(TensorSpec("t", DType.U8, shape), big, Span(0, BIG_BYTES))
    big.taken()
    found = ref[index]
    reads = big.taken()
    whole = np.frombuffer(big.source._view, np.uint8).reshape(shape)
    assert_same_bits(found, np.asarray(whole[index]))
    low, count = narrowed.cover()
    assert all(low <= offset and offset + length <= low + count for offset, length in reads)
    assert_disjoint(reads)
    assert all(length <= max(PIECE_BYTES, narrowed.size) for _, length in reads)
    # What is read beyond what is wanted are gaps that are cheaper to read over than to skip.
    assert sum(length for _, length in reads) <= narrowed.size * (1 + GAP_BYTES)


def test_one_column_of_long_rows_is_read_element_by_element(big):
    shape = (24, 1024 * 1024)
    ref = StoredRef(TensorSpec("t", DType.U8, shape), big, Span(0, BIG_BYTES))
    big.taken()
    ref[:, 5]
    assert big.taken() == [(row * 1024 * 1024 + 5, 1) for row in range(24)]


def test_one_column_of_short_rows_is_read_in_pieces(big):
    shape = (BIG_BYTES // 1024, 1024)
    ref = StoredRef(TensorSpec("t", DType.U8, shape), big, Span(0, BIG_BYTES))
    big.taken()
    ref[:, 5]
    reads = big.taken()
    assert len(reads) == math.ceil(BIG_BYTES / PIECE_BYTES)
    assert all(length <= PIECE_BYTES for _, length in reads)


@st.composite
def layouts(draw):
    """Layouts as slices, transposes and broadcasts make them, over tensors of any width."""
    rank = draw(st.integers(0, 4))
    shape = tuple(draw(st.lists(st.integers(0, 6), min_size=rank, max_size=rank)))
    strides, step = [], draw(st.sampled_from([1, 1, 2, 1000]))
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size) * draw(st.sampled_from([1, 1, 1, 2, 5000, 70_000]))
        assume(step < 2**50)
    layout = Layout(draw(st.integers(0, 50)), shape, tuple(reversed(strides)))
    layout = narrow(layout, draw(indices(shape)))
    order = draw(st.permutations(range(len(layout.shape))))
    shape = tuple(layout.shape[axis] for axis in order)
    strides = tuple(layout.strides[axis] for axis in order)
    if shape and draw(st.integers(0, 4)) == 0:
        strides = (0, *strides[1:])
    return Layout(layout.start, shape, strides)


def places(layout):
    """The position of every element of a layout."""
    found = np.full(layout.shape, layout.start, np.int64)
    for axis, (size, stride) in enumerate(zip(layout.shape, layout.strides, strict=True)):
        steps = np.arange(size) * stride
        found += steps.reshape([-1 if other == axis else 1 for other in range(len(layout.shape))])
    return found


@steady(300)
@given(layouts(), st.sampled_from([1, 2, 4, 8]))
def test_pieces_are_a_partition_of_the_result(layout, itemsize):
    expected = places(layout)
    times = np.zeros(layout.shape, np.int64)
    low, count = layout.cover()
    for piece in [read for together in plan(layout, itemsize) for read in together.reads()]:
        target = piece.target
        assert len(target) == len(layout.shape)
        np.add.at(times, (*target, ...), 1)
        assert np.array_equal(places(piece.layout), expected[(*target, ...)])
        first, covered = piece.layout.cover()
        assert low <= first
        assert first + covered <= low + count
        assert piece.layout.is_contiguous or covered * itemsize <= PIECE_BYTES
    assert (times == 1).all()


class Endless:
    """A source whose bytes follow from where they are, so that gaps cost nothing."""

    @staticmethod
    def at(places):
        return (places.astype(np.uint64) * np.uint64(2654435761) >> np.uint64(9)).astype(np.uint8)

    def read_into(self, offset, buffer):
        buffer[:] = self.at(np.arange(offset, offset + len(buffer))).tobytes()


@steady(300)
@given(layouts(), st.sampled_from(["U8", "BF16", "F32"]), st.integers(1, 300))
@example(Layout(3, (2, 3), (1, 70_000)), "F32", 8)
@example(Layout(9, (3, 2, 5), (1, 4, 50_000)), "BF16", 7)
@example(Layout(400_000, (4, 3, 2), (-1, 10, -200_000)), "U8", 5)
@example(Layout(0, (3, 2, 2), (1_000_000, 1, 70_000)), "F32", 16)
def test_elements_far_apart_are_put_in_their_places(layout, dtype, max_bytes):
    spec = TensorSpec("t", dtype, layout.shape)
    low, count = layout.cover()
    assume(low >= 0)
    width = spec.dtype.bits // 8
    ref = StoredRef(spec, Endless(), Span(7, (low + count) * width), layout)
    within = np.arange(7, 7 + width)
    expected = Endless.at(places(layout)[..., None] * width + within).tobytes()
    assert ref.load().tobytes() == expected
    pieces = [bytes(piece) for piece in ref.pieces(max_bytes)]
    assert b"".join(pieces) == expected
    assert all(len(piece) <= max(max_bytes, width) for piece in pieces)


@steady(300)
@given(st.data())
def test_strided_tensors_of_a_source_are_read_as_numpy_would(data):
    """Layouts other than row-major, as checkpoints of other formats have them."""
    dtype = data.draw(st.sampled_from(WHOLE))
    base = data.draw(shapes(dtype, max_rank=3, max_side=4))
    count = math.prod(base)
    raw = payload(dtype, count * dtype.bits // 8)
    array = np.frombuffer(raw, np.uint8).view(dtype.numpy).reshape(base)
    cut, order = data.draw(indices(base)), None
    view = np.asarray(array[cut])
    layout = narrow(Layout.contiguous(base), cut)
    order = data.draw(st.permutations(range(view.ndim)))
    view = view.transpose(order)
    layout = Layout(
        layout.start if view.size else 0,
        tuple(layout.shape[axis] for axis in order),
        tuple(layout.strides[axis] for axis in order),
    )
    source = CountingSource(BytesSource(b"xyz" + raw))
    ref = StoredRef(TensorSpec("t", dtype, view.shape), source, Span(3, len(raw)), layout)
    assert_same_bits(ref.load(), view)
    low, covered = layout.cover()
    width = dtype.bits // 8
    for offset, length in source.taken():
        assert 3 + low * width <= offset
        assert offset + length <= 3 + (low + covered) * width
    index = data.draw(indices(view.shape))
    assert_same_bits(ref[index], np.asarray(view[index]))
    most = data.draw(st.sampled_from([1, 7, 16, 1000]))
    assert b"".join(bytes(piece) for piece in ref.pieces(most)) == view.tobytes()
    out = bytearray(view.nbytes)
    ref.load(out=out)
    assert bytes(out) == view.tobytes()
    scattered = np.zeros((*view.shape, 2), dtype.numpy)[..., 0]
    ref.load(out=scattered)
    assert_same_bits(scattered, view)


ODD_INDICES = [
    True,
    None,
    1.0,
    "1",
    [0],
    (0, [1]),
    np.array([0, 1]),
    np.array([True, False]),
    np.True_,
    (..., ...),
    (0, 0, 0),
    7,
    -8,
]


@pytest.mark.parametrize("index", ODD_INDICES, ids=repr)
def test_indices_that_need_a_loaded_array_are_refused_and_nothing_is_read(index):
    ref, _ = stored(DType.F32, (7, 2))
    with pytest.raises(IndexError):
        ref[index]
    assert ref.source.taken() == []


def test_numpy_integers_are_indices():
    ref, expected = stored(DType.F32, (7, 2))
    assert_same_bits(ref[np.int64(3), np.uint8(1)], np.asarray(expected[3, 1]))
    assert_same_bits(ref[np.int64(1) : np.int64(5)], expected[1:5])
    assert_same_bits(ref[np.array(2)], expected[2])
