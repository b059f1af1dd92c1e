"""A tensor that lies in several chunks, each a tensor of its own.

Knows where each chunk belongs; a slice asks only the chunks it touches, and only for that part.
Where chunks lie is their own business.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from weighlock.errors import LayoutError
from weighlock.tensors.arrays import Array, byte_view, empty
from weighlock.tensors.ref import PIECE_BYTES, TensorRef
from weighlock.tensors.slicing import Index, expand, narrow, row_blocks
from weighlock.tensors.spec import Layout, TensorSpec
from weighlock.tensors.tiling import check_tiling, overlap

__all__ = ["AssembledRef", "Chunk"]

_GATHERED_BYTES = 16 * 1024 * 1024
"""What is put together at a time where bytes are wanted in order; a chunk's part comes on top."""


class Chunk(NamedTuple):
    """A part of a tensor."""

    offsets: tuple[int, ...]
    """Where its first element belongs."""
    ref: TensorRef


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class AssembledRef(TensorRef):
    """A tensor put together from chunks as it is read.

    Raises:
        LayoutError: the chunks leave a hole, lie over each other or outside, or are of another
            dtype.
    """

    spec: TensorSpec
    chunks: tuple[Chunk, ...]

    def __post_init__(self) -> None:
        if self.dtype.is_packed:
            raise LayoutError(f"tensor {self.name!r}: chunks of {self.dtype} are not put together")
        for chunk in self.chunks:
            if chunk.ref.dtype is not self.dtype:
                raise LayoutError(
                    f"tensor {self.name!r} is {self.dtype}, its chunk at {list(chunk.offsets)} is "
                    f"{chunk.ref.dtype}"
                )
        try:
            check_tiling(self.shape, [(chunk.offsets, chunk.ref.shape) for chunk in self.chunks])
        except LayoutError as error:
            raise LayoutError(f"tensor {self.name!r}: {error}") from error

    def renamed(self, name: str) -> "AssembledRef":
        return replace(self, spec=self.spec.renamed(name))

    def identity(self) -> Hashable:
        return self.shape, tuple((chunk.offsets, chunk.ref.identity()) for chunk in self.chunks)

    def sources(self) -> Iterator[object]:
        for chunk in self.chunks:
            yield from chunk.ref.sources()

    def pieces(self, max_bytes: int = PIECE_BYTES) -> Iterator[memoryview]:
        width = self.dtype.bits // 8
        max_bytes = max(max_bytes - max_bytes % width, width)  # a piece holds whole elements
        for index in row_blocks(self.shape, max(max_bytes, _GATHERED_BYTES) // width):
            gathered = byte_view(self._slice(index))
            for first in range(0, len(gathered), max_bytes):
                yield gathered[first : first + max_bytes]

    def _fill_bytes(self, buffer: memoryview) -> None:
        if self.nbytes:
            array = np.frombuffer(buffer, np.uint8).view(self.dtype.numpy).reshape(self.shape)
            self._put((slice(None),) * len(self.shape), array)

    def _fill_scattered(self, array: Array) -> None:
        self._put((slice(None),) * len(self.shape), array)

    def _slice(self, index: Index) -> Array:
        shape = narrow(Layout.contiguous(self.shape), index).shape
        array = empty(shape, self.dtype.numpy)
        self._put(expand(index, len(self.shape)), array)
        return array

    def _put(self, keys: Any, array: Array) -> None:
        """Fill an array with what an index takes, chunk by chunk."""
        for chunk in self.chunks:
            found = overlap(keys, self.shape, chunk.offsets, chunk.ref.shape)
            if found is None:
                continue
            inside, region = found
            where: Any = (*region, ...)  # the dots keep a 0-dimensional target a view
            target: Array = array[where]
            if target.shape == chunk.ref.shape and _is_all(inside, chunk.ref.shape):
                _load(chunk.ref, target)
            else:
                target[...] = chunk.ref[inside]


def _is_all(inside: tuple[Any, ...], shape: tuple[int, ...]) -> bool:
    return all(
        isinstance(key, slice) and key == slice(0, size, 1)
        for key, size in zip(inside, shape, strict=True)
    )


def _load(ref: TensorRef, target: Array) -> None:
    if target.flags.c_contiguous:
        ref.load(out=target)
        return
    for index in row_blocks(ref.shape, _GATHERED_BYTES // target.itemsize):
        target[(*index, ...)] = ref[index]
