"""One at a time in a directory, among all processes. Knows nothing of what is done there."""

import contextlib
import fcntl
import os
from collections.abc import Iterator

from weighlock.abort import Abort
from weighlock.errors import DiskError

__all__ = ["exclusively"]

_SHORTEST_S, _LONGEST_S = 0.001, 0.05
"""Between two looks whether the lock is free."""


@contextlib.contextmanager
def exclusively(directory: str, abort: Abort | None = None) -> Iterator[None]:
    """Wait until nobody else is in this directory, then keep others out; death lets them in.

    Where the file system has no locks on directories (NFS), everybody is let in at once.

    Raises:
        DiskError: the directory is not there.
        Aborted: somebody said stop while this was waiting.
    """
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise DiskError(
            f"{directory}: cannot be locked: {error.strerror}", errno=error.errno
        ) from error
    pid = os.getpid()
    try:
        _wait_for_lock(fd, abort or Abort())
        yield
    finally:
        if os.getpid() == pid:
            # A child forked meanwhile has the directory open as well: closing would not be enough.
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def _wait_for_lock(fd: int, abort: Abort) -> None:
    pause_s = _SHORTEST_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            abort.wait(pause_s)  # a wait inside the system would not hear of it
            abort.check()
            pause_s = min(2 * pause_s, _LONGEST_S)
        except OSError:
            return  # there are no locks here
        else:
            return
