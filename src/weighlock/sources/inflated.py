"""A deflated run of another source, read as what it unpacks to. Knows deflate; not archives.

Deflate can only be read forwards. Reads that follow each other cost what they unpack; a step back
starts again from the beginning.
"""

import threading
import zlib
from typing import TYPE_CHECKING

from weighlock.errors import FormatError, ShortRead, SourceError
from weighlock.per_process import PerProcess

if TYPE_CHECKING:
    from weighlock.sources.base import Source

__all__ = ["InflatedSource"]

_CHUNK_BYTES = 256 * 1024


class InflatedSource:
    """What a deflated span unpacks to.

    Args:
        source: where the packed bytes lie.
        start: where they begin in it.
        length: how many there are.
        size: how many bytes they are said to unpack to; never more are unpacked.
        label: what to call it in errors.
    """

    def __init__(self, source: "Source", start: int, length: int, size: int, label: str) -> None:
        self._start = start
        self._length = length
        self._turn = PerProcess(_Turn)
        self.source = source
        self.size = size
        self.label = label
        self._closed = False

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, InflatedSource)
            and self.source == other.source
            and self._start == other._start
        )

    def __hash__(self) -> int:
        return hash((self.source, self._start))

    def __reduce__(self) -> tuple[object, ...]:
        return InflatedSource, (self.source, self._start, self._length, self.size, self.label)

    def close(self) -> None:
        """Refuse further reads; the source below belongs to somebody else."""
        self._closed = True

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Unpack up to the end of the buffer, and keep what falls into it."""
        if self._closed or offset < 0:
            what = "used after it was closed" if self._closed else f"has no byte {offset}"
            raise SourceError(f"{self.label}: {what}")
        if offset + len(buffer) > self.size:
            raise ShortRead(
                f"{self.label}: has {self.size:,} bytes; {len(buffer):,} were wanted at {offset:,}",
                wanted=len(buffer),
                got=max(0, self.size - offset),
            )
        turn = self._turn()
        with turn.lock:
            # Taken out meanwhile: a read that Ctrl-C ends in its midst leaves none that lacks a
            # piece, and a signal handler that reads begins with one of its own.
            reached, turn.reached = turn.reached, None
            if reached is None or offset < reached.position:
                reached = _Unpacking()
            while reached.position < offset:
                self._next(reached, min(_CHUNK_BYTES, offset - reached.position))
            done = 0
            while done < len(buffer):
                piece = self._next(reached, min(_CHUNK_BYTES, len(buffer) - done))
                buffer[done : done + len(piece)] = piece
                done += len(piece)
            turn.reached = reached

    def _next(self, at: "_Unpacking", most: int) -> bytes:
        """Between one and `most` further bytes."""
        while True:
            packed = at.unpacker.unconsumed_tail
            if not packed and at.taken < self._length:
                raw = bytearray(min(_CHUNK_BYTES, self._length - at.taken))
                self.source.read_into(self._start + at.taken, memoryview(raw))
                at.taken += len(raw)
                packed = bytes(raw)
            try:
                piece = at.unpacker.decompress(packed, most)
            except zlib.error as error:
                raise FormatError(f"cannot be unpacked: {error}", source=self.label) from error
            if piece:
                at.position += len(piece)
                return piece
            if at.unpacker.eof or (not packed and at.taken >= self._length):
                raise FormatError(
                    f"unpacks to {at.position:,} bytes, {self.size:,} were announced",
                    source=self.label,
                )


class _Unpacking:
    """How far the bytes were unpacked."""

    __slots__ = ("position", "taken", "unpacker")

    def __init__(self) -> None:
        self.unpacker = zlib.decompressobj(-15)
        self.taken = 0
        self.position = 0


class _Turn:
    """Whose turn it is in one process, and how far the last one came."""

    __slots__ = ("lock", "reached")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.reached: _Unpacking | None = None
