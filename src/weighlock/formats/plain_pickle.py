"""What `pickle.dump` wrote: arrays and tensors that lie in the pickle itself, without a container.

The whole pickle is read, and its tensors are held in memory as long as the catalog: it has no
places that could be read one by one. Knows how such a pickle begins; reading it is the machine's.
"""

import re
from typing import TYPE_CHECKING, NoReturn

from weighlock.errors import FormatError, TruncatedFile
from weighlock.formats.inert_pickle import Feed, Pickle, read_pickle
from weighlock.formats.meanings import Storage
from weighlock.formats.record_tree import read_tree
from weighlock.formats.torch_refs import make_refs
from weighlock.limits import Limits
from weighlock.tensors.catalog import Beside, Catalog

if TYPE_CHECKING:
    from weighlock.sources.base import Source

__all__ = ["is_pickle", "open_pickle"]

# Protocols 2 to 5 say so. Those before have no mark of their own: a dict, a list, an object.
_OPENING = re.compile(
    rb"\x80[\x02-\x05]|\(dp|\(lp|[}\]]q\0|c(?:collections\nOrderedDict|copy_reg\n|numpy[._a-z]*\n)"
)


def is_pickle(first: bytes) -> bool:
    """Whether a file that begins so is a pickle."""
    return _OPENING.match(first) is not None


def open_pickle(source: "Source", limits: Limits) -> Catalog:
    """The catalog of a pickle. All of it is read.

    Raises:
        FormatError: it is broken, or holds neither tensors nor arrays.
        LimitExceeded: it asks for more than the limits allow.
    """
    limits.check("pickle_bytes", source.size, f"{source.label}: bytes of the pickle")
    pickle = _read(source, limits)
    tree = read_tree(pickle.value, limits)
    refs, unreadable = make_refs(
        tree.tensors, _nowhere, swap=False, label=source.label, limits=limits
    )
    if not refs and not unreadable:
        raise FormatError(
            "is a pickle without tensors or arrays in it; `weighlock scan` shows what it imports",
            source=source.label,
        )
    notes = (*tree.notes, "a plain pickle: what is in it is held in memory")
    if pickle.end < source.size:
        notes = (
            *notes,
            f"{source.size - pickle.end:,} bytes follow: only the first pickle is read",
        )
    is_torch = any(module.split(".")[0] == "torch" for module, _ in pickle.globals)
    beside = Beside({}, tree.extras, notes, unreadable, pickle.globals, groups=tree.groups)
    return Catalog(refs, {"format": "pt"} if is_torch else {}, source.close, beside=beside)


def _read(source: "Source", limits: Limits) -> Pickle:
    raw = bytearray(source.size)
    source.read_into(0, memoryview(raw))
    feed = Feed(bytes(raw), label=source.label)
    del raw
    return read_pickle(feed, 0, limits)


def _nowhere(storage: Storage) -> NoReturn:
    raise TruncatedFile(
        f"storage {storage.key!r} does not lie in the pickle: is it the data.pkl of a checkpoint?"
    )
