"""A storage that lies in a pickle as bytes: a checkpoint of its own, with nothing else in it.

Tensors pickled by pickle itself, not by `torch.save`, are written so. Knows the row of five pickles
and one count; not what the storage is used for.
"""

from collections.abc import Callable
from typing import Any

from weighlock.errors import LayoutError
from weighlock.formats.inert_pickle import Feed, read_pickle
from weighlock.formats.meanings import Storage
from weighlock.formats.pickle_records import PersistentId
from weighlock.formats.torch_names import storage_dtype
from weighlock.limits import Limits

__all__ = ["inline_storage"]

_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
_MOST_HEAD_BYTES = 4096
"""Longer than the five pickles of any storage."""


def inline_storage(raw: bytes, storage_of: Callable[[Any], Storage]) -> Storage:
    """The one storage that was saved into these bytes, which must hold nothing else.

    Raises:
        FormatError: they hold anything else, or name anything but the class of a storage.
    """
    feed = Feed(raw[:_MOST_HEAD_BYTES], label="a storage in the pickle")
    limits = Limits(pickle_bytes=_MOST_HEAD_BYTES, nested_depth=0)
    at = 0
    values: list[Any] = []
    named: dict[tuple[str, str], int] = {}
    for _ in range(5):
        pickle = read_pickle(feed, at, limits, named)
        values.append(pickle.value)
        at = pickle.end
    magic, protocol, _, record, keys = values
    is_row = type(magic) is int and magic == _MAGIC and protocol == _PROTOCOL
    if not is_row or type(record) is not PersistentId:
        raise LayoutError("bytes that stand for a storage hold something else")
    if any(storage_dtype(*name) is None for name in named):
        raise LayoutError(f"bytes that stand for a storage name {'.'.join(next(iter(named)))}")
    storage = storage_of(record)
    data = memoryview(raw)[at + 8 :]
    told = int.from_bytes(raw[at : at + 8], "little")
    wanted = storage.elements * storage.width
    if keys != [storage.key] or told != storage.elements or len(data) != wanted:
        raise LayoutError(
            f"bytes that stand for a storage of {storage.elements:,} elements hold "
            f"{len(data):,} bytes, and say {told:,}"
        )
    return storage._replace(data=data)
