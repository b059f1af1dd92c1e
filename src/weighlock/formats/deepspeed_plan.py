"""Which elements of which rank a parameter of a ZeRO checkpoint is made of. Pure arithmetic.

Stages 1 and 2 lay the parameters of a group end to end, since DeepSpeed 0.19 with padding behind
each of them, and cut that into one part for each rank.
Stage 3 cuts each parameter into equal parts, the last one padded, and lays the parts of a rank end
to end. Knows shapes and counts; not files.
"""

import bisect
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from weighlock.errors import LayoutError

__all__ = ["Part", "Planned", "plan_stage_3", "plan_stages_1_and_2"]

Shape = tuple[int, ...]


class Part(NamedTuple):
    """Elements of a flat group of a rank."""

    rank: int
    group: int
    start: int
    elements: int


class Planned(NamedTuple):
    """A parameter, and what it is made of, in order."""

    shape: Shape
    parts: tuple[Part, ...]


def plan_stages_1_and_2(
    shapes: Sequence[Mapping[str, Shape]],
    sizes: Sequence[Sequence[int]],
    paddings: Sequence[Sequence[int]] | None = None,
) -> dict[str, Planned]:
    """The parameters of each group.

    Args:
        shapes: of the parameters by name, for each group.
        sizes: elements of each group of each rank.
        paddings: elements behind each parameter of each group that belong to none.

    Raises:
        LayoutError: there are other groups than shapes, or too few or too many elements.
    """
    for rank, groups in enumerate(sizes):
        if len(groups) != len(shapes):
            raise LayoutError(
                f"rank {rank} has {len(groups):,} groups of parameters, {len(shapes):,} are named"
            )
    if paddings is None:
        paddings = [[0] * len(named) for named in shapes]
    if [len(behind) for behind in paddings] != [len(named) for named in shapes]:
        raise LayoutError("has paddings of other parameters than are named")
    found: dict[str, Planned] = {}
    for group, (named, behind) in enumerate(zip(shapes, paddings, strict=True)):
        counts = [groups[group] for groups in sizes]
        wanted = sum(math.prod(shape) for shape in named.values()) + sum(behind)
        # Both are padded, by rules that changed: only to multiples of this are they the same.
        unit = 2 * len(sizes)
        if wanted > sum(counts) or -(-wanted // unit) != -(-sum(counts) // unit):
            raise LayoutError(
                f"group {group} has {sum(counts):,} elements in {len(sizes):,} ranks, its "
                f"parameters take {wanted:,}"
            )
        starts = [0, *accumulate(counts)]
        offset = 0
        for (name, shape), padding in zip(named.items(), behind, strict=True):
            _check_new(name, found)
            count = math.prod(shape)
            cuts = _cut(starts, offset, count)
            found[name] = Planned(shape, tuple(Part(rank, group, *cut) for rank, *cut in cuts))
            offset += count + padding
    return found


def plan_stage_3(
    shapes: Sequence[Mapping[str, Shape]], sizes: Sequence[Sequence[int]]
) -> dict[str, Planned]:
    """The parameters, whatever group they are in: a rank's groups count as one behind another.

    Raises:
        LayoutError: ranks differ in their groups, or there are too few or too many elements.
    """
    world = len(sizes)
    for rank, groups in enumerate(sizes):
        if list(groups) != list(sizes[0]):
            raise LayoutError(f"the groups of rank {rank} are of other sizes than those of rank 0")
    starts = [0, *accumulate(sizes[0])]
    found: dict[str, Planned] = {}
    offset = 0
    for named in shapes:
        for name, shape in named.items():
            _check_new(name, found)
            total = math.prod(shape)
            share = -(-total // world)
            if offset + share > starts[-1]:
                raise LayoutError(
                    f"parameter {name!r} takes {share:,} elements of each rank from {offset:,} on, "
                    f"each has {starts[-1]:,}"
                )
            parts = tuple(
                Part(rank, *cut)
                for rank in range(world)
                for cut in _cut(starts, offset, min(share, max(0, total - rank * share)))
            )
            found[name] = Planned(shape, parts)
            offset += share
    if offset != starts[-1]:
        raise LayoutError(f"each rank has {starts[-1]:,} elements, its parameters take {offset:,}")
    return found


def _cut(starts: Sequence[int], offset: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Which of the pieces that begin there hold these elements: its number, from where, how many.

    The last of `starts` is where the last piece ends.
    """
    number = bisect.bisect_right(starts, offset) - 1
    while count:
        begin, end = starts[number], starts[number + 1]
        taken = min(end - offset, count)
        if taken:
            yield number, offset - begin, taken
        offset, count, number = offset + taken, count - taken, number + 1


def _check_new(name: str, found: Mapping[str, Planned]) -> None:
    if name in found:
        raise LayoutError(f"parameter {name!r} is named twice")
