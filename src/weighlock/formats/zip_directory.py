"""The members of a ZIP archive and where their bytes lie, from its central directory.

Stricter than zipfile: whatever two readers could see differently is refused (members twice, also
when only case differs, local headers that contradict the directory, overlaps, encryption). Knows
ZIP; not what is in it.
"""

import codecs
import struct
import zlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from weighlock.errors import FormatError, HeaderError, LayoutError, TruncatedFile
from weighlock.formats.heads import Heads
from weighlock.limits import Limits
from weighlock.sources.window import Window
from weighlock.tensors.spec import Span

if TYPE_CHECKING:
    from weighlock.sources.base import Source

__all__ = [
    "DEFLATED",
    "Member",
    "archives_in",
    "check_case",
    "data_span",
    "head_spans",
    "inflated",
    "read_directory",
]

codecs.lookup("cp437")  # imported now, not when a name asks for it

_END = struct.Struct("<4sHHHHIIH")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR = struct.Struct("<4sIQI")
_ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")
_LOCAL = struct.Struct("<4sHHHHHIIIHH")

_ENCRYPTED = 0x1 | 0x20 | 0x40 | 0x2000  # also patched data and a masked directory
_UTF8 = 0x800
_DESCRIPTOR = 0x8
_FULL = 0xFFFF_FFFF
STORED, DEFLATED = 0, 8


class Member(NamedTuple):
    """A member as the central directory describes it."""

    name: str
    flags: int
    method: int
    crc: int
    stored_bytes: int
    size: int
    header: int
    """Where its local header begins."""
    limit: int
    """Where the next member, or the directory, begins."""


def read_directory(
    source: "Source", limits: Limits, *, fold_case: bool = True
) -> dict[str, Member]:
    """The members of an archive by name, in the order of the file.

    Args:
        source: the archive.
        limits: what it may ask for.
        fold_case: refuse names that differ only in case, as a reader that ignores case finds one.

    Raises:
        FormatError: the archive is broken or could be read in two ways.
        LimitExceeded: it has more members than the limits allow.
    """
    count, span, tail = _locate(source)
    limits.check("tensors", count, f"{source.label}: members of the archive")
    if span.length > limits.header_bytes:
        raise HeaderError(f"the directory has {span.length:,} bytes", source=source.label)
    first = span.offset - (source.size - len(tail))
    if first >= 0:
        raw = tail[first : first + span.length]
    else:
        raw = bytearray(span.length)
        source.read_into(span.offset, memoryview(raw))
    entries = _entries(bytes(raw), count, source.label)
    found = _checked(entries, span.offset, source.label)
    if fold_case:
        check_case(found, source.label)
    return found


def check_case(names: Iterable[str], label: str) -> None:
    """Raise `LayoutError` if two names differ only in case."""
    folded: set[str] = set()
    for name in names:
        alike = name.casefold()
        if alike in folded:
            raise LayoutError(f"member {name!r} is there twice", source=label)
        folded.add(alike)


def _locate(source: "Source") -> tuple[int, Span, bytearray]:
    """Number of members and place of the central directory, from the end of the file; and that."""
    tail_bytes = min(source.size, 65_535 + _END.size + _LOCATOR.size + _END64.size)
    tail = bytearray(tail_bytes)
    start = source.size - tail_bytes
    source.read_into(start, memoryview(tail))
    ends = []
    followed = 0
    at = tail.find(b"PK\5\6")
    while at >= 0:
        if at + _END.size <= len(tail):
            _, _, _, _, _, size, offset, comment = _END.unpack_from(tail, at)
            left = len(tail) - (at + _END.size + comment)
            if not left:
                ends.append(at)
            elif left > 0 and (offset + size == start + at or _has_locator(tail, at)):
                followed = left
        at = tail.find(b"PK\5\6", at + 1)
    if not ends and followed:
        raise LayoutError(
            f"{followed:,} bytes follow the end of the archive: another reader could find another "
            "archive in them; cut them off if they are none of it",
            source=source.label,
        )
    if not ends:
        raise TruncatedFile(
            "the archive has no end record: was a download cut off?", source=source.label
        )
    if len(ends) > 1:
        raise FormatError("the archive has two end records", source=source.label)
    at = ends[0]
    _, disk, directory_disk, here, count, size, offset, _ = _END.unpack_from(tail, at)
    stop = start + at
    if _has_locator(tail, at):
        count, size, offset, stop = _zip64(source, tail, start, at, (count, size, offset))
    elif disk or directory_disk or here != count:
        raise FormatError("the archive is spread over several files", source=source.label)
    if offset + size != stop:
        raise LayoutError(
            f"the directory is said to end at {offset + size:,}, its end record is at {stop:,}",
            source=source.label,
        )
    return count, Span(offset, size), tail


def _has_locator(tail: bytearray, at: int) -> bool:
    """Whether the end record there is only the short form of one with 64 bits."""
    return at >= _LOCATOR.size and tail[at - _LOCATOR.size : at - 16] == b"PK\6\7"


def archives_in(source: "Source", limits: Limits) -> list[Window]:
    """The archives of a row of them, one after another; the source itself, if it is only one.

    Raises:
        FormatError: something else than archives is there.
    """
    found: list[Window] = []
    stop = source.size
    while stop:
        begin = _beginning(Window(source, 0, stop, source.label))
        found.append(Window(source, begin, stop - begin, source.label))
        limits.check("tensors", len(found), f"{source.label}: archives in a row")
        stop = begin
    return found[::-1]


def _beginning(source: "Source") -> int:
    """Where the archive begins whose end is the source's: its end record tells its length."""
    tail = bytearray(min(source.size, _LOCATOR.size + _END.size))
    source.read_into(source.size - len(tail), memoryview(tail))
    at = len(tail) - _END.size
    if at < 0 or tail[at : at + 4] != b"PK\5\6" or tail[-2:] != b"\0\0":
        return 0  # with a comment, or no archive at all: reading it tells
    _, _, _, _, _, size, offset, _ = _END.unpack_from(tail, at)
    length = offset + size + _END.size
    if tail[:4] == b"PK\6\7" and at == _LOCATOR.size:
        length = _LOCATOR.unpack_from(tail)[2] + _END64.size + len(tail)
    return source.size - length if length < source.size else 0


def _zip64(
    source: "Source", tail: bytearray, start: int, at: int, plain: tuple[int, int, int]
) -> tuple[int, int, int, int]:
    _, _, place, disks = _LOCATOR.unpack_from(tail, at - _LOCATOR.size)
    where = place - start
    if disks > 1 or place + _END64.size + _LOCATOR.size != start + at or where < 0:
        raise LayoutError(
            f"the archive's 64-bit end record is said to be at {place:,}", source=source.label
        )
    found = _END64.unpack_from(tail, where)
    if found[0] != b"PK\6\6" or found[4] or found[5] or found[6] != found[7]:
        raise FormatError("the archive's 64-bit end record is broken", source=source.label)
    wide = found[7], found[8], found[9]
    for narrow, value, full in zip(plain, wide, (0xFFFF, _FULL, _FULL), strict=True):
        if narrow not in (value, full):
            raise LayoutError(
                f"the archive's end records disagree: {narrow:,} and {value:,}", source=source.label
            )
    return *wide, place


_Entry: TypeAlias = tuple[int, str, int, int, int, int, int]
"""Place of the local header, name, flags, method, checksum, stored bytes, bytes."""


def _entries(raw: bytes, count: int, label: str) -> list[_Entry]:
    """What the directory says, in its own order."""
    entries: list[_Entry] = []
    at = 0
    for number in range(count):
        if at + _ENTRY.size > len(raw):
            raise LayoutError(
                f"the directory ends after {number:,} of {count:,} members", source=label
            )
        fields = _ENTRY.unpack_from(raw, at)
        signature, _, _, flags, method, _, _, crc, stored, size, n, e, c, disk, _, _, header = (
            fields
        )
        if signature != b"PK\1\2" or at + _ENTRY.size + n + e + c > len(raw):
            raise LayoutError(f"member {number:,} of the directory is broken", source=label)
        at += _ENTRY.size
        name = _name(raw[at : at + n], flags, label)
        if _FULL in (size, stored, header):
            wide = _wide(raw[at + n : at + n + e], (size, stored, header), name, label)
            size, stored, header = wide
        at += n + e + c
        if flags & _ENCRYPTED:
            raise FormatError(f"member {name!r} is encrypted", source=label)
        if method not in (STORED, DEFLATED) or disk not in (0, 0xFFFF):
            raise FormatError(f"member {name!r} is packed by method {method}", source=label)
        if method == STORED and size != stored:
            raise LayoutError(
                f"member {name!r} has {size:,} bytes and stores {stored:,}", source=label
            )
        entries.append((header, name, flags, method, crc, stored, size))
    if at != len(raw):
        raise LayoutError(
            f"the directory has {len(raw) - at:,} bytes after its members", source=label
        )
    return entries


def _name(raw: bytes, flags: int, label: str) -> str:
    try:
        name = raw.decode("utf-8" if flags & _UTF8 else "ascii")
    except UnicodeDecodeError:
        name = raw.decode("cp437")
    if not name or "\0" in name:
        raise FormatError(f"a member is named {name!r}", source=label)
    return name


def _wide(
    extra: bytes, narrow: tuple[int, int, int], name: str, label: str
) -> tuple[int, int, int]:
    """Sizes and offset, those that are full taken from the 64-bit extra field."""
    values = list(narrow)
    wanted = [index for index, value in enumerate(narrow) if value == _FULL]
    at = 0
    while wanted and at + 4 <= len(extra):
        tag, length = struct.unpack_from("<HH", extra, at)
        if tag == 1 and at + 4 + length <= len(extra) and length >= 8 * len(wanted):
            for place, index in enumerate(wanted):
                values[index] = int.from_bytes(extra[at + 4 + 8 * place :][:8], "little")
            return values[0], values[1], values[2]
        at += 4 + length
    if wanted:
        raise LayoutError(
            f"member {name!r} is larger than 4 GiB and does not say how large", source=label
        )
    return narrow


def _checked(entries: list[_Entry], directory: int, label: str) -> dict[str, Member]:
    """Members with the place where each must have ended; none twice, none over another."""
    entries.sort()
    if entries and entries[0][0]:
        raise LayoutError(f"{entries[0][0]:,} bytes come before the first member", source=label)
    limits = [entry[0] for entry in entries[1:]] + [directory]
    found: dict[str, Member] = {}
    for entry, limit in zip(entries, limits, strict=False):
        header, name, flags, method, crc, stored, size = entry
        if header + _LOCAL.size + stored > limit:
            raise LayoutError(
                f"member {name!r} at {header:,} with {stored:,} bytes "
                f"reaches over what begins at {limit:,}",
                source=label,
            )
        if name in found:
            raise LayoutError(f"member {name!r} is there twice", source=label)
        found[name] = Member(name, flags, method, crc, stored, size, header, limit)
    return found


def head_spans(members: Iterable[Member]) -> Iterator[Span]:
    """Where the heads of members lie."""
    for member in members:
        yield Span(member.header, _head_bytes(member, member.name.encode()))


def _head_bytes(member: Member, encoded: bytes) -> int:
    """As much of a member as its head and what pads it may take, and mostly no more."""
    return min(member.limit - member.header, _LOCAL.size + 2 * len(encoded) + 256)


def data_span(headers: Heads, member: Member, label: str) -> Span:
    """Where a member's bytes lie, after its local header has agreed with the directory."""
    encoded = member.name.encode()
    raw = headers.read(member.header, _head_bytes(member, encoded))
    signature, _, flags, method, _, _, crc, stored, size, n, e = _LOCAL.unpack_from(raw)
    name = raw[_LOCAL.size : _LOCAL.size + n]
    is_same = name == encoded and name.isascii()
    if signature != b"PK\3\4" or not (is_same or _name(name or b"\0", flags, label) == member.name):
        raise LayoutError(
            f"member {member.name!r} has another name at {member.header:,}", source=label
        )
    if method != member.method or (flags ^ member.flags) & (_ENCRYPTED | _DESCRIPTOR):
        raise LayoutError(
            f"member {member.name!r} is packed in another way than it says", source=label
        )
    exact = stored == member.stored_bytes and size == member.size and crc == member.crc
    if not exact and (not flags & _DESCRIPTOR or size or stored or crc):
        expected = (member.stored_bytes, member.size, member.crc)
        for told, known in zip((stored, size, crc), expected, strict=True):
            if told not in (known, _FULL) and not (flags & _DESCRIPTOR and told == 0):
                raise LayoutError(
                    f"member {member.name!r} says {told:,} where the directory says {known:,}",
                    source=label,
                )
    start = member.header + _LOCAL.size + n + e
    if start + member.stored_bytes > member.limit:
        raise LayoutError(
            f"member {member.name!r} reaches to {start + member.stored_bytes:,}, "
            f"what follows begins at {member.limit:,}",
            source=label,
        )
    return Span(start, member.stored_bytes)


_MOST_PACKED, _PACKED_BYTES = 2, 64 * 1024
"""Deflate makes nothing longer but by a few bytes for each piece: more is none of it."""


def _stored(source: "Source", member: Member) -> bytes:
    """The bytes of a member as they lie there, read together with its head."""
    head_bytes = _head_bytes(member, member.name.encode())
    together = min(member.limit - member.header, head_bytes + member.stored_bytes)
    headers = Heads(source)
    headers.read(member.header, together)
    span = data_span(headers, member, source.label)
    return headers.read(span.offset, span.length)


def inflated(source: "Source", member: Member, most_bytes: int, *, check_crc: bool = True) -> bytes:
    """A whole member, unpacked if need be, with its checksum checked."""
    if member.size > most_bytes:
        raise HeaderError(
            f"member {member.name!r} has {member.size:,} bytes, {most_bytes:,} are allowed",
            source=source.label,
        )
    if member.stored_bytes > _MOST_PACKED * member.size + _PACKED_BYTES:
        raise LayoutError(
            f"member {member.name!r} packs {member.size:,} bytes into {member.stored_bytes:,}",
            source=source.label,
        )
    data = _stored(source, member)
    if member.method == DEFLATED:
        unpacker = zlib.decompressobj(-15)
        try:
            data = unpacker.decompress(data, member.size + 1)
        except zlib.error as error:
            raise FormatError(
                f"member {member.name!r} cannot be unpacked", source=source.label
            ) from error
        if len(data) != member.size or not unpacker.eof:
            raise LayoutError(
                f"member {member.name!r} unpacks to another length than {member.size:,}",
                source=source.label,
            )
    if check_crc and zlib.crc32(data) != member.crc:
        raise FormatError(
            f"member {member.name!r} does not match its checksum", source=source.label
        )
    return data
