"""The bytes of a message: head, tree, raw segments. Knows the envelope; not what a tree means.

docs/message-format.md describes them with an example. One object has one encoding: a tree that
msgspec would not write byte for byte as it came (a key twice, a number longer than need be) is
refused, so that no two readers can see different objects in it.
"""

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import msgspec
from msgspec.msgpack import Ext

from weighlock.errors import CodecRefused, MessageInvalid
from weighlock.limits import Limits
from weighlock.messages.scan import check_tree

__all__ = [
    "ALIGNMENT",
    "PLAIN",
    "RAW_BYTES",
    "RAW_NAME",
    "Envelope",
    "ExtCode",
    "Kind",
    "join",
    "mark",
    "number_of",
    "read",
    "read_root",
    "tensor_node",
    "write_root",
]

MAGIC = b"\x89WLM"
VERSION = 1
ALIGNMENT = 16
"""Segments start on multiples of this: no element is wider, and memory is aligned like this."""

PLAIN = frozenset({type(None), bool, float, str})
"""What stands for itself in a tree, whatever its value."""

RAW_BYTES = 4096
"""Bytes objects from this size on become segments: a tree is for small things."""

RAW_NAME = "bytes"
"""What the table calls such a segment."""

_head = struct.Struct("<4sB3xI4x")  # magic, version, bytes of the tree

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class Kind(IntEnum):
    """What a list is whose first element is a mark."""

    TUPLE = 1
    SET = 2
    FROZENSET = 3
    DICT = 4
    INT = 5
    COMPLEX = 6
    DATETIME = 7
    DATE = 8
    TIME = 9
    TIMEDELTA = 10
    NUMPY_SCALAR = 11
    NUMPY_DTYPE = 12
    TORCH_SIZE = 13
    TORCH_DTYPE = 14
    CATALOG = 15
    REGISTERED = 16


class ExtCode(IntEnum):
    """The codes of extensions: a mark, or a row of the table of tensors, and what it becomes."""

    MARK = 1
    ARRAY = 2
    REF = 3
    BYTES = 4


_MARKS = {kind: Ext(ExtCode.MARK.value, bytes([kind])) for kind in Kind}
_KINDS = {bytes([kind]): kind for kind in Kind}


def mark(kind: Kind) -> Ext:
    """The first element of a list that is not a list."""
    return _MARKS[kind]


def kind_of(node: Ext) -> Kind:
    """What a mark stands for."""
    data = bytes(node.data)
    kind = _KINDS.get(data)
    if kind is None:
        raise MessageInvalid(f"a value is marked {data[:8].hex()}, which means nothing")
    return kind


def tensor_node(code: ExtCode, number: int) -> Ext:
    """A row of the table, where a tensor stood."""
    return Ext(code.value, number.to_bytes(_width(number), "big"))


def number_of(node: Ext) -> int:
    """The row a node names."""
    data = bytes(node.data)
    number = int.from_bytes(data, "big")
    if len(data) != _width(number):
        raise MessageInvalid(f"a tensor is numbered by {len(data)} bytes")
    return number


def _width(number: int) -> int:
    return 1 if number < 1 << 8 else 2 if number < 1 << 16 else 4


class Envelope(NamedTuple):
    """The tree of a message: two columns of owners, six of tensors, and the object."""

    urls: list[str]
    """Of each share that tensors lie in."""
    sizes: list[int]
    """Of that share's file, in bytes."""
    names: list[str | None]
    """Of each tensor; None: the key under which it stands first."""
    dtypes: list[str]
    ranks: list[int]
    dims: list[int]
    """The shapes, one after another."""
    owners: list[int | None]
    """The share each tensor lies in; None: in a segment of this message."""
    offsets: list[int]
    """Where in the share's file, of those tensors that lie in one."""
    root: msgspec.Raw


_envelopes = msgspec.msgpack.Decoder(Envelope)


def write_root(node: object) -> msgspec.Raw:
    """The object's nodes as bytes.

    Raises:
        CodecRefused: a text cannot be written as UTF-8.
    """
    try:
        return msgspec.Raw(_encode(node))
    except UnicodeEncodeError as error:
        raise CodecRefused(
            f"text {error.object[:40]!r} holds a lone surrogate, which no message carries"
        ) from error


def read_root(raw: msgspec.Raw) -> object:
    """The object's nodes.

    Raises:
        MessageInvalid: they are not as `write_root` would write them.
    """
    try:
        node = _decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MessageInvalid(f"the tree cannot be read: {error}") from error
    if _encode(node) != bytes(raw):
        raise MessageInvalid("the tree is not in its one encoding: a key twice, or a long number")
    return node


def join(
    envelope: Envelope, segments: Sequence[memoryview], limits: Limits
) -> list[bytes | memoryview]:
    """A message as buffers to be sent one after another; segments are not copied.

    Raises:
        LimitExceeded: receivers would refuse the tree.
    """
    tree = _encode(envelope)
    limits.check("message_tree_bytes", len(tree), "bytes of the tree of a message")
    if len(tree) > limits.message_nodes:  # no value takes less than a byte
        check_tree(tree, limits)
    parts: list[bytes | memoryview] = [_head.pack(MAGIC, VERSION, len(tree)) + tree]
    position = len(parts[0])
    for segment in segments:
        gap = -position % ALIGNMENT
        if gap:
            parts.append(bytes(gap))
        parts.append(segment)
        position += gap + len(segment)
    return parts


def read(body: memoryview, limits: Limits) -> tuple[Envelope, int]:
    """The envelope of a message, and where its tree ends.

    Raises:
        MessageInvalid: it has none.
        LimitExceeded: its tree is larger or deeper than allowed.
    """
    if len(body) < _head.size:
        raise MessageInvalid(f"{len(body)} bytes are too few for a message")
    magic, version, length = _head.unpack_from(body)
    if magic != MAGIC:
        raise MessageInvalid(f"a message starts with {MAGIC.hex()}, these bytes with {magic.hex()}")
    if version != VERSION:
        raise MessageInvalid(
            f"the message has version {version}, this library reads {VERSION}: update it"
        )
    limits.check("message_tree_bytes", length, "bytes of the tree of a message")
    end = _head.size + length
    if end > len(body):
        raise MessageInvalid(f"the message announces {end:,} bytes, {len(body):,} are there")
    tree = bytes(body[_head.size : end])
    if _head.pack(MAGIC, VERSION, length) != body[: _head.size]:
        raise MessageInvalid("the head of the message holds more than a head does")
    check_tree(tree, limits)
    try:
        envelope = _envelopes.decode(tree)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MessageInvalid(f"the tree is not that of a message: {error}") from error
    if _encode(envelope) != tree:
        raise MessageInvalid("the tree is not in its one encoding")
    return envelope, end
