"""A tensor not yet read: `TensorRef`, and its two kinds, in memory and in a source.

Knows specs, layouts and how to fill an array from them. Where the bytes come from is behind
`Readable`; this module does no I/O of its own.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.lib.stride_tricks import as_strided

from weighlock.errors import LayoutError
from weighlock.tensors.arrays import (
    Array,
    SlicedArray,
    array_pieces,
    byte_view,
    empty,
    unpack_f4,
)
from weighlock.tensors.dtypes import DType
from weighlock.tensors.slicing import Index, Piece, narrow, plan
from weighlock.tensors.spec import Layout, Span, TensorSpec

if TYPE_CHECKING:
    from weighlock.tensors.torch import Tensor

__all__ = ["PIECE_BYTES", "ArrayRef", "Readable", "StoredRef", "TensorRef"]

PIECE_BYTES = 4 * 1024 * 1024
"""Default size of the buffer through which a ref is copied."""


class Readable(Protocol):
    """The one thing a ref asks of a source."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the whole buffer from that offset, or raise."""


class TensorRef(ABC):
    """A tensor that is known but not loaded.

    `load()` gives a numpy array, `torch()` a torch tensor, `ref[10:20]` reads those rows only.
    Refs are values: they can be used from any thread, after a fork, and pickled (the pickle holds
    the place of the tensor, not its bytes, unless it lies in memory).
    """

    __slots__ = ()

    spec: TensorSpec

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self.spec.name

    @property
    def dtype(self) -> DType:
        """The tensor's element type; equal to its safetensors name, as in `ref.dtype == "BF16"`."""
        return self.spec.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return self.spec.shape

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in a safetensors file."""
        return self.spec.nbytes

    def get_shape(self) -> list[int]:
        """The shape as a list, as the lazy slices of `safetensors` give it."""
        return list(self.spec.shape)

    def get_dtype(self) -> str:
        """The dtype's safetensors name, as the lazy slices of `safetensors` give it."""
        return self.spec.dtype.value

    def load(self, out: "Array | memoryview | bytearray | Tensor | None" = None) -> Array:
        """Read the tensor.

        Args:
            out: filled instead of a new array: an array or torch tensor of this shape and dtype,
                or a writable buffer of `nbytes` bytes (the file's bytes then).

        Returns:
            The array; `out`, seen as an array, where it was given. F6 comes as packed bytes.
        """
        if out is None:
            array = empty(_loaded_shape(self.spec), self.dtype.numpy)
            self._fill(array)
            return array
        array = _as_target(self.spec, out)
        if array.dtype == np.uint8 and self.dtype is DType.F4:
            self._fill_bytes(byte_view(array))
        elif array.flags.c_contiguous:
            self._fill(array)
        else:
            self._fill_scattered(array)
        return array

    materialize = load

    def torch(self, device: object = None) -> "Tensor":
        """Read the tensor as a torch tensor; on the CPU it lies over the buffer that was read."""
        from weighlock.tensors.torch import from_bytes

        buffer = empty((self.nbytes,), np.dtype(np.uint8))
        self._fill_bytes(byte_view(buffer))
        return from_bytes(buffer, self.spec, device)

    def __getitem__(self, index: Index) -> SlicedArray:
        """Read a part. Only the bytes that hold it are read; contiguous rows are one read."""
        return self._slice(index).view(SlicedArray)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"tensor {self.name!r} has no dimensions")
        return self.shape[0]

    # Without this, `for x in ref` would fall back to ref[0], ref[1], …: one read per row.
    __iter__ = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} {self.dtype} {list(self.shape)}>"

    @abstractmethod
    def renamed(self, name: str) -> "TensorRef":
        """The same tensor under another name."""

    @abstractmethod
    def identity(self) -> Hashable:
        """Equal for two refs that are the same view of the same memory or file."""

    @abstractmethod
    def pieces(self, max_bytes: int = PIECE_BYTES) -> Iterator[memoryview]:
        """The tensor's bytes as a safetensors file holds them, in order.

        Copies go through one buffer of `max_bytes`: a piece is valid until the next is asked for.
        What lies contiguous in memory comes as views of it, of any length.
        """

    @abstractmethod
    def _slice(self, index: Index) -> Array: ...

    def _fill(self, array: Array) -> None:
        """Fill a C-contiguous array of the loaded shape and dtype."""
        if self.dtype is DType.F4:
            codes = array.reshape(-1).view(np.uint8)
            done = 0
            for piece in self.pieces():
                unpack_f4(np.frombuffer(piece, np.uint8), codes[done : done + 2 * len(piece)])
                done += 2 * len(piece)
        else:
            self._fill_bytes(byte_view(array))

    def _fill_bytes(self, buffer: memoryview) -> None:
        """Fill a buffer of `nbytes` with the bytes a file holds."""
        done = 0
        for piece in self.pieces():
            buffer[done : done + len(piece)] = piece
            done += len(piece)

    def _fill_scattered(self, array: Array) -> None:
        """Fill an array whose elements do not lie in order."""
        done = 0
        if self.dtype is DType.F4:
            array[...] = self.load()
            return
        for piece in self.pieces():
            values = np.frombuffer(piece, np.uint8).view(self.dtype.numpy)
            array.flat[done : done + values.size] = values
            done += values.size


def _loaded_shape(spec: TensorSpec) -> tuple[int, ...]:
    if spec.dtype.is_packed and spec.dtype is not DType.F4:
        return (spec.nbytes,)
    return spec.shape


def _as_target(spec: TensorSpec, out: object) -> Array:
    """`out` as an array of the right shape and dtype, or an error with both sides."""
    if isinstance(out, np.ndarray):
        array: Array = out
    elif isinstance(out, (bytearray, memoryview)):
        flat = memoryview(out).cast("B")
        if flat.nbytes != spec.nbytes:
            raise LayoutError(
                f"tensor {spec.name!r} takes {spec.nbytes:,} bytes, out= has {flat.nbytes:,}"
            )
        array = np.frombuffer(flat, np.uint8)
        if array.flags.writeable:
            return (
                array if spec.dtype.is_packed else array.view(spec.dtype.numpy).reshape(spec.shape)
            )
    else:
        from weighlock.tensors.torch import as_target

        array = as_target(spec, out)
    if not array.flags.writeable:
        raise LayoutError(f"tensor {spec.name!r}: out= is read-only")
    if array.shape != _loaded_shape(spec) or array.dtype != spec.dtype.numpy:
        if spec.dtype is DType.F4 and array.dtype == np.uint8 and array.nbytes == spec.nbytes:
            return array
        raise LayoutError(
            f"tensor {spec.name!r} is {spec.dtype} {list(spec.shape)} and loads as "
            f"{spec.dtype.numpy} {list(_loaded_shape(spec))}, "
            f"out= is {array.dtype} {list(array.shape)}"
        )
    return array


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ArrayRef(TensorRef):
    """A tensor in memory. `load()` returns the array itself, not a copy."""

    spec: TensorSpec
    array: Array

    @classmethod
    def of(cls, name: str, array: Array) -> "ArrayRef":
        """A ref to that array under that name."""
        return cls(TensorSpec(name, DType.of(array.dtype), array.shape), array)

    def __post_init__(self) -> None:
        if DType.of(self.array.dtype) is not self.dtype or self.array.shape != self.shape:
            raise LayoutError(
                f"tensor {self.name!r} was announced as {self.dtype} {list(self.shape)}, "
                f"the array is {self.array.dtype} {list(self.array.shape)}"
            )

    def load(self, out: "Array | memoryview | bytearray | Tensor | None" = None) -> Array:
        """The array itself; with `out`, a copy into it."""
        return self.array if out is None else TensorRef.load(self, out)

    materialize = load

    def renamed(self, name: str) -> "ArrayRef":
        return replace(self, spec=self.spec.renamed(name))

    def identity(self) -> Hashable:
        address = self.array.__array_interface__["data"][0]
        return "memory", address, self.shape, self.array.strides, self.dtype

    def pieces(self, max_bytes: int = PIECE_BYTES) -> Iterator[memoryview]:
        return array_pieces(self.array, self.dtype, max_bytes)

    def _slice(self, index: Index) -> Array:
        narrow(Layout.contiguous(self.shape), index)  # the same indices are refused everywhere
        return np.asarray(self.array[index])


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class StoredRef(TensorRef):
    """A tensor in a source: a file, bytes in memory, or something remote.

    Raises:
        LayoutError: the layout reaches outside the span.
    """

    spec: TensorSpec
    source: Readable
    span: Span
    """The bytes of the source that hold the tensor."""
    layout: Layout | None = None
    """How the elements lie in the span; None for row-major and exactly filling it."""

    def __post_init__(self) -> None:
        if self.layout is None:
            if self.span.length != self.nbytes:
                raise LayoutError(
                    f"tensor {self.name!r}: {self.dtype} {list(self.shape)} takes {self.nbytes:,} "
                    f"bytes, its span has {self.span.length:,}"
                )
            return
        low, count = self.layout.cover()
        if self.layout.shape != self.shape or low < 0:
            raise LayoutError(f"tensor {self.name!r}: layout {self.layout} does not fit its shape")
        if (low + count) * self.dtype.bits > self.span.length * 8:
            raise LayoutError(
                f"tensor {self.name!r} reaches to element {low + count:,}, its span holds "
                f"{self.span.length * 8 // self.dtype.bits:,}"
            )

    @property
    def contiguous_span(self) -> Span | None:
        """The bytes of the source that are the tensor's bytes in a file, if there are such."""
        if self.layout is None:
            return self.span
        if self.layout.is_contiguous and self.layout.start * self.dtype.bits % 8 == 0:
            return Span(self.span.offset + self.layout.start * self.dtype.bits // 8, self.nbytes)
        return None

    def renamed(self, name: str) -> "StoredRef":
        return replace(self, spec=self.spec.renamed(name))

    def identity(self) -> Hashable:
        layout = self.layout or Layout.contiguous(self.shape)
        start = self.span.offset * 8 + layout.start * self.dtype.bits
        return self.source, start, self.shape, layout.strides, self.dtype

    def pieces(self, max_bytes: int = PIECE_BYTES) -> Iterator[memoryview]:
        span = self.contiguous_span
        if span is None:
            yield from self._gathered_pieces(max_bytes)
            return
        buffer = byte_view(empty((min(max_bytes, span.length),), np.dtype(np.uint8)))
        for offset in range(span.offset, span.end, max_bytes):
            piece = buffer[: min(max_bytes, span.end - offset)]
            self.source.read_into(offset, piece)
            yield piece

    def _gathered_pieces(self, max_bytes: int) -> Iterator[memoryview]:
        """Row-major pieces of a strided tensor, each gathered from what covers it."""
        if self.dtype.is_packed:
            raise LayoutError(f"tensor {self.name!r}: strided {self.dtype} cannot be gathered")
        assert self.layout is not None  # noqa: S101
        width = self.dtype.bits // 8
        for part in _row_major(self.layout, max(1, max_bytes // width)):
            array = empty(part.shape, self.dtype.numpy)
            self._gather(part, array)
            yield byte_view(array)

    def _fill_bytes(self, buffer: memoryview) -> None:
        span = self.contiguous_span
        if span is not None:
            self.source.read_into(span.offset, buffer)
        elif self.dtype.is_packed:
            TensorRef._fill_bytes(self, buffer)
        else:
            assert self.layout is not None  # noqa: S101
            array = np.frombuffer(buffer, np.uint8).view(self.dtype.numpy).reshape(self.shape)
            self._gather(self.layout, array)

    def _slice(self, index: Index) -> Array:
        layout = narrow(self.layout or Layout.contiguous(self.shape), index)
        if self.dtype.is_packed and self.dtype is not DType.F4:
            return self._packed_slice(layout)
        array = empty(layout.shape, self.dtype.numpy)
        self._gather(layout, array)
        return array

    def _packed_slice(self, layout: Layout) -> Array:
        """Packed bytes of F6: only a contiguous run that begins and ends on whole bytes."""
        first, length = layout.start * self.dtype.bits, layout.size * self.dtype.bits
        if not layout.is_contiguous or first % 8 or length % 8:
            raise LayoutError(
                f"tensor {self.name!r}: this slice of {self.dtype} does not begin and end on whole "
                "bytes; load() gives all of it as packed bytes"
            )
        array = empty((length // 8,), np.dtype(np.uint8))
        self.source.read_into(self.span.offset + first // 8, byte_view(array))
        return array

    def _gather(self, layout: Layout, out: Array) -> None:
        """Fill a C-contiguous array with the elements of a layout over this ref's span."""
        width = max(1, self.dtype.bits // 8)
        for piece in plan(layout, width):
            index: Any = (*piece.target, ...)
            target: Array = out[index]  # the dots keep a 0-dimensional target a view
            if piece.layout.is_contiguous and target.flags.c_contiguous and self.dtype.bits >= 8:
                offset = self.span.offset + piece.layout.start * width
                self.source.read_into(offset, byte_view(target))
            else:
                target[...] = self._covering(piece, width)

    def _covering(self, piece: Piece, width: int) -> Array:
        """The elements of a piece, as a view of what covers them."""
        low, count = piece.layout.cover()
        if self.dtype is DType.F4:
            first, last = low // 2, (low + count + 1) // 2
            packed = empty((last - first,), np.dtype(np.uint8))
            self.source.read_into(self.span.offset + first, byte_view(packed))
            codes = empty((2 * packed.size,), np.dtype(np.uint8))
            unpack_f4(packed, codes)
            elements: Array = codes[low % 2 :].view(self.dtype.numpy)
        else:
            elements = empty((count,), self.dtype.numpy)
            self.source.read_into(self.span.offset + low * width, byte_view(elements))
        strides = tuple(stride * width for stride in piece.layout.strides)
        return _strided(elements[piece.layout.start - low :], piece.layout.shape, strides)


def _strided(base: Array, shape: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    view: np.ndarray[Any, Any] = as_strided(base, shape, strides, writeable=False)
    return view


def _row_major(layout: Layout, max_elements: int) -> Iterator[Layout]:
    """Consecutive parts of a layout in row-major order, each of at most `max_elements`."""
    if layout.size <= max_elements:
        if layout.size:
            yield layout
        return
    inner = layout.size // layout.shape[0]
    step = max(1, max_elements // inner)
    for first in range(0, layout.shape[0], step):
        part = narrow(layout, slice(first, first + step))
        if step == 1:
            part = Layout(part.start, part.shape[1:], part.strides[1:])
        yield from _row_major(part, max_elements)
