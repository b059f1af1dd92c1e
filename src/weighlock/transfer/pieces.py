"""What a range of a virtual file comes in: memory in one place or in several, spans of files.

Knows buffers and lengths; neither tensors nor who sends them.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from weighlock.tensors.arrays import Array, byte_view

__all__ = [
    "SMALL_BYTES",
    "Buffer",
    "FilePart",
    "Piece",
    "Sendable",
    "Several",
    "Together",
    "bytes_of",
    "piece_length",
    "views_of",
]

SMALL_BYTES = 64 * 1024
"""Below this, copying is cheaper than a call of its own."""

_MOST_TOGETHER = 512
"""Buffers in one piece; the kernel takes up to 1,024 by one call."""

_TOGETHER_BYTES = 8 * 1024 * 1024
"""Bytes of such a piece: those of one range."""

Buffer: TypeAlias = "Array | memoryview"
"""Bytes as they lie: an array in row-major order, whatever its type, or a view of bytes."""


class Sendable(Protocol):
    """A file whose bytes the kernel can send by itself."""

    @property
    def label(self) -> str: ...

    @property
    def size(self) -> int: ...

    def descriptor(self) -> AbstractContextManager[int]: ...

    def read_into(self, offset: int, buffer: memoryview) -> None: ...


@dataclass(frozen=True, slots=True)
class FilePart:
    """Bytes of a file."""

    file: Sendable
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Several:
    """Memory in several places, one after another: one call can send it all."""

    buffers: tuple[Buffer, ...]
    length: int

    def part(self, start: int, length: int) -> "Several":
        """So many of its bytes, from one of them on."""
        if length == self.length:
            return self
        found: list[Buffer] = []
        reached = 0
        for buffer in self.buffers:
            begin, reached = start - reached, reached + buffer.nbytes
            if reached > start:
                found.append(bytes_of(buffer)[max(0, begin) : begin + length])
            if reached >= start + length:
                break
        return Several(tuple(found), length)


Piece: TypeAlias = memoryview | FilePart | Several


class Together:
    """Gathers buffers that follow each other. One by one, Python takes longer than the memory."""

    def __init__(self) -> None:
        self._buffers: list[Buffer] = []
        self.length = 0
        """Bytes of what is here."""

    def has_room(self, count: int) -> bool:
        """Whether so many bytes may come with what is here; there is always room for the first."""
        return not self._buffers or (
            self.length + count <= _TOGETHER_BYTES and len(self._buffers) < _MOST_TOGETHER
        )

    def add(self, buffer: Buffer, count: int) -> None:
        """So many bytes more."""
        self._buffers.append(buffer)
        self.length += count

    def taken(self) -> Piece:
        """What is here, which is here no more."""
        buffers, length = self._buffers, self.length
        self._buffers, self.length = [], 0
        return Several(tuple(buffers), length) if len(buffers) > 1 else bytes_of(buffers[0])


def piece_length(piece: Piece) -> int:
    """Bytes of a piece."""
    return len(piece) if isinstance(piece, memoryview) else piece.length


def bytes_of(buffer: Buffer) -> memoryview:
    """The bytes of a buffer, without a copy."""
    return buffer if isinstance(buffer, memoryview) else byte_view(buffer)


def views_of(piece: memoryview | Several) -> Iterator[memoryview]:
    """The bytes of a piece that lies in memory: as they lie, small neighbours copied together."""
    if isinstance(piece, memoryview):
        yield piece
        return
    small: list[Buffer] = []
    for buffer in piece.buffers:
        if buffer.nbytes < SMALL_BYTES:
            small.append(buffer)
            continue
        if small:
            yield _joined(small)
            small = []
        yield bytes_of(buffer)
    if small:
        yield _joined(small)


def _joined(buffers: list[Buffer]) -> memoryview:
    # numpy's arrays are bytes for `join` whatever their type is.
    return memoryview(b"".join(buffers))  # type: ignore[arg-type]
