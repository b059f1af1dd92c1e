"""Disks that are worse than the machine's: without unnamed files, lazy, failing, liars.

Each is the real disk underneath and keeps the `Disk` protocol (test_disk_contract.py), except for
the one thing its name says.
"""

import errno
import os

from weighlock.disk.effects import PosixDisk

OPERATIONS = sorted(name for name in vars(PosixDisk) if not name.startswith("_"))
"""Every effect there is."""


class MemoryDisk(PosixDisk):
    """Nothing to sync: for tests that are about something else and do it a thousand times."""

    def sync(self, fd):
        os.fstat(fd)  # it must be open all the same


class NamedDisk(PosixDisk):
    """A file system without O_TMPFILE: what is being written has a name."""

    def create_unnamed(self, directory):
        return None


class PlainDisk(NamedDisk):
    """A file system without O_TMPFILE, copies in the kernel, or room that can be inserted."""

    def copy(self, source_fd, source_offset, fd, offset, count):
        return None

    def insert(self, fd, offset, count):
        return False


class Around:
    """Another disk, with one operation done differently."""

    def __init__(self, disk, operation):
        self._disk = disk
        self._operation = operation
        self.calls = 0
        """How often that operation was asked for."""

    def __getattr__(self, name):
        real = getattr(self._disk, name)
        if name != self._operation:
            return real

        def call(*arguments):
            self.calls += 1
            return self.instead(real, *arguments)

        return call

    def instead(self, real, *arguments):
        return real(*arguments)


class FailingDisk(Around):
    """The n-th call of one operation fails. What is closed is closed all the same, as in Linux."""

    def __init__(self, disk, operation, n, number):
        super().__init__(disk, operation)
        self._n = n
        self.operation = operation
        self.number = number

    def __repr__(self):
        return f"{errno.errorcode[self.number]} by {self.operation} {self._n}"

    @property
    def hit(self):
        """Whether it has failed."""
        return self.calls >= self._n

    def instead(self, real, *arguments):
        if self.calls != self._n:
            return real(*arguments)
        if self._operation == "close":
            real(*arguments)
        raise OSError(self.number, os.strerror(self.number))


class HalfDisk(Around):
    """Takes half of what it is given, at least one byte: short writes, short copies."""

    def instead(self, real, *arguments):
        if self._operation == "write":
            fd, parts, offset = arguments
            whole = memoryview(b"".join(parts))
            return real(fd, [whole[: (len(whole) + 1) // 2]], offset)
        *where, count = arguments
        return real(*where, (count + 1) // 2)


class LyingDisk(Around):
    """Says of its n-th sync, or of all, that it is done, and does nothing."""

    def __init__(self, disk, only=None):
        super().__init__(disk, "sync")
        self._only = only

    def instead(self, real, *arguments):
        if self._only is not None and self.calls != self._only:
            real(*arguments)
