"""Anything that is a tensor, as a ref; and a ref seen in another dtype. Pure: nothing is read."""

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from weighlock.errors import LayoutError, UnsupportedDType
from weighlock.tensors.arrays import Array, byte_view, is_masked
from weighlock.tensors.dtypes import DType
from weighlock.tensors.ref import PIECE_BYTES, ArrayRef, TensorRef
from weighlock.tensors.slicing import Index
from weighlock.tensors.spec import TensorSpec
from weighlock.tensors.torch import TorchRef, is_tensor

__all__ = ["CastRef", "as_ref", "check_cast", "refs_of", "refs_of_pairs"]


def as_ref(name: str, value: object) -> TensorRef:
    """A ref under that name to an array, a torch tensor or another ref.

    Raises:
        LayoutError: it is none of these, a tensor without plain memory, or a masked array.
        UnsupportedDType: safetensors has no such type.
    """
    if isinstance(value, TensorRef):
        return value if value.name == name else value.renamed(name)
    if is_tensor(value):
        return TorchRef.of(name, value)
    if isinstance(value, (np.ndarray, np.generic)):
        if is_masked(value):
            raise LayoutError(
                f"tensor {name!r} is a masked array, whose mask no file holds: pass "
                "array.filled(value)"
            )
        try:
            return ArrayRef.of(name, np.asarray(value))
        except UnsupportedDType as error:
            raise UnsupportedDType(
                f"tensor {name!r} is {value.dtype}, for which safetensors has no type: "
                f"{_remedy(value.dtype)}"
            ) from error
    raise LayoutError(
        f"tensor {name!r} is a {type(value).__name__}: pass a numpy array, a torch tensor or a ref"
    )


_REMEDIES = {
    "O": "pass numbers, as of array.astype(np.float32)",
    "M": "pass array.view(np.int64), and tell its unit in metadata",
    "m": "pass array.view(np.int64), and tell its unit in metadata",
    **dict.fromkeys("UST", "texts belong in metadata"),
    "f": "pass array.astype(np.float64)",
    "c": "pass array.astype(np.complex64)",
}
"""What to do about types that are no tensor's, by the letter numpy has for their kind."""


def _remedy(dtype: "np.dtype[Any]") -> str:
    if dtype.names:
        return f"pass each field, such as array[{dtype.names[0]!r}], under a name of its own"
    return _REMEDIES.get(dtype.kind, "convert it")


def refs_of(tensors: object) -> list[TensorRef]:
    """Refs to all that a mapping of names to tensors holds.

    Raises:
        LayoutError: it is no mapping, or something in it is not a plain tensor.
    """
    if isinstance(tensors, Mapping):
        return [as_ref(name, value) for name, value in tensors.items()]
    raise _no_mapping(tensors)


def refs_of_pairs(tensors: object) -> Iterator[TensorRef]:
    """Refs to what an iterable of names and tensors gives, made as they are taken.

    Raises:
        LayoutError: it is none, at once; or something in it is not a pair with a plain tensor.
    """
    is_text = isinstance(tensors, (str, bytes))
    if _is_module(tensors) or is_text or not isinstance(tensors, Iterable):
        raise _no_mapping(tensors)
    return map(_named, tensors)


def _is_module(tensors: object) -> bool:
    return callable(getattr(tensors, "state_dict", None))


def _no_mapping(tensors: object) -> LayoutError:
    return LayoutError(
        f"a {type(tensors).__name__} is no mapping of names to tensors: pass "
        + (
            "its state_dict()"
            if _is_module(tensors)
            else "a state dict, or what weighlock.open gives"
        )
    )


def _named(pair: object) -> TensorRef:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise LayoutError(f"a {type(pair).__name__} came where a pair (name, tensor) should")
    return as_ref(*pair)


def check_cast(ref: TensorRef, dtype: DType) -> None:
    """Raise `UnsupportedDType` if elements are packed, or if complex numbers would lose a part."""
    loses = ref.dtype.is_complex and not dtype.is_complex
    if ref.dtype.is_packed or dtype.is_packed or loses:
        raise UnsupportedDType(f"tensor {ref.name!r}: {ref.dtype} cannot be cast to {dtype}")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CastRef(TensorRef):
    """A tensor that is converted to another dtype as it is read, piece by piece."""

    spec: TensorSpec
    original: TensorRef

    @classmethod
    def of(cls, ref: TensorRef, dtype: DType) -> TensorRef:
        """The ref in that dtype; itself if it already is.

        Raises:
            UnsupportedDType: one of the two is packed, or complex numbers would lose a part.
        """
        if ref.dtype is dtype:
            return ref
        check_cast(ref, dtype)
        return cls(TensorSpec(ref.name, dtype, ref.shape), ref)

    def renamed(self, name: str) -> "CastRef":
        return replace(self, spec=self.spec.renamed(name))

    def identity(self) -> Hashable:
        return "cast", self.dtype, self.original.identity()

    def sources(self) -> Iterator[object]:
        yield from self.original.sources()

    def check_whole(self) -> None:
        self.original.check_whole()

    def pieces(self, max_bytes: int = PIECE_BYTES) -> Iterator[memoryview]:
        for piece in self.original.pieces(max_bytes):
            whole = np.frombuffer(piece, np.uint8).view(self.original.dtype.numpy)
            step = max(1, max_bytes // max(self.original.dtype.alignment, self.dtype.alignment))
            for first in range(0, whole.size, step):
                yield byte_view(self._cast(whole[first : first + step]))

    def _cast(self, values: Array) -> Array:
        return cast(values, self.dtype)

    def _slice(self, index: Index) -> Array:
        return cast(np.asarray(self.original[index]), self.dtype)


def cast(values: Array, dtype: DType) -> Array:
    """Numbers in another dtype. What overflows becomes infinite, or NaN where there is no Inf."""
    with np.errstate(over="ignore", invalid="ignore"):  # numpy would warn for each block
        if dtype.bits == 8 and dtype.is_float and values.dtype.itemsize == 1:
            values = values.astype(np.float32)  # ml_dtypes does not know every pair of its types
        return np.asarray(values).astype(dtype.numpy)
