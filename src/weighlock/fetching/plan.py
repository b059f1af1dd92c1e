"""What to ask for next, and whether everything is here. Pure: no clock, no socket, no thread."""

from collections import deque
from collections.abc import Iterable

from weighlock.sources.grid import runs

__all__ = ["Plan"]


class Plan:
    """The blocks of one fetch: each is asked for in one request with its neighbours.

    Args:
        blocks: those that are wanted, in order.
        whole: ask for all the blocks of the file at once, of which there are so many, from a server
            that knows no ranges.
    """

    def __init__(self, blocks: Iterable[int], *, whole: int | None = None) -> None:
        wanted = list(blocks)
        self._missing = set(wanted)
        self._is_whole = whole is not None
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
        return self._runs.popleft() if self._runs else None

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
        return list(runs(block for block in run if block in self._missing))
