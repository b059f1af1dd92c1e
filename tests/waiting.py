"""Waiting for something to be the case, instead of for a time. The only pause of the tests."""

import contextlib
import socket
import time

__all__ = ["answers", "settled", "until"]

DEADLINE_S = 60
"""A wait that takes so long has failed; none should take a quarter of it."""


def until(condition, within_s=DEADLINE_S):
    """Wait until something is the case, which another process or the kernel brings about."""
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def settled(value):
    """A condition: what `value()` gives is no longer 0, and the same ten looks in a row."""
    seen = []

    def condition():
        seen.append(value())
        return seen[-1] != 0 and len(seen) >= 10 and len(set(seen[-10:])) == 1

    return condition


def answers(port, host="127.0.0.1"):
    """Whether somebody listens there."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), 1):
        return True
    return False
