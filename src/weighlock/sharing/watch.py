"""One thread that looks after lives: sees silence and expiry, and forgives what was its own sleep.

Knows clocks and when to look at whom; what a look means is told by those who are watched. Who has
nothing due costs nothing, however many there are.
"""

import logging
import math
import threading
import time
from typing import Protocol

__all__ = ["Watch", "Watched"]

_log = logging.getLogger("weighlock.server")

_MOST_S = 1.0
"""Slept at a time: a longer sleep would not tell that the process was stopped in it."""
_LEAST_S = 0.02
_STOPPED_S = 0.25
"""A look that comes so much too late was not late: the process had been stopped."""
_END_S = 5.0
"""Time for a look that runs while the watch is closed: what is told at an end may take long."""


class Watched(Protocol):
    """What has a life."""

    def look(self) -> float | None:
        """See what has not happened for too long; returns when to look again."""

    def forgive(self, seconds: float) -> None:
        """For so long this process could not listen."""


class Watch:
    """Looks after whoever was noted, in a thread of its own. From any thread."""

    def __init__(self) -> None:
        self._due: dict[Watched, float] = {}
        self._next = math.inf
        self._wake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def note(self, each: Watched, within_s: float) -> None:
        """Look at it in so many seconds at the latest, and from then on when it says."""
        due = time.monotonic() + within_s
        with self._lock:
            if self._stopping:
                return
            self._due[each] = min(due, self._due.get(each, due))
            is_sooner = due < self._next
            self._next = min(due, self._next)
            if self._thread is None:
                self._thread = self._started()
        if is_sooner:
            self._wake.set()

    def drop(self, each: Watched) -> None:
        """It is over: look at it no more."""
        with self._lock:
            self._due.pop(each, None)

    def close(self) -> None:
        """Stop looking. Idempotent."""
        with self._lock:
            self._stopping = True
            thread = self._thread
        self._wake.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_END_S)

    def _started(self) -> threading.Thread | None:
        """The thread that looks; None if the system has none to spare: the next note tries."""
        thread = threading.Thread(target=self._look_on, name="weighlock-watch", daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            _log.warning("nobody looks after shares for now: %s", error)
            return None
        return thread

    def _look_on(self) -> None:
        now = time.monotonic()
        while not self._stopping:
            pause = min(_MOST_S, max(_LEAST_S, self._next - now))
            self._wake.wait(pause)
            self._wake.clear()
            before, now = now, time.monotonic()
            if now - before - pause > _STOPPED_S:
                # All of it: nobody knows how much of the sleep was over when the process was
                # stopped, and the rest of it went by while it could not listen.
                self._forgive(now - before)
            for each in self._take_due(now):
                self._look_at(each)

    def _forgive(self, seconds: float) -> None:
        with self._lock:
            watched = list(self._due)
        for each in watched:
            each.forgive(seconds)

    def _take_due(self, now: float) -> list[Watched]:
        with self._lock:
            if now < self._next:
                return []
            taken = [each for each, due in self._due.items() if due <= now]
            for each in taken:
                del self._due[each]
            self._next = min(self._due.values(), default=math.inf)
            return taken

    def _look_at(self, each: Watched) -> None:
        try:
            again = each.look()
        except Exception:
            # The edge of the thread that looks after everybody: the others must not pay for it.
            _log.exception("looking after a share failed")
            again = _MOST_S
        if again is not None:
            self.note(each, max(_LEAST_S, again))
