"""Which blocks of which tensors are combined, and how large they are. Pure: nothing is read.

Blocks are small enough that the rows of one, and what is made of them, stay near a core; large
enough that reading a row is worth a system call, or a request. With many contributors rows get
shorter: memory does not grow with their number.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weighlock.combining.desk import Combine
from weighlock.combining.rounding import unit_bytes, units_of
from weighlock.tensors.ref import TensorRef
from weighlock.tensors.spec import TensorSpec

__all__ = ["CONNECTED", "Block", "Part", "kept_blocks", "plan_blocks", "row_bytes"]

_LOCAL_BYTES = 768 * 1024
"""A row from a file. Shorter ones would stay nearer to a core; but threads that meet between calls
of numpy wait for each other, and with a third of this they wait longer than the cache saves."""

_REMOTE_BYTES = 4 * 1024 * 1024
"""A row from a server: a request costs a round trip."""

_ALL_BYTES = 40 * 1024 * 1024
"""All rows of all blocks that are under way."""

_WORK_BYTES = 88 * 1024 * 1024
"""The same, with what threads make of them."""

_MADE_PER_ROW = 7
"""Rows that what a thread makes of a block is as long as: sums and their ends in twice the width,
the result, what of it is open, and what is on its way."""

_KEPT_BYTES = 1024 * 1024
"""What a remote source keeps of a block of which a row took a part."""

CONNECTED = 24
"""So many remote sources keep their connections, of which each has up to two. A server may give one
peer 64 in all; where there are more sources, each connects anew for every block."""

_UNITS = 64
"""Blocks are multiples of so many units, so that each starts on whole words."""


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the result, and what it is made of."""

    spec: TensorSpec
    refs: tuple[TensorRef, ...]
    """One row each, in the order in which they count."""
    owners: tuple[int, ...]
    """Whose row it is: the number of a contributor."""
    how: Combine

    @property
    def units(self) -> int:
        """Units of the tensor; the same number in every row."""
        return units_of(self.spec)

    @property
    def row_width(self) -> int:
        """Bytes of the widest unit among rows and result."""
        return max(unit_bytes(dtype) for dtype in (self.spec.dtype, *(r.dtype for r in self.refs)))

    @property
    def read_bytes(self) -> int:
        """Bytes of all rows."""
        return sum(ref.nbytes for ref in self.refs)


@dataclass(frozen=True, slots=True)
class Block:
    """A run of units of one part."""

    part: int
    first: int
    units: int
    is_first: bool


def row_bytes(rows: int, *, under_way: int, threads: int = 1, sources: int = 0) -> int:
    """How long a row may be if so many blocks of so many rows are held at once.

    Args:
        rows: of the tensor that has the most.
        under_way: blocks that are held at once.
        threads: how many work on one each.
        sources: how many are remote; what those keep takes memory too.
    """
    wanted = _REMOTE_BYTES if sources else _LOCAL_BYTES
    rest = max(_ALL_BYTES // 2, _ALL_BYTES - sources * kept_blocks(sources) * _KEPT_BYTES)
    held = under_way * max(1, rows)
    longest = min(rest // held, _WORK_BYTES // (held + threads * _MADE_PER_ROW))
    return max(_UNITS * 16, min(wanted, longest))


def kept_blocks(sources: int) -> int:
    """How many blocks each of so many remote sources may keep for its next rows."""
    return 2 if sources <= 16 else 1 if sources <= 80 else 0


def plan_blocks(parts: Sequence[Part], max_row_bytes: int) -> Iterator[Block]:
    """Every part in order, cut into blocks; each has at least one, and all together every unit."""
    for number, part in enumerate(parts):
        step = max_row_bytes // part.row_width // _UNITS * _UNITS
        total = part.units
        first = 0
        while True:
            units = min(step, total - first)
            yield Block(number, first, units, first == 0)
            first += units
            if first == total:
                break
