"""`weighlock diff`: what changed between two models, and by how much."""

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import click
import numpy as np

import weighlock
from weighlock.cli.credentials import access_to, credential_options
from weighlock.cli.progress import progress_bar, quiet_option
from weighlock.cli.shared import (
    json_option,
    label,
    print_json,
    print_notes,
    tell_error,
    weights,
)
from weighlock.cli.text import columns, counted, escaped
from weighlock.errors import WeighlockError
from weighlock.sources.access import Credential
from weighlock.tensors.arrays import Array
from weighlock.tensors.blocks import blocks
from weighlock.tensors.catalog import Catalog
from weighlock.tensors.dtypes import DType
from weighlock.tensors.ref import TensorRef

__all__ = ["command"]

_BLOCK_ELEMENTS = 1 << 19


@dataclass(frozen=True, slots=True)
class _Change:
    """How one tensor differs."""

    name: str
    kind: str
    """added, removed, shape, dtype or data; dtype tells of data as well."""
    before: str = ""
    after: str = ""
    largest: float | None = None
    """Largest absolute difference; NaN if one side has a NaN the other lacks; None for F6."""
    elements: int | None = None
    """How many elements differ."""


class _Asked(click.Command):
    """For scripts that ask whether something differs: as in diff and cmp, 1 is an answer."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (WeighlockError, OSError, MemoryError) as error:
            if not ctx.params.get("exit_code") or isinstance(error, BrokenPipeError):
                raise
            tell_error(error)
            sys.exit(2)


@click.command("diff", cls=_Asked)
@weights("a")
@weights("b")
@click.option("--specs", is_flag=True, help="Compare names, dtypes and shapes only; read no data.")
@click.option(
    "--exit-code", is_flag=True, help="Exit with 1 if anything differs, 2 if that cannot be told."
)
@quiet_option
@credential_options
@json_option
def command(
    a: str,
    b: str,
    specs: bool,
    exit_code: bool,
    quiet: bool,
    credential: Credential,
    as_json: bool,
) -> None:
    """Compare the tensors of A and B: added, removed, changed, and by how much.

    Data is compared block by block, whatever the files' formats and dtypes. In JSON the largest
    difference is a number, "Infinity", "NaN" where one side only is NaN, or null where data was not
    compared or is F6, whose packed bytes are only told apart.
    """
    access = access_to(credential, a, b)
    with (
        weighlock.open(a, access=access) as opened,
        weighlock.open(b, access=access) as other,
    ):
        for catalog in (opened, other):
            print_notes(catalog.notes, catalog.unreadable)
        unreadable = {"a": dict(opened.unreadable), "b": dict(other.unreadable)}
        notes = {"a": list(opened.notes), "b": list(other.notes)}
        before, after = opened.readable(), other.readable()
        if specs:
            changes = _compare(before, after, None)
        else:
            both = sum(ref.nbytes for name, ref in before.items() if name in after)
            doing = f"comparing {label(a)} and {label(b)}"
            with progress_bar(doing, both, quiet=quiet) as progress:
                changes = _compare(before, after, progress)
        same = len(before.keys() & after.keys()) - sum(
            change.kind not in ("added", "removed") for change in changes
        )
    if as_json:
        facts = {"a": label(a), "b": label(b), "same": same}
        beside = {"unreadable": unreadable, "notes": notes}
        print_json({**facts, **beside, "changes": [asdict(c) for c in changes]})
    else:
        if changes:
            click.echo(columns([_row(change) for change in changes]))
        are = "has" if specs and same == 1 else "have" if specs else "is" if same == 1 else "are"
        what = "the same dtype and shape" if specs else "the same"
        click.echo(f"{counted(same, 'tensor')} {are} {what}, {len(changes):,} differ")
    if exit_code and changes:
        sys.exit(1)
    if exit_code and any(unreadable.values()):  # what they hold nobody can tell
        sys.exit(2)


def _compare(
    before: Catalog, after: Catalog, progress: Callable[[int], None] | None
) -> list[_Change]:
    changes = [
        _Change(name, "removed", before=_spec(before[name])) for name in before if name not in after
    ]
    changes += [
        _Change(name, "added", after=_spec(after[name])) for name in after if name not in before
    ]
    for name in before:
        if name in after:
            change = _difference(before[name], after[name], data=progress is not None)
            if change is not None:
                changes.append(change)
            if progress is not None:
                progress(before[name].nbytes)
    return changes


def _difference(a: TensorRef, b: TensorRef, *, data: bool) -> _Change | None:
    if a.shape != b.shape:
        return _Change(a.name, "shape", _spec(a), _spec(b))
    kind = "data" if a.dtype is b.dtype else "dtype"
    if data and kind == "data" and a.dtype.is_packed and a.dtype is not DType.F4:
        # Nobody says in which order the bits of F6 lie: its values are not known, its bytes are.
        return _Change(a.name, kind, _spec(a), _spec(b)) if _largest(a, b)[1] else None
    if data and (kind == "data" or not (a.dtype.is_packed or b.dtype.is_packed)):
        largest, elements = _largest(a, b)
        if elements or kind == "dtype":
            return _Change(a.name, kind, _spec(a), _spec(b), largest, elements)
    elif kind == "dtype":
        return _Change(a.name, kind, _spec(a), _spec(b))
    return None


def _largest(a: TensorRef, b: TensorRef) -> tuple[float, int]:
    """Largest absolute difference, and number of elements whose bits or values differ."""
    largest, count = 0.0, 0
    pairs = zip(blocks(a, _BLOCK_ELEMENTS), blocks(b, _BLOCK_ELEMENTS), strict=True)
    for left, right in pairs:
        different = _other_bits(left, right) if a.dtype is b.dtype else left != right
        if not different.any():
            continue
        left, right = left[different], right[different]
        gaps = _gaps(left, right)
        # Neither two NaN nor two infinities of one sign are apart, though their difference is NaN.
        gaps[(left == right) | (_is_nan(left) & _is_nan(right))] = 0
        count += left.size if a.dtype is b.dtype else int(np.count_nonzero(gaps))
        # NaN on one side only is the largest difference there is, and stays it.
        largest = float("nan") if np.isnan(gaps).any() else max(largest, float(gaps.max()))
    return largest, count


def _other_bits(left: Array, right: Array) -> Array:
    """Which elements are not the same bits."""
    width = left.dtype.itemsize
    if width <= 8:
        return np.asarray(left.view(f"u{width}") != right.view(f"u{width}"))
    halves = left.view(np.uint64) != right.view(np.uint64)  # C128 is wider than any integer
    return np.asarray(halves.reshape(left.size, -1).any(axis=1))


def _gaps(left: Array, right: Array) -> Array:
    """Absolute differences: exact for integers, in double precision for everything else."""
    if left.dtype.kind in "bui" and left.dtype == right.dtype:
        wide = np.uint64 if left.dtype.kind == "u" else np.int64
        left, right = left.astype(wide), right.astype(wide)
        # The distance of two int64 may not fit int64; modulo 2**64 it is right as uint64.
        high, low = np.maximum(left, right), np.minimum(left, right)
        return np.subtract(high.view(np.uint64), low.view(np.uint64))
    if left.dtype.kind in "bui" and right.dtype.kind in "bui":
        return _mixed_gaps(left, right)
    with np.errstate(invalid="ignore"):
        gaps: Array = np.abs(_wide(left) - _wide(right))
    return gaps


def _mixed_gaps(left: Array, right: Array) -> Array:
    """Distances of integers of two types: never 0 for two that differ, as doubles might say."""
    if np.uint64 not in (left.dtype, right.dtype):
        return np.abs(left.astype(np.int64) - right.astype(np.int64)).view(np.uint64)
    signed, unsigned = (right, left) if left.dtype == np.uint64 else (left, right)
    one, other = signed.astype(np.uint64), unsigned.astype(np.uint64)
    near = np.maximum(one, other) - np.minimum(one, other)
    # Below zero the distance may not fit 64 bits; it is never small, so a double will do.
    return np.where(signed < 0, _wide(unsigned) - _wide(signed), near.astype(np.float64))


def _wide(values: Array) -> Array:
    return values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)


def _is_nan(values: Array) -> Array:
    return np.isnan(_wide(values))


def _spec(ref: TensorRef) -> str:
    return f"{ref.dtype} {list(ref.shape)}"


def _row(change: _Change) -> list[str]:
    sign = {"added": "+", "removed": "-"}.get(change.kind, "~")
    if change.kind in ("added", "removed"):
        what = change.after or change.before
    elif change.kind == "data":
        what = change.before
    else:
        what = f"{change.before} → {change.after}"
    if change.largest is not None:
        how_many = counted(change.elements or 0, "element")
        differ = "differs" if change.elements == 1 else "differ"
        what += f", {how_many} {differ} by up to {change.largest:.6g}"
    elif change.kind == "data":
        what += ", packed bytes differ"
    return [sign, escaped(change.name), what]
