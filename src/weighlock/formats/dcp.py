"""PyTorch's distributed checkpoints: a `.metadata` and files of chunks, as one catalog.

Opening reads the metadata. What `torch.save` wrote of a chunk is looked at when the chunk is first
needed; a tensor of several chunks is put together as it is read. Knows how the parts go together;
the records of the metadata are `dcp_metadata`'s, the chunks `torch_zip`'s.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from weighlock.errors import FormatError, LayoutError, TruncatedFile, UnsupportedDType
from weighlock.formats.dcp_metadata import Item, Metadata, StoredInChunks, read_metadata
from weighlock.formats.files_beside import FilesBeside
from weighlock.formats.inert_pickle import Feed, read_pickle
from weighlock.formats.sharded import METADATA_NAME, OpenFile, check_plain, confined
from weighlock.formats.torch_zip import open_torch_zip
from weighlock.limits import Limits
from weighlock.sources.local import FileSource
from weighlock.sources.window import Window
from weighlock.tensors.adjusted import AdjustedRef
from weighlock.tensors.assembled import AssembledRef, Chunk
from weighlock.tensors.catalog import Beside, Catalog
from weighlock.tensors.dtypes import DType
from weighlock.tensors.ref import PIECE_BYTES, TensorRef
from weighlock.tensors.spec import Span, TensorSpec, check_name
from weighlock.tensors.stored import StoredRef

if TYPE_CHECKING:
    from weighlock.sources.base import Source
    from weighlock.tensors.arrays import Array
    from weighlock.tensors.slicing import Index

__all__ = ["files_named", "is_dcp", "open_dcp", "open_dcp_source"]

_SUFFIX = ".distcp"
_HEAD_BYTES = 4 * 1024
_SMALL_BYTES = 32 * 1024
"""A chunk that is no longer is read as a whole."""


def is_dcp(names: list[str]) -> bool:
    """Whether a directory of these files is a distributed checkpoint."""
    return METADATA_NAME in names and any(name.endswith(_SUFFIX) for name in names)


def open_dcp(path: str, limits: Limits | None = None) -> Catalog:
    """The catalog of a distributed checkpoint on disk, from its `.metadata`.

    Raises:
        FormatError: the metadata is broken or contradicts itself, or a file it names is not there.
        LimitExceeded: it asks for more than the limits allow.
    """
    source = FileSource(path, hold=False)
    return open_dcp_source(source, partial(confined, path), limits or Limits(), FileSource)


def open_dcp_source(
    source: "Source", place_of: Callable[[str], str], limits: Limits, open_file: OpenFile
) -> Catalog:
    """The same for metadata that lies anywhere.

    Args:
        source: the metadata; it is not needed any more on return.
        place_of: the path or URL of a file beside the metadata.
        limits: what the input may ask for.
        open_file: opens such a file.
    """
    metadata, named = _read(source, limits)
    check_plain(metadata.files, source.label)
    limits.check("shards", len(metadata.files), f"{source.label}: files in the metadata")
    places = {name: place_of(name) for name in metadata.files}
    files = FilesBeside(places, limits, open_file)
    readable: dict[str, StoredInChunks] = {}
    unreadable: dict[str, str] = {}
    for name, tensor in metadata.tensors.items():
        _check_name(name, source.label, limits)
        reason = _obstacle(tensor)
        if reason is None:
            readable[name] = tensor
        else:
            unreadable[name] = reason
    objects = _Objects(metadata.objects, files, limits)
    check = partial(_check_items, metadata, files, limits)
    beside = Beside({}, objects, (), unreadable, named, check)
    refs = _Refs(readable, files, limits, source.label)
    return Catalog(refs, {"format": "pt"}, files.close, beside=beside)


def files_named(source: "Source", limits: Limits) -> list[str]:
    """The files that the metadata in a source names, which lie beside it.

    Raises:
        FormatError, LimitExceeded: as opening it.
    """
    metadata, _ = _read(source, limits)
    check_plain(metadata.files, source.label)
    return metadata.files


def _read(source: "Source", limits: Limits) -> tuple[Metadata, dict[tuple[str, str], int]]:
    limits.check("pickle_bytes", source.size, f"{source.label}: bytes of the metadata")
    raw = bytearray(source.size)
    source.read_into(0, memoryview(raw))
    pickle = read_pickle(Feed(bytes(raw), label=source.label), 0, limits)
    try:
        return read_metadata(pickle.value, limits), pickle.globals
    except FormatError as error:
        raise type(error)(str(error), source=source.label) from error


def _check_name(name: str, label: str, limits: Limits) -> None:
    try:
        check_name(name)
    except LayoutError as error:
        raise LayoutError(str(error), source=label) from error
    limits.check("name_bytes", len(name.encode()), f"{label}: bytes of the name of a tensor")


def _obstacle(tensor: StoredInChunks) -> str | None:
    """Why a tensor cannot be read; None if it can."""
    transforms = {t for chunk in tensor.chunks for t in chunk.item.transforms}
    if transforms:
        return f"its chunks went through {', '.join(sorted(transforms))}, which is not undone"
    try:
        dtype = DType.of(f"torch.{tensor.dtype}")
    except UnsupportedDType:
        return f"torch.{tensor.dtype} is not read"
    return f"chunks of {dtype} are not put together" if dtype.is_packed else None


class _Refs(Mapping[str, TensorRef]):
    """Refs by name. That of a tensor in one chunk is made by looking at the chunk's own head."""

    def __init__(
        self, tensors: Mapping[str, StoredInChunks], files: FilesBeside, limits: Limits, label: str
    ) -> None:
        self._tensors = dict(tensors)
        self._files = files
        self._limits = limits
        self._label = label
        self._made: dict[str, TensorRef] = {}

    def __reduce__(self) -> tuple[object, ...]:
        return _Refs, (self._tensors, self._files, self._limits, self._label)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> TensorRef:
        found = self._made.get(name)
        if found is None:
            found = self._made[name] = self._make(name, self._tensors[name])
        return found

    def _make(self, name: str, tensor: StoredInChunks) -> TensorRef:
        dtype = DType.of(f"torch.{tensor.dtype}")
        refs: list[_ItemRef] = []
        try:
            for chunk in tensor.chunks:
                spec = TensorSpec(name, dtype, chunk.sizes)
                _check_within(self._files.source(chunk.item.file), chunk.item)
                refs.append(_ItemRef(spec, self._files, chunk.item, self._limits))
            places = (chunk.offsets for chunk in tensor.chunks)
            chunks = tuple(map(Chunk, places, refs))
            whole = AssembledRef(TensorSpec(name, dtype, tensor.shape), chunks)
        except FormatError as error:
            label = None if error.source else self._label
            raise type(error)(str(error), source=label) from error
        return refs[0].opened() if len(refs) == 1 else whole


def _check_within(source: "Source", item: Item) -> None:
    if item.offset + item.length > source.size:
        raise TruncatedFile(
            f"a chunk ends at byte {item.offset + item.length:,}, the file has {source.size:,}",
            source=source.label,
        )


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class _ItemRef(TensorRef):
    """A chunk whose own head has not been looked at before it is read."""

    spec: TensorSpec
    files: FilesBeside
    item: Item
    limits: Limits
    _opened: list[TensorRef] = field(default_factory=list)

    def opened(self) -> TensorRef:
        """The ref to what `torch.save` wrote."""
        if not self._opened:
            self._opened.append(_open_chunk(self.spec, self.files, self.item, self.limits))
        return self._opened[0]

    def renamed(self, name: str) -> "_ItemRef":
        return _ItemRef(self.spec.renamed(name), self.files, self.item, self.limits)

    def identity(self) -> Hashable:
        return self.files, self.item

    def sources(self) -> Iterator[object]:
        yield from self.opened().sources()

    def pieces(self, max_bytes: int = PIECE_BYTES) -> Iterator[memoryview]:
        yield from self.opened().pieces(max_bytes)

    def _fill_bytes(self, buffer: memoryview) -> None:
        self.opened()._fill_bytes(buffer)

    def _slice(self, index: "Index") -> "Array":
        return self.opened()._slice(index)


def _open_item(files: FilesBeside, item: Item, limits: Limits) -> tuple[Window, Catalog]:
    source = files.source(item.file)
    _check_within(source, item)
    label = f"{source.label}: chunk at byte {item.offset:,}"
    # All that is read of a chunk to open it lies at its beginning, but for the directory.
    head = bytearray(min(item.length, _HEAD_BYTES if item.length > _SMALL_BYTES else _SMALL_BYTES))
    source.read_into(item.offset, memoryview(head))
    if head[8:9] == b"{":
        raise LayoutError(
            "is a safetensors file, not the chunks its metadata speaks of: open it by itself",
            source=source.label,
        )
    window = Window(source, item.offset, item.length, label, bytes(head))
    return window, open_torch_zip(window, limits)


def _check_items(
    metadata: Metadata, files: FilesBeside, limits: Limits, progress: Callable[[int], None]
) -> None:
    """Compare every chunk and object with its checksums."""
    for item in metadata.items:
        if not item.transforms:
            _open_item(files, item, limits)[1].check(progress)


def _open_chunk(spec: TensorSpec, files: FilesBeside, item: Item, limits: Limits) -> TensorRef:
    window, catalog = _open_item(files, item, limits)
    for reason in catalog.unreadable.values():
        raise UnsupportedDType(f"tensor {spec.name!r}: {reason}", source=window.label)
    if len(catalog) != 1:
        raise LayoutError(
            f"holds {len(catalog):,} tensors, one of {spec.name!r} was announced",
            source=window.label,
        )
    ref = next(iter(catalog.values()))
    if (ref.dtype, ref.shape) != (spec.dtype, spec.shape):
        raise LayoutError(
            f"holds {ref.dtype} {list(ref.shape)}, {spec.dtype} {list(spec.shape)} of "
            f"{spec.name!r} was announced",
            source=window.label,
        )
    return _lifted(ref, window).renamed(spec.name)


def _lifted(ref: TensorRef, window: Window) -> TensorRef:
    """The ref over the file itself, so that it is copied and sent as any other of that file."""
    if isinstance(ref, AdjustedRef):
        return replace(ref, original=_lifted(ref.original, window))
    if isinstance(ref, StoredRef) and ref.source is window:
        span = Span(window.start + ref.span.offset, ref.span.length)
        return StoredRef(ref.spec, window.source, span, ref.layout, ref.limits)
    return ref


class _Objects(Mapping[str, Any]):
    """What is not a tensor, by name, each read when it is asked for."""

    def __init__(self, items: Mapping[str, Item], files: FilesBeside, limits: Limits) -> None:
        self._items = dict(items)
        self._files = files
        self._limits = limits

    def __reduce__(self) -> tuple[object, ...]:
        return _Objects, (self._items, self._files, self._limits)

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, name: str) -> Any:
        item = self._items[name]
        if item.transforms:
            return None
        extras = _open_item(self._files, item, self._limits)[1].extras
        return extras[""] if list(extras) == [""] else extras
