"""`weighlock ls`: names, dtypes, shapes and bytes."""

import fnmatch
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import click

import weighlock
from weighlock.cli.credentials import access_to, credential_options
from weighlock.cli.names import without_match
from weighlock.cli.several import for_each
from weighlock.cli.shared import is_url, json_option, label, print_json, print_notes
from weighlock.cli.text import columns, counted, escaped, quantity, size
from weighlock.errors import LayoutError
from weighlock.sources.access import Access, Credential
from weighlock.tensors.catalog import Catalog, unmatched
from weighlock.tensors.groups import Group
from weighlock.tensors.ref import TensorRef

__all__ = ["command"]


@dataclass(frozen=True, slots=True)
class _Listing:
    """What there is to say of one path."""

    path: str
    refs: Sequence[TensorRef] = ()
    groups: Mapping[str, Group] = field(default_factory=dict)
    nbytes: int = 0
    notes: Sequence[str] = ()
    unreadable: Mapping[str, str] = field(default_factory=dict)
    missing: Sequence[str] = ()
    """Patterns that match nothing here."""
    error: str | None = None


@click.command("ls")
@click.argument("words", nargs=-1, required=True, type=click.Path(), metavar="PATH... [PATTERN]...")
@click.option("--names", "patterns", multiple=True, metavar="GLOB", help="List only these tensors.")
@click.option("--fold", is_flag=True, help="Show layers that differ only in their number as one.")
@credential_options
@json_option
def command(
    words: tuple[str, ...],
    patterns: tuple[str, ...],
    fold: bool,
    credential: Credential,
    as_json: bool,
) -> None:
    """List the tensors of each PATH: name, dtype, shape, bytes.

    PATTERNs are globs such as 'encoder.*', as with --names; without any, everything is listed.
    What comes after the first PATH is another one if it is a URL or there is such a file.
    """
    paths = [words[0], *(word for word in words[1:] if is_url(word) or os.path.lexists(word))]
    patterns += tuple(word for word in words[1:] if word not in paths)
    access = access_to(credential, *paths)
    listings, is_well = for_each(
        paths,
        lambda path: _listing(path, patterns, access),
        lambda path, error: _Listing(path, missing=patterns, error=str(error)),
    )
    missing = [p for p in patterns if all(p in listing.missing for listing in listings)]
    if missing:
        no_file = ", and there is no such file" if missing[-1] in words else ""
        raise LayoutError(f"{unmatched(missing)}{no_file}")
    if as_json and len(listings) == 1:
        print_json(_all_facts(listings[0], fold))
    elif as_json:
        print_json([_described(listing, fold) for listing in listings])
    else:
        _show(listings, fold)
    if not is_well:
        sys.exit(1)


def _listing(path: str, patterns: tuple[str, ...], access: Access) -> _Listing:
    with weighlock.open(path, access=access) as catalog:
        missing = without_match(catalog, patterns)
        chosen = catalog.select(*patterns) if patterns else catalog.readable()
        refs = list(chosen.values())
        if patterns and catalog.is_sharded:  # a few tensors of many files open those only
            return _Listing(path, refs, nbytes=chosen.nbytes, missing=missing)
        print_notes(catalog.notes, catalog.unreadable)
        beside = catalog.notes, dict(catalog.unreadable)
        return _Listing(path, refs, _groups(chosen, patterns), chosen.nbytes, *beside, missing)


def _show(listings: Sequence[_Listing], fold: bool) -> None:
    is_first = True
    for listing in listings:
        if listing.error is not None:  # it was told
            continue
        if len(listings) > 1:
            click.echo(f"{'' if is_first else chr(10)}{escaped(label(listing.path))}:")
        is_first = False
        refs = listing.refs
        rows = _folded_rows(refs) if fold else [_row(ref) for ref in refs]
        right = frozenset({1, 4}) if fold else frozenset({3})
        if rows:
            click.echo(columns(rows, right))
        for name, group in listing.groups.items():
            click.echo(f"{escaped(name)}: {escaped(str(group))}")
        elements = quantity(sum(ref.spec.size for ref in refs))
        click.echo(f"{counted(len(refs), 'tensor')}, {elements} elements, {size(listing.nbytes)}")


def _described(listing: _Listing, fold: bool) -> dict[str, object]:
    """One of several paths."""
    if listing.error is not None:
        return {"path": label(listing.path), "error": listing.error}
    facts: dict[str, object] = {"path": label(listing.path), "tensors": _all_facts(listing, fold)}
    return {**facts, "notes": list(listing.notes), "unreadable": dict(listing.unreadable)}


def _all_facts(listing: _Listing, fold: bool) -> list[dict[str, object]]:
    facts = _folded_facts(listing.refs) if fold else [_facts(ref) for ref in listing.refs]
    return facts + [_group_facts(name, group) for name, group in listing.groups.items()]


def _groups(catalog: Catalog, patterns: tuple[str, ...]) -> dict[str, Group]:
    """Tensors that are several entries, or have no data: those with parts in it, or that match."""
    return {
        name: group
        for name, group in catalog.groups.items()
        if group.parts or not patterns or any(fnmatch.fnmatchcase(name, p) for p in patterns)
    }


def _group_facts(name: str, group: Group) -> dict[str, object]:
    facts = {"name": name, "dtype": group.dtype, "shape": group.shape, "bytes": 0}
    return {**facts, "kind": group.kind, "parts": dict(group.parts)}


def _facts(ref: TensorRef) -> dict[str, object]:
    return {"name": ref.name, "dtype": ref.dtype, "shape": ref.shape, "bytes": ref.nbytes}


def _row(ref: TensorRef) -> list[str]:
    return [escaped(ref.name), ref.dtype.value, _shape(ref.shape), f"{ref.nbytes:,}"]


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _fold(refs: Iterable[TensorRef]) -> list[tuple[str, list[TensorRef]]]:
    """Tensors of one dtype and shape whose names differ only in numbers between dots."""
    groups: dict[tuple[str, str, tuple[int, ...]], list[TensorRef]] = {}
    for ref in refs:
        folded = re.sub(r"(?<![^.])\d+(?![^.])", "#", ref.name)
        groups.setdefault((folded, ref.dtype, ref.shape), []).append(ref)
    return [
        (name if len(members) > 1 else members[0].name, members)
        for (name, _, _), members in groups.items()
    ]


def _folded_facts(refs: Iterable[TensorRef]) -> list[dict[str, object]]:
    return [
        {
            **_facts(members[0]),
            "name": name,
            "count": len(members),
            "bytes": sum(ref.nbytes for ref in members),
        }
        for name, members in _fold(refs)
    ]


def _folded_rows(refs: Iterable[TensorRef]) -> list[list[str]]:
    rows = []
    for name, members in _fold(refs):
        ref = members[0]
        count = f"{len(members)} x" if len(members) > 1 else ""
        total = sum(member.nbytes for member in members)
        rows.append([escaped(name), count, ref.dtype.value, _shape(ref.shape), f"{total:,}"])
    return rows
