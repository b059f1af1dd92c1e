"""How slow a peer may be. Pure: told what was waited and what came. Knows no clock, no socket."""

__all__ = ["LEAST_BYTES_PER_S", "Pace"]

LEAST_BYTES_PER_S = 256
"""Below this a peer is not slow but holding a connection: 1 MiB would take more than an hour."""


class Pace:
    """The least rate of one direction of a connection.

    A timeout between two bytes lets a peer that sends one now and then go on for ever. So bytes are
    counted over stretches of waiting: only time that was spent waiting for the peer, as a receiver
    that bounds its own rate, or an owner that reads a slow disk, pauses without the peer's fault.

    Args:
        idle_s: length of a stretch. Nothing is held against a peer before the first is over.
    """

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self._waited_s = 0.0
        self._moved_bytes = 0

    def begin(self) -> None:
        """Something new is sent: a new stretch begins."""
        self._waited_s = 0.0
        self._moved_bytes = 0

    def is_too_slow(self, waited_s: float, moved_bytes: int) -> bool:
        """Count so many bytes that took so long; whether a stretch ended with too few of them."""
        self._waited_s += waited_s
        self._moved_bytes += moved_bytes
        if self._waited_s < self._idle_s:
            return False
        is_slow = self._moved_bytes < LEAST_BYTES_PER_S * self._waited_s
        self.begin()
        return is_slow
