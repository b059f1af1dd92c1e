"""Order statistics of a block, element by element: the mean of what is left of the sorted values.

Pure arithmetic. The median is the case in which one value is left, or two. Compiled code makes it
where there is any (`compiled`); numpy makes what that does not, and says what is wrong.
"""

from dataclasses import dataclass

import numpy as np

from weighlock.combining.compiled import trimmed_mean
from weighlock.combining.desk import Desk, not_finite, step_units
from weighlock.combining.integers import nearest, rounded_to
from weighlock.combining.rounding import narrow, numbers_per_unit, unit_bytes, unit_dtype
from weighlock.combining.sums import widened
from weighlock.tensors.arrays import Array
from weighlock.tensors.dtypes import DType

__all__ = ["TrimmedMean"]


_LARGEST = np.nextafter(2.0**64, 0.0)
"""The largest float that 64 bits can hold."""


@dataclass(frozen=True, slots=True)
class TrimmedMean:
    """For each element, the mean without the `cut` smallest and the `cut` largest values.

    Where a value is NaN, and that is not refused, the result is NaN.
    """

    dtypes: tuple[DType, ...]
    cut: int
    finite: bool = True

    def combine(self, rows: Array, units: int, out: Array, desk: Desk) -> None:
        if not trimmed_mean(self.dtypes, self.cut, rows, units, out, desk):
            self.combine_by_numpy(rows, units, out, desk)

    def combine_by_numpy(self, rows: Array, units: int, out: Array, desk: Desk) -> None:
        """As `combine`, for whatever dtypes and numbers."""
        dtype = self.dtypes[0]
        per, width = numbers_per_unit(dtype), unit_bytes(dtype)
        step = step_units(len(self.dtypes))
        for begin in range(0, units, step):
            count = min(step, units - begin)
            target = out[begin * width : (begin + count) * width]
            if dtype in (DType.I64, DType.U64):
                self._of_long_integers(rows[:, begin * width : (begin + count) * width], target)
                continue
            values = widened(rows, self.dtypes, begin, count, np.float64, desk)
            fault = not_finite(values, begin, per) if self.finite else None
            if fault is not None:
                raise fault
            values.sort(axis=0)  # NaN last
            left = values[self.cut : len(values) - self.cut]
            with np.errstate(all="ignore"):
                means = _added(left)
                means /= len(left)
                _mend_overflows(means, left)
                np.clip(means, left[0], left[-1], out=means)  # of F64 a sum may be off
            means += 0.0  # one kind of zero: which of two came last, sorting does not tell
            means[np.isnan(values[-1])] = np.nan
            if dtype.is_float:
                narrow(means, dtype, target)
            else:
                kind = unit_dtype(dtype).numpy
                target.view(kind)[...] = rounded_to(means, kind)

    def _of_long_integers(self, rows: Array, out: Array) -> None:
        """The smallest that is left plus the mean of what the others are above it.

        That is exact where they agree, or nearly; as floats they would not even be themselves.
        """
        values = np.sort(rows.view(self.dtypes[0].numpy), axis=0)
        left = values[self.cut : len(values) - self.cut]
        above = (left - left[0]).view(np.uint64)
        mean = np.minimum(_added(above.astype(np.float64)) / len(left), _LARGEST)
        found = nearest(left[0], mean, np.uint64)
        out.view(left.dtype)[...] = np.clip(found, left[0], left[-1])


def _mend_overflows(means: Array, left: Array) -> None:
    """Where only the sum was too large, have the mean of the parts, and of no other number."""
    large = np.flatnonzero(np.isinf(means))
    if not large.size:
        return
    large = large[np.isfinite(left[:, large]).all(axis=0)]
    columns = left[:, large]
    means[large] = np.clip(_added(columns / len(left)), columns[0], columns[-1])


def _added(rows: Array) -> Array:
    """The sum of the rows, one after another: numpy would add a lone column in another order."""
    total: Array = rows[0].copy()
    for row in rows[1:]:
        total += row
    return total
