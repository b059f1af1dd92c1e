"""Where an inbox puts what comes: a directory, or a spool. Knows files; not senders' rights.

In a directory a file lies under its sender's name, and what was left of an earlier push is taken
up. In a spool it is temporary: it lives as long as the catalog that the inbox gave of it.
"""

import os
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from weighlock.disk.lease import Lease, SpoolFile
from weighlock.disk.place import make_directories, sync_placed
from weighlock.disk.resumable import ResumableFile
from weighlock.disk.spool import Spool
from weighlock.errors import Refused, SourceChanged
from weighlock.formats.detect import open_catalog
from weighlock.formats.spooled import open_landed
from weighlock.limits import Limits
from weighlock.sharing.arrival import Arrival, ArrivingFile
from weighlock.sharing.landed import LandedFile
from weighlock.sources.local import FileSource, Fingerprint
from weighlock.tensors.catalog import Catalog

__all__ = ["Destination", "Directory", "InSpool"]

T = TypeVar("T")


class Destination(Protocol[T]):
    """What an inbox asks of the place its files go to; `T` says where one landed."""

    def file(self, name: str, size: int, promised_bytes: int) -> tuple[ArrivingFile, bool]:
        """A file for what comes under a name, and whether something of it is there already.

        Raises:
            DiskError: it cannot be made. `NoSpace`: beside what was promised to others there is no
                room for it.
        """

    def earlier(self, name: str, header: bytes, size: int) -> LandedFile | None:
        """What landed under a name before this inbox was made.

        Raises:
            Refused: it is something else.
        """

    def complete(self, arrival: Arrival) -> None:
        """Make a sealed file whole, and look whether it is what it claimed. May be repeated.

        Raises:
            DiskError, SourceError: that fails; what came is untouched.
            FormatError: it is not what it claimed.
        """

    def put(self, name: str, arrival: Arrival) -> T:
        """Put a complete file in its place.

        Raises:
            DiskError: that fails; the file is discarded, unless it was in place before.
        """

    def open(self, landed: T) -> Catalog:
        """The catalog of what landed.

        Raises:
            SourceChanged: something else is there by now.
        """


@dataclass(frozen=True, slots=True)
class Landed:
    """A file in its place, and what tells it from others of its name."""

    path: str
    fingerprint: Fingerprint

    def is_of(self, other: Fingerprint) -> bool:
        """Whether that is the same file. Somebody may have linked it, or changed its mode."""
        return replace(other, ctime_ns=self.fingerprint.ctime_ns) == self.fingerprint


class Directory:
    """A directory with a file for each sender.

    Args:
        path: made if it is not there.
        durable: what has landed survives a power loss.
        limits: bounds of what is opened.

    Raises:
        DiskError: it cannot be made.
    """

    def __init__(self, path: "str | os.PathLike[str]", durable: bool, limits: Limits) -> None:
        make_directories(path)
        self._path = os.path.abspath(path)
        self._durable = durable
        self._limits = limits

    def file(self, name: str, size: int, promised_bytes: int) -> tuple[ArrivingFile, bool]:
        file = ResumableFile(self._of(name), durable=self._durable)
        try:
            file.reserve(max(0, size - file.allocated_bytes()) + promised_bytes)
        except BaseException:
            file.keep()
            raise
        return file, bool(file.adopted_bytes)

    def earlier(self, name: str, header: bytes, size: int) -> LandedFile | None:
        path = self._of(name)
        if not os.path.lexists(path):
            return None
        file = LandedFile(path)
        first = bytearray(len(header))
        if file.size != size or not file.read_into(0, memoryview(first)) or first != header:
            file.close()
            raise Refused(f"a file of {name} is there already; this inbox does not replace it")
        return file

    def complete(self, arrival: Arrival) -> None:
        file = arrival.file
        if isinstance(file, ResumableFile):
            arrival.complete()
            with closing(FileSource(file.temporary_path)) as complete:
                open_catalog(complete, self._limits)

    def put(self, name: str, arrival: Arrival) -> Landed:
        path = self._of(name)
        if isinstance(arrival.file, ResumableFile):
            return Landed(path, _committed(arrival.file))
        if self._durable:
            sync_placed(path)  # who put it there may have died before it did, or not have cared
        assert isinstance(arrival.file, LandedFile)  # noqa: S101
        return Landed(path, arrival.file.fingerprint)

    def open(self, landed: Landed) -> Catalog:
        source = FileSource(landed.path)
        try:
            if not landed.is_of(source.fingerprint):
                raise SourceChanged(
                    f"{landed.path}: another process or thread has replaced it since it landed"
                )
            return open_catalog(source, self._limits)
        except BaseException:
            source.close()
            raise

    def _of(self, name: str) -> str:
        return os.path.join(self._path, f"{name}.safetensors")


def _committed(file: ResumableFile) -> Fingerprint:
    """Put a file in its place; returns what it looks like there, whoever replaces it at once."""
    with file.held() as mine:
        file.commit()
        return Fingerprint.of(os.fstat(mine))


class InSpool:
    """A spool: nothing in it outlives this process, and nothing was there before.

    Args:
        spool: its quota counts what is announced; its abort ends what is on its way.
        limits: bounds of what is opened.
    """

    def __init__(self, spool: Spool, limits: Limits) -> None:
        self._spool = spool
        self._limits = limits

    def file(self, name: str, size: int, promised_bytes: int) -> tuple[ArrivingFile, bool]:
        return _Arriving(self._spool.file(size)), False

    def earlier(self, name: str, header: bytes, size: int) -> LandedFile | None:
        return None

    def complete(self, arrival: Arrival) -> None:
        arrival.complete()

    def put(self, name: str, arrival: Arrival) -> Lease:
        assert isinstance(arrival.file, _Arriving)  # noqa: S101
        return arrival.file.finish()

    def open(self, landed: Lease) -> Catalog:
        return open_landed(landed, self._limits)


class _Arriving:
    """A spool's file; there is no later attempt to keep it for."""

    def __init__(self, file: SpoolFile) -> None:
        self.finish = file.finish
        self.write = file.write
        self.truncate = file.truncate
        self.read_into = file.read_into
        self.keep = self.discard = file.discard

    def allocated_bytes(self) -> int:
        """Nothing to tell: the spool itself counts what was announced."""
        return 0
