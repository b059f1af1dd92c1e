"""Pieces of tensors on their way into a file, written together where they follow each other.

Knows memory and offsets; not what the bytes mean, nor how a disk takes them.
"""

from collections.abc import Callable

from weighlock.disk.atomic import AtomicFile

__all__ = ["Gathered"]

_STEP_BYTES = 64 * 1024 * 1024
"""Most bytes written in one call, and between two calls of `progress`."""

_STEP_PARTS = 1024
"""Most pieces of memory written in one call."""

_SMALL_BYTES = 64 * 1024
"""Shorter pieces of a passing buffer are copied, to be written together."""

_COPIED_BYTES = 1024 * 1024
"""Most bytes of such copies at a time."""


class Gathered:
    """Writes what follows each other in the file in one go: no system call per tensor.

    Fewer calls are worth it for large tensors too: what Python runs between two of them finds its
    caches emptied by the copying.
    """

    def __init__(self, file: AtomicFile, progress: Callable[[int], None]) -> None:
        self._file = file
        self._progress = progress
        self._parts: list[memoryview] = []
        self._start = self._end = 0
        self._copied_bytes = 0

    def __enter__(self) -> "Gathered":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._flush()

    def keep(self, offset: int, data: memoryview) -> None:
        """Write memory that stays as it is until all is written."""
        for start in range(0, len(data), _STEP_BYTES):
            self._add(offset + start, data[start : start + _STEP_BYTES])

    def pass_on(self, offset: int, data: memoryview) -> None:
        """Write from a buffer that holds something else after this call."""
        if len(data) >= _SMALL_BYTES:
            self.keep(offset, data)
            self._flush()
            return
        self._add(offset, memoryview(bytes(data)))
        self._copied_bytes += len(data)
        if self._copied_bytes >= _COPIED_BYTES:
            self._flush()

    def _add(self, offset: int, data: memoryview) -> None:
        if (
            offset != self._end
            or offset + len(data) > self._start + _STEP_BYTES
            or len(self._parts) == _STEP_PARTS
        ):
            self._flush()
            self._start = offset
        self._parts.append(data)
        self._end = offset + len(data)

    def _flush(self) -> None:
        if self._parts:
            self._file.write(self._start, *self._parts)
            self._progress(self._end - self._start)
        self._parts.clear()
        self._start, self._copied_bytes = self._end, 0
