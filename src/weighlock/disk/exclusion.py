"""One at a time in a directory, among all processes. Knows nothing of what is done there."""

import contextlib
import fcntl
import os
from collections.abc import Iterator

from weighlock.errors import DiskError

__all__ = ["exclusively"]


@contextlib.contextmanager
def exclusively(directory: str) -> Iterator[None]:
    """Wait until nobody else is in this directory, then keep others out; death lets them in.

    Where the file system has no locks on directories (NFS), everybody is let in at once.

    Raises:
        DiskError: the directory is not there.
    """
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise DiskError(
            f"{directory}: cannot be locked: {error.strerror}", errno=error.errno
        ) from error
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
