"""Every effect on a disk, one method each, so that a test can stand in for the disk.

`Disk` is what `atomic` asks for; `PosixDisk` is the real one. Names are relative to an open
directory, so that a directory renamed or replaced meanwhile is never written through. Errors are
the system's: `atomic` says what they mean.
"""

import errno
import fcntl
import os
import stat
from collections.abc import Sequence
from typing import Protocol

__all__ = ["Disk", "PosixDisk", "left_of"]

_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
_AGAIN = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0)
_UNNAMED = getattr(os, "O_TMPFILE", 0)

_NO_UNNAMED = {errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL}
"""How file systems and old kernels say that they have no O_TMPFILE."""

_NO_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}
"""How file systems say that they cannot copy between these two files by themselves."""

_NO_INSERT = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}
"""How file systems say that they cannot shift what a file holds. Any other error may have come in
the midst of it: what the file holds then is not known."""

_MOST_PARTS = 1024
"""What Linux and the BSDs take in one call: their IOV_MAX."""

_FALLOC_FL_INSERT_RANGE = 0x20
"""From linux/falloc.h."""


class Disk(Protocol):
    """The effects an atomic write is made of."""

    def open_directory(self, path: str) -> int:
        """A descriptor of a directory."""

    def create_unnamed(self, directory: int) -> int | None:
        """A new file without a name, gone when its descriptor closes; None if there is no such."""

    def create(self, directory: int, name: str, mode: int = 0o666) -> int:
        """A new file; fails if the name exists, also as a link."""

    def reopen(self, directory: int, name: str) -> int | None:
        """A regular file that is there, locked for this process; None if it cannot be had."""

    def names(self, directory: int) -> list[str]:
        """What a directory holds."""

    def lock(self, fd: int) -> bool:
        """Lock a file for this process until it is closed; False if another one has."""

    def unlock(self, fd: int) -> None:
        """Let go of a lock: forked children have the file open as well, so closing does not."""

    def truncate(self, fd: int, size: int) -> None:
        """Give a file that length."""

    def make_directory(self, directory: int, name: str, mode: int = 0o777) -> None:
        """A new directory; fails if the name exists, also as a link."""

    def write(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
        """Write parts one after the other from an offset on; returns how many bytes were taken."""

    def copy(
        self, source_fd: int, source_offset: int, fd: int, offset: int, count: int
    ) -> int | None:
        """Copy between files inside the kernel; None if it cannot."""

    def insert(self, fd: int, offset: int, count: int) -> bool:
        """Shift what follows the offset by `count` bytes without a copy; False if it cannot."""

    def sync(self, fd: int) -> None:
        """Make a file's content, or a directory's entries, survive a power loss."""

    def link(self, fd: int, directory: int, name: str) -> None:
        """Give an unnamed file a name, which must be new."""

    def rename(self, directory: int, old: str, new: str) -> None:
        """Give a file another name in its directory, replacing what has it."""

    def unlink(self, directory: int, name: str) -> None:
        """Remove a file's name."""

    def remove_directory(self, directory: int, name: str) -> None:
        """Remove an empty directory."""

    def close(self, fd: int) -> None:
        """Let go of a descriptor."""

    def free_bytes(self, directory: int) -> int | None:
        """Bytes an ordinary user can still write there; None if the file system has no bound."""

    def block_bytes(self, fd: int) -> int:
        """Size of the file system's blocks."""


class PosixDisk:
    """The machine's own disk."""

    def open_directory(self, path: str) -> int:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def create_unnamed(self, directory: int) -> int | None:
        if not _UNNAMED:
            return None
        try:
            fd = os.open(".", os.O_RDWR | os.O_CLOEXEC | _UNNAMED, 0o666, dir_fd=directory)
        except OSError as error:
            if error.errno in _NO_UNNAMED:
                return None
            raise
        if os.path.exists(_descriptor_path(fd)):
            return fd
        os.close(fd)  # without /proc it could never be given a name
        return None

    def create(self, directory: int, name: str, mode: int = 0o666) -> int:
        return os.open(name, _NEW, mode, dir_fd=directory)

    def reopen(self, directory: int, name: str) -> int | None:
        try:
            fd = os.open(name, _AGAIN, dir_fd=directory)
        except OSError:
            return None
        status = os.fstat(fd)
        ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        ours = ours and status.st_nlink == 1  # written through a second name it would change there
        if ours and self.lock(fd):
            return fd
        os.close(fd)
        return None

    def names(self, directory: int) -> list[str]:
        return os.listdir(directory)

    def lock(self, fd: int) -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def unlock(self, fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_UN)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def make_directory(self, directory: int, name: str, mode: int = 0o777) -> None:
        os.mkdir(name, mode, dir_fd=directory)

    def write(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
        if len(parts) == 1 or not hasattr(os, "pwritev"):
            return os.pwrite(fd, parts[0], offset)
        return os.pwritev(fd, parts[:_MOST_PARTS], offset)

    def copy(
        self, source_fd: int, source_offset: int, fd: int, offset: int, count: int
    ) -> int | None:
        if not hasattr(os, "copy_file_range"):
            return None
        try:
            return os.copy_file_range(source_fd, fd, count, source_offset, offset)
        except OSError as error:
            if error.errno in _NO_COPY:
                return None
            raise

    def insert(self, fd: int, offset: int, count: int) -> bool:
        import ctypes

        fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
        if fallocate is None:
            return False
        arguments = ctypes.c_int64(offset), ctypes.c_int64(count)
        if fallocate(fd, _FALLOC_FL_INSERT_RANGE, *arguments) == 0:
            return True
        number = ctypes.get_errno()
        if number in _NO_INSERT:
            return False
        raise OSError(number, os.strerror(number))

    def sync(self, fd: int) -> None:
        full = getattr(fcntl, "F_FULLFSYNC", None)
        if full is not None:
            fcntl.fcntl(fd, full)  # macOS: its fsync leaves data in the drive's cache
        else:
            os.fsync(fd)

    def link(self, fd: int, directory: int, name: str) -> None:
        # dst_dir_fd makes CPython call linkat with AT_SYMLINK_FOLLOW, which follows /proc's link.
        os.link(_descriptor_path(fd), name, dst_dir_fd=directory, follow_symlinks=True)

    def rename(self, directory: int, old: str, new: str) -> None:
        os.rename(old, new, src_dir_fd=directory, dst_dir_fd=directory)

    def unlink(self, directory: int, name: str) -> None:
        os.unlink(name, dir_fd=directory)

    def remove_directory(self, directory: int, name: str) -> None:
        os.rmdir(name, dir_fd=directory)

    def close(self, fd: int) -> None:
        os.close(fd)

    def free_bytes(self, directory: int) -> int | None:
        room = os.fstatvfs(directory)
        return room.f_bavail * room.f_frsize if room.f_blocks else None

    def block_bytes(self, fd: int) -> int:
        return os.fstatvfs(fd).f_bsize


def _descriptor_path(fd: int) -> str:
    return f"/proc/self/fd/{fd}"


def left_of(parts: tuple[memoryview, ...], count: int) -> tuple[memoryview, ...]:
    """What is left of parts when a write has taken so many bytes of them."""
    for number, part in enumerate(parts):
        if count < len(part):
            return (part[count:], *parts[number + 1 :])
        count -= len(part)
    return ()
