"""Files that appear whole or not at all.

The protocol: write a file nobody can see → fsync it → give it a hidden name → rename it over the
destination → fsync the directory. A reader finds the old file or the new one at every instant.

- Without the first fsync a power loss leaves an empty file under the new name; without the second
  one ext4 comes back with the old name (tests/crash/test_power_loss.py).
- A failed fsync is final: Linux marks the pages clean, so a second one succeeds and means nothing.
- The hidden file has no name at all where the file system can do that (O_TMPFILE): however the
  process dies, the kernel removes it. Elsewhere it has a unique `.part-` name beside the
  destination.
"""

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator
from enum import Enum

from weighlock.disk.effects import Disk, PosixDisk, left_of
from weighlock.disk.owner import temporary_name
from weighlock.disk.place import Place
from weighlock.disk.termination import CleanupOnSignal
from weighlock.errors import DiskError, NotDurable, ShortRead
from weighlock.lifetimes import Lifetime

__all__ = ["AtomicFile"]

_COPY_BYTES = 64 * 1024 * 1024
"""Bytes to copy in one call: enough to be cheap, few enough to show progress."""


class _State(Enum):
    OPEN = "open"
    COMMITTING = "committing"
    GONE = "gone"


class AtomicFile(Lifetime):
    """A new file that takes its destination's name when it is complete.

    `commit()` puts it in place, `discard()` leaves no trace of it; as a context manager it commits
    on a clean exit and discards on an exception. Whatever happens, the destination is untouched
    until `commit`. Bytes may be written in any order and from any thread.

    Args:
        path: the destination. A symbolic link there is replaced, not followed.
        durable: fsync file and directory in `commit`.
        staged: it lies in a directory that is put in place, and synced, as a whole: leave that out.
        disk: the effects; the machine's own if not given.

    Raises:
        DiskError: there is no such directory, it cannot be written, or the path is a directory.
    """

    def __init__(
        self,
        path: "str | os.PathLike[str]",
        *,
        durable: bool = True,
        staged: bool = False,
        disk: Disk | None = None,
        place: Place | None = None,
    ) -> None:
        self._disk = disk or PosixDisk()
        self._durable = durable
        self._staged = staged
        self._pid = os.getpid()
        # Reentrant: a signal handler may discard what its own thread is just writing.
        self._lock = threading.RLock()
        self._state = _State.OPEN
        self._users = 0
        self._is_sound = True
        """The system has not said that it lost something of what was written."""
        self._fd = -1
        self._temporary: str | None = None
        self._on_signal: CleanupOnSignal | None = None
        self._place = place or Place(path, self._disk)
        try:
            self._check_destination()
            with self._place.errors("cannot be created"):
                self._create()
        except BaseException:
            self._give_up()
            raise

    @property
    def path(self) -> str:
        """The destination."""
        return self._place.path

    def _leave(self, error: BaseException | None) -> None:
        if error is None:
            self.commit()
        else:
            self.discard()

    def __del__(self) -> None:
        # A safety net for a file nobody committed or discarded.
        with contextlib.suppress(Exception):
            self._give_up()

    def _give_up(self) -> None:
        """Nobody is left who could say what shall become of it."""
        self.discard()

    def reserve(self, total_bytes: int) -> None:
        """Raise `NoSpace` now if so many bytes cannot fit, before any work is done for them."""
        self._place.reserve(total_bytes)

    def write(self, offset: int, *parts: memoryview) -> None:
        """Write all of these, one after the other, from that offset on."""
        parts = tuple(filter(len, parts))
        done, wanted = 0, sum(map(len, parts))
        with (
            self._in_use(),
            self._place.errors(f"writing {wanted:,} bytes at {offset:,} failed", wanted),
        ):
            while done < wanted:
                taken = self._disk.write(self._fd, parts, offset + done)
                if taken == 0:
                    raise DiskError(f"{self.path}: took {done:,} of {wanted:,} bytes and no more")
                done += taken
                if done < wanted:
                    parts = left_of(parts, taken)

    def copy(
        self,
        source_fd: int,
        source_offset: int,
        offset: int,
        count: int,
        progress: Callable[[int], None] = lambda _: None,
    ) -> int:
        """Copy from another file inside the kernel, as far as these two files allow it.

        `progress` is called after each step with the bytes it copied.

        Returns:
            How many bytes were copied: all, or fewer if the kernel would not go on.

        Raises:
            ShortRead: the other file ends too early.
        """
        done = 0
        with (
            self._in_use(),
            self._place.errors(f"copying {count:,} bytes to {offset:,} failed", count),
        ):
            while done < count:
                step = min(count - done, _COPY_BYTES)
                copied = self._disk.copy(
                    source_fd, source_offset + done, self._fd, offset + done, step
                )
                if copied is None:
                    return done
                if copied == 0:
                    raise ShortRead(
                        f"the file copied into {self.path} ends at byte {source_offset + done:,}; "
                        f"{count:,} bytes were wanted from {source_offset:,}, {done:,} were there",
                        wanted=count,
                        got=done,
                    )
                done += copied
                progress(copied)
        return done

    def read_into(self, offset: int, buffer: memoryview) -> bool:
        """Fill the buffer with what was written there; False if the file ends before."""
        done = 0
        with self._in_use(), self._place.errors("cannot be read back"):
            while done < len(buffer):
                got = os.preadv(self._fd, [buffer[done:]], offset + done)
                if got == 0:
                    return False
                done += got
        return True

    @property
    def size(self) -> int:
        """The length of what was written."""
        return self._status().st_size

    def allocated_bytes(self) -> int:
        """Bytes the file already takes on the disk."""
        return self._status().st_blocks * 512

    def _status(self) -> os.stat_result:
        with self._in_use(), self._place.errors("cannot be looked at"):
            return os.fstat(self._fd)

    def truncate(self, size: int) -> None:
        """Give the file that length."""
        with self._in_use(), self._place.errors(f"cannot be made {size:,} bytes long", size):
            self._disk.truncate(self._fd, size)

    def insert(self, offset: int, count: int) -> int:
        """Make room for at least `count` bytes at an offset without moving data.

        Returns:
            The bytes inserted: whole blocks of the file system; 0 if it cannot do that.
        """
        with self._in_use(), self._place.errors("making room failed", count):
            block = self._disk.block_bytes(self._fd)
            count = -(-count // block) * block
            if offset % block:
                return 0
            return count if self._disk.insert(self._fd, offset, count) else 0

    def another(self) -> "AtomicFile":
        """A second file for the same name in the same directory, whatever its path means now."""
        place = self._place.again()
        return AtomicFile(
            self.path, durable=self._durable, staged=self._staged, disk=self._disk, place=place
        )

    def _check_destination(self) -> None:
        try:
            mode = os.lstat(self.path).st_mode
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:  # else told by the rename, when all is written
                raise DiskError(
                    f"{self.path}: cannot be written: {error.strerror}", errno=error.errno
                ) from error
            return  # there is none, or creating the file will say what is wrong
        if stat.S_ISDIR(mode):
            raise DiskError(f"{self.path}: cannot be written: it is a directory")
        if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
            raise DiskError(f"{self.path}: cannot be written: it is a device, pipe or socket")

    def descriptor(self) -> int:
        """The open file, for reading back what was written."""
        return self._fd

    @contextlib.contextmanager
    def held(self) -> Iterator[int]:
        """The open file while the block runs, also when it is in its place or discarded.

        By its name somebody else's may be found there an instant later.
        """
        with self._in_use(), self._place.errors("cannot be put in place"):
            fd = os.dup(self._fd)
        try:
            yield fd
        finally:
            os.close(fd)

    def commit(self) -> None:
        """Put the file in place. On any exception it is discarded and the destination untouched.

        Raises:
            NotDurable: an fsync failed. Only if that was the directory's is the file in place.
        """
        before = _State.GONE
        try:
            with self._lock:
                before, self._state = self._state, _State.COMMITTING
                if before is not _State.OPEN:
                    self._state = before
                    raise self._over()
            self._commit()
        except BaseException:
            if before is _State.OPEN:
                self._failed()
            raise
        finally:
            if before is _State.OPEN:
                self._let_go(_State.COMMITTING)

    def _failed(self) -> None:
        """It could not be put in place. Unless its name is taken from it here, it goes."""

    def discard(self) -> None:
        """Leave no trace. Idempotent; does nothing once `commit` has begun, or in a forked child.

        While another thread is still writing the descriptor stays open, and is closed by that
        thread when it is done: a closed number may soon be another file's.
        """
        if os.getpid() != self._pid:
            self._close()
            return
        self._let_go(_State.OPEN)

    def _let_go(self, before: _State) -> None:
        """From that state on it is gone; who still uses it removes it then."""
        is_idle = False
        try:
            with self._lock:
                if self._state is before:
                    self._state, is_idle = _State.GONE, not self._users
        finally:  # a signal that came with the end of the lock does not keep it
            if is_idle:
                self._remove()

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        # A signal may come with the end of each lock: what was counted is counted off again.
        is_counted = is_last = False
        try:
            with self._lock:  # first: who discards from now on leaves the descriptor open
                self._users, is_counted = self._users + 1, True
            if self._state is not _State.OPEN:
                raise self._over()
            yield
        finally:
            try:
                if is_counted:
                    with self._lock:
                        self._users -= 1
                        is_last = self._is_gone and not self._users
            finally:
                if is_last:
                    self._remove()

    def _over(self) -> DiskError:
        return DiskError(f"{self.path}: was already committed or discarded")

    @property
    def _is_open(self) -> bool:
        return self._state is _State.OPEN

    @property
    def _is_gone(self) -> bool:
        return self._state is _State.GONE

    def _remove(self) -> None:
        try:
            self._unlink_temporary()
        except BaseException:  # of a signal: the impatient press Ctrl-C twice
            self._unlink_temporary()
            raise
        finally:
            if self._on_signal is not None:
                self._on_signal.cancel()
            self._close()

    def _unlink_temporary(self) -> None:
        if self._temporary is not None:
            with contextlib.suppress(OSError):
                self._disk.unlink(self._place.directory, self._temporary)
            self._temporary = None

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            if os.getpid() == self._pid:
                with contextlib.suppress(OSError):
                    self._disk.unlock(fd)
            with contextlib.suppress(OSError):
                self._disk.close(fd)
        self._place.close()

    def _create(self) -> None:
        unnamed = self._disk.create_unnamed(self._place.directory)
        if unnamed is not None:
            self._fd = unnamed
            return
        self._temporary = temporary_name(self._place.name)
        self._watch_signals()
        self._fd = self._disk.create(self._place.directory, self._temporary)
        self._disk.lock(self._fd)  # alive, also for who cannot see this process

    def _watch_signals(self) -> None:
        """From now on there is a name to remove if the process is told to end."""
        # Not a method of this object: the handler would keep it alive, and its finalizer away.
        unlink, directory, name = self._disk.unlink, self._place.directory, self._temporary
        self._on_signal = CleanupOnSignal(lambda: unlink(directory, str(name)))

    def _commit(self) -> None:
        place = self._place
        if self._durable:
            try:
                self._disk.sync(self._fd)
            except OSError as error:
                self._is_sound = False
                raise NotDurable(
                    f"{self.path}: syncing failed: {error.strerror}; what was written is discarded",
                    errno=error.errno,
                ) from error
        with place.errors("cannot be put in place"):
            if self._temporary is None:
                self._temporary = temporary_name(place.name)
                self._watch_signals()
                self._disk.link(self._fd, place.directory, self._temporary)
            # Network file systems report failed writes when the file is closed: before the rename.
            fd, self._fd = self._fd, -1
            try:
                self._disk.close(fd)
            except OSError:
                self._is_sound = False
                raise
            self._rename(self._temporary)
            self._temporary = None
        if self._durable and not self._staged:
            place.sync_directory()

    def _rename(self, temporary: str) -> None:
        self._disk.rename(self._place.directory, temporary, self._place.name)
