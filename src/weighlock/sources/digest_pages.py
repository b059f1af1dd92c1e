"""The digests that an owner has given, and the blocks that were believed for them.

A page of digests may be spoiled on its way, and is asked for again then. A block is believed for
good: what came later would be of another file. Knows no connection.
"""

import threading
from collections.abc import Callable
from typing import TypeAlias

from weighlock.errors import ChunkCorrupt, SourceChanged
from weighlock.per_process import PerProcess
from weighlock.sources.grid import BLOCKS_PER_PAGE, DIGEST_BYTES, page_of

__all__ = ["DigestPages"]

Fetch: TypeAlias = Callable[[int], bytes]
"""Asks the owner for a page."""


class DigestPages:
    """The pages of one file, each asked for when first needed. For any thread.

    Args:
        label: what errors call the file.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._pages: dict[int, bytes] = {}
        self._doubted: set[int] = set()
        self._believed: dict[int, bytearray] = {}
        """By page, of each of its blocks whether it matched."""
        self._locks = PerProcess(_Locks)

    def load(self, page: int, fetch: Fetch) -> None:
        """Have a page, without doubt.

        Args:
            page: its number.
            fetch: asks the owner for a page.

        Raises:
            SourceChanged: it contradicts what a block was believed for.
            ChunkCorrupt: it does so in another way every time it is asked for.
        """
        if self._is_good(page):
            return
        with self._locks().fetching:
            if not self._is_good(page):
                self._take(page, fetch)

    def matches(self, block: int, digest: bytes) -> bool:
        """Whether that is the digest of the block, by its page as it was loaded last.

        If so, the block is believed: a page that says otherwise is refused from now on.
        """
        page = page_of(block)
        with self._locks().believing:
            if _on(self._pages[page], block) != digest:
                return False
            if page not in self._believed:
                self._believed[page] = bytearray(BLOCKS_PER_PAGE)
            self._believed[page][block % BLOCKS_PER_PAGE] = True
            return True

    def doubt(self, block: int) -> None:
        """A block does not match: the fault may be in its digest."""
        self._doubted.add(page_of(block))

    def _is_good(self, page: int) -> bool:
        return page in self._pages and page not in self._doubted

    def _take(self, page: int, fetch: Fetch) -> None:
        fresh = fetch(page)
        if fresh != self._pages.get(page, fresh):
            # Spoiled before, or another file's now: then pages that are through differ as well.
            for other in [number for number in list(self._believed) if number != page]:
                self._agree(other, fetch(other), fetch)
        self._agree(page, fresh, fetch, is_kept=True)
        self._doubted.discard(page)

    def _agree(self, page: int, fresh: bytes, fetch: Fetch, *, is_kept: bool = False) -> None:
        """Raise if a page contradicts what a block of it was believed for."""
        with self._locks().believing:  # in one step: blocks are believed meanwhile
            block = self._contradicted(page, fresh)
            if block is None:
                if is_kept:
                    self._pages[page] = fresh
                return
        if fetch(page) == fresh:  # what comes twice was not spoiled on its way
            raise SourceChanged(
                f"{self._label}: the digest of block {block} is another than when the block came: "
                "its owner offers other content now; fetch it anew"
            )
        raise ChunkCorrupt(f"{self._label}: the digest of block {block} is spoiled", chunk=block)

    def _contradicted(self, page: int, fresh: bytes) -> int | None:
        known = self._pages.get(page, fresh)
        believed = self._believed.get(page, b"")
        if known == fresh:
            return None
        first = page * BLOCKS_PER_PAGE
        blocks = (first + number for number, is_here in enumerate(believed) if is_here)
        return next((block for block in blocks if _on(known, block) != _on(fresh, block)), None)


class _Locks:
    """The locks of one process."""

    def __init__(self) -> None:
        self.fetching = threading.Lock()
        """Held while a page is asked for."""
        self.believing = threading.Lock()
        """Held for a moment: threads that land blocks do not wait for the network."""


def _on(page: bytes, block: int) -> bytes:
    first = block % BLOCKS_PER_PAGE * DIGEST_BYTES
    return page[first : first + DIGEST_BYTES]
