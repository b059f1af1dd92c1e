"""The life of a share. Knows clocks by argument, and reasons to end; not sockets, not tensors."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Literal, TypeAlias

__all__ = ["Life", "Reason", "Tombstones"]

Reason: TypeAlias = Literal["revoked", "expired", "settled", "changed"]


class Life:
    """Begins when it is made, ends once, and keeps the reason.

    Args:
        clock: seconds on a clock that only moves forward.
        expires_s: how long it lasts; None: until something else ends it.
    """

    def __init__(self, clock: Callable[[], float], expires_s: float | None = None) -> None:
        self._clock = clock
        self._ends_at = None if expires_s is None else clock() + expires_s
        self._ended: Reason | None = None

    @property
    def ended(self) -> Reason | None:
        """Why it is over; None while it lasts."""
        if self._ended is None and self._ends_at is not None and self._clock() >= self._ends_at:
            self._ended = "expired"
        return self._ended

    @property
    def remaining_s(self) -> float | None:
        """What is left of it; None if nothing bounds it."""
        if self.ended is not None:
            return 0.0
        return None if self._ends_at is None else max(0.0, self._ends_at - self._clock())

    def end(self, reason: Reason) -> bool:
        """End it; returns False if it was over already, for whatever reason that was."""
        if self.ended is not None:
            return False
        self._ended = reason
        return True


class Tombstones:
    """Why shares ended that are gone: so many, the oldest are forgotten first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._reasons: OrderedDict[bytes, Reason] = OrderedDict()

    def put(self, key: bytes, reason: Reason) -> None:
        """Remember one."""
        self._reasons[key] = reason
        while len(self._reasons) > self._most:
            self._reasons.popitem(last=False)

    def get(self, key: bytes) -> Reason | None:
        """The reason, if there was such a share and it is not forgotten."""
        return self._reasons.get(key)
