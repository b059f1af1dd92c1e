"""`weighlock verify`: is this file whole, and are its numbers numbers?"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import click
import numpy as np

import weighlock
from weighlock.cli.credentials import access_to, credential_options
from weighlock.cli.progress import progress_bar, quiet_option
from weighlock.cli.several import for_each, print_each
from weighlock.cli.shared import json_option, label, print_json, print_notes
from weighlock.cli.text import columns, counted, escaped, size
from weighlock.errors import FormatError, LayoutError, WeighlockError
from weighlock.formats.sharded import unlisted
from weighlock.sources.access import Access, Credential
from weighlock.tensors.blocks import blocks
from weighlock.tensors.catalog import Catalog
from weighlock.tensors.ref import TensorRef

__all__ = ["command"]

_BLOCK_ELEMENTS = 1 << 20


@click.command("verify")
@click.argument("paths", nargs=-1, required=True, type=click.Path(), metavar="PATH...")
@click.option("--data", is_flag=True, help="Read every tensor and count NaN and Inf.")
@click.option("--finite", is_flag=True, help="The same, and exit with 1 if there are any.")
@quiet_option
@credential_options
@json_option
def command(
    paths: tuple[str, ...],
    data: bool,
    finite: bool,
    quiet: bool,
    credential: Credential,
    as_json: bool,
) -> None:
    """Check that each PATH is a complete, consistent file, or set of files.

    Without --data only headers and sizes are read. What makes no file unusable, such as a wrong
    total_size in an index, is noted. Every PATH is checked, whatever the others are; the exit code
    is 1 if one is not valid.
    """
    access = access_to(credential, *paths)

    def look(path: str) -> dict[str, Any]:
        try:
            facts = _verified(path, access, data=data or finite, quiet=quiet)
        except WeighlockError as error:
            # What is not valid is an answer too, for a program that asks for JSON.
            if as_json and len(paths) == 1:
                print_json(_not_verified(path, error))
            raise
        if not as_json:
            _show(facts)
        return facts

    found, is_well = for_each(paths, look, _not_verified)
    if as_json:
        print_each(found)
    if not is_well or (finite and any(facts.get("not_finite") for facts in found)):
        sys.exit(1)


def _verified(path: str, access: Access, *, data: bool, quiet: bool) -> dict[str, Any]:
    with weighlock.open(path, access=access) as catalog:
        refs = list(catalog.readable().values())
        _check_shards(catalog)
        total = catalog.readable().nbytes
        notes, unreadable = [*catalog.notes, *_wrong_total(catalog, refs)], dict(catalog.unreadable)
        print_notes(notes, unreadable)
        facts = {"path": label(path), "valid": True, "tensors": len(refs), "bytes": total}
        facts |= {"notes": notes, "unreadable": unreadable}
        if not data:
            return facts
        found: dict[str, dict[str, int]] = {}
        with progress_bar(f"reading {label(path)}", total, quiet=quiet) as progress:
            catalog.check()
            for ref in {ref.identity(): ref for ref in refs}.values():
                nan, inf = _count(ref)
                progress(ref.nbytes)
                if nan or inf:
                    found[ref.name] = {"nan": nan, "inf": inf}
        return {**facts, "not_finite": found}


def _not_verified(path: str, error: WeighlockError) -> dict[str, Any]:
    valid = False if isinstance(error, FormatError) else None  # it could not be told
    return {"path": label(path), "valid": valid, "error": str(error)}


def _show(facts: dict[str, Any]) -> None:
    found: dict[str, dict[str, int]] | None = facts.get("not_finite")
    if found:
        rows = [[escaped(n), f"{c['nan']:,} NaN", f"{c['inf']:,} Inf"] for n, c in found.items()]
        click.echo(columns(rows, frozenset({1, 2})))
    checked = "headers and sizes"
    if found is not None:
        checked = f"all data, {counted(len(found), 'tensor')} not finite"
    tensors = f"{counted(facts['tensors'], 'tensor')}, {size(facts['bytes'])}"
    click.echo(f"{escaped(facts['path'])}: valid ({checked}): {tensors}")


def _check_shards(catalog: Catalog) -> None:
    """Raise if a shard holds a tensor that the index does not know: part of the model is lost."""
    for file, shard in catalog.shards().items():
        for name in unlisted(shard, catalog):
            raise LayoutError(f"{file} holds tensor {name!r}, which the index does not list")


def _wrong_total(catalog: Catalog, refs: Sequence[TensorRef]) -> Iterator[str]:
    """What to note of the `total_size` of an index, which no reader of it relies on.

    Those who write it count a tensor of several names once, or once for each.
    """
    told = catalog.metadata.get("total_size") if catalog.is_sharded else None
    if told is None or catalog.unreadable:  # what cannot be read counts as well
        return
    counts = {sum(ref.nbytes for ref in refs), catalog.nbytes}
    if told not in {*map(str, counts), *(f"{count}.0" for count in counts)}:
        yield f"its index says total_size {told[:40]}, the tensors have {max(counts):,} bytes"


def _count(ref: TensorRef) -> tuple[int, int]:
    """How many elements are NaN and how many infinite, block by block."""
    nan = inf = 0
    for block in blocks(ref, _BLOCK_ELEMENTS):
        if not (ref.dtype.is_float or ref.dtype.is_complex) or ref.dtype.is_packed:
            continue  # still read, so that a bad disk is noticed
        finite = np.isfinite(block)
        if not finite.all():
            odd = block[~finite]
            nan += int(np.isnan(odd).sum())
            inf += int(odd.size - np.isnan(odd).sum())
    return nan, inf
