"""A bound on bytes a second. Pure: the clock is given, waiting is the caller's."""

from collections.abc import Callable

from weighlock.errors import LocalProtocolError

__all__ = ["Rate"]

_BURST_S = 0.25


class Rate:
    """A rate shared by the connections of a transfer.

    Args:
        bytes_per_s: the bound.
        clock: seconds on a clock that only moves forward.

    Raises:
        LocalProtocolError: nothing would ever move at that rate.
    """

    def __init__(self, bytes_per_s: float, clock: Callable[[], float]) -> None:
        if not bytes_per_s > 0:  # nor does NaN
            raise LocalProtocolError(f"a rate of {bytes_per_s} bytes a second moves nothing")
        self.bytes_per_s = bytes_per_s
        self._clock = clock
        self._paid_until = clock()

    def pause_for(self, count: int) -> float:
        """Seconds to wait after so many bytes."""
        now = self._clock()
        self._paid_until = max(self._paid_until, now - _BURST_S) + count / self.bytes_per_s
        return max(0.0, self._paid_until - now)
