"""A file behind a URL, as a source.

On a Weighlock server it is read block by verified block, on any other that answers ranges as the
server says it is. What is asked how is `Remote`'s; here lies what a read needs of it.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from blake3 import blake3

from weighlock.errors import ShortRead, SourceError
from weighlock.per_process import PerProcess
from weighlock.sources.grid import BLOCK_BYTES, RANGE_BYTES, block_span, blocks_of, runs
from weighlock.sources.http_remote import Remote
from weighlock.sources.http_replies import Resource
from weighlock.sources.resting import Resting
from weighlock.sources.turns import in_turns
from weighlock.tensors.arrays import own_pages
from weighlock.tensors.spec import Span

__all__ = ["HttpSource"]

_AT_ONCE = 4
"""Requests under way for one call that reads many parts."""

_STRIP_BYTES = 8 * 1024 * 1024
"""Asked for at once then: who stops need not wait for gigabytes."""

_KEPT_BLOCKS = 8
"""Blocks of which a part was read: the next read is often for the rest."""


class HttpSource:
    """A file behind a URL, as `Remote(url, …)` found it. Closed together with it.

    Args:
        remote: the file.
        resting: the sources of the same catalog, of which only a few keep connections.
    """

    is_far = True
    """Asking takes longer than reading."""

    def __init__(self, remote: Remote, resting: Resting | None = None) -> None:
        self.remote = remote
        self._resting = resting
        self.label = self.remote.label
        self._kept: OrderedDict[int, bytes | memoryview] = OrderedDict()
        self._lock = PerProcess(threading.Lock)
        self._most = _KEPT_BLOCKS
        self._keeps_connections = True
        if resting is not None:
            resting.use(self)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.remote.size

    @property
    def verifies(self) -> bool:
        """Whether what is read is checked against digests."""
        return self.remote.verifies

    @property
    def ticket(self) -> str | None:
        """The URL by which a message may pass a tensor of this file on; only shares have one."""
        address = self.remote.address
        if not self.remote.resource.is_share or self.remote.resource.address != address:
            return None
        return f"{address.url}#{address.fragment}" if address.fragment else address.url

    def __repr__(self) -> str:
        return f"<HttpSource {self.label} of {self.size:,} bytes>"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, HttpSource)
            and self.remote.address == other.remote.address
            and self.remote.resource.validator == other.remote.resource.validator
            and self.size == other.size
        )

    def __hash__(self) -> int:
        return hash((self.remote.address, self.size))

    def __reduce__(self) -> tuple[object, ...]:
        # Without credentials: what is unpickled asks as anybody would.
        address = self.remote.address
        return _unpickled, (address.ticket, self.remote.verify, self.remote.resource.moved(address))

    def keep_at_most(self, blocks: int, *, connections: bool = True) -> None:
        """Hold so many blocks for later reads, and the start of the file no longer.

        For who has many files open at once, and reads each from one end to the other.

        Args:
            blocks: how many.
            connections: keep those that nobody uses; a server gives one peer only so many.
        """
        with self._lock():
            self._most = blocks
            self._kept.clear()
        self.remote.first = b""
        self._keeps_connections = connections
        if not connections:
            self.remote.connections.rest()

    def rest(self) -> None:
        """Let go of blocks, and of connections that nobody uses now; the next read asks anew."""
        with self._lock():
            self._kept.clear()
        self.remote.first = b""
        self.remote.connections.rest()

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self.remote.close()

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer; on a share, from blocks that matched their digests."""
        if self.remote.is_closed:
            raise SourceError(f"{self.label}: used after it was closed")
        if offset < 0 or offset + len(buffer) > self.size:
            raise ShortRead(
                f"{self.label}: has {self.size:,} bytes; {len(buffer):,} were wanted at {offset:,}",
                wanted=len(buffer),
                got=max(0, min(self.size - offset, len(buffer))),
            )
        if self._resting is not None:
            self._resting.use(self)
        self._read(Span(offset, len(buffer)), buffer)
        if not self._keeps_connections:
            self.remote.connections.rest()

    def _read(self, span: Span, buffer: memoryview) -> None:
        first = self.remote.first  # once: another thread may drop it
        if self.verifies:
            self._read_verified(span, buffer)
        elif span.end <= len(first):
            buffer[:] = first[span.offset : span.end]
        elif span.length:
            self._read_exactly(span, buffer)

    def read_many(self, parts: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer from its offset, several of them at once."""
        if self.verifies or len(parts) == 1:  # neighbours share the blocks that are verified
            for offset, buffer in parts:
                self.read_into(offset, buffer)
            return

        def read(strip: tuple[int, memoryview]) -> None:
            self.read_into(*strip)

        in_turns(_strips(parts), lambda: read, min(_AT_ONCE, len(parts)))

    def _read_verified(self, span: Span, buffer: memoryview) -> None:
        place = _Window(span, buffer, self.size)
        blocks = blocks_of(span)
        self._take_kept(place, blocks)
        retrying = self.remote.connections.retrying()

        def attempt() -> None:
            missing = [block for block in blocks if block not in place.done]
            for run in runs(missing):
                with self.remote.lease() as connection:
                    self.remote.receive(connection, run, place)
                retrying.progressed()

        self.remote.persist(attempt, retrying)
        for block, content in place.partial.items():
            self._keep(block, content)

    def _take_kept(self, place: "_Window", blocks: range) -> None:
        remote = self.remote
        first = remote.first  # once: another thread may drop it
        if first and 0 in blocks and 0 not in self._kept:
            digest = blake3(first).digest()
            if remote.persist(lambda: remote.matches(0, digest)):
                self._keep(0, first)
            else:
                remote.first = b""  # it is asked for again
        with self._lock():
            kept = {block: self._kept[block] for block in blocks if block in self._kept}
        for block, content in kept.items():
            place.fill(block, content)

    def _keep(self, block: int, content: bytes | memoryview) -> None:
        with self._lock():
            self._kept[block] = content
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)

    def _read_exactly(self, span: Span, buffer: memoryview) -> None:
        if not self.remote.resource.has_ranges and span.length == self.size:
            self.remote.persist(lambda: self._read_part(span, buffer))
            return
        if not self.remote.resource.has_ranges:
            raise SourceError(
                f"{self.label}: its server does not answer ranges, so parts of it cannot be read; "
                "fetch it to a file first"
            )
        retrying = self.remote.connections.retrying()
        for start in range(span.offset, span.end, RANGE_BYTES):
            part = Span(start, min(RANGE_BYTES, span.end - start))
            view = buffer[start - span.offset :][: part.length]
            self.remote.persist(lambda part=part, view=view: self._read_part(part, view), retrying)  # type: ignore[misc]
            retrying.progressed()

    def _read_part(self, part: Span, view: memoryview) -> None:
        with self.remote.lease() as connection:
            self.remote.read_into(connection, part, view)


def _unpickled(url: str, verify: bool, resource: Resource) -> HttpSource:
    return HttpSource(Remote(url, verify=verify, resource=resource))


class _Window:
    """A place for a span of the file: whole blocks go straight into the caller's buffer."""

    def __init__(self, span: Span, buffer: memoryview, size: int) -> None:
        self.buffer = buffer
        self.done: set[int] = set()
        self.partial: dict[int, memoryview] = {}
        self._span = span
        self._size = size
        self._aside = memoryview(b"")

    def views(self, block: int) -> Sequence[memoryview]:
        whole = block_span(block, self._size)
        first = whole.offset - self._span.offset
        if first >= 0 and whole.end <= self._span.end:
            return (self.buffer[first : first + whole.length],)
        if not len(self._aside):
            self._aside = own_pages(BLOCK_BYTES)  # many threads make and drop such blocks
        return (self._aside[: whole.length],)

    def landed(self, block: int) -> None:
        whole = block_span(block, self._size)
        if whole.offset < self._span.offset or whole.end > self._span.end:
            content, self._aside = self._aside[: whole.length], memoryview(b"")
            self.partial[block] = content
            self.fill(block, content)
        self.done.add(block)

    def fill(self, block: int, content: bytes | memoryview) -> None:
        """Take what belongs to the span from a block that is already here."""
        whole = block_span(block, self._size)
        begin = max(whole.offset, self._span.offset)
        end = min(whole.end, self._span.end)
        target = self.buffer[begin - self._span.offset : end - self._span.offset]
        target[:] = memoryview(content)[begin - whole.offset : end - whole.offset]
        self.done.add(block)


def _strips(parts: Sequence[tuple[int, memoryview]]) -> Iterator[tuple[int, memoryview]]:
    for offset, buffer in parts:
        for begin in range(0, len(buffer), _STRIP_BYTES):
            yield offset + begin, buffer[begin : begin + _STRIP_BYTES]
