"""`weighlock scan`: what files would import and call if somebody unpickled them."""

import os
import sys
from collections.abc import Iterator
from contextlib import closing

import click

from weighlock.cli.shared import json_option, print_json
from weighlock.cli.text import columns, escaped
from weighlock.errors import WeighlockError
from weighlock.formats.scanning import Finding, scan_source
from weighlock.formats.sharded import read_index
from weighlock.limits import Limits
from weighlock.sources.local import FileSource

__all__ = ["command"]


@click.command("scan")
@click.argument("paths", nargs=-1, required=True, type=click.Path())
@click.option("--all", "show_all", is_flag=True, help="Show what is known and harmless, too.")
@json_option
def command(paths: tuple[str, ...], show_all: bool, as_json: bool) -> None:
    """Show what the pickles in PATHS would import if they were loaded with pickle.

    Nothing is imported or run. Folders are walked, and an index stands for its shards. Exits with 1
    if anything foreign is named, or if a pickle could not be read to its end.
    """
    reports = [_scan(path) for root in paths for path in _files(root)]
    foreign = sum(not f.known for _, findings, _ in reports for f in findings)
    failed = sum(error is not None for _, _, error in reports)
    if as_json:
        print_json([_facts(*report) for report in reports])
    else:
        for path, findings, error in reports:
            _show(path, findings, error, show_all)
        click.echo(
            f"{len(reports):,} files, {foreign:,} foreign names, {failed:,} could not be scanned"
        )
    if foreign or failed:
        sys.exit(1)


def _files(root: str) -> Iterator[str]:
    if not os.path.isdir(root):
        yield root
        if root.endswith(".index.json"):
            yield from _shards(root)
        return
    for directory, folders, names in os.walk(root):
        folders.sort()
        yield from (os.path.join(directory, name) for name in sorted(names))


def _shards(index: str) -> list[str]:
    """The files that an index names; none if it is no index, which opening it would tell."""
    try:
        with closing(FileSource(index)) as source:
            names = read_index(source, Limits()).shards
    except WeighlockError:
        return []
    return [os.path.join(os.path.dirname(index), name) for name in names]


def _scan(path: str) -> tuple[str, list[Finding], str | None]:
    findings: list[Finding] = []
    try:
        with closing(FileSource(path)) as source:
            findings.extend(scan_source(source))
    except WeighlockError as error:
        return path, findings, str(error)
    return path, findings, None


def _facts(path: str, findings: list[Finding], error: str | None) -> dict[str, object]:
    return {
        "path": path,
        "error": error,
        "globals": [
            {
                "module": f.module,
                "name": f.name,
                "known": f.known,
                "place": f.place,
                "offset": f.offset,
            }
            for f in findings
        ],
    }


def _show(path: str, findings: list[Finding], error: str | None, show_all: bool) -> None:
    rows = [
        [
            "known" if f.known else "FOREIGN",
            escaped(f"{f.module}.{f.name}"),
            escaped(f"{f.place} at byte {f.offset:,}".strip()),
        ]
        for f in findings
        if show_all or not f.known
    ]
    if rows or error:
        click.echo(escaped(path))
    if rows:
        click.echo("\n".join(f"  {line}" for line in columns(rows).splitlines()))
    if error:
        click.echo(f"  {escaped(error)}")
