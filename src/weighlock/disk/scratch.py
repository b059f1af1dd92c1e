"""A file without a name, for bytes that are needed again soon. Knows not what they mean.

Nothing has to be deleted: the file goes with its descriptor, however the process ends.
"""

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterable, Iterator

from weighlock.disk.effects import Disk, PosixDisk
from weighlock.disk.place import Place
from weighlock.errors import DiskError, ShortRead
from weighlock.tensors.spec import Span

__all__ = ["Scratch"]


class Scratch:
    """An unnamed file that grows at its end and is read anywhere.

    Args:
        directory: where its bytes lie; the system's directory for temporary files if not given.
        disk: the effects; the machine's own if not given.

    Raises:
        DiskError: no file can be made there.
    """

    def __init__(self, directory: str | None = None, disk: Disk | None = None) -> None:
        disk = disk or PosixDisk()
        self.label = os.path.join(directory or tempfile.gettempdir(), "unnamed scratch file")
        self._lock = threading.Lock()
        self._users = 0
        self._closed = False
        self.size = 0
        self._place = Place(self.label, disk)
        try:
            with self._place.errors("cannot be created"):
                unnamed = disk.create_unnamed(self._place.directory)
                if unnamed is None:
                    unnamed = _created_and_unlinked(directory)
            self._fd = unnamed
        except BaseException:
            self._place.close()
            raise

    def append(self, pieces: Iterable[memoryview], length: int) -> Span:
        """Add bytes at the end; returns where they lie.

        Raises:
            NoSpace: there is no room for `length` bytes.
            ShortRead: the pieces had another length.
        """
        self._place.reserve(length)
        with self._lock:
            start, self.size = self.size, self.size + length
        done = 0
        with (
            self.descriptor() as fd,
            self._place.errors(f"writing {length:,} bytes failed", length),
        ):
            for piece in pieces:
                view = piece[: length - done]
                while len(view):
                    taken = os.pwrite(fd, view, start + done)
                    done += taken
                    view = view[taken:]
        if done != length:
            raise ShortRead(
                f"{self.label}: {length:,} bytes were announced, {done:,} came",
                wanted=length,
                got=done,
            )
        return Span(start, length)

    @contextlib.contextmanager
    def descriptor(self) -> Iterator[int]:
        """The file. Closed when nobody uses it: its number may soon be another file's."""
        with self._lock:
            if self._closed:
                raise DiskError(f"{self.label}: used after it was closed")
            self._users += 1
        try:
            yield self._fd
        finally:
            with self._lock:
                self._users -= 1
                is_last = self._closed and not self._users
            if is_last:
                self._let_go()

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer from that offset."""
        done = 0
        with self.descriptor() as fd:
            while done < len(buffer):
                got = os.preadv(fd, [buffer[done:]], offset + done)
                if got == 0:
                    raise ShortRead(
                        f"{self.label}: ends at byte {offset + done:,}",
                        wanted=len(buffer),
                        got=done,
                    )
                done += got

    def close(self) -> None:
        """Let the file go as soon as nobody reads it, and its bytes with it. Idempotent."""
        with self._lock:
            self._closed = True
            if self._users:
                return
        self._let_go()

    def _let_go(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        self._place.close()


def _created_and_unlinked(directory: str | None) -> int:
    with tempfile.TemporaryFile(dir=directory) as file:
        return os.dup(file.fileno())
