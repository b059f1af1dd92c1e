"""The fixed grid over a virtual file: blocks that have a digest, ranges that are asked for. Pure.

Both grains start at byte 0 of the file, so that all receivers ask for the same ranges: a cache in
front of the owner sees equal keys, and a block is named by its number alone.
"""

from collections.abc import Iterable, Iterator

from weighlock.tensors.spec import Span

__all__ = [
    "BLOCKS_PER_PAGE",
    "BLOCKS_PER_RANGE",
    "BLOCK_BYTES",
    "DIGEST_BYTES",
    "RANGE_BYTES",
    "block_count",
    "block_length",
    "block_span",
    "blocks_of",
    "page_blocks",
    "page_of",
    "pages_of",
    "runs",
    "stretches",
]

BLOCK_BYTES = 1024 * 1024
"""Bytes under one digest."""

RANGE_BYTES = 8 * BLOCK_BYTES
"""Bytes of the ranges that are asked for, each of them or several by one request."""

BLOCKS_PER_PAGE = 1024
"""Digests given in one reply."""

DIGEST_BYTES = 32

BLOCKS_PER_RANGE = RANGE_BYTES // BLOCK_BYTES


def block_count(size: int) -> int:
    """Blocks of a file of so many bytes."""
    return -(-size // BLOCK_BYTES)


def block_length(block: int, size: int) -> int:
    """How many bytes a block has; the last one of a file may be short."""
    return min(BLOCK_BYTES, size - block * BLOCK_BYTES)


def block_span(block: int, size: int) -> Span:
    """The bytes of a block."""
    return Span(block * BLOCK_BYTES, block_length(block, size))


def blocks_of(span: Span) -> range:
    """The blocks that cover a span."""
    if not span.length:
        return range(0)
    return range(span.offset // BLOCK_BYTES, (span.end - 1) // BLOCK_BYTES + 1)


def page_of(block: int) -> int:
    """The page that holds the digest of a block."""
    return block // BLOCKS_PER_PAGE


def pages_of(blocks: range) -> range:
    """The pages that hold the digests of neighbouring blocks."""
    return range(page_of(blocks[0]), page_of(blocks[-1]) + 1) if blocks else range(0)


def page_blocks(page: int, size: int) -> range:
    """The blocks whose digests are on a page."""
    first = page * BLOCKS_PER_PAGE
    return range(first, max(first, min(first + BLOCKS_PER_PAGE, block_count(size))))


def stretches(blocks: Iterable[int]) -> Iterator[range]:
    """Neighbouring blocks together, in order."""
    first = last = None
    for block in blocks:
        if first is None or last is None:
            first = block
        elif block != last + 1:
            yield range(first, last + 1)
            first = block
        last = block
    if first is not None and last is not None:
        yield range(first, last + 1)


def runs(blocks: Iterable[int]) -> Iterator[range]:
    """Neighbouring blocks of one range together, in order."""
    for stretch in stretches(blocks):
        start = stretch.start
        while start < stretch.stop:
            end = start - start % BLOCKS_PER_RANGE + BLOCKS_PER_RANGE
            yield range(start, min(end, stretch.stop))
            start = end
