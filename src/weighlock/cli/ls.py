"""`weighlock ls`: names, dtypes, shapes and bytes."""

import fnmatch
import re
from collections.abc import Iterable

import click

import weighlock
from weighlock.cli.credentials import access_to, credential_options
from weighlock.cli.shared import json_option, print_json, print_notes, weights
from weighlock.cli.text import columns, counted, escaped, quantity, size
from weighlock.sources.access import Credential
from weighlock.tensors.catalog import Catalog
from weighlock.tensors.groups import Group
from weighlock.tensors.ref import TensorRef

__all__ = ["command"]


@click.command("ls")
@weights("path")
@click.argument("patterns", nargs=-1)
@click.option("--fold", is_flag=True, help="Show layers that differ only in their number as one.")
@credential_options
@json_option
def command(
    path: str, patterns: tuple[str, ...], fold: bool, credential: Credential, as_json: bool
) -> None:
    """List the tensors of PATH: name, dtype, shape, bytes.

    PATTERNS are globs such as 'encoder.*'; without any, everything is listed.
    """
    with weighlock.open(path, access=access_to(credential, path)) as catalog:
        chosen = catalog.select(*patterns) if patterns else catalog.readable()
        refs = list(chosen.values())
        groups: dict[str, Group] = {}
        if not patterns or not catalog.is_sharded:  # a few tensors of many files open those only
            print_notes(catalog.notes, catalog.unreadable)
            groups = _groups(chosen, patterns)
        if as_json:
            facts = _folded_facts(refs) if fold else [_facts(ref) for ref in refs]
            print_json(facts + [_group_facts(name, group) for name, group in groups.items()])
            return
        rows = _folded_rows(refs) if fold else [_row(ref) for ref in refs]
        right = frozenset({1, 4}) if fold else frozenset({3})
        if rows:
            click.echo(columns(rows, right))
        for name, group in groups.items():
            click.echo(f"{escaped(name)}: {escaped(str(group))}")
        elements = sum(ref.spec.size for ref in refs)
        click.echo(
            f"{counted(len(refs), 'tensor')}, {quantity(elements)} elements, {size(chosen.nbytes)}"
        )


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
