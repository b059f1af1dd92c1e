"""Values without parts that msgpack lacks: long ints, complex numbers, times, numpy's and torch's.

Each becomes a marked list of plain values, and comes back only from exactly those. Torch is never
imported: where it is not loaded, its sizes and dtypes come as stand-ins that travel on unchanged.
"""

import re
from collections.abc import Callable, Sequence
from datetime import date, datetime, time, timedelta
from typing import Any

import numpy as np

from weighlock.errors import MessageInvalid, UnsupportedDType
from weighlock.messages.wire import Kind
from weighlock.tensors.dtypes import DType
from weighlock.tensors.torch import dtype_named, size_and_dtype

__all__ = ["TorchDType", "TorchSize", "leaf_of", "value_of"]

_REGISTERED = 2  # what `dtype.isbuiltin` says of a type that a package registered with numpy

# Numbers of up to 8 bytes a part, dates, durations, fixed texts; what else numpy has is either a
# container, as wide as the platform likes, or Python objects.
_DTYPE = re.compile(
    r"\|b1|[|<>][iu][1248]|[<>]f[248]|[<>]c(?:8|16)|[<>][Mm]8(?:\[\d*[A-Za-z]{1,2}\])?|\|S\d{1,9}|[<>]U\d{1,9}"
)

_TORCH_DTYPES = frozenset(
    {dtype.torch_name for dtype in DType}
    | {"complex32", "qint8", "quint8", "qint32", "quint4x2", "quint2x4", "float8_e8m0fnu"}
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}
)


class TorchSize(tuple[int, ...]):
    """A `torch.Size` where torch is not loaded."""

    __slots__ = ()


class TorchDType(str):
    """A torch dtype where torch is not loaded: its name."""

    __slots__ = ()


def leaf_of(value: object) -> tuple[Kind, list[Any]] | None:
    """A value's kind and its plain parts; None if it is no leaf."""
    known = _EXACT.get(type(value))
    if known is not None:
        kind, parts_of = known
        return kind, parts_of(value)
    if isinstance(value, np.generic):
        return _scalar(value)
    if isinstance(value, np.dtype):
        name = _name_of(value)
        return None if name is None else (Kind.NUMPY_DTYPE, [name])
    torch = size_and_dtype()
    if torch is not None and type(value) is torch[0]:
        return Kind.TORCH_SIZE, list(value)  # type: ignore[call-overload]
    if torch is not None and isinstance(value, torch[1]):
        return Kind.TORCH_DTYPE, [str(value).removeprefix("torch.")]
    return None


def value_of(kind: Kind, parts: Sequence[Any]) -> object:
    """The value of a kind and its plain parts.

    Raises:
        MessageInvalid: they are not what `leaf_of` would give.
    """
    if not all(type(part) in (int, float, str, bytes) for part in parts):
        raise MessageInvalid(f"{kind.name} is not made of plain values")
    try:
        value = _VALUES[kind](*parts)
        back = leaf_of(value)
    except (TypeError, ValueError, OverflowError, AttributeError, UnsupportedDType) as error:
        raise MessageInvalid(f"{kind.name} cannot be made of {parts!r:.200}: {error}") from error
    if back is None or back[0] is not kind or not _same(back[1], parts):
        raise MessageInvalid(f"{kind.name} of {parts!r:.200} is not in its one encoding")
    return value


def _same(left: Sequence[Any], right: Sequence[Any]) -> bool:
    # By type too: 1, 1.0 and True are equal. NaN is not equal to itself, yet is the same.
    return [(type(part), repr(part)) for part in left] == [
        (type(part), repr(part)) for part in right
    ]


def _int_parts(value: int) -> list[Any]:
    return [
        value.to_bytes(
            (value if value >= 0 else ~value).bit_length() // 8 + 1, "little", signed=True
        )
    ]


def _int(data: bytes) -> int:
    value = int.from_bytes(data, "little", signed=True)
    if -(1 << 63) <= value < 1 << 64:
        raise ValueError("a short int is written as itself")
    return value


def _folded(value: "datetime | time") -> list[Any]:
    text = value.isoformat()
    return [text, 1] if value.fold else [text]


def _datetime(text: str, fold: int = 0) -> datetime:
    return datetime.fromisoformat(text).replace(fold=fold)


def _time(text: str, fold: int = 0) -> time:
    return time.fromisoformat(text).replace(fold=fold)


def _timedelta(days: int, seconds: int, microseconds: int) -> timedelta:
    return timedelta(days, seconds, microseconds)


def _name_of(dtype: "np.dtype[Any]") -> str | None:
    """What a numpy dtype is called in messages; None for those that do not travel."""
    if dtype.isbuiltin == _REGISTERED:
        try:
            return dtype.name if DType.of(dtype).numpy == dtype else None
        except UnsupportedDType:
            return None
    return dtype.str if _DTYPE.fullmatch(dtype.str) and dtype.names is None else None


def _dtype(name: str) -> "np.dtype[Any]":
    if _DTYPE.fullmatch(name):
        return np.dtype(name)
    found = DType.of(name).numpy
    if found.isbuiltin != _REGISTERED:
        raise ValueError("numpy has its own name for it")
    return found


def _scalar(value: "np.generic[Any]") -> tuple[Kind, list[Any]] | None:
    if isinstance(value, np.str_):
        return Kind.NUMPY_SCALAR, ["str", str(value)]
    if isinstance(value, np.bytes_):
        return Kind.NUMPY_SCALAR, ["bytes", bytes(value)]
    name = _name_of(value.dtype)
    if name is None:
        return None
    return Kind.NUMPY_SCALAR, [name, np.asarray(value).tobytes()]


def _from_scalar(name: str, data: Any) -> "np.generic[Any]":
    if name == "str":
        return np.str_(data)
    if name == "bytes":
        return np.bytes_(data)
    dtype = _dtype(name)
    if type(data) is not bytes or len(data) != dtype.itemsize or dtype.kind in "SU":
        raise ValueError(f"takes {dtype.itemsize} bytes")
    if dtype.kind == "b" and data not in (b"\0", b"\1"):
        raise ValueError("is neither true nor false")
    scalar: np.generic[Any] = np.frombuffer(data, dtype)[0]
    return scalar


def _torch_size(*sizes: int) -> object:
    if any(type(size) is not int for size in sizes):
        raise TypeError("sizes are ints")
    torch = size_and_dtype()
    return TorchSize(sizes) if torch is None else torch[0](sizes)


def _torch_dtype(name: str) -> object:
    # From a list: looking a stranger's name up in torch could import one of its modules.
    if name not in _TORCH_DTYPES:
        raise ValueError("torch has no such dtype")
    torch = size_and_dtype()
    return TorchDType(name) if torch is None else dtype_named(name)


_EXACT: dict[type, tuple[Kind, Callable[[Any], list[Any]]]] = {
    int: (Kind.INT, _int_parts),
    complex: (Kind.COMPLEX, lambda value: [value.real, value.imag]),
    datetime: (Kind.DATETIME, _folded),
    date: (Kind.DATE, lambda value: [value.isoformat()]),
    time: (Kind.TIME, _folded),
    timedelta: (Kind.TIMEDELTA, lambda value: [value.days, value.seconds, value.microseconds]),
    TorchSize: (Kind.TORCH_SIZE, list),
    TorchDType: (Kind.TORCH_DTYPE, lambda value: [str(value)]),
}

_VALUES: dict[Kind, Callable[..., object]] = {
    Kind.INT: _int,
    Kind.COMPLEX: complex,
    Kind.DATETIME: _datetime,
    Kind.DATE: date.fromisoformat,
    Kind.TIME: _time,
    Kind.TIMEDELTA: _timedelta,
    Kind.NUMPY_SCALAR: _from_scalar,
    Kind.NUMPY_DTYPE: _dtype,
    Kind.TORCH_SIZE: _torch_size,
    Kind.TORCH_DTYPE: _torch_dtype,
}
