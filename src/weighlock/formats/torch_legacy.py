"""PyTorch checkpoints before 1.6: a row of pickles, then the storages end to end.

    int MAGIC | int 1001 | dict sys_info | OBJECT | list of keys | for each key: int64 count, bytes

Where each storage lies follows from the counts in the pickle; the count before each storage must
say the same. Knows this row; the pickles themselves are `inert_pickle`'s.
"""

import re
from typing import TYPE_CHECKING, Any

from weighlock.errors import HeaderError, LayoutError, TruncatedFile
from weighlock.formats.inert_pickle import Feed, Pickle, read_pickle
from weighlock.formats.meanings import Storage
from weighlock.formats.reading_ahead import far, read_ahead
from weighlock.formats.rebuild import is_module, storage_of
from weighlock.formats.record_tree import read_tree
from weighlock.formats.torch_refs import StoragePlace, make_refs
from weighlock.limits import Limits
from weighlock.tensors.catalog import Beside, Catalog
from weighlock.tensors.spec import Span

if TYPE_CHECKING:
    from weighlock.sources.base import Source

__all__ = ["after_storages", "is_legacy", "open_torch_legacy"]

_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001

# The magic number as a pickle of any protocol: binary with an optional frame, or decimal.
_OPENING = re.compile(
    rb"(?:\x80[\x02-\x05](?:\x95.{8})?\x8a\x0a" + re.escape(_MAGIC.to_bytes(10, "little")) + rb"\.)"
    rb"|(?:(?:\x80[\x00\x01])?L" + str(_MAGIC).encode() + rb"L?\n\.)",
    re.DOTALL,
)

_FIRST_BYTES = 64 * 1024
_COUNT_BYTES = 8


def is_legacy(first: bytes) -> bool:
    """Whether a file that begins so is a checkpoint of this kind."""
    return _OPENING.match(first) is not None


def open_torch_legacy(source: "Source", limits: Limits | None = None) -> Catalog:
    """The catalog of a checkpoint from before 1.6. Reads the pickles and the counts only.

    Raises:
        FormatError: it is broken, or its counts contradict each other.
        LimitExceeded: it asks for more than the limits allow.
    """
    limits = limits or Limits()
    head = _Head(source, limits)
    pickle, keys = head.pickle, head.keys
    storages = _storages(pickle, source.label)
    places, end = _lay_out(source, storages, keys, head.end)
    tree = read_tree(pickle.value, limits)
    notes = tree.notes
    if end < source.size:
        notes = (*notes, f"{source.size - end:,} bytes follow: only the first save in it is read")

    def place_of(storage: Storage) -> StoragePlace:
        whole = places[storage.key]
        start = whole.offset + storage.first * storage.width
        return StoragePlace(source, Span(start, storage.available * storage.width))

    refs, unreadable = make_refs(
        tree.tensors, place_of, swap=False, label=source.label, limits=limits
    )
    beside = Beside({}, tree.extras, notes, unreadable, pickle.globals, groups=tree.groups)
    return Catalog(refs, {"format": "pt"}, source.close, beside=beside)


def after_storages(source: "Source", pickle: Pickle, keys: Pickle, start: int) -> int:
    """Where the storages of a save end, which begin at `start`."""
    storages = _storages(pickle, source.label)
    return _lay_out(source, storages, _checked_keys(keys, source.label), start)[1]


class _Head:
    """The five pickles at the start, read as far as they reach and no further."""

    def __init__(self, source: "Source", limits: Limits) -> None:
        self._source = source
        self._limits = limits
        self._feed = Feed(b"", self._more, source.label)
        magic = self._next(0)
        protocol = self._next(magic.end)
        system = self._next(protocol.end)
        # Code has been hidden in these three: they are numbers and a dict of numbers, nothing else.
        for found, wanted in ((magic, _MAGIC), (protocol, _PROTOCOL)):
            if type(found.value) is not int or found.value != wanted or found.globals:
                raise HeaderError(
                    f"begins with another number than {wanted}, which PyTorch writes",
                    source=source.label,
                )
        if type(system.value) is not dict or system.globals:
            raise HeaderError("its system information is not a plain dict", source=source.label)
        self.pickle = self._next(system.end)
        after = self._next(self.pickle.end)
        self.keys = _checked_keys(after, source.label)
        self.end = after.end

    def _next(self, start: int) -> Pickle:
        return read_pickle(self._feed, start, self._limits)

    def _more(self, wanted: int) -> bytes:
        """Further bytes: as many as there are already, so that a long head takes few reads."""
        have = len(self._feed.data)
        count = min(max(wanted, have, _FIRST_BYTES), self._source.size - have)
        self._limits.check("pickle_bytes", have + wanted, f"{self._source.label}: bytes of pickles")
        raw = bytearray(count)
        self._source.read_into(have, memoryview(raw))
        return bytes(raw)


def _checked_keys(pickle: Pickle, label: str) -> list[str]:
    keys: Any = pickle.value
    if type(keys) is not list or not all(type(key) is str for key in keys) or pickle.globals:
        raise LayoutError("its list of storages is not a list of keys", source=label)
    if len(set(keys)) != len(keys):
        raise LayoutError("its list of storages names one twice", source=label)
    return keys


def _storages(pickle: Pickle, label: str) -> dict[str, Storage]:
    """The storages that the pickle names, whole; several mentions of one must agree."""
    found: dict[str, Storage] = {}
    for record in pickle.persistent_ids:
        if is_module(record):
            continue
        storage = storage_of(record)
        known = found.setdefault(storage.key, storage)
        if (known.elements, known.dtype) != (storage.elements, storage.dtype):
            raise LayoutError(
                f"storage {storage.key!r} is {known.elements:,} elements of "
                f"{known.dtype or 'no type'} in one place and {storage.elements:,} of "
                f"{storage.dtype or 'no type'} in another",
                source=label,
            )
    return found


def _counts_ahead(
    source: "Source", storages: dict[str, Storage], keys: list[str], start: int
) -> dict[int, bytes]:
    """The counts before storages by their place, as far as those lie where the pickle says.

    None of a source that is near: there they are read one by one.
    """
    remote = far(source)
    if remote is None:
        return {}
    spans: list[Span] = []
    offset = start
    for key in keys:
        storage = storages.get(key)
        if storage is None or offset + _COUNT_BYTES > source.size:
            break
        spans.append(Span(offset, _COUNT_BYTES))
        offset += _COUNT_BYTES + storage.elements * storage.width
    counts = read_ahead(remote, spans)
    return {span.offset: count for span, count in zip(spans, counts, strict=True)}


def _lay_out(
    source: "Source", storages: dict[str, Storage], keys: list[str], start: int
) -> tuple[dict[str, Span], int]:
    """Where each storage lies, and where the last one ends."""
    unlisted = storages.keys() - set(keys)
    if unlisted:
        raise LayoutError(f"storage {min(unlisted)!r} is used and not there", source=source.label)
    places: dict[str, Span] = {}
    offset = start
    buffer = bytearray(_COUNT_BYTES)
    ahead = _counts_ahead(source, storages, keys, start)
    for key in keys:
        storage = storages.get(key)
        if storage is None:
            raise LayoutError(
                f"storage {key!r} is there and of no known type: no tensor uses it",
                source=source.label,
            )
        span = Span(offset + _COUNT_BYTES, storage.elements * storage.width)
        if span.end > source.size:
            raise TruncatedFile(
                f"storage {key!r} ends at byte {span.end:,}, the file has {source.size:,}",
                source=source.label,
            )
        count: bytes | bytearray | None = ahead.get(offset)
        if count is None:
            source.read_into(offset, memoryview(buffer))
            count = buffer
        told = int.from_bytes(count, "little")
        if told != storage.elements:
            raise LayoutError(
                f"storage {key!r} has {told:,} elements where it lies and {storage.elements:,} "
                "in the pickle",
                source=source.label,
            )
        places[key] = span
        offset = span.end
    return places, offset
