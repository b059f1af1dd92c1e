"""Remove a file of ours that is no longer needed. Knows nothing of what it held."""

import contextlib
from typing import TYPE_CHECKING

from weighlock.disk.effects import Disk, PosixDisk
from weighlock.disk.place import Place

if TYPE_CHECKING:
    import os

__all__ = ["remove"]


def remove(path: "str | os.PathLike[str]", disk: Disk | None = None) -> None:
    """Remove a file; it is no error if there is none.

    Raises:
        DiskError: it cannot be removed.
    """
    disk = disk or PosixDisk()
    place = Place(path, disk)
    try:
        with place.errors("cannot be removed"), contextlib.suppress(FileNotFoundError):
            disk.unlink(place.directory, place.name)
    finally:
        place.close()
