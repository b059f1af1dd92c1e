"""A tensor as a sequence of equal blocks of elements, for work that goes through all of it."""

from collections.abc import Iterator

import numpy as np

from weighlock.tensors.arrays import Array, empty, unpack_f4
from weighlock.tensors.dtypes import DType
from weighlock.tensors.ref import TensorRef

__all__ = ["blocks"]


def blocks(ref: TensorRef, elements: int) -> Iterator[Array]:
    """Flat arrays of exactly `elements` elements in row-major order, the last one shorter.

    Each is valid until the next is asked for. F6 comes as packed bytes; `elements` counts those
    then.
    """
    if ref.dtype is DType.F4:
        elements += elements % 2
    values = (_values(piece, ref.dtype) for piece in ref.pieces(_file_bytes(ref.dtype, elements)))
    carry = empty((elements,), ref.dtype.numpy)
    filled = 0
    for piece in values:
        while piece.size:
            if filled == 0 and piece.size >= elements:
                yield piece[:elements]
                piece = piece[elements:]
                continue
            taken = min(elements - filled, piece.size)
            carry[filled : filled + taken] = piece[:taken]
            piece = piece[taken:]
            filled += taken
            if filled == elements:
                yield carry
                filled = 0
    if filled:
        yield carry[:filled]


def _file_bytes(dtype: DType, elements: int) -> int:
    return elements // 2 if dtype is DType.F4 else elements * dtype.numpy.itemsize


def _values(piece: memoryview, dtype: DType) -> Array:
    raw = np.frombuffer(piece, np.uint8)
    if dtype is not DType.F4:
        return raw.view(dtype.numpy)
    codes = empty((2 * raw.size,), np.dtype(np.uint8))
    unpack_f4(raw, codes)
    return codes.view(dtype.numpy)
