"""Files and memory as sources. Knows descriptors, `pread` and fingerprints; not what bytes mean.

Reading goes through `pread`, never mmap: a file truncated under a mapping kills the process with
SIGBUS, a `pread` of it comes back short and raises.
"""

import contextlib
import ctypes
import errno
import os
import stat
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from weighlock.errors import NotAllowed, NotFound, ShortRead, SourceChanged, SourceError
from weighlock.per_process import PerProcess
from weighlock.sources.turns import in_turns
from weighlock.tensors.arrays import HUGE_PAGE

__all__ = ["BytesSource", "FileSource", "Fingerprint", "names_in"]

_PARALLEL_BYTES = 8 * 1024 * 1024
"""From this size on two threads share a read: page faults and copies then run on two cores."""

_STRIP_BYTES = HUGE_PAGE
"""The least that two threads can share without faulting on the same page. In the end one of them
waits for the other's last strip, once for every tensor."""

_MOST_PER_CALL = 0x7FFF_F000  # what Linux moves in one system call at the most

Path: TypeAlias = "str | os.PathLike[str]"
Part: TypeAlias = tuple[int, memoryview]


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What tells a file from a changed or another one."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> "Fingerprint":
        """The fingerprint in a stat result."""
        return cls(
            status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        )

    def is_of(self, status: os.stat_result) -> bool:
        """Whether a stat result shows the same."""
        return (
            self.inode == status.st_ino
            and self.mtime_ns == status.st_mtime_ns
            and self.ctime_ns == status.st_ctime_ns
            and self.size == status.st_size
            and self.device == status.st_dev
        )


class FileSource:
    """A regular file.

    Args:
        path: the file. Remembered as an absolute path.
        hold: keep a descriptor open; otherwise each read opens the file. Unpickled sources do not
            hold, so that any number of unpickled refs cost no descriptors.
        fingerprint: what the file must look like; taken at opening if not given.

    Every read checks the fingerprint: a file that was overwritten, truncated, grown or replaced
    since raises `SourceChanged`. One that was only unlinked can still be read while it is held.
    """

    __slots__ = ("_closed", "_fd", "_rests", "_use", "fingerprint", "path")

    def __init__(
        self, path: Path, *, hold: bool = True, fingerprint: Fingerprint | None = None
    ) -> None:
        self.path = os.path.abspath(os.fspath(path))
        self._use = PerProcess(_Use)
        self._closed = self._rests = False
        self._fd = -1
        if fingerprint is not None and not hold:
            self.fingerprint = fingerprint
            return
        fd = _open(self.path)
        try:
            self.fingerprint = Fingerprint.of(os.fstat(fd))
            if fingerprint is not None and self.fingerprint != fingerprint:
                raise _changed(self.path, fingerprint, self.fingerprint)
        except BaseException:
            os.close(fd)
            raise
        if hold:
            self._fd = fd
        else:
            os.close(fd)

    @property
    def label(self) -> str:
        """The path."""
        return self.path

    @property
    def size(self) -> int:
        """The file's length when it was opened."""
        return self.fingerprint.size

    @property
    def is_held(self) -> bool:
        """Whether it keeps a descriptor open, so that using one costs none."""
        return self._fd >= 0

    def __repr__(self) -> str:
        return f"FileSource({self.path!r})"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, FileSource)
            and self.path == other.path
            and self.fingerprint == other.fingerprint
        )

    def __hash__(self) -> int:
        return hash((self.path, self.fingerprint))

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickled, (self.path, self.fingerprint)

    def __del__(self) -> None:
        # A descriptor is this process's own, also after a fork: closing it harms nobody else.
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)
            self._fd = -1

    def close(self) -> None:
        """Close the descriptor, as soon as no read is using it. Idempotent."""
        use = self._use()
        with use.lock:
            self._closed = True
            self._close_if_idle(use)

    def rest(self) -> None:
        """Hold no descriptor any more: from now on each read opens the file."""
        use = self._use()
        with use.lock:
            self._rests = True
            self._close_if_idle(use)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer from that offset, with two threads if it is large."""
        if offset < 0:  # preadv would take -1 for "where the descriptor stands"
            raise SourceError(f"{self.path}: has no byte {offset}")
        with self.descriptor() as fd:
            if len(buffer) >= _PARALLEL_BYTES:
                _fill_with_two_threads(fd, ((offset, buffer),), self.path)
            else:
                _fill(fd, offset, buffer, self.path)

    def read_many(self, parts: Sequence[Part]) -> None:
        """Fill each buffer from its offset: with two threads, and one look at the fingerprint."""
        for offset, _ in parts:
            if offset < 0:
                raise SourceError(f"{self.path}: has no byte {offset}")
        with self.descriptor() as fd:
            if sum(len(buffer) for _, buffer in parts) >= _PARALLEL_BYTES:
                _fill_with_two_threads(fd, parts, self.path)
            else:
                for offset, buffer in parts:
                    _fill(fd, offset, buffer, self.path)

    def descriptor(self) -> contextlib.AbstractContextManager[int]:
        """A descriptor of the file; on leaving, the file must still be the one that was opened.

        Raises:
            SourceChanged: it is not.
        """
        return _Descriptor(self)

    def check(self, fd: int) -> None:
        """Look whether this descriptor of a held file is still of the one that was opened.

        Raises:
            SourceChanged: it is not.
        """
        self._check(fd, held=True)

    def _check(self, fd: int, *, held: bool) -> None:
        now = os.fstat(fd)
        if self.fingerprint.is_of(now):
            return
        found = Fingerprint.of(now)
        if held and now.st_nlink == 0 and not os.path.lexists(self.path):
            # Unlinking moves ctime and nothing else; the inode still holds what was opened.
            before = self.fingerprint
            if (found.size, found.mtime_ns) == (before.size, before.mtime_ns):
                return
        raise _changed(self.path, self.fingerprint, found)

    def _acquire(self) -> int:
        use = self._use()
        with use.lock:
            if self._closed:
                raise SourceError(f"{self.path}: used after it was closed")
            if self._fd >= 0:
                use.readers += 1
            return self._fd

    def _release(self) -> None:
        use = self._use()
        with use.lock:
            use.readers -= 1
            self._close_if_idle(use)

    def _close_if_idle(self, use: "_Use") -> None:
        if (self._closed or self._rests) and use.readers <= 0 and self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


class _Descriptor:
    """The descriptor of a file for the time of one use.

    A class, as a generator takes twice as long to enter and leave, and every read does.
    """

    __slots__ = ("_fd", "_held", "_source")

    def __init__(self, source: FileSource) -> None:
        self._source = source

    def __enter__(self) -> int:
        fd = self._source._acquire()
        self._held = fd >= 0
        self._fd = fd if self._held else _open(self._source.path)
        return self._fd

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None or issubclass(kind, ShortRead):
                # A shrunken file is a changed one: say so rather than that it is short.
                self._source._check(self._fd, held=self._held)
        finally:
            if self._held:
                self._source._release()
            else:
                os.close(self._fd)


class _Use:
    """How many reads of one process use a descriptor now."""

    __slots__ = ("lock", "readers")

    def __init__(self) -> None:
        # Reentrant: a signal handler may read what its own thread is just reading.
        self.lock = threading.RLock()
        self.readers = 0


def _unpickled(path: str, fingerprint: Fingerprint) -> FileSource:
    return FileSource(path, hold=False, fingerprint=fingerprint)


def _changed(path: str, before: Fingerprint, now: Fingerprint) -> SourceChanged:
    if (before.device, before.inode) != (now.device, now.inode):
        what = "another file is there now"
    elif before.size != now.size:
        what = f"it had {before.size:,} bytes and has {now.size:,} now"
    else:
        what = "it was written, replaced or renamed"
    return SourceChanged(f"{path}: changed since it was opened ({what}); open it again")


def _open(path: str) -> int:
    try:
        # O_NONBLOCK: opening a named pipe must not wait for a writer before it can be refused.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        kinds = {errno.ENOENT: NotFound, errno.EACCES: NotAllowed}
        raise kinds.get(error.errno or 0, SourceError)(
            f"{path}: cannot be opened: {error.strerror}", errno=error.errno
        ) from error
    except ValueError as error:  # a NUL in the path
        raise SourceError(f"{path!r}: cannot be a path: {error}") from error
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        kind = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
        raise SourceError(f"{path}: is {kind}", errno=errno.EISDIR if "dir" in kind else None)
    return fd


def _fill(fd: int, offset: int, buffer: memoryview, path: str) -> None:
    wanted = len(buffer)
    done = 0
    try:
        while done < wanted:
            got = os.preadv(fd, [buffer[done : done + _MOST_PER_CALL]], offset + done)
            if got == 0:
                raise ShortRead(
                    f"{path}: ends at byte {offset + done:,}; {wanted:,} bytes were wanted from "
                    f"{offset:,}, {done:,} were there",
                    wanted=wanted,
                    got=done,
                )
            done += got
    except ShortRead:
        raise
    except OSError as error:
        raise SourceError(
            f"{path}: reading {wanted:,} bytes at {offset:,} failed: {error.strerror}",
            errno=error.errno,
        ) from error


def _fill_with_two_threads(fd: int, parts: Iterable[Part], path: str) -> None:
    """Fill buffers with two threads that take the next strip each."""

    def fill(strip: Part) -> None:
        offset, buffer = strip
        _fill(fd, offset, buffer, path)

    in_turns(_strips(parts), lambda: fill, 2)


def _strips(parts: Iterable[Part]) -> Iterator[Part]:
    for offset, buffer in parts:
        begin = 0
        # The first ends where a huge page does: two threads never fault on the same one.
        end = _STRIP_BYTES - _address(buffer) % HUGE_PAGE if len(buffer) > _STRIP_BYTES else None
        while begin < len(buffer):
            yield offset + begin, buffer[begin:end]
            begin = len(buffer) if end is None else end
            end = begin + _STRIP_BYTES


def _address(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


class BytesSource:
    """Bytes in memory. A pickle of it holds them all."""

    __slots__ = ("_closed", "_view", "label")

    def __init__(self, data: "bytes | bytearray | memoryview", label: str = "bytes") -> None:
        self._view = memoryview(data).cast("B").toreadonly()
        self._closed = False
        self.label = label

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self._view.nbytes

    def __repr__(self) -> str:
        return f"<BytesSource {self.label} of {self.size:,} bytes>"

    def __reduce__(self) -> tuple[object, ...]:
        return BytesSource, (bytes(self._view), self.label)

    def close(self) -> None:
        """Refuse further reads; the memory is whoever's it was."""
        self._closed = True

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Copy from memory."""
        if self._closed or offset < 0:
            what = "used after it was closed" if self._closed else f"has no byte {offset}"
            raise SourceError(f"{self.label}: {what}")
        found = self._view[offset : offset + len(buffer)]
        if len(found) != len(buffer):
            raise ShortRead(
                f"{self.label}: ends at byte {self.size:,}; {len(buffer):,} bytes were wanted from "
                f"{offset:,}, {len(found):,} were there",
                wanted=len(buffer),
                got=len(found),
            )
        buffer[:] = found


def names_in(directory: str) -> list[str]:
    """What a directory holds, sorted.

    Raises:
        SourceError: it cannot be listed.
    """
    try:
        return sorted(os.listdir(directory))
    except OSError as error:
        raise SourceError(
            f"{directory}: cannot be listed: {error.strerror}", errno=error.errno
        ) from error
