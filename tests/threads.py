"""A process without a thread to spare, as under a limit on processes, which root does not have."""

import contextlib
import threading

__all__ = ["no_more_threads"]

_MORE_THAN_THERE_IS = 1 << 47


@contextlib.contextmanager
def no_more_threads():
    """While the block runs the system has no room for another thread; those that run go on."""
    before = threading.stack_size(_MORE_THAN_THERE_IS)
    try:
        yield
    finally:
        threading.stack_size(before)
