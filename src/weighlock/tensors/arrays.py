"""Numpy arrays as the bytes a file holds, and back. Knows arrays and dtypes; no specs, no I/O."""

import math
import mmap
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from weighlock.tensors.dtypes import DType

if TYPE_CHECKING:
    from weighlock.tensors.torch import Tensor

__all__ = [
    "HUGE_PAGE",
    "Array",
    "SlicedArray",
    "array_pieces",
    "byte_view",
    "empty",
    "flat_bytes",
    "is_masked",
    "own_pages",
    "pack_f4",
    "shares_elements",
    "unpack_f4",
]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

_LARGE_BYTES = 4 * 1024 * 1024
"""From here on numpy asks for huge pages."""

HUGE_PAGE = 2 * 1024 * 1024
"""Bytes of a page that takes one fault where small ones take 512."""

_WASTE = 32
"""The last huge page is used up to this fraction of an array, or small pages are better."""

_REGISTERED = 2
"""What `dtype.isbuiltin` says of a type that a package registered with numpy."""


class SlicedArray(np.ndarray[Any, np.dtype[Any]]):
    """What `ref[…]` returns: a numpy array that can also become a torch tensor.

    Code written for the lazy slices of `safetensors` calls `.to(device=…, dtype=…)` on what it
    sliced; transformers does. Everything else about it is numpy's, and results of arithmetic are
    plain arrays.
    """

    def to(self, device: object = None, dtype: object = None) -> "Tensor":
        """The slice as a torch tensor, on that device and in that dtype."""
        from weighlock.tensors.torch import from_array

        return from_array(self.view(np.ndarray), device=device, dtype=dtype)

    def __array_wrap__(
        self, array: Array, context: object = None, return_scalar: bool = False
    ) -> Any:
        plain = array.view(np.ndarray)
        return plain[()] if return_scalar else plain


def is_masked(value: object) -> bool:
    """Whether this is one of numpy's masked arrays, of which a file would hold no mask.

    Does not import their module, which takes as long as half of numpy: without it there are none.
    """
    kind = getattr(sys.modules.get("numpy.ma"), "MaskedArray", ())
    return type(value) is not np.ndarray and isinstance(value, kind)


def flat_bytes(array: Array) -> Array:
    """The bytes of a C-contiguous array as an array, without a copy."""
    return array.reshape(-1).view(np.uint8)


def byte_view(array: Array) -> memoryview:
    """The bytes of a C-contiguous array, without a copy.

    The view goes through uint8, as the types of ml_dtypes do not speak the buffer protocol.
    """
    return memoryview(flat_bytes(array))  # type: ignore[arg-type]


def shares_elements(shape: Sequence[int], steps: Sequence[int], width: int) -> bool:
    """Whether elements of such an array may lie over each other: what fills it would lose some.

    Those of no view that slices and transposes make of a plain array do.

    Args:
        shape: of the array.
        steps: bytes from one element to the next, along each axis.
        width: bytes of an element.
    """
    reach = width
    for step, count in sorted((abs(s), n) for s, n in zip(steps, shape, strict=True) if n != 1):
        if step < reach:
            return 0 not in shape
        reach += step * (count - 1)
    return False


def empty(shape: tuple[int, ...], dtype: "np.dtype[Any]") -> Array:
    """An uninitialised array. `np.empty` gets huge pages, `bytearray` does not: twice as fast.

    A large one begins where a huge page does. Elsewhere, half of 4 MiB would come in small pages,
    with a fault for each. What is reserved beyond the array is never touched: it takes no memory.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _LARGE_BYTES or -nbytes % HUGE_PAGE > nbytes // _WASTE:
        return np.empty(shape, dtype)
    reserved = np.empty(nbytes + HUGE_PAGE, np.uint8)
    start = -reserved.ctypes.data % HUGE_PAGE
    return reserved[start : start + nbytes].view(dtype).reshape(shape)


def own_pages(nbytes: int) -> memoryview:
    """Memory in pages of its own, which are gone when it is.

    Of what many threads make and drop, malloc keeps the room, for each thread apart.
    """
    return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def array_pieces(array: Array, dtype: DType, max_bytes: int) -> Iterator[memoryview]:
    """The file's bytes of an array, row-major and little-endian, in order.

    A contiguous array comes as one view without a copy; any other through one buffer of at most
    `max_bytes`, which is used again for each piece.
    """
    if dtype is DType.F4:
        yield from _packed_pieces(array, max_bytes)
        return
    if array.flags.c_contiguous and array.dtype == dtype.numpy:
        yield byte_view(array)
        return
    width = array.dtype.itemsize
    # Integers of the same width stand in for the types of ml_dtypes, which nditer cannot buffer.
    raw = array.view(f"u{width}") if array.dtype.isbuiltin == _REGISTERED else array
    for block in np.nditer(  # type: ignore[call-overload]
        raw,
        flags=["external_loop", "buffered", "zerosize_ok"],
        op_flags=[["readonly", "contig"]],
        op_dtypes=[raw.dtype.newbyteorder("<")],
        casting="equiv",
        order="C",
        buffersize=max(1, max_bytes // width),
    ):
        yield byte_view(np.asarray(block))


def _packed_pieces(array: Array, max_bytes: int) -> Iterator[memoryview]:
    codes = array.view(np.uint8)
    flat = codes.reshape(-1) if codes.flags.c_contiguous else codes.flat
    for first in range(0, array.size, 2 * max_bytes):
        yield byte_view(pack_f4(flat[first : first + 2 * max_bytes]))


def pack_f4(codes: Array) -> Array:
    """Two 4-bit codes to a byte, the first in the low half, as torch's float4_e2m1fn_x2 has it."""
    packed: Array = codes[0::2] & 0x0F
    packed |= codes[1::2] << 4
    return packed


def unpack_f4(packed: Array, out: Array) -> None:
    """The inverse of `pack_f4`, into a uint8 array of twice the length."""
    np.bitwise_and(packed, 0x0F, out=out[0::2])
    np.right_shift(packed, 4, out=out[1::2])
