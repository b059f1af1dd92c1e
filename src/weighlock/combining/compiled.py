"""Weighted sums and trimmed means by compiled code, where it was built. Knows how to call it.

`compiled.c` is compiled when the package is installed, if there is a compiler (`hatch_build.py`).
Without it all results are the same, bit for bit, and take 1.5 to 6 times as long. Whoever wants
to see that sets WEIGHLOCK_COMPILED=0.
"""

import ctypes
import functools
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from weighlock.combining.desk import Desk
from weighlock.combining.rounding import unit_dtype
from weighlock.tensors.arrays import Array
from weighlock.tensors.dtypes import DType

__all__ = ["is_built", "trimmed_mean", "weighted_sum"]

_LIBRARY = Path(__file__).with_name("_compiled.so")
_SOURCE = Path(__file__).with_name("compiled.c")

_KINDS = (DType.BF16, DType.F16, DType.F32, DType.F64)
"""In the order of `compiled.c`."""

_SORTED_COLUMNS = 16, 256
"""Columns that are sorted at once, at least and at the most: of eight rows 256 take 16 KiB."""
_SORTED_NUMBERS = 64 * 1024
"""Numbers that are, of however many rows, unless these are thousands: 512 KiB."""


def is_built() -> bool:
    """Whether there is compiled code to call."""
    return _functions() is not None


def weighted_sum(
    dtypes: tuple[DType, ...],
    weights: tuple[float, ...],
    dtype: DType,
    rows: Array,
    units: int,
    out: Array,
) -> bool:
    """Fill `out` with Σ weight · row, summed in float64 and rounded once.

    Args:
        dtypes: of the rows.
        weights: one for each row.
        dtype: of the result.
        rows: bytes, a row for each, equally far from each other.
        units: how many each holds.
        out: bytes for as many.

    Returns:
        Whether it is done. Not if there is no code for it, or if a result is not finite: then `out`
        holds nothing of use.

    Raises:
        ValueError: the rows or the result are shorter than that.
    """
    found, kinds = _functions(), _kinds_of((*dtypes, dtype))
    if found is None or kinds is None:
        return False
    if len(weights) != len(dtypes):
        raise ValueError(f"{len(weights)} weights for {len(dtypes)} rows")
    given = _given(dtypes, dtype, rows, units, out)
    return found.weighted_sum(len(dtypes), kinds, _weights_of(weights), *given) == 0


def trimmed_mean(
    dtypes: tuple[DType, ...], cut: int, rows: Array, units: int, out: Array, desk: Desk
) -> bool:
    """Fill `out` with the means of each column without its extremes, summed as above.

    Args:
        dtypes: of the rows; the first is that of the result.
        cut: how many are left out at each end.
        rows: bytes, a row for each, equally far from each other.
        units: how many each holds.
        out: bytes for as many.
        desk: buffers.

    Returns:
        Whether it is done. Not if there is no code for it, or if a number is not finite: then `out`
        holds nothing of use.

    Raises:
        ValueError: the rows or the result are shorter than that, or nothing would be left.
    """
    found, kinds = _functions(), _kinds_of((*dtypes, dtypes[0]))
    if found is None or kinds is None:
        return False
    count = len(dtypes)
    if not 0 <= 2 * cut < count:
        raise ValueError(f"of {count} rows, {cut} cannot be left out at each end")
    given = _given(dtypes, dtypes[0], rows, units, out)
    least, most = _SORTED_COLUMNS
    tile = max(least, min(most, _SORTED_NUMBERS // count))
    work = desk.array("sorted", ((count + 1) * tile,), np.float64)
    return found.trimmed_mean(count, kinds, cut, *given, work.ctypes.data, tile) == 0


def _given(
    dtypes: tuple[DType, ...], dtype: DType, rows: Array, units: int, out: Array
) -> tuple[int, int, int, int, int]:
    """What every function is given, checked: what lies beyond an array is not ours to touch."""
    widest = max(unit_dtype(each).bits // 8 for each in dtypes)
    if len(rows) != len(dtypes):
        raise ValueError(f"{len(rows)} rows of {len(dtypes)} dtypes")
    if rows.dtype != "u1" or rows.ndim != 2 or rows.strides[1] != 1:
        raise ValueError("rows must be bytes that lie one behind the other")
    if out.dtype != "u1" or out.strides != (1,) or not out.flags.writeable:
        raise ValueError("the result must be bytes one behind the other that may be written")
    room = rows.shape[1] // widest, out.size // (unit_dtype(dtype).bits // 8)
    if not 0 <= units <= min(room):
        raise ValueError(f"{units:,} units do not fit: {rows.shape[1]:,} and {out.size:,} bytes")
    kind = _KINDS.index(unit_dtype(dtype))
    return rows.ctypes.data, rows.strides[0], units, kind, out.ctypes.data


@functools.lru_cache(maxsize=64)  # asked for every block
def _kinds_of(dtypes: tuple[DType, ...]) -> bytes | None:
    """The numbers by which compiled code knows these dtypes; None if it does not know all."""
    kinds = [unit_dtype(each) for each in dtypes]
    return bytes(map(_KINDS.index, kinds)) if set(kinds) <= set(_KINDS) else None


@functools.lru_cache(maxsize=64)
def _weights_of(weights: tuple[float, ...]) -> "ctypes.Array[ctypes.c_double]":
    return (ctypes.c_double * len(weights))(*weights)


class _Functions(NamedTuple):
    weighted_sum: Callable[..., int]
    trimmed_mean: Callable[..., int]


@functools.cache
def _functions() -> _Functions | None:
    if os.environ.get("WEIGHLOCK_COMPILED") == "0":
        return None
    try:
        library = ctypes.CDLL(os.fspath(_LIBRARY))
        built_from = ctypes.c_uint32.in_dll(library, "weighlock_built_from").value
        found = _Functions(library.weighlock_weighted_sum, library.weighlock_trimmed_mean)
        if built_from != zlib.crc32(_SOURCE.read_bytes()):
            return None  # of another version: it may take and give other things
    except (OSError, ValueError, AttributeError):  # not built, or for another machine
        return None
    size, pointer, kinds, kind = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint8
    begin, block = (size, kinds), (pointer, size, size, kind, pointer)
    library.weighlock_weighted_sum.argtypes = (*begin, pointer, *block)
    library.weighlock_trimmed_mean.argtypes = (*begin, size, *block, pointer, size)
    return found
