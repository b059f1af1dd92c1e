"""Whether to try again, and when. Pure: the clock and the dice are given. Knows errors only."""

from collections import Counter
from collections.abc import Callable

from weighlock.errors import ChunkCorrupt, PeerLost, WeighlockError

__all__ = ["RETRIES", "Retrying"]

RETRIES = "weighlock.retries"
"""The log that tells, once, that somebody does not answer and is asked again."""

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_TRIES_OF_A_BLOCK = 3

_TOLD_AFTER_S = 1.0


class Retrying:
    """The patience of one transfer, shared by its connections.

    Every landed block renews it, and every block that the other side says it has hashed meanwhile,
    of which there are not more than the file has.

    Args:
        patience_s: how long to try again after a failure without any progress.
        clock: seconds on a clock that only moves forward.
        dice: a number from 0 to 1, so that many receivers do not come back in step.
    """

    def __init__(
        self, patience_s: float, clock: Callable[[], float], dice: Callable[[], float]
    ) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._dice = dice
        self._since: float | None = None
        """When it failed first since something last arrived."""
        self._failures = 0
        self._is_told = False
        self._hashed_blocks = 0
        self._corrupt: Counter[int] = Counter()

    def is_to_be_told(self) -> bool:
        """Whether it has failed for so long that people should know. True once until it works."""
        since = self._since
        if self._is_told or since is None or self._clock() - since < _TOLD_AFTER_S:
            return False
        self._is_told = True
        return True

    def progressed(self) -> None:
        """Something arrived and was good."""
        self._since = None
        self._failures = 0
        self._is_told = False

    def pause_after(self, error: WeighlockError) -> float:
        """Seconds to wait before the next attempt.

        Raises:
            The error itself, if another attempt cannot help or has been tried long enough.
        """
        if not error.retryable:
            raise error
        if isinstance(error, ChunkCorrupt):
            self._corrupt[error.chunk] += 1
            if self._corrupt[error.chunk] >= _TRIES_OF_A_BLOCK:
                raise error
            return 0.0
        if isinstance(error, PeerLost) and error.hashed_blocks > self._hashed_blocks:
            self._hashed_blocks = error.hashed_blocks
            self.progressed()
            return _FIRST_PAUSE_S * (0.5 + self._dice() / 2)
        now = self._clock()
        # Not since the last progress: a wait for what never comes may itself take that long.
        since = self._since = now if self._since is None else self._since
        waited = now - since
        if waited >= self._patience_s:
            raise error
        self._failures += 1
        pause = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(self._failures - 1, 10))
        pause *= 0.5 + self._dice() / 2
        if isinstance(error, PeerLost) and error.retry_after_s is not None:
            pause = max(pause, min(error.retry_after_s, self._patience_s))
        return min(pause, max(0.0, self._patience_s - waited))
