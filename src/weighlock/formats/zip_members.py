"""Members of an archive as places to read from, stored or deflated, and their checksums.

Knows how a member is read in parts; which members there are is `zip_directory`'s, what is in them
its callers'.
"""

import zlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from weighlock.errors import FormatError
from weighlock.formats.heads import Heads
from weighlock.formats.torch_refs import StoragePlace
from weighlock.formats.zip_directory import DEFLATED, Member, data_span
from weighlock.sources.inflated import InflatedSource
from weighlock.tensors.arrays import byte_view, empty
from weighlock.tensors.spec import Span

if TYPE_CHECKING:
    from weighlock.sources.base import Source

__all__ = ["check_members", "member_place"]

_PIECE_BYTES = 4 * 1024 * 1024


def member_place(source: "Source", headers: Heads, member: Member) -> StoragePlace:
    """Where a member can be read; its local header has agreed with the directory."""
    span = data_span(headers, member, source.label)
    if member.method != DEFLATED:
        return StoragePlace(source, span)
    label = f"{source.label}: {member.name}"
    unpacked = InflatedSource(source, span.offset, span.length, member.size, label)
    return StoragePlace(unpacked, Span(0, member.size))


def check_members(
    source: "Source",
    members: Iterable[Member],
    progress: Callable[[int], None],
    *,
    compare: bool = True,
) -> None:
    """Read members, and compare them with their checksums.

    Args:
        source: the archive.
        members: of it.
        progress: called with bytes read.
        compare: whether there are checksums; members are read in any case.

    Raises:
        FormatError: one does not match.
    """
    headers = Heads(source)
    buffer = byte_view(empty((_PIECE_BYTES,), np.dtype(np.uint8)))
    for member in members:
        place = member_place(source, headers, member)
        crc = 0
        for offset in range(place.span.offset, place.span.end, _PIECE_BYTES):
            piece = buffer[: min(_PIECE_BYTES, place.span.end - offset)]
            place.source.read_into(offset, piece)
            crc = zlib.crc32(piece, crc)
            progress(len(piece))
        if compare and crc != member.crc:
            raise FormatError(
                f"member {member.name!r} has the checksum {crc:08x}, not {member.crc:08x}",
                source=source.label,
            )
