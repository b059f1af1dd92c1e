"""Which bytes a slice needs: against numpy, element by element."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weighlock.tensors import slicing
from weighlock.tensors.slicing import narrow, plan, row_blocks
from weighlock.tensors.spec import Layout

S = slice
INDICES = [
    (),
    0,
    -1,
    (1, 2),
    (1, 2, 3),
    (-1, -1, -1),
    S(None),
    S(1, 3),
    S(3, 1),
    S(None, None, 2),
    S(None, None, -1),
    S(-2, None),
    S(10, 20),
    S(3, None, -2),
    (S(1, 3), 0),
    (0, S(1, 3)),
    (S(None), 1, S(None, None, 2)),
    (S(None, None, -1), S(None, None, -2), S(None, None, 3)),
    ...,
    (..., 0),
    (0, ...),
    (0, ..., 1),
    (..., S(1, 3)),
    (1, 2, 3, ...),
    (np.int64(1), np.uint8(2)),
    (S(np.int64(1), np.int64(3)), 0),
    np.array(2),
    (S(0, 0), 1),
]


def elements(layout):
    """The positions of a layout's elements, as an array of its shape."""
    found = np.empty(layout.shape, np.int64)
    for index in itertools.product(*map(range, layout.shape)):
        steps = zip(index, layout.strides, strict=True)
        found[index] = layout.start + sum(i * step for i, step in steps)
    return found


@pytest.mark.parametrize("index", INDICES, ids=repr)
def test_an_index_narrows_as_numpy_s_does(index):
    shape = (4, 5, 6)
    positions = np.arange(4 * 5 * 6).reshape(shape)
    narrowed = narrow(Layout.contiguous(shape), index)
    assert np.array_equal(elements(narrowed), positions[index])


@pytest.mark.parametrize("index", INDICES, ids=repr)
def test_a_narrowed_layout_narrows_again(index):
    base = narrow(Layout.contiguous((8, 5, 12), start=3), (S(None, None, 2), S(None), S(11, 5, -1)))
    positions = 3 + np.arange(8 * 5 * 12).reshape(8, 5, 12)[::2, :, 11:5:-1]
    assert np.array_equal(elements(narrow(base, index)), positions[index])


@pytest.mark.parametrize("index", [0, (), ..., S(None)], ids=repr)
def test_a_layout_without_dimensions(index):
    layout = Layout.contiguous((), start=5)
    if index in ((), ...):
        assert narrow(layout, index) == layout
    else:
        with pytest.raises(IndexError, match="0 dimensions"):
            narrow(layout, index)


@pytest.mark.parametrize("index", [4, -5, (0, 5), (0, 0, -7)])
def test_an_index_out_of_range_says_so(index):
    with pytest.raises(IndexError, match="out of range for axis"):
        narrow(Layout.contiguous((4, 5, 6)), index)


def test_too_many_indices():
    with pytest.raises(IndexError, match="4 indices for a tensor of 3 dimensions"):
        narrow(Layout.contiguous((4, 5, 6)), (0, 0, 0, 0))
    with pytest.raises(IndexError, match=r"only one '\.\.\.'"):
        narrow(Layout.contiguous((4, 5, 6)), (..., ...))


@pytest.mark.parametrize(
    "index",
    [
        None,
        True,
        np.True_,
        1.5,
        "0",
        [0, 1],
        (0, None),
        np.array([0, 1]),
        np.array([True, False, True, True]),
        (0, np.array([0, 1])),
        torch.tensor([0, 1]),
    ],
    ids=repr,
)
def test_what_needs_a_loaded_array_is_an_index_error_that_says_so(index):
    with pytest.raises(IndexError, match=r"load\(\)"):
        narrow(Layout.contiguous((4, 5, 6)), index)


def test_a_step_of_zero_is_numpy_s_error():
    with pytest.raises(ValueError, match="zero"):
        narrow(Layout.contiguous((4,)), S(None, None, 0))


def reads(layout, itemsize):
    return [read for piece in plan(layout, itemsize) for read in piece.reads()]


def assert_plan_is_right(layout, itemsize):
    """Every element exactly once, in its place, and no read outside the cover."""
    low, count = layout.cover()
    result = np.full(layout.shape, -1, np.int64)
    read = 0
    for piece in reads(layout, itemsize):
        first, length = piece.layout.cover()
        assert low <= first
        assert first + length <= low + count
        assert piece.layout.is_contiguous or length * itemsize <= slicing.PIECE_BYTES
        region = result[piece.target]
        assert np.all(region == -1)
        result[piece.target] = elements(piece.layout).reshape(region.shape)
        read += length
    assert np.array_equal(result, elements(layout))
    return read


# Wide elements stand for large tensors: 8 MiB hold all 120 elements of 4 bytes, 8 of 1 MiB.
@pytest.mark.parametrize("itemsize", [4, 12_000, 100_000, 1 << 20, 1 << 24])
@pytest.mark.parametrize("index", INDICES, ids=repr)
def test_a_plan_takes_every_element_once_and_nothing_outside_the_cover(index, itemsize):
    layout = narrow(Layout.contiguous((4, 5, 6), start=2), index)
    read = assert_plan_is_right(layout, itemsize)
    assert read <= layout.cover()[1]


@pytest.mark.parametrize("itemsize", [4, 12_000, 100_000, 1 << 20, 1 << 24])
def test_transposed_layouts_read_no_byte_twice(itemsize):
    layout = Layout(0, (6, 5, 4), (1, 6, 30))
    assert assert_plan_is_right(layout, itemsize) == 120


def test_contiguous_rows_are_one_piece_of_any_length():
    layout = narrow(Layout.contiguous((1 << 20, 1 << 10)), S(5, 900_000))
    (piece,) = plan(layout, 4)
    assert piece.layout == layout


def test_nothing_needs_no_read():
    assert list(plan(Layout.contiguous((0, 5)), 4)) == []


def test_wide_gaps_are_not_read_over():
    # One element of each row of 1 MiB: a read for each, four bytes long.
    layout = narrow(Layout.contiguous((10, 1 << 18)), (S(None), 7))
    assert [piece.layout.cover()[1] for piece in reads(layout, 4)] == [1] * 10


def test_reads_of_one_shape_are_one_piece_of_bounded_size():
    # 4 KiB out of each of 16,384 columns of 64 KiB: together 64 MiB, taken 8 MiB at a time.
    layout = narrow(Layout(0, (1 << 14, 1 << 14), (1, 1 << 14)), S(1 << 10))
    pieces = list(plan(layout, 4))
    assert {piece.axis for piece in pieces} == {1}
    assert [piece.layout.size * 4 for piece in pieces] == [slicing.PIECE_BYTES] * 8
    assert len(reads(layout, 4)) == 1 << 14


def test_narrow_gaps_are_read_over():
    # Every other column of short rows: one read of the whole, not one for each element.
    layout = narrow(Layout.contiguous((100, 100)), (S(None), S(None, None, 2)))
    (piece,) = plan(layout, 4)
    assert piece.layout == layout


@given(st.lists(st.integers(0, 5), max_size=3).map(tuple), st.integers(1, 20))
def test_row_blocks_are_all_elements_in_order(shape, most):
    array = np.arange(int(np.prod(shape))).reshape(shape)
    blocks = [np.ravel(array[index]) for index in row_blocks(shape, most)]
    assert all(0 < block.size <= most for block in blocks)
    assert [int(n) for block in blocks for n in block] == list(range(array.size))
