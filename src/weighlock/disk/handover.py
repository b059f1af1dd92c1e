"""A spool's file made a lasting one: given another name, or copied. Knows bytes, not formats."""

import contextlib
import errno
import os
import stat

from weighlock.disk.atomic import AtomicFile
from weighlock.disk.effects import Disk
from weighlock.disk.lease import Lease
from weighlock.errors import DiskError

__all__ = ["placed"]

_NO_LINK = {
    errno.EXDEV,
    errno.EPERM,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EMLINK,
    errno.ENOENT,  # of /proc
}
"""How file systems say that a file cannot have a second name there."""

_STEP_BYTES = 1024 * 1024


def placed(
    lease: Lease,
    path: "str | os.PathLike[str]",
    *,
    durable: bool = True,
    staged: bool = False,
    disk: Disk | None = None,
) -> bool:
    """Put a file that landed in a spool in another place as well, atomically.

    On the same file system it gets a second name, and loses the first by `lease.moved()`: at no
    instant has it none. Elsewhere it is copied.

    Args:
        lease: the file.
        path: the destination; what is there is replaced.
        durable: survive a power loss once this returns.
        staged: it lies in a directory that is put in place, and synced, as a whole.
        disk: the effects; the machine's own if not given.

    Returns:
        Whether it is the same file that has another name now, and was not copied.

    Raises:
        SpoolClosed: the spool was closed. DiskError: the disk refused. Nothing has changed then.
    """
    fd = lease.open()
    try:
        with _Renamed(path, fd, durable=durable, staged=staged, disk=disk) as file:
            try:
                if file.is_near:
                    lease.altering()
                    file.commit()
                    return True
            except DiskError as error:
                if error.errno not in _NO_LINK:
                    raise
        with AtomicFile(path, durable=durable, staged=staged, disk=disk) as copy:
            _copy(fd, copy)
        return False
    finally:
        os.close(fd)


class _Renamed(AtomicFile):
    """A file that exists already, and is to have a name more."""

    def __init__(
        self,
        path: "str | os.PathLike[str]",
        existing: int,
        *,
        durable: bool,
        staged: bool,
        disk: Disk | None,
    ) -> None:
        self._existing = existing
        self.is_near = False
        super().__init__(path, durable=durable, staged=staged, disk=disk)

    def _leave(self, error: BaseException | None) -> None:
        self.discard()  # nothing once it is committed

    def _create(self) -> None:
        self._fd = os.dup(self._existing)
        here, there = os.fstat(self._fd), os.fstat(self._place.directory)
        self.is_near = here.st_dev == there.st_dev

    def _commit(self) -> None:
        before = stat.S_IMODE(os.fstat(self._existing).st_mode)
        with self._place.errors("cannot be put in place"):
            os.fchmod(self._existing, 0o666 & ~_umask())
        try:
            super()._commit()
        except BaseException:
            if self._temporary is not None or self._fd >= 0:  # it is not in place
                with contextlib.suppress(OSError):
                    os.fchmod(self._existing, before)
            raise

    def _rename(self, temporary: str) -> None:
        super()._rename(temporary)
        # It may have that name already, from an attempt that ended later. To rename one name of a
        # file to another one does nothing.
        with contextlib.suppress(OSError):
            self._disk.unlink(self._place.directory, temporary)


def _umask() -> int:
    """What new files of this process are not allowed; asked without setting it for all threads."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o077


def _copy(fd: int, copy: AtomicFile) -> None:
    size = os.fstat(fd).st_size
    copy.reserve(size)
    done = copy.copy(fd, 0, 0, size)
    while done < size:
        try:
            piece = os.pread(fd, min(_STEP_BYTES, size - done), done)
        except OSError as error:
            raise DiskError(
                f"{copy.path}: what is copied there cannot be read: {error.strerror}",
                errno=error.errno,
            ) from error
        if not piece:
            raise DiskError(f"{copy.path}: what is copied there ends at byte {done:,} of {size:,}")
        copy.write(done, memoryview(piece))
        done += len(piece)
