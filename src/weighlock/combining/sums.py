"""Weighted sums of a block, rounded once. Pure arithmetic: who is summed, and why, it is not told.

Every result is the float64 sum rounded to its dtype. Compiled code makes most of them where there
is any (`compiled`). numpy makes the others, and all where there is none; how it is had faster for
bf16 then, `bf16` knows.
"""

from dataclasses import dataclass

import numpy as np

from weighlock.combining.bf16 import add_rows, sum_bf16
from weighlock.combining.compiled import weighted_sum
from weighlock.combining.desk import Desk, Fault, not_finite, step_units
from weighlock.combining.integers import beyond_floats, rounded_to
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

__all__ = ["WeightedSum", "widened"]

_BEYOND_F4 = 7.0
"""Half-way between the largest of F4 and the next there would be, which is even."""


@dataclass(frozen=True, slots=True)
class WeightedSum:
    """Σ weight · row.

    Args:
        dtypes: of the rows.
        weights: one for each row.
        dtype: of the result; integers are the nearest ones.
        single: sum in float32 and leave it at that; numbers of 64 bits in float64 all the same.
        finite: refuse NaN and infinity.
        is_mean: the weights are shares of a whole, as nearly as floats are. Where rows agree, the
            result is what they agree on then, and none overflows.
    """

    dtypes: tuple[DType, ...]
    weights: tuple[float, ...]
    dtype: DType
    single: bool = False
    finite: bool = True
    is_mean: bool = False

    def combine(self, rows: Array, units: int, out: Array, desk: Desk) -> None:
        if not self._try_compiled(rows, units, out):
            self.combine_by_numpy(rows, units, out, desk)

    def _try_compiled(self, rows: Array, units: int, out: Array) -> bool:
        """Returns whether compiled code has made it. If not, numpy will, or say what is wrong."""
        if self.single or self._is_mean_of(np.float64):
            return False
        return weighted_sum(self.dtypes, self.weights, self.dtype, rows, units, out)

    def combine_by_numpy(self, rows: Array, units: int, out: Array, desk: Desk) -> None:
        """As `combine`, for whatever dtypes and numbers."""
        is_bf16 = self.dtype is DType.BF16 and self.dtypes.count(DType.BF16) == len(self.dtypes)
        if is_bf16 and not self.single:
            bits, result = rows[:, : 2 * units].view(np.uint16), out[: 2 * units].view(np.uint16)
            if sum_bf16(self.weights, bits, result, desk):
                return
        self._check_exact(rows, units)
        is_short = all(unit_dtype(each).bits <= 32 for each in (self.dtype, *self.dtypes))
        kind = np.float32 if self.single and is_short else np.float64
        weights = np.array(self.weights, kind)
        per, width = numbers_per_unit(self.dtype), unit_bytes(self.dtype)
        step = units or 1 if self._is_plain else step_units(len(self.dtypes))
        for begin in range(0, units, step):
            count = min(step, units - begin)
            values = self._values(rows, begin, count, kind, desk)
            sums = desk.array("sums", (count * per,), kind)
            desk.align_casts(kind)
            add_rows(weights, values, sums)
            if self._is_mean_of(kind):
                _keep_within(values, sums, desk)
            if self.finite and not np.isfinite(sums).all():
                raise not_finite(values, begin, per) or _overflowing(~np.isfinite(sums), begin, per)
            target = out[begin * width : (begin + count) * width]
            if is_averaged(self.dtype):
                narrow(sums, self.dtype, target)
                if self.finite and self._may_grow:
                    self._check(sums, target, begin)
            else:
                integers = target.view(unit_dtype(self.dtype).numpy)
                integers[...] = rounded_to(sums, integers.dtype)

    @property
    def _may_grow(self) -> bool:
        """Whether results may be larger than every row, and too large: those of a mean are not."""
        return not self.is_mean or set(self.dtypes) != {self.dtype}

    def _is_mean_of(self, kind: type) -> bool:
        """Whether it is a mean that nothing rounds again: what its sums are off would be seen."""
        if not self.is_mean or len(self.dtypes) == 1:
            return False
        return all(unit_dtype(each).numpy == kind for each in (self.dtype, *self.dtypes))

    def _check(self, sums: Array, result: Array, first: int) -> None:
        """Refuse results that their dtype does not have."""
        if self.dtype is DType.F4:  # has no infinity: what is too large becomes the largest
            wrong = np.abs(sums) >= _BEYOND_F4
        else:
            wrong = ~np.isfinite(result.view(unit_dtype(self.dtype).numpy))
        if not wrong.any():
            return
        value = sums[np.flatnonzero(wrong)[0]]
        fault = _overflowing(wrong, first, numbers_per_unit(self.dtype))
        if self.dtype is DType.F8_E8M0 and value < 1:
            what = f"becomes {value:g}: {self.dtype} has only powers of two, from 2**-127 on"
            fault = Fault(what, unit=fault.unit)
        raise fault

    def _check_exact(self, rows: Array, units: int) -> None:
        """Refuse integers that no float is: not even equal ones would stay what they are."""
        for row, dtype in enumerate(self.dtypes):
            if dtype in (DType.I64, DType.U64):
                values = rows[row, : 8 * units].view(dtype.numpy)
                wrong = np.flatnonzero(beyond_floats(values))
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


def widened(
    rows: Array, dtypes: tuple[DType, ...], first: int, count: int, kind: type, desk: Desk
) -> Array:
    """Units of every row as floats, one row each."""
    values = desk.array("values", (len(dtypes), count * numbers_per_unit(dtypes[0])), kind)
    for row, dtype in enumerate(dtypes):
        width = unit_bytes(dtype)
        widen(rows[row, first * width : (first + count) * width], dtype, values[row])
    return values


def _overflowing(wrong: Array, first: int, per: int) -> Fault:
    return Fault("overflows", unit=first + int(np.flatnonzero(wrong)[0]) // per)


def _keep_within(values: Array, sums: Array, desk: Desk) -> None:
    """Put means that rounding moved away from rows that agree, or beyond all floats, back.

    Where all rows are the same number, the sum is off by a few units in its last place at the most.
    Only such sums are looked at: they are few, and to look at all rows takes longer than to sum.
    """
    kind = np.finfo(sums.dtype)
    most = desk.array("most", sums.shape, sums.dtype.type)
    apart = desk.array("apart", sums.shape, sums.dtype.type)
    is_near = desk.array("near", sums.shape, np.bool_)
    with np.errstate(all="ignore"):
        # Each share, each product and each sum is rounded; next to zero, to the least number.
        np.abs(values[0], out=most)
        most *= (len(values) + 3) * kind.eps
        most += len(values) * kind.smallest_subnormal
        np.abs(np.subtract(sums, values[0], out=apart), out=apart)
        np.less_equal(apart, most, out=is_near)
        if not np.isfinite(sums).all():
            is_near |= ~np.isfinite(sums)
        some = np.flatnonzero(is_near)
        some = some[apart[some] != 0]
        step = step_units(len(values))
        for begin in range(0, some.size, step):
            columns = some[begin : begin + step]
            found = values[:, columns]
            sums[columns] = np.clip(sums[columns], found.min(axis=0), found.max(axis=0))
