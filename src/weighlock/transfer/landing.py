"""Where arriving blocks are put: memory, given arrays, a file. Knows spans and buffers; no socket.

A landing is shared by the connections of a fetch; each asks it for a place of its own. A block
counts only when the place is told that it landed: until then its bytes may be anything.
"""

import errno
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from weighlock.disk.atomic import AtomicFile
from weighlock.errors import DiskError
from weighlock.sources.grid import BLOCK_BYTES, block_count, block_length
from weighlock.sources.http_remote import BlockPlace
from weighlock.tensors.arrays import Array, byte_view, empty
from weighlock.tensors.spec import Span

__all__ = ["FileLanding", "Landing", "LandingFile", "MemoryLanding", "PartLanding", "Targets"]

_DIRECT_PIECES = 4
"""A block in at most so many pieces is received straight into them; more are one copy cheaper."""

_WITHHELD_BYTES = 8
"""The first bytes of a file are written last: without them nobody can take it for complete."""


class Landing(Protocol):
    """What a fetch asks of the place its blocks go to."""

    @property
    def blocks(self) -> Sequence[int]:
        """The blocks that are wanted, in order."""

    def place(self) -> BlockPlace:
        """A place for one connection."""

    def put(self, block: int, content: memoryview) -> None:
        """Land a block that is already here."""


class Targets(Protocol):
    """Memory for bytes of the remote file."""

    @property
    def spans(self) -> Sequence[Span]:
        """Which bytes: in the order of the file, without overlaps, none of them empty."""

    def buffer(self, number: int) -> Array:
        """Where those of one span go, of uint8. Asked from any thread, and more than once."""


class MemoryLanding:
    """Tensors in memory: their own new buffers, or arrays somebody has.

    Args:
        targets: where they go.
        size: bytes of the remote file.
    """

    def __init__(self, targets: Targets, size: int) -> None:
        self._spans = _Spans(targets.spans)
        self._buffer = targets.buffer
        self.size = size

    @property
    def blocks(self) -> Sequence[int]:
        return self._spans.blocks

    def place(self) -> BlockPlace:
        return _MemoryPlace(self)

    def put(self, block: int, content: memoryview) -> None:
        origin = block * BLOCK_BYTES
        for number, begin, end in self._spans.in_block(block):
            start = self._spans.starts[number]
            part = content[begin - origin : end - origin]
            self._buffer(number).data[begin - start : end - start] = part

    def around(self, block: int) -> tuple[Span, memoryview] | None:
        """What is wanted in one piece and has all of a block, and its memory: most blocks have."""
        number = self._spans.around(block)
        if number is None:
            return None
        start = self._spans.starts[number]
        return Span(start, self._spans.ends[number] - start), self._buffer(number).data

    def direct(self, block: int) -> list[tuple[int, int, memoryview]] | None:
        """Begin, end and memory of the wanted parts of a block; None if they are too many."""
        if self._spans.count_in(block) > _DIRECT_PIECES:
            return None
        starts = self._spans.starts
        return [
            (
                begin,
                end,
                self._buffer(number)[begin - starts[number] : end - starts[number]].data,
            )
            for number, begin, end in self._spans.in_block(block)
        ]


class _MemoryPlace:
    """Receives straight into the tensors; what nobody wants goes aside."""

    def __init__(self, landing: MemoryLanding) -> None:
        self._landing = landing
        self._aside = _Aside()
        self._is_direct = False
        # What the last block lay in, where it begins and from where on no whole block is left: the
        # next one most often lies there too.
        self._start, self._end = 0, 0
        self._memory = memoryview(b"")

    def views(self, block: int) -> Sequence[memoryview]:
        first = block * BLOCK_BYTES
        if self._start <= first < self._end or self._move_to(block):
            self._is_direct = True
            start = first - self._start
            return (self._memory[start : start + BLOCK_BYTES],)
        length = block_length(block, self._landing.size)
        pieces = self._landing.direct(block)
        self._is_direct = pieces is not None
        if pieces is None:
            return (self._aside.buffer(length),)
        views: list[memoryview] = []
        reached = block * BLOCK_BYTES
        last = reached + length
        for begin, end, view in pieces:
            if begin > reached:
                views.append(self._aside.buffer(begin - reached))
            views.append(view)
            reached = end
        if reached < last:
            views.append(self._aside.buffer(last - reached))
        return views

    def _move_to(self, block: int) -> bool:
        """Look for what a block lies in; False if it does not lie in one piece."""
        found = self._landing.around(block)
        if found is None:
            return False
        span, self._memory = found
        self._start, self._end = span.offset, span.end - BLOCK_BYTES + 1
        return True

    def landed(self, block: int) -> None:
        if not self._is_direct:
            length = block_length(block, self._landing.size)
            self._landing.put(block, self._aside.buffer(length))


class LandingFile(Protocol):
    """A file that takes blocks in any order."""

    def write(self, offset: int, data: memoryview) -> None: ...

    def truncate(self, size: int) -> None: ...

    def read_into(self, offset: int, buffer: memoryview) -> bool:
        """Fill the buffer with what was written there; False if the file ends before."""


class FileLanding:
    """A whole remote file as a file: each block at its own offset."""

    def __init__(self, file: LandingFile, size: int) -> None:
        self._file = file
        self._first = memoryview(bytearray(min(_WITHHELD_BYTES, size)))
        self.size = size

    @property
    def blocks(self) -> Sequence[int]:
        return range(block_count(self.size))

    def place(self) -> BlockPlace:
        return _AsidePlace(self, self.size)

    def put(self, block: int, content: memoryview, start: int = 0) -> None:
        """Land a block that is already here, or a piece of it that begins at byte `start`."""
        offset = block * BLOCK_BYTES + start
        if offset:
            self._file.write(offset, content)
        else:
            held = len(self._first)
            self._first[:] = content[:held]
            self._file.write(held, content[held:])

    def have(self, block: int, buffer: memoryview, first: bytes) -> memoryview | None:
        """What an earlier attempt wrote of a block; `first` are the bytes it withheld."""
        view = buffer[: block_length(block, self.size)]
        try:
            if not self._file.read_into(block * BLOCK_BYTES, view):
                return None
        except DiskError as error:
            if error.errno != errno.EIO:
                raise
            return None  # a bad sector: what cannot be read is not here
        if block == 0:
            held = len(self._first)
            view[:held] = first[:held]
        return view

    def complete(self) -> None:
        """Everything has landed: write what was withheld. Putting it in place is the caller's."""
        self._file.truncate(self.size)
        self._file.write(0, self._first)


class PartLanding:
    """Some tensors of a remote file, laid out anew in a file of their own.

    Args:
        file: the file.
        header: its header.
        moves: spans of the remote file, in order, and the offset in this file each goes to.
        size: bytes of the remote file.
    """

    def __init__(
        self, file: AtomicFile, header: bytes, moves: Iterable[tuple[Span, int]], size: int
    ) -> None:
        self._file = file
        self._header = memoryview(header)
        wanted = [move for move in moves if move[0].length]
        self._spans = _Spans([span for span, _ in wanted])
        self._offsets = [offset for _, offset in wanted]
        self.size = size

    @property
    def blocks(self) -> Sequence[int]:
        return self._spans.blocks

    def place(self) -> BlockPlace:
        return _AsidePlace(self, self.size)

    def put(self, block: int, content: memoryview) -> None:
        origin = block * BLOCK_BYTES
        for number, begin, end in self._spans.in_block(block):
            target = self._offsets[number] + begin - self._spans.starts[number]
            self._file.write(target, content[begin - origin : end - origin])

    def complete(self) -> None:
        """Everything has landed: write the header. Putting it in place is the caller's."""
        self._file.write(_WITHHELD_BYTES, self._header[_WITHHELD_BYTES:])
        self._file.write(0, self._header[:_WITHHELD_BYTES])


class _Putting(Protocol):
    def put(self, block: int, content: memoryview) -> None: ...


class _AsidePlace:
    """Receives a block aside and puts it where it belongs when it has landed."""

    def __init__(self, landing: _Putting, size: int) -> None:
        self._landing = landing
        self._size = size
        self._aside = _Aside()

    def views(self, block: int) -> Sequence[memoryview]:
        return (self._aside.buffer(block_length(block, self._size)),)

    def landed(self, block: int) -> None:
        self._landing.put(block, self._aside.buffer(block_length(block, self._size)))


class _Aside:
    """One block's buffer, made when it is first needed."""

    def __init__(self) -> None:
        self._buffer: memoryview | None = None

    def buffer(self, length: int) -> memoryview:
        if self._buffer is None:
            self._buffer = byte_view(empty((BLOCK_BYTES,), np.dtype(np.uint8)))
        return self._buffer[:length]


class _Spans:
    """Spans of a file that come in order and do not overlap, and which of them a block touches."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.starts = [span.offset for span in spans]
        self.ends = [span.offset + span.length for span in spans]
        self.blocks = _covering(self.starts, self.ends)

    def around(self, block: int) -> int | None:
        """The number of the one that has every byte of a block, if one has."""
        first = block * BLOCK_BYTES
        number = bisect_right(self.ends, first)
        if number == len(self.ends) or self.starts[number] > first:
            return None
        return number if self.ends[number] >= first + BLOCK_BYTES else None

    def count_in(self, block: int) -> int:
        """How many have bytes in the block."""
        return len(self._touched(block))

    def in_block(self, block: int) -> Iterator[tuple[int, int, int]]:
        """The number of each that has bytes in the block, with where these begin and end."""
        first, last = block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES
        for number in self._touched(block):
            yield number, max(first, self.starts[number]), min(last, self.ends[number])

    def _touched(self, block: int) -> range:
        first = block * BLOCK_BYTES
        return range(bisect_right(self.ends, first), bisect_left(self.starts, first + BLOCK_BYTES))


def _covering(starts: Sequence[int], ends: Sequence[int]) -> list[int]:
    """The blocks that cover spans which come in order, none of them empty."""
    blocks: list[int] = []
    reached = 0  # the first block that is not listed yet
    for start, end in zip(starts, ends, strict=True):
        if end > reached * BLOCK_BYTES:
            first, reached = max(reached, start // BLOCK_BYTES), -(-end // BLOCK_BYTES)
            blocks.extend(range(first, reached))
    return blocks
