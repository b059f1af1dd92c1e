"""Blocks: every unit once, none too long, and few of them in memory however many contribute."""

import numpy as np
import pytest

from weighlock.combining.plan import Part, kept_blocks, plan_blocks, row_bytes
from weighlock.combining.sums import WeightedSum
from weighlock.tensors.ref import ArrayRef


def part(dtype, shape, rows=2):
    refs = tuple(ArrayRef.of("t", np.broadcast_to(np.zeros((), dtype), shape)) for _ in range(rows))
    how = WeightedSum((refs[0].dtype,) * rows, (1.0,) * rows, refs[0].dtype)
    return Part(refs[0].spec, refs, tuple(range(rows)), how)


@pytest.mark.parametrize("length", [1024, 4096, 100_000, 1 << 20])
def test_blocks_are_a_partition(length):
    parts = [part(np.float32, (1000, 77)), part(np.uint8, (0, 3)), part(np.complex64, (5,))]
    parts.append(part(np.float64, (100_001,)))
    blocks = list(plan_blocks(parts, length))
    for number, whole in enumerate(parts):
        mine = [block for block in blocks if block.part == number]
        assert [block.first for block in mine] == [
            sum(block.units for block in mine[:n]) for n in range(len(mine))
        ]
        assert sum(block.units for block in mine) == whole.units
        assert [block.is_first for block in mine] == [True] + [False] * (len(mine) - 1)
        assert all(block.units * whole.row_width <= length for block in mine)
        assert all(block.first % 64 == 0 for block in mine)


def test_a_tensor_of_terabytes_is_planned_without_a_list():
    blocks = plan_blocks([part(np.float32, (1 << 40,))], 1 << 19)
    assert next(blocks).units == 1 << 17
    assert next(blocks).first == 1 << 17


@pytest.mark.parametrize("is_remote", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 8, 16, 17, 64, 65, 1000])
def test_rows_get_shorter_with_their_number(rows, is_remote):
    sources = rows if is_remote else 0
    length = row_bytes(rows, under_way=4, sources=sources)
    kept = sources * kept_blocks(sources) << 20
    assert 4 * rows * length + kept <= 100 << 20
    assert length >= 1024


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("rows", [2, 8, 64])
def test_what_threads_make_of_rows_is_counted(rows, threads):
    """Of two models of bf16 behind URLs, four threads make more than the rows themselves."""
    under_way = threads + 2
    length = row_bytes(rows, under_way=under_way, threads=threads, sources=rows)
    made = threads * 7 * length
    assert under_way * rows * length + made <= 88 << 20
