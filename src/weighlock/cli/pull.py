"""`weighlock pull`: weights from a URL to a file, taken up where an earlier attempt ended."""

import os
from collections.abc import Sequence

import click

import weighlock
from weighlock.cli.credentials import access_to, credential_options
from weighlock.cli.names import chosen_by
from weighlock.cli.progress import quiet_option, transfer_bar
from weighlock.cli.shared import (
    SIZE,
    check_directory,
    connections_option,
    json_option,
    patience_option,
    print_json,
    print_notes,
)
from weighlock.cli.text import counted, escaped, size
from weighlock.errors import DiskError, WeighlockError
from weighlock.formats.remote import is_metadata
from weighlock.formats.sharded import is_index_name
from weighlock.limits import Limits
from weighlock.sources.access import Access, Address, Credential, shown

__all__ = ["command"]


@click.command("pull")
@click.argument("url")
@click.argument("dest", required=False, type=click.Path())
@click.option("--names", "patterns", multiple=True, metavar="GLOB", help="Pull only these tensors.")
@click.option(
    "--base", type=click.Path(), help="A model that resembles it: only what differs is pulled."
)
@connections_option
@click.option("--limit-rate", type=SIZE, help="Most bytes a second, such as 20MB.")
@patience_option
@click.option("--no-verify", is_flag=True, help="Do not check blocks against their digests.")
@click.option("-f", "--force", is_flag=True, help="Replace DEST; what is the same is not pulled.")
@click.option(
    "--no-sync", is_flag=True, help="Do not wait until it is on the disk: a power loss may take it."
)
@quiet_option
@credential_options
@json_option
def command(
    url: str,
    dest: str | None,
    patterns: Sequence[str],
    base: str | None,
    connections: int,
    limit_rate: int | None,
    patience_s: float,
    no_verify: bool,
    force: bool,
    no_sync: bool,
    quiet: bool,
    credential: Credential,
    as_json: bool,
) -> None:
    """Pull the weights at URL into the file DEST.

    Without DEST, or if DEST is a directory, the file is named after the end of the URL, or else
    model.safetensors. By the URL of its index, a sharded model is pulled file by file into the
    directory DEST, its index last; files of the same names that are there are replaced with --force
    only. The .metadata of a distributed checkpoint becomes one safetensors file.

    Run it again after an interruption: what had arrived is checked, and only the rest is pulled. It
    starts over with --names, for a distributed checkpoint, and from a server without digests,
    unless that answers ranges and sends a strong ETag.
    """
    name = _name(url)
    is_sharded = is_index_name(name) and not patterns
    if dest == "-":
        raise click.UsageError("weights are not written to standard output; name a file")
    target = dest or (os.path.splitext(name)[0] if is_sharded else name)
    if not is_sharded and os.path.isdir(target):
        target = os.path.join(target, name)
    elif not is_sharded:
        check_directory(target)
    if os.path.lexists(target) and not is_sharded:
        if not force:
            raise DiskError(f"{target}: exists; --force replaces it, pulling only what differs")
        base = base or _if_weights(target)
    access, limits = access_to(credential, url), Limits(patience_s=patience_s)
    if patterns:
        _check_names(url, patterns, access, limits)
    doing, pulled = f"{shown(url)} → {target}", list[int]()
    with transfer_bar(doing, moved="pulled", quiet=quiet) as transfer:
        catalog = weighlock.fetch(
            url,
            into=target,
            names=list(patterns) or None,
            base=base,
            access=access,
            progress=transfer.tell,
            on_pulled=pulled.append,
            connections=connections,
            limit_rate=limit_rate,
            limits=limits,
            verify=not no_verify,
            durable=not no_sync,
            force=force,
        )
        transfer.moved_bytes = sum(pulled)
        if not transfer.seen_bytes:  # a sharded model that was there already
            transfer.seen_bytes = catalog.nbytes
    with catalog:
        print_notes(catalog.notes, catalog.unreadable)
        facts = {"target": target, "tensors": len(catalog), "bytes": catalog.nbytes}
        if as_json:
            facts["pulled_bytes"] = transfer.moved_bytes
            print_json({**facts, "notes": list(catalog.notes)})
            return
        of_which = ""
        if transfer.moved_bytes < transfer.seen_bytes:
            of_which = f", of which {size(transfer.moved_bytes)} had to be pulled"
        told = f"{counted(len(catalog), 'tensor')}, {size(catalog.nbytes)}{of_which}"
        click.echo(f"{escaped(target)}: {told}")


def _check_names(url: str, patterns: Sequence[str], access: Access, limits: Limits) -> None:
    """Raise `LayoutError` if a pattern matches nothing there, before anything is pulled."""
    # Not with the ticket: who opens weights with one and closes them has received them.
    with weighlock.open(Address.of(url).url, limits, access=access) as catalog:
        chosen_by(catalog, patterns)


def _name(url: str) -> str:
    """What to call what a URL names; of a distributed checkpoint, after its directory."""
    directory, _, name = Address.of(url).target.partition("?")[0].rpartition("/")
    if is_metadata(url):
        name = f"{os.path.basename(directory) or 'model'}.safetensors"
    return name or "model.safetensors"


def _if_weights(path: str) -> str | None:
    """The path, if there are weights that can serve as a base."""
    try:
        weighlock.open(path).close()
    except WeighlockError:
        return None
    return path
