"""Buffers of a thread, and where numpy's own begin."""

import numpy as np
import pytest

from weighlock.combining.desk import Desk


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_casts_begin_on_32_bytes_or_are_left_to_luck(kind):
    desk = Desk()
    held = []
    for number in range(20):
        held.append(np.empty(1032 + 16 * number, np.uint8))  # what moves the heap
        desk.align_casts(kind)
        place = np.empty(8192 * np.dtype(kind).itemsize, np.uint8).ctypes.data
        assert place % 32 == 0 or len(desk._pads) == 64


def test_no_more_is_held_for_it_than_said():
    desk = Desk()
    for _ in range(1000):
        desk.align_casts(np.float32)
    assert sum(pad.nbytes for pad in desk._pads) <= 64 * 2056


def test_a_name_is_one_piece_of_memory():
    desk = Desk()
    first = desk.array("sums", (100,), np.float32)
    assert desk.array("sums", (50,), np.float32).ctypes.data == first.ctypes.data
    assert desk.array("sums", (100,), np.float32) is first
    assert desk.array("sums", (1000,), np.float32).shape == (1000,)
