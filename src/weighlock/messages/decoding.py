"""Nodes of a tree as the object they stand for, with refs and views in place of its tensors.

Every node is checked before it becomes a value: marks, keys, names against the registry. What rows
of the table become is `table`'s.
"""

import itertools
from typing import Any

from msgspec.msgpack import Ext, encode

from weighlock.errors import FormatError, MessageError, MessageInvalid, WeighlockError
from weighlock.messages.codecs import Registry
from weighlock.messages.leaves import value_of
from weighlock.messages.paths import path_of, shown
from weighlock.messages.table import Tensors
from weighlock.messages.wire import PLAIN, RAW_BYTES, ExtCode, Kind, kind_of, number_of
from weighlock.tensors.catalog import Catalog
from weighlock.tensors.ref import TensorRef

__all__ = ["Build"]

_FINISHED = PLAIN | {int}

_ALIKE = 100
"""Keys of one dict or set that may share a hash. Anybody can make as many numbers and tuples of one
hash as he likes, and each is compared with all before it; values that are not made so share few."""


class Build:
    """One walk through the tree of one message."""

    def __init__(self, tensors: Tensors, registry: Registry) -> None:
        self._tensors = tensors
        self._registry = registry
        self._steps: list[object] = []

    def build(self, node: object) -> object:
        """The object.

        Raises:
            MessageInvalid: the tree does not stand for one; says what and where.
        """
        try:
            found = self._value(node)
            self._tensors.finish()
        except MessageError as error:
            if error.path is not None:
                raise
            raise type(error)(str(error), path=path_of(self._steps)) from error
        except FormatError as error:
            raise MessageInvalid(str(error), path=path_of(self._steps)) from error
        return found

    def _value(self, node: object) -> object:
        kind = type(node)
        if kind in _FINISHED:
            return node
        if isinstance(node, bytes):
            if len(node) >= RAW_BYTES:
                raise MessageInvalid(f"{len(node):,} bytes stand in the tree, not in a segment")
            return node
        if isinstance(node, list):
            if node and type(node[0]) is Ext and node[0].code == ExtCode.MARK:
                return self._marked(kind_of(node[0]), node)
            return self._list(node)
        if isinstance(node, dict):
            return self._dict(node)
        if isinstance(node, Ext):
            return self._tensor(node)
        raise MessageInvalid(f"a {kind.__name__} stands in the tree by itself")

    def _list(self, nodes: list[Any]) -> list[Any]:
        if _FINISHED.issuperset(map(type, nodes)):
            return nodes
        self._steps.append(None)
        for number, node in enumerate(nodes):
            self._steps[-1] = number
            nodes[number] = self._value(node)
        self._steps.pop()
        return nodes

    def _dict(self, nodes: dict[Any, Any]) -> dict[str, Any]:
        if not all(type(key) is str for key in nodes):
            raise MessageInvalid("a map has a key that is not text")
        if _FINISHED.issuperset(map(type, nodes.values())):
            return nodes
        self._steps.append(None)
        for key, node in nodes.items():
            self._steps[-1] = key
            nodes[key] = self._value(node)  # no key is added: the walk goes on
        self._steps.pop()
        return nodes

    def _tensor(self, node: Ext) -> object:
        key = self._steps[-1] if self._steps else None
        if node.code == ExtCode.ARRAY:
            return self._tensors.array(number_of(node), key)
        if node.code == ExtCode.REF:
            return self._tensors.ref(number_of(node), key)
        if node.code == ExtCode.BYTES:
            return self._tensors.raw(number_of(node))
        raise MessageInvalid(f"an extension of code {node.code} means nothing")

    def _marked(self, kind: Kind, nodes: list[Any]) -> object:
        del nodes[0]
        if kind is Kind.TUPLE:
            return tuple(self._list(nodes))
        if kind is Kind.SET or kind is Kind.FROZENSET:
            return self._set(kind, nodes)
        if kind is Kind.DICT:
            return self._pairs(nodes)
        if kind is Kind.CATALOG:
            return self._catalog(nodes)
        if kind is Kind.REGISTERED:
            return self._registered(nodes)
        return value_of(kind, nodes)

    def _set(self, kind: Kind, nodes: list[Any]) -> object:
        if any(left > right for left, right in itertools.pairwise(map(encode, nodes))):
            raise MessageInvalid("a set is not in the order of its encodings")
        values = self._list(nodes)
        hashes: dict[int, int] = {}
        for value in values:
            _count_hash(value, hashes, "a set holds what cannot be in one")
        found = frozenset(values) if kind is Kind.FROZENSET else set(values)
        if len(found) != len(values):
            raise MessageInvalid("a set holds a value twice")
        return found

    def _pairs(self, nodes: list[Any]) -> dict[Any, Any]:
        if len(nodes) % 2:
            raise MessageInvalid("a dict has a key without a value")
        found: dict[Any, Any] = {}
        hashes: dict[int, int] = {}
        self._steps.append(None)
        for number in range(0, len(nodes), 2):
            key = self._value(nodes[number])
            _count_hash(key, hashes, "a dict has a key that cannot be one")
            self._steps[-1] = key
            found[key] = self._value(nodes[number + 1])
        self._steps.pop()
        if 2 * len(found) != len(nodes):
            raise MessageInvalid("a dict has a key twice")
        if all(type(key) is str for key in found):
            raise MessageInvalid("a dict whose keys are all text is not written as a map")
        return found

    def _catalog(self, nodes: list[Any]) -> Catalog:
        if len(nodes) != 2 or not all(isinstance(node, dict) for node in nodes):
            raise MessageInvalid("a catalog is not made of metadata and tensors")
        metadata, found = nodes
        if not all(type(text) is str for pair in metadata.items() for text in pair):
            raise MessageInvalid("the metadata of a catalog is not text")
        self._steps.append(None)
        refs = self._dict(found)
        self._steps.pop()
        for name, ref in refs.items():
            if not isinstance(ref, TensorRef):
                raise MessageInvalid(f"{name!r} of a catalog is not a tensor")
            refs[name] = ref if ref.name == name else ref.renamed(name)
        return Catalog(refs, metadata)

    def _registered(self, nodes: list[Any]) -> object:
        if len(nodes) != 2 or type(nodes[0]) is not str:
            raise MessageInvalid("an object of a registered type is not a name and a value")
        name, node = nodes
        codec = self._registry.of_name(name)
        if codec is None:
            raise MessageInvalid(
                f"{name!r:.100} is not a registered name: register it before unpack"
            )
        self._steps.append(None)
        plain = self._value(node)
        self._steps.pop()
        try:
            value = codec.decode(plain)
        except WeighlockError:
            raise
        except Exception as error:
            raise MessageInvalid(f"{name!r} refused what came: {shown(error, 200)}") from error
        if type(value) is not codec.type:
            raise MessageInvalid(f"{name!r} gave a {type(value).__name__}")
        return value


def _count_hash(value: object, hashes: dict[int, int], trouble: str) -> None:
    """Count how many values there are of each hash.

    Raises:
        MessageInvalid: this one has none, or shares it with more than chance explains.
    """
    try:
        code = hash(value)
    except TypeError as error:
        raise MessageInvalid(f"{trouble}: {error}") from error
    hashes[code] = alike = hashes.get(code, 0) + 1
    if alike > _ALIKE:
        raise MessageInvalid(f"more than {_ALIKE} keys are made to share one hash")
