"""Directories of files that appear whole or not at all.

A hidden directory beside the destination is filled and renamed once. Unlike a file it always has a
name, so a process killed with SIGKILL leaves it behind, recognisable by its `.part-` name.
"""

import contextlib
import errno
import os

from weighlock.disk.effects import Disk, PosixDisk
from weighlock.disk.mounts import is_same_mount
from weighlock.disk.owner import temporary_name
from weighlock.disk.place import Place, sync_directory
from weighlock.disk.termination import CleanupOnSignal
from weighlock.errors import DiskError, NotDurable
from weighlock.lifetimes import Lifetime

__all__ = ["AtomicDirectory"]


class AtomicDirectory(Lifetime):
    """A new directory of files that takes its destination's name when it is complete.

    Files are written to `path_of(name)`, each atomically and durably by itself, and may be
    renamed inside; `commit()` renames the whole once. The destination must be new or an empty
    directory.

    Raises:
        DiskError: the destination exists and is not an empty directory.
    """

    def __init__(
        self, path: "str | os.PathLike[str]", *, durable: bool = True, disk: Disk | None = None
    ) -> None:
        self._disk = disk or PosixDisk()
        self._durable = durable
        self._pid = os.getpid()
        self._inside = -1
        self._names: set[str] = set()
        self._place = Place(os.fspath(path).rstrip("/") or "/", self._disk)
        self._root = os.path.dirname(os.path.abspath(self.path))
        self._staging: str | None = None
        self._on_signal: CleanupOnSignal | None = None
        try:
            self._check_destination()
            self._on_signal = CleanupOnSignal(self._remove_staging)
            with self._place.errors("cannot be created"):
                self._staging = temporary_name(self._place.name)
                self._disk.make_directory(self._place.directory, self._staging)
                self._inside = self._disk.open_directory(self.path_of(""))
                self._disk.lock(self._inside)  # alive, also for who cannot see this process
        except BaseException:
            self.discard()
            raise

    def _leave(self, error: BaseException | None) -> None:
        if error is None:
            self.commit()
        else:
            self.discard()

    @property
    def path(self) -> str:
        """The destination."""
        return self._place.path

    def path_of(self, name: str) -> str:
        """Where a file of that name is to be written before the commit."""
        if self._staging is None:
            raise DiskError(f"{self.path}: was already committed or discarded")
        if name:
            self._names.add(name)
        return os.path.join(self._root, self._staging, name)

    def rename(self, old: str, new: str) -> None:
        """Rename a file inside."""
        self._names.add(new)  # first: a signal that comes with the rename finds it
        with self._place.errors(f"renaming {old} to {new} failed"):
            self._disk.rename(self._inside, old, new)

    def reserve(self, total_bytes: int) -> None:
        """Raise `NoSpace` now if so many bytes cannot fit."""
        self._place.reserve(total_bytes)

    def commit(self) -> None:
        """Put the directory in place. On any exception it is discarded."""
        place = self._place
        try:
            if self._staging is None:
                raise DiskError(f"{self.path}: was already committed or discarded")
            if self._durable:
                try:
                    sync_directory(self._disk, self._inside)
                except OSError as error:
                    raise NotDurable(
                        f"{self.path}: syncing failed: {error.strerror}", errno=error.errno
                    ) from error
            with place.errors("cannot be put in place"):
                self._disk.rename(place.directory, self._staging, place.name)
                self._staging = None
            if self._durable:
                place.sync_directory()
        finally:
            self.discard()

    def discard(self) -> None:
        """Remove what was staged. Idempotent, and nothing after `commit`."""
        if self._staging is not None and os.getpid() == self._pid:
            try:
                self._remove_staging()
            except OSError:
                pass
            except BaseException:  # of a signal: the impatient press Ctrl-C twice
                with contextlib.suppress(OSError):
                    self._remove_staging()
                raise
        self._staging = None
        inside, self._inside = self._inside, -1
        if inside >= 0:
            if os.getpid() == self._pid:
                with contextlib.suppress(OSError):
                    self._disk.unlock(inside)
            with contextlib.suppress(OSError):
                self._disk.close(inside)
        if self._on_signal is not None:
            self._on_signal.cancel()
        self._place.close()

    def _check_destination(self) -> None:
        if not os.path.lexists(self.path):
            return
        with self._place.errors("cannot be looked into"):
            if os.path.islink(self.path) or not os.path.isdir(self.path) or os.listdir(self.path):
                raise DiskError(
                    f"{self.path}: exists and is not an empty directory; name a new one",
                    errno=errno.ENOTEMPTY,
                )
            here = self._disk.open_directory(self.path)
            try:
                is_mounted = not is_same_mount(here, self._place.directory)
            finally:
                with contextlib.suppress(OSError):
                    self._disk.close(here)
        if is_mounted:  # the rename would say so, when everything is written, to another disk
            raise DiskError(
                f"{self.path}: is where a disk is mounted, and cannot be replaced; name a "
                f"directory inside, such as {os.path.join(self.path, 'model')}",
                errno=errno.EBUSY,
            )

    def _remove_staging(self) -> None:
        if self._staging is None or not self._is_hidden(self._staging):
            return
        # By the names given out, not by a listing: that would need a descriptor, of which there may
        # be no more.
        for name in self._names:
            with contextlib.suppress(OSError):
                self._disk.unlink(self._inside, name)
        self._disk.remove_directory(self._place.directory, self._staging)

    def _is_hidden(self, staging: str) -> bool:
        """Whether what was staged still is: a signal may come just after it was put in place.

        The descriptor then leads into the destination, where nothing may be removed.
        """
        try:
            there = os.stat(staging, dir_fd=self._place.directory, follow_symlinks=False)
        except OSError:
            return False
        return self._inside < 0 or os.path.samestat(there, os.fstat(self._inside))
