"""Clean-up when the process is told to end by a signal whose default is to die at once.

Knows signals; what is cleaned up is a function it is given.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

__all__ = ["CleanupOnSignal"]

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class CleanupOnSignal:
    """Runs `cleanup` if SIGTERM or SIGHUP comes before `cancel()`, then lets the signal kill.

    Only where the program left the signal at its default, and only in the main thread, where Python
    allows handlers: a program with a handler of its own decides itself, and its exception unwinds
    through the context managers. A forked child never cleans up what its parent made.
    """

    def __init__(self, cleanup: Callable[[], None]) -> None:
        self._cleanup: Callable[[], None] | None = cleanup
        self._pid = os.getpid()
        self._previous: dict[int, object] = {}
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            current: object = signal.getsignal(number)
            while isinstance(current, CleanupOnSignal) and current._cleanup is None:
                current = current._previous[
                    number
                ]  # cancelled from a thread that could not uninstall it
            if current is signal.SIG_DFL or isinstance(current, CleanupOnSignal):
                self._previous[number] = current
                signal.signal(number, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The signal handler: clean up, hand on, and die of it in the end."""
        cleanup, self._cleanup = self._cleanup, None
        if cleanup is not None and os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                cleanup()
        previous = self._previous.get(number)
        if isinstance(previous, CleanupOnSignal):
            previous(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def cancel(self) -> None:
        """Nothing is left to clean up. Idempotent."""
        self._cleanup = None
        if threading.current_thread() is not threading.main_thread():
            return  # handlers can only be changed in the main thread; an idle one passes on
        for number in _SIGNALS:
            installed: object = signal.getsignal(number)
            current = installed
            while isinstance(current, CleanupOnSignal) and current._cleanup is None:
                current = current._previous[number]  # ended before one that was installed later
            if current is not installed:
                signal.signal(number, current)  # type: ignore[arg-type]


class _AroundFork(threading.local):
    """Gives the signals back to the system in forked children, which have nothing to clean up.

    A handler in Python can be late: a signal that comes just before a system call waits for its
    end. A pool that ended its workers with SIGTERM waited for ever for such a one. Signals are held
    back during the fork, so that none meets the parent's handler in the child.
    """

    held: "set[signal.Signals] | None" = None

    def before(self) -> None:
        if any(isinstance(signal.getsignal(n), CleanupOnSignal) for n in _SIGNALS):
            self.held = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # type: ignore[assignment]

    def in_parent(self) -> None:
        before, self.held = self.held, None
        if before is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def in_child(self) -> None:
        for number in _SIGNALS:
            if isinstance(signal.getsignal(number), CleanupOnSignal):
                signal.signal(number, signal.SIG_DFL)
        self.in_parent()


_around_fork = _AroundFork()
os.register_at_fork(
    before=_around_fork.before,
    after_in_parent=_around_fork.in_parent,
    after_in_child=_around_fork.in_child,
)
