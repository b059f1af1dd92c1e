"""Files that lie side by side and make one checkpoint, opened when first read.

Knows places and how many files may be held open; not what is in them.
"""

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from weighlock.errors import SourceError
from weighlock.formats.sharded import OpenFile
from weighlock.limits import Limits
from weighlock.per_process import PerProcess
from weighlock.sources.local import FileSource

if TYPE_CHECKING:
    from weighlock.sources.base import Source

__all__ = ["FilesBeside"]


class FilesBeside:
    """Sources by file name. The first `limits.open_files` keep their descriptor.

    Args:
        places: file name to path or URL.
        limits: how many are held open.
        open_file: opens one.
    """

    def __init__(
        self, places: Mapping[str, str], limits: Limits, open_file: OpenFile = FileSource
    ) -> None:
        self.places = dict(places)
        self._limits = limits
        self._open_file = open_file
        self._sources: dict[str, Source] = {}
        self._closed = False
        self._lock = PerProcess(threading.RLock)  # reentrant: a signal handler may read as well

    def __reduce__(self) -> tuple[object, ...]:
        return FilesBeside, (self.places, self._limits, self._open_file)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FilesBeside) and self.places == other.places

    def __hash__(self) -> int:
        return hash(tuple(self.places.values()))

    def source(self, name: str) -> "Source":
        """The source of a file, opened if it was not yet."""
        found = self._sources.get(name)
        if found is not None:
            return found
        with self._lock():
            if self._closed:
                raise SourceError(f"{self.places[name]}: used after it was closed")
            if name not in self._sources:
                hold = len(self._sources) < self._limits.open_files
                opened = self._open_file(self.places[name], hold=hold)
                if self._sources.setdefault(name, opened) is not opened:
                    opened.close()  # a signal handler was faster
            return self._sources[name]

    def close(self) -> None:
        """Close every file that was opened, and open no more."""
        with self._lock():
            self._closed = True
            for source in list(self._sources.values()):  # a signal handler may come between
                source.close()
