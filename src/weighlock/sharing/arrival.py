"""One sender's file on its way in: what has come of it, and whether that is all. Knows no HTTP.

A block counts when it matches the digest it came with, and a file when the digests of all its
blocks are those its sender names at the end. Nothing else identifies content: who sends again,
after a crash of either side, is told the digests of what is here, and sends what differs.

Several connections write at once, and some are those of an attempt that is over: no block is
written by two at a time, and none once the file is sealed to be put in its place.
"""

import threading
from collections.abc import Callable
from typing import Protocol

from blake3 import blake3

from weighlock.errors import ChunkCorrupt, LayoutError, Refused
from weighlock.sharing.announced import Beginning
from weighlock.sharing.landed import InItsPlace, LandedFile
from weighlock.sources.grid import (
    BLOCK_BYTES,
    BLOCKS_PER_PAGE,
    DIGEST_BYTES,
    block_count,
    block_length,
    block_span,
    page_blocks,
)
from weighlock.transfer.digests import in_two_threads, within
from weighlock.transfer.landing import FileLanding, LandingFile

__all__ = ["Arrival", "ArrivingFile", "NotAwaited", "root_of"]

_NOT_HERE = bytes(DIGEST_BYTES)


class NotAwaited(Refused):
    """It is being put in its place, was let go of, or another connection brings that block."""


def root_of(digests: bytes) -> str:
    """What the digests of all blocks come down to."""
    return blake3(digests).hexdigest()


class ArrivingFile(LandingFile, Protocol):
    """A file that blocks arrive in, whole at the end or not at all."""

    def allocated_bytes(self) -> int:
        """Bytes the file already takes on the disk."""

    def keep(self) -> object:
        """Let go of it; what was written stays for the next attempt. Idempotent."""

    def discard(self) -> None:
        """Leave no trace of it. Idempotent."""


class Arrival:
    """A file that arrives in blocks, from several connections, in any order, more than once.

    Args:
        file: where it is put.
        header: its first bytes, which were checked before anything else came.
        size: its bytes in all.
        attempt: who may write to it.
        is_adopted: an earlier attempt wrote to the file; what, is found out by hashing it.
    """

    def __init__(
        self,
        file: ArrivingFile,
        header: bytes,
        size: int,
        attempt: str,
        *,
        is_adopted: bool = False,
    ) -> None:
        self.file: ArrivingFile = file
        self.attempt = attempt
        """The attempt it belongs to: the last one that announced it."""
        self.used_at = 0.0
        """When somebody last wrote to it or asked for it."""
        self.size = size
        self.blocks = block_count(size)
        """How many it has."""
        self._beginning = Beginning(header)
        self._landing = FileLanding(file, size)
        self._digests = bytearray(DIGEST_BYTES * block_count(size))
        self._adopted = set(range(block_count(size))) if is_adopted else set[int]()
        self._changed = threading.Condition()
        self._written: set[int] = set()
        self._claims: dict[int, object] = {}
        self.is_sealed = False
        """Nothing more is written to it."""
        self._sealing: object = None
        """Who sealed it to look what is here, and opens it again if that is not all."""
        self._bytes = 0

    @property
    def is_complete(self) -> bool:
        """Whether the file is one that landed before."""
        return isinstance(self.file, LandedFile)

    @property
    def bytes_here(self) -> int:
        """Bytes of blocks that came and matched."""
        return self._bytes

    @property
    def bytes_to_come(self) -> int:
        """Bytes it will still take on the disk."""
        return max(0, self.size - self.file.allocated_bytes())

    @property
    def has_some(self) -> bool:
        """Whether it is worth asking what is here."""
        return bool(self._bytes or self._adopted)

    @property
    def root(self) -> str | None:
        """What its digests come down to, once everything is here."""
        with self._changed:
            return self._root()

    def is_of(self, header: bytes, size: int) -> bool:
        """Whether it is the file that was announced so."""
        return size == self.size and Beginning(header) == self._beginning

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

    def receive(
        self, block: int, digest: bytes, fill: Callable[[memoryview], None], buffer: memoryview
    ) -> None:
        """Land a block that comes. One that is here already is not written again.

        Into a buffer that holds all of it, it is received before it is looked at and written. With
        less, its pieces are written as they come, and it counts once the last is here and the whole
        matches; another connection that brings the same block meanwhile goes first.

        Args:
            block: its number.
            digest: what it is said to be.
            fill: receives as many bytes as a view has.
            buffer: how many are received at once.

        Raises:
            ChunkCorrupt: it is not what its digest says.
            LayoutError: it contradicts the header that was announced.
            NotAwaited: nothing more of it is written.
            DiskError: it cannot be written.
            Whatever `fill` raises.
        """
        span = block_span(block, self.size)
        if len(buffer) < span.length:
            self._receive_pieces(block, digest, fill, buffer)
            return
        view = buffer[: span.length]
        fill(view)
        if blake3(view).digest() != digest:
            raise _corrupt(block)
        if not self._beginning.is_in(block, view):
            raise _other_header(block)
        if self._digest(block) != digest:
            self._write(block, view, 0, object(), digest)

    def _receive_pieces(
        self, block: int, digest: bytes, fill: Callable[[memoryview], None], buffer: memoryview
    ) -> None:
        span, hasher, claim = block_span(block, self.size), blake3(), object()
        beginning, announced = blake3(), self._beginning.length_in(block)
        is_repeat = self._digest(block) == digest
        for start in range(0, span.length, len(buffer)):
            view = buffer[: min(len(buffer), span.length - start)]
            fill(view)
            hasher.update(view)
            beginning.update(view[: max(0, announced - start)])
            if start + len(view) == span.length:
                if hasher.digest() != digest:
                    raise _corrupt(block)
                if beginning.digest() != self._beginning.digest(block):
                    raise _other_header(block)
            if not is_repeat:
                is_last = start + len(view) == span.length
                self._write(block, view, start, claim, digest if is_last else _NOT_HERE)

    @property
    def pages(self) -> int:
        """How many pages of digests there are."""
        return -(-self.blocks // BLOCKS_PER_PAGE)

    @property
    def known_blocks(self) -> int:
        """Of how many blocks it is known whether they are here."""
        return self.blocks - len(self._adopted)

    def page(self, number: int, wait_s: float = -1) -> bytes | None:
        """The digests of what is here, zeros for what is not.

        Args:
            number: which page.
            wait_s: how long to look at what an earlier attempt left; without bound if it is less
                than 0.

        Returns:
            None if there is more to look at after that time; what was seen stays so.
        """
        blocks = page_blocks(number, self.size)
        unknown = self._unknown(blocks)
        if unknown:
            in_two_threads(within(wait_s, unknown), self._hash)
            if self._unknown(blocks):
                return None
        first = number * BLOCKS_PER_PAGE * DIGEST_BYTES
        with self._changed:
            return bytes(self._digests[first : first + DIGEST_BYTES * len(blocks)])

    def seal(self, root: str, attempt: str) -> bool:
        """Take no more blocks, if what is here comes down to that; what is being written ends.

        Raises:
            Refused: it belongs to another attempt, perhaps since a moment ago.
        """
        me = object()
        with self._changed:
            self._check_owner(attempt)
            if not self.is_sealed:
                self.is_sealed, self._sealing = True, me
            self._changed.wait_for(lambda: not self._written)
            self._check_owner(attempt)  # whoever overtook it has opened it
            agrees = self._root() == root
            if agrees:
                self._close()
            elif self._sealing is me:
                self.is_sealed = False
            return agrees

    def belong_to(self, attempt: str) -> None:
        """It is that attempt's from now on, and takes blocks, whoever sealed it before."""
        with self._changed:
            self.attempt = attempt
            self.is_sealed, self._sealing = False, None

    def discard(self) -> None:
        """Nothing more is written to it, and no trace of it is left."""
        self._close()
        self.file.discard()

    def keep(self) -> None:
        """Nothing more is written to it here; what came stays for the next attempt."""
        with self._changed:
            self._close()
            self._changed.wait_for(lambda: not self._written)
        self.file.keep()

    def _close(self) -> None:
        self.is_sealed, self._sealing = True, None

    def _check_owner(self, attempt: str) -> None:
        if self.attempt != attempt:
            raise Refused("this push is over: another one under the same name was begun after it")

    def complete(self) -> None:
        """Everything is here: write what makes it a file. Putting it in place is the caller's."""
        self._landing.complete()

    def landed(self) -> None:
        """It is in its place: from now on only its digests are of use."""
        file, self.file = self.file, InItsPlace()
        self._landing = FileLanding(self.file, self.size)
        file.keep()

    def _write(
        self, block: int, content: memoryview, start: int, claim: object, digest: bytes
    ) -> None:
        """Write a piece of a block, which is then what the digest says.

        The first piece claims the block for its connection: what another one has begun is over.
        """
        self._begin(block, claim, is_first=start == 0)
        try:
            self._landing.put(block, content, start)
        except BaseException:
            self._end(block, _NOT_HERE)
            raise
        self._end(block, digest)

    def _begin(self, block: int, claim: object, *, is_first: bool = True) -> None:
        """From now on this block is written, by nobody else: two would leave a mixture."""
        with self._changed:
            while block in self._written:
                self._changed.wait()
            if is_first:
                self._claims[block] = claim
            if self.is_sealed or self._claims.get(block) is not claim:
                raise NotAwaited("nothing more of this is awaited")
            self._written.add(block)
            self._set(block, _NOT_HERE)  # half written it is neither the old nor the new one

    def _end(self, block: int, digest: bytes) -> None:
        with self._changed:
            self._written.discard(block)
            self._set(block, digest)
            if digest != _NOT_HERE:
                self._claims.pop(block, None)
            self._changed.notify_all()

    def _unknown(self, blocks: range) -> list[int]:
        return [block for block in blocks if block in self._adopted]

    def _hash(self, block: int, buffer: memoryview) -> None:
        if block not in self._adopted:
            return  # it came meanwhile
        digest = _NOT_HERE
        self._begin(block, object())
        try:
            view = self._landing.have(block, buffer, self._beginning.first)
            if view is not None and self._beginning.is_in(block, view):
                if block == 0 and not self.is_complete:
                    self._landing.put(0, view)  # its first bytes are withheld until the end
                digest = blake3(view).digest()
        finally:
            self._end(block, digest)

    def _root(self) -> str | None:
        if self._adopted:
            return None
        starts = range(0, len(self._digests), DIGEST_BYTES)
        if any(self._digests[at : at + DIGEST_BYTES] == _NOT_HERE for at in starts):
            return None
        return root_of(bytes(self._digests))

    def _digest(self, block: int) -> bytes:
        at = block * DIGEST_BYTES
        return bytes(self._digests[at : at + DIGEST_BYTES])

    def _set(self, block: int, digest: bytes) -> None:
        """Note what is here of a block; the lock is held."""
        at = block * DIGEST_BYTES
        was_here = self._digests[at : at + DIGEST_BYTES] != _NOT_HERE
        self._bytes += block_length(block, self.size) * ((digest != _NOT_HERE) - was_here)
        self._digests[at : at + DIGEST_BYTES] = digest
        self._adopted.discard(block)


def _corrupt(block: int) -> ChunkCorrupt:
    return ChunkCorrupt(f"block {block} does not match its digest", chunk=block)


def _other_header(block: int) -> LayoutError:
    return LayoutError(f"block {block} holds another header than was announced")
