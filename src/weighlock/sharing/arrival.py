"""One sender's file on its way in: what has come of it, and whether that is all. Knows no HTTP.

A block counts when it matches the digest it came with, and a file when the digests of all its
blocks are those its sender names at the end. Nothing else identifies content: who sends again,
after a crash of either side, is told the digests of what is here, and sends what differs.
"""

import threading
from typing import Protocol

from blake3 import blake3

from weighlock.errors import ChunkCorrupt, LayoutError, Refused, ShortRead
from weighlock.sources.grid import (
    BLOCK_BYTES,
    BLOCKS_PER_PAGE,
    DIGEST_BYTES,
    block_count,
    block_span,
    page_blocks,
)
from weighlock.sources.local import FileSource
from weighlock.transfer.digests import in_two_threads
from weighlock.transfer.landing import FileLanding, LandingFile

__all__ = ["Announced", "Arrival", "LandedFile", "root_of"]

_NOT_HERE = bytes(DIGEST_BYTES)


def root_of(digests: bytes) -> str:
    """What the digests of all blocks come down to."""
    return blake3(digests).hexdigest()


class Announced:
    """A file of which only the header is here: enough to check what it says of itself."""

    def __init__(self, header: bytes, size: int, label: str) -> None:
        self._header = memoryview(header)
        self.size = size
        self.label = label

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer from the header."""
        if offset + len(buffer) > len(self._header):
            raise ShortRead(
                f"{self.label}: announces {len(self._header):,} bytes of header, "
                f"{offset + len(buffer):,} belong to it",
                wanted=len(buffer),
                got=max(0, len(self._header) - offset),
            )
        buffer[:] = self._header[offset : offset + len(buffer)]

    def close(self) -> None:
        """There is nothing to close."""


class ArrivingFile(LandingFile, Protocol):
    """A file that blocks arrive in, whole at the end or not at all."""

    def keep(self) -> None:
        """Let go of it; what was written stays for the next attempt. Idempotent."""

    def discard(self) -> None:
        """Leave no trace of it. Idempotent."""


class LandedFile:
    """A file that is complete: it is compared with, and never written."""

    def __init__(self, path: str) -> None:
        self._source = FileSource(path)
        self.size = self._source.size

    def write(self, offset: int, data: memoryview) -> None:
        raise Refused("it has landed, and is not changed")

    def truncate(self, size: int) -> None:
        raise Refused("it has landed, and is not changed")

    def read_into(self, offset: int, buffer: memoryview) -> bool:
        """Fill the buffer; False if the file ends before."""
        if offset + len(buffer) > self.size:
            return False
        self._source.read_into(offset, buffer)
        return True

    def close(self) -> None:
        """Let go of it. Idempotent."""
        self._source.close()

    keep = discard = close


class Arrival:
    """A file that arrives in blocks, from several connections, in any order, more than once.

    Args:
        file: where it is put.
        header: its first bytes, which were checked before anything else came.
        size: its bytes in all.
        is_adopted: an earlier attempt wrote to the file; what, is found out by hashing it.
    """

    def __init__(
        self, file: ArrivingFile, header: bytes, size: int, *, is_adopted: bool = False
    ) -> None:
        self.file = file
        self.header = header
        self.size = size
        self._landing = FileLanding(file, size)
        self._digests = bytearray(DIGEST_BYTES * block_count(size))
        self._adopted = set(range(block_count(size))) if is_adopted else set[int]()
        self._lock = threading.Lock()
        self.finishing = threading.Lock()
        """Held while it is put in place."""
        self._bytes = 0

    @property
    def bytes_here(self) -> int:
        """Bytes of blocks that came and matched."""
        return self._bytes

    @property
    def has_some(self) -> bool:
        """Whether it is worth asking what is here."""
        return bool(self._bytes or self._adopted)

    @property
    def root(self) -> str | None:
        """What its digests come down to, once everything is here."""
        with self._lock:
            if self._adopted or any(
                self._digests[at : at + DIGEST_BYTES] == _NOT_HERE
                for at in range(0, len(self._digests), DIGEST_BYTES)
            ):
                return None
            return root_of(bytes(self._digests))

    def check_run(self, first: int, length: int, count: int) -> range:
        """The blocks a body of that length begins with block `first`.

        Raises:
            LayoutError: there are none, or they have another length.
        """
        blocks = range(first, first + count)
        if not count or blocks.stop > block_count(self.size):
            raise LayoutError(
                f"blocks {first} to {blocks.stop} of a file of {block_count(self.size)} blocks"
            )
        end = min(blocks.stop * BLOCK_BYTES, self.size)
        if length != end - first * BLOCK_BYTES:
            raise LayoutError(
                f"{length:,} bytes for {count} blocks that take {end - first * BLOCK_BYTES:,}"
            )
        return blocks

    def put(self, block: int, content: memoryview, digest: bytes) -> None:
        """Land a block that came.

        Raises:
            ChunkCorrupt: it is not what its digest says.
            LayoutError: it contradicts the header that was announced.
            DiskError: it cannot be written.
        """
        if blake3(content).digest() != digest:
            raise ChunkCorrupt(f"block {block} does not match its digest", chunk=block)
        start = block * BLOCK_BYTES
        announced = memoryview(self.header)[start : start + len(content)]
        if content[: len(announced)] != announced:
            raise LayoutError(f"block {block} holds another header than was announced")
        self._landing.put(block, content)
        with self._lock:
            self._here(block, digest)

    def page(self, number: int) -> bytes | None:
        """The digests of what is here, zeros for what is not; None if there is no such page."""
        blocks = page_blocks(number, self.size)
        if not blocks:
            return None
        with self._lock:
            unknown = [block for block in blocks if block in self._adopted]
        in_two_threads(unknown, self._hash)
        first = number * BLOCKS_PER_PAGE * DIGEST_BYTES
        with self._lock:
            return bytes(self._digests[first : first + DIGEST_BYTES * len(blocks)])

    def complete(self) -> None:
        """Everything is here: write what makes it a file. Putting it in place is the caller's."""
        self._landing.complete()

    def _hash(self, block: int, buffer: memoryview) -> None:
        view = self._landing.have(block, buffer, self.header)
        with self._lock:
            if block not in self._adopted:
                return  # it came meanwhile
            if view is None:
                self._adopted.discard(block)
                return
            self._here(block, blake3(view).digest())
        if block == 0 and not isinstance(self.file, LandedFile):
            self._landing.put(0, view)  # its first bytes are withheld until the end

    def _here(self, block: int, digest: bytes) -> None:
        at = block * DIGEST_BYTES
        if self._digests[at : at + DIGEST_BYTES] == _NOT_HERE:
            self._bytes += block_span(block, self.size).length
        self._digests[at : at + DIGEST_BYTES] = digest
        self._adopted.discard(block)
