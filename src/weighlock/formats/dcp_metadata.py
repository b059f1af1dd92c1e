"""What the `.metadata` of a distributed checkpoint says: tensors, their chunks, and where they lie.

It is a pickle; here are the records it was read as, and what they mean by their exact names. Pure:
no file is touched. Knows PyTorch's classes by name only.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from weighlock.errors import LayoutError
from weighlock.formats.meanings import MOST, check_product, ints, short
from weighlock.formats.pickle_records import Call, Global
from weighlock.limits import Limits

__all__ = ["ChunkPlace", "Item", "Metadata", "StoredInChunks", "read_metadata"]

_HOME = "torch.distributed.checkpoint"
_CLASSES = {
    "Metadata": {(f"{_HOME}.metadata", "Metadata")},
    "tensor": {(f"{_HOME}.metadata", "TensorStorageMetadata")},
    "bytes": {(f"{_HOME}.metadata", "BytesStorageMetadata")},
    "chunk": {
        (f"{_HOME}.metadata", "ChunkStorageMetadata"),
        ("torch.distributed._shard.metadata", "ShardMetadata"),
    },
    "properties": {
        (f"{_HOME}.metadata", "TensorProperties"),
        ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
    },
    "index": {(f"{_HOME}.metadata", "MetadataIndex")},
    "place": {(f"{_HOME}.filesystem", "_StorageInfo")},
}


class Item(NamedTuple):
    """A run of bytes in one of the files: what `torch.save` wrote of one chunk or object."""

    file: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()
    """What was done to the bytes afterwards, such as compressing them."""


class ChunkPlace(NamedTuple):
    """A chunk of a tensor, and where it lies."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    item: Item


class StoredInChunks(NamedTuple):
    """A tensor."""

    dtype: str
    """Torch's name."""
    shape: tuple[int, ...]
    chunks: tuple[ChunkPlace, ...]


@dataclass(frozen=True, slots=True)
class Metadata:
    """What a distributed checkpoint holds."""

    tensors: Mapping[str, StoredInChunks]
    objects: Mapping[str, Item]
    """What is not a tensor."""

    @property
    def items(self) -> list[Item]:
        """Every chunk and every object, in the order of the files."""
        chunks = [chunk.item for tensor in self.tensors.values() for chunk in tensor.chunks]
        return sorted((*chunks, *self.objects.values()))

    @property
    def files(self) -> list[str]:
        """The files that are named, in order."""
        return sorted({item.file for item in self.items})


def read_metadata(record: Any, limits: Limits) -> Metadata:
    """What the records of a `.metadata` mean.

    Raises:
        LayoutError: they are not what PyTorch writes, or contradict each other.
        LimitExceeded: there are more tensors or chunks than the limits allow.
    """
    whole = _state(record, "Metadata")
    described, stored = whole.get("state_dict_metadata"), whole.get("storage_data")
    if type(described) is not dict or type(stored) is not dict:
        raise LayoutError("says neither what it holds nor where")
    limits.check("tensors", len(described), "names in the checkpoint")
    limits.check("tensors", len(stored), "chunks in the checkpoint")
    places = _places(stored)
    tensors: dict[str, StoredInChunks] = {}
    objects: dict[str, Item] = {}
    for name, record in described.items():
        if type(name) is not str:
            raise LayoutError(f"has the name {short(name)}, which is no text")
        if _is_a(record, "bytes"):
            objects[name] = _found(places, name, None)
        else:
            tensors[name] = _tensor(name, _state(record, "tensor"), places)
    return Metadata(tensors, objects)


_Places = dict[tuple[str, tuple[int, ...] | None], Item]


def _places(stored: dict[Any, Any]) -> _Places:
    places: _Places = {}
    for key, value in stored.items():
        index, place = _state(key, "index"), _state(value, "place")
        name, offset = index.get("fqn"), index.get("offset")
        if type(name) is not str:
            raise LayoutError(f"places something named {short(name)}")
        where = name, None if offset is None else ints(offset, "offset")
        if where in places:
            raise LayoutError(f"places {name!r} at {short(offset)} twice")
        places[where] = _item(name, place)
    return places


def _item(name: str, place: dict[Any, Any]) -> Item:
    file: Any = place.get("relative_path")
    offset: Any = place.get("offset")
    length: Any = place.get("length")
    numbers = type(offset) is int and type(length) is int
    if type(file) is not str or not numbers or not 0 <= offset < MOST or not 0 <= length < MOST:
        raise LayoutError(
            f"places {name!r} in {short(file)} at {short(offset)} with {short(length)} bytes"
        )
    transforms = place.get("transform_descriptors") or ()
    if type(transforms) not in (list, tuple) or not all(type(t) is str for t in transforms):
        raise LayoutError(f"has transformed {name!r} in a way that is not named")
    return Item(file, offset, length, tuple(transforms))


def _found(places: _Places, name: str, offsets: tuple[int, ...] | None) -> Item:
    item = places.get((name, offsets))
    if item is None:
        at = "" if offsets is None else f" at {short(offsets)}"
        raise LayoutError(f"does not say where {name!r}{at} lies")
    return item


def _tensor(name: str, state: dict[Any, Any], places: _Places) -> StoredInChunks:
    shape = ints(state.get("size"), "size")
    check_product(shape)
    records = state.get("chunks")
    if type(records) is not list or not records:
        raise LayoutError(f"has no chunks of tensor {name!r}")
    chunks = []
    for record in records:
        chunk = _state(record, "chunk")
        offsets = ints(chunk.get("offsets", chunk.get("shard_offsets")), "offset")
        sizes = ints(chunk.get("sizes", chunk.get("shard_sizes")), "size")
        whole = len(records) == 1 and (name, offsets) not in places
        chunks.append(ChunkPlace(offsets, sizes, _found(places, name, None if whole else offsets)))
    return StoredInChunks(_dtype(name, state.get("properties")), shape, tuple(chunks))


def _dtype(name: str, properties: Any) -> str:
    if not _is_a(properties, "properties"):
        raise LayoutError(f"does not say of what dtype tensor {name!r} is")
    state = properties.states[0] if properties.states else None
    dtype = state[0] if type(state) is tuple and state else None
    if type(state) is dict:
        dtype = state.get("dtype")
    if type(dtype) is not Global or dtype.module != "torch":
        raise LayoutError(f"says that tensor {name!r} is of dtype {short(dtype)}")
    return dtype.name


def _is_a(record: Any, what: str) -> bool:
    if type(record) is not Call or type(record.func) is not Global:
        return False
    return (record.func.module, record.func.name) in _CLASSES[what]


def _state(record: Any, what: str) -> dict[Any, Any]:
    """The attributes of an object of one of PyTorch's classes."""
    if not _is_a(record, what):
        raise LayoutError(f"has {short(record)} where PyTorch has its {what}")
    states = record.states or [{}]
    if len(states) != 1 or type(states[0]) is not dict or record.items or record.appended:
        raise LayoutError(f"has a {what} with more to it than PyTorch writes")
    state: dict[Any, Any] = states[0]
    return state
