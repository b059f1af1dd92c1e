"""`weighlock scan`: what files would import and call if somebody unpickled them."""

import os
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

import click

from weighlock.cli.credentials import access_to, credential_options
from weighlock.cli.shared import is_url, json_option, label, print_json
from weighlock.cli.text import columns, escaped
from weighlock.errors import WeighlockError
from weighlock.formats.dcp import files_named
from weighlock.formats.scanning import Finding, scan_source
from weighlock.formats.sharded import METADATA_NAME, is_index_name, read_index
from weighlock.limits import Limits
from weighlock.sources.access import Access, Address, Credential
from weighlock.sources.http import HttpSource
from weighlock.sources.http_remote import Remote
from weighlock.sources.local import FileSource

if TYPE_CHECKING:
    from weighlock.sources.base import Source

__all__ = ["command"]


@click.command("scan")
@click.argument("paths", nargs=-1, required=True, type=click.Path())
@click.option("--all", "show_all", is_flag=True, help="Show what is known and harmless, too.")
@credential_options
@json_option
def command(paths: tuple[str, ...], show_all: bool, credential: Credential, as_json: bool) -> None:
    """Show what the pickles in PATHS would import if they were loaded with pickle.

    PATHS may be URLs. Nothing is imported or run. Folders are walked; an index, or the .metadata of
    a distributed checkpoint, stands for the files it names. Exits with 1 if anything foreign is
    named, or if a pickle could not be read to its end.
    """
    access = access_to(credential, *paths)
    reports = [_scan(path, access) for root in paths for path in _files(root, access)]
    foreign = sum(not f.known for _, findings, _ in reports for f in findings)
    failed = sum(error is not None for _, _, error in reports)
    reports = [(label(path), findings, error) for path, findings, error in reports]
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


def _files(root: str, access: Access) -> Iterator[str]:
    if is_url(root) or not os.path.isdir(root):
        yield root
        yield from _beside(root, access)
        return
    for directory, folders, names in os.walk(root):
        folders.sort()
        yield from (os.path.join(directory, name) for name in sorted(names))


def _beside(root: str, access: Access) -> list[str]:
    """The files that an index or metadata names; none if it is broken, as opening it tells."""
    name = root.partition("?")[0] if is_url(root) else root
    try:
        if is_index_name(name):
            with closing(_source(root, access)) as source:
                names = read_index(source, Limits()).shards
        elif os.path.basename(name) == METADATA_NAME:
            with closing(_source(root, access)) as source:
                names = files_named(source, Limits())
        else:
            return []
    except WeighlockError:
        return []
    if is_url(root):
        return [Address.of(root).sibling(name).url for name in names]
    return [os.path.join(os.path.dirname(root), name) for name in names]


def _source(path: str, access: Access) -> "Source":
    return HttpSource(Remote(path, access=access)) if is_url(path) else FileSource(path)


def _scan(path: str, access: Access) -> tuple[str, list[Finding], str | None]:
    findings: list[Finding] = []
    try:
        with closing(_source(path, access)) as source:
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
