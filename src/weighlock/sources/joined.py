"""Runs of bytes of several sources, one after another, as one source. Knows where each begins."""

import bisect
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from weighlock.errors import ShortRead

if TYPE_CHECKING:
    from weighlock.sources.base import Source

__all__ = ["Joined", "Run"]


class Run(NamedTuple):
    """Bytes `offset` to `offset + length` of a source."""

    source: "Source"
    offset: int
    length: int


class Joined:
    """Runs of other sources, which belong to somebody else.

    Args:
        runs: in their order.
        label: what to call it in errors.
    """

    __slots__ = ("_starts", "label", "runs", "size")

    def __init__(self, runs: tuple[Run, ...], label: str) -> None:
        self.runs = runs
        self.label = label
        self._starts = [0, *accumulate(run.length for run in runs)]
        self.size = self._starts[-1]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Joined) and self.runs == other.runs

    def __hash__(self) -> int:
        return hash(self.runs)

    def __reduce__(self) -> tuple[object, ...]:
        return Joined, (self.runs, self.label)

    def within(self, offset: int, length: int) -> Run | None:
        """The bytes of one source that these bytes are; None if they are those of several."""
        number = bisect.bisect_right(self._starts, offset, 0, len(self.runs)) - 1
        if number < 0 or offset + length > self._starts[number + 1]:
            return None
        run = self.runs[number]
        return Run(run.source, run.offset + offset - self._starts[number], length)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer, from as many of the sources as it takes."""
        if offset < 0 or offset + len(buffer) > self.size:
            raise ShortRead(
                f"{self.label}: has {self.size:,} bytes; {len(buffer):,} were wanted at {offset:,}",
                wanted=len(buffer),
                got=max(0, min(self.size - offset, len(buffer))),
            )
        number = bisect.bisect_right(self._starts, offset) - 1
        done = 0
        while done < len(buffer):
            run, skipped = self.runs[number], offset + done - self._starts[number]
            count = min(run.length - skipped, len(buffer) - done)
            if count:
                run.source.read_into(run.offset + skipped, buffer[done : done + count])
            done += count
            number += 1

    def close(self) -> None:
        """Nothing: who opened the sources below closes them."""
