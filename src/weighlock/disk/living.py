"""Things as long as others hold them. Knows nothing of what they are."""

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

__all__ = ["Living"]

T = TypeVar("T")


class Living(Generic[T]):
    """Those of the things added to it that somebody still holds.

    Unlike a `WeakSet` it may be added to while it is gone through, by another thread or by the
    signal handler that comes in between: what is gone through is a copy, made in one step.
    """

    def __init__(self) -> None:
        self._refs: set[weakref.ref[T]] = set()

    def add(self, thing: T) -> None:
        """Remember it, as long as it is held elsewhere."""
        self._refs.add(weakref.ref(thing, self._refs.discard))

    def __iter__(self) -> Iterator[T]:
        for ref in list(self._refs):
            thing = ref()
            if thing is not None:
                yield thing
