"""The rows of a tensor, readable from any unit on. Knows where refs lie; not what is made of them.

What lies whole in memory or in a source is read where it is. What would have to be gathered or
unpacked from the start for every block is laid down once: in memory if small, else in a file
without a name.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from weighlock.abort import Abort
from weighlock.combining.plan import Part
from weighlock.combining.rounding import unit_bytes
from weighlock.disk.scratch import Scratch
from weighlock.sources.inflated import InflatedSource
from weighlock.sources.local import BytesSource, FileSource
from weighlock.tensors.ref import TensorRef
from weighlock.tensors.stored import Readable, StoredRef

__all__ = ["KeepsBlocks", "Rows", "heeding", "is_near", "is_remote", "remote_sources"]

_KEPT_BYTES = 8 * 1024 * 1024
"""Gathered rows of one tensor that are kept in memory, all together."""


@runtime_checkable
class KeepsBlocks(Protocol):
    """A source that holds some of what it read, for the next reads."""

    def keep_at_most(self, blocks: int, *, connections: bool = True) -> None:
        """Hold no more than so many blocks, and connections that nobody uses only if told to."""


def is_remote(ref: TensorRef) -> bool:
    """Whether a row takes a request: worth reading ahead, with others at the same time."""
    return (
        isinstance(ref, StoredRef)
        and ref.contiguous_span is not None
        and not isinstance(ref.source, (BytesSource, InflatedSource))
        and not hasattr(ref.source, "descriptor")  # a file has one
    )


def remote_sources(parts: Iterable[Part]) -> list[Readable]:
    """Every source that rows are asked of, once."""
    found = {
        id(r.source): r.source
        for p in parts
        for r in p.refs
        if isinstance(r, StoredRef) and is_remote(r)
    }
    return list(found.values())


def is_near(ref: TensorRef) -> bool:
    """Whether a row lies on this machine as it will be read."""
    place = _place(ref)
    return place is not None and not is_remote(ref)


class Rows:
    """Reads the rows of one part. Opened when its first block is due, closed after its last.

    Files that are held anyway are looked at once, when all of a row was read, and not after every
    block: between two looks of one thread another one waits for the interpreter.
    """

    def __init__(self, part: Part, directory: str | None, abort: Abort) -> None:
        self.part = part
        self._abort = abort
        self.widths = [unit_bytes(ref.dtype) for ref in part.refs]
        self.read_width = sum(self.widths)
        self.made_width = unit_bytes(part.spec.dtype)
        self.left = part.units
        """Units not yet done; for who closes."""
        self._places: list[memoryview | tuple[Readable, int] | None] = [
            _place(ref) for ref in part.refs
        ]
        self._files: dict[int, _Held] = {}
        self._others: list[int] = []
        self._uses = contextlib.ExitStack()
        self._directory = directory
        self._scratch: Scratch | None = None

    def prepare(self, row: int) -> None:
        """Lay a row down if it cannot be read where it is.

        Raises:
            Aborted: somebody said stop meanwhile.
        """
        place = self._places[row]
        if isinstance(place, tuple) and isinstance(place[0], FileSource) and place[0].is_held:
            fd = self._uses.enter_context(place[0].descriptor())
            self._files[row] = _Held(place[0], fd, place[1], self.widths[row])
        else:
            self._others.append(row)
        if place is not None:
            return
        ref = self.part.refs[row]
        if self.part.read_bytes <= _KEPT_BYTES:
            buffer = memoryview(bytearray(ref.nbytes))
            if ref.nbytes:
                ref.load(out=buffer)
            self._places[row] = buffer
            return
        if self._scratch is None:
            self._scratch = Scratch(self._directory)
        span = self._scratch.append(heeding(ref.pieces(), self._abort), ref.nbytes)
        self._places[row] = self._scratch, span.offset

    def fill(self, first: int, units: int, buffers: Sequence[memoryview]) -> list[int]:
        """Read so many units of every row that lies in a file that is held, with one call each.

        Returns:
            The rows that are left to be read otherwise: what does not come so is for its source to
            read, or to tell of.
        """
        left = self._others.copy()
        for row, (_, fd, offset, width) in self._files.items():
            length = units * width
            try:
                count = os.preadv(fd, (buffers[row][:length],), offset + first * width)
            except OSError:
                count = -1
            if count != length:
                left.append(row)
        return left

    def read_into(self, row: int, start: int, buffer: memoryview) -> None:
        """Fill the buffer from that byte of the row on; what came counts once it is checked."""
        place = self._places[row]
        assert place is not None  # noqa: S101
        if isinstance(place, memoryview):
            buffer[:] = place[start : start + len(buffer)]
        elif len(buffer):
            source, offset = place
            source.read_into(offset + start, buffer)

    def check(self, row: int) -> None:
        """Raise if the row comes from a file that changed since it was opened."""
        file = self._files.get(row)
        if file is not None:
            file.source.check(file.fd)

    def close(self) -> None:
        """Let go of what was laid down, and of files."""
        self._uses.__exit__(_Left, _Left(), None)
        with contextlib.suppress(OSError):
            if self._scratch is not None:
                self._scratch.close()


def heeding(pieces: Iterable[memoryview], abort: Abort) -> Iterator[memoryview]:
    """The pieces, until somebody says stop: large tensors are gathered for seconds."""
    for piece in pieces:
        abort.check()
        yield piece


class _Held(NamedTuple):
    """Where a row lies in a file that stays open."""

    source: FileSource
    fd: int
    offset: int
    width: int


class _Left(Exception):
    """Ends the use of a file without a look at what became of it."""


def _place(ref: TensorRef) -> memoryview | tuple[Readable, int] | None:
    memory = ref.memory()
    if memory is not None:
        return memory
    if isinstance(ref, StoredRef) and not isinstance(ref.source, InflatedSource):
        span = ref.contiguous_span
        if span is not None:
            return ref.source, span.offset
    return None
