"""A destination: a name in a directory that is held open, and errors that speak of it.

Holding the directory means that one renamed or replaced meanwhile is never written through.
"""

import contextlib
import errno
import os
from collections.abc import Iterator

from weighlock.disk.effects import Disk
from weighlock.errors import DiskError, NoSpace, NotDurable, ShortRead

__all__ = ["Place"]

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}


class Place:
    """A name in a directory.

    Raises:
        DiskError: it cannot be a file's or directory's name, or its directory cannot be opened.
    """

    def __init__(self, path: "str | os.PathLike[str]", disk: Disk) -> None:
        self.path = os.fspath(path)
        parent, self.name = os.path.split(self.path)
        self.disk = disk
        if self.name in ("", ".", ".."):
            raise DiskError(f"{self.path}: cannot be written: it names a directory")
        with self.errors("cannot be written: its directory"):
            self.directory = disk.open_directory(parent or ".")

    @contextlib.contextmanager
    def errors(self, doing: str, wanted_bytes: int = 0) -> Iterator[None]:
        """Translate what the system says into errors that name the destination."""
        try:
            yield
        except (DiskError, ShortRead):
            raise
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise self.no_space(wanted_bytes, error.errno) from error
            raise DiskError(f"{self.path}: {doing}: {error.strerror}", errno=error.errno) from error

    def no_space(self, wanted_bytes: int, number: int | None = None) -> NoSpace:
        """The error for a full disk, with both numbers."""
        free = self.free_bytes()
        return NoSpace(
            f"{self.path}: no space: {wanted_bytes:,} bytes are needed, {free:,} are free",
            wanted_bytes=wanted_bytes,
            free_bytes=free,
            errno=number or errno.ENOSPC,
        )

    def free_bytes(self) -> int:
        try:
            return self.disk.free_bytes(self.directory)
        except OSError:
            return 0

    def sync_directory(self) -> None:
        try:
            self.disk.sync(self.directory)
        except OSError as error:
            # Some file systems have nothing to sync in a directory and say so with EINVAL.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise NotDurable(
                    f"{self.path}: is in place, but its directory could not be synced: "
                    f"{error.strerror}; a power loss may undo it",
                    errno=error.errno,
                ) from error

    def close(self) -> None:
        directory, self.directory = self.directory, -1
        if directory >= 0:
            self.disk.close(directory)
