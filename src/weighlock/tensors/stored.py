"""A tensor in a source: a file, bytes in memory, or something remote.

Knows spans and layouts, and how to gather an array from them with few reads. What is behind
`Readable` it does not know.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.lib.stride_tricks import as_strided

from weighlock.errors import LayoutError
from weighlock.limits import Limits
from weighlock.tensors.arrays import Array, byte_view, empty, unpack_f4
from weighlock.tensors.dtypes import DType
from weighlock.tensors.ref import PIECE_BYTES, TensorRef, loaded_shape
from weighlock.tensors.slicing import Index, Piece, narrow, plan, row_blocks
from weighlock.tensors.spec import Layout, Span, TensorSpec

__all__ = ["GATHERED_BYTES", "Readable", "ReadsMany", "StoredRef", "load_together"]


GATHERED_BYTES = 32 * 1024 * 1024
"""What is gathered at a time of a strided tensor whose bytes are wanted in order.

A part of a transposed tensor takes a bit of every column: the larger it is, the fewer and longer
the reads are, and with the scratch of one read this stays within 40 MiB.
"""


class Readable(Protocol):
    """The one thing a ref asks of a source."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the whole buffer from that offset, or raise."""


@runtime_checkable
class ReadsMany(Protocol):
    """What a source may do besides: fill many buffers faster together than one by one."""

    def read_many(self, parts: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer from its offset, or raise."""


class StoredRef(TensorRef, msgspec.Struct, frozen=True, eq=False):
    """A tensor in a source: a file, bytes in memory, or something remote.

    A struct, as specs are; one the garbage collector knows, as a source may hold a catalog of its
    own refs.

    Raises:
        LayoutError: the layout reaches outside the span.
    """

    spec: TensorSpec
    source: Readable
    span: Span
    """The bytes of the source that hold the tensor."""
    layout: Layout | None = None
    """How the elements lie in the span; None for row-major and exactly filling it."""
    limits: Limits | None = None
    """What it may take if its elements are repeated: `expanded_bytes`."""

    def __post_init__(self) -> None:
        if self.layout is None:
            if self.span.length != self.spec.nbytes:
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

    def sources(self) -> Iterator[object]:
        yield self.source

    def check_whole(self) -> None:
        if self.layout is not None:
            self._check_expanded(self.layout, "")

    def _check_expanded(self, layout: Layout, part: str) -> None:
        """Raise if a layout makes much of little: a file of a kilobyte may claim a terabyte."""
        if layout.repeats:
            limits, nbytes = self.limits or Limits(), layout.size * self.dtype.bits // 8
            what = f"{part}tensor {self.name!r}, of repeated elements"
            limits.check("expanded_bytes", nbytes, what)

    def pieces(self, max_bytes: int = PIECE_BYTES) -> Iterator[memoryview]:
        self.check_whole()
        span = self.contiguous_span
        if span is None:
            yield from self._gathered_pieces(max_bytes)
            return
        max_bytes -= max_bytes % self.dtype.alignment  # a piece holds whole elements
        max_bytes = max(max_bytes, self.dtype.alignment)
        buffer = byte_view(empty((min(max_bytes, span.length),), np.dtype(np.uint8)))
        for offset in range(span.offset, span.end, max_bytes):
            piece = buffer[: min(max_bytes, span.end - offset)]
            self.source.read_into(offset, piece)
            yield piece

    def _gathered_pieces(self, max_bytes: int) -> Iterator[memoryview]:
        """Pieces of a strided tensor in row-major order, cut from larger parts gathered at once."""
        if self.dtype.is_packed:
            raise LayoutError(f"tensor {self.name!r}: strided {self.dtype} cannot be gathered")
        assert self.layout is not None  # noqa: S101
        width = self.dtype.bits // 8
        max_bytes = max(max_bytes - max_bytes % width, width)  # a piece holds whole elements
        most = max(max_bytes, GATHERED_BYTES) // width
        buffer = empty((min(most, self.layout.size),), self.dtype.numpy)
        for index in row_blocks(self.layout.shape, most):
            part = narrow(self.layout, index)
            array = buffer[: part.size].reshape(part.shape)
            self._gather(part, array)
            gathered = byte_view(array)
            for first in range(0, len(gathered), max_bytes):
                yield gathered[first : first + max_bytes]

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
        self._check_expanded(layout, "a part of ")
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
            if piece.axis is not None and self.dtype.bits >= 8:
                self._gather_runs(piece, piece.axis, out[piece.target])
                continue
            for read in piece.reads():
                index: Any = (*read.target, ...)
                target: Array = out[index]  # the dots keep a 0-dimensional target a view
                if read.layout.is_contiguous and target.flags.c_contiguous and self.dtype.bits >= 8:
                    offset = self.span.offset + read.layout.start * width
                    self.source.read_into(offset, byte_view(target))
                else:
                    target[...] = self._covering(read, width)

    def _gather_runs(self, piece: Piece, axis: int, target: Array) -> None:
        """Fill a target with runs of one shape: read together, then put in place together."""
        count, width = piece.layout.shape[axis], self.dtype.bits // 8
        run = next(piece.reads()).layout
        low, length = run.cover()
        step = piece.layout.strides[axis] * width
        offsets = [self.span.offset + low * width + index * step for index in range(count)]
        lines = np.moveaxis(target, axis, 0)
        if run.is_contiguous and lines[0, ...].flags.c_contiguous:
            self._read_many([(at, byte_view(lines[n, ...])) for n, at in enumerate(offsets)])
            return
        elements = empty((count * length,), self.dtype.numpy)
        runs = map(byte_view, elements.reshape(count, length))
        self._read_many(list(zip(offsets, runs, strict=True)))
        strides = [stride * width for stride in piece.layout.strides]
        strides[axis] = length * width
        target[...] = _strided(elements[run.start - low :], piece.layout.shape, tuple(strides))

    def _read_many(self, parts: list[tuple[int, memoryview]]) -> None:
        if isinstance(self.source, ReadsMany):
            self.source.read_many(parts)
        else:
            for offset, buffer in parts:
                self.source.read_into(offset, buffer)

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


def load_together(refs: Iterable[TensorRef]) -> list[Array]:
    """Each ref's array. Tensors that lie whole in one source are read by one call of it."""
    arrays: list[Array] = []
    parts: dict[int, tuple[ReadsMany, list[tuple[int, memoryview]]]] = {}
    for ref in refs:
        span = ref.contiguous_span if isinstance(ref, StoredRef) else None
        if (
            span is None
            or ref.dtype is DType.F4
            or not isinstance(ref, StoredRef)
            or not isinstance(ref.source, ReadsMany)
        ):
            arrays.append(ref.load())
            continue
        array = empty(loaded_shape(ref.spec), ref.dtype.numpy)
        arrays.append(array)
        _, together = parts.setdefault(id(ref.source), (ref.source, []))
        together.append((span.offset, byte_view(array)))
    for source, together in parts.values():
        source.read_many(together)
    return arrays


def _strided(base: Array, shape: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    # as_strided asks numpy for the type by its code, and some of ml_dtypes' have none of their own.
    plain = base if base.dtype.isbuiltin == 1 else base.view(f"u{base.dtype.itemsize}")
    view: np.ndarray[Any, Any] = as_strided(plain, shape, strides, writeable=False)
    return view.view(base.dtype)
