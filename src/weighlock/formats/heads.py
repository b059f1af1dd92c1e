"""The heads of an archive's members, read with few requests. Knows places; neither ZIP nor tar."""

from bisect import bisect_right
from collections.abc import Iterable
from itertools import islice
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING

from weighlock.formats.reading_ahead import far, read_ahead
from weighlock.tensors.spec import Span

if TYPE_CHECKING:
    from weighlock.sources.base import Source

__all__ = ["Heads"]

_NEAR_BYTES = 64 * 1024
_MOST_AHEAD = 65_536
"""Heads that are held while an archive is opened: about 300 bytes each."""


class Heads:
    """The heads of members. Those that lie near each other are read together.

    Args:
        source: the archive.
        ahead: where heads will be asked for. Of a source that is far they are read now.
        dense: what is small lies together at the beginning.
    """

    def __init__(
        self, source: "Source", ahead: Iterable[Span] = (), *, dense: bool = False
    ) -> None:
        self._source = source
        self._start = 0 if dense else source.size  # near to which more is read than is asked for
        self._bytes = b""
        self._ahead: list[tuple[int, bytes]] = []
        remote = far(source)
        if remote is not None:
            spans = sorted(islice(ahead, _MOST_AHEAD), key=attrgetter("offset"))
            heads = read_ahead(remote, spans)
            self._ahead = [(span.offset, raw) for span, raw in zip(spans, heads, strict=True)]

    def forget(self) -> None:
        """Let go of what was read: nobody will ask for more heads."""
        self._ahead, self._bytes, self._start = [], b"", self._source.size

    def read(self, header: int, length: int) -> bytes:
        """The first bytes of a member, whose head begins there."""
        if self._ahead:
            place = bisect_right(self._ahead, header, key=itemgetter(0)) - 1
            start, raw = self._ahead[max(place, 0)]
            if start <= header and header + length <= start + len(raw):
                return raw[header - start :][:length]
        first = header - self._start
        if first < 0 or first + length > len(self._bytes):
            # Twice near the same place: then many small members follow each other.
            is_near = 0 <= first < len(self._bytes) + _NEAR_BYTES
            wanted = _NEAR_BYTES if is_near else length
            further = bytearray(max(length, min(wanted, self._source.size - header)))
            self._source.read_into(header, memoryview(further))
            self._start, self._bytes, first = header, bytes(further), 0
        return self._bytes[first : first + length]
