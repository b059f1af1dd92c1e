"""`weighlock serve`: weights offered over HTTP, as safetensors, without converting them."""

import contextlib
import math
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from types import FrameType

import click

import weighlock
from weighlock.cli.live import shown_live
from weighlock.cli.shared import SIZE, json_option, label, print_json_line, print_notes
from weighlock.cli.text import counted, escaped, size
from weighlock.sharing.identity import (
    default_secret_path,
    files_at,
    page_token,
    secret,
    stable_id,
    stable_inbox_id,
    ticket_key,
    token_in,
)
from weighlock.sharing.inbox import Inbox
from weighlock.sources.local import FileSource
from weighlock.tensors.catalog import Catalog

__all__ = ["command"]

_DEFAULT_PORT = 8400
_LOOK_S = 0.5


@click.command("serve")
@click.argument("paths", nargs=-1, type=click.Path())
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=_DEFAULT_PORT,
    show_default=True,
    help="Port to listen on; 0 for any.",
)
@click.option("--public-url", metavar="URL", help="What others call this server.")
@click.option("--tls-cert", type=click.Path(), help="Certificate (chain) to serve TLS with.")
@click.option("--tls-key", type=click.Path(), help="Its key, if it is not in the same file.")
@click.option("--client-ca", type=click.Path(), help="Admit only holders of its certificates.")
@click.option("--insecure", is_flag=True, help="Let others connect without TLS.")
@click.option(
    "--expires",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="End shares and inbox after this time, and exit.",
)
@click.option("--cacheable", is_flag=True, help="Let HTTP caches keep the weights.")
@click.option(
    "--inbox",
    "inbox_path",
    type=click.Path(),
    help="Accept pushes into this directory: a file for each sender, which is never replaced.",
)
@click.option(
    "--sender",
    "senders",
    multiple=True,
    metavar="NAME",
    help="Who may push; repeat it for each. Without it, whoever has the URL may.",
)
@click.option("--quota", type=SIZE, help="Largest file that may be pushed, such as 20GB.")
@click.option(
    "--secret",
    "secret_path",
    type=click.Path(),
    help="File of the key that makes URLs stable; made if there is none. Without this option it is "
    "weighlock/secret in $XDG_STATE_HOME, or in ~/.local/state.",
)
@click.option(
    "--page/--no-page", default=True, help="Serve a page to watch it by, and Prometheus metrics."
)
@click.option(
    "--page-token",
    "token_path",
    type=click.Path(),
    help="File of the token that guards page and metrics; made from the secret if not given.",
)
@click.option("-v", "--verbose", is_flag=True, help="Show the log on stderr.")
@json_option
def command(
    paths: Sequence[str],
    host: str,
    port: int,
    public_url: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    client_ca: str | None,
    insecure: bool,
    expires: float | None,
    cacheable: bool,
    inbox_path: str | None,
    senders: Sequence[str],
    quota: int | None,
    secret_path: str | None,
    page: bool,
    token_path: str | None,
    verbose: bool,
    as_json: bool,
) -> None:
    """Offer the weights at each of PATHS, and print the URL to pull each from.

    Who has a URL can read the weights. A file that is unchanged keeps its URL when the server is
    started again. Stop with Ctrl-C: what is being sent has five seconds to finish, and goes on from
    there when the server is started again.

    With --inbox, others can push weights to the URL that is printed, and resume what was cut off.

    The page shows what is on offer and who receives it; /metrics tells Prometheus, which needs the
    same token.
    """
    if not paths and inbox_path is None:
        raise click.UsageError("name weights to offer, or an --inbox to take them")
    if (senders or quota is not None) and inbox_path is None:
        raise click.UsageError("--sender and --quota are for an --inbox")
    key = secret(secret_path or default_secret_path())
    token = page_token(key) if token_path is None else token_in(token_path)
    with ExitStack() as opened:
        files = [files_at(path) for path in paths]
        catalogs = [opened.enter_context(weighlock.open(path)) for path in paths]
        server = opened.enter_context(
            weighlock.Server(
                host,
                port,
                public_url=public_url,
                tls_cert=tls_cert,
                tls_key=tls_key,
                client_ca=client_ca,
                insecure=insecure,
                key=ticket_key(key),
                page=token if page else False,
                start=False,  # who was cut off comes back at once, for what is not offered yet
            )
        )
        inbox = None
        if inbox_path is not None:
            inbox = server.inbox(
                senders,
                into=inbox_path,
                quota_bytes=quota,
                expires_s=expires,
                idle_s=None,
                inbox_id=stable_inbox_id(key, inbox_path),
            )
        shares = {}
        by_id: dict[str, weighlock.Share] = {}
        for path, catalog, before in zip(paths, catalogs, files, strict=True):
            print_notes(catalog.notes, catalog.unreadable)
            readable = catalog.readable()
            share_id = stable_id(key, path, readable, before)
            if share_id not in by_id:  # or it was named twice
                by_id[share_id] = server.share(
                    readable,
                    expires_s=expires,
                    idle_s=None,
                    cacheable=cacheable,
                    title=os.path.basename(os.path.abspath(path)),
                    share_id=share_id,
                )
            shares[path] = by_id[share_id]
        server.start()
        stop = _told_to_stop()  # before the URLs are out: who has read them may end this at once
        tickets = {} if inbox is None else _tickets(inbox, senders)
        if as_json:
            facts = [
                {"path": path, "url": share.url, "bytes": share.size}
                for path, share in shares.items()
            ]
            open_to = [{"sender": who or None, "url": url} for who, url in tickets.items()]
            print_json_line({"shares": facts, "inbox": open_to, "page": server.page_url})
        else:
            for path, share in shares.items():
                click.echo(f"{escaped(path)} ({size(share.size)})\n  {share.url}")
            for who, url in tickets.items():
                click.echo(f"inbox {escaped(inbox_path or '')} for {who or 'anybody'}\n  {url}")
            if server.page_url is not None:
                click.echo(f"page\n  {server.page_url}")
        sys.stdout.flush()
        named = [] if inbox is None else [(f"inbox {inbox_path}", inbox)]
        offers = [*named, *((label(path), share) for path, share in shares.items())]
        with shown_live(offers, verbose=verbose):
            if inbox is not None:
                telling = threading.Thread(target=_tell_landed, args=(inbox, as_json), daemon=True)
                telling.start()
            _wait(stop, expires)
        click.echo("stopping", err=True)


def _tickets(inbox: Inbox, senders: Sequence[str]) -> dict[str, str]:
    return {name: inbox.url_for(name) for name in senders} or {"": inbox.url}


def _tell_landed(inbox: Inbox, as_json: bool) -> None:
    """A line for each that has landed, as long as somebody reads them."""
    with contextlib.suppress(BrokenPipeError):
        for name, catalog in inbox:
            with catalog:
                path, tensors, nbytes = _file_of(catalog), len(catalog), catalog.nbytes
            if as_json:
                facts = {"landed": name, "path": path, "tensors": tensors, "bytes": nbytes}
                print_json_line(facts)
            else:
                told = f"{counted(tensors, 'tensor')}, {size(nbytes)}"
                where = "" if path is None else f": {escaped(path)}"
                click.echo(f"landed from {name}{where}: {told}")


def _file_of(catalog: Catalog) -> str | None:
    """The file that the tensors of an inbox's directory lie in; None if there are no tensors."""
    sources = (source for ref in catalog.values() for source in ref.sources())
    return next((source.path for source in sources if isinstance(source, FileSource)), None)


def _wait(stop: "queue.SimpleQueue[int]", most_s: float | None) -> None:
    """Until somebody says stop, or so long.

    In short steps: a signal that reaches another thread does not wake this one, which has to act.
    """
    until = math.inf if most_s is None else time.monotonic() + most_s
    while time.monotonic() < until:
        with contextlib.suppress(queue.Empty):
            stop.get(timeout=max(0.0, min(_LOOK_S, until - time.monotonic())))
            return


def _told_to_stop() -> "queue.SimpleQueue[int]":
    """What a signal is put into from now on, instead of ending the process where it stands.

    One that whoever started the process let it ignore is still ignored: SIGHUP under `nohup`,
    SIGINT where a script put it into the background.
    """
    # An `Event` has a lock, which the thread that a handler interrupts may hold.
    stop: queue.SimpleQueue[int] = queue.SimpleQueue()

    def end(number: int, frame: FrameType | None) -> None:
        stop.put(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)
    return stop
