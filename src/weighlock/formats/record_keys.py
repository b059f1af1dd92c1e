"""Keys of a checkpoint's dicts: as plain values, and as parts of names.

A key may be a record: a number or text of numpy, a dtype, a member of an enum. Knows how those look
as records; where keys lie is `record_nodes`'.
"""

from typing import Any

import numpy as np

from weighlock.formats.pickle_records import (
    LARGEST_KEY,
    NUMBER_TUPLES,
    Call,
    Global,
    OddKey,
    PersistentId,
    SetRecord,
    check_key,
)
from weighlock.formats.rebuild_numpy import dtype_of, raw_bytes
from weighlock.formats.torch_names import canonical

__all__ = ["SIMPLE", "class_of", "label_of", "name_of", "plain_key"]

SIMPLE = {int, float, bool, str, bytes, type(None)}

_CONTAINERS: dict[type, str] = {dict: "dict", list: "list", tuple: "tuple"}
_LONGEST_KEY = 256
"""Characters of a key that is made of a record: no more than its record takes as it is."""
_MOST_PARTS = 8
_MOST_BITS = 256


def name_of(call: Call) -> tuple[str, str]:
    """Module and name of what a record would call."""
    func = _function(call)
    if func is None:
        return "", ""
    if func.module == "torch.jit._pickle" and call.args:  # a container with its type beside it
        kind = _CONTAINERS.get(type(call.args[0]))
        return ("builtins", kind) if kind else (func.module, func.name)
    return canonical(func.module, func.name)


def class_of(call: Call) -> str:
    """The same in one text, which is not made anew for each object."""
    func, (module, name) = _function(call), name_of(call)
    if func is not None and (module, name) == (func.module, func.name):
        return func.dotted
    return f"{module}.{name}".strip(".")


def _function(call: Call) -> Global | None:
    func = call.func
    if type(func) is PersistentId and type(func.pid) is tuple and len(func.pid) > 1:
        func = func.pid[1]  # ('module', class, file, source)
    return func if type(func) is Global else None


def plain_key(key: Any, *, crowded: bool = False) -> Any:
    """A key as a plain value: itself where it is one, else a text.

    Where it is `crowded`, tuples that can be made to share a hash are texts.
    """
    value = _simple(key)
    if type(value) in SIMPLE:
        return value
    parts = _parts(value) if type(value) is tuple else None
    if parts is None or (crowded and check_key(parts, NUMBER_TUPLES)):
        return label_of(key)
    return parts


def _simple(key: Any) -> Any:
    """What a record stands for, if it is a simple value; an int that could be slow as its text."""
    if type(key) is Call:  # protocol 2 has no bytes, and makes them of a text
        raw = raw_bytes(key, _LONGEST_KEY)
        return _scalar(key) if raw is None else raw
    if type(key) is OddKey:
        key = key.value
    if type(key) is int and abs(key) > LARGEST_KEY:
        bits = key.bit_length()
        return str(key) if bits <= _MOST_BITS else f"an int of {bits:,} bits"
    return key


def _scalar(call: Call) -> Any:
    """The value of a number or text of numpy; the record itself if it is none."""
    if name_of(call) != ("numpy._core.multiarray", "scalar") or len(call.args) != 2:
        return call
    record, data = call.args[0], raw_bytes(call.args[1], 4 * _LONGEST_KEY)
    if data is None or not data or len(data) > 4 * _LONGEST_KEY:
        return call
    dtype = dtype_of(record)
    if dtype is not None:
        value = np.frombuffer(data, dtype)[0].item() if len(data) == dtype.itemsize else call
        return str(value) if type(value) is complex else value  # complex ones may share a hash
    code = record.args[0] if type(record) is Call and record.args else None
    if type(code) is not str or code[:1] not in ("U", "S"):
        return call
    if code[0] == "S":
        return data.rstrip(b"\0")
    state = record.states[-1] if record.states else None
    is_big = type(state) is tuple and len(state) > 1 and state[1] == ">"
    try:
        return data.decode("utf-32-be" if is_big else "utf-32-le").rstrip("\0")
    except UnicodeDecodeError:
        return call


def label_of(key: Any) -> str:
    """A key as a part of a name."""
    key = _simple(key)
    if type(key) is str:
        return key
    if type(key) is bytes:
        return key.decode("utf-8", "backslashreplace")
    if type(key) in (int, bool, float, type(None)):
        return str(key)
    if type(key) is tuple:
        return _listed(key) or "tuple"
    if type(key) is Global:
        return key.dotted
    if type(key) is SetRecord:
        return f"frozenset{_listed(key.values)}"
    return _call_label(key) if type(key) is Call else type(key).__name__


def _call_label(call: Call) -> str:
    """The name of what is called, with its arguments where they are few and simple."""
    name, args = name_of(call)[1][:_LONGEST_KEY], call.args
    if name == "dtype":
        args = args[:1]  # the others say how to copy it
    if name == "getattr" and len(args) == 2 and type(args[0]) is Global and type(args[1]) is str:
        return f"{args[0].name}.{args[1]}"[:_LONGEST_KEY]
    if len(args) == 1 and type(args[0]) in (list, tuple):
        args = args[0]  # the elements of a set or a size
    return f"{name}{_listed(args)}" if args else name


def _listed(values: Any) -> str:
    """Simple values in brackets; nothing if they are many, long or something else."""
    parts = _parts(values)
    if parts is None or any(type(p) in (str, bytes) and len(p) > _LONGEST_KEY for p in parts):
        return ""
    return f"({', '.join(map(label_of, parts))})"


def _parts(values: Any) -> tuple[Any, ...] | None:
    """A few values as simple ones; None if they are many or something else."""
    if len(values) > _MOST_PARTS:
        return None
    parts = tuple(map(_simple, values))
    return parts if all(type(part) in SIMPLE for part in parts) else None
