"""What to ask for next, and whether everything is here. Pure: no clock, no socket, no thread."""

from collections import deque
from collections.abc import Iterable

from weighlock.sources.grid import runs, stretches

__all__ = ["Plan"]


class Plan:
    """The blocks of one fetch: each is asked for in one request with its neighbours.

    Args:
        blocks: those that are wanted, in order.
        whole: ask for all the blocks of the file at once, of which there are so many, from a server
            that knows no ranges.
        together: ask for so many neighbouring ranges in one request at the most.
        takers: how many ask at the same time. Of several, none takes more than half its share of
            what is left: one that is slower than the others is not left with much in the end.
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
        self._together = together
        self._shares = 2 * takers if takers > 1 else 1
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
        most = min(self._together, len(self._runs) // self._shares)
        run = self._runs.popleft()
        while most > 1 and self._runs and self._runs[0].start == run.stop:
            run = range(run.start, self._runs.popleft().stop)
            most -= 1
        return run

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
