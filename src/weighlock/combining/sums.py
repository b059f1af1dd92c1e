"""Weighted sums of a block, rounded once. Pure arithmetic: who is summed, and why, it is not told.

Every result is the float64 sum rounded to its dtype. For bf16 that is not how it is made: sums are
made in float32, nearly twice as fast, together with a bound of what they may be off; an element is
taken if all of that interval rounds to one number, and only the few others are summed again in
float64. So the result does not depend on the order or the instructions that made the float32 sums.
"""

from dataclasses import dataclass

import numpy as np

from weighlock.combining.desk import Desk, Fault
from weighlock.combining.integers import rounded_to
from weighlock.combining.rounding import (
    is_averaged,
    narrow,
    numbers_per_unit,
    to_odd,
    unit_bytes,
    unit_dtype,
    widen,
)
from weighlock.tensors.arrays import Array
from weighlock.tensors.dtypes import DType

__all__ = ["WeightedSum", "step_units", "widened"]

_STEP_NUMBERS = 256 * 1024
"""Numbers that are widened at once, all rows together: 2 MiB of float64."""

_BF16 = DType.BF16.numpy

_PIECE = 8192
"""Numbers of bf16 that share a bound of what their sums are off. An outlier widens it for all of
them, and more have to be summed again; for shorter pieces, bounds would take longer than sums."""

_EXACT = 2**53
"""Integers up to here are floats."""

_AGAIN_COLUMNS = 32 * 1024
"""Sums that are made again at once; in float64 they take six times the memory of the block."""

_LEAST, _LARGEST = 2.0**-126, 3e38
"""Weights below are rounded coarsely in float32; weights or sums above could overflow it."""


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
        is_bf16 = {self.dtype, *self.dtypes} == {DType.BF16} and not self.single
        if is_bf16 and self._bf16(rows[:, : 2 * units], out[: 2 * units], desk):
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
            _sum(weights, values, sums)
            if self.finite and not np.isfinite(sums).all():
                raise _not_finite(values, begin, per)
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
        """Whether numpy can sum the rows as they are."""
        return len(set(self.dtypes)) == 1 and self.dtypes[0] not in (DType.F4, DType.BOOL)

    def _values(self, rows: Array, first: int, count: int, kind: type, desk: Desk) -> Array:
        if not self._is_plain:
            return widened(rows, self.dtypes, first, count, kind, desk)
        width = unit_bytes(self.dtypes[0])
        values = rows[:, first * width : (first + count) * width]
        return values.view(unit_dtype(self.dtypes[0]).numpy)

    def _bf16(self, rows: Array, out: Array, desk: Desk) -> bool:
        """Sum in float32 where that decides; False if it is not safe to, and nothing was done."""
        bits, result = rows.view(np.uint16), out.view(np.uint16)
        if not bits.size:
            return True
        weights = np.array(self.weights)
        sizes = np.abs(weights[weights != 0])
        if sizes.size and not (sizes.min() >= _LEAST and sizes.max() <= _LARGEST):
            return False
        whole = result.size - result.size % _PIECE
        spans = [s for s in (slice(0, whole), slice(whole, None)) if result[s].size]
        totals = [_largest_sums(weights, bits[:, span]) for span in spans]
        if not all((each < _LARGEST).all() for each in totals):
            return False
        for span, each in zip(spans, totals, strict=True):
            _sum_bf16(weights, bits[:, span], each, result[span], desk)
        return True


def _sum_bf16(weights: Array, bits: Array, totals: Array, result: Array, desk: Desk) -> None:
    """Sums of equal pieces, in none of which one is beyond the total of its piece."""
    pieces = len(totals), -1
    sums = desk.array("sums", result.shape, np.float32)
    desk.align_casts(np.float32)
    _sum(weights.astype(np.float32), bits.view(_BF16), sums)
    margins = _off_by(len(weights), totals)[:, None]
    # A sum lies between both ends: so it does when all three are rounded.
    ends = result, desk.array("ends", result.shape, np.uint16)
    for add, end in zip((np.subtract, np.add), ends, strict=True):
        out = end.view(_BF16).reshape(pieces)
        add(sums.reshape(pieces), margins, out=out, dtype=np.float32, casting="unsafe")
    parted = desk.array("parted", result.shape, np.bool_)
    undecided = np.flatnonzero(np.not_equal(*ends, out=parted))
    for begin in range(0, undecided.size, _AGAIN_COLUMNS):
        columns = undecided[begin : begin + _AGAIN_COLUMNS]
        # Picked out, they lie column by column, and einsum would add them in another order.
        result[columns] = _sum_again(weights, np.ascontiguousarray(bits[:, columns]))


def _largest_sums(weights: Array, bits: Array) -> Array:
    """What no weighted sum of columns of bf16 is beyond, in each piece of them."""
    pieces = bits.reshape(len(bits), -1, min(_PIECE, bits.shape[1]))
    # As unsigned integers the largest is the most negative number, as signed the most positive.
    negative = pieces.max(axis=2).astype(np.int32) & 0x7FFF
    largest = np.maximum(negative, pieces.view(np.int16).max(axis=2))
    totals: Array = np.abs(weights) @ (largest << 16).view(np.float32)
    return totals


def _off_by(rows: int, totals: Array) -> Array:
    """More than what float32 sums of so many rows are off, where no sum is beyond a total."""
    # A weight and its product are rounded, then n - 1 sums, then an end of the interval: each is
    # off by 2**-24 of the total at the most; or by 2**-150, next to zero.
    margins = (rows + 2) * (2.0**-24 * 1.001 * totals + 2.0**-148)
    return np.nextafter(margins.astype(np.float32), np.float32(np.inf))


def _sum_again(weights: Array, bits: Array) -> Array:
    """The bits of sums in float64, for columns whose float32 sum did not tell how to round."""
    sums = np.empty(bits.shape[1])
    _sum(weights, bits.view(_BF16), sums)
    rounded: Array = to_odd(sums).astype(_BF16).view(np.uint16)
    return rounded


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


def _sum(weights: Array, values: Array, out: Array) -> None:
    """Σ weight · row, in the precision of `out`; rows are widened a few KiB at a time."""
    if values.shape[1] == 1:  # which einsum would add in another order: never alone
        pair = np.empty(2, out.dtype)
        _sum(weights, np.repeat(values, 2, axis=1), pair)
        out[0] = pair[0]
        return
    with np.errstate(all="ignore"):
        np.einsum("i,ij->j", weights, values, out=out, dtype=out.dtype, casting="unsafe")


def _not_finite(values: Array, first: int, per: int) -> Fault:
    """Which row is to blame; none of them if it is the sum that is too large."""
    for row, found in enumerate(values):
        wrong = np.flatnonzero(~np.isfinite(found))
        if wrong.size:
            what = "NaN" if np.isnan(found[wrong[0]]) else "Inf"
            return Fault(f"holds {what}", row=row, unit=first + int(wrong[0]) // per)
    return Fault("overflows", unit=first)
