"""Where arriving blocks are put: memory, given arrays, a file. Knows spans and buffers; no socket.

A landing is shared by the connections of a fetch; each asks it for a place of its own. A block
counts only when the place is told that it landed: until then its bytes may be anything.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from weighlock.disk.atomic import AtomicFile
from weighlock.sources.grid import BLOCK_BYTES, block_count, block_span, blocks_of
from weighlock.sources.http_remote import BlockPlace
from weighlock.tensors.arrays import byte_view, empty
from weighlock.tensors.spec import Span

__all__ = ["FileLanding", "Landing", "LandingFile", "MemoryLanding", "PartLanding", "Target"]

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


@dataclass(frozen=True, slots=True)
class Target:
    """Bytes of the remote file, and the memory they go to."""

    span: Span
    view: memoryview


class MemoryLanding:
    """Tensors in memory: their own new buffers, or arrays somebody has.

    Args:
        targets: in the order of the remote file, without overlaps.
        size: bytes of the remote file.
    """

    def __init__(self, targets: Iterable[Target], size: int) -> None:
        self._targets = [target for target in targets if target.span.length]
        self._starts = [target.span.offset for target in self._targets]
        self.size = size

    @property
    def blocks(self) -> Sequence[int]:
        return _covering(target.span for target in self._targets)

    def place(self) -> BlockPlace:
        return _MemoryPlace(self)

    def put(self, block: int, content: memoryview) -> None:
        whole = block_span(block, self.size)
        for part, view in self.pieces(block):
            first = part.offset - whole.offset
            view[:] = content[first : first + part.length]

    def pieces(self, block: int) -> list[tuple[Span, memoryview]]:
        """The parts of a block that are wanted, and where each goes."""
        whole = block_span(block, self.size)
        found = []
        for number in range(
            max(0, bisect_right(self._starts, whole.offset) - 1), len(self._starts)
        ):
            target = self._targets[number]
            if target.span.offset >= whole.end:
                break
            begin = max(whole.offset, target.span.offset)
            end = min(whole.end, target.span.end)
            if begin < end:
                first = begin - target.span.offset
                view = target.view[first : first + end - begin]
                found.append((Span(begin, end - begin), view))
        return found


class _MemoryPlace:
    """Receives straight into the tensors; what nobody wants goes aside."""

    def __init__(self, landing: MemoryLanding) -> None:
        self._landing = landing
        self._aside = _Aside()
        self._is_direct = False

    def views(self, block: int) -> Sequence[memoryview]:
        whole = block_span(block, self._landing.size)
        pieces = self._landing.pieces(block)
        self._is_direct = len(pieces) <= _DIRECT_PIECES
        aside = self._aside.buffer(whole.length)
        if not self._is_direct:
            return (aside,)
        views: list[memoryview] = []
        reached = whole.offset
        for part, view in pieces:
            if part.offset > reached:
                views.append(aside[reached - whole.offset : part.offset - whole.offset])
            views.append(view)
            reached = part.end
        if reached < whole.end:
            views.append(aside[reached - whole.offset :])
        return views

    def landed(self, block: int) -> None:
        if not self._is_direct:
            whole = block_span(block, self._landing.size)
            self._landing.put(block, self._aside.buffer(whole.length))


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

    def put(self, block: int, content: memoryview) -> None:
        whole = block_span(block, self.size)
        if block:
            self._file.write(whole.offset, content)
        else:
            held = len(self._first)
            self._first[:] = content[:held]
            self._file.write(held, content[held:])

    def have(self, block: int, buffer: memoryview, first: bytes) -> memoryview | None:
        """What an earlier attempt wrote of a block; `first` are the bytes it withheld."""
        view = buffer[: block_span(block, self.size).length]
        if not self._file.read_into(block * BLOCK_BYTES, view):
            return None
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
        self._moves = [move for move in moves if move[0].length]
        self._starts = [span.offset for span, _ in self._moves]
        self.size = size

    @property
    def blocks(self) -> Sequence[int]:
        return _covering(span for span, _ in self._moves)

    def place(self) -> BlockPlace:
        return _AsidePlace(self, self.size)

    def put(self, block: int, content: memoryview) -> None:
        whole = block_span(block, self.size)
        for number in range(
            max(0, bisect_right(self._starts, whole.offset) - 1), len(self._starts)
        ):
            span, target = self._moves[number]
            if span.offset >= whole.end:
                break
            begin, end = max(whole.offset, span.offset), min(whole.end, span.end)
            if begin < end:
                part = content[begin - whole.offset : end - whole.offset]
                self._file.write(target + begin - span.offset, part)

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
        return (self._aside.buffer(block_span(block, self._size).length),)

    def landed(self, block: int) -> None:
        self._landing.put(block, self._aside.buffer(block_span(block, self._size).length))


class _Aside:
    """One block's buffer, made when it is first needed."""

    def __init__(self) -> None:
        self._buffer: memoryview | None = None

    def buffer(self, length: int) -> memoryview:
        if self._buffer is None:
            self._buffer = byte_view(empty((BLOCK_BYTES,), np.dtype(np.uint8)))
        return self._buffer[:length]


def _first(starts: Sequence[int], offset: int) -> int:
    """The number of the last start that does not lie behind an offset."""
    return max(0, bisect_right(starts, offset) - 1)


def _covering(spans: Iterable[Span]) -> list[int]:
    """The blocks that cover spans which come in order."""
    blocks: list[int] = []
    for span in spans:
        found = blocks_of(span)
        if blocks and found and found.start <= blocks[-1]:
            found = range(blocks[-1] + 1, found.stop)
        blocks.extend(found)
    return blocks
