"""What a range of a virtual file comes in: memory, several small arrays, spans of files. Values."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from weighlock.tensors.arrays import Array

__all__ = ["FilePart", "Piece", "Sendable", "Several", "in_memory", "piece_length"]


class Sendable(Protocol):
    """A file whose bytes the kernel can send by itself."""

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
    """Small arrays one after another, as they lie: one call can send them all."""

    arrays: tuple[Array, ...]
    length: int

    def joined(self) -> memoryview:
        """Their bytes, copied."""
        # numpy's arrays are bytes for `join` whatever their type is.
        return memoryview(b"".join(self.arrays))  # type: ignore[arg-type]


Piece: TypeAlias = memoryview | FilePart | Several


def piece_length(piece: Piece) -> int:
    """Bytes of a piece."""
    return len(piece) if isinstance(piece, memoryview) else piece.length


def in_memory(piece: memoryview | Several) -> memoryview:
    """The bytes of a piece that lies in memory."""
    return piece.joined() if isinstance(piece, Several) else piece
