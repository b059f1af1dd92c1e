"""The BLAKE3 of every block of a virtual file. Knows blocks and threads; not where digests go."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import length_hint

import numpy as np
from blake3 import blake3

from weighlock.sources.grid import (
    BLOCK_BYTES,
    BLOCKS_PER_PAGE,
    DIGEST_BYTES,
    block_count,
    block_span,
    page_blocks,
)
from weighlock.sources.turns import in_turns
from weighlock.tensors.arrays import byte_view, empty
from weighlock.transfer.contents import Contents
from weighlock.transfer.pieces import FilePart, views_of

__all__ = ["Digests", "hash_block", "in_two_threads", "within"]


def hash_block(contents: Contents, block: int, buffer: memoryview) -> bytes:
    """The digest of a block; the buffer of one block holds what must be read for it."""
    hasher = blake3()
    for piece in contents.pieces(block_span(block, contents.size)):
        if isinstance(piece, FilePart):
            view = buffer[: piece.length]
            piece.file.read_into(piece.offset, view)
            hasher.update(view)
        else:
            for view in views_of(piece):
                hasher.update(view)
    return hasher.digest()


def in_two_threads(blocks: Iterable[int], work: Callable[[int, memoryview], None]) -> None:
    """Do the work for every block, with a buffer of a block; both cores take the next one each.

    Raises:
        Whatever the work raised first; the rest is then left undone.
    """

    def worker() -> Callable[[int], None]:
        buffer = byte_view(empty((BLOCK_BYTES,), np.dtype(np.uint8)))
        return lambda block: work(block, buffer)

    # For one block a thread would take longer than the block.
    in_turns(blocks, worker, 1 if length_hint(blocks, 2) < 2 else 2)


def within(seconds: float, blocks: Sequence[int]) -> Iterable[int]:
    """The blocks for which there is time, one at least; all of them if that is less than 0."""
    if seconds < 0 or len(blocks) < 2:
        return blocks
    end = time.monotonic() + seconds
    return (block for n, block in enumerate(blocks) if not n or time.monotonic() < end)


class Digests:
    """One digest per block: all at once, or a page when it is asked for, little by little."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self.blocks = block_count(contents.size)
        """How many there are."""
        self._digests = bytearray(DIGEST_BYTES * self.blocks)
        self._is_hashed = bytearray(self.blocks)
        self._hashing = threading.Lock()

    @property
    def pages(self) -> int:
        """How many pages of digests there are."""
        return -(-self.blocks // BLOCKS_PER_PAGE)

    @property
    def hashed_blocks(self) -> int:
        """How many blocks are hashed, of whichever page."""
        return self._is_hashed.count(1)

    @property
    def root(self) -> bytes | None:
        """What tells this content from any other; None until every block is hashed."""
        return blake3(self._digests).digest() if all(self._is_hashed) else None

    def hash_all(self) -> None:
        """Hash every block now."""
        for page in range(self.pages):
            self.page(page)

    def page(
        self,
        number: int,
        wait_s: float = -1,
        room: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> bytes | None:
        """The digests of a page, one after another; hashed now if nobody asked before.

        What was hashed stays so: who asks again and again has the page in the end, however slowly
        the tensors are read.

        Args:
            number: which page.
            wait_s: how long to hash, or to wait for another thread that does; without bound if it
                is less than 0. A block that was begun is finished.
            room: entered while something is hashed.

        Returns:
            None if more is to be hashed after that time.

        Raises:
            SourceError: the tensors could not be read, or have changed.
            Whatever `room` raises.
        """
        blocks = page_blocks(number, self._contents.size)
        if self._missing(blocks):
            if not self._hashing.acquire(timeout=wait_s):
                return None
            try:
                missing = self._missing(blocks)
                if missing:
                    with room():
                        in_two_threads(within(wait_s, missing), self._hash)
            finally:
                self._hashing.release()
            if self._missing(blocks):
                return None
        first = number * BLOCKS_PER_PAGE * DIGEST_BYTES
        return bytes(self._digests[first : first + BLOCKS_PER_PAGE * DIGEST_BYTES])

    def still_matches(self, block: int) -> bool:
        """Whether a block that was hashed before still has that digest."""
        if not self._is_hashed[block]:
            return True
        buffer = byte_view(empty((BLOCK_BYTES,), np.dtype(np.uint8)))
        return hash_block(self._contents, block, buffer) == self._of(block)

    def _missing(self, blocks: range) -> list[int]:
        if 0 not in self._is_hashed[blocks.start : blocks.stop]:
            return []
        return [block for block in blocks if not self._is_hashed[block]]

    def _of(self, block: int) -> bytes:
        return bytes(self._digests[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES])

    def _hash(self, block: int, buffer: memoryview) -> None:
        digest = hash_block(self._contents, block, buffer)
        self._digests[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES] = digest
        self._is_hashed[block] = 1
