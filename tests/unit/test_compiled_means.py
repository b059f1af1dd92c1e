"""Compiled sums and trimmed means: the bits that numpy's float64 comes to, or nothing at all."""

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from unit.test_combining_sums import shares
from weighlock import DType
from weighlock.combining.compiled import is_built, trimmed_mean, weighted_sum
from weighlock.combining.desk import Desk
from weighlock.combining.sorting import TrimmedMean
from weighlock.combining.sums import WeightedSum

UNIT = Path(__file__).parent
SOURCE = UNIT.parent.parent / "src" / "weighlock" / "combining" / "compiled.c"

needs_compiled = pytest.mark.skipif(not is_built(), reason="no compiler when it was installed")
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no compiler")

KINDS = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32, "F64": np.float64}
FINITE = {
    "BF16": np.arange(0x7F80, dtype=np.uint16).view(ml_dtypes.bfloat16),
    "F16": np.arange(0x7C00, dtype=np.uint16).view(np.float16),
    "F32": np.random.default_rng(0).integers(0, 0x7F7FFFFF, 50_000, np.uint32).view(np.float32),
}


def laid_out(rows, *, shift=0, room=3):
    """Rows as bytes, equally far from each other, none of which need begin on a whole number."""
    width = max((row.nbytes for row in rows), default=0) + room
    table = np.full(len(rows) * width + shift, 0xCC, np.uint8)[shift:].reshape(len(rows), width)
    for number, row in enumerate(rows):
        table[number, : row.nbytes] = row.view(np.uint8)
    return table


def summed(rows, weights, dtype, **layout):
    """The result's numbers; None if compiled code did not make it."""
    kinds = {np.dtype(kind): DType(name) for name, kind in KINDS.items()}
    units, made = rows[0].size, np.dtype(KINDS[dtype])
    out = np.full(units * made.itemsize + 5, 0xEE, np.uint8)
    dtypes = tuple(kinds[row.dtype] for row in rows)
    table = laid_out(rows, **layout)
    before = table.copy()
    is_made = weighted_sum(dtypes, tuple(map(float, weights)), DType(dtype), table, units, out[:-5])
    assert (out[-5:] == 0xEE).all()
    assert (table == before).all()
    return out[:-5].view(made) if is_made else None


def rounded(values, dtype):
    """Float64 rounded once, by compiled code."""
    return summed([np.asarray(values, np.float64)], [1.0], dtype)


def same_bits(one, other):
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()


@needs_compiler
def test_where_there_is_a_compiler_sums_are_compiled():
    assert is_built() or os.environ.get("WEIGHLOCK_COMPILED") == "0"


@needs_compiler
def test_a_strict_compiler_has_nothing_to_say(tmp_path):
    strict = ["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror"]
    for variant in ([], ["-DONE_COPY"]):
        command = ["cc", *strict, *variant, "-O3", "-c", SOURCE, "-o", tmp_path / "sums.o"]
        subprocess.run(command, check=True)


@needs_compiled
@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_every_number_of_16_bits_is_widened_exactly_and_comes_back(dtype):
    numbers = FINITE[dtype]
    for each in (numbers, -numbers):
        wide = summed([each], [1.0], "F64")
        assert (wide == each.astype(np.float64)).all()
        assert (rounded(wide, dtype) == each).all()


@needs_compiled
@pytest.mark.parametrize("dtype", FINITE)
def test_halfway_goes_to_even_and_a_hair_beside_it_does_not(dtype):
    numbers = FINITE[dtype]
    bits = numbers.view(f"u{numbers.itemsize}")
    numbers, bits = (numbers[:-1], bits[:-1]) if dtype != "F32" else (numbers, bits)
    below = numbers.astype(np.float64)
    above = (bits + bits.dtype.type(1)).view(numbers.dtype)
    middle = (below + above.astype(np.float64)) / 2  # exact in float64
    hair = middle * 2.0**-40 if dtype != "F32" else middle * 2.0**-50
    even = np.where(bits & 1, above, numbers).astype(numbers.dtype)
    for sign in (1, -1):
        assert (rounded(sign * middle, dtype) == sign * even).all()
        # In float32 those of 16 bits are the middle itself: who rounds twice gets half wrong.
        assert (rounded(sign * (middle - hair), dtype) == sign * numbers).all()
        assert (rounded(sign * (middle + hair), dtype) == sign * above).all()


@needs_compiled
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_what_lies_below_the_least_number_is_rounded_to_it_or_to_zero(dtype):
    least = float(np.array(1, f"u{np.dtype(KINDS[dtype]).itemsize}").view(KINDS[dtype]))
    values = np.array([0.0, 0.25, 0.5, 0.5000001, 0.75, 1.0, 1.5, 1e-30, 2.5])
    assert (rounded(values * least, dtype) == np.array([0, 0, 0, 1, 1, 1, 2, 0, 2]) * least).all()


def by_numpy(rows, weights, dtypes, dtype):
    units, made = rows[0].size, np.dtype(KINDS[dtype])
    out = np.empty(units * made.itemsize, np.uint8)
    how = WeightedSum(tuple(map(DType, dtypes)), tuple(weights), DType(dtype))
    how.combine_by_numpy(laid_out(rows, room=64), units, out, Desk())
    return out.view(made)


@needs_compiled
@pytest.mark.parametrize("size", [1, 2, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("count", [1, 2, 3, 8, 65])
@pytest.mark.parametrize("dtype", KINDS)
def test_bits_are_those_of_numpy(dtype, count, size):
    rng = np.random.default_rng(count * size)
    rows = [(rng.standard_normal(size) * 3).astype(KINDS[dtype]) for _ in range(count)]
    found = summed(rows, shares(count), dtype)
    assert same_bits(found, by_numpy(rows, shares(count), [dtype] * count, dtype))


@needs_compiled
@pytest.mark.parametrize("made", KINDS)
def test_rows_of_different_dtypes_are_summed_as_numpy_does(made):
    rng = np.random.default_rng(5)
    for dtypes in itertools.product(KINDS, repeat=3):
        rows = [rng.standard_normal(1500).astype(KINDS[dtype]) for dtype in dtypes]
        found = summed(rows, (0.3, -1.7, 0.25), made)
        assert same_bits(found, by_numpy(rows, (0.3, -1.7, 0.25), dtypes, made)), dtypes


@needs_compiled
@pytest.mark.parametrize("shift", range(9))
def test_rows_may_begin_anywhere(shift):
    rng = np.random.default_rng(6)
    for dtype, kind in KINDS.items():
        rows = [rng.standard_normal(1111).astype(kind) for _ in range(4)]
        found = summed(rows, shares(4), dtype, shift=shift, room=shift)
        assert same_bits(found, by_numpy(rows, shares(4), [dtype] * 4, dtype))


@needs_compiled
def test_nothing_is_summed_of_nothing():
    assert summed([np.empty(0, np.float32)] * 3, shares(3), "BF16").size == 0


@needs_compiled
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("where", [0, 1023, 1024, 2999])
def test_what_is_not_finite_is_left_to_numpy(dtype, bad, where):
    rows = [np.ones(3000, KINDS[dtype]) for _ in range(3)]
    rows[1][where] = bad
    for made in KINDS:
        assert summed(rows, shares(3), made) is None


@needs_compiled
@pytest.mark.parametrize(("dtype", "first"), [("BF16", 0x7F80), ("F16", 0x7C00)])
def test_every_nan_of_16_bits_is_seen(dtype, first):
    for bits in range(first, 0x8000):
        row = np.array([bits], np.uint16).view(KINDS[dtype])
        assert summed([row], [1.0], "F64") is None
        assert summed([row], [0.0], "F32") is None


NANS = [0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FFF7FFF, 0x7FFF8000, 0x7FFFFFFF]


@needs_compiled
@pytest.mark.parametrize("made", KINDS)
def test_no_payload_of_a_nan_is_rounded_to_a_number(made):
    for bits in [*NANS, *(nan | 1 << 31 for nan in NANS)]:
        row = np.array([bits], np.uint32).view(np.float32)
        assert summed([row, row], shares(2), made) is None
    assert summed([np.array([-1], np.int64).view(np.float64)], [1.0], made) is None


@needs_compiled
def test_small_numbers_of_f16_count_where_processors_flush_theirs_to_zero():
    """As `torch.set_flush_denormal` has them do, or a library made for speed."""
    torch = pytest.importorskip("torch")
    rows = [np.full(300, 3e-5, np.float16)] * 3
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    try:
        found = summed(rows, shares(3), "F16"), trimmed(rows, 1, "F16")
    finally:
        torch.set_flush_denormal(False)
    assert all((each == rows[0]).all() for each in found)


@needs_compiled
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_what_overflows_is_left_to_numpy_and_nothing_less_is(dtype):
    largest = float(ml_dtypes.finfo(KINDS[dtype]).max)
    digits = {"BF16": 8, "F16": 11, "F32": 24}[dtype]
    edge = largest * (1 + 2.0**-digits / (2 - 2.0 ** (1 - digits)))  # half-way to the next
    assert rounded([np.nextafter(edge, 0)], dtype) == largest
    for beyond in (edge, np.nextafter(edge, np.inf), 2 * edge, 1e300, -edge):
        assert rounded([beyond], dtype) is None


@needs_compiled
def test_a_sum_that_overflows_float64_is_left_to_numpy():
    assert summed([np.array([1e308])] * 2, (1.0, 1.0), "F64") is None


@needs_compiled
def test_dtypes_it_does_not_know_are_left_to_numpy():
    rows, out = np.zeros((1, 16), np.uint8), np.zeros(16, np.uint8)
    for dtype in set(DType) - {DType(name) for name in KINDS} - {DType.C64, DType.C128}:
        assert not weighted_sum((dtype,), (1.0,), DType.F32, rows, 2, out)
        assert not weighted_sum((DType.F32,), (1.0,), dtype, rows, 2, out)


@needs_compiled
def test_nothing_beyond_its_arrays_is_touched():
    rows, out = np.zeros((2, 16), np.uint8), np.zeros(8, np.uint8)
    both = (DType.F32, DType.F32)
    with pytest.raises(ValueError, match="5 units do not fit"):
        weighted_sum(both, (0.5, 0.5), DType.BF16, rows, 5, out)
    with pytest.raises(ValueError, match="4 units do not fit"):
        weighted_sum(both, (0.5, 0.5), DType.F32, rows, 4, out)
    with pytest.raises(ValueError, match="1 weights for 2 rows"):
        weighted_sum(both, (0.5,), DType.BF16, rows, 4, out)
    with pytest.raises(ValueError, match="1 rows of 2 dtypes"):
        weighted_sum(both, (0.5, 0.5), DType.BF16, rows[:1], 4, out)
    with pytest.raises(ValueError, match="rows must be bytes"):
        weighted_sum(both, (0.5, 0.5), DType.BF16, rows[:, ::2], 2, out)
    with pytest.raises(ValueError, match="rows must be bytes"):
        weighted_sum(both, (0.5, 0.5), DType.BF16, rows.view(np.float32), 4, out)
    with pytest.raises(ValueError, match="-1 units do not fit"):
        weighted_sum(both, (0.5, 0.5), DType.BF16, rows, -1, out)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="may be written"):
        weighted_sum(both, (0.5, 0.5), DType.BF16, rows, 4, out)


def trimmed(rows, cut, dtype, make=trimmed_mean):
    """What is made of columns without their extremes; None if it was not made."""
    units = rows[0].size
    out = np.full(units * rows[0].itemsize + 5, 0xEE, np.uint8)
    dtypes = (DType(dtype),) * len(rows)
    is_made = make(dtypes, cut, laid_out(rows), units, out[:-5], Desk())
    assert (out[-5:] == 0xEE).all()
    return out[:-5].view(rows[0].dtype) if is_made else None


def trimmed_by_numpy(dtypes, cut, rows, units, out, desk):
    TrimmedMean(dtypes, cut, finite=False).combine_by_numpy(rows, units, out, desk)
    return True


@needs_compiled
@pytest.mark.parametrize("count", range(1, 34))
def test_columns_of_every_height_are_sorted(count):
    """By what is left in the middle, wherever that is: every place of a sorted column is seen."""
    rng = np.random.default_rng(count)
    rows = list(rng.permuted(np.tile(np.arange(float(count)), (300, 1)), axis=1).T.copy())
    for cut in range((count + 1) // 2):
        assert (trimmed(rows, cut, "F64") == (count - 1) / 2).all()
    uneven = [np.where(row == 0, -100.0, row) for row in rows]
    assert (trimmed(uneven, 0, "F64") == trimmed(uneven, 0, "F64", trimmed_by_numpy)).all()


@needs_compiled
@pytest.mark.parametrize("size", [1, 255, 256, 257, 3000])
@pytest.mark.parametrize("count", [1, 2, 3, 8, 9, 64, 65])
@pytest.mark.parametrize("dtype", KINDS)
def test_trimmed_means_have_the_bits_of_numpy(dtype, count, size):
    rng = np.random.default_rng(count * size)
    values = rng.standard_normal((count, size)) * 3
    values[rng.random(values.shape) < 0.2] = -0.0
    values[rng.random(values.shape) < 0.2] = 0.0
    rows = [row.astype(KINDS[dtype]) for row in values]
    for cut in {0, count // 4, (count - 1) // 2}:
        found = trimmed(rows, cut, dtype)
        assert same_bits(found, trimmed(rows, cut, dtype, trimmed_by_numpy))


@needs_compiled
@pytest.mark.parametrize("dtype", KINDS)
def test_equal_columns_stay_what_they_are(dtype):
    numbers = FINITE.get(dtype, np.random.default_rng(3).standard_normal(5000))
    assert (trimmed([numbers] * 7, 2, dtype) == numbers).all()
    assert (trimmed([-numbers] * 6, 0, dtype) == -numbers).all()


@needs_compiled
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", KINDS)
def test_extremes_that_are_not_finite_are_left_to_numpy(dtype, bad):
    """Also where they would have been cut off: whether they are refused is not decided here."""
    rows = [np.ones(700, KINDS[dtype]) for _ in range(5)]
    rows[3][600] = bad
    assert trimmed(rows, 2, dtype) is None


@needs_compiled
def test_a_mean_that_is_next_to_nothing_is_one_kind_of_zero():
    rows = [np.array([-5e-324]), np.array([0.0])]
    assert same_bits(trimmed(rows, 0, "F64"), np.array([0.0]))
    assert same_bits(trimmed(rows, 0, "F64", trimmed_by_numpy), np.array([0.0]))


@needs_compiled
def test_thousands_of_rows_are_sorted_few_columns_at_a_time():
    rows = [np.full(40, float(n)) for n in range(9000)]
    desk = Desk()
    out = np.empty(320, np.uint8)
    assert trimmed_mean((DType.F64,) * 9000, 4499, laid_out(rows), 40, out, desk)
    assert (out.view(np.float64) == 4499.5).all()
    assert sum(buffer.nbytes for buffer in desk._buffers.values()) < 2 << 20


@needs_compiled
def test_a_mean_whose_sum_overflows_is_left_to_numpy():
    assert trimmed([np.array([1.5e308])] * 4, 1, "F64") is None
    assert trimmed([np.array([1.5e308])] * 4, 1, "F64", trimmed_by_numpy) == 1.5e308


@needs_compiled
def test_as_many_as_there_are_cannot_be_cut_off():
    for cut in (-1, 2, 3):
        with pytest.raises(ValueError, match=f"of 4 rows, {cut} cannot be left out"):
            trimmed([np.ones(3)] * 4, cut, "F64")


@pytest.mark.slow
def test_without_compiled_code_other_tests_of_sums_hold():
    """As where no compiler was: numpy makes what compiled code makes here."""
    names = ["test_combining_sums", "test_combining_extremes", "test_incremental_mean"]
    names += ["../property/test_combinators"]
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not memory"]
        + [str(UNIT / f"{name}.py") for name in names],
        env={**os.environ, "WEIGHLOCK_COMPILED": "0"},
        cwd=UNIT.parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-4000:]


def test_a_variable_turns_compiled_code_off():
    found = subprocess.run(
        [
            sys.executable,
            "-c",
            "from weighlock.combining import compiled as c; print(c.is_built())",
        ],
        env={**os.environ, "WEIGHLOCK_COMPILED": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == "False\n"


@needs_compiled
def test_what_was_compiled_from_another_source_is_not_called(tmp_path):
    """An editable install has the source of today beside what was compiled when it was made."""
    shutil.copytree(SOURCE.parents[1], tmp_path / "weighlock")
    script = "from weighlock.combining.compiled import *; print(is_built())"
    command = [sys.executable, "-c", script]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def found():
        return subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout

    assert found() == "True\n"
    with (tmp_path / "weighlock" / "combining" / "compiled.c").open("a") as source:
        source.write("/* another */\n")
    assert found() == "False\n"
