"""An object as nodes of a tree, and its tensors beside it. Nothing is sent and no URL is known yet.

Knows which tensors ride in the message, which stay where their owner offers them, and which are to
be offered. The table of tensors is in the order in which they are met.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec.msgpack import Ext

from weighlock.errors import CodecRefused, FormatError, LimitExceeded, WeighlockError
from weighlock.formats.save import own_metadata
from weighlock.limits import Limits
from weighlock.messages.codecs import Registry, refuse
from weighlock.messages.leaves import leaf_of
from weighlock.messages.paths import dotted, path_of
from weighlock.messages.wire import PLAIN, RAW_BYTES, RAW_NAME, ExtCode, Kind, mark, tensor_node
from weighlock.tensors.arrays import SlicedArray, byte_view, empty
from weighlock.tensors.catalog import Catalog
from weighlock.tensors.convert import as_ref
from weighlock.tensors.ref import ArrayRef, TensorRef
from weighlock.tensors.spec import TensorSpec, check_name
from weighlock.tensors.stored import StoredRef
from weighlock.tensors.torch import is_tensor

__all__ = ["Row", "Walk"]

_LONGEST_NAME = 1000
"""Keys longer than this do not become names of tensors."""

_UNSIGNED, _SIGNED = 1 << 64, -(1 << 63)

_NUMBERS = PLAIN | {int}


class Row(NamedTuple):
    """A tensor of the table."""

    name: str | None
    """None if it is the key under which the tensor stands first."""
    spec: TensorSpec
    owner: int | None
    offset: int
    """In the owner's file; what lies in a share to come is known by its name only."""


@dataclass(slots=True)
class Walk:
    """One walk through one object."""

    registry: Registry
    threshold_bytes: int | None
    limits: Limits
    rows: list[Row] = field(default_factory=list)
    segments: list[memoryview] = field(default_factory=list)
    owners: dict[tuple[str, int] | None, int] = field(default_factory=dict)
    """URL and size of each share; None stands for the one to come."""
    own: dict[str, TensorRef] = field(default_factory=dict)
    """What is to be offered in that one."""
    _numbers: dict[Hashable, int] = field(default_factory=dict)
    _alive: list[object] = field(default_factory=list)
    """Identities are addresses: what was met must not be freed before the walk is over."""
    _steps: list[object] = field(default_factory=list)
    _hashing: int = 0

    def node(self, value: object) -> object:
        """The value as msgpack carries it.

        Raises:
            CodecRefused: something in it does not travel; says what and where.
            LimitExceeded: it is nested too deep, or without end.
        """
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind is int:
            return value if _SIGNED <= value < _UNSIGNED else self._leaf(value)  # type: ignore[operator]
        known = _CONTAINERS.get(kind)
        if known is not None:
            return known(self, value)
        codec = self.registry.of_type(kind)
        if codec is not None:
            self._enter()
            try:
                plain = codec.encode(value)
            except WeighlockError:
                raise
            except Exception as error:
                error.add_note(f"at {path_of(self._steps)}")
                raise
            self._alive.append(plain)
            node = [mark(Kind.REGISTERED), codec.name, self.node(plain)]
            self._steps.pop()
            return node
        if isinstance(value, TensorRef):
            return self._tensor(value, value, ExtCode.REF)
        if is_tensor(value):
            return self._tensor(value, None, ExtCode.REF)
        return self._leaf(value)

    def _leaf(self, value: object) -> list[object]:
        found = leaf_of(value)
        if found is None:
            raise refuse(value, path_of(self._steps))
        self._enter()
        self._steps.pop()
        kind, parts = found
        return [mark(kind), *parts]

    def _enter(self, step: object = None) -> None:
        self._steps.append(step)
        if len(self._steps) > self.limits.message_depth:
            raise LimitExceeded(
                f"the object is nested deeper than {self.limits.message_depth} levels, or holds "
                f"itself, at {path_of(self._steps[:8])}…",
                limit="message_depth",
                asked=len(self._steps),
                allowed=self.limits.message_depth,
            )

    def _each(self, values: "list[Any] | tuple[Any, ...]") -> list[object]:
        kinds = set(map(type, values))
        self._enter()
        if kinds <= PLAIN or (kinds <= _NUMBERS and _are_short(values)):
            nodes = list(values)
        else:
            nodes = []
            for number, value in enumerate(values):
                self._steps[-1] = number
                nodes.append(self.node(value))
        self._steps.pop()
        return nodes

    def _tuple(self, values: tuple[Any, ...]) -> object:
        return [mark(Kind.TUPLE), *self._each(values)]

    def _set(self, values: "set[Any] | frozenset[Any]") -> object:
        self._hashing += 1
        nodes = self._each(list(values))
        self._hashing -= 1
        kind = Kind.SET if type(values) is set else Kind.FROZENSET
        return [mark(kind), *sorted(nodes, key=msgspec.msgpack.encode)]  # one order for one set

    def _dict(self, values: dict[Any, Any]) -> object:
        if not all(type(key) is str for key in values):
            return self._pairs(values)
        kinds = set(map(type, values.values()))
        if kinds <= PLAIN or (kinds <= _NUMBERS and _are_short(values.values())):
            self._enter()
            self._steps.pop()
            return values
        nodes = {}
        self._enter()
        for key, value in values.items():
            self._steps[-1] = key
            nodes[key] = self.node(value)
        self._steps.pop()
        return nodes

    def _pairs(self, values: dict[Any, Any]) -> list[object]:
        nodes: list[object] = [mark(Kind.DICT)]
        self._enter()
        for key, value in values.items():
            self._steps[-1] = key
            self._hashing += 1
            nodes.append(self.node(key))
            self._hashing -= 1
            nodes.append(self.node(value))
        self._steps.pop()
        return nodes

    def _catalog(self, catalog: Catalog) -> list[object]:
        self._enter()
        metadata = own_metadata(catalog)
        node = [mark(Kind.CATALOG), metadata, self._dict(dict(catalog))]
        self._steps.pop()
        return node

    def _bytes(self, value: bytes) -> object:
        if len(value) < RAW_BYTES:
            return value
        number = self._numbers.get(id(value))
        if number is None:
            spec = TensorSpec(RAW_NAME, "U8", (len(value),))
            number = self._numbers[id(value)] = self._add(value, Row(RAW_NAME, spec, None, 0))
            self.segments.append(memoryview(value))
        return tensor_node(ExtCode.BYTES, number)

    def _array(self, array: "np.ndarray[Any, Any]") -> object:
        return self._tensor(array, None, ExtCode.ARRAY)

    def _tensor(self, value: object, ref: TensorRef | None, code: ExtCode) -> Ext:
        if self._hashing:
            raise CodecRefused("tensors cannot be keys or in sets", path=path_of(self._steps))
        key = self._steps[-1] if self._steps else None
        try:
            if ref is None:
                ref = as_ref(key if _is_name(key) else self._path_name(), value)  # type: ignore[arg-type]
            identity = _identity(ref) if ref.nbytes else id(value)
            number = self._numbers.get(identity)
            if number is None:
                number = self._numbers[identity] = self._add(value, self._row(ref, key))
        except FormatError as error:
            raise CodecRefused(str(error), path=path_of(self._steps)) from error
        rides_along = self.rows[number].owner is None
        return tensor_node(code if rides_along else ExtCode.REF, number)

    def _add(self, value: object, row: Row) -> int:
        self._alive.append(value)
        self.rows.append(row)
        return len(self.rows) - 1

    def _row(self, ref: TensorRef, key: object) -> Row:
        """Where the tensor will be found: with its owner, in this message, or in a new share."""
        if isinstance(ref, StoredRef):
            ticket = getattr(ref.source, "ticket", None)
            span = ref.contiguous_span
            if ticket is not None and span is not None:
                owner = self._owner((ticket, ref.source.size))  # type: ignore[attr-defined]
                name = None if ref.name == key else ref.name
                return Row(name, ref.spec, owner, span.offset)
        if not ref.nbytes or self.threshold_bytes is None or ref.nbytes < self.threshold_bytes:
            self.segments.append(_bytes_of(ref))
            return Row(None if ref.name == key else ref.name, ref.spec, None, 0)
        if not ref.dtype.in_safetensors:
            raise CodecRefused(
                f"a tensor of {ref.dtype} cannot be offered; threshold_bytes=None lets it ride in "
                "the message",
                path=path_of(self._steps),
            )
        free = self._free_name(ref.name)
        self.own[free] = ref if ref.name == free else ref.renamed(free)
        name = None if free == key else free
        return Row(name, self.own[free].spec, self._owner(None), 0)

    def _owner(self, share: tuple[str, int] | None) -> int:
        return self.owners.setdefault(share, len(self.owners))

    def _path_name(self) -> str:
        name = dotted(self._steps)
        return name if _is_name(name) else "tensor"

    def _free_name(self, name: str) -> str:
        """The name if no tensor to be offered has it; else its path, numbered if need be."""
        wanted, count = name, 1
        while name in self.own:
            name = self._path_name() if count == 1 else f"{wanted}~{count}"
            count += 1
        return name


def _identity(ref: TensorRef) -> Hashable:
    """As `ref.identity()`, while what was met is alive. Asking an array for its address is slow."""
    if not isinstance(ref, ArrayRef):
        return ref.identity()
    array, owner = ref.array, ref.array.base
    if owner is None:
        return "owner", id(array)
    identity = ref.identity()
    if type(owner) is np.ndarray and owner.base is None and owner.shape == array.shape:
        is_all_of_it = ArrayRef(ref.spec, owner).identity() == identity
        return ("owner", id(owner)) if is_all_of_it else identity
    return identity


def _is_name(name: object) -> bool:
    if type(name) is not str or len(name) > _LONGEST_NAME:
        return False
    if name.isidentifier():
        return name != "__metadata__"
    try:
        check_name(name)
    except FormatError:
        return False
    return True


def _are_short(values: Any) -> bool:
    return all(_SIGNED <= value < _UNSIGNED for value in values if type(value) is int)


def _bytes_of(ref: TensorRef) -> memoryview:
    """The tensor as a file holds it: a view where it lies so in memory, else a copy."""
    memory = ref.memory()
    if memory is not None or not ref.nbytes:
        return memory or memoryview(b"")
    buffer = byte_view(empty((ref.nbytes,), np.dtype(np.uint8)))
    ref.load(out=buffer)
    return buffer


_CONTAINERS: dict[type, Callable[[Walk, Any], object]] = {
    list: Walk._each,
    tuple: Walk._tuple,
    set: Walk._set,
    frozenset: Walk._set,
    dict: Walk._dict,
    OrderedDict: lambda walk, values: walk._dict(dict(values)),  # as torch gives state dicts
    bytes: Walk._bytes,
    Catalog: Walk._catalog,
    np.ndarray: Walk._array,
    np.memmap: Walk._array,
    SlicedArray: Walk._array,
}
