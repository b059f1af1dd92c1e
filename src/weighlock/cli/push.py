"""`weighlock push`: weights to an inbox, taken up where an earlier attempt ended."""

import os
import socket
from collections.abc import Sequence

import click
from blake3 import blake3

import weighlock
from weighlock.cli.credentials import access_to, credential_options
from weighlock.cli.names import chosen_by
from weighlock.cli.progress import quiet_option, transfer_bar
from weighlock.cli.shared import (
    SIZE,
    connections_option,
    json_option,
    patience_option,
    print_json,
    print_notes,
)
from weighlock.cli.text import escaped, size
from weighlock.limits import Limits
from weighlock.sources.access import Address, Credential, shown

__all__ = ["command"]


@click.command("push")
@click.argument("path", metavar="FILE", type=click.Path())
@click.argument("url")
@click.option("--names", "patterns", multiple=True, metavar="GLOB", help="Push only these tensors.")
@click.option("--sender", metavar="NAME", help="The name to push under, if the URL has none.")
@connections_option
@click.option("--limit-rate", type=SIZE, help="Most bytes a second, such as 20MB.")
@patience_option
@quiet_option
@credential_options
@json_option
def command(
    path: str,
    url: str,
    patterns: Sequence[str],
    sender: str | None,
    connections: int,
    limit_rate: int | None,
    patience_s: float,
    quiet: bool,
    credential: Credential,
    as_json: bool,
) -> None:
    """Push the weights in FILE to the inbox at URL; returns when they have landed there.

    A push that was cut off is taken up when it is run again: only what is not there yet, or
    differs, is sent.
    """
    address = Address.of(url)
    access = access_to(credential, url)
    if sender is None and address.holder is None:
        sender = _own_name(path)
    with weighlock.open(path) as catalog:
        print_notes(catalog.notes, catalog.unreadable)
        chosen = chosen_by(catalog, patterns)
        doing = f"{path} → {shown(url)}"
        with transfer_bar(doing, moved="sent", quiet=quiet) as transfer:
            pushed = weighlock.push(
                url,
                chosen,
                sender=sender,
                access=access,
                progress=transfer.tell,
                connections=connections,
                limit_rate=limit_rate,
                limits=Limits(patience_s=patience_s),
            )
            transfer.seen_bytes, transfer.moved_bytes = pushed.size, pushed.sent_bytes
        facts = {
            "sender": pushed.sender,
            "tensors": len(chosen),
            "bytes": pushed.size,
            "sent_bytes": pushed.sent_bytes,
            "unreadable": dict(catalog.unreadable),
            "notes": list(catalog.notes),
        }
    if as_json:
        print_json(facts)
    else:
        click.echo(
            f"{escaped(path)}: landed as {pushed.sender}, {size(pushed.size)}, "
            f"of which {size(pushed.sent_bytes)} had to be sent"
        )


def _own_name(path: str) -> str:
    """The same for the same file on the same machine: so that a second push takes up the first."""
    text = f"{socket.gethostname()}\0{os.path.abspath(path)}"
    return f"sender-{blake3(text.encode()).hexdigest(6)}"
