"""The header of a GGUF file: keys with values, and what it says of its tensors.

Every count and length is held against the file and the limits before anything is made of it. Knows
the header's bytes, in both byte orders; not where tensors lie, and not what their types mean.
"""

import struct
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from weighlock.errors import HeaderError, LayoutError, TruncatedFile
from weighlock.formats.inert_pickle import Feed
from weighlock.limits import Limits

if TYPE_CHECKING:
    from weighlock.sources.base import Source

__all__ = ["Described", "Head"]

_FIRST_BYTES = 64 * 1024
_MOST_DIMENSIONS = 4  # ggml's own
_MOST_KEY_BYTES = 65_535  # the format's own
_MOST_DEPTH = 8
_MOST_VALUES = 4_000_000
"""Elements of all arrays of a header: the largest tokenizers have a third of it."""
_TENSOR_BYTES = 24  # the least that describes a tensor: name, dimensions, type, offset
_PAIR_BYTES = 13  # a key and a value of one byte

_NUMBERS = {
    0: "u1",
    1: "i1",
    2: "u2",
    3: "i2",
    4: "u4",
    5: "i4",
    6: "f4",
    7: "u1",
    10: "u8",
    11: "i8",
    12: "f8",
}
_BOOL, _TEXT, _ARRAY = 7, 8, 9

_LETTERS = dict(zip(_NUMBERS.values(), "BbHhIifBQqd", strict=True))
_FORMS = {
    order + code: struct.Struct(order + letter)
    for order in "<>"
    for code, letter in _LETTERS.items()
}


class Described(NamedTuple):
    """A tensor as the header describes it."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    """Counted from the start of the data."""


class Head:
    """The header, read as far as it reaches and not much further."""

    def __init__(self, source: "Source", limits: Limits) -> None:
        self._source = source
        self._limits = limits
        self._feed = Feed(b"", self._more, source.label)
        self._at = 4
        self._left = _MOST_VALUES
        self.order = self._byte_order()
        tensors, pairs = self._number("u8"), self._number("u8")
        limits.check("tensors", tensors, f"{source.label}: tensors in the header")
        limits.check("tensors", pairs, f"{source.label}: keys in the header")
        least = tensors * _TENSOR_BYTES + pairs * _PAIR_BYTES
        if least > source.size:
            raise HeaderError(
                f"claims {tensors:,} tensors and {pairs:,} keys, which take {least:,} bytes at "
                f"least; the file has {source.size:,}",
                source=source.label,
            )
        self.values = self._pairs(pairs)
        self.tensors = self._tensors(tensors)
        self.end = self._at

    def _byte_order(self) -> str:
        raw = self._take(4)
        versions = {order: struct.unpack(f"{order}I", raw)[0] for order in "<>"}
        # The version is a small number in the one order, and a huge one in the other.
        order = min(versions, key=lambda order: versions[order])
        if versions[order] not in (2, 3):
            raise HeaderError(
                f"is GGUF of version {versions[order]:,}; versions 2 and 3 are read",
                source=self._source.label,
            )
        return order

    def _pairs(self, count: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for _ in range(count):
            key = self._text("key", _MOST_KEY_BYTES)
            if key in values:
                raise HeaderError(f"has the key {key!r} twice", source=self._source.label)
            kind = self._number("u4")
            values[key] = self._array(key, 0) if kind == _ARRAY else self._scalar(key, kind)
        return values

    def _tensors(self, count: int) -> list[Described]:
        found: dict[str, Described] = {}
        for _ in range(count):
            name = self._text("name of a tensor", self._limits.name_bytes)
            rank = self._number("u4")
            if rank > _MOST_DIMENSIONS:
                raise LayoutError(
                    f"tensor {name!r} has {rank:,} dimensions, at most {_MOST_DIMENSIONS} are "
                    "possible",
                    source=self._source.label,
                )
            # The fastest dimension comes first, as it does nowhere else.
            shape = tuple(self._number("u8") for _ in range(rank))[::-1]
            if name in found:
                raise LayoutError(f"has two tensors named {name!r}", source=self._source.label)
            found[name] = Described(name, shape, self._number("u4"), self._number("u8"))
        return list(found.values())

    def _scalar(self, key: str, kind: int) -> Any:
        if kind == _TEXT:
            return self._text(f"value of {key!r}", self._limits.header_bytes)
        if kind not in _NUMBERS:
            raise HeaderError(
                f"the value of {key!r} is of type {kind:,}, which is not known",
                source=self._source.label,
                offset=self._at,
            )
        value = self._number(_NUMBERS[kind])
        if kind != _BOOL:
            return value
        if value not in (0, 1):
            raise HeaderError(
                f"the value of {key!r} is neither true nor false but {value}",
                source=self._source.label,
            )
        return bool(value)

    def _array(self, key: str, depth: int) -> list[Any]:
        if depth > _MOST_DEPTH:
            raise HeaderError(
                f"the value of {key!r} nests arrays deeper than {_MOST_DEPTH}",
                source=self._source.label,
            )
        kind, count = self._number("u4"), self._number("u8")
        self._left -= count
        if self._left < 0:
            raise HeaderError(
                f"its arrays hold more than {_MOST_VALUES:,} values: {key!r} claims {count:,}",
                source=self._source.label,
            )
        if kind == _ARRAY:
            return [self._array(key, depth + 1) for _ in range(count)]
        if kind == _TEXT:
            return self._texts(count)
        if kind not in _NUMBERS:
            return [self._scalar(key, kind) for _ in range(count)]
        dtype = np.dtype(self.order + _NUMBERS[kind])
        values: list[Any] = np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()
        return [bool(value) for value in values] if kind == _BOOL else values

    def _texts(self, count: int) -> list[str]:
        """Texts in a row. A tokenizer has half a million: one loop and local names."""
        order: Literal["little", "big"] = "little" if self.order == "<" else "big"
        found: list[str] = []
        at, data = self._at, self._feed.data
        for _ in range(count):
            begin = at + 8
            if begin > len(data):
                data = self._reach(begin)
            stop = begin + int.from_bytes(data[at:begin], order)
            if stop > len(data):
                data = self._reach(stop)
            found.append(_decoded(data[begin:stop]))
            at = stop
        self._at = at
        return found

    def _text(self, what: str, most_bytes: int) -> str:
        length = self._number("u8")
        if length > most_bytes:
            raise HeaderError(
                f"a {what} claims {length:,} bytes, {most_bytes:,} are allowed",
                source=self._source.label,
                offset=self._at - 8,
            )
        return _decoded(self._take(length))

    def _number(self, code: str) -> Any:
        form = _FORMS[self.order + code]
        return form.unpack(self._take(form.size))[0]

    def _take(self, count: int) -> bytes:
        stop = self._at + count
        raw = self._reach(stop)[self._at : stop]
        self._at = stop
        return raw

    def _reach(self, stop: int) -> bytes:
        """The header, of which at least so many bytes are there."""
        if stop > len(self._feed.data) and not self._feed.extend(stop):
            raise TruncatedFile(
                f"the header ends at byte {len(self._feed.data):,}, {stop:,} are needed",
                source=self._source.label,
                offset=len(self._feed.data),
            )
        return self._feed.data

    def _more(self, wanted: int) -> bytes:
        """Further bytes: as many as there are already, so that a long header takes few reads."""
        have, label = len(self._feed.data), self._source.label
        most = min(self._limits.header_bytes, self._source.size)
        if have + wanted > self._limits.header_bytes:
            raise HeaderError(
                f"the header has at least {have + wanted:,} bytes, "
                f"{self._limits.header_bytes:,} are allowed",
                source=label,
            )
        if have + wanted > most:
            return b""
        raw = bytearray(min(max(wanted, have, _FIRST_BYTES), most - have))
        self._source.read_into(have, memoryview(raw))
        return bytes(raw)


def _decoded(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        # Tokens of some tokenizers are bytes; nothing may get lost or look like another.
        return raw.decode("utf-8", "backslashreplace")
