"""Numbers of every dtype as float64 or float32, and back, rounded once. Pure arithmetic on arrays.

A *unit* is what arithmetic is done on: an element; one of the two parts of a complex number; a byte
of packed F4 or F6.
"""

import functools

import numpy as np

from weighlock.tensors.arrays import Array, pack_f4, unpack_f4
from weighlock.tensors.dtypes import DType
from weighlock.tensors.spec import TensorSpec

__all__ = [
    "as_numbers",
    "is_averaged",
    "narrow",
    "numbers_per_unit",
    "put_bf16_of_single",
    "to_odd",
    "unit_bytes",
    "unit_dtype",
    "units_of",
    "widen",
]

_HALVES = {DType.C64: DType.F32, DType.C128: DType.F64}

_NEAR_LEAST_E8M0 = 1.5 * 2.0**-127
"""What is less is nearer to the least number of F8_E8M0 than to the next."""

_NAN = 0x7FC0
_LEAST_NORMAL = np.uint16(0x0080)

_DROPPED = np.uint64(45)
"""Bits of float64 that bf16 does not have."""
_BELOW_HALF = np.uint64((1 << 44) - 1)
_KEPT = np.uint64((1 << 64) - (1 << 45))

_STEP = 64 * 1024
"""Numbers that are rounded at once: what is needed for that stays near a core."""


def is_averaged(dtype: DType) -> bool:
    """Whether elements are numbers with a mean: floating-point or complex, and not packed F6."""
    return dtype.is_complex or (dtype.is_float and (not dtype.is_packed or dtype is DType.F4))


def unit_dtype(dtype: DType) -> DType:
    """The dtype of one unit; bytes for F6, in which nobody says where a number lies."""
    if dtype.is_packed and dtype is not DType.F4:
        return DType.U8
    return _HALVES.get(dtype, dtype)


def unit_bytes(dtype: DType) -> int:
    """Bytes of one unit in a file."""
    return max(1, unit_dtype(dtype).bits // 8)


def units_of(spec: TensorSpec) -> int:
    """How many units a tensor has."""
    return spec.nbytes // unit_bytes(spec.dtype)


def numbers_per_unit(dtype: DType) -> int:
    """How many numbers a unit holds: two for packed F4."""
    return 2 if dtype is DType.F4 else 1


def as_numbers(raw: Array, dtype: DType) -> Array:
    """A file's bytes as numpy's numbers. Whatever byte is not 0 is true."""
    return raw != 0 if dtype is DType.BOOL else raw.view(unit_dtype(dtype).numpy)


def widen(raw: Array, dtype: DType, out: Array) -> None:
    """The numbers in a file's bytes, as floats: exact in float64, except for 64-bit integers.

    Args:
        raw: bytes of whole units.
        dtype: what they are.
        out: an array of floats with room for them.
    """
    kind = unit_dtype(dtype)
    if kind is DType.BF16:
        np.copyto(out, _bf16_as_float32(raw.view(np.uint16)), casting="same_kind")
    elif kind is DType.F4:
        codes = np.empty(2 * raw.size, np.uint8)
        unpack_f4(raw, codes)
        np.copyto(out, codes.view(kind.numpy), casting="unsafe")
    elif kind.is_float and kind.bits == 8:
        np.take(_all_of(kind, out.dtype), raw, out=out, mode="clip")  # which needs no copy
    else:
        np.copyto(out, as_numbers(raw, dtype), casting="unsafe")


@functools.cache
def _all_of(dtype: DType, kind: "np.dtype[np.floating]") -> Array:
    """The 256 numbers of a dtype of eight bits. Looked up, they take a fourth of a cast's time."""
    return np.arange(256, dtype=np.uint8).view(dtype.numpy).astype(kind)


def narrow(values: Array, dtype: DType, out: Array) -> None:
    """Floats as a file's bytes, rounded to nearest, ties to even. What overflows becomes infinite.

    Or NaN, or the largest number, in dtypes without infinity.

    Args:
        values: float64 or float32.
        dtype: a dtype of floating-point or complex numbers.
        out: bytes, exactly as many as needed.
    """
    kind = unit_dtype(dtype)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if kind.bits <= 8 and values.dtype == np.float64:
            values = to_odd(values)  # ml_dtypes would round to float32 first, and then once more
        if kind is DType.BF16:
            _put_bf16(values, out.view(np.uint16))
        elif kind is DType.F4:
            out[...] = pack_f4(values.astype(kind.numpy).view(np.uint8))
        else:
            np.copyto(out.view(kind.numpy), values, casting="unsafe")
            if kind is DType.F8_E8M0:  # ml_dtypes rounds all beyond its least number up
                out[(values > 0) & (values < _NEAR_LEAST_E8M0)] = 0


def to_odd(values: Array) -> Array:
    """Finite float64 as float32, cut off, with the last bit set where something was.

    Rounded once more, to fewer bits, it gives what rounding the float64 would.
    """
    single = values.astype(np.float32)
    exact, rounded = np.abs(values), np.abs(single)
    bits = single.view(np.uint32)
    bits -= rounded > exact
    bits |= rounded != exact
    return single


def _bf16_as_float32(bits: Array) -> Array:
    wide = bits.astype(np.uint32)
    wide <<= np.uint32(16)
    values: Array = wide.view(np.float32)
    return values


def put_bf16_of_single(values: Array, out: Array, room: Array) -> None:
    """Round finite float32 into bits of bf16.

    Args:
        values: the numbers.
        out: for uint16, as many.
        room: uint32, as many; for use on the way.
    """
    bits = values.view(np.uint32)
    np.right_shift(bits, np.uint32(16), out=room)
    room &= np.uint32(1)
    room += np.uint32(0x7FFF)
    room += bits
    room >>= np.uint32(16)
    np.copyto(out, room, casting="unsafe")


def _put_bf16(values: Array, out: Array) -> None:
    """Round float32 or float64 into bits of bf16."""
    for begin in range(0, values.size, _STEP):
        some, bits = values[begin : begin + _STEP], out[begin : begin + _STEP]
        if values.dtype == np.float32:
            put_bf16_of_single(some, bits, np.empty(some.size, np.uint32))
        else:
            _put_bf16_of_double(some, bits)
        bits[np.isnan(some)] = _NAN  # adding may have carried it into the sign


def _put_bf16_of_double(values: Array, out: Array) -> None:
    # Rounded to eight bits as float64 is, on the bits of an integer; what is left fits float32.
    bits = values.view(np.uint64)
    rounded = bits >> _DROPPED
    rounded &= np.uint64(1)
    rounded += _BELOW_HALF
    rounded += bits
    rounded &= _KEPT
    wide = rounded.view(np.float64).astype(np.float32).view(np.uint32)
    wide >>= np.uint32(16)
    np.copyto(out, wide, casting="unsafe")
    # Next to zero bf16 has fewer than eight bits.
    few = np.flatnonzero(((out & np.uint16(0x7FFF)) <= _LEAST_NORMAL) & (values != 0))
    if few.size:
        out[few] = to_odd(values[few]).astype(DType.BF16.numpy).view(np.uint16)
