"""Where the mean so far lies between two contributions. Knows files, spools and locks; no numbers.

In a directory it is a file that others may take up, also after this process died. In a spool it is
this process's alone, counts against the quota, and goes with its `Mean` or with the spool.
"""

import os
from collections.abc import Hashable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Protocol

from weighlock.abort import Abort
from weighlock.combining.combination import Combination, Given, Options, PartOf
from weighlock.disk.exclusion import exclusively
from weighlock.disk.place import make_directories, sync_removed
from weighlock.disk.removal import remove
from weighlock.disk.spool import Spool
from weighlock.formats.detect import open_catalog
from weighlock.limits import Limits
from weighlock.sources.local import Fingerprint
from weighlock.tensors.catalog import Catalog

__all__ = ["Accumulator", "InDirectory", "InSpool"]

_FILE_NAME = "accumulator.safetensors"


class Accumulator(Protocol):
    """The place of a mean so far."""

    directory: str
    """Where there is room for what it takes to make the next one."""
    label: str
    """What to call it in errors."""

    def alone(self, abort: Abort | None = None) -> AbstractContextManager[None]:
        """Keep others from it; `Aborted` if somebody says stop while this waits for them."""

    def room(self, nbytes: int) -> AbstractContextManager[object]:
        """Room in its directory, as long as the block runs; `NoSpace` if there is none."""

    def opened(self, limits: Limits | None, closing: ExitStack) -> Catalog | None:
        """What lies there, if anything does; what is opened for it is closed with the stack.

        Raises:
            SpoolClosed: its spool was closed, and it is gone.
        """

    def renew(self, given: Given, part_of: PartOf, options: Options) -> None:
        """Put another in its place, entirely or not at all."""

    def mark(self) -> Hashable:
        """What tells it from any other; None if there is none."""

    def remove(self, *, durable: bool) -> None:
        """Remove it, if there is one."""


class InDirectory:
    """A file in a directory that is made if it is not there.

    Raises:
        DiskError: it cannot be made.
    """

    def __init__(self, directory: "str | os.PathLike[str]") -> None:
        self.directory = os.path.abspath(os.fspath(directory))
        make_directories(self.directory)
        self.label = os.path.join(self.directory, _FILE_NAME)

    def alone(self, abort: Abort | None = None) -> AbstractContextManager[None]:
        return exclusively(self.directory, abort)

    def room(self, nbytes: int) -> AbstractContextManager[object]:
        return nullcontext()  # whoever writes there asks the disk

    def opened(self, limits: Limits | None, closing: ExitStack) -> Catalog | None:
        if not os.path.lexists(self.label):
            return None
        return closing.enter_context(open_catalog(self.label, limits))

    def renew(self, given: Given, part_of: PartOf, options: Options) -> None:
        Combination(self.label, options, same_dtype=False).put(given, part_of)

    def mark(self) -> Hashable:
        try:
            return Fingerprint.of(os.stat(self.label))
        except OSError:
            return None

    def remove(self, *, durable: bool) -> None:
        remove(self.label)
        if durable:
            sync_removed(self.label)  # back again, it would count in another mean


class InSpool:
    """A file in a spool, which this keeps. Nobody else knows of it."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._held: Catalog | None = None
        self._number = 0
        self.directory = self.label = spool.path

    def alone(self, abort: Abort | None = None) -> AbstractContextManager[None]:
        return nullcontext()

    def room(self, nbytes: int) -> AbstractContextManager[object]:
        return self._spool.file(nbytes)  # which stays empty, and counts as what was announced

    def opened(self, limits: Limits | None, closing: ExitStack) -> Catalog | None:
        self._spool.reserve(0)  # raises if the spool was closed, or is another process's
        return self._held

    def renew(self, given: Given, part_of: PartOf, options: Options) -> None:
        made = Combination(self._spool, options, same_dtype=False).of(given, part_of)
        before, self._held = self._held, made
        self._number += 1
        if before is not None:
            before.close()

    def mark(self) -> Hashable:
        return None if self._held is None else self._number

    def remove(self, *, durable: bool) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.close()
