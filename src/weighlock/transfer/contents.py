"""The bytes of a virtual file, any range of them, from wherever its tensors lie.

Knows memory, files and tensors that must be gathered first; not who asks. A range comes as pieces
that can be sent without a copy: memory as it is, files as spans for `sendfile`. What is small goes
through one buffer together, so that no tensor costs a system call of its own.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import numpy as np

from weighlock.disk.scratch import Scratch
from weighlock.errors import SourceError
from weighlock.limits import Limits
from weighlock.sources.inflated import InflatedSource
from weighlock.sources.local import FileSource
from weighlock.tensors.adjusted import AdjustedRef
from weighlock.tensors.arrays import byte_view, empty
from weighlock.tensors.ref import ArrayRef, TensorRef
from weighlock.tensors.spec import Span
from weighlock.tensors.stored import Readable, StoredRef
from weighlock.transfer.layout import VirtualFile

__all__ = ["Contents", "FilePart", "Piece", "Sendable"]

_SMALL_BYTES = 64 * 1024
"""Below this, copying is cheaper than a system call of its own."""

_BOUNCE_BYTES = 1024 * 1024

_WINDOW_BYTES = 256 * 1024
"""Read at once where small tensors lie near each other in a file."""

_SCRATCH_FROM_BYTES = 8 * 1024 * 1024
"""Gathered tensors of this size on are laid down in a file once; smaller ones stay in memory."""


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


Piece: TypeAlias = memoryview | FilePart


class Contents:
    """The bytes of a virtual file.

    Args:
        file: which tensors lie where.
        directory: where gathered tensors are laid down that are too large for memory.
        limits: how many bytes of smaller gathered ones are kept in memory.
    """

    def __init__(
        self, file: VirtualFile, *, directory: str | None = None, limits: Limits | None = None
    ) -> None:
        self.file = file
        self._header = memoryview(file.header)
        self._directory = directory
        self._limits = limits or Limits()
        self._gathering = threading.Lock()
        self._scratch: Scratch | None = None
        self._laid_down: dict[int, FilePart] = {}
        self._kept: OrderedDict[int, memoryview] = OrderedDict()
        self._kept_bytes = 0
        self._closed = False

    @property
    def size(self) -> int:
        """Bytes of the virtual file."""
        return self.file.size

    def close(self) -> None:
        """Let go of the tensors and of what was gathered. Idempotent."""
        with self._gathering:
            self._closed = True
            if self._scratch is not None:
                self._scratch.close()
            self._kept.clear()
            # And of the tensors.
            self.file = replace(self.file, segments=(), specs=(), aliases={})

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer from that offset of the virtual file."""
        done = 0
        for piece in self.pieces(Span(offset, len(buffer))):
            if isinstance(piece, FilePart):
                piece.file.read_into(piece.offset, buffer[done : done + piece.length])
                done += piece.length
            else:
                buffer[done : done + len(piece)] = piece
                done += len(piece)

    def pieces(self, span: Span) -> Iterator[Piece]:
        """A range of the virtual file, in order. A piece is valid until the next is asked for.

        Raises:
            SourceError: a tensor cannot be read, or this was closed.
        """
        if self._closed:
            raise SourceError("its share is over")
        buffer: memoryview | None = None
        used = 0
        window = _Window()
        for piece in _joined(self._parts(span)):
            length = _length(piece)
            if length >= _SMALL_BYTES:
                if buffer is not None and used:
                    yield buffer[:used]
                    used = 0
                yield piece
                continue
            if buffer is None:
                buffer = byte_view(empty((min(_BOUNCE_BYTES, span.length),), np.dtype(np.uint8)))
            if used + length > len(buffer):
                yield buffer[:used]
                used = 0
            target = buffer[used : used + length]
            if isinstance(piece, FilePart):
                window.read_into(piece, target)
            else:
                target[:] = piece
            used += length
        if buffer is not None and used:
            yield buffer[:used]

    def gather_all(self) -> None:
        """Lay down now what would have to be gathered from a device or from strided memory.

        What the user may change later is thereby copied once, and not for every range.
        """
        for segment in self.file.segments:
            ref = segment.ref
            if not isinstance(ref, StoredRef) and ref.memory() is None:
                with self._gathering:
                    self._lay_down(segment.span.offset, ref)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of tensors that stay in memory because of this."""
        # Of strided ones as well: what is sent of them is laid down, but they are still there.
        return sum(x.span.length for x in self.file.segments if _is_in_memory(x.ref))

    def copy_memory(self) -> None:
        """Copy now what lies in memory: afterwards it may be changed."""
        segments = []
        for segment in self.file.segments:
            ref, memory = segment.ref, segment.ref.memory()
            if memory is not None:
                copy = empty(ref.shape, ref.dtype.numpy)
                byte_view(copy)[:] = memory
                segment = replace(segment, ref=ArrayRef(ref.spec, copy))
            segments.append(segment)
        self.file = replace(self.file, segments=tuple(segments))  # the originals are let go

    def _parts(self, span: Span) -> Iterator[Piece]:
        """The pieces of a range as they lie, however small."""
        if span.offset < len(self._header):
            yield self._header[span.offset : span.end]
        for segment, begin, end in self.file.touched(span):
            ref = segment.ref
            memory = ref.memory()
            if memory is not None:
                yield memory[begin:end]
                continue
            if isinstance(ref, StoredRef) and not isinstance(ref.source, InflatedSource):
                whole = ref.contiguous_span
                if whole is not None:
                    yield from _stored(ref.source, whole.offset + begin, end - begin)
                    continue
            gathered = self._gathered(segment.span.offset, ref)
            if isinstance(gathered, FilePart):
                yield FilePart(gathered.file, gathered.offset + begin, end - begin)
            else:
                yield gathered[begin:end]

    def _gathered(self, key: int, ref: TensorRef) -> Piece:
        with self._gathering:
            if self._closed:
                raise SourceError(f"tensor {ref.name!r}: its share is over")
            if key in self._laid_down:
                return self._laid_down[key]
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            if ref.nbytes >= _SCRATCH_FROM_BYTES:
                return self._lay_down(key, ref)
            buffer = byte_view(empty((ref.nbytes,), np.dtype(np.uint8)))
            ref.load(out=buffer)
            self._kept[key] = buffer
            self._kept_bytes += len(buffer)
            while self._kept_bytes > self._limits.gathered_bytes and len(self._kept) > 1:
                _, dropped = self._kept.popitem(last=False)
                self._kept_bytes -= len(dropped)
            return buffer

    def _lay_down(self, key: int, ref: TensorRef) -> FilePart:
        if self._scratch is None:
            self._scratch = Scratch(self._directory)
        span = self._scratch.append(ref.pieces(), ref.nbytes)
        self._laid_down[key] = FilePart(self._scratch, span.offset, span.length)
        return self._laid_down[key]


def _is_in_memory(ref: TensorRef) -> bool:
    while isinstance(ref, AdjustedRef):
        ref = ref.original
    return not isinstance(ref, StoredRef)


def _stored(source: Readable, offset: int, length: int) -> Iterator[Piece]:
    if isinstance(source, FileSource):
        yield FilePart(source, offset, length)
        return
    buffer = byte_view(empty((min(_BOUNCE_BYTES, length),), np.dtype(np.uint8)))
    for done in range(0, length, _BOUNCE_BYTES):
        piece = buffer[: min(_BOUNCE_BYTES, length - done)]
        source.read_into(offset + done, piece)
        yield piece


def _joined(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """The same bytes with neighbours in a file made one piece."""
    held: FilePart | None = None
    for piece in pieces:
        if isinstance(piece, FilePart):
            if held is None:
                held = piece
            elif held.file is piece.file and held.offset + held.length == piece.offset:
                held = FilePart(held.file, held.offset, held.length + piece.length)
            else:
                yield held
                held = piece
            continue
        if held is not None:
            yield held
            held = None
        yield piece
    if held is not None:
        yield held


def _length(piece: Piece) -> int:
    return piece.length if isinstance(piece, FilePart) else len(piece)


class _Window:
    """The last stretch read of a file: small tensors in it need no read of their own."""

    def __init__(self) -> None:
        self._file: Sendable | None = None
        self._start = 0
        self._bytes = memoryview(b"")

    def read_into(self, part: FilePart, target: memoryview) -> None:
        begin = part.offset - self._start
        if self._file is not part.file or begin < 0 or begin + part.length > len(self._bytes):
            length = min(_WINDOW_BYTES, part.file.size - part.offset)
            if length < part.length:  # shorter than it was: reading says so
                part.file.read_into(part.offset, target)
                return
            self._bytes = byte_view(empty((length,), np.dtype(np.uint8)))
            part.file.read_into(part.offset, self._bytes)
            self._file, self._start, begin = part.file, part.offset, 0
        target[:] = self._bytes[begin : begin + part.length]
