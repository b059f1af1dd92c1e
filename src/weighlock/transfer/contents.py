"""The bytes of a virtual file, any range of them, from wherever its tensors lie.

Knows memory, files and tensors that must be gathered first; not who asks. A range comes as pieces
that can be sent without a copy: memory as it is, files as spans for `sendfile`. Arrays come
together, and what is small goes through one buffer: no tensor costs a system call of its own.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace

import numpy as np

from weighlock.abort import Abort
from weighlock.disk.scratch import Scratch
from weighlock.errors import SourceError
from weighlock.limits import Budget, Limits
from weighlock.sources.inflated import InflatedSource
from weighlock.sources.local import FileSource
from weighlock.tensors.arrays import byte_view, empty
from weighlock.tensors.ref import ArrayRef, TensorRef
from weighlock.tensors.spec import Span
from weighlock.tensors.stored import Readable, StoredRef
from weighlock.transfer.kept import Kept
from weighlock.transfer.layout import VirtualFile
from weighlock.transfer.pieces import (
    SMALL_BYTES,
    Buffer,
    FilePart,
    Piece,
    Sendable,
    Together,
    piece_length,
    views_of,
)
from weighlock.transfer.upstream import Upstreams

__all__ = ["Contents"]

_BOUNCE_BYTES = 512 * 1024

_REMOTE_BYTES = 1024 * 1024
"""Read at once from what is neither memory nor a file: a block of another server."""

_WINDOW_BYTES = 256 * 1024
"""Read at once where small tensors lie near each other in a file."""

_SCRATCH_FROM_BYTES = 256 * 1024
"""Gathered tensors of this size on are laid down in a file once; smaller ones stay in memory, where
each receiver that is slow to take one holds on to it."""

_WAIT_S = 5.0
"""How long a reply waits for room in the budget; then its receiver is told to come back."""


class Contents:
    """The bytes of a virtual file.

    Args:
        file: which tensors lie where.
        directory: where gathered tensors are laid down that are too large for memory.
        limits: how many bytes of smaller gathered ones are kept in memory.
        kept: where those are kept, if it is shared with others.
        abort: ends gathering, which may take long, with `Aborted`.
    """

    def __init__(
        self,
        file: VirtualFile,
        *,
        directory: str | None = None,
        limits: Limits | None = None,
        kept: Kept | None = None,
        abort: Abort | None = None,
    ) -> None:
        self.file = file
        self._upstreams: Upstreams | None = None
        self._abort = abort or Abort()
        self._header = memoryview(file.header)
        self._directory = directory
        self._kept = kept or Kept((limits or Limits()).gathered_bytes)
        self._gathering = threading.Lock()
        self._scratch: Scratch | None = None
        self._laid_down: dict[int, FilePart] = {}
        self._closing = False
        """Who gathers is to stop: it holds the lock, and whoever closes waits for that."""
        self._closed = False

    @property
    def size(self) -> int:
        """Bytes of the virtual file."""
        return self.file.size

    def close(self) -> None:
        """Let go of the tensors and of what was gathered. Idempotent."""
        self._closing = True
        self.stop_waiting()
        with self._gathering:
            self._closed = True
            if self._scratch is not None:
                self._scratch.close()
            self._kept.drop(self)
            # And of the tensors.
            self.file = replace(self.file, segments=(), specs=(), aliases={})

    def forward(self, upstreams: Upstreams) -> None:
        """Read tensors of other servers so from now on: somebody waits for them.

        Before that they are read as patiently as they were opened.
        """
        self._upstreams = upstreams

    def stop_waiting(self) -> None:
        """Wake whoever waits for another server: nothing is forwarded any more. Idempotent."""
        if self._upstreams is not None:
            self._upstreams.close()

    def check_upstreams(self) -> None:
        """Raise if what is forwarded could not be had when it was last asked for.

        Raises:
            UpstreamFailed: it could not.
        """
        if self._upstreams is not None:
            self._upstreams.check()

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer from that offset of the virtual file."""
        done = 0
        for piece in self.pieces(Span(offset, len(buffer))):
            if isinstance(piece, FilePart):
                piece.file.read_into(piece.offset, buffer[done : done + piece.length])
                done += piece.length
                continue
            for view in views_of(piece):
                buffer[done : done + len(view)] = view
                done += len(view)

    def pieces(self, span: Span, budget: Budget | None = None) -> Iterator[Piece]:
        """A range of the virtual file, in order. A piece is valid until the next is asked for.

        Args:
            span: the range.
            budget: what is used for buffers meanwhile counts there.

        Raises:
            SourceError: a tensor cannot be read, or this was closed.
            UpstreamFailed: it lies on another server, which does not give it.
            Aborted: somebody said stop.
            TransferTimeout: there is no room for a buffer.
        """
        file = self.file  # which `close` empties
        if self._closed:
            raise SourceError("its share is over")
        with ExitStack() as stack:
            yield from self._pieces(file, span, _Room(budget, stack))

    def _pieces(self, file: VirtualFile, span: Span, room: "_Room") -> Iterator[Piece]:
        buffer: memoryview | None = None
        used = 0
        window = _Window(room)
        for piece in _joined(self._parts(file, span, room)):
            length = piece_length(piece)
            if length >= SMALL_BYTES:
                if buffer is not None and used:
                    yield buffer[:used]
                    used = 0
                yield piece
                continue
            if buffer is None:
                buffer = room.buffer(min(_BOUNCE_BYTES, span.length))
            if used + length > len(buffer):
                yield buffer[:used]
                used = 0
            if isinstance(piece, FilePart):
                window.read_into(piece, buffer[used : used + length])
                used += length
                continue
            for view in views_of(piece):
                buffer[used : used + len(view)] = view
                used += len(view)
        if buffer is not None and used:
            yield buffer[:used]

    def gather_all(self) -> None:
        """Lay down now what would have to be gathered from a device or from strided memory.

        What the user may change later is thereby copied once, and not for every range.
        """
        for segment in self.file.segments:
            ref = segment.ref
            if _is_in_memory(ref) and ref.memory() is None:
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

    def _parts(self, file: VirtualFile, span: Span, room: "_Room") -> Iterator[Piece]:
        """The pieces of a range as they lie, however small."""
        if span.offset < len(self._header):
            yield self._header[span.offset : span.end]
        together = Together()
        for segment, begin, end in file.touched(span):
            ref = segment.ref
            found = _lying(ref, begin, end)
            if found is not None:
                if not together.has_room(end - begin):
                    yield together.taken()
                together.add(found, end - begin)
                continue
            if together.length:
                yield together.taken()
            if isinstance(ref, StoredRef) and not isinstance(ref.source, InflatedSource):
                whole = ref.contiguous_span
                if whole is not None:
                    source = self._as_forwarded(ref.source)
                    yield from _stored(source, whole.offset + begin, end - begin, room)
                    continue
            gathered = self._gathered(segment.span.offset, ref)
            if isinstance(gathered, FilePart):
                yield FilePart(gathered.file, gathered.offset + begin, end - begin)
            else:
                with room.held(len(gathered)):
                    yield gathered[begin:end]
        if together.length:
            yield together.taken()

    def _as_forwarded(self, source: Readable) -> Readable:
        return source if self._upstreams is None else self._upstreams.source(source)

    def _gathered(self, key: int, ref: TensorRef) -> memoryview | FilePart:
        upstreams = self._upstreams
        if upstreams is None:
            return self._gather(key, ref)
        forwarded = upstreams.ref(ref)
        asked = None if forwarded is ref else time.monotonic()
        with upstreams.telling():  # some refs read in their own way
            return self._gather(key, forwarded, asked)

    def _gather(
        self, key: int, ref: TensorRef, asked: float | None = None
    ) -> memoryview | FilePart:
        with self._gathering:
            if self._closed:
                raise SourceError(f"tensor {ref.name!r}: its share is over")
            if key in self._laid_down:
                return self._laid_down[key]
            kept = self._kept.get(self, key)
            if kept is not None:
                return kept
            if self._upstreams is not None and asked is not None:
                self._upstreams.check(asked)  # for others that wait here, too
            if ref.nbytes >= _SCRATCH_FROM_BYTES:
                return self._lay_down(key, ref)
            buffer = byte_view(empty((ref.nbytes,), np.dtype(np.uint8)))
            ref.load(out=buffer)
            self._kept.put(self, key, buffer)
            return buffer

    def _lay_down(self, key: int, ref: TensorRef) -> FilePart:
        if self._scratch is None:
            self._scratch = Scratch(self._directory)
        span = self._scratch.append(self._while_open(ref), ref.nbytes)
        self._laid_down[key] = FilePart(self._scratch, span.offset, span.length)
        return self._laid_down[key]

    def _while_open(self, ref: TensorRef) -> Iterator[memoryview]:
        """The pieces of a tensor, until this is closed: who closes does not wait for gigabytes."""
        self._abort.check()  # several threads may wait for the first that gathers
        for piece in ref.pieces():
            self._abort.check()
            if self._closing:
                raise SourceError(f"tensor {ref.name!r}: its share is over")
            yield piece


def _is_in_memory(ref: TensorRef) -> bool:
    return next(ref.sources(), None) is None


class _Room:
    """What one range uses for buffers, as far as somebody counts."""

    def __init__(self, budget: Budget | None, stack: ExitStack) -> None:
        self._budget = budget
        self._stack = stack

    def held(self, count: int) -> AbstractContextManager[None]:
        """So many bytes, while the block runs."""
        return nullcontext() if self._budget is None else self._budget.hold(count, _WAIT_S)

    def fitting(self, most: int) -> int:
        """How large a buffer may be: less while there is little room."""
        return most if self._budget is None else self._budget.fitting(most, SMALL_BYTES)

    def buffer(self, most: int) -> memoryview:
        """A buffer until the range is through."""
        most = self.fitting(most)
        self._stack.enter_context(self.held(most))
        return byte_view(empty((most,), np.dtype(np.uint8)))


def _lying(ref: TensorRef, begin: int, end: int) -> "Buffer | None":
    """Some bytes of a tensor, if they lie in memory as they are sent."""
    if end - begin == ref.nbytes and type(ref) is ArrayRef:
        return ref.plain()  # as an array: of very many, views would take longer than the bytes
    memory = ref.memory()
    return None if memory is None else memory[begin:end]


def _stored(source: Readable, offset: int, length: int, room: _Room) -> Iterator[Piece]:
    if isinstance(source, FileSource):
        yield FilePart(source, offset, length)
        return
    size = min(_REMOTE_BYTES, length)
    with room.held(size):
        buffer = byte_view(empty((size,), np.dtype(np.uint8)))
        for done in range(0, length, _REMOTE_BYTES):
            piece = buffer[: min(_REMOTE_BYTES, length - done)]
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


class _Window:
    """The last stretch read of a file: small tensors in it need no read of their own."""

    def __init__(self, room: _Room) -> None:
        self._room = room
        self._file: Sendable | None = None
        self._start = 0
        self._buffer: memoryview | None = None
        self._bytes = memoryview(b"")

    def read_into(self, part: FilePart, target: memoryview) -> None:
        begin = part.offset - self._start
        if self._file is not part.file or begin < 0 or begin + part.length > len(self._bytes):
            if self._buffer is None:
                self._buffer = self._room.buffer(_WINDOW_BYTES)
            length = min(len(self._buffer), part.file.size - part.offset)
            if length < part.length:  # shorter than it was: reading says so
                part.file.read_into(part.offset, target)
                return
            self._bytes = self._buffer[:length]
            part.file.read_into(part.offset, self._bytes)
            self._file, self._start, begin = part.file, part.offset, 0
        target[:] = self._bytes[begin : begin + part.length]
