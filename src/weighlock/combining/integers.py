"""Integers and bools of a block: kept where all agree, else as one was told. Pure arithmetic."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from weighlock.combining.desk import Desk, Fault, step_units
from weighlock.combining.rounding import as_numbers, unit_bytes, unit_dtype
from weighlock.tensors.arrays import Array
from weighlock.tensors.dtypes import DType

__all__ = ["Agreed", "IntegerPolicy", "IntegerSum", "beyond_floats", "nearest", "rounded_to"]

IntegerPolicy: TypeAlias = Literal["equal", "first", "max", "round"]

_ADVICE = 'integers="first", "max" or "round" (--integers) says which to take'

_EXACT = 2**53
"""Integers up to here are floats."""

_OVERFLOWED = 2.0**60
"""64-bit results that went around differ from their estimate by 2**64; rounding explains less."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """Rows that should be equal. Which of them it is if they are not, `policy` says.

    `equal` refuses, `first` takes the first, `max` the largest of each element (any, for bools),
    `round` the weighted mean to the nearest integer.
    """

    dtype: DType
    weights: tuple[float, ...]
    policy: IntegerPolicy = "equal"

    def combine(self, rows: Array, units: int, out: Array, desk: Desk) -> None:
        nbytes = units * unit_bytes(self.dtype)
        found = rows[:, :nbytes]
        if self.dtype is DType.BOOL:
            found = as_numbers(found, self.dtype).view(np.uint8)
        out[:nbytes] = found[0]
        if self.policy == "first":
            return
        others = [row for row in range(1, len(found)) if (found[row] != found[0]).any()]
        if not others:
            return
        values = found.view(unit_dtype(self.dtype).numpy)
        if self.dtype.is_packed or self.policy == "equal":
            unit = int(np.flatnonzero(values[others[0]] != values[0])[0])
            told = "" if self.dtype.is_packed else f"; {_ADVICE}"
            raise Fault(
                f"is {values[others[0], unit]} where others have {values[0, unit]}{told}",
                row=others[0],
                unit=unit,
            )
        target = out[:nbytes].view(values.dtype)
        if self.policy == "max":
            np.max(values, axis=0, out=target)
        else:
            step = step_units(len(values))
            for begin in range(0, units, step):
                try:
                    some = values[:, begin : begin + step]
                    target[begin : begin + step] = self._rounded(some)
                except Fault as fault:
                    raise fault.behind(begin) from fault

    def _rounded(self, values: Array) -> Array:
        """The first plus the mean of what the others differ by: exact for neighbours of 2**60.

        The mean of differences is one of float64: what it is off may be seen from 2**50 on.
        """
        if values.dtype.itemsize < 8:
            # Row by row: a product of matrices adds a lone column in another order.
            mean = np.zeros(values.shape[1])
            for weight, row in zip(self.weights, values, strict=True):
                mean += weight * row.astype(np.float64)
            return rounded_to(mean, values.dtype)
        first, apart = values[0], np.zeros(values.shape[1])
        for number, (weight, row) in enumerate(zip(self.weights, values, strict=True)):
            differs = (row - first).view(np.int64)
            expected = row.astype(np.float64) - first.astype(np.float64)
            _check_not_around(differs, expected, "differs from the first by", number)
            apart += weight * differs
        return nearest(first, apart, np.int64)


@dataclass(frozen=True, slots=True)
class IntegerSum:
    """Σ factor · row, exact if the factors are whole; a result that does not fit is refused.

    A product with another factor is the nearest integer to what float64 makes of it, and is refused
    where that is not exact: of numbers beyond 2**53.
    """

    dtypes: tuple[DType, ...]
    factors: tuple[float, ...]
    dtype: DType

    def combine(self, rows: Array, units: int, out: Array, desk: Desk) -> None:
        target = out[: units * unit_bytes(self.dtype)].view(unit_dtype(self.dtype).numpy)
        step = step_units(len(self.dtypes))
        for begin in range(0, units, step):
            try:
                self._combine(rows, begin, target[begin : begin + step])
            except Fault as fault:
                raise fault.behind(begin) from fault

    def _combine(self, rows: Array, first: int, target: Array) -> None:
        estimate = np.zeros(target.size)
        exact = np.zeros(target.size, np.uint64)  # modulo 2**64
        for row, (factor, dtype) in enumerate(zip(self.factors, self.dtypes, strict=True)):
            width = unit_bytes(dtype)
            part = as_numbers(rows[row, first * width : (first + target.size) * width], dtype)
            product = factor * part.astype(np.float64)
            estimate += product
            if factor.is_integer():
                whole = part.astype(np.uint64 if part.dtype.kind == "u" else np.int64)
                exact += whole.view(np.uint64) * np.uint64(int(factor) % 2**64)
            else:
                _check_exact(part, product, factor, row)
                exact += np.rint(product).astype(np.int64).view(np.uint64)
        if target.dtype.itemsize < 8:
            _check_not_around(exact.view(np.int64), estimate)
            target[...] = rounded_to(exact.view(np.int64).astype(np.float64), target.dtype)
        else:
            found = exact.view(target.dtype)
            _check_not_around(found, estimate)
            target[...] = found


def beyond_floats(values: Array) -> Array:
    """Which integers float64 may not hold."""
    if values.dtype.itemsize < 8:
        return np.zeros(values.shape, np.bool_)
    beyond: Array = values > _EXACT
    if values.dtype.kind == "i":
        beyond |= values < -_EXACT
    return beyond


def nearest(base: Array, apart: Array, kind: type) -> Array:
    """The integers nearest to base + apart, ties to even; what is apart is whole as `kind`."""
    below = np.floor(apart)
    rest = apart - below
    found: Array = base + below.astype(kind).view(base.dtype)
    one = np.ones((), base.dtype)
    found += (rest > 0.5) | ((rest == 0.5) & ((found & one) == one))
    return found


def rounded_to(values: Array, dtype: "np.dtype[np.generic]") -> Array:
    """Floats as the nearest integers, or bools; what does not fit is refused."""
    whole = np.rint(values)
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)  # type: ignore[type-var]
    # Below the next: the largest of 64 bits is none of the floats, and is rounded to the next.
    wrong = np.flatnonzero(~((whole >= low) & (whole < float(high + 1))))
    if wrong.size:
        raise Fault(f"becomes {whole[wrong[0]]:.0f}, beyond {dtype}", unit=int(wrong[0]))
    return whole.astype(dtype)


def _check_exact(part: Array, product: Array, factor: float, row: int) -> None:
    """Refuse numbers that float64 does not hold, themselves or times a factor."""
    wrong = np.flatnonzero((np.abs(product) > _EXACT) | beyond_floats(part))
    if wrong.size:
        what = f"holds {part[wrong[0]]}: times {factor:g}, beyond 2**53, floats are not exact"
        raise Fault(what, row=row, unit=int(wrong[0]))


def _check_not_around(
    found: Array, estimate: Array, what: str = "becomes", row: int | None = None
) -> None:
    wrong = np.flatnonzero(np.abs(found.astype(np.float64) - estimate) > _OVERFLOWED)
    if wrong.size:
        told = f"{what} {estimate[wrong[0]]:.4g}, beyond 64 bits"
        raise Fault(told, row=row, unit=int(wrong[0]))
