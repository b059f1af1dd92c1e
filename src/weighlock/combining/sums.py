"""Weighted sums of a block, rounded once. Pure arithmetic: who is summed, and why, it is not told.

Every result is the float64 sum rounded to its dtype; how that is had faster for bf16, `bf16` knows.
"""

from dataclasses import dataclass

import numpy as np

from weighlock.combining.bf16 import add_rows, sum_bf16
from weighlock.combining.desk import Desk, Fault
from weighlock.combining.integers import rounded_to
from weighlock.combining.rounding import (
    is_averaged,
    narrow,
    numbers_per_unit,
    unit_bytes,
    unit_dtype,
    widen,
)
from weighlock.tensors.arrays import Array
from weighlock.tensors.dtypes import DType

__all__ = ["WeightedSum", "step_units", "widened"]

_STEP_NUMBERS = 256 * 1024
"""Numbers that are widened at once, all rows together: 2 MiB of float64."""

_EXACT = 2**53
"""Integers up to here are floats."""


@dataclass(frozen=True, slots=True)
class WeightedSum:
    """Σ weight · row.

    Args:
        dtypes: of the rows.
        weights: one for each row.
        dtype: of the result; integers are the nearest ones.
        single: sum in float32 and leave it at that.
        finite: refuse NaN and infinity.
    """

    dtypes: tuple[DType, ...]
    weights: tuple[float, ...]
    dtype: DType
    single: bool = False
    finite: bool = True

    def combine(self, rows: Array, units: int, out: Array, desk: Desk) -> None:
        if {self.dtype, *self.dtypes} == {DType.BF16} and not self.single:
            bits, result = rows[:, : 2 * units].view(np.uint16), out[: 2 * units].view(np.uint16)
            if sum_bf16(self.weights, bits, result, desk):
                return
        self._check_exact(rows, units)
        kind = np.float32 if self.single else np.float64
        weights = np.array(self.weights, kind)
        per, width = numbers_per_unit(self.dtype), unit_bytes(self.dtype)
        step = units or 1 if self._is_plain else step_units(len(self.dtypes))
        for begin in range(0, units, step):
            count = min(step, units - begin)
            values = self._values(rows, begin, count, kind, desk)
            sums = desk.array("sums", (count * per,), kind)
            desk.align_casts(kind)
            add_rows(weights, values, sums)
            if self.finite and not np.isfinite(sums).all():
                raise _not_finite(values, sums, begin, per)
            target = out[begin * width : (begin + count) * width]
            if is_averaged(self.dtype):
                narrow(sums, self.dtype, target)
                if self.finite and self._may_grow:
                    self._check(target, begin)
            else:
                integers = target.view(unit_dtype(self.dtype).numpy)
                integers[...] = rounded_to(sums, integers.dtype)

    @property
    def _may_grow(self) -> bool:
        """Whether results may be larger than every row, and too large: those of a mean are not."""
        return sum(map(abs, self.weights)) > 1.001 or set(self.dtypes) != {self.dtype}

    def _check(self, result: Array, first: int) -> None:
        wrong = np.flatnonzero(~np.isfinite(result.view(unit_dtype(self.dtype).numpy)))
        if wrong.size:
            raise Fault("overflows", unit=first + int(wrong[0]))

    def _check_exact(self, rows: Array, units: int) -> None:
        """Refuse integers that no float is: not even equal ones would stay what they are."""
        for row, dtype in enumerate(self.dtypes):
            if dtype in (DType.I64, DType.U64):
                values = rows[row, : 8 * units].view(dtype.numpy)
                beyond = values > _EXACT
                if dtype is DType.I64:
                    beyond |= values < -_EXACT
                wrong = np.flatnonzero(beyond)
                if wrong.size:
                    what = f"holds {values[wrong[0]]}, beyond 2**53: floats are not exact there"
                    raise Fault(what, row=row, unit=int(wrong[0]))

    @property
    def _is_plain(self) -> bool:
        """Whether numpy sums the rows as they are: those of eight bits are sooner looked up."""
        first = self.dtypes[0]
        is_short = first.is_float and first.bits <= 8
        return len(set(self.dtypes)) == 1 and not is_short and first is not DType.BOOL

    def _values(self, rows: Array, first: int, count: int, kind: type, desk: Desk) -> Array:
        if not self._is_plain:
            return widened(rows, self.dtypes, first, count, kind, desk)
        width = unit_bytes(self.dtypes[0])
        values = rows[:, first * width : (first + count) * width]
        return values.view(unit_dtype(self.dtypes[0]).numpy)


def step_units(rows: int) -> int:
    """How many units of so many rows are widened at once."""
    return max(64, min(16 * 1024, _STEP_NUMBERS // rows))


def widened(
    rows: Array, dtypes: tuple[DType, ...], first: int, count: int, kind: type, desk: Desk
) -> Array:
    """Units of every row as floats, one row each."""
    values = desk.array("values", (len(dtypes), count * numbers_per_unit(dtypes[0])), kind)
    for row, dtype in enumerate(dtypes):
        width = unit_bytes(dtype)
        widen(rows[row, first * width : (first + count) * width], dtype, values[row])
    return values


def _not_finite(values: Array, sums: Array, first: int, per: int) -> Fault:
    """Which row is to blame; none of them if it is the sum that is too large."""
    for row, found in enumerate(values):
        wrong = np.flatnonzero(~np.isfinite(found))
        if wrong.size:
            what = "NaN" if np.isnan(found[wrong[0]]) else "Inf"
            return Fault(f"holds {what}", row=row, unit=first + int(wrong[0]) // per)
    return Fault("overflows", unit=first + int(np.flatnonzero(~np.isfinite(sums))[0]) // per)
