"""Finished blocks on their way to the target, one at a time, without a queue of threads.

A kernel lets one writer into a file: a second one burns a core until the first is done. So whoever
finds somebody writing leaves his block to him and goes on with the next. Knows threads and buffers;
no arithmetic.
"""

import threading
from collections import deque
from typing import NamedTuple

import numpy as np

from weighlock.combining.outcome import Target
from weighlock.tensors.arrays import Array, byte_view
from weighlock.tensors.spec import TensorSpec

__all__ = ["Delivery"]

_MOST_WAITING, _WAITING_BYTES = 4, 4 * 1024 * 1024
"""Blocks left to others, and bytes of them; whoever has one more waits until one is written."""


class _Made(NamedTuple):
    spec: TensorSpec
    start: int
    length: int
    buffer: Array


class Delivery:
    """Puts blocks into a target. For any thread.

    Args:
        target: where they go.
        most_bytes: of one of them.
    """

    def __init__(self, target: Target, most_bytes: int) -> None:
        self._target = target
        self._most_bytes = most_bytes
        self._made: deque[_Made] = deque()
        self._free: list[Array] = []
        self._most_waiting = max(1, min(_MOST_WAITING, _WAITING_BYTES // most_bytes))
        self._writer: object = None
        self._changed = threading.Condition()

    def buffer(self) -> Array:
        """Room for a block, until it is put."""
        try:
            return self._free.pop()
        except IndexError:
            return np.empty(self._most_bytes, np.uint8)

    def put(self, spec: TensorSpec, start: int, length: int, buffer: Array) -> None:
        """Take a block, which is the first `length` bytes of a buffer that is not used any more.

        Once every thread that puts blocks has returned from here, all are in the target, unless one
        of them has raised.
        """
        self._made.append(_Made(spec, start, length, buffer))
        me = object()
        try:
            # Again after each turn: somebody may have come when it was over but not given back.
            while self._is_turn_of(me):
                self._put_all()
                self._end_turn_of(me)
        finally:
            self._end_turn_of(me)  # also if Ctrl-C came just after it began

    def _is_turn_of(self, me: object) -> bool:
        """Begin a turn if there is something to put and nobody is at it."""
        with self._changed:
            while self._writer is not None and len(self._made) > self._most_waiting:
                self._changed.wait()
            if self._writer is not None or not self._made:
                return False
            self._writer = me
            return True

    def _end_turn_of(self, me: object) -> None:
        with self._changed:
            if self._writer is me:
                self._writer = None
                self._changed.notify_all()

    def _put_all(self) -> None:
        while self._made:
            made = self._made.popleft()
            self._target.put(made.spec, made.start, byte_view(made.buffer)[: made.length])
            self._free.append(made.buffer)
