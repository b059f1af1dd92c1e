"""What to ask for next, and whether everything is here. Pure: no clock, no socket, no thread."""

from collections import deque
from collections.abc import Iterable

from weighlock.sources.grid import BLOCKS_PER_RANGE, runs

__all__ = ["Plan", "Portion"]

_REQUEST_S = 1.0
"""What takes longer is asked for in smaller requests, and what takes less in larger ones that will
hardly take so long: who turns out to be slow has not been given much."""

_MOST_GROWTH = 4


class Portion:
    """How many neighbouring ranges one connection moves by a request: each learns that for itself.

    Args:
        most: so many at the most; it begins with one.
    """

    def __init__(self, most: int = 1) -> None:
        self._most = most
        self.ranges = 1

    def took(self, run: range, seconds: float) -> None:
        """It took so long until a run was through."""
        if seconds > _REQUEST_S:
            self.ranges = max(1, self.ranges // 2)
        elif len(run) > (self.ranges - 1) * BLOCKS_PER_RANGE:
            growth = int(min(_MOST_GROWTH, _REQUEST_S / max(seconds, 1e-9)))
            self.ranges = min(growth * self.ranges, self._most)

    def failed(self, run: range) -> None:
        """It did not go through: what stands between may not pass so much at once."""
        if len(run) > BLOCKS_PER_RANGE:
            self._most = max(1, len(run) // BLOCKS_PER_RANGE // 2)
        self.ranges = 1


class Plan:
    """The blocks of one move: each is asked for in one request with its neighbours.

    Args:
        blocks: those that are wanted, in order.
        whole: ask for all the blocks of the file at once, of which there are so many, from a server
            that knows no ranges.
        takers: how many ask at the same time. None takes more than its share of what is left.
    """

    def __init__(self, blocks: Iterable[int], *, whole: int | None = None, takers: int = 1) -> None:
        wanted = list(blocks)
        self._missing = set(wanted)
        self._is_whole = whole is not None
        self._takers = takers
        if whole is not None and wanted:
            self._runs = deque([range(whole)])
        else:
            self._runs = deque(runs(wanted))

    @property
    def is_complete(self) -> bool:
        """Whether every block has landed."""
        return not self._missing

    def take(self, ranges: int = 1) -> range | None:
        """The next blocks to ask for, of so many ranges at most; None if all were given out."""
        if not self._runs:
            return None
        return _neighbours(self._runs, min(ranges, len(self._runs) // self._takers))

    def landed(self, block: int) -> bool:
        """A block is here; False if it was already, or nobody wants it."""
        if block not in self._missing:
            return False
        self._missing.remove(block)
        return True

    def missing_of(self, run: range, ranges: int = 1) -> list[range]:
        """What is still to be asked for of blocks that were given out, so many ranges at once."""
        if self._is_whole:
            return [run] if any(block in self._missing for block in run) else []
        left = deque(runs(block for block in run if block in self._missing))
        found = []
        while left:
            found.append(_neighbours(left, ranges))
        return found


def _neighbours(left: "deque[range]", most: int) -> range:
    """The first of the runs that are left, and those that follow it without a gap."""
    run = left.popleft()
    while most > 1 and left and left[0].start == run.stop:
        run = range(run.start, left.popleft().stop)
        most -= 1
    return run
