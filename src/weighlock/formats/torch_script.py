"""What TorchScript puts into a ZIP checkpoint beside data.pkl: constants, and code.

Constants are tensors like others. Code is never read; its files are only counted. Knows names of
members and the shape of the two trees; not archives.
"""

from collections.abc import Iterable
from typing import Any

from weighlock.errors import LayoutError
from weighlock.formats.inert_pickle import Pickle
from weighlock.formats.meanings import short
from weighlock.formats.pickle_records import Call, Global
from weighlock.formats.rebuild_stored import is_module, storage_of
from weighlock.formats.record_nodes import children_of

__all__ = ["CONSTANTS", "CONSTANTS_DIRECTORY", "code_note", "with_constants"]

CONSTANTS = "constants.pkl"
"""The member by which torch itself tells such an archive."""

CONSTANTS_DIRECTORY = "constants/"
"""Where the storages of constants lie; it is a part of their keys here."""

_UNREAD = ("bytecode.pkl", "mobile_debug_handles.pkl")


def code_note(names: Iterable[str]) -> str:
    """What a reader should know about an archive with members of these names."""
    names = list(names)
    code = sum(name.startswith("code/") for name in names)
    also = "".join(f", nor was {name}" for name in names if name in _UNREAD)
    return f"a TorchScript archive: its code ({code:,} files) was not looked at{also}"


def with_constants(root: Any, constants: Pickle, label: str) -> Any:
    """The tree of data.pkl with the constants below it, named c0, c1 and so on, as in the code.

    Raises:
        LayoutError: they are no tuple.
    """
    if type(constants.value) is not tuple:
        raise LayoutError(f"its constants are {short(constants.value)}", source=label)
    for record in constants.persistent_ids:
        if is_module(record):
            raise LayoutError("a class stands where a storage should", source=label)
        storage = storage_of(record)
        record.meaning = storage._replace(key=CONSTANTS_DIRECTORY + storage.key)
    if not constants.value:
        return root
    below: dict[Any, Any] = {}
    if type(root) is Call and type(root.func) is Global:
        below["__class__"] = f"{root.func.module}.{root.func.name}"
    below |= {label: child for label, child in children_of(root) if type(label) is str}
    name = "constants"
    while name in below:  # a module may have such a part
        name += "#2"
    return {**below, name: {f"c{n}": value for n, value in enumerate(constants.value)}}
