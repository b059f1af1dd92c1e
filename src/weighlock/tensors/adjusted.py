"""A tensor whose stored numbers are not quite its values: other byte order, conjugated, negated."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from weighlock.tensors.arrays import Array, byte_view
from weighlock.tensors.ref import PIECE_BYTES, TensorRef
from weighlock.tensors.slicing import Index
from weighlock.tensors.spec import TensorSpec

__all__ = ["AdjustedRef"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class AdjustedRef(TensorRef):
    """Another ref, adjusted as it is read, piece by piece."""

    original: TensorRef
    swap: bool = False
    """The bytes of each number are stored in reverse."""
    conj: bool = False
    neg: bool = False

    @property
    def spec(self) -> TensorSpec:  # type: ignore[override]
        """The original's."""
        return self.original.spec

    def renamed(self, name: str) -> "AdjustedRef":
        return replace(self, original=self.original.renamed(name))

    def identity(self) -> Hashable:
        return self.original.identity(), self.swap, self.conj, self.neg

    def sources(self) -> Iterator[object]:
        yield from self.original.sources()

    def check_whole(self) -> None:
        self.original.check_whole()

    def pieces(self, max_bytes: int = PIECE_BYTES) -> Iterator[memoryview]:
        for piece in self.original.pieces(max_bytes):
            values = np.frombuffer(piece, np.uint8).view(self.dtype.numpy)
            yield byte_view(self._adjusted(values))

    def _slice(self, index: Index) -> Array:
        return self._adjusted(np.asarray(self.original[index]))

    def _adjusted(self, values: Array) -> Array:
        if self.swap:
            values = _swapped(values, self.dtype.is_complex)
        if self.conj:
            values = np.conj(values)
        if self.neg:
            values = np.negative(values)
        return np.ascontiguousarray(values).reshape(values.shape)


def _swapped(values: Array, is_complex: bool) -> Array:
    """Each number with its bytes reversed; the two halves of a complex number each by itself."""
    width = values.dtype.itemsize
    unit = np.dtype(f"u{width // 2 if is_complex else width}")
    flat = np.ascontiguousarray(values).reshape(-1)
    swapped: Array = flat.view(unit).byteswap().view(values.dtype).reshape(values.shape)
    return swapped
