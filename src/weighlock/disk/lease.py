"""Files in a spool: one that is being landed, and the right to read one that has.

Knows how a file's life ends. The directory it lies in is `spool`'s; what its bytes mean, the
caller's.
"""

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

from weighlock.abort import Abort
from weighlock.disk.atomic import AtomicFile
from weighlock.disk.place import Place
from weighlock.errors import Aborted, DiskError

if TYPE_CHECKING:
    from weighlock.disk.spool import Spool, SpoolDirectory

__all__ = ["Lease", "SpoolFile"]

_READING = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)


class SpoolFile(AtomicFile):
    """A file being landed in a spool; written like an `AtomicFile`, from any thread, in any order.

    `finish()` gives the lease to read it by. Discarded, left by a `with` block without having been
    finished, or held by nobody, it is gone. Its bytes count against the spool's quota as soon as
    they are announced. It does not survive a power loss, nor the process.
    """

    def __init__(
        self, spool: "Spool", directory: "SpoolDirectory", abort: Abort, total_bytes: int
    ) -> None:
        self.abort = abort
        """Set when the spool's landings are ended."""
        self._spool = spool
        self._directory = directory
        self._charged = 0
        self._lease: Lease | None = None
        self._name = os.urandom(16).hex()
        self._grow(total_bytes)
        path = os.path.join(directory.path, self._name)
        try:
            with directory.adding() as inside:
                place = Place(path, directory.disk, os.dup(inside))
                super().__init__(path, durable=False, disk=directory.disk, place=place)
        except OSError as error:
            directory.forget(self._name)
            directory.check()  # closed by a signal handler meanwhile: say that
            if isinstance(error, DiskError):
                raise
            raise DiskError(
                f"{path}: cannot be made: {error.strerror}", errno=error.errno
            ) from error
        try:
            super().reserve(total_bytes)
        except BaseException:
            self.discard()
            raise

    def _leave(self, error: BaseException | None) -> None:
        self.discard()  # nothing once it is finished

    def reserve(self, total_bytes: int) -> None:
        """Raise `NoSpace` now if quota or disk have no room for a file of so many bytes."""
        self._grow(total_bytes)
        super().reserve(max(0, total_bytes - self.allocated_bytes()))

    def write(self, offset: int, *parts: memoryview) -> None:
        self._grow(offset + sum(map(len, parts)))
        super().write(offset, *parts)

    def copy(
        self,
        source_fd: int,
        source_offset: int,
        offset: int,
        count: int,
        progress: Callable[[int], None] = lambda _: None,
    ) -> int:
        self._grow(offset + count)
        return super().copy(source_fd, source_offset, offset, count, progress)

    def insert(self, offset: int, count: int) -> int:
        self._grow(self._charged + count)
        inserted = super().insert(offset, count)
        self._grow(self.size)
        return inserted

    def another(self) -> "SpoolFile":
        return self._spool.file()

    def finish(self) -> "Lease":
        """Nothing more will be written: give the right to read it.

        Raises:
            SpoolClosed, Aborted: the spool, or its landings, came to an end. The file is gone.
        """
        self.commit()
        assert self._lease is not None  # noqa: S101
        return self._lease

    @property
    def lease(self) -> "Lease | None":
        """The right to read it, once it is finished."""
        return self._lease

    def _grow(self, size: int) -> None:
        self._check()
        if size > self._charged:
            self._directory.charge(self._name, size, self._spool.quota_bytes)
            self._charged = size

    def _check(self) -> None:
        self._directory.check()
        try:
            self.abort.check()
        except Aborted:
            self._directory.check()  # closed in between, which is why
            raise

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        self._check()
        try:
            with super()._in_use():
                yield
        except DiskError:
            self._check()  # discarded because the spool came to an end: say that
            raise

    def commit(self) -> None:
        self._check()
        try:
            super().commit()
        except DiskError:
            self._check()
            raise

    def _create(self) -> None:
        self._temporary = self._name
        self._fd = self._disk.create(self._place.directory, self._name, 0o600)

    def _commit(self) -> None:
        self._directory.settle(self._name, os.fstat(self._fd).st_size)
        with self._directory.adding():
            self._lease = self._spool.lease(self._name, self.path)
        self._temporary = None  # from now on the lease removes it

    def _unlink_temporary(self) -> None:
        is_ours = self._temporary is not None
        super()._unlink_temporary()
        if is_ours:
            self._directory.forget(self._name)


class Reader(Protocol):
    """What a lease tells the one who reads by it."""

    def shut(self) -> None:
        """Let go of the file: its spool is closed."""

    def moved(self, path: str) -> None:
        """The file has another name now."""


class Lease:
    """The right to read a file that has landed in a spool. The file goes when nobody has it.

    It keeps the spool: a directory stays as long as something in it can be read.
    """

    def __init__(self, spool: "Spool", directory: "SpoolDirectory", name: str, path: str) -> None:
        self._spool = spool
        self._directory = directory
        self._reader: weakref.ref[Reader] | None = None
        self._is_altered = False
        self.name = name
        self.path = path
        """Where the file lies."""
        self._end = weakref.finalize(self, directory.drop, name)
        self._end.atexit = False  # the spool's own finalizer removes everything

    @property
    def is_altered(self) -> bool:
        """Whether its names or mode are no longer what they were: its change time tells nothing."""
        return self._is_altered or self._directory.closed or not self._end.alive

    def altering(self) -> None:
        """To be called before its names or mode are changed: who reads it is not to mind."""
        self._is_altered = True

    def check(self) -> None:
        """Raise `SpoolClosed` if the spool was closed; not for a file that was handed over."""
        if self._directory.closed and self._end.alive:
            raise self._directory.gone()

    def read_by(self, reader: "Reader") -> None:
        """Tell that one, while it lives, what becomes of the file."""
        self._reader = weakref.ref(reader)

    def open(self) -> int:
        """The file, open for reading.

        Raises:
            SpoolClosed: its spool was closed.
            DiskError: it was let go of, or handed over, or cannot be opened.
        """
        with self._directory.adding() as inside:
            if not self._end.alive:
                raise DiskError(f"{self.path}: was already handed over, or closed")
            try:
                return os.open(self.name, _READING, dir_fd=inside)
            except OSError as error:
                self._directory.check()  # closed by a signal handler meanwhile: say that
                raise DiskError(
                    f"{self.path}: cannot be opened: {error.strerror}", errno=error.errno
                ) from error

    def moved(self, path: str) -> None:
        """The file has another name as well now, and is temporary no longer."""
        self._end.detach()
        self.path = path
        reader = self._reader() if self._reader is not None else None
        if reader is not None:
            reader.moved(path)
        self._directory.drop(self.name)
        if reader is not None:
            reader.moved(path)  # losing a name changes a file's fingerprint

    def shut(self) -> None:
        """The spool is closed: have the reader let go of the file."""
        reader = self._reader() if self._reader is not None else None
        if reader is not None and self._end.alive:
            reader.shut()

    def release(self) -> None:
        """The file is needed no more. Idempotent; nothing in a forked child."""
        if os.getpid() == self._directory.pid and not self._directory.closed:
            self._end()
