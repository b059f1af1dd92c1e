"""A share: a virtual file with its digests, offered under a URL. Knows no socket.

What it offers is immutable, and that is enforced: arrays are hashed before anybody can ask for
them, files are watched by their fingerprint, and a change ends the share for everybody.
"""

import threading
from collections.abc import Callable, Generator, Mapping
from functools import partial

import numpy as np
from blake3 import blake3

from weighlock.errors import SourceChanged
from weighlock.limits import Budget, Limits
from weighlock.sharing.offer import Offer, Ticketing
from weighlock.sharing.share import Life, Outcome, Receiver
from weighlock.sources.access import shown
from weighlock.sources.grid import BLOCK_BYTES, RANGE_BYTES
from weighlock.tensors.arrays import byte_view, empty
from weighlock.tensors.spec import Span
from weighlock.transfer.contents import Contents
from weighlock.transfer.digests import Digests
from weighlock.transfer.pieces import Piece

__all__ = ["Share"]

_MOST_FAILURES = 64
_TRIED_BYTES = 1024 * 1024

_HASHED_BYTES = 2 * 1024 * 1024
"""What one thread needs that reads and hashes: a block, and buffers to gather small tensors in."""

_WAIT_S = 2.0
"""How long that waits for room in the budget."""


class Share(Offer):
    """An owner's offer of tensors.

    Made by `Server.share`. As a context manager it is revoked at the end.
    """

    def __init__(
        self,
        ticketing: Ticketing,
        contents: Contents,
        life: Life,
        *,
        cacheable: bool,
        digests: Digests | None = None,
        etag: str | None = None,
        budget: Budget | None = None,
        forget: Callable[[Offer], None],
        on_done: Callable[[Outcome], object] | None = None,
        title: str = "",
        label: str = "share",
    ) -> None:
        super().__init__(ticketing, life, forget=forget, on_done=on_done, label=label)
        self.title = title
        """What people call it."""
        self.tensors = len(contents.file.specs) + len(contents.file.aliases)
        """How many it offers, by all their names."""
        self.cacheable = cacheable
        self.contents = contents
        self.digests = digests or Digests(contents)
        self._budget = budget or Budget(Limits().budget_bytes)
        self.etag = etag or f'"{blake3(ticketing.offer_id.encode()).hexdigest(16)}"'
        self._lock = threading.Lock()
        self._failures: set[int] = set()
        self._sent_bytes = 0

    def __repr__(self) -> str:
        return f"<Share {shown(self.url)} of {self.size:,} bytes, {self.ended or 'live'}>"

    @property
    def size(self) -> int:
        """Bytes of the file it offers."""
        return self.contents.size

    @property
    def receivers(self) -> Mapping[str, Receiver]:
        """Who receives it, how far they are: those it is for, or those who came."""
        return self.outcome.receivers

    def let_go(self) -> None:
        """Release the tensors."""
        self.contents.close()

    def pieces(self, span: Span) -> Generator[Piece, None, None]:
        """The bytes of a span.

        Raises:
            SourceError: a tensor cannot be read. `SourceChanged` ends the share.
            UpstreamFailed: it lies on another server, which does not give it.
            TransferTimeout: there is no room for a buffer.
        """
        try:
            yield from self.contents.pieces(span, self._budget)
        except SourceChanged:
            self.end("changed")
            raise

    def digest_page(self, page: int, wait_s: float) -> bytes | None:
        """The digests of a page; None if more is to be hashed after that time.

        Raises:
            SourceError: the tensors could not be read, or have changed.
            UpstreamFailed: they lie on another server, which does not give them.
            TransferTimeout: there is no room for buffers to hash with.
        """
        room = partial(self._budget.hold, 2 * _HASHED_BYTES, _WAIT_S)
        found = self.digests.page(page, wait_s, room)
        if found is None:  # who hashes may be waiting for what has not come before
            self.contents.check_upstreams()
        return found

    def check_block(self, block: int) -> None:
        """A receiver says that a block never matches: look whether it was changed here."""
        try:
            with self._budget.hold(_HASHED_BYTES, _WAIT_S):
                matches = self.digests.still_matches(block)
        except SourceChanged:
            matches = False
        if not matches:
            self.end("changed")

    @property
    def sent_bytes(self) -> int:
        """Bytes of the file that were sent so far, to whomever."""
        return self._sent_bytes

    def note_sent(self, count: int) -> None:
        """So many more were sent."""
        with self._lock:
            self._sent_bytes += count

    def note_failure(self, span: Span, at: int) -> None:
        """Remember where a range broke off: asked for again, it is tried before it is promised."""
        # Whoever checks blocks asks again from the one that it has not got, others as before.
        with self._lock:
            for offset in {span.offset, max(span.offset, at - at % BLOCK_BYTES)}:
                if len(self._failures) >= _MOST_FAILURES:
                    self._failures.pop()
                self._failures.add(offset)

    def try_again(self, span: Span) -> None:
        """Read a range that broke off the last time, so that what fails is said and not cut off.

        Its first 8 MiB: who asks again does so from the block that failed.

        Raises:
            Whatever reading raises.
        """
        with self._lock:
            if span.offset not in self._failures:
                return
        with self._budget.hold(_HASHED_BYTES, _WAIT_S):
            buffer = byte_view(empty((_TRIED_BYTES,), np.dtype(np.uint8)))
            end = min(span.end, span.offset + RANGE_BYTES)
            for start in range(span.offset, end, _TRIED_BYTES):
                self.contents.read_into(start, buffer[: min(_TRIED_BYTES, end - start)])
        with self._lock:
            self._failures.discard(span.offset)
