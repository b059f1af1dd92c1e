"""`weighlock info`: what a model is made of, in totals."""

import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import click

import weighlock
from weighlock.cli.credentials import access_to, credential_options
from weighlock.cli.files import files_of
from weighlock.cli.several import for_each, print_each
from weighlock.cli.shared import json_option, label, print_notes
from weighlock.cli.text import as_json_value, columns, counted, escaped, quantity, size
from weighlock.formats.grouping import GROUPS_KEY
from weighlock.formats.save import own_metadata
from weighlock.sources.access import Credential
from weighlock.tensors.catalog import Catalog
from weighlock.tensors.groups import Group

__all__ = ["command"]


@click.command("info")
@click.argument("paths", nargs=-1, required=True, type=click.Path(), metavar="PATH...")
@credential_options
@json_option
def command(paths: tuple[str, ...], credential: Credential, as_json: bool) -> None:
    """Show totals of each PATH: parameters, bytes per dtype, metadata, shards."""
    access = access_to(credential, *paths)
    is_first = True

    def look(path: str) -> dict[str, object]:
        nonlocal is_first
        with weighlock.open(path, access=access) as catalog:
            facts = _facts(path, catalog.readable())
            groups = catalog.groups
            print_notes(catalog.notes, catalog.unreadable)
        if not as_json:
            if not is_first:
                click.echo()
            _show(facts, groups)
            is_first = False
        return facts

    facts, is_well = for_each(
        paths, look, lambda path, error: {"path": label(path), "error": str(error)}
    )
    if as_json:
        print_each(facts)
    if not is_well:
        sys.exit(1)


def _facts(path: str, catalog: Catalog) -> dict[str, object]:
    counts: Counter[str] = Counter()
    elements: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    tied: dict[str, str] = {}
    first: dict[object, str] = {}
    for name, ref in catalog.items():
        kept = first.setdefault(ref.identity(), name) if ref.nbytes else name
        if kept != name:
            tied[name] = kept
            continue
        counts[ref.dtype] += 1
        elements[ref.dtype] += ref.spec.size
        nbytes[ref.dtype] += ref.nbytes
    files = files_of(path, catalog)
    return {
        "path": label(path),
        "format": None if files is None else files.format,
        "files": 0 if files is None else files.count,
        "file_bytes": 0 if files is None else files.nbytes,
        "tensors": len(catalog),
        "parameters": sum(elements.values()),
        "bytes": sum(nbytes.values()),
        "dtypes": {
            dtype: {"tensors": counts[dtype], "parameters": elements[dtype], "bytes": count}
            for dtype, count in nbytes.most_common()
        },
        "tied": tied,
        "shards": {
            name: {"tensors": len(shard), "bytes": shard.nbytes}
            for name, shard in catalog.shards().items()
        },
        # Of a sharded model, what its index says and what its files say alike.
        "metadata": _without_groups({**catalog.metadata, **own_metadata(catalog)}),
        "groups": {
            name: {"kind": g.kind, "dtype": g.dtype, "shape": g.shape, "parts": dict(g.parts)}
            for name, g in catalog.groups.items()
        },
        "notes": list(catalog.notes),
        "unreadable": dict(catalog.unreadable),
        "extras": as_json_value(catalog.extras),
    }


def _without_groups(metadata: dict[str, str]) -> dict[str, str]:
    return {key: value for key, value in metadata.items() if key != GROUPS_KEY}


def _show(facts: dict[str, object], groups: Mapping[str, Group]) -> None:
    get: dict[str, dict[str, dict[str, int]]] = facts  # type: ignore[assignment]
    rows = [
        ["path", escaped(str(facts["path"]))],
        *_files_rows(facts),
        ["tensors", f"{facts['tensors']:,}"],
        ["parameters", _both(facts["parameters"], quantity)],  # type: ignore[arg-type]
        ["bytes", _both(facts["bytes"], size)],  # type: ignore[arg-type]
    ]
    click.echo(columns(rows))
    for title in ("dtypes", "shards"):
        if get[title]:
            click.echo(f"\n{title}")
            table = [
                [f"  {escaped(name)}", counted(part["tensors"], "tensor"), size(part["bytes"])]
                for name, part in get[title].items()
            ]
            click.echo(columns(table, frozenset({1, 2})))
    for title, sign in (("tied", "="), ("metadata", ":")):
        pairs: dict[str, str] = facts[title]  # type: ignore[assignment]
        if pairs:
            click.echo(f"\n{title}")
            for key, value in pairs.items():
                shown = escaped(value)
                click.echo(f"  {escaped(key)} {sign} {_cut(shown)}")
    if groups:
        click.echo("\ngroups")
        for name, group in groups.items():
            click.echo(f"  {escaped(name)} : {escaped(str(group))}")
    extras: dict[str, object] = facts["extras"]  # type: ignore[assignment]
    if extras:
        click.echo("\nextras")
        for key, content in extras.items():
            shown = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
            click.echo(f"  {escaped(key)} : {_cut(escaped(shown))}")


def _files_rows(facts: dict[str, Any]) -> list[list[str]]:
    if facts["format"] is None:
        return []
    count = f", {facts['files']:,} files" if facts["files"] > 1 else ""
    return [
        ["format", f"{facts['format']}{count}"],
        ["file size", _both(facts["file_bytes"], size)],
    ]


def _both(count: int, said: Callable[[int], str]) -> str:
    """A number exactly, and as people say it if that is another text."""
    exact, short = f"{count:,}", said(count)
    return exact if short == exact else f"{exact} ({short})"


def _cut(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}…"
