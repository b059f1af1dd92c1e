"""A file that came whole is put in its place, in a thread of its own. Knows waiting; no files.

Syncing may take longer than any request waits: whoever asks meanwhile is told to ask again.
"""

import threading
from collections.abc import Callable

from weighlock.errors import TransferError

__all__ = ["NotPlaced", "Placing"]


class NotPlaced(TransferError):
    """What came could not be put in its place, and is still here: another try may succeed."""

    retryable = True


class Placing:
    """A file being put in its place.

    Args:
        work: does it; what it raises is raised to whoever asks.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._failure: BaseException | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._worker: int | None = None

    def start(self) -> None:
        """Begin; where the system has no more threads, in this one, however long it takes."""
        self._thread = threading.Thread(target=self._run, name="weighlock-land", daemon=True)
        try:
            self._thread.start()
        except (RuntimeError, MemoryError):
            self._thread = None
            self._run()

    def is_over(self, wait_s: float | None) -> bool:
        """Wait for it; what went wrong is raised to whoever asks with a bound."""
        if self._worker == threading.get_ident():
            return True  # it ends the inbox itself: the last sender has landed
        if not self._over.wait(wait_s):
            return False
        if self._thread is not None:
            self._thread.join()
        if self._failure is not None and wait_s is not None:
            raise self._failure
        return True

    def _run(self) -> None:
        self._worker = threading.get_ident()
        try:
            self._work()
        except BaseException as error:  # told to the sender that asks
            self._failure = error
        finally:
            self._worker = None  # the number may soon be another thread's
            self._over.set()
