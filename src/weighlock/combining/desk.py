"""What the arithmetic of blocks has in common: buffers used again, and a way to refuse numbers."""

import math
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from weighlock.tensors.arrays import Array

__all__ = ["SPARE_BYTES", "Combine", "Desk", "Fault", "not_finite", "step_units"]

_MOST_VIEWS = 256

_CAST_NUMBERS = 8192
"""What numpy casts at once."""

_PAD_BYTES = 2056
"""With the eight bytes that malloc adds, an odd multiple of 16."""

_MOST_PADS = 64
"""Then the place is left to luck: only time is lost."""

SPARE_BYTES = 64
"""Room behind each row, for work on whole words."""

_STEP_NUMBERS = 256 * 1024
"""Numbers that are widened at once, all rows together: 2 MiB of float64."""


@dataclass(slots=True)
class Desk:
    """Buffers of one thread, made when first asked for and used for every block after."""

    _buffers: dict[str, Array] = field(default_factory=dict)
    _views: dict[tuple[object, ...], Array] = field(default_factory=dict)
    _pads: list[Array] = field(default_factory=list)
    hints: dict[object, int] = field(default_factory=dict)
    """What combines noted for their next blocks. Speed may depend on it, results may not."""

    def array(self, name: str, shape: tuple[int, ...], dtype: type) -> Array:
        """An uninitialised array; the same memory each time for the same name."""
        key = name, shape, dtype
        view = self._views.get(key)
        return self._made(key, name, shape, dtype) if view is None else view

    def _made(
        self, key: tuple[object, ...], name: str, shape: tuple[int, ...], dtype: type
    ) -> Array:
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.nbytes < nbytes or len(self._views) > _MOST_VIEWS:
            self._views.clear()  # they may be of what is let go of now
            if buffer is None or buffer.nbytes < nbytes:
                buffer = self._buffers[name] = np.empty(nbytes, np.uint8)
        view: Array
        view = self._views[key] = buffer[:nbytes].view(dtype).reshape(shape)
        return view

    def align_casts(self, dtype: type) -> None:
        """Have the next buffer numpy casts through begin on 32 bytes.

        It comes from malloc, which aligns to 16. Begun on an odd multiple of that, every other
        vector straddles two cache lines, and a sum takes half as long again. Where the next one
        would begin shows by asking for one of its size; something held moves it.
        """
        nbytes = _CAST_NUMBERS * np.dtype(dtype).itemsize
        while len(self._pads) < _MOST_PADS:
            if np.empty(nbytes, np.uint8).__array_interface__["data"][0] % 32 == 0:
                return
            self._pads.append(np.empty(_PAD_BYTES, np.uint8))


class Fault(Exception):
    """What a block's arithmetic refuses; who calls it knows the names.

    Args:
        what: goes after the name of the tensor: "holds NaN".
        row: the contribution whose fault it is, counted among those of this tensor.
        unit: where in the block.
    """

    def __init__(self, what: str, *, row: int | None = None, unit: int = 0) -> None:
        super().__init__(what)
        self.what = what
        self.row = row
        self.unit = unit

    def behind(self, units: int) -> "Fault":
        """The same, counted from so many units before."""
        return Fault(self.what, row=self.row, unit=units + self.unit)


def step_units(rows: int) -> int:
    """How many units of so many rows are widened at once."""
    return max(64, min(16 * 1024, _STEP_NUMBERS // rows))


def not_finite(values: Array, first: int, per: int) -> Fault | None:
    """Whose row holds NaN or infinity; None if no row does.

    Args:
        values: the rows, as numbers.
        first: the unit with which they begin.
        per: numbers of a unit.
    """
    for row, found in enumerate(values):
        fine = np.isfinite(found)
        if not fine.all():
            wrong = np.flatnonzero(~fine)
            what = "NaN" if np.isnan(found[wrong[0]]) else "Inf"
            return Fault(f"holds {what}", row=row, unit=first + int(wrong[0]) // per)
    return None


class Combine(Protocol):
    """What is done with one block of a tensor."""

    def combine(self, rows: Array, units: int, out: Array, desk: Desk) -> None:
        """Fill `out` from the rows.

        Args:
            rows: bytes, one row for each contribution, with `SPARE_BYTES` of room behind.
            units: how many units of the tensor they hold; may not exceed what fits.
            out: bytes for as many units of the result.
            desk: buffers.

        Raises:
            Fault: the numbers are refused.
        """
