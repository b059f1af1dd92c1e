"""The grid of blocks and ranges over a file."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighlock.sources.grid import (
    BLOCK_BYTES,
    BLOCKS_PER_PAGE,
    RANGE_BYTES,
    block_count,
    block_span,
    blocks_of,
    page_blocks,
    runs,
)
from weighlock.tensors.spec import Span

SIZES = st.one_of(
    st.integers(0, 5 * BLOCK_BYTES),
    st.integers(0, 3000).map(lambda blocks: blocks * BLOCK_BYTES),
    st.integers(0, 10**15),
)


@pytest.mark.parametrize(
    ("size", "count"),
    [
        (0, 0),
        (1, 1),
        (BLOCK_BYTES - 1, 1),
        (BLOCK_BYTES, 1),
        (BLOCK_BYTES + 1, 2),
        (10**13, 9_536_744),
    ],
)
def test_number_of_blocks(size, count):
    assert block_count(size) == count


@given(st.integers(0, 5 * BLOCK_BYTES))
def test_blocks_lie_end_to_end_and_are_full_but_for_the_last(size):
    reached = 0
    for block in range(block_count(size)):
        span = block_span(block, size)
        assert span.offset == reached == block * BLOCK_BYTES
        assert 0 < span.length <= BLOCK_BYTES
        reached = span.end
        assert span.length == BLOCK_BYTES or reached == size
    assert reached == size


@given(st.integers(0, 10**13), st.integers(0, 10**8))
def test_blocks_of_a_span_cover_it_and_none_is_too_many(offset, length):
    blocks = blocks_of(Span(offset, length))
    if not length:
        assert len(blocks) == 0
        return
    assert blocks.start * BLOCK_BYTES <= offset < (blocks.start + 1) * BLOCK_BYTES
    last = offset + length - 1
    assert (blocks.stop - 1) * BLOCK_BYTES <= last < blocks.stop * BLOCK_BYTES


@given(SIZES.filter(lambda size: size < 10**11))
def test_pages_hold_every_block_once(size):
    pages = -(-block_count(size) // BLOCKS_PER_PAGE)
    found = [block for page in range(pages) for block in page_blocks(page, size)]
    assert found == list(range(block_count(size)))
    assert len(page_blocks(pages, size)) == 0
    assert len(page_blocks(pages + 7, size)) == 0


@given(st.lists(st.integers(0, 60), unique=True).map(sorted))
def test_runs_are_the_blocks_again_each_inside_one_range(blocks):
    found = list(runs(blocks))
    assert [block for run in found for block in run] == blocks
    per_range = RANGE_BYTES // BLOCK_BYTES
    for run in found:
        assert run.start // per_range == (run.stop - 1) // per_range
    for before, after in itertools.pairwise(found):
        # Two runs are one request fewer wherever that is possible.
        assert before.stop < after.start or after.start % per_range == 0


def test_runs_of_a_whole_file_are_its_ranges():
    assert list(runs(range(20))) == [range(8), range(8, 16), range(16, 20)]
    assert list(runs([])) == []
