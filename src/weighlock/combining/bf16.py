"""Weighted sums of bf16, made in float32 and proved. Pure arithmetic.

Every result is the float64 sum rounded once. It is not made that way: sums in float32 take half the
time. For each block it is shown what float32 may have got wrong, and only the few numbers for which
that matters are summed again in float64. So results do not depend on the order or the instructions
that made the float32 sums. There are two ways to show it:

- By a margin: a float32 sum is off by so much at the most. Where all of that interval rounds to one
  number, that is the one.
- By exactness, where all weights are multiples of a power of two: there, means lie half-way between
  two numbers of bf16 again and again, and no margin tells to which side to round. But where the
  numbers that are added are not too far apart in size, float32 holds every sum of them.
"""

import functools
from dataclasses import dataclass
from typing import Self

import numpy as np

from weighlock.combining.desk import Desk
from weighlock.combining.rounding import put_bf16_of_single, to_odd
from weighlock.tensors.arrays import Array
from weighlock.tensors.dtypes import DType

__all__ = ["add_one_by_one", "add_rows", "sum_bf16"]

_BF16 = DType.BF16.numpy

_PIECE = 32 * 1024
"""Numbers that share a bound of what their sums are off. An outlier widens it for all of them, and
more have to be summed again; of shorter pieces, the largest numbers take longer to find."""

_MOST_OPEN = 32
"""One number of so many may be summed again; beyond that, float64 for all is faster."""

_FEW = 256
"""So many may always be."""

_PASSED_OVER = 16
"""Blocks for which float32 is not tried after one that it was not good for: weights that make ties
make them everywhere, but it may have been an odd tensor."""

_FINEST = 2.0**-6
"""Below this grain hardly a sum is exact."""

_AGAIN_COLUMNS = 32 * 1024
"""Sums that are made again at once; in float64 they take six times the memory of the block."""

_LEAST, _LARGEST = 2.0**-126, 3e38
"""Weights below are rounded coarsely in float32; weights or sums above could overflow it."""

_TURNED = np.uint16(-2 % 2**16)

_HALF, _CUT = np.uint32(0x8000), np.uint32(16)
"""Of the bits of float32: half of bf16's last place, and how many are behind that place."""


@dataclass(frozen=True, slots=True)
class _Weights:
    """Weights, and what is known of them before any block."""

    double: Array
    single: Array
    sizes: Array
    off_by: Array
    """What share of a product a sum may be off at the most, the smallest product first."""
    is_single_good: bool
    """Whether float32 has numbers for them."""
    grain: float | None
    """The power of two that all are multiples of; None if it is too fine to be of use."""

    @classmethod
    @functools.lru_cache(maxsize=16)  # looked up for every block
    def of(cls, weights: tuple[float, ...]) -> Self:
        double = np.array(weights)
        sizes = np.abs(double)
        counted = sizes[sizes != 0]
        is_good = not counted.size or bool(counted.min() >= _LEAST and counted.max() <= _LARGEST)
        single = double.astype(np.float32) if is_good else np.zeros(len(weights), np.float32)
        grain = 1 / max(weight.as_integer_ratio()[1] for weight in weights) if is_good else 0
        is_coarse = grain >= _FINEST and bool((single == double).all())
        # In whatever order products are added, what the sums on the way are off is largest where
        # one product comes after the other, the largest first: the last is part of one sum, the one
        # before of two, the first two of all.
        part_of = np.minimum(np.arange(1.0, len(weights) + 1), len(weights) - 1)
        # Each sum is off by 2**-24 of itself at the most. And so is the weight that was rounded,
        # its product, and an end of the interval. A little more covers what errors of errors are.
        off_by = 2.0**-24 * 1.001 * (part_of + 3)
        return cls(double, single, sizes, off_by, is_good, grain if is_coarse else None)


def sum_bf16(weights: tuple[float, ...], bits: Array, result: Array, desk: Desk) -> bool:
    """Fill `result` with the bits of Σ weight · row.

    Args:
        weights: one for each row.
        bits: the rows.
        result: as long as a row.
        desk: buffers.

    Returns:
        Whether float32 was good for it. If not, `result` holds nothing of use.
    """
    if desk.hints.get(weights, 0):
        desk.hints[weights] -= 1
        return False
    known = _Weights.of(weights)
    if not known.is_single_good:
        return False
    whole = result.size - result.size % _PIECE
    spans = [s for s in (slice(0, whole), slice(whole, None)) if result[s].size]
    for span in spans:
        if not _sum_pieces(known, bits[:, span], result[span], desk):
            desk.hints[weights] = _PASSED_OVER
            return False
    return True


def add_rows(weights: Array, values: Array, out: Array) -> None:
    """Σ weight · row, in the precision of `out`; rows are widened a few KiB at a time.

    What overflows becomes infinite: whoever calls this has told numpy not to warn of it.
    """
    if values.shape[1] == 1:  # which einsum would add in another order: never alone
        pair = np.empty(2, out.dtype)
        add_rows(weights, np.repeat(values, 2, axis=1), pair)
        out[0] = pair[0]
    elif out.dtype == np.float64 and _einsum_fuses():
        add_one_by_one(weights, values, out)
    else:
        np.einsum("i,ij->j", weights, values, out=out, dtype=out.dtype, casting="unsafe")


def add_one_by_one(weights: Array, values: Array, out: Array) -> None:
    """The same, with every product and every sum rounded by itself."""
    out[...] = 0
    for weight, row in zip(weights, values, strict=True):
        out += np.multiply(row, weight, dtype=out.dtype, casting="unsafe")


@functools.cache
def _einsum_fuses() -> bool:
    """Whether this numpy multiplies and adds in one step, as on ARM.

    Then a product is not rounded before it is added, and sums have other last bits than elsewhere.
    """
    number = 1 + 2.0**-30
    square = np.full(64, number * number)  # rounded
    rows = np.stack([-square, np.full(64, number)])
    return bool(np.einsum("i,ij->j", np.array([1.0, number]), rows).any())


def _sum_pieces(weights: _Weights, bits: Array, result: Array, desk: Desk) -> bool:
    """The sums of a run of pieces, all equally long."""
    largest = _largest_products(weights.sizes, bits)
    totals = np.add.reduce(largest, axis=0)  # which no sum is beyond
    if not np.maximum.reduce(totals) < _LARGEST:
        return False
    sums = desk.array("sums", (2, result.size), np.float32)
    desk.align_casts(np.float32)
    add_rows(weights.single, bits.view(_BF16), sums[1])
    is_open = desk.array("open", result.shape, np.bool_)
    margins = _margins(weights, largest, totals)
    most = max(_FEW, result.size // _MOST_OPEN)
    if weights.grain is None:
        _round_by_margin(sums, margins, result, is_open)
    else:
        _round_exact(sums, bits, _least_exact(weights.grain, totals), result, is_open, desk)
        if np.count_nonzero(is_open) > most:  # a margin may tell of some of them
            others = (
                desk.array("row", result.shape, np.uint16),
                desk.array("also", result.shape, bool),
            )
            _round_by_margin(sums, margins, *others)
            is_open &= others[1]
    (again,) = is_open.nonzero()
    if again.size > most:
        return False
    for begin in range(0, again.size, _AGAIN_COLUMNS):
        columns = again[begin : begin + _AGAIN_COLUMNS]
        some = np.empty((len(bits), columns.size), np.uint16)
        # One row after the other, not all in one call: a core sees along a row what it needs next.
        for row, found in zip(bits, some, strict=True):
            row.take(columns, out=found, mode="clip")  # "raise" would make a copy, to be undone
        result[columns] = _sum_again(weights.double, some)
    return True


def _largest_products(sizes: Array, bits: Array) -> Array:
    """What no product of a row of bf16 and its weight is beyond, in each piece of the row."""
    pieces = bits.reshape(len(bits), -1, min(_PIECE, bits.shape[1]))
    # As unsigned integers the largest is the most negative number, as signed the most positive.
    negative = np.maximum.reduce(pieces, axis=2).astype(np.int32) & 0x7FFF
    largest = np.maximum(negative, np.maximum.reduce(pieces.view(np.int16), axis=2))
    products: Array = sizes[:, None] * (largest << 16).view(np.float32)
    return products


def _margins(weights: _Weights, largest: Array, totals: Array) -> Array:
    """More than what float32 sums of products are off, none of which is beyond the largest."""
    bounds = weights.off_by @ np.sort(largest, axis=0)
    bounds += (len(largest) + 2) * 2.0**-148  # next to zero, each is off by 2**-150 at the most
    bounds *= totals != 0  # nothing but zeros
    margins: Array = bounds.astype(np.float32)
    return margins


def _round_by_margin(sums: Array, margins: Array, result: Array, is_open: Array) -> None:
    """Round sums, which are not kept, and mark which of them are open.

    A sum lies strictly between both ends. Where these are cut to the same number after half of its
    last place was added, the sum is not half-way between two, and that number is the nearest.

    Args:
        sums: in the second row; the first is room for as many.
        margins: one for each piece.
        result: for the bits of bf16.
        is_open: for as many marks.
    """
    low, high = sums.reshape(2, len(margins), -1)
    np.subtract(high, margins[:, None], out=low)
    high += margins[:, None]
    ends = sums.view(np.uint32)
    ends += _HALF
    ends >>= _CUT
    np.copyto(result, ends[1], casting="unsafe")
    np.not_equal(ends[0], ends[1], out=is_open)


def _least_exact(grain: float, totals: Array) -> Array:
    """Bits of the least number beside which float32 holds every sum, up to the totals.

    A number of bf16 from 2**e on is a multiple of 2**(e-7), and its product of the grain times
    that. If every number added is a multiple of some d, so is every sum; and float32 holds the
    multiples of d up to 2**24 · d, unless d is less than the least number it has.
    """
    steps = np.maximum(totals * 2.0**-24, 2.0**-149) / grain
    exponents = np.frexp(steps)[1] + 7  # of a power of two that is not less
    least: Array = np.clip(exponents + 127, 1, 255).astype(np.uint16) << np.uint16(7)
    return least


def _round_exact(
    sums: Array, bits: Array, least: Array, result: Array, is_open: Array, desk: Desk
) -> None:
    """Round sums, and mark which of them may not be exact.

    Args:
        sums: in the second row; the first is room for as many.
        bits: what was added.
        least: bits of the least number of which a sum is exact, for each piece.
        result: for the bits of bf16.
        is_open: for as many marks.
        desk: buffers.
    """
    put_bf16_of_single(sums[1], result, sums[0].view(np.uint32))
    # Times -2, bits lose their sign, and of all but zero the smallest number comes out largest.
    smallest = desk.array("smallest", result.shape, np.uint16)
    row = desk.array("row", result.shape, np.uint16)
    np.multiply(bits[0], _TURNED, out=smallest)
    for other in bits[1:]:
        np.maximum(smallest, np.multiply(other, _TURNED, out=row), out=smallest)
    limits = least * _TURNED
    pieces = len(limits), -1
    np.greater(smallest.reshape(pieces), limits[:, None], out=is_open.reshape(pieces))


def _sum_again(weights: Array, bits: Array) -> Array:
    """The bits of sums in float64, for columns whose float32 sum did not tell how to round."""
    sums = np.empty(bits.shape[1])
    add_rows(weights, bits.view(_BF16), sums)
    rounded: Array = to_odd(sums).astype(_BF16).view(np.uint16)
    return rounded
