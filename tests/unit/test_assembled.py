"""A tensor of chunks is the tensor, whatever the chunks and whatever is asked of it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighlock.errors import LayoutError
from weighlock.tensors.assembled import AssembledRef, Chunk
from weighlock.tensors.ref import ArrayRef
from weighlock.tensors.spec import TensorSpec
from weighlock.tensors.tiling import check_tiling


def assembled(array, boxes):
    chunks = []
    for offsets, sizes in boxes:
        where = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
        chunks.append(Chunk(offsets, ArrayRef.of("a", array[where])))
    return AssembledRef(TensorSpec("a", array.dtype, array.shape), tuple(chunks))


@st.composite
def tilings(draw, offsets, sizes):
    """Boxes that fill a box: it is cut in two, and each half again, or left as it is."""
    axes = [axis for axis, size in enumerate(sizes) if size > 1]
    if not axes or not draw(st.integers(0, 2)):
        return [(offsets, sizes)]
    axis = draw(st.sampled_from(axes))
    cut = draw(st.integers(1, sizes[axis] - 1))
    low = (*sizes[:axis], cut, *sizes[axis + 1 :])
    high = (*sizes[:axis], sizes[axis] - cut, *sizes[axis + 1 :])
    there = (*offsets[:axis], offsets[axis] + cut, *offsets[axis + 1 :])
    return draw(tilings(offsets, low)) + draw(tilings(there, high))


steps = st.integers(-4, 4).filter(bool)
bounds = st.none() | st.integers(-9, 9)
keys = st.integers(-1, 0) | st.builds(slice, bounds, bounds, st.none() | steps)


@st.composite
def cases(draw):
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    boxes = draw(st.permutations(draw(tilings((0,) * len(shape), shape))))
    index = tuple(draw(keys) for _ in range(draw(st.integers(0, len(shape)))))
    return shape, boxes, index


@given(cases())
def test_any_index_of_any_chunks_is_numpy_s(case):
    shape, boxes, index = case
    array = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    ref = assembled(array, boxes)
    np.testing.assert_array_equal(ref[index], array[index])
    np.testing.assert_array_equal(ref.load(), array)
    assert b"".join(map(bytes, ref.pieces(8))) == array.tobytes()
    out = np.zeros(shape[::-1], np.int32).T
    np.testing.assert_array_equal(ref.load(out=out), array)


@pytest.mark.parametrize(
    ("boxes", "says"),
    [
        ([((0, 0), (2, 4))], "hold 8 elements, shape [4, 4] has 16"),
        ([((0, 0), (2, 4)), ((1, 0), (2, 4))], "lies over another"),
        ([((0, 0), (2, 4)), ((3, 0), (2, 4))], "reaches out"),
        ([((0, 0), (2, 4)), ((2, 0), (2, 4)), ((0, 0), (0, 4))], None),
        ([((0, 0), (4, 2)), ((0, 2), (2, 2)), ((0, 2), (2, 2))], "lies over another"),
        ([((0,), (4,))], "1 offsets"),
        ([((-1, 0), (4, 4))], "reaches out"),
        ([], "hold 0 elements"),
    ],
)
def test_what_is_no_tiling_is_refused(boxes, says):
    if says is None:
        check_tiling((4, 4), boxes)
    else:
        with pytest.raises(LayoutError, match=says.replace("[", r"\[")):
            check_tiling((4, 4), boxes)


def test_chunks_that_cut_everything_into_crumbs_are_refused_before_memory_is():
    side = 3000
    diagonal = [((n, n), (1, 1)) for n in range(side)]
    with pytest.raises(LayoutError, match="9,006,001 cells, 4,000,000 are allowed"):
        check_tiling((side, side), [*diagonal, ((0, 0), (side, side - 1))])
