"""A file is put in its place, and is known there. Knows files; not what lands in them.

Others may write to the same name at the same time: whoever opened it by that name could get theirs.
"""

import os
from contextlib import nullcontext

from weighlock.abort import Abort
from weighlock.disk.atomic import AtomicFile
from weighlock.disk.exclusion import exclusively
from weighlock.errors import SourceChanged, SourceError
from weighlock.formats.detect import open_catalog
from weighlock.limits import Limits
from weighlock.sources.local import FileSource
from weighlock.tensors.catalog import Catalog

__all__ = ["Compared", "Differs", "opened", "put_in_place"]

_COMPARED_BYTES = 1024 * 1024


def put_in_place(file: AtomicFile, *, keeps: bool, abort: Abort) -> FileSource:
    """Commit a file, and open what has its name then.

    Others may fetch to the same name, and be later by an instant: what they put there is given only
    if it is the same, byte by byte.

    Args:
        file: the file, complete.
        keeps: one that is there already and is the same stays, and this one is discarded. Of
            several that do so at once, one is first.
        abort: ends the wait for others.

    Raises:
        DiskError: it cannot be put in place. SourceChanged: there is something else by now.
    """
    directory = os.path.dirname(file.path) or "."
    # Held meanwhile: the number of a file that is gone may soon be another one's.
    with file.held() as mine:
        with exclusively(directory, abort) if keeps else nullcontext():
            if keeps and (there := _same_at(file.path, mine)) is not None:
                file.discard()
                return there
            file.commit()
            there = _same_at(file.path, mine)
        if there is None:
            raise SourceChanged(
                f"{file.path}: another process or thread has replaced it since it landed: do "
                "several fetches write to the same name?"
            )
        return there


def _same_at(path: str, mine: int) -> FileSource | None:
    """The file at a path, if it is the one of this descriptor or holds the same bytes."""
    try:
        there = FileSource(path)
    except SourceError:
        return None
    try:
        if _is_same(mine, there):
            return there
    except SourceChanged:
        pass  # replaced once more
    except BaseException:
        there.close()
        raise
    there.close()
    return None


def _is_same(mine: int, there: FileSource) -> bool:
    status, found = os.fstat(mine), there.fingerprint
    if (status.st_dev, status.st_ino) == (found.device, found.inode):
        return True
    if status.st_size != there.size:
        return False
    other = Compared(there)
    try:
        done = 0
        while done < there.size:
            piece = os.pread(mine, _COMPARED_BYTES, done)
            if not piece:
                return False
            other.write(done, memoryview(piece))
            done += len(piece)
    except Differs:
        return False
    except OSError as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(
            f"{there.path}: cannot be compared: {error.strerror}", errno=error.errno
        ) from error
    return True


class Differs(Exception):
    """A file holds something else than what would be written to it."""


class Compared:
    """A file that is there: what is written is only compared with what it holds.

    Args:
        there: the file.
    """

    def __init__(self, there: FileSource) -> None:
        self._there = there

    def write(self, offset: int, data: memoryview) -> None:
        """Raise `Differs` unless this is what the file holds at that offset."""
        if offset + len(data) > self._there.size:
            raise Differs
        for begin in range(0, len(data), _COMPARED_BYTES):
            part = data[begin : begin + _COMPARED_BYTES]
            held = bytearray(len(part))
            self._there.read_into(offset + begin, memoryview(held))
            if held != part:
                raise Differs

    def truncate(self, size: int) -> None:
        """Raise `Differs` unless this is the file's length."""
        if size != self._there.size:
            raise Differs

    def read_into(self, offset: int, buffer: memoryview) -> bool:
        """Fill the buffer with what it holds there; False if it ends before."""
        if offset + len(buffer) > self._there.size:
            return False
        self._there.read_into(offset, buffer)
        return True


def opened(source: FileSource, limits: Limits) -> Catalog:
    """The catalog of a file, which is closed if it is none."""
    try:
        return open_catalog(source, limits)
    except BaseException:
        source.close()
        raise
