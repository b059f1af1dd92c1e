"""Which bytes a slice needs: pure planning, no I/O.

`narrow` turns an index expression into a smaller `Layout`; `plan` cuts a layout into pieces that
are each worth one read; `row_blocks` cuts a shape into parts that follow each other. Knows elements
and bytes, not sources.
"""

import itertools
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from weighlock.tensors.spec import Layout

if TYPE_CHECKING:
    from types import EllipsisType
    from typing import SupportsIndex

__all__ = ["Index", "Piece", "expand", "narrow", "plan", "row_blocks"]

Index: TypeAlias = (
    "SupportsIndex | slice | EllipsisType | tuple[SupportsIndex | slice | EllipsisType, ...]"
)

GAP_BYTES = 64 * 1024
"""Never more unwanted bytes than this are read over between two wanted ones."""

PAGE_BYTES = 4096
"""Gaps up to this are always read over, longer ones only if what they part is longer still."""

PIECE_BYTES = 8 * 1024 * 1024
"""Most bytes of one read that has to be gathered: the size of the scratch buffer."""

PIECE_READS = 4096
"""Most reads of one piece: each costs some memory of its own, however short it is."""


def narrow(layout: Layout, index: Index) -> Layout:
    """The layout of `tensor[index]`, for ints, slices with any step, and one `...`.

    Raises:
        IndexError: out of range, too many indices, or a kind of index that needs a loaded array.
    """
    keys = expand(index, len(layout.shape))
    start = layout.start
    shape: list[int] = []
    strides: list[int] = []
    for axis, (key, size, stride) in enumerate(
        zip(keys, layout.shape, layout.strides, strict=True)
    ):
        if isinstance(key, slice):
            chosen = range(size)[key]
            start += chosen.start * stride if len(chosen) else 0
            shape.append(len(chosen))
            strides.append(chosen.step * stride)
        else:
            position = operator.index(key)
            if not -size <= position < size:
                raise IndexError(f"index {position} is out of range for axis {axis} of size {size}")
            start += position % size * stride
    return Layout(start, tuple(shape), tuple(strides))


def row_blocks(shape: tuple[int, ...], most: int) -> "Iterator[tuple[int | slice, ...]]":
    """Indices that cut a shape into consecutive row-major blocks of at most `most` elements."""
    size = math.prod(shape)
    if size <= most:
        if size:
            yield ()
        return
    inner = size // shape[0]
    step = max(1, most // inner)
    for first in range(0, shape[0], step):
        if inner > most:
            yield from ((first, *rest) for rest in row_blocks(shape[1:], most))
        else:
            yield (slice(first, min(first + step, shape[0])),)


def expand(index: Index, rank: int) -> "list[SupportsIndex | slice]":
    """One key per dimension, with the ellipsis and what was left out filled in."""
    keys = index if isinstance(index, tuple) else (index,)
    before: list[SupportsIndex | slice] = []
    after: list[SupportsIndex | slice] | None = None
    for key in keys:
        if key is Ellipsis:
            if after is not None:
                raise IndexError("an index can hold only one '...'")
            after = []
        else:
            (before if after is None else after).append(_checked(key))
    given = len(before) + len(after or ())
    if given > rank:
        raise IndexError(f"{given} indices for a tensor of {rank} dimensions")
    return [*before, *[slice(None)] * (rank - given), *(after or ())]


def _checked(key: object) -> "SupportsIndex | slice":
    if isinstance(key, slice):
        return key
    try:
        if not isinstance(key, bool):
            return operator.index(key)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise IndexError(
        f"cannot read by a {type(key).__name__}: a tensor on disk takes ints, slices and '...'; "
        "load() it first for anything else"
    )


@dataclass(frozen=True, slots=True)
class Piece:
    """One read, or many of one shape: a part of a layout, and where it goes in the result."""

    layout: Layout
    target: tuple[slice, ...]
    """The region of the result, one slice for each of its dimensions."""
    axis: int | None = None
    """Each index of this dimension is a read of its own: too much lies between them."""

    def reads(self) -> "Iterator[Piece]":
        """The piece as pieces of one read each."""
        if self.axis is None:
            yield self
        else:
            for index in range(self.layout.shape[self.axis]):
                yield _part(self, self.axis, index, index + 1)


def plan(layout: Layout, itemsize: int) -> Iterator[Piece]:
    """Cut a layout into pieces that are each one read, or several of one shape.

    A read is either contiguous (of any length: it can be put straight into the result) or covers
    at most `PIECE_BYTES`; several together are at most `PIECE_READS` and have at most that many
    bytes. They read no byte outside the layout's cover.
    """
    yield from _cut(Piece(layout, tuple(slice(0, size) for size in layout.shape)), itemsize)


def _cut(piece: Piece, itemsize: int) -> Iterator[Piece]:
    layout = piece.layout
    if layout.size == 0:
        return
    if layout.is_contiguous:
        yield piece
        return
    # Along the widest stride the rest of the tensor forms blocks that lie one after another, so
    # cutting there never reads a byte twice, whatever order the dimensions have (transposes).
    axis = max(
        (axis for axis, size in enumerate(layout.shape) if size > 1),
        key=lambda axis: abs(layout.strides[axis]),
    )
    stride_bytes = abs(layout.strides[axis]) * itemsize
    inner_bytes = layout.cover()[1] * itemsize - (layout.shape[axis] - 1) * stride_bytes
    gap_bytes = stride_bytes - inner_bytes
    if gap_bytes > min(GAP_BYTES, max(inner_bytes, PAGE_BYTES)):
        step = min(PIECE_BYTES // inner_bytes, PIECE_READS)
        if step > 1 and _is_one_read(_part(piece, axis, 0, 1), itemsize):
            for first in range(0, layout.shape[axis], step):
                last = min(first + step, layout.shape[axis])
                yield replace(_part(piece, axis, first, last), axis=axis)
            return
        step = 1
    elif layout.cover()[1] * itemsize <= PIECE_BYTES or stride_bytes == 0:
        yield piece
        return
    else:
        step = 1 + max(0, PIECE_BYTES - inner_bytes) // stride_bytes
    for first in range(0, layout.shape[axis], step):
        last = min(first + step, layout.shape[axis])
        yield from _cut(_part(piece, axis, first, last), itemsize)


def _is_one_read(piece: Piece, itemsize: int) -> bool:
    cut = list(itertools.islice(_cut(piece, itemsize), 2))
    return len(cut) == 1 and cut[0].axis is None


def _part(piece: Piece, axis: int, first: int, last: int) -> Piece:
    """The piece restricted to `first:last` along one axis."""
    layout = piece.layout
    shape = (*layout.shape[:axis], last - first, *layout.shape[axis + 1 :])
    base = piece.target[axis].start
    target = (
        *piece.target[:axis],
        slice(base + first, base + last),
        *piece.target[axis + 1 :],
    )
    start = layout.start + first * layout.strides[axis]
    return Piece(Layout(start, shape, layout.strides), target)
