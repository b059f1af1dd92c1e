"""Whether boxes fill a shape exactly, and what an index takes of one box. Pure arithmetic."""

import bisect
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from weighlock.errors import LayoutError

if TYPE_CHECKING:
    from typing import SupportsIndex

__all__ = ["check_tiling", "overlap"]

_MOST_CELLS = 4_000_000
"""Cells the edges of all boxes may cut a shape into: one for each box, if they form a grid."""


def check_tiling(
    shape: tuple[int, ...], boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    """Raise `LayoutError` unless boxes, as offsets and sizes, cover a shape, each element once."""
    total = 0
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise LayoutError(
                f"a chunk has {len(offsets)} offsets and {len(sizes)} sizes, the tensor "
                f"{len(shape)} dimensions"
            )
        ends = [first + size for first, size in zip(offsets, sizes, strict=True)]
        if min((*offsets, *sizes), default=0) < 0 or any(
            end > size for end, size in zip(ends, shape, strict=True)
        ):
            raise LayoutError(
                f"a chunk of {list(sizes)} at {list(offsets)} reaches out of shape {list(shape)}"
            )
        total += math.prod(sizes)
    if total != math.prod(shape):
        raise LayoutError(
            f"its {len(boxes):,} chunks hold {total:,} elements, shape {list(shape)} has "
            f"{math.prod(shape):,}"
        )
    if len(boxes) > 1 and total:
        _check_apart(shape, [box for box in boxes if math.prod(box[1])])


def _check_apart(
    shape: tuple[int, ...], boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    """Mark the cells of each box in a grid of all their edges: none twice, then all are marked."""
    axes = range(len(shape))
    edges = [sorted({b[0][a] for b in boxes} | {b[0][a] + b[1][a] for b in boxes}) for a in axes]
    cells = math.prod(len(edge) for edge in edges)
    if cells > _MOST_CELLS:
        raise LayoutError(
            f"its {len(boxes):,} chunks cut it into {cells:,} cells, {_MOST_CELLS:,} are allowed"
        )
    marked = np.zeros([len(edge) for edge in edges], np.bool_)
    for offsets, sizes in boxes:
        part = marked[
            tuple(
                slice(
                    bisect.bisect_left(edges[a], offsets[a]),
                    bisect.bisect_left(edges[a], offsets[a] + sizes[a]),
                )
                for a in axes
            )
        ]
        if part.any():
            raise LayoutError(f"its chunk at {list(offsets)} lies over another")
        part[...] = True


def overlap(
    keys: "Iterable[SupportsIndex | slice]",
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
) -> tuple[tuple[Any, ...], tuple[slice, ...]] | None:
    """What an index takes of a box: the index into the box, and the region of the result.

    Args:
        keys: an int or a slice for each dimension, in range.
        shape: of the whole.
        offsets: where the box begins.
        sizes: how large it is.

    Returns:
        None if the index takes nothing of it.
    """
    inside: list[Any] = []
    region: list[slice] = []
    for key, size, first, count in zip(keys, shape, offsets, sizes, strict=True):
        if not isinstance(key, slice):
            position = range(size)[key]
            if not first <= position < first + count:
                return None
            inside.append(position - first)
            continue
        chosen = range(size)[key]
        # Of the chosen positions, those in the box are neighbours in the result, either way round.
        if chosen.step > 0:
            low = -(-(first - chosen.start) // chosen.step)
            high = -(-(first + count - chosen.start) // chosen.step)
        else:
            low = -(-(chosen.start - (first + count - 1)) // -chosen.step)
            high = -(-(chosen.start - (first - 1)) // -chosen.step)
        low, high = max(low, 0), min(high, len(chosen))
        if low >= high:
            return None
        start, last = chosen[low] - first, chosen[high - 1] - first
        stop = last + (1 if chosen.step > 0 else -1)
        inside.append(slice(start, stop if stop >= 0 else None, chosen.step))
        region.append(slice(low, high))
    return tuple(inside), tuple(region)
