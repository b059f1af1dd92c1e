"""Places a catalog is loaded into: arrays and tensors somebody already has. Checks, then fills."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from weighlock.errors import LayoutError
from weighlock.tensors.arrays import Array
from weighlock.tensors.convert import cast as converted
from weighlock.tensors.convert import check_cast
from weighlock.tensors.dtypes import DType
from weighlock.tensors.ref import PIECE_BYTES, ArrayRef, TensorRef
from weighlock.tensors.torch import TorchRef, from_array, is_tensor

__all__ = ["Slot", "slots_of", "targets_of"]

_BLOCK_ELEMENTS = PIECE_BYTES // 8
"""Elements converted at a time."""


class Slot(Protocol):
    """One existing array or tensor to be filled."""

    @property
    def dtype(self) -> DType:
        """Its element type."""

    def check(self, ref: TensorRef, *, cast: bool) -> None:
        """Raise `LayoutError` unless this ref can fill it."""

    def fill(self, ref: TensorRef) -> None:
        """Read the ref into it."""

    def memory(self) -> memoryview | None:
        """Its bytes as a file holds them, if they lie so in memory."""


def targets_of(target: object) -> Mapping[str, object]:
    """The arrays or tensors of a mapping or a torch module, by name."""
    if not isinstance(target, Mapping):
        state_dict = getattr(target, "state_dict", None)
        if not callable(state_dict):
            raise LayoutError(
                f"cannot load into a {type(target).__name__}: pass a mapping of names to arrays or "
                "tensors, or a torch module"
            )
        target = state_dict()
    assert isinstance(target, Mapping)  # noqa: S101
    return target


def slots_of(target: object) -> dict[str, Slot]:
    """The places of a mapping of arrays or tensors, or of a torch module, by name."""
    slots: dict[str, Slot] = {}
    for name, value in targets_of(target).items():
        if isinstance(value, np.ndarray):
            slots[name] = _ArraySlot(value)
        elif is_tensor(value):
            slots[name] = _TensorSlot(TorchRef.of(name, value))
        else:
            raise LayoutError(f"{name!r} in the target is a {type(value).__name__}, not a tensor")
    return slots


def _check(ref: TensorRef, dtype: DType, shape: tuple[int, ...], *, cast: bool, where: str) -> None:
    if ref.shape != shape:
        raise LayoutError(
            f"tensor {ref.name!r} has shape {list(ref.shape)}, {where} has {list(shape)}"
        )
    if ref.dtype is not dtype and not cast:
        raise LayoutError(
            f"tensor {ref.name!r} is {ref.dtype}, {where} is {dtype}; cast=True converts"
        )
    if ref.dtype is not dtype:
        check_cast(ref, dtype)


def _blocks(shape: tuple[int, ...], elements: int) -> "Iterator[tuple[int | slice, ...]]":
    """Indices of consecutive parts of a tensor, each of at most so many elements."""
    size = math.prod(shape)
    if size <= elements:
        if size:
            yield ()
        return
    step = elements * shape[0] // size
    if step:
        for first in range(0, shape[0], step):
            yield (slice(first, min(first + step, shape[0])),)
    else:  # one row alone is too large
        for row in range(shape[0]):
            for inner in _blocks(shape[1:], elements):
                yield row, *inner


@dataclass(frozen=True, slots=True)
class _ArraySlot:
    array: Array

    @property
    def dtype(self) -> DType:
        return DType.of(self.array.dtype)

    def check(self, ref: TensorRef, *, cast: bool) -> None:
        _check(ref, self.dtype, self.array.shape, cast=cast, where="the array")
        if not self.array.flags.writeable:
            raise LayoutError(f"tensor {ref.name!r}: the array is read-only")

    def memory(self) -> memoryview | None:
        return ArrayRef.of("array", self.array).memory()

    def fill(self, ref: TensorRef) -> None:
        if self.array.dtype == ref.dtype.numpy:
            ref.load(out=self.array)
        else:
            for block in _blocks(ref.shape, _BLOCK_ELEMENTS):
                self.array[(*block, ...)] = converted(ref[block], self.dtype)


@dataclass(frozen=True, slots=True)
class _TensorSlot:
    place: TorchRef

    @property
    def dtype(self) -> DType:
        return self.place.dtype

    def check(self, ref: TensorRef, *, cast: bool) -> None:
        _check(ref, self.place.dtype, self.place.shape, cast=cast, where="the target's")

    def memory(self) -> memoryview | None:
        return self.place.memory()

    def fill(self, ref: TensorRef) -> None:
        tensor: Any = self.place.tensor
        if self.place.is_plain and ref.dtype is self.place.dtype:
            ref.load(out=tensor)
        elif not ref.shape or ref.dtype.is_packed:
            tensor.copy_(ref.torch())
        else:
            # copy_ casts, scatters into strides and moves to the tensor's device.
            for block in _blocks(ref.shape, _BLOCK_ELEMENTS):
                tensor[block].copy_(from_array(ref[block]))
