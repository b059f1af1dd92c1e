"""`weighlock scan`: what files would import and call if somebody unpickled them."""

import os
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

import click

from weighlock.cli.credentials import access_to, credential_options
from weighlock.cli.shared import is_url, json_option, label, print_json
from weighlock.cli.text import columns, counted, escaped
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

    PATHS may be URLs. Nothing is imported or run. Folders are walked, also through links; archives
    are looked into; an index, or the .metadata of a distributed checkpoint, stands for the files it
    names. Exits with 1 if anything foreign is named, or if something could not be looked into: a
    pickle that cannot be read to its end, a compressed file, a folder that cannot be listed.
    """
    access = access_to(credential, *paths)
    reports = [
        _scan(path, access) if error is None else (path, [], error)
        for root in paths
        for path, error in _files(root, access)
    ]
    foreign = sum(not f.known for _, findings, _ in reports for f in findings)
    failed = sum(error is not None for _, _, error in reports)
    reports = [(label(path), findings, error) for path, findings, error in reports]
    if as_json:
        print_json([_facts(*report) for report in reports])
    else:
        for path, findings, error in reports:
            _show(path, findings, error, show_all)
        files, names = counted(len(reports), "file"), counted(foreign, "foreign name")
        click.echo(f"{files}, {names}, {failed:,} could not be scanned")
    if foreign or failed:
        sys.exit(1)


def _files(root: str, access: Access) -> Iterator[tuple[str, str | None]]:
    """What is to be scanned, and of folders that cannot be listed why."""
    if is_url(root) or not os.path.isdir(root):
        yield root, None
        yield from ((path, None) for path in _beside(root, access))
        return
    refused: list[OSError] = []
    seen: set[tuple[int, int]] = set()
    for directory, folders, names in os.walk(root, onerror=refused.append, followlinks=True):
        status = os.stat(directory)
        if (status.st_dev, status.st_ino) in seen:  # links may lead around in circles
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders.sort()
        yield from ((os.path.join(directory, name), None) for name in sorted(names))
    for error in refused:
        yield os.fsdecode(error.filename), f"cannot be listed: {error.strerror}"


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
