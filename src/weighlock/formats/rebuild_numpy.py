"""What numpy's records mean: arrays and scalars whose bytes lie in the pickle itself.

By exact names, like `rebuild`; nothing of numpy is called to find out.
"""

import math
from typing import Any

import numpy as np

from weighlock.errors import LayoutError
from weighlock.formats.meanings import (
    InlineTensor,
    Meaning,
    Text,
    Unreadable,
    check_product,
    ints,
    short,
)
from weighlock.formats.pickle_records import Call, Global
from weighlock.formats.torch_names import ML_DTYPES, canonical
from weighlock.tensors.dtypes import DType

__all__ = [
    "BUILDERS",
    "NOT_BYTES",
    "bytes_of",
    "check_length",
    "dtype_of",
    "objects_of",
    "raw_bytes",
]

NOT_BYTES = "a numpy array whose data is not bytes"


def _numpy(call: Call) -> Meaning | None:
    """`_reconstruct(ndarray, (0,), b'b')` with state (version, shape, dtype, fortran, data)."""
    state = call.states[-1] if call.states else None
    if type(state) is not tuple or len(state) != 5:
        return None
    dtype = dtype_of(state[2])
    if dtype is None:
        return Unreadable("a numpy array of objects or of a type that is not a number")
    return _inline(dtype, state[1], _data_of(state[4]), "F" if state[3] is True else "C")


def objects_of(call: Call) -> list[Any]:
    """What an array of objects holds: in place of its data stands a list."""
    state = call.states[-1] if call.states else None
    if type(state) is tuple and len(state) == 5 and type(state[4]) is list:
        return state[4]
    return []


def _from_buffer(call: Call) -> Meaning | None:
    """`_frombuffer(data, dtype, shape, order[, axes])`: with axes, the bytes are of that shape."""
    if len(call.args) not in (4, 5):
        return None
    data, dtype_record, shape, order, *rest = call.args
    dtype = dtype_of(dtype_record)
    if dtype is None:
        return Unreadable("a numpy array of a type that is not a number")
    if order != "K" or not rest or rest[0] is None:
        return _inline(dtype, shape, _data_of(data), order)
    sizes, axes = ints(shape, "size"), ints(rest[0], "order of axes")
    if len(sizes) > _MOST_AXES or sorted(axes) != list(range(len(sizes))):
        raise LayoutError(f"a numpy array of {short(sizes)} has its axes as {short(axes)}")
    return _inline(dtype, tuple(sizes[axis] for axis in axes), _data_of(data), axes)


def _scalar(call: Call) -> Meaning | None:
    if len(call.args) != 2:
        return None
    dtype = dtype_of(call.args[0])
    if dtype is None:
        return None
    return _inline(dtype, (), _data_of(call.args[1]))


def _data_of(record: Any) -> bytes | Text | None:
    """The bytes of an array, or the text they are made of."""
    if type(record) is str:  # Python 2 had one type for both; what is UTF-8 was read as text
        return Text(record, "utf-8")
    found = _carried(record)
    if not isinstance(found, Call):
        return found
    text = found.args[0]
    return Text(text, "latin1") if type(text) is str else None


_MOST_AXES = 64
"""As numpy has them."""

_SMALL = 256
"""Bytes of an array that are made of a text at once: no more than its record takes as it is."""


def _inline(
    dtype: "np.dtype[Any]", shape: Any, data: bytes | Text | None, order: Any = "C"
) -> Meaning:
    """An array whose bytes lie in an order: "C", "F", or which of their axes each of its own is."""
    sizes = ints(shape, "size")
    check_product(sizes)
    axes = order if type(order) is tuple else None
    if order == "F" and len(sizes) > 1:
        axes = tuple(reversed(range(len(sizes))))
    wanted = math.prod(sizes) * dtype.itemsize
    if isinstance(data, Text) and len(data.text) <= wanted <= _SMALL:
        data = bytes_of(data)
    if data is None:
        return Unreadable(NOT_BYTES)
    if isinstance(data, bytes):
        check_length(dtype, sizes, len(data))
        return InlineTensor(dtype, sizes, axes, data)
    if data.encoding == "latin1" or len(data.text) > wanted:
        check_length(dtype, sizes, len(data.text))
    return InlineTensor(dtype, sizes, axes, b"", data)


def check_length(dtype: "np.dtype[Any]", shape: tuple[int, ...], found: int) -> None:
    """Raise `LayoutError` unless so many bytes are what an array needs."""
    wanted = math.prod(shape) * dtype.itemsize
    if wanted != found:
        raise LayoutError(
            f"a numpy array of {dtype} {short(shape)} takes {wanted:,} bytes, {found:,} are there"
        )


def bytes_of(text: Text) -> bytes | None:
    """The bytes a text stands for; None if it stands for none."""
    try:
        return text.text.encode(text.encoding)
    except UnicodeEncodeError:
        return None


def dtype_of(record: Any) -> "np.dtype[Any] | None":
    """A number type from `dtype('f4', False, True)` and its state; None for anything else.

    In place of the code stands the class of a type that numpy lacks.
    """
    if type(record) is not Call or type(record.func) is not Global or not record.args:
        return None
    module, name = canonical(record.func.module, record.func.name)
    code = record.args[0]
    if (module, name) != ("numpy", "dtype"):
        return None
    state = record.states[-1] if record.states else None
    order = state[1] if type(state) is tuple and len(state) > 1 else "<"
    if type(code) is Global:
        is_read = code.module == "ml_dtypes" and code.name in ML_DTYPES and order != ">"
        return DType.of(code.name).numpy if is_read else None
    if type(code) is not str or code not in _NUMBERS:
        return None
    return np.dtype((">" if order == ">" else "<") + code if code != "b1" else "?")


_NUMBERS = {
    *("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"),
}


def raw_bytes(record: Any, most: int | None = None) -> bytes | None:
    """Bytes, also as `encode(text, 'latin1')`, in which older pickles carry them.

    Args:
        record: what may be such.
        most: texts that are longer are none. Thousands of records may each make a copy of one.
    """
    found = _carried(record)
    if not isinstance(found, Call):
        return found
    text = found.args[0]
    is_long = most is not None and type(text) is str and len(text) > most
    return None if is_long else _encoded(found)


def _carried(record: Any) -> bytes | Call | None:
    """Bytes, or the record that makes them of a text; None if it is neither."""
    for _ in range(8):  # bytearray(bytearray(…)) may be nested as deep as somebody likes
        if type(record) is bytes:
            return record
        if type(record) is not Call or type(record.func) is not Global:
            return None
        name = canonical(record.func.module, record.func.name)
        args = record.args
        is_of_text = len(args) in (2, 3) and type(args[0]) is type(args[1]) is str
        if name in _OF_TEXT and is_of_text and args[1].lower() in _LATIN1 and args[2:] in _STRICT:
            return record
        if name in (("builtins", "bytes"), ("builtins", "bytearray")) and not args:
            return b""
        if name != ("builtins", "bytearray"):
            return None
        record = args[0]
    return None


_OF_TEXT = {("_codecs", "encode"), ("builtins", "bytearray"), ("builtins", "bytes")}
"""With a text and an encoding, and perhaps what to do about errors."""

_LATIN1 = {"latin1", "latin-1", "latin_1", "iso-8859-1", "iso8859-1", "iso_8859_1", "l1"}
_STRICT = ((), ("strict",))


def _encoded(record: Call) -> bytes | None:
    """The bytes of a text, made once for each record."""
    found: bytes | None = getattr(record, "known", None)
    if found is None and type(record.args[0]) is str:
        found = bytes_of(Text(record.args[0], "latin1"))
        if found is not None:
            record.known = found
    return found


BUILDERS = {
    ("numpy._core.multiarray", "_reconstruct"): _numpy,
    ("numpy._core.numeric", "_frombuffer"): _from_buffer,
    ("numpy._core.multiarray", "scalar"): _scalar,
}
"""Records that are arrays, by name."""
