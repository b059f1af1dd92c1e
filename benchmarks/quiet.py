"""Whether others are at work on the host of this machine, and the time that they take from it.

On a virtual machine a neighbour shows in two ways: memory is slower while somebody else copies,
for a tenth of a second to a few of them, and the host gives a processor to others while somebody
here wants it, which Linux counts. Writing 2 GB took 0.8 to 1.8 s begun at any time, 0.8 to 1.1 in
29 of 30 times begun when a copy took no longer than usual.

Knows nothing of who is measured, so it treats all alike.
"""

import mmap
import os
import time

__all__ = ["Quiet", "stolen_s"]

_COPIED_BYTES = 32 << 20
"""Source and target together are more than the caches of a few cores hold."""

_TRIES = 4
"""Copies of which the fastest counts: one by itself may meet nothing but a timer."""

_AS_USUAL = 1.15
"""A copy that takes so many times the usual is no slower than that by chance."""

_FIRST, _KEPT = 20, 100
"""Looks before anything is measured, and the last ones that say what is usual."""

_PAUSE_S = 0.1
_MOST_S = 5.0
"""It may not become quiet at all; what is measured then shows it in its spread."""


class Quiet:
    """Waits until a copy in memory takes no longer than it usually does here."""

    def __init__(self):
        self._source, self._target = (
            memoryview(mmap.mmap(-1, _COPIED_BYTES)) for _ in ("source", "target")
        )
        for place in (self._source, self._target):
            place[:] = bytes(_COPIED_BYTES)
        self._took = []
        for _ in range(_FIRST):
            self._took.append(self._look())
            time.sleep(_PAUSE_S)

    def wait(self):
        """Return when it is quiet, or when that took too long: whether it was not so at once."""
        last = time.monotonic() + _MOST_S
        bound = _AS_USUAL * self._usual
        took = self._look()
        # Of a long wait one look counts: else noise that lasts would soon be what is usual.
        self._took.append(took)
        was_quiet = took <= bound
        while took > bound and time.monotonic() < last:
            time.sleep(_PAUSE_S)
            took = self._look()
        return not was_quiet

    @property
    def _usual(self):
        """Of the looks of late, one of the faster ones: a quarter were faster."""
        took = sorted(self._took[-_KEPT:])
        return took[len(took) // 4]

    def _look(self):
        return min(self._copied_s() for _ in range(_TRIES))

    def _copied_s(self):
        start = time.perf_counter()
        self._target[:] = self._source
        return time.perf_counter() - start


def stolen_s(path="/proc/stat"):
    """Seconds that processors here have waited for their host so far; 0.0 where nobody counts."""
    try:
        with open(path) as file:
            fields = file.readline().split()
        return int(fields[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError):
        return 0.0
