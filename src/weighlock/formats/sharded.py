"""A model in several files, held together by an index. Knows the index; a shard is any file.

Names are known from the index alone; a shard is opened when one of its tensors is first asked for.
"""

import os
import re
import reprlib
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from weighlock.errors import (
    HeaderError,
    LayoutError,
    SourceError,
    TruncatedFile,
    UnsupportedDType,
)
from weighlock.formats import strict_json
from weighlock.formats.safetensors import open_safetensors
from weighlock.limits import Limits
from weighlock.per_process import PerProcess
from weighlock.sources.local import FileSource, names_in
from weighlock.tensors.catalog import Catalog
from weighlock.tensors.naming import some_names
from weighlock.tensors.ref import TensorRef
from weighlock.tensors.spec import check_name

if TYPE_CHECKING:
    from weighlock.sources.base import Source

__all__ = [
    "INDEX_NAME",
    "METADATA_NAME",
    "Index",
    "OpenFile",
    "ShardedRefs",
    "build_index",
    "check_plain",
    "confined",
    "is_index_name",
    "open_index",
    "read_index",
    "shard_name",
    "unlisted",
]

OpenShard = Callable[["Source", Limits], Catalog]


class OpenFile(Protocol):
    """Opens the bytes of a shard by its place: a path, or a URL."""

    def __call__(self, place: str, /, *, hold: bool) -> "Source": ...


INDEX_NAME = "model.safetensors.index.json"
METADATA_NAME = ".metadata"
"""What the index of a distributed checkpoint is called; what is in it, `dcp` knows."""


_INDEX = re.compile(r".+\.index(?:\.[\w-]+)?\.json", re.DOTALL)
"""A variant of a model stands before its ending: `model.safetensors.index.fp16.json`."""


def is_index_name(name: str) -> bool:
    """Whether the index of a sharded model is called so."""
    return _INDEX.fullmatch(name) is not None


def shard_name(number: int, count: int) -> str:
    """The customary name of the `number`-th of `count` shards, counted from one."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def build_index(
    weight_map: Mapping[str, str], total_bytes: int, metadata: Mapping[str, str] | None = None
) -> bytes:
    """The index as JSON: which tensor lies in which file, how many bytes all have, and texts."""
    beside = {**(metadata or {}), "total_size": total_bytes}
    index = {"metadata": beside, "weight_map": dict(weight_map)}
    return msgspec.json.format(msgspec.json.encode(index), indent=2) + b"\n"


def open_index(
    path: str, limits: Limits | None = None, open_shard: "OpenShard" = open_safetensors
) -> Catalog:
    """The catalog of a sharded model, from its index. Opens no shard.

    Of an index that lists nothing, the shards are the files beside it: `notes` tell what they hold.

    Args:
        path: the index.
        limits: what the input may ask for.
        open_shard: opens the catalog of one shard, of whatever format it is.

    Raises:
        FormatError: the index contradicts itself, points outside its directory, or a shard it names
            is not there.
    """
    limits = limits or Limits()
    index = read_index(FileSource(path, hold=False), limits)
    shards = index.shards or _shards_beside(path, limits)
    places = {name: confined(path, name) for name in shards}
    refs = ShardedRefs(index.weight_map, places, limits, open_shard)
    return Catalog(refs, index.metadata, refs.close, refs.shards)


def _shards_beside(index_path: str, limits: Limits) -> list[str]:
    """The files that an index could have listed, by what it is called."""
    directory, index_name = os.path.split(os.path.abspath(index_path))
    both = (".safetensors", ".bin")
    endings = tuple(ending for ending in both if f"{ending}." in index_name) or both
    names = [name for name in names_in(directory) if name.endswith(endings)]
    found = [name for name in names if not name.startswith(".")]
    limits.check("shards", len(found), f"{index_path}: files beside the index")
    return found


def unlisted(shard: Catalog, listed: Container[str]) -> list[str]:
    """The tensors of a shard that its index does not list: who opens the model lacks them."""
    names = [name for name in shard if name not in listed]
    if not names:
        return []
    # An index may name a sparse tensor as a whole; its parts are entries of the file.
    whole = [group for name, group in shard.groups.items() if name in listed]
    parts = {part for group in whole for part in group.parts.values()}
    return [name for name in names if name not in parts]


@dataclass(frozen=True, slots=True)
class Index:
    """What the index of a sharded model says."""

    weight_map: Mapping[str, str]
    """Tensor to file; files are plain names beside the index."""
    metadata: Mapping[str, str]
    raw: bytes
    """The index as it was written."""

    @property
    def shards(self) -> list[str]:
        """The files, in order of their names."""
        return sorted(set(self.weight_map.values()))


def read_index(source: "Source", limits: Limits) -> Index:
    """The index in a source.

    Raises:
        FormatError: it contradicts itself, or names a file that does not lie beside it.
    """
    label = source.label
    if source.size > limits.header_bytes:
        raise HeaderError(
            f"the index has {source.size:,} bytes, {limits.header_bytes:,} are allowed",
            source=label,
        )
    raw = bytearray(source.size)
    source.read_into(0, memoryview(raw))
    found = strict_json.parse(bytes(raw), source=label, tokens=limits.tensors + 65_536)
    weight_map, metadata = _check_index(found, label)
    limits.check("tensors", len(weight_map), f"{label}: tensors in the index")
    index = Index(weight_map, metadata, bytes(raw))
    limits.check("shards", len(index.shards), f"{label}: files in the index")
    check_plain(index.shards, label)
    return index


def check_plain(names: Iterable[str], label: str) -> None:
    """Raise `LayoutError` unless all are names of files, without a way to somewhere else."""
    for name in names:
        if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise LayoutError(
                f"names the shard {name!r}: shards lie beside their index, without a path",
                source=label,
            )


def _check_index(index: Any, path: str) -> tuple[dict[str, str], dict[str, str]]:
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        raise HeaderError("has no weight_map: not the index of a sharded model", source=path)
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise HeaderError(
                f"tensor {name!r} is mapped to {reprlib.repr(shard)}, not a file", source=path
            )
        try:
            check_name(name)
        except LayoutError as error:
            raise LayoutError(str(error), source=path) from error
    metadata = index.get("metadata")
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict):
        raise HeaderError("its metadata is not an object", source=path)
    return weight_map, {
        key: value if isinstance(value, str) else msgspec.json.encode(value).decode()
        for key, value in metadata.items()
    }


def confined(index_path: str, name: str) -> str:
    """The path of a shard, which must be there and lie beside its index.

    A link is followed to a file beside it, to one beside the index if that is a link itself (all
    names in a snapshot of the hub's cache are links into one directory of blobs), and to a blob of
    the hub's cache (downloads put such links beside a copy of the index). Any other link is refused
    unopened: whoever sends a directory could make it lead to any file of whoever opens it.
    """
    directory = os.path.dirname(os.path.abspath(index_path))
    path = os.path.join(directory, name)
    if not os.path.lexists(path):
        raise TruncatedFile(f"names the shard {name!r}, which is not there", source=index_path)
    home = {os.path.realpath(directory), os.path.dirname(os.path.realpath(index_path))}
    target = os.path.realpath(path)
    if os.path.dirname(target) not in home and not _is_blob(target):
        raise LayoutError(
            f"names the shard {name!r}, which is a link out of its directory: put a copy of the "
            "file in its place (`cp -rL` copies a directory so)",
            source=index_path,
        )
    if not os.path.exists(target):
        raise TruncatedFile(f"names the shard {name!r}, a link to nothing", source=index_path)
    return path


_BLOB = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")


def _is_blob(target: str) -> bool:
    """Whether this is where the hub's cache keeps a file: `models--…/blobs/<digest>`."""
    blobs, name = os.path.split(target)
    model, kind = os.path.split(blobs)
    is_model = os.path.basename(model).startswith("models--") and kind == "blobs"
    is_there = is_model and os.path.isdir(os.path.join(model, "snapshots"))
    return is_there and _BLOB.fullmatch(name) is not None


class ShardedRefs(Mapping[str, TensorRef]):
    """Refs by name over shards that are opened on first use.

    The first `limits.open_files` shards keep their descriptor; the others are opened for each read.
    """

    def __init__(
        self,
        weight_map: Mapping[str, str],
        places: Mapping[str, str],
        limits: Limits,
        open_shard: "OpenShard",
        open_file: "OpenFile" = FileSource,
    ) -> None:
        self._weight_map = dict(weight_map)
        self._places = dict(places)
        self._limits = limits
        self._open_shard = open_shard
        self._open_file = open_file
        self._shards: dict[str, Catalog] = {}
        self._closed = False
        # Reentrant: a signal handler may ask for a tensor while its own thread opens a shard.
        self._lock = PerProcess(threading.RLock)

    def __reduce__(self) -> "tuple[Callable[..., ShardedRefs], tuple[object, ...]]":
        how = self._open_shard, self._open_file
        return ShardedRefs, (self._weight_map, self._places, self._limits, *how)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weight_map)

    def __len__(self) -> int:
        return len(self._weight_map)

    def __contains__(self, name: object) -> bool:
        return name in self._weight_map

    def __getitem__(self, name: str) -> TensorRef:
        shard = self._weight_map[name]
        catalog = self._open(shard)
        if name in catalog:  # asked first: the rest looks at all that the file holds
            return catalog[name]
        if name in catalog.unreadable:
            raise UnsupportedDType(
                f"tensor {name!r} is not read: {catalog.unreadable[name]}",
                source=self._places[shard],
            )
        if name in catalog.groups:
            raise UnsupportedDType(
                f"tensor {name!r} is {catalog.groups[name]}: open this file by itself",
                source=self._places[shard],
            )
        raise LayoutError(
            f"has no tensor {name!r}, which its index says it holds", source=self._places[shard]
        )

    def shards(self) -> dict[str, Catalog]:
        """Every shard by its file name, opened."""
        return {name: self._open(name) for name in self._places}

    def close(self) -> None:
        """Close every shard that was opened, and open no more."""
        with self._lock():
            self._closed = True
            for catalog in self._shards.values():
                catalog.close()

    def _open(self, shard: str) -> Catalog:
        found = self._shards.get(shard)
        if found is not None:
            return found
        with self._lock():
            if shard not in self._shards:
                if self._closed:
                    raise SourceError(f"{self._places[shard]}: used after it was closed")
                opened = self._open_new(shard)
                if self._shards.setdefault(shard, opened) is not opened:
                    opened.close()  # a signal handler was faster
            return self._shards[shard]

    def _open_new(self, shard: str) -> Catalog:
        hold = len(self._shards) < self._limits.open_files
        source = self._open_file(self._places[shard], hold=hold)
        try:
            catalog = self._open_shard(source, self._limits)
            for name in catalog:
                elsewhere = self._weight_map.get(name, shard)
                if elsewhere != shard:
                    raise LayoutError(
                        f"holds tensor {name!r}, which the index places in {elsewhere!r}",
                        source=source.label,
                    )
            lost = unlisted(catalog, self._weight_map)
        except BaseException:
            source.close()
            raise
        return catalog.noted(f"its index does not list {some_names(lost)}") if lost else catalog
