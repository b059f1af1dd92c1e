"""A numpy array in a file of its own: a short header, then the numbers.

The header is the text of a Python dict. It is read by a grammar that knows its three keys and
nothing else; nothing is evaluated. Knows the header and element types; where the file lies, alone
or in an archive, is the caller's business.
"""

import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from weighlock.errors import FormatError, HeaderError, LayoutError, TruncatedFile, UnsupportedDType
from weighlock.limits import Limits
from weighlock.tensors.adjusted import AdjustedRef
from weighlock.tensors.catalog import Beside, Catalog
from weighlock.tensors.dtypes import DType
from weighlock.tensors.spec import Layout, Span, TensorSpec
from weighlock.tensors.stored import Readable, StoredRef

if TYPE_CHECKING:
    from weighlock.sources.base import Source
    from weighlock.tensors.ref import TensorRef

__all__ = ["MAGIC", "NpyHeader", "array_ref", "open_npy", "read_header", "trailing"]

MAGIC = b"\x93NUMPY"
_MOST_HEADER_BYTES = 64 * 1024
_PREFIX_BYTES = 12
"""Magic, version and length: two bytes in version 1, four since."""
_USUAL_BYTES = 128
_MOST_DEPTH = 32
"""Of structures in structures."""
_NAME = "tensor"
"""What the only tensor of a file is called that gives it no name, as in other formats."""

_DTYPES = {
    "b1": DType.BOOL,
    "u1": DType.U8,
    "i1": DType.I8,
    "u2": DType.U16,
    "i2": DType.I16,
    "f2": DType.F16,
    "u4": DType.U32,
    "i4": DType.I32,
    "f4": DType.F32,
    "u8": DType.U64,
    "i8": DType.I64,
    "f8": DType.F64,
    "c8": DType.C64,
    "c16": DType.C128,
}

_KINDS = {
    "O": "Python objects in a pickle, which is not read; `weighlock scan` shows what it imports",
    "U": "texts",
    "S": "bytes",
    "M": "points in time",
    "m": "spans of time",
    "V": "raw bytes of an element type that numpy does not name",
}


class NpyHeader(NamedTuple):
    """What the header of an array says."""

    descr: str
    """Numpy's code of the element type; empty if it is a structure of several."""
    item_bytes: int | None
    """What an element takes; None if there are Python objects in it, or nobody knows what."""
    fortran: bool
    shape: tuple[int, ...]
    end: int
    """Where the data begins."""


def open_npy(source: "Source", limits: Limits | None = None) -> Catalog:
    """The catalog of a file that holds one array. Reads the header only.

    Raises:
        FormatError: the header is broken, or the array is of a kind that is not read.
    """
    limits = limits or Limits()
    header = read_header(source.read_into, source.size, source.label)
    limits.check("rank", len(header.shape), f"{source.label}: dimensions of the array")
    try:
        ref = array_ref(_NAME, header, source, Span(0, source.size))
    except FormatError as error:
        raise type(error)(str(error), source=source.label) from error
    beside = Beside(notes=trailing(header, ref, source.size))
    return Catalog({_NAME: ref}, None, source.close, beside=beside)


def trailing(header: NpyHeader, ref: "TensorRef", size: int) -> tuple[str, ...]:
    """A note on what follows the array in a file of that size, if anything does."""
    left = size - header.end - ref.nbytes
    return (f"{left:,} bytes follow: only the first array is read",) if left else ()


def array_ref(name: str, header: NpyHeader, source: Readable, file: Span) -> "TensorRef":
    """A ref to the array of a file that lies there.

    Raises:
        UnsupportedDType: its elements are not numbers that a tensor can hold.
        LayoutError: it reaches beyond the file.
    """
    found = re.fullmatch(r"([<>|=]?)([A-Za-z])(\d{1,9})?(\[.{1,16}\])?", header.descr)
    code = f"{found[2]}{found[3] or ''}" if found else ""
    if code not in _DTYPES:
        kind = _KINDS.get(code[:1], f"of the type {header.descr!r}, which is not read")
        kind = kind if header.descr else "structures of several numbers"
        raise UnsupportedDType(f"its elements are {kind}")
    dtype = _DTYPES[code]
    spec = TensorSpec(name, dtype, header.shape)
    room = file.length - header.end
    if spec.nbytes > room:
        raise TruncatedFile(
            f"array {name!r}, {dtype} {list(spec.shape)}, takes {spec.nbytes:,} bytes, "
            f"{max(room, 0):,} are there"
        )
    layout = _fortran(spec.shape) if header.fortran else None
    if layout is not None and layout.is_contiguous:
        layout = None
    ref: TensorRef = StoredRef(spec, source, Span(file.offset + header.end, spec.nbytes), layout)
    is_swapped = found is not None and found[1] == ">" and dtype.bits > 8
    return AdjustedRef(ref, swap=True) if is_swapped else ref


def _fortran(shape: tuple[int, ...]) -> Layout:
    """Column-major: the first index is the fastest."""
    strides = []
    step = 1
    for size in shape:
        strides.append(step)
        step *= max(size, 1)
    return Layout(0, shape, tuple(strides))


def read_header(read_into: Callable[[int, memoryview], None], size: int, label: str) -> NpyHeader:
    """The header of a file of that size.

    Args:
        read_into: fills a buffer from an offset of the file.
        size: bytes of the file.
        label: what to call it in errors.
    """
    raw = bytearray(min(size, _USUAL_BYTES))
    read_into(0, memoryview(raw))
    if raw[: len(MAGIC)] != MAGIC or len(raw) < _PREFIX_BYTES:
        raise HeaderError("does not begin as numpy's arrays do", source=label)
    major = raw[6]
    if major not in (1, 2, 3) or raw[7]:
        raise HeaderError(
            f"is an array file of version {major}.{raw[7]}; versions 1.0 to 3.0 are read",
            source=label,
        )
    start = 10 if major == 1 else 12
    length = int.from_bytes(raw[8:start], "little")
    if length > _MOST_HEADER_BYTES:
        raise HeaderError(
            f"numpy's header claims {length:,} bytes, {_MOST_HEADER_BYTES:,} are allowed",
            source=label,
            offset=8,
        )
    end = start + length
    if end > size:
        raise TruncatedFile(
            f"numpy's header ends at byte {end:,}, the file has {size:,}", source=label
        )
    if end > len(raw):
        have = len(raw)
        raw += bytes(end - have)
        read_into(have, memoryview(raw)[have:])
    try:
        text = raw[start:end].decode("utf-8" if major == 3 else "latin-1")
        return _parsed(text, end)
    except UnicodeDecodeError as error:
        raise HeaderError("numpy's header is not UTF-8", source=label) from error
    except FormatError as error:
        raise type(error)(str(error), source=label, offset=start) from error


# Names of fields and element types may be anything without backslashes in it.
_WORD = re.compile(
    r"""[ \t\n]*(?:(?P<text>'[^'\\\n]*'|"[^"\\\n]*")|(?P<number>[0-9]{1,19})L?\b"""
    r"""|(?P<truth>True|False)\b|(?P<sign>[{}()\[\],:]))"""
)


def _parsed(text: str, end: int) -> NpyHeader:
    words = _words(text)
    try:
        values = _dict(words)
    except IndexError as error:
        raise HeaderError("numpy's header ends too early") from error
    if words != [_END]:
        raise HeaderError("numpy's header goes on after its dict")
    missing = [name for name in _VALUES if name not in values]
    if missing:
        raise HeaderError(f"numpy's header has no {missing[0]!r}")
    descr, item_bytes = values["descr"]
    return NpyHeader(descr, item_bytes, values["fortran_order"], values["shape"], end)


_END = ""


def _words(text: str) -> list[str]:
    """The words of a header, the last one first: what comes next is taken from the end."""
    found: list[str] = []
    at = 0
    text = text.rstrip(" \t\n")
    while at < len(text):
        match = _WORD.match(text, at)
        if match is None:
            raise HeaderError(f"numpy's header has no meaning from {text[at : at + 20]!r} on")
        found.append(match["number"] or match[0].strip())
        at = match.end()
    return [_END, *reversed(found)]


def _dict(words: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    _expect(words, "{")
    while (key := words.pop()) != "}":
        name = key[1:-1]
        if not key.startswith(("'", '"')) or name not in _VALUES:
            raise HeaderError(f"numpy's header has the key {key[:40]!r}, which is not known")
        if name in values:
            raise HeaderError(f"numpy's header has the key {name!r} twice")
        _expect(words, ":")
        values[name] = _VALUES[name](words)
        if words[-1] != "}":
            _expect(words, ",")
    return values


def _expect(words: list[str], wanted: str) -> None:
    word = words.pop()
    if word != wanted:
        raise HeaderError(f"numpy's header has {word[:40]!r} where {wanted!r} should stand")


def _descr(words: list[str]) -> tuple[str, int | None]:
    """The code of an element type, and what an element takes."""
    word = words.pop()
    if word.startswith(("'", '"')) and len(word) > 2:
        return word[1:-1], _item_bytes(word[1:-1])
    if word != "[":
        raise HeaderError(f"numpy's header's element type is {word[:40]!r}")
    item_bytes = _structure(words)
    return "O" if item_bytes is None else "", item_bytes


def _item_bytes(code: str) -> int | None:
    found = re.fullmatch(
        r"[<>|=]?(?:([biufcSV])(\d{1,9})|U(\d{1,9})|[mM]8(?:\[[^\]]{1,16}\])?)", code
    )
    if found is None:
        return None
    return int(found[2]) if found[1] else 4 * int(found[3]) if found[3] else 8


def _structure(words: list[str], depth: int = 1) -> int | None:
    """What a structure takes. Its fields are (name, type) or (name, type, shape)."""
    if depth > _MOST_DEPTH:
        raise HeaderError("numpy's header's element type is nested too deep")
    total: int | None = 0
    while words[-1] != "]":
        _expect(words, "(")
        if words.pop() == "(":  # a title stands before the name
            words.pop()
            _expect(words, ",")
            words.pop()
            _expect(words, ")")
        _expect(words, ",")
        word = words.pop()
        size = _structure(words, depth + 1) if word == "[" else _item_bytes(word[1:-1])
        if words[-1] == ",":
            words.pop()
            count = math.prod(_shape(words))
            size = None if size is None else size * count
        _expect(words, ")")
        if words[-1] == ",":
            words.pop()
        total = None if total is None or size is None else total + size
    words.pop()
    return total


def _truth(words: list[str]) -> bool:
    word = words.pop()
    if word not in ("True", "False"):
        raise HeaderError(f"numpy's header's order is {word[:40]!r}, neither True nor False")
    return word == "True"


def _shape(words: list[str]) -> tuple[int, ...]:
    _expect(words, "(")
    sizes: list[int] = []
    while (word := words.pop()) != ")":
        if not word.isdecimal():
            raise LayoutError(f"numpy's header's shape has {word[:40]!r} where a size should stand")
        sizes.append(int(word))
        if words[-1] == ",":
            words.pop()
        elif len(sizes) == 1:  # (3) is a number, (3,) a shape
            raise LayoutError("numpy's header's shape is a number in parentheses")
        elif words[-1] != ")":
            raise LayoutError("numpy's header's shape is not a tuple of sizes")
    return tuple(sizes)


_VALUES: dict[str, Callable[[list[str]], Any]] = {
    "descr": _descr,
    "fortran_order": _truth,
    "shape": _shape,
}
