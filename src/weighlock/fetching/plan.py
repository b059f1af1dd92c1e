"""What to ask for next, and whether everything is here. Pure: no clock, no socket, no thread."""

from collections import deque
from collections.abc import Iterable

from weighlock.sources.grid import BLOCKS_PER_RANGE, runs, stretches

__all__ = ["Plan"]

_FIRST = 4
"""Ranges in one request before it is known how long they take."""

_REQUEST_S = 1.0
"""What takes longer is asked for in smaller requests, what takes less than half of it in larger
ones: who turns out to be slow has not been given much."""


class Plan:
    """The blocks of one fetch: each is asked for in one request with its neighbours.

    Args:
        blocks: those that are wanted, in order.
        whole: ask for all the blocks of the file at once, of which there are so many, from a server
            that knows no ranges.
        together: ask for so many neighbouring ranges in one request at the most.
        takers: how many ask at the same time. None takes more than its share of what is left.
    """

    def __init__(
        self,
        blocks: Iterable[int],
        *,
        whole: int | None = None,
        together: int = 1,
        takers: int = 1,
    ) -> None:
        wanted = list(blocks)
        self._missing = set(wanted)
        self._is_whole = whole is not None
        self._most = together
        self._together = min(_FIRST, together)
        self._takers = takers
        if whole is not None and wanted:
            self._runs = deque([range(whole)])
        else:
            self._runs = deque(runs(wanted))

    @property
    def is_complete(self) -> bool:
        """Whether every block has landed."""
        return not self._missing

    def take(self) -> range | None:
        """The next blocks to ask for; None if all were given out."""
        if not self._runs:
            return None
        most = min(self._together, len(self._runs) // self._takers)
        run = self._runs.popleft()
        while most > 1 and self._runs and self._runs[0].start == run.stop:
            run = range(run.start, self._runs.popleft().stop)
            most -= 1
        return run

    def took(self, run: range, seconds: float) -> None:
        """It took so long until the reply to a request for that run was through."""
        if seconds > _REQUEST_S:
            self._together = max(1, self._together // 2)
        elif seconds < _REQUEST_S / 2 and len(run) > (self._together - 1) * BLOCKS_PER_RANGE:
            self._together = min(2 * self._together, self._most)

    def landed(self, block: int) -> bool:
        """A block is here; False if it was already, or nobody wants it."""
        if block not in self._missing:
            return False
        self._missing.remove(block)
        return True

    def missing_of(self, run: range) -> list[range]:
        """What is still to be asked for of blocks that were given out before."""
        if self._is_whole:
            return [run] if any(block in self._missing for block in run) else []
        missing = (block for block in run if block in self._missing)
        return list(stretches(missing))
