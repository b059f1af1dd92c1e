"""What each process has for itself: a fork copies locks and counts as they are at that moment.

A lock that another thread held then would stay locked for ever in the child, where that thread does
not exist.
"""

import os
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

__all__ = ["PerProcess"]

T = TypeVar("T")

_forks = 0
"""Between the first of its ancestors that imported this and this process. Asking for the number of
the process would be a system call, for every read."""


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


class PerProcess(Generic[T]):
    """A value that each process makes when it first asks for it. From any thread.

    Args:
        make: makes one.
    """

    __slots__ = ("_made", "_make")

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: dict[int, T] = {}

    def __call__(self) -> T:
        """This process's."""
        found = self._made.get(_forks)
        # `setdefault` is one step for the interpreter: threads that come first get the same one.
        return self._made.setdefault(_forks, self._make()) if found is None else found

    def __iter__(self) -> Iterator[T]:
        """This process's, and the copies it has of its ancestors'."""
        return iter(self._made.values())
