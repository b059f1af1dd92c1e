"""A file that goes with its last reader, as a source. Knows that it holds a lease; not of what."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

from weighlock.errors import SourceError
from weighlock.sources.local import FileSource, Fingerprint

__all__ = ["LeasedSource", "Leasing"]


class Leasing(Protocol):
    """What a source asks of the lease it holds."""

    path: str

    @property
    def is_altered(self) -> bool:
        """Whether who owns the file has changed its names or mode, and so its change time."""

    def check(self) -> None:
        """Raise if the place the file lay in was closed."""

    def read_by(self, reader: "LeasedSource") -> None:
        """Tell that one, while it lives, when the file moves or its place is closed."""

    def release(self) -> None:
        """The file is needed no more."""


class LeasedSource(FileSource):
    """A file that stays as long as this source, or a lease of it, is held.

    A pickle of it is a plain `FileSource`, which holds no lease. Equal only to itself: it may come
    to lie elsewhere.
    """

    __slots__ = ("__weakref__", "lease")

    def __init__(self, lease: Leasing, *, hold: bool = True) -> None:
        self.lease = lease
        try:
            super().__init__(lease.path, hold=hold)
        except SourceError:
            lease.check()
            raise
        lease.read_by(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return object.__hash__(self)

    def close(self) -> None:
        """Let the file go, as soon as no read is using it. Idempotent."""
        super().close()
        self.lease.release()

    @contextlib.contextmanager
    def descriptor(self) -> Iterator[int]:
        """A descriptor of the file, as `FileSource` gives it.

        Raises:
            SpoolClosed: the spool it lay in was closed before.
        """
        self.lease.check()
        try:
            with super().descriptor() as fd:
                yield fd
        except SourceError:
            self.lease.check()
            raise

    def moved(self, path: str) -> None:
        """The file has another name now."""
        self.path = os.path.abspath(path)
        self.fingerprint = Fingerprint.of(os.stat(path))

    def shut(self) -> None:
        """The place the file lay in is closed: let go of it as soon as no read is using it."""
        super().close()

    def _check(self, fd: int, *, held: bool) -> None:
        try:
            super()._check(fd, held=held)
        except SourceError:
            # Names and modes move ctime and nothing else, and are the lease's own doing.
            before = self.fingerprint
            now = replace(Fingerprint.of(os.fstat(fd)), ctime_ns=before.ctime_ns)
            if not (self.lease.is_altered and now == before):
                raise
