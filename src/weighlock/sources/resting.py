"""Which of many sources may keep what they hold for the next read: those that were used last.

A model may have more files than a process may have descriptors. Knows sources only by their `rest`.
"""

import resource
import threading
import weakref
from collections import OrderedDict
from typing import Protocol, runtime_checkable

from weighlock.per_process import PerProcess

__all__ = ["Resting", "Rests", "descriptors_to_hold"]

_MOST_HELD = 256
"""Descriptors that files may hold together where a process could have many more."""

_AWAKE = 8
"""With four connections each, that is 32."""


def descriptors_to_hold() -> int:
    """How many descriptors the files of one piece of work may hold: a quarter of what there are."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_HELD if soft == resource.RLIM_INFINITY else min(_MOST_HELD, soft // 4)


@runtime_checkable
class Rests(Protocol):
    """What can let go of connections, descriptors and memory, and can be used on."""

    def rest(self) -> None:
        """Let go."""


class Resting:
    """The sources of one catalog, by when they were last used. For any thread."""

    def __init__(self) -> None:
        self._used: OrderedDict[int, weakref.ref[Rests]] = OrderedDict()
        self._lock = PerProcess(threading.Lock)

    def __reduce__(self) -> tuple[object, ...]:
        return Resting, ()  # those that are unpickled begin anew

    def use(self, source: Rests) -> None:
        """A source is going to be used: who was not for the longest time rests."""
        tired: list[weakref.ref[Rests]] = []
        with self._lock():
            self._used[id(source)] = weakref.ref(source)
            self._used.move_to_end(id(source))
            while len(self._used) > _AWAKE:
                tired.append(self._used.popitem(last=False)[1])
        for reference in tired:
            if (found := reference()) is not None:
                found.rest()
