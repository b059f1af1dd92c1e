"""Places a catalog is loaded into: arrays and tensors somebody already has. Checks, then fills."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np

from weighlock.errors import LayoutError, UnsupportedDType
from weighlock.tensors.arrays import Array, is_masked, shares_elements
from weighlock.tensors.convert import cast as converted
from weighlock.tensors.convert import check_cast
from weighlock.tensors.dtypes import DType
from weighlock.tensors.ref import PIECE_BYTES, ArrayRef, TensorRef
from weighlock.tensors.slicing import row_blocks
from weighlock.tensors.torch import TorchRef, from_array, is_tensor

__all__ = ["Slot", "check_apart", "slots_of", "targets_of"]

_BLOCK_ELEMENTS = PIECE_BYTES // 8
"""Elements converted at a time."""

_READ_BYTES = 2 * PIECE_BYTES
"""Bytes read at a time: of what lies behind a URL, each read is a request."""


class Extent(NamedTuple):
    """The memory from the first byte of an array to its last."""

    device: str
    low: int
    high: int
    is_dense: bool
    """Whether every byte between them is the array's."""
    view: Hashable
    """Equal for two arrays that are the same view of the same memory."""

    @classmethod
    def of(
        cls, device: str, address: int, shape: Sequence[int], steps: Sequence[int], width: int
    ) -> "Extent | None":
        """Of an array of that shape whose elements lie so many bytes apart; None if it is empty.

        Raises:
            LayoutError: its elements share memory with each other.
        """
        if 0 in shape:
            return None
        ways = [(count - 1) * step for count, step in zip(shape, steps, strict=True)]
        if shares_elements(shape, steps, width):
            raise LayoutError("its elements share memory, as those of an expanded one do")
        low = address + sum(min(0, way) for way in ways)
        high = address + sum(max(0, way) for way in ways) + width
        is_dense = high - low == math.prod(shape) * width
        return cls(device, low, high, is_dense, (address, tuple(shape), tuple(steps), width))


class Slot(Protocol):
    """One existing array or tensor to be filled."""

    def extent(self) -> Extent | None:
        """The memory it takes; None if it is empty, or nobody can tell."""

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


def check_apart(slots: Mapping[str, Slot]) -> None:
    """Refuse places that partly share memory: what is in them would be a mixture.

    Two names of one view may be there, as tied parameters are. Views that only interleave are not
    looked at closely.

    Raises:
        LayoutError: two overlap, or the elements of one do.
    """
    found: list[tuple[Extent, str]] = []
    for name, slot in slots.items():
        try:
            extent = slot.extent()
        except LayoutError as error:
            raise LayoutError(f"the place for tensor {name!r} cannot hold it: {error}") from None
        if extent is not None and extent.is_dense:
            found.append((extent, name))
    found.sort(key=lambda pair: (pair[0].device, pair[0].low, pair[0].high))
    for (before, name), (extent, other) in pairwise(found):
        is_over = extent.device == before.device and extent.low < before.high
        if is_over and extent.view != before.view:
            raise LayoutError(
                f"the places for tensors {name!r} and {other!r} share "
                f"{min(before.high, extent.high) - extent.low:,} bytes of memory: neither would "
                "hold its tensor"
            )


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


def _read_at_once(ref: TensorRef) -> int:
    """How many of its elements are read at a time."""
    return _READ_BYTES * 8 // ref.dtype.bits


@dataclass(frozen=True, slots=True)
class _ArraySlot:
    array: Array

    @property
    def dtype(self) -> DType:
        return DType.of(self.array.dtype)

    def check(self, ref: TensorRef, *, cast: bool) -> None:
        if is_masked(self.array):
            raise LayoutError(f"tensor {ref.name!r}: the array is a masked one: pass array.data")
        try:
            dtype = self.dtype
        except UnsupportedDType as error:
            raise UnsupportedDType(
                f"tensor {ref.name!r} is {ref.dtype}, the array is {self.array.dtype}, which is no "
                f"tensor's type: pass one of {ref.dtype.numpy}"
            ) from error
        _check(ref, dtype, self.array.shape, cast=cast, where="the array")
        if not self.array.flags.writeable:
            raise LayoutError(f"tensor {ref.name!r}: the array is read-only")

    def memory(self) -> memoryview | None:
        return ArrayRef.of("array", self.array).memory()

    def extent(self) -> Extent | None:
        array = self.array
        address = array.__array_interface__["data"][0]
        return Extent.of("cpu", address, array.shape, array.strides, array.itemsize)

    def fill(self, ref: TensorRef) -> None:
        if self.array.dtype == ref.dtype.numpy:
            ref.load(out=self.array)
        else:
            for block in row_blocks(ref.shape, _read_at_once(ref)):
                values, place = ref[block], self.array[(*block, ...)]
                for part in row_blocks(values.shape, _BLOCK_ELEMENTS):
                    place[(*part, ...)] = converted(values[part], self.dtype)


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

    def extent(self) -> Extent | None:
        tensor: Any = self.place.tensor
        if not self.place.is_plain:  # on a device: torch itself fills it
            return None
        width = tensor.element_size()
        steps = [step * width for step in tensor.stride()]
        return Extent.of(str(tensor.device), tensor.data_ptr(), tensor.shape, steps, width)

    def fill(self, ref: TensorRef) -> None:
        tensor: Any = self.place.tensor
        if self.place.is_plain and ref.dtype is self.place.dtype:
            ref.load(out=tensor)
        elif not ref.shape or ref.dtype.is_packed:
            tensor.copy_(ref.torch())
        else:
            # copy_ casts, scatters into strides and moves to the tensor's device.
            for block in row_blocks(ref.shape, _read_at_once(ref)):
                tensor[block].copy_(from_array(ref[block]))
