"""The BLAKE3 of every block of a virtual file. Knows blocks and threads; not where digests go."""

import threading
from collections.abc import Callable, Iterable
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
from weighlock.transfer.pieces import FilePart, in_memory

__all__ = ["Digests", "hash_block", "in_two_threads"]


def hash_block(contents: Contents, block: int, buffer: memoryview) -> bytes:
    """The digest of a block; the buffer of one block holds what must be read for it."""
    hasher = blake3()
    for piece in contents.pieces(block_span(block, contents.size)):
        if isinstance(piece, FilePart):
            view = buffer[: piece.length]
            piece.file.read_into(piece.offset, view)
            hasher.update(view)
        else:
            hasher.update(in_memory(piece))
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


class Digests:
    """One digest per block: all at once, or a page when it is asked for."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._digests = bytearray(DIGEST_BYTES * block_count(contents.size))
        pages = -(-block_count(contents.size) // BLOCKS_PER_PAGE)
        self._ready = bytearray(pages)
        self._hashing = threading.Lock()

    @property
    def pages(self) -> int:
        """How many pages of digests there are."""
        return len(self._ready)

    @property
    def root(self) -> bytes | None:
        """What tells this content from any other; None until every block is hashed."""
        return blake3(self._digests).digest() if all(self._ready) else None

    def is_ready(self, number: int) -> bool:
        """Whether a page is hashed."""
        return bool(self._ready[number])

    def hash_all(self) -> None:
        """Hash every block now."""
        for page in range(self.pages):
            self.page(page)

    def page(self, number: int, wait_s: float = -1) -> bytes | None:
        """The digests of a page, one after another; hashed now if nobody asked before.

        Returns:
            None if another thread is still hashing after `wait_s` seconds.

        Raises:
            SourceError: the tensors could not be read, or have changed.
        """
        if not self._ready[number]:
            if not self._hashing.acquire(timeout=wait_s):
                return None
            try:
                if not self._ready[number]:
                    in_two_threads(page_blocks(number, self._contents.size), self._hash)
                    self._ready[number] = 1
            finally:
                self._hashing.release()
        first = number * BLOCKS_PER_PAGE * DIGEST_BYTES
        return bytes(self._digests[first : first + BLOCKS_PER_PAGE * DIGEST_BYTES])

    def still_matches(self, block: int) -> bool:
        """Whether a block that was hashed before still has that digest."""
        if not self._ready[block // BLOCKS_PER_PAGE]:
            return True
        buffer = byte_view(empty((BLOCK_BYTES,), np.dtype(np.uint8)))
        return hash_block(self._contents, block, buffer) == self._of(block)

    def _of(self, block: int) -> bytes:
        return bytes(self._digests[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES])

    def _hash(self, block: int, buffer: memoryview) -> None:
        digest = hash_block(self._contents, block, buffer)
        self._digests[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES] = digest
