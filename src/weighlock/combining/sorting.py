"""Order statistics of a block, element by element: the mean of what is left of the sorted values.

Pure arithmetic. The median is the case in which one value is left, or two.
"""

from dataclasses import dataclass

import numpy as np

from weighlock.combining.desk import Desk, Fault
from weighlock.combining.integers import rounded_to
from weighlock.combining.rounding import narrow, numbers_per_unit, unit_bytes, unit_dtype
from weighlock.combining.sums import step_units, widened
from weighlock.tensors.arrays import Array
from weighlock.tensors.dtypes import DType

__all__ = ["TrimmedMean"]


@dataclass(frozen=True, slots=True)
class TrimmedMean:
    """For each element, the mean without the `cut` smallest and the `cut` largest values.

    Where a value is NaN, and that is not refused, the result is NaN.
    """

    dtypes: tuple[DType, ...]
    cut: int
    finite: bool = True

    def combine(self, rows: Array, units: int, out: Array, desk: Desk) -> None:
        dtype = self.dtypes[0]
        per, width = numbers_per_unit(dtype), unit_bytes(dtype)
        step = step_units(len(self.dtypes))
        for begin in range(0, units, step):
            count = min(step, units - begin)
            values = widened(rows, self.dtypes, begin, count, np.float64, desk)
            if self.finite:
                self._check(values, begin, per)
            values.sort(axis=0)  # NaN last
            left = values[self.cut : len(values) - self.cut]
            with np.errstate(all="ignore"):
                means = left.sum(axis=0)
                means /= len(left)
                if np.isinf(means).any() and np.isfinite(left).all():  # it is the sum that was
                    means = np.clip((left / len(left)).sum(axis=0), left[0], left[-1])
            means[np.isnan(values[-1])] = np.nan
            target = out[begin * width : (begin + count) * width]
            if dtype.is_float:
                narrow(means, dtype, target)
            else:
                kind = unit_dtype(dtype).numpy
                target.view(kind)[...] = rounded_to(means, kind)

    def _check(self, values: Array, first: int, per: int) -> None:
        fine = np.isfinite(values)
        if not fine.all():
            row, place = (int(found[0]) for found in np.nonzero(~fine))
            what = "NaN" if np.isnan(values[row, place]) else "Inf"
            raise Fault(f"holds {what}", row=row, unit=first + place // per)
