"""The members of a tar archive and where their bytes lie, header by header.

Stricter than tarfile: a header that two readers could see differently is refused (other magic,
wrong checksum, names and sizes given twice, global and vendor extensions). Knows tar; not what is
in it.
"""

import tarfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from weighlock.errors import FormatError, LayoutError, TruncatedFile
from weighlock.tensors.spec import Span

if TYPE_CHECKING:
    from weighlock.formats.heads import Heads
    from weighlock.sources.base import Source

__all__ = ["TarMember", "is_tar", "is_tar_for_python", "tar_members"]

_BLOCK = 512
_REGULAR = (b"0", b"\0")
_EXTENDED = b"x"
_MOST_EXTENDED_BYTES = 16 * 1024
_MOST_MEMBERS = 100_000

# What Python puts into extended headers of ordinary files; all but the size is for unpacking.
_EXTENSIONS = {"mtime", "atime", "ctime", "uid", "gid", "uname", "gname", "comment", "size"}


class TarMember(NamedTuple):
    """A member as its header describes it."""

    name: str
    kind: bytes
    """Its type flag."""
    span: Span

    @property
    def is_file(self) -> bool:
        """Whether it is a plain file: no link, directory, device or sparse file."""
        return self.kind in _REGULAR


def is_tar(first: bytes) -> bool:
    """Whether a file that begins so is a tar archive of the kind that is read."""
    is_whole = len(first) >= _BLOCK and first[257:262] == b"ustar"
    return is_whole and _checksum(first) == _told(first)


def is_tar_for_python(first: bytes) -> bool:
    """Whether Python takes a file that begins so for a tar archive, of whatever vintage.

    It takes more than is read here: checksums with signs, in binary, with underscores.
    """
    if len(first) < _BLOCK or not any(first[:_BLOCK]):
        return False
    try:
        tarfile.TarInfo.frombuf(first[:_BLOCK], "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError):
        return False
    return True


def tar_members(source: "Source", window: "Heads") -> Iterator[TarMember]:
    """The members in order, each as its header is reached.

    Raises:
        FormatError: a header is broken, or could be read in two ways.
    """
    at = 0
    sizes: dict[str, int] = {}
    names: set[str] = set()
    for _ in range(_MOST_MEMBERS):
        if at == source.size:
            return
        if at + _BLOCK > source.size:
            raise TruncatedFile(
                f"a header at byte {at:,} is cut off: was a download?", source=source.label
            )
        raw = window.read(at, _BLOCK)
        if not any(raw):
            return
        name, kind, size = _header(raw, at, source.label)
        size = sizes.pop("size", size)
        span = Span(at + _BLOCK, size)
        at = span.offset + -(-size // _BLOCK) * _BLOCK
        if at > source.size:
            raise TruncatedFile(
                f"member {name!r} ends at byte {at:,}, the file has {source.size:,}",
                source=source.label,
            )
        if kind == _EXTENDED:
            if size > _MOST_EXTENDED_BYTES:
                raise LayoutError(f"an extended header has {size:,} bytes", source=source.label)
            sizes = _extensions(window.read(span.offset, size), source.label)
            continue
        if name in names:
            raise LayoutError(f"member {name!r} is there twice", source=source.label)
        names.add(name)
        yield TarMember(name, kind, span)
    raise LayoutError(f"has more than {_MOST_MEMBERS:,} members", source=source.label)


def _checksum(raw: bytes) -> int:
    """The sum of a header's bytes, with spaces where the sum itself stands."""
    return sum(raw[:148]) + 8 * 0x20 + sum(raw[156:_BLOCK])


def _told(raw: bytes) -> int:
    return _octal(raw[148:156])


def _octal(field: bytes) -> int:
    """A number in octal digits, ended by NUL or space; -1 if it is none."""
    digits = field.strip(b" \0")
    return int(digits, 8) if digits and not digits.translate(None, b"01234567") else -1


def _header(raw: bytes, at: int, label: str) -> tuple[str, bytes, int]:
    """Name, type and size of a member."""
    if raw[257:262] != b"ustar" or _checksum(raw) != _told(raw):
        raise FormatError(f"there is no tar header at byte {at:,}", source=label, offset=at)
    name = raw[:100].partition(b"\0")[0].decode("utf-8", "backslashreplace")
    prefix = raw[345:500].partition(b"\0")[0].decode("utf-8", "backslashreplace")
    name = f"{prefix}/{name}" if prefix and raw[257:263] == b"ustar\0" else name
    kind = raw[156:157]
    name = name.rstrip("/") if kind != b"0" else name  # directories may be written with one
    if kind in b"gLKSX":
        raise FormatError(
            f"member {name!r} is of type {kind.decode()!r}: a global, vendor's or sparse header",
            source=label,
            offset=at,
        )
    field = raw[124:136]
    # More than eight gigabytes: binary, with the highest bit set.
    size = int.from_bytes(field[1:], "big") if field[0] == 0x80 else _octal(field)
    if not 0 <= size < 2**60:
        raise LayoutError(f"member {name!r} has no size that could be read", source=label)
    return name, kind, size


def _extensions(raw: bytes, label: str) -> dict[str, int]:
    """The next member's size, if lines of `length key=value` give it."""
    found: dict[str, int] = {}
    seen: set[str] = set()
    at = 0
    while at < len(raw):
        digits = raw[at : at + 8].partition(b" ")[0]
        length = int(digits) if digits.isdigit() else 0
        line = raw[at : at + length]
        key, equals, value = line[len(digits) + 1 : -1].partition(b"=")
        if len(line) != length or line[-1:] != b"\n" or not equals:
            raise LayoutError("an extended header is broken", source=label)
        name = key.decode("utf-8", "backslashreplace")
        if name not in _EXTENSIONS or name in seen:
            raise FormatError(f"an extended header sets {name!r}", source=label)
        seen.add(name)
        if name == "size":
            if not value.isdigit() or len(value) > 18:
                raise LayoutError("an extended header gives a size that is none", source=label)
            found["size"] = int(value)
        at += length
    return found
