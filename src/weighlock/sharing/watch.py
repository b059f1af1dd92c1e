"""One thread that looks after lives: sees silence and expiry, and forgives what was its own sleep.

Knows clocks and when to look again; what a look means is told by those who are watched.
"""

import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

__all__ = ["Watch", "Watched"]

_MOST_S = 1.0
_LEAST_S = 0.02
_STOPPED_S = 3.0
"""A look that comes so much too late was not late: the process had been stopped."""


class Watched(Protocol):
    """What has a life."""

    def look(self) -> float | None:
        """See what has not happened for too long; returns when to look again."""

    def forgive(self, seconds: float) -> None:
        """For so long this process could not listen."""


class Watch:
    """Looks after everything that `watched` gives, in a thread of its own.

    Args:
        watched: those who live now.
    """

    def __init__(self, watched: Callable[[], Iterable[Watched]]) -> None:
        self._watched = watched
        self._wake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def note(self) -> None:
        """Something new is there to look after, perhaps sooner than the rest."""
        with self._lock:
            if self._thread is None and not self._stopping:
                self._thread = threading.Thread(
                    target=self._look_on, name="weighlock-watch", daemon=True
                )
                self._thread.start()
        self._wake.set()

    def close(self) -> None:
        """Stop looking. Idempotent."""
        with self._lock:
            self._stopping = True
            thread = self._thread
        self._wake.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _look_on(self) -> None:
        pause = 0.0
        while not self._stopping:
            before = time.monotonic()
            self._wake.wait(pause)
            self._wake.clear()
            late = time.monotonic() - before - pause
            pause = _MOST_S
            for each in self._watched():
                if late > _STOPPED_S:
                    each.forgive(late)
                again = each.look()
                if again is not None:
                    pause = min(pause, max(_LEAST_S, again))
