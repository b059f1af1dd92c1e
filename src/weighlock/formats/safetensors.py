"""The safetensors format: header to refs, and specs to header.

Accepts exactly what the format allows, and nothing two readers could read differently. Knows the
header; how a file is written without holding it is `writer`'s.
"""

import re
import reprlib
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from weighlock.errors import FormatError, HeaderError, LayoutError, TruncatedFile, UnsupportedDType
from weighlock.formats import strict_json
from weighlock.formats.grouping import read_groups
from weighlock.limits import Limits
from weighlock.tensors.catalog import Beside, Catalog
from weighlock.tensors.dtypes import DType
from weighlock.tensors.ref import TensorRef
from weighlock.tensors.spec import Span, TensorSpec, check_name
from weighlock.tensors.stored import StoredRef

if TYPE_CHECKING:
    from weighlock.sources.base import Source

__all__ = [
    "DATA_ALIGNMENT",
    "Arrangement",
    "arrange",
    "build_header",
    "check_metadata",
    "check_name_bytes",
    "check_storable",
    "is_alias",
    "open_safetensors",
]

DATA_ALIGNMENT = 64
"""The data section starts on a multiple of this, so that every tensor can be mapped as its type."""


_DTYPES = {dtype.value: dtype for dtype in DType if dtype.in_safetensors}


class _Entry(msgspec.Struct, frozen=True, gc=False):
    dtype: str = ""
    shape: tuple[int, ...] | None = None
    data_offsets: tuple[int, int] | None = None


class _Beside(msgspec.Struct, frozen=True):
    metadata: dict[str, str] | None = msgspec.field(default=None, name="__metadata__")


class _Header(NamedTuple):
    entries: dict[str, _Entry]
    metadata: dict[str, str]


def open_safetensors(source: "Source", limits: Limits | None = None) -> Catalog:
    """The catalog of a safetensors file. Reads the header only.

    Raises:
        FormatError: the bytes are not a valid safetensors file.
        LimitExceeded: it holds more tensors than the limits allow.
    """
    limits = limits or Limits()
    length = _header_length(source, limits)
    raw = bytearray(length)
    source.read_into(8, memoryview(raw))
    header = _parse(bytes(raw), source.label, limits)
    refs = _refs(source, header.entries, 8 + length, limits)
    aliases = {name: kept for name, kept in header.metadata.items() if is_alias(name, kept, refs)}
    limits.check("tensors", len(refs) + len(aliases), f"{source.label}: tensors and tied names")
    refs.update({name: refs[kept].renamed(name) for name, kept in aliases.items()})
    groups, notes = read_groups(header.metadata, refs, limits)
    beside = Beside(aliases, notes=notes, groups=groups, has_named_parts=True)
    return Catalog(refs, header.metadata, source.close, beside=beside)


def _header_length(source: "Source", limits: Limits) -> int:
    if source.size < 8:
        raise TruncatedFile(
            f"{source.size} bytes are too few for a safetensors file", source=source.label
        )
    first = bytearray(8)
    source.read_into(0, memoryview(first))
    length = int.from_bytes(first, "little")
    if length > limits.header_bytes:
        raise HeaderError(
            f"the header claims {length:,} bytes, at most {limits.header_bytes:,} are allowed",
            source=source.label,
            offset=0,
        )
    if length > source.size - 8:
        raise HeaderError(
            f"the header claims {length:,} bytes, the file has {source.size - 8:,} for it",
            source=source.label,
            offset=0,
        )
    if length < 2:
        raise HeaderError(f"a header of {length} bytes holds nothing", source=source.label)
    return length


# A list longer than 64 sizes can be; a negative number: msgspec reads -0 as 0, others refuse it.
# Apart, and the second only where there is a minus at all: together they take ten times as long.
_LONG_LIST = re.compile(rb"\[[^\[\]]{2000}")
_NEGATIVE = re.compile(rb"[\[,]\s*-")

_SPARE_TOKENS = 160_000
"""Objects, arrays and commas a header may always hold beside its tensors."""

_TOKEN_BYTES = 80
"""And one more for so many bytes of it: built, an entry of metadata takes 200."""

_entries_decoder = msgspec.json.Decoder(dict[str, _Entry])
_beside_decoder = msgspec.json.Decoder(_Beside)


def _parse(raw: bytes, source: str, limits: Limits) -> _Header:
    if not raw.startswith(b"{"):
        raise HeaderError(
            f"the header starts with {raw[:1]!r} instead of b'{{'", source=source, offset=8
        )
    # An escaped spelling of the key hides from this count; the token bound below still holds.
    count = raw.count(b'"data_offsets"')
    limits.check("tensors", count, f"{source}: tensors in the header")
    return _parse_plain(raw, count, limits) or _parse_strictly(raw, source, count, limits)


def _parse_plain(raw: bytes, count: int, limits: Limits) -> _Header | None:
    """The header, if it is as plain as nearly all are; None if the strict parser must decide.

    msgspec keeps the last of two equal keys. Counting rules them out: without backslashes every
    string takes two quotes, and n tensors with m metadata entries need exactly 5n + 2m + 1 strings.
    One more key anywhere, twice or unknown, and the count is off.
    """
    if b"\\" in raw or _LONG_LIST.search(raw) or (b"-" in raw and _NEGATIVE.search(raw)):
        return None
    # Counted before anything is built: `"a":{}` and `"a":""` are twenty times as large as objects.
    if raw.count(b"{") > count + 2 or raw.count(b'"') > 10 * count + 4 * _spare(len(raw)):
        return None
    try:
        entries = _entries_decoder.decode(raw)
        # Without backslashes the key can only be spelled like this.
        has_metadata = b'"__metadata__"' in raw
        metadata = _beside_decoder.decode(raw).metadata if has_metadata else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if (entries.pop("__metadata__", None) is None) != (metadata is None):
        return None
    complete = all(
        entry.dtype and entry.shape is not None and entry.data_offsets is not None
        for entry in entries.values()
    )
    strings = 5 * len(entries) + (0 if metadata is None else 1 + 2 * len(metadata))
    if not complete or raw.count(b'"') != 2 * strings or len(entries) > limits.tensors:
        return None
    return _Header(entries, metadata or {})


def _parse_strictly(raw: bytes, source: str, count: int, limits: Limits) -> _Header:
    """The header, key by key, or an error that says what is wrong with which tensor."""
    # What `count` tensors usually need, and some more for fields that readers must ignore. Not what
    # they could need: a text that only looks like many tensors would buy room for a bomb.
    tokens = 16 * count + _spare(len(raw))
    found = strict_json.parse(raw, source=source, tokens=tokens)
    metadata = found.pop("__metadata__", None)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise HeaderError("__metadata__ is not a mapping of text to text", source=source)
    limits.check("tensors", len(found), f"{source}: tensors in the header")
    return _Header({name: _entry(name, value, source) for name, value in found.items()}, metadata)


def _spare(nbytes: int) -> int:
    """Objects, arrays and commas that a header of so many bytes may hold beside its tensors."""
    return _SPARE_TOKENS + nbytes // _TOKEN_BYTES


def _entry(name: str, value: object, source: str) -> _Entry:
    if not isinstance(value, dict):
        raise HeaderError(
            f"tensor {name!r} is described by a {type(value).__name__}, not an object",
            source=source,
        )
    missing = [key for key in ("dtype", "shape", "data_offsets") if key not in value]
    if missing:
        raise HeaderError(f"tensor {name!r} has no {missing[0]}", source=source)
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str):
        raise HeaderError(f"tensor {name!r}: dtype {dtype!r} is not a text", source=source)
    for key, numbers in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(numbers, list) or not all(type(n) is int for n in numbers):
            raise LayoutError(
                f"tensor {name!r}: {key} {_short(numbers)} is not a list of integers", source=source
            )
    if len(offsets) != 2:
        raise LayoutError(
            f"tensor {name!r}: data_offsets has {len(offsets)} numbers instead of 2", source=source
        )
    return _Entry(dtype, tuple(shape), (offsets[0], offsets[1]))


def _short(value: object) -> str:
    # Bounded in depth, length and digits: a hostile value must not make a long message.
    text = reprlib.repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _refs(
    source: "Source", entries: dict[str, _Entry], data_start: int, limits: Limits
) -> dict[str, TensorRef]:
    """Refs in the header's order, after proving that they fill the data section exactly."""
    label = source.label
    data_bytes = source.size - data_start
    refs: dict[str, TensorRef] = {}
    reached, is_in_order = 0, True
    for name, entry in entries.items():
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise UnsupportedDType(
                f"tensor {name!r} has the unknown dtype {_short(entry.dtype)}", source=label
            )
        check_name_bytes(name, limits, f"{label}: ")
        shape = entry.shape or ()
        if len(shape) > limits.rank:
            limits.check("rank", len(shape), f"{label}: dimensions of tensor {_short(name)}")
        begin, end = entry.data_offsets or (0, 0)
        if not 0 <= begin <= end <= data_bytes:
            raise LayoutError(
                f"tensor {name!r} lies at {begin:,} to {end:,} of {data_bytes:,} bytes of data",
                source=label,
            )
        try:
            spec = TensorSpec(name, dtype, shape)
            refs[name] = StoredRef(spec, source, Span(data_start + begin, end - begin))
        except FormatError as error:
            raise type(error)(str(error), source=label) from error
        is_in_order = is_in_order and begin == reached
        reached = end
    if not is_in_order or reached != data_bytes:
        extents = [(*entry.data_offsets, name) for name, entry in entries.items()]  # type: ignore[misc]
        _check_tiling(extents, data_bytes, label)
    return refs


def _check_tiling(extents: list[tuple[int, int, str]], data_bytes: int, label: str) -> None:
    """Every byte of the data section belongs to exactly one tensor."""
    extents.sort()
    reached, previous = 0, None
    for begin, end, name in extents:
        if begin != reached:
            what = "overlaps" if begin < reached else "leaves a hole after"
            before = f" tensor {previous!r}, which ends at" if previous is not None else " byte"
            raise LayoutError(
                f"tensor {name!r} starts at {begin:,} and {what}{before} {reached:,}",
                source=label,
            )
        reached, previous = end, name
    if reached != data_bytes:
        raise LayoutError(
            f"the tensors end at byte {reached:,} of the data, the file has {data_bytes:,}",
            source=label,
        )


def is_alias(name: str, kept: str, names: Container[str]) -> bool:
    """Whether a metadata entry says that a removed name stood for a tensor that was kept."""
    if name == "format" or name in names or kept not in names:
        return False
    try:
        check_name(name)
    except LayoutError:
        return False
    return True


def check_name_bytes(name: str, limits: Limits, label: str = "") -> None:
    """Raise `LimitExceeded` if a name is longer than readers take it."""
    if 4 * len(name) > limits.name_bytes:  # no character takes more than four bytes
        size = len(name.encode("utf-8", "surrogatepass"))
        limits.check("name_bytes", size, f"{label}bytes of the name {_short(name)}")


def check_storable(spec: TensorSpec) -> None:
    """Raise `UnsupportedDType` if a safetensors file cannot hold the tensor."""
    if not spec.dtype.in_safetensors:
        raise UnsupportedDType(
            f"tensor {spec.name!r} is {spec.dtype}, for which safetensors has no type: "
            "leave it out, as `weighlock convert --skip-unsupported` does"
        )


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Where each tensor of a file lies, relative to the start of its data section."""

    offsets: Mapping[str, int]
    """In the order of the file."""
    data_bytes: int


def arrange(specs: Iterable[TensorSpec]) -> Arrangement:
    """Lay tensors end to end so that each starts on a multiple of its element size.

    Wider elements come first; among equals the given order stays, so that copying from a file that
    was arranged the same way reads and writes straight through.
    """
    offsets: dict[str, int] = {}
    position = 0
    for spec in sorted(specs, key=lambda spec: -spec.dtype.bits):
        if spec.name in offsets:
            raise LayoutError(f"tensor {spec.name!r} is named twice")
        check_storable(spec)
        offsets[spec.name] = position
        position += spec.nbytes
    return Arrangement(offsets, position)


def build_header(
    specs: Sequence[TensorSpec],
    offsets: Mapping[str, int],
    metadata: Mapping[str, str] | None = None,
    *,
    room: int | None = None,
    limits: Limits | None = None,
) -> bytes:
    """The bytes before the data section: length, JSON, padding.

    Args:
        specs: in the order readers shall list them.
        offsets: where each tensor begins in the data section.
        metadata: text beside the tensors.
        room: pad to exactly this many bytes; otherwise to a multiple of 64.
        limits: bounds the header's length.

    Raises:
        LayoutError: the header does not fit the room, or the format's bound.
        LimitExceeded: a name is longer than readers take it.
    """
    limits = limits or Limits()
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for spec in specs:
        check_name_bytes(spec.name, limits)
        begin = offsets[spec.name]
        header[spec.name] = {
            "dtype": spec.dtype.value,
            "shape": spec.shape,
            "data_offsets": (begin, begin + spec.nbytes),
        }
    text = msgspec.json.encode(header)
    total = room if room is not None else -(-(8 + len(text)) // DATA_ALIGNMENT) * DATA_ALIGNMENT
    if 8 + len(text) > total or total - 8 > limits.header_bytes:
        allowed = min(total - 8, limits.header_bytes)
        raise LayoutError(
            f"the header of {len(specs):,} tensors takes {len(text):,} bytes, "
            f"{allowed:,} are allowed"
        )
    return (total - 8).to_bytes(8, "little") + text.ljust(total - 8, b" ")


def check_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    """Metadata as a plain dict, or an error that names the entry that is not text."""
    checked = dict(metadata or {})
    for key, value in checked.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise HeaderError(
                f"metadata {key!r} is {value!r}: safetensors holds text only, pass str or JSON"
            )
        try:
            key.encode()
            value.encode()
        except UnicodeEncodeError as error:
            raise HeaderError(f"metadata {key!r} holds a lone surrogate") from error
    most = _spare(sum(len(key) + len(value) for key, value in checked.items())) - 8
    if len(checked) > most:
        raise HeaderError(
            f"metadata of {len(checked):,} entries, tied names among them: of texts as short as "
            f"these, a header may hold {most:,}"
        )
    return checked
