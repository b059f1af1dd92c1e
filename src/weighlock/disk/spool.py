"""Owned temporary directories: files that live as long as somebody may read them.

A spool is a 0700 directory of a random name below a root that the caller chose, with a file in it
that says whose it is, locked for the life of the process. What it holds goes with its last reader,
with the spool, or, after SIGKILL, by `sweep`. Nothing else in the package deletes trees.

Only the process that made a spool removes anything of it. Removing takes no lock: it may be the
garbage collector's doing, or a signal handler's, at any point of any thread.
"""

import contextlib
import os
import threading
import warnings
import weakref
from collections.abc import Iterator

from weighlock.abort import Abort
from weighlock.disk.effects import Disk, PosixDisk
from weighlock.disk.lease import Lease, SpoolFile
from weighlock.disk.living import Living
from weighlock.disk.mounts import IN_MEMORY, file_system
from weighlock.disk.owner import Owner
from weighlock.disk.roots import open_inside, open_root
from weighlock.disk.termination import CleanupOnSignal
from weighlock.errors import Aborted, DiskError, NoSpace, SpoolClosed
from weighlock.lifetimes import Lifetime
from weighlock.limits import check_number

__all__ = ["OWNER_NAME", "PREFIX", "Spool", "SpoolDirectory", "remove_flat"]

PREFIX = "weighlock-spool-"
"""What the names of spools begin with; 128 random bits follow."""

OWNER_NAME = "owner"
"""The file in a spool that says whose it is."""

_ATTEMPTS = 4


class Spool(Lifetime):
    """An owned temporary directory below a root.

    What lands in it, by `fetch(url, into=spool)` or `save(spool, …)`, is a catalog whose file goes
    with its last ref, or by `catalog.close()`, or `catalog.keep(path)`. The directory goes by
    `close()`, or with the spool's last user. After `close()` refs raise `SpoolClosed`; a load that
    was under way completes.

    Args:
        root: the directory below which it is made; itself made if it is not there.
        quota_bytes: most bytes it may hold at once.

    Raises:
        DiskError: the root cannot be written, or others could plant things in it: it belongs to
            another user, or everybody may write to it and it has no sticky bit.
    """

    def __init__(
        self,
        root: "str | os.PathLike[str]",
        *,
        quota_bytes: int | None = None,
        disk: Disk | None = None,
    ) -> None:
        if quota_bytes is not None:
            check_number("quota_bytes", quota_bytes, is_whole=True)
        self.quota_bytes = quota_bytes
        """Most bytes it may hold at once; None for no bound but the disk's."""
        self._directory = SpoolDirectory(os.path.abspath(os.fspath(root)), disk or PosixDisk())
        self._end = weakref.finalize(self, self._directory.end)
        self._abort = Abort()
        self._landings: Living[SpoolFile] = Living()
        self._leases: Living[Lease] = Living()
        kind = self._directory.file_system
        if kind in IN_MEMORY:
            warnings.warn(
                f"{self.path}: lies on {kind}: what lands there takes memory, not disk",
                RuntimeWarning,
                stacklevel=2,
            )

    def __repr__(self) -> str:
        state = " closed" if self.closed else f" {self.used_bytes:,} bytes"
        return f"<Spool {self.path}{state}>"

    def _leave(self, error: BaseException | None) -> None:
        self.close()

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError(f"{self!r} belongs to this process; pickle what landed in it instead")

    @property
    def path(self) -> str:
        """Where it lies."""
        return self._directory.path

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._directory.closed

    @property
    def used_bytes(self) -> int:
        """Bytes of what has landed and can still be read, and of landings as announced."""
        return self._directory.used_bytes

    def file(self, total_bytes: int = 0) -> SpoolFile:
        """A new file to land bytes in; `finish()` gives the lease to read it by.

        It stays until it is finished or discarded, the spool is aborted or closed, or nobody holds
        it: who wants to go on with it later keeps it.

        Args:
            total_bytes: how long it will be, where that is known.

        Raises:
            NoSpace: it does not fit the quota or the disk. Nothing was written.
            SpoolClosed: the spool was closed, or is another process's.
        """
        self._directory.check()
        made = SpoolFile(self, self._directory, self._abort, total_bytes)
        self._landings.add(made)
        self._directory.check()  # closed meanwhile: dropping the file removes it
        return made

    def reserve(self, total_bytes: int) -> None:
        """Raise `NoSpace` now if so many bytes more cannot fit the quota or the disk."""
        with self.file(total_bytes):
            pass

    def abort(self, reason: str = "") -> None:
        """End the landings under way: their files go, and who lands them gets `Aborted`."""
        if os.getpid() != self._directory.pid:
            return
        before, self._abort = self._abort, Abort()
        before.set(reason)
        for file in self._landings:
            if file.abort is before:
                file.discard()

    def close(self) -> None:
        """Remove it and all that is in it. Idempotent; nothing in a forked child.

        Loads under way complete. Landings under way, and all that is asked of its refs later,
        raise `SpoolClosed`.
        """
        if os.getpid() != self._directory.pid or self.closed:
            return
        self._directory.closed = True  # first, so that those it ends know why
        try:
            self.abort("its spool was closed")
        finally:
            self._end()
            for lease in self._leases:
                lease.shut()

    @contextlib.contextmanager
    def aborting(self, abort: Abort) -> Iterator[Abort]:
        """An abort for what is done to land here: set by `abort`, and by this spool's end."""
        self._directory.check()
        either, mine = Abort(), self._abort
        try:
            with (
                abort.waking(lambda: either.set(abort.reason)),
                mine.waking(lambda: either.set(mine.reason)),
            ):
                yield either
        except Aborted as error:
            if self.closed:
                raise self._directory.gone() from error
            raise

    def lease(self, name: str, path: str) -> Lease:
        """The right to read a file that has landed."""
        made = Lease(self, self._directory, name, path)
        self._leases.add(made)
        return made


class SpoolDirectory:
    """The directory of a spool, and how many bytes each of its files may take.

    Apart from `Spool`, so that finalizers and signal handlers can hold it while nobody holds that.
    """

    def __init__(self, root: str, disk: Disk) -> None:
        self.disk = disk
        self.pid = os.getpid()
        self.closed = False
        self._over = False
        # Reentrant: a signal handler may land something, or close the spool, while its own thread
        # is landing. Descriptors that are in use then are closed when they no longer are.
        self._lock = threading.RLock()
        self._adding = 0
        self._is_ended = False
        self._sizes: dict[str, int] = {}
        self._root = self._inside = self._owner = -1
        self.path = root
        self._on_signal: CleanupOnSignal | None = None
        try:
            os.makedirs(root, 0o700, exist_ok=True)
            self._root = open_root(root, disk)
            self._make(root)
            self.file_system = file_system(self._inside)
            self._on_signal = CleanupOnSignal(self.remove)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            self.end()
            if isinstance(error, DiskError):
                raise
            number = error.errno if isinstance(error, OSError) else None
            raise DiskError(f"{root}: no spool can be made there: {error}", errno=number) from error
        except BaseException:
            self.end()
            raise

    def _make(self, root: str) -> None:
        text = memoryview(Owner.current().text().encode())
        for attempt in range(_ATTEMPTS):
            self._name = PREFIX + os.urandom(16).hex()
            self.path = os.path.join(root, self._name)
            self.disk.make_directory(self._root, self._name, 0o700)
            try:
                self._inside = open_inside(self._root, self._name)
                self._owner = self.disk.create(self._inside, OWNER_NAME, 0o600)
            except FileNotFoundError:
                if attempt + 1 == _ATTEMPTS:
                    raise
                self._close(-1)
                continue  # a sweep took it for an empty leftover
            is_locked = self.disk.lock(self._owner) or attempt + 1 == _ATTEMPTS
            # The last attempt goes without: some file systems have no locks, and sweeps then leave
            # it alone.
            if is_locked and os.fstat(self._owner).st_nlink:
                self.disk.write(self._owner, [text], 0)
                return
            self.remove()
            self._over = False
            self._close(-1)
        raise DiskError(f"{root}: sweeps keep removing the spools that are made there")

    @property
    def used_bytes(self) -> int:
        """Bytes its files take, or may."""
        return sum(list(self._sizes.values()))  # a copy: finalizers take entries out at any time

    def charge(self, name: str, size: int, quota_bytes: int | None) -> None:
        """Count a file with at least so many bytes.

        Raises:
            NoSpace: the quota does not allow it.
        """
        with self._lock:
            before = self._sizes.get(name, 0)
            free = None if quota_bytes is None else quota_bytes - self.used_bytes
            if free is not None and size - before > free:
                raise NoSpace(
                    f"{self.path}: no space: {size - before:,} bytes are needed, {max(0, free):,} "
                    f"of its quota of {quota_bytes:,} are free",
                    wanted_bytes=size - before,
                    free_bytes=max(0, free),
                )
            self._sizes[name] = max(before, size)

    def settle(self, name: str, size: int) -> None:
        """Count a file with exactly so many bytes: it is complete."""
        self._sizes[name] = size

    def forget(self, name: str) -> None:
        """Count a file no more."""
        self._sizes.pop(name, None)

    @contextlib.contextmanager
    def adding(self) -> Iterator[int]:
        """The directory, to make a file in; it is not removed meanwhile.

        Raises:
            SpoolClosed: it is.
        """
        self.check()  # before the lock: a fork may have left it held by a thread that is not here
        with self._lock:
            if self.closed or self._over:
                raise self.gone()
            self._adding += 1
            try:
                yield self._inside
            finally:
                self._adding -= 1
                if self._is_ended and not self._adding:
                    self._let_go()

    def drop(self, name: str) -> None:
        """Remove a file, in the process that made it."""
        # No lock against the directory being closed meanwhile: what its number may mean by then
        # does not hold a file of this random name.
        if os.getpid() == self.pid and self._inside >= 0:
            with contextlib.suppress(OSError):
                self.disk.unlink(self._inside, name)
        self.forget(name)

    def check(self) -> None:
        """Raise `SpoolClosed` if nothing can be put here, or not by this process."""
        if self.closed:
            raise self.gone()
        if os.getpid() != self.pid:
            raise SpoolClosed(
                f"{self.path}: belongs to process {self.pid}; a forked child makes its own spool"
            )

    def gone(self) -> SpoolClosed:
        """The error for who comes too late."""
        return SpoolClosed(f"{self.path}: the spool was closed, and what lay in it is gone")

    def remove(self) -> None:
        """Remove what it holds and itself, as far as the system lets us."""
        if os.getpid() != self.pid or self._root < 0:
            return
        self._over = True
        for _ in range(_ATTEMPTS):  # a landing in another thread may just have made a file
            try:
                remove_flat(self.disk, self._root, self._name, self._inside, list(self._sizes))
            except OSError:
                continue
            return

    def end(self) -> None:
        """Remove it and let go of all descriptors. Once; by `close`, or as the safety net.

        When the interpreter exits, daemon threads may still be reading: they go on until they end
        with the process, and are not told that the spool was closed.
        """
        if os.getpid() == self.pid:
            with self._lock:  # nobody is making a file, but whom a signal handler interrupts
                self.remove()
                self._is_ended = True
                if self._adding:
                    return
        self._let_go()

    def _let_go(self) -> None:
        if self._on_signal is not None:
            self._on_signal.cancel()
        root, self._root = self._root, -1
        self._close(root)
        self._sizes.clear()

    def _close(self, root: int) -> None:
        descriptors = self._owner, self._inside, root
        if self._owner >= 0 and os.getpid() == self.pid:
            with contextlib.suppress(OSError):
                self.disk.unlock(self._owner)
        self._owner = self._inside = -1
        for fd in descriptors:
            if fd >= 0:
                with contextlib.suppress(OSError):
                    self.disk.close(fd)


def remove_flat(
    disk: Disk, root: int, name: str, inside: int, known: "list[str] | None" = None
) -> None:
    """Remove a directory of files, the one that says whose it is last.

    Args:
        disk: the effects.
        root: the directory it lies in.
        name: its name there.
        inside: itself, open; -1 to remove it only if it is empty.
        known: names that are in it, for when it cannot even be listed: no descriptor is left.

    Raises:
        OSError: it could not be removed.
    """
    names = set(known or ())
    if inside >= 0:
        with contextlib.suppress(OSError):
            names.update(disk.names(inside))
        for file in [*sorted(names - {OWNER_NAME}), OWNER_NAME]:
            with contextlib.suppress(OSError):
                disk.unlink(inside, file)
    disk.remove_directory(root, name)
