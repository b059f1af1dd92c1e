"""Short runs of bytes all over a source that answers slowly: read together, several at once.

Knows spans and which of them lie near each other; not what is in them.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from weighlock.tensors.spec import Span
from weighlock.tensors.stored import ReadsMany

if TYPE_CHECKING:
    from weighlock.sources.base import Source

__all__ = ["far", "read_ahead"]

_NEAR_BYTES = 32 * 1024
"""To read what lies between costs less than to ask again."""

_RUN_BYTES = 256 * 1024
_RUNS_AT_ONCE = 64


def far(source: "Source") -> ReadsMany | None:
    """The source, if asking takes longer than reading, and several can be asked for at once."""
    return source if isinstance(source, ReadsMany) and getattr(source, "is_far", False) else None


def read_ahead(source: ReadsMany, spans: Sequence[Span]) -> list[bytes]:
    """The bytes of each span; they are short, and in the order of the source.

    Raises:
        SourceError, TransferError: as the source does.
    """
    found: list[bytes] = []
    for batch in _batches(list(_runs(spans))):
        buffers = [bytearray(run[-1].end - run[0].offset) for run in batch]
        parts = [(run[0].offset, memoryview(b)) for run, b in zip(batch, buffers, strict=True)]
        source.read_many(parts)
        for run, raw in zip(batch, buffers, strict=True):
            first = run[0].offset
            found += [bytes(raw[s.offset - first : s.end - first]) for s in run]
    return found


def _runs(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Spans that are read by one request each."""
    run: list[Span] = []
    for span in spans:
        is_near = run and span.offset - run[-1].end <= _NEAR_BYTES
        if run and not (is_near and span.end - run[0].offset <= _RUN_BYTES):
            yield run
            run = []
        run.append(span)
    if run:
        yield run


def _batches(runs: list[list[Span]]) -> Iterator[list[list[Span]]]:
    for first in range(0, len(runs), _RUNS_AT_ONCE):
        yield runs[first : first + _RUNS_AT_ONCE]
