"""PyTorch checkpoints up to 0.1.9: a tar archive of four members.

    storages  int count | count x { (key, location, class), int64 elements, bytes } | list of views
    tensors   int count | count x { (key, storage key, class), int32 dimensions, 4 bytes,
                                    int64 sizes, int64 strides, int64 offset }
    pickle    the object, which names tensors and storages by their key
    sys_info  a dict of numbers

Storages are found by walking from one to the next: each says how long it is. Knows these members;
tar itself is `tar_directory`'s, the pickles `inert_pickle`'s.
"""

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from weighlock.errors import FormatError, HeaderError, LayoutError, LimitExceeded, TruncatedFile
from weighlock.formats.heads import Heads
from weighlock.formats.inert_pickle import Feed, Pickle, read_pickle
from weighlock.formats.meanings import MOST, MOST_DIMENSIONS, Storage, StoredTensor, short
from weighlock.formats.pickle_records import Global, PersistentId
from weighlock.formats.rebuild_stored import view_of
from weighlock.formats.record_tree import read_tree
from weighlock.formats.tar_directory import tar_members
from weighlock.formats.torch_names import TENSOR_CLASSES, canonical, storage_dtype
from weighlock.formats.torch_refs import StoragePlace, make_refs
from weighlock.limits import Limits
from weighlock.tensors.catalog import Beside, Catalog
from weighlock.tensors.spec import Layout, Span

if TYPE_CHECKING:
    from weighlock.sources.base import Source

__all__ = ["TORCH_MEMBERS", "open_torch_tar", "tar_globals"]

TORCH_MEMBERS = ("sys_info", "pickle", "tensors", "storages")
_NEEDED = TORCH_MEMBERS[1:]
_NOWHERE = Span(0, 0)
"""Where a tensor without any storage lies: it is empty."""
_RECORD_BYTES = 256
_PADDING_BYTES = 10_240
"""Archives are filled up with zeros to a multiple of this."""


def open_torch_tar(source: "Source", limits: Limits | None = None) -> Catalog:
    """The catalog of a checkpoint up to 0.1.9. Reads headers, pickles and counts only.

    Raises:
        FormatError: it is broken, is another archive, or its counts contradict each other.
        LimitExceeded: it asks for more than the limits allow.
    """
    limits = limits or Limits()
    members = _members(source)
    window = Heads(source, dense=True)  # another one: that for the headers has gone to the end
    named: dict[tuple[str, str], int] = {}
    records = {
        name: _Records(source, window, span, name, limits, named) for name, span in members.items()
    }
    if "sys_info" in records:
        records["sys_info"].system()
    pickle = records["pickle"].next_pickle()
    records["pickle"].check_end()
    # Storages last: they lie far apart, and all before them near each other.
    described = _tensor_records(records["tensors"])
    storages = _Storages(records["storages"], limits)
    tensors = _tensors(described, storages.found, source.label)
    _resolve(pickle.persistent_ids, storages.found, tensors, source.label)
    tree = read_tree(pickle.value, limits)

    def place_of(storage: Storage) -> StoragePlace:
        whole = storages.places.get(storage.key, _NOWHERE)
        start = whole.offset + storage.first * storage.width
        return StoragePlace(source, Span(start, storage.available * storage.width))

    refs, unreadable = make_refs(
        tree.tensors, place_of, swap=False, label=source.label, limits=limits
    )
    notes = tree.notes
    if (left := source.size - max(span.end for span in members.values())) > 2 * _PADDING_BYTES:
        notes = (*notes, f"{left:,} bytes follow its last member, and are not looked at")
    beside = Beside({}, tree.extras, notes, unreadable, named, groups=tree.groups)
    return Catalog(refs, {"format": "pt"}, source.close, beside=beside)


def tar_globals(
    source: "Source", limits: Limits
) -> Iterator[tuple[str, dict[tuple[str, str], int], Any]]:
    """What each member that torch would unpickle names, and the object where there is one.

    Raises:
        FormatError, LimitExceeded: after what was named before the fault.
    """
    window = Heads(source, dense=True)
    spans: dict[str, Span] = {}
    for member in tar_members(source, window):
        if member.name in TORCH_MEMBERS:
            if not member.is_file:
                raise FormatError(f"member {member.name!r} is no plain file", source=source.label)
            spans[member.name] = member.span
    broken: FormatError | LimitExceeded | None = None
    for name in ("sys_info", "storages", "tensors", "pickle"):
        if name not in spans:
            continue
        named: dict[tuple[str, str], int] = {}
        records = _Records(source, window, spans[name], name, limits, named)
        value = None
        try:
            if name == "storages":
                _Storages(records, limits)
            elif name == "tensors":
                _tensor_records(records)
            else:
                value = records.next_pickle().value
        except (FormatError, LimitExceeded) as error:
            broken = broken or error
        yield name, named, value
    if broken is not None:
        raise broken


def _members(source: "Source") -> dict[str, Span]:
    found: dict[str, Span] = {}
    for member in tar_members(source, Heads(source, dense=True)):
        if member.name not in TORCH_MEMBERS:
            raise FormatError(
                f"is a tar archive with {member.name!r} in it, not a checkpoint: unpack it first",
                source=source.label,
            )
        if not member.is_file:
            raise FormatError(f"member {member.name!r} is no plain file", source=source.label)
        found[member.name] = member.span
    for name in _NEEDED:
        if name not in found:
            raise TruncatedFile(f"has no member {name!r}", source=source.label)
    return found


class _Records:
    """What a member holds, one thing after another: pickles, and numbers between them."""

    def __init__(
        self,
        source: "Source",
        window: Heads,
        span: Span,
        name: str,
        limits: Limits,
        named: dict[tuple[str, str], int],
    ) -> None:
        self.label = f"{source.label}: {name}"
        self._window = window
        self._at = span.offset
        self._end = span.end
        self._limits = limits
        self._named = named
        self._pickled = 0

    def next_pickle(self) -> Pickle:
        start = self._at
        grown = _RECORD_BYTES

        def more(wanted: int) -> bytes:
            nonlocal grown
            grown *= 2  # a long pickle takes few reads
            have = start + len(feed.data)
            count = min(max(wanted, grown), self._end - have)
            return self._window.read(have, count) if count else b""

        first = (
            self._window.read(start, min(grown, self._end - start)) if start < self._end else b""
        )
        feed = Feed(first, more, self.label, start)
        found = read_pickle(feed, 0, self._limits, self._named)
        self._at += found.end
        self._pickled += found.end
        self._limits.check("pickle_bytes", self._pickled, f"{self.label}: bytes of pickles")
        return found

    def system(self) -> None:
        """Check what nobody needs: code has been hidden in such pickles."""
        found = self.next_pickle()
        if type(found.value) is not dict or found.persistent_ids or self._named:
            raise HeaderError("its system information is not a plain dict", source=self.label)

    def count(self) -> int:
        """How many records follow."""
        count = self.next_pickle().value
        if type(count) is not int or count < 0:
            raise LayoutError(f"says that {short(count)} records follow", source=self.label)
        self._limits.check("tensors", count, f"{self.label}: records")
        return count

    def key_and_class(self, what: str) -> tuple[int, Any, Global]:
        """The pickle before a record: its key, something, and a class."""
        record: Any = self.next_pickle().value
        if type(record) is not tuple or len(record) != 3 or type(record[2]) is not Global:
            raise LayoutError(f"a {what} is described by {short(record)}", source=self.label)
        if type(record[0]) is not int or record[0].bit_length() > 64:
            raise LayoutError(f"a {what} has the key {short(record[0])}", source=self.label)
        return record

    def raw(self, count: int) -> bytes:
        """Exactly so many bytes."""
        at = self.skip(count).offset
        return self._window.read(at, count)

    def skip(self, count: int) -> Span:
        """So many bytes, as a place."""
        span = Span(self._at, count)
        if span.end > self._end:
            raise TruncatedFile(
                f"wants {count:,} bytes at {self._at:,}, and ends at {self._end:,}",
                source=self.label,
            )
        self._at = span.end
        return span

    def check_end(self) -> None:
        if self._at != self._end:
            raise LayoutError(
                f"has {self._end - self._at:,} bytes more than its records", source=self.label
            )


class _Storages:
    """The storages by their key, and where each of them lies."""

    def __init__(self, records: _Records, limits: Limits) -> None:
        self.found: dict[int, Storage] = {}
        self.places: dict[str, Span] = {}
        for _ in range(records.count()):
            key, location, kind = records.key_and_class("storage")
            dtype = storage_dtype(kind.module, kind.name)
            if not dtype or type(location) is not str or key in self.found:
                raise LayoutError(
                    f"storage {key} is of class {short(kind.name)}, at {short(location)}, "
                    f"{'for the second time' if key in self.found else 'which is not read'}",
                    source=records.label,
                )
            elements = int.from_bytes(records.raw(8), "little", signed=True)
            if not 0 <= elements < MOST:
                raise LayoutError(
                    f"storage {key} claims {elements:,} elements", source=records.label
                )
            storage = self.found[key] = Storage(str(key), dtype, elements)
            self.places[storage.key] = records.skip(elements * storage.width)
        self._views(records, limits)
        records.check_end()

    def _views(self, records: _Records, limits: Limits) -> None:
        """Storages that are parts of others: `(key, whole, first element, elements)`."""
        views = records.next_pickle().value
        if type(views) is not list:
            raise LayoutError("its list of views is none", source=records.label)
        limits.check("tensors", len(views), f"{records.label}: views")
        for view in views:
            if type(view) is not tuple or len(view) != 4 or not all(type(n) is int for n in view):
                raise LayoutError(f"a view is described by {short(view)}", source=records.label)
            key, root, first, elements = view
            whole = self.found.get(root)
            if whole is None or key in self.found:
                raise LayoutError(
                    f"storage {short(key)} is a part of {short(root)}: one is not there, or both",
                    source=records.label,
                )
            if first < 0 or elements < 0 or first + elements > whole.available:
                raise LayoutError(
                    f"storage {short(key)} is elements {short(first)} and {short(elements)} more "
                    f"of {whole.available:,}",
                    source=records.label,
                )
            self.found[key] = whole._replace(first=whole.first + first, part=elements)


class _TensorRecord(NamedTuple):
    """A tensor as its member describes it, not checked against any storage."""

    key: int
    storage_key: Any
    dtype: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def _tensor_records(records: _Records) -> list[_TensorRecord]:
    found: list[_TensorRecord] = []
    for _ in range(records.count()):
        key, root, kind = records.key_and_class("tensor")
        dtype = TENSOR_CLASSES.get(kind.name)
        if dtype is None or canonical(kind.module, kind.name)[0] != "torch":
            raise LayoutError(f"a tensor is of class {short(kind.name)}", source=records.label)
        dimensions = int.from_bytes(records.raw(8)[:4], "little", signed=True)
        if not 0 <= dimensions <= MOST_DIMENSIONS:
            raise LayoutError(f"a tensor has {dimensions:,} dimensions", source=records.label)
        numbers = struct.unpack(f"<{2 * dimensions + 1}q", records.raw(16 * dimensions + 8))
        size, stride = numbers[:dimensions], numbers[dimensions:-1]
        found.append(_TensorRecord(key, root, dtype, size, stride, numbers[-1]))
    records.check_end()
    return found


def _tensors(
    records: list[_TensorRecord], storages: dict[int, Storage], label: str
) -> dict[int, StoredTensor]:
    """The tensors by their key, each within its storage."""
    found: dict[int, StoredTensor] = {}
    for key, root, dtype, size, stride, offset in records:
        storage = storages.get(root) if type(root) is int else None
        if storage is None and root is not None:
            raise LayoutError(
                f"tensor {key} uses storage {short(root)}, which is not there", source=label
            )
        storage = storage or Storage("", dtype, 0)
        if storage.dtype != dtype or key in found or key in storages:
            raise LayoutError(
                f"tensor {key} of {dtype} is there twice, or lies in a storage of {storage.dtype}",
                source=label,
            )
        if not size and not storage.available:  # there were no scalars: an empty one
            layout = Layout.contiguous((0,))
        else:
            layout = view_of(storage, storage.available, offset, size, stride)
        found[key] = StoredTensor(storage, dtype, layout)
    return found


def _resolve(
    records: list[PersistentId],
    storages: dict[int, Storage],
    tensors: dict[int, StoredTensor],
    label: str,
) -> None:
    """Give every id its meaning; classes with their source are put as later files have them."""
    for record in records:
        pid = record.pid
        if type(pid) is tuple and len(pid) == 3 and type(pid[0]) is Global:
            record.pid = ("module", *pid)
            continue
        text = pid.decode("latin1") if type(pid) is bytes else pid
        is_key = type(text) is str and text.isascii() and text.isdigit() and len(text) <= 20
        key = int(text) if is_key else -1
        record.meaning = tensors.get(key) or storages.get(key)
        if record.meaning is None:
            raise LayoutError(f"the object uses {short(pid)}, which is not there", source=label)
