"""Statistics and a histogram of a tensor, in one pass over blocks of it. Pure: reads nothing.

Types of 16 bits or fewer are counted code by code, which is exact and gives everything at the end.
Wider ones are summed block by block in double precision, and sorted into bins whose width is a
power of two: when a value falls outside, the width doubles and neighbours become one bin, so that
no second pass is needed and no count is ever a guess.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from weighlock.tensors.arrays import Array, unpack_f4
from weighlock.tensors.dtypes import DType

__all__ = ["Statistics", "Tally", "has_statistics"]

_MOST_BINS = 100
_EXACT_BITS = 52
"""Bins are never so narrow that a double cannot tell one from the next."""

_LEAST_EXPONENT = -1000
_LARGEST = float(np.finfo(np.float64).max)


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a tensor's elements are like. All but the counts are of its finite elements."""

    count: int
    nan: int
    inf: int
    zeros: int
    min: float | int | None
    """None if no element is finite, like the three below."""
    max: float | int | None
    mean: float | None
    std: float | None
    """Of the whole population: divided by the count."""
    start: float = 0.0
    """Where the first bin begins."""
    width: float = 1.0
    """Of each bin: a power of two."""
    bins: tuple[int, ...] = ()
    of: str = "values"
    """`magnitudes` for complex numbers."""


def has_statistics(dtype: DType) -> bool:
    """Whether elements can be told apart: of F6 nobody says in which order its bits lie."""
    return not (dtype.is_packed and dtype is not DType.F4)


class Tally:
    """Takes the bytes of a tensor, in order and in any whole number of elements at a time.

    Args:
        dtype: of its elements; one that `has_statistics`.
    """

    def __init__(self, dtype: DType) -> None:
        self._dtype = dtype
        bits = 8 if dtype.is_packed else dtype.bits
        self._codes = np.zeros(1 << bits, np.int64) if bits <= 16 else None
        self._moments = _Moments()

    def add(self, block: memoryview) -> None:
        """Count these elements in. Takes a few times the block's size in memory while it does."""
        raw = np.frombuffer(block, np.uint8)
        if self._codes is not None:
            codes = raw.view(f"<u{self._codes.size.bit_length() // 8}")
            self._codes += np.bincount(codes, minlength=self._codes.size)
        else:
            self._moments.add(raw.view(self._dtype.numpy))

    def statistics(self) -> Statistics:
        """Of all that was added so far."""
        moments = self._moments
        if self._codes is not None:
            moments = _Moments()
            moments.add(*self._values(self._codes))
        return moments.statistics(self._dtype)

    def _values(self, counts: Array) -> tuple[Array, Array]:
        """The value of each code, and how often it came."""
        codes = np.arange(counts.size, dtype=f"<u{counts.size.bit_length() // 8}")
        if self._dtype is DType.F4:
            both = np.empty(2 * codes.size, np.uint8)
            unpack_f4(codes, both)
            codes, counts = both, np.repeat(counts, 2)
        if self._dtype is DType.BOOL:
            return codes.astype(bool), counts
        return codes.view(self._dtype.numpy), counts


class _Moments:
    """Counts, extremes, mean and spread, joined block by block, and the bins."""

    def __init__(self) -> None:
        self._count = self._nan = self._inf = self._zeros = 0
        self._min: float | int | None = None
        self._max: float | int | None = None
        self._finite = 0
        self._mean = self._spread = 0.0
        self._bins = _Bins()

    def add(self, values: Array, counts: "Array | None" = None) -> None:
        """Count values in, each once, or as often as `counts` says."""
        if counts is not None:
            values, counts = values[counts > 0], counts[counts > 0]
        if values.dtype.kind not in "iub":
            with np.errstate(over="ignore", invalid="ignore"):
                values = np.abs(values) if values.dtype.kind == "c" else values
                values = values.astype(np.float64, copy=False)
            finite = np.isfinite(values)
            self._count += _number(values, counts)
            if not finite.all():
                odd = np.isnan(values)
                self._nan += _number(values[odd], None if counts is None else counts[odd])
                odd = np.isinf(values)
                self._inf += _number(values[odd], None if counts is None else counts[odd])
                values, counts = values[finite], None if counts is None else counts[finite]
        else:
            self._count += _number(values, counts)
        if not values.size:
            return
        zero = values == 0
        self._zeros += int(np.count_nonzero(zero) if counts is None else counts[zero].sum())
        low, high = values.min().item(), values.max().item()
        self._min = low if self._min is None else min(low, self._min)
        self._max = high if self._max is None else max(high, self._max)
        is_whole = values.dtype.kind in "iub"
        doubles = values.astype(np.float64, copy=False)
        self._join(doubles, counts)
        self._bins.add(doubles, counts, float(low), float(high), is_whole=is_whole)

    def _join(self, values: Array, counts: "Array | None") -> None:
        # Chan's rule for joining two means and two sums of squares, which loses no digits where
        # a running sum of squares would lose all of them.
        count = _number(values, counts)
        with np.errstate(over="ignore", invalid="ignore"):
            mean = float(np.average(values, weights=counts))
            if not math.isfinite(mean):  # the sum of doubles near the largest
                mean = float(np.average(values / 2**64, weights=counts)) * 2.0**64
            squares = (values - mean) ** 2
            spread = float(squares.sum() if counts is None else (squares * counts).sum())
            total = self._finite + count
            delta = mean - self._mean
            self._mean += delta * (count / total)
            self._spread += spread + delta * delta * (self._finite * (count / total))
        self._finite = total

    def statistics(self, dtype: DType) -> Statistics:
        """Of what was counted in."""
        start, width, bins = self._bins.shown()
        std = math.sqrt(self._spread / self._finite) if self._finite else None
        return Statistics(
            self._count,
            self._nan,
            self._inf,
            self._zeros,
            _plain(self._min),
            _plain(self._max),
            self._mean if self._finite else None,
            std if std is not None and math.isfinite(std) else None,
            start,
            width,
            bins,
            "magnitudes" if dtype.is_complex else "values",
        )


def _plain(value: float | int | bool | None) -> float | int | None:
    return int(value) if isinstance(value, bool) else value


def _number(values: Array, counts: "Array | None") -> int:
    return values.size if counts is None else int(counts.sum())


@dataclass(slots=True)
class _Bins:
    """Bins [n·2^e, (n+1)·2^e) for all n between the least and the largest value."""

    _exponent: int = _LEAST_EXPONENT
    _first: int = 0
    _counts: Array = field(default_factory=lambda: np.zeros(0, np.int64))

    def add(
        self, values: Array, counts: "Array | None", low: float, high: float, *, is_whole: bool
    ) -> None:
        """Sort finite values in, which lie between `low` and `high`."""
        largest = max(abs(low), abs(high))
        narrowest = math.frexp(largest)[1] - _EXACT_BITS if largest else -_EXACT_BITS
        exponent = max(self._exponent, narrowest, 0 if is_whole else _LEAST_EXPONENT)
        while True:
            first, last = _bin(low, exponent), _bin(high, exponent)
            if self._counts.size:
                shift = exponent - self._exponent
                first = min(first, self._first >> shift)
                last = max(last, (self._first + self._counts.size - 1) >> shift)
            if last - first < _MOST_BINS:
                break
            exponent += 1
        self._widen(exponent, first, last)
        # Multiplied by a power of two a double loses nothing, so that a value on an edge falls
        # where the edge says.
        scaled = np.ldexp(values, -exponent)
        numbers = np.floor(scaled, out=scaled).astype(np.int64)
        if low < 0 < exponent:  # what became too small for a double still lies below zero
            numbers[(values < 0) & (numbers == 0)] = -1
        numbers -= self._first
        self._counts += (
            np.bincount(numbers, minlength=self._counts.size)
            if counts is None
            else _weighted(numbers, counts, self._counts.size)
        )

    def _widen(self, exponent: int, first: int, last: int) -> None:
        """Let bins be so wide, from that one to that one; what was counted finds its place."""
        old, shift = self._first + np.arange(self._counts.size), exponent - self._exponent
        # Python's shift: of any distance, and towards minus infinity, as floor does.
        numbers = np.array([(int(n) >> shift) - first for n in old], np.int64)
        self._counts = _weighted(numbers, self._counts, last - first + 1)
        self._exponent, self._first = exponent, first

    def shown(self) -> tuple[float, float, tuple[int, ...]]:
        """Start, width and counts, without empty bins at the ends."""
        if not self._counts.any():
            return 0.0, 1.0, ()
        full = np.flatnonzero(self._counts)
        begin, end = int(full[0]), int(full[-1]) + 1
        width = math.ldexp(1.0, self._exponent)
        start = max(-_LARGEST, min((self._first + begin) * width, _LARGEST))
        return start, width, tuple(self._counts[begin:end].tolist())


def _bin(value: float, exponent: int) -> int:
    mantissa, power = math.frexp(value)
    # Exact whatever the exponent: a double is a whole number of 53 bits times a power of two.
    whole, shift = int(math.ldexp(mantissa, 53)), power - 53 - exponent
    return whole << shift if shift >= 0 else whole >> -shift


def _weighted(numbers: Array, counts: Array, size: int) -> Array:
    totals = np.zeros(size, np.int64)
    np.add.at(totals, numbers, counts)
    return totals
