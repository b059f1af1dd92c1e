"""A destination: a name in a directory that is held open, and errors that speak of it.

Holding the directory means that one renamed or replaced meanwhile is never written through.
"""

import contextlib
import copy
import errno
import os
from collections.abc import Iterator

from weighlock.disk.effects import Disk, PosixDisk
from weighlock.errors import DiskError, NoSpace, NotDurable, WeighlockError

__all__ = ["Place", "make_directories", "sync_directory", "sync_placed", "sync_removed"]

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}


class Place:
    """A name in a directory.

    Args:
        path: the name, with the directory.
        disk: the effects.
        directory: the directory, if it is open already; closed with the place.

    Raises:
        DiskError: it cannot be a file's or directory's name, or its directory cannot be opened.
    """

    def __init__(
        self, path: "str | os.PathLike[str]", disk: Disk, directory: int | None = None
    ) -> None:
        self.path = os.fspath(path)
        parent, self.name = os.path.split(self.path)
        self.disk = disk
        self.directory = -1 if directory is None else directory
        if self.name in ("", ".", ".."):
            raise DiskError(f"{self.path}: cannot be written: it names a directory")
        if directory is not None:
            return
        with self.errors("cannot be written: its directory"):
            self.directory = disk.open_directory(parent or ".")

    @contextlib.contextmanager
    def errors(self, doing: str, wanted_bytes: int = 0) -> Iterator[None]:
        """Translate what the system says into errors that name the destination."""
        try:
            yield
        except WeighlockError:  # it says already what is wrong, and it may not be the disk
            raise
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise self.no_space(wanted_bytes, error.errno) from error
            raise DiskError(f"{self.path}: {doing}: {error.strerror}", errno=error.errno) from error

    def no_space(self, wanted_bytes: int, number: int | None = None) -> NoSpace:
        """The error for a full disk, with both numbers."""
        free = self._free_bytes() or 0
        needed = f"{wanted_bytes:,} bytes are needed" if wanted_bytes else "for another file"
        return NoSpace(
            f"{self.path}: no space: {needed}, {free:,} bytes are free",
            wanted_bytes=wanted_bytes,
            free_bytes=free,
            errno=number or errno.ENOSPC,
        )

    def reserve(self, total_bytes: int) -> None:
        """Raise `NoSpace` now if so many bytes cannot fit, before any work is done for them."""
        free = self._free_bytes()
        if free is not None and total_bytes > free:
            raise self.no_space(total_bytes)

    def _free_bytes(self) -> int | None:
        try:
            return self.disk.free_bytes(self.directory)
        except OSError:
            return None

    def sync_directory(self) -> None:
        try:
            sync_directory(self.disk, self.directory)
        except OSError as error:
            raise NotDurable(
                f"{self.path}: is in place, but its directory could not be synced: "
                f"{error.strerror}; a power loss may undo it",
                errno=error.errno,
            ) from error

    def again(self) -> "Place":
        """The same name in the same directory, with a descriptor of its own."""
        other = copy.copy(self)
        with self.errors("cannot be written"):
            other.directory = os.dup(self.directory)
        return other

    def close(self) -> None:
        directory, self.directory = self.directory, -1
        if directory >= 0:
            with contextlib.suppress(OSError):  # nothing was written through it
                self.disk.close(directory)


def make_directories(path: "str | os.PathLike[str]", disk: Disk | None = None) -> None:
    """Make a directory and those above it, as far as they are not there.

    Those that are made survive a power loss: what is put in them later would be lost with them.

    Raises:
        DiskError: it cannot be made, or something else is there.
        NotDurable: it was made, and where it lies could not be synced.
    """
    path = os.fspath(path)
    above = _above_what_is_missing(path)
    try:
        os.makedirs(path, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        number = error.errno if isinstance(error, OSError) else None
        why = error.strerror if isinstance(error, OSError) else error
        raise DiskError(f"{path}: cannot be made: {why}", errno=number) from error
    for parent in above:
        _sync_entries(parent, path, disk or PosixDisk())


def _above_what_is_missing(path: str) -> list[str]:
    """The directories in which something of the path has to be made, the uppermost first."""
    above: list[str] = []
    missing = path.rstrip("/")
    while missing and not os.path.lexists(missing):
        parent = os.path.dirname(missing)
        above.append(parent or ".")
        missing = parent.rstrip("/")
    return above[::-1]


def _sync_entries(parent: str, path: str, disk: Disk) -> None:
    try:
        directory = disk.open_directory(parent)
    except OSError:
        return  # where one may write but not look, there is no way to ask for it
    try:
        sync_directory(disk, directory)
    except OSError as error:
        raise NotDurable(
            f"{path}: was made, but {parent} could not be synced: {error.strerror}; a power loss "
            "may undo it",
            errno=error.errno,
        ) from error
    finally:
        with contextlib.suppress(OSError):
            disk.close(directory)


def sync_directory(disk: Disk, directory: int) -> None:
    """Make a directory's entries survive a power loss, where the file system has to be asked."""
    try:
        disk.sync(directory)
    except OSError as error:
        # Some file systems have nothing to sync in a directory and say so.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def sync_placed(path: "str | os.PathLike[str]", disk: Disk | None = None) -> None:
    """Make a file that is in its place survive a power loss, whoever put it there.

    Raises:
        NotDurable: an fsync failed; the file stays.
        DiskError: it cannot be opened.
    """
    disk = disk or PosixDisk()
    place = Place(path, disk)
    try:
        with place.errors("cannot be opened to be synced"):
            fd = os.open(place.name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=place.directory)
        try:
            disk.sync(fd)
        except OSError as error:
            raise NotDurable(
                f"{place.path}: is in place, but could not be synced: {error.strerror}; "
                "a power loss may undo it",
                errno=error.errno,
            ) from error
        finally:
            os.close(fd)
        place.sync_directory()
    finally:
        place.close()


def sync_removed(path: "str | os.PathLike[str]", disk: Disk | None = None) -> None:
    """Make it survive a power loss that a file was removed.

    Raises:
        NotDurable: that failed. DiskError: its directory cannot be opened.
    """
    disk = disk or PosixDisk()
    place = Place(path, disk)
    try:
        sync_directory(disk, place.directory)
    except OSError as error:
        raise NotDurable(
            f"{place.path}: is removed, but its directory could not be synced: {error.strerror}; "
            "a power loss may bring it back",
            errno=error.errno,
        ) from error
    finally:
        place.close()
