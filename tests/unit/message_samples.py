"""Objects for messages, and a way to say that two are the same to the last bit."""

import math
from collections import OrderedDict
from datetime import UTC, date, datetime, time, timedelta, timezone

import ml_dtypes
import numpy as np

import weighlock
from weighlock.tensors.ref import TensorRef

VALUES = [
    *(None, True, False, 0, -1, 255, 2**63, 2**64 - 1, -(2**63), 2**64, -(2**63) - 1, 2**1000),
    *(
        0.0,
        -0.0,
        1e300,
        math.inf,
        -math.inf,
        math.nan,
        "",
        "naïve ☃",
        "\0",
        b"",
        b"\xff",
        b"z" * 9000,
    ),
    *([], [[]], [1, "a", None], (), (1, (2, [3])), set(), {1, 2}, frozenset({"a", ("b", 1)})),
    *({}, {"a": {}}, {1: "int", None: "none", (1, "a"): "tuple", b"k": 1, 1.5: 2, True + 1: 3}),
    *(1 + 2j, complex(math.nan, -0.0), OrderedDict(a=1, b=[2])),
    *(datetime(2026, 1, 2, 3, 4, 5, 6), datetime(2026, 1, 2, tzinfo=UTC)),
    datetime(2026, 1, 2, tzinfo=timezone(timedelta(hours=5, minutes=30, seconds=1))),
    datetime(2026, 10, 25, 2, 30, fold=1),
    *(date(2026, 1, 2), time(1, 2, 3), timedelta(-1, 2, 3)),
    *(np.float32(0.1), np.int64(-5), np.bool_(True), np.float16(1), np.complex64(1j), np.uint8(3)),
    *(np.str_("text"), np.bytes_(b"raw"), np.datetime64("2026-01-02T03"), np.timedelta64(5, "ms")),
    ml_dtypes.bfloat16(1.5),
    *(np.dtype("<f4"), np.dtype(">i8"), np.dtype("S7"), np.dtype("<U3"), np.dtype("M8[ns]")),
    *(np.dtype(ml_dtypes.bfloat16), np.dtype(bool)),
]

ARRAYS = [
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.array(2.5),
    np.zeros((0, 3), np.int8),
    np.arange(24.0).reshape(2, 3, 4).transpose(2, 0, 1),
    np.arange(5, dtype=">i4"),
    np.array([1, -2, 0.5], ml_dtypes.bfloat16),
    np.array([1, -2, 0.5, 6], ml_dtypes.float4_e2m1fn),
    np.array([True, False]),
    np.array([1 + 2j], np.complex128),
]


def same(left, right):
    """Equal in type and value, NaN and signed zeros included; a ref is what it loads."""
    if isinstance(left, TensorRef) or isinstance(right, TensorRef):
        left = left.load() if isinstance(left, TensorRef) else left
        right = right.load() if isinstance(right, TensorRef) else right
    if isinstance(left, weighlock.Catalog):
        return isinstance(right, weighlock.Catalog) and same(dict(left), dict(right))
    if isinstance(left, np.ndarray):
        return (
            isinstance(right, np.ndarray)
            and left.shape == right.shape
            and left.dtype.newbyteorder("<") == right.dtype.newbyteorder("<")
            and left.astype(left.dtype.newbyteorder("<")).tobytes()
            == right.astype(right.dtype.newbyteorder("<")).tobytes()
        )
    if isinstance(left, OrderedDict):
        left = dict(left)
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return _text(tuple(left)) == _text(tuple(right)) and all(
            same(left[key], right[key]) for key in left
        )
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, np.generic):
        return left.dtype == right.dtype and left.tobytes() == right.tobytes()
    if isinstance(left, (datetime, time)):
        return left == right and left.fold == right.fold and left.utcoffset() == right.utcoffset()
    return _text(left) == _text(right)


def _text(value):
    """As repr, with sets in one order."""
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__}({sorted(map(_text, value))})"
    return f"({','.join(map(_text, value))})" if type(value) is tuple else repr(value)
