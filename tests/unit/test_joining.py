"""Buffers joined to bytes: the same bytes as Python's own join, and real ones."""

import pickle

import numpy as np
import pytest

from weighlock.joining import join_buffers

MB = 1 << 20


@pytest.mark.parametrize(
    "sizes",
    [
        [],
        [0],
        [1, 0, 5],
        [8 * MB - 1],
        [8 * MB],
        [3 * MB + 1, 0, 9 * MB + 7, 13],
        [1] * 1000 + [8 * MB],
    ],
    ids=["nothing", "empty", "small", "just below", "just long", "long", "many"],
)
def test_buffers_are_joined(sizes):
    rng = np.random.default_rng(3)
    buffers = [rng.bytes(size) for size in sizes]
    mixed = [memoryview(b) if number % 2 else b for number, b in enumerate(buffers)]
    expected = b"".join(buffers)
    found = join_buffers(mixed)
    assert type(found) is bytes
    assert found == expected
    assert hash(found) == hash(expected)
    assert pickle.loads(pickle.dumps(found)) == expected
    assert len(found + b"x") == len(expected) + 1


def test_what_was_joined_is_let_go_again():
    import gc
    import tracemalloc

    buffer = bytes(16 * MB)
    join_buffers([buffer])
    gc.collect()
    tracemalloc.start()
    try:
        for _ in range(5):
            join_buffers([buffer, buffer])
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < MB
    finally:
        tracemalloc.stop()
