"""A way to say stop, from any thread. Knows who must be woken; not what they do."""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator

from weighlock.errors import Aborted

__all__ = ["Abort"]


class Abort:
    """Ends the calls it was given to: they raise `Aborted` promptly, whatever they wait for.

    From any thread, and from a signal handler.
    """

    def __init__(self) -> None:
        self._is_set = False
        # Reentrant: a signal handler may say stop while its own thread is in here. For the same
        # reason there is no `Event`, whose lock is not.
        self._lock = threading.RLock()
        self._wakers: dict[object, Callable[[], None]] = {}
        self.reason = ""
        """What `set` was told first."""

    def __repr__(self) -> str:
        return f"<Abort {'set: ' + self.reason if self.is_set else 'not set'}>"

    @property
    def is_set(self) -> bool:
        """Whether somebody said stop."""
        return self._is_set

    def set(self, reason: str = "") -> None:
        """Say stop. The first reason counts."""
        with self._lock:
            if self._is_set:
                return
            self.reason = reason
            self._is_set = True
            wakers, self._wakers = self._wakers, {}
        for wake in wakers.values():
            wake()

    def check(self) -> None:
        """Raise `Aborted` if somebody said stop."""
        if self._is_set:
            raise Aborted(
                f"aborted: {self.reason}" if self.reason else "aborted", reason=self.reason
            )

    def wait(self, timeout_s: float) -> bool:
        """Sleep, unless somebody says stop; returns whether somebody did."""
        woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        with self.waking(lambda: woken.put(None)), contextlib.suppress(queue.Empty):
            woken.get(timeout=max(0.0, timeout_s))
        return self._is_set

    def on_set(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Have `wake` called once, from the thread that says stop, or now if somebody has.

        Returns:
            A function that takes this back.
        """
        key = object()
        with self._lock:
            self._wakers[key] = wake
            # Not there any more if a signal handler has said stop just now, and called it.
            mine = self._wakers.pop(key, None) if self._is_set else None
        if mine is not None:
            mine()

        def forget() -> None:
            with self._lock:
                self._wakers.pop(key, None)

        return forget

    @contextlib.contextmanager
    def waking(self, wake: Callable[[], None]) -> Iterator[None]:
        """Have `wake` called if somebody says stop while the block runs."""
        forget = self.on_set(wake)
        try:
            yield
        finally:
            forget()
