"""Fetch weights from a URL: to memory, into arrays somebody has, or to a file. One visible call.

Knows what may be asked for; how one file is fetched is `one`'s, a model of many files `shards`' or,
where its tensors lie in chunks, `gathering`'s.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from weighlock.abort import Abort
from weighlock.disk.spool import Spool
from weighlock.errors import LocalProtocolError
from weighlock.fetching.bases import Base, opened_base
from weighlock.fetching.file_fetch import FetchOptions, FileFetch
from weighlock.fetching.gathering import fetch_spread
from weighlock.fetching.moving import rate_of
from weighlock.fetching.reporting import UNCONFIRMED, Reporting
from weighlock.fetching.shards import fetch_sharded
from weighlock.formats.remote import is_index, is_metadata, noted
from weighlock.limits import Limits
from weighlock.sources.access import Access
from weighlock.tensors.catalog import Catalog

if TYPE_CHECKING:
    import os

__all__ = ["fetch"]


def fetch(
    url: str,
    *,
    out: "Mapping[str, object] | object | None" = None,
    into: "str | os.PathLike[str] | Spool | None" = None,
    names: str | Sequence[str] | None = None,
    cast: bool = False,
    base: "Base | None" = None,
    receiver: str | None = None,
    access: Access | None = None,
    abort: Abort | None = None,
    progress: Callable[[int, int], None] | None = None,
    on_pulled: Callable[[int], object] | None = None,
    connections: int = 4,
    limit_rate: float | None = None,
    verify: bool = True,
    durable: bool = True,
    force: bool = False,
    limits: Limits | None = None,
) -> Catalog:
    """Fetch weights from a URL: to memory, or where you say.

    Args:
        url: of a share, of any file on an HTTP server, of the index of a sharded model, or of the
            `.metadata` of a distributed checkpoint, which becomes one safetensors file.
        out: a mapping of names to arrays or tensors, or a torch module, that receives them.
        into: a file, which is replaced, or for a sharded model a directory, in which no file of
            its names may lie (see `force`). What an interrupted fetch left there is taken up. Into
            a spool: a temporary file, gone with its last ref.
        names: glob patterns; only these tensors.
        cast: convert where the dtypes of `out` differ; refused otherwise. What is converted is
            pulled, whether `base` has it or not.
        base: a model one has, as a catalog, arrays or a path: blocks that are the same in it are
            not pulled. Of a distributed checkpoint, all are.
        receiver: who receives it, as its owner is told; a ticket made for one says so itself.
        access: credentials.
        abort: `abort.set()` in any thread ends this with `Aborted`.
        progress: called with bytes here and bytes in all, from any thread.
        on_pulled: called with the bytes of each block, or tensor, that came over the network, from
            any thread: not for what `base`, or an earlier attempt, had brought.
        connections: requests under way at once.
        limit_rate: bytes a second at the most.
        verify: check every block against its digest, where the server has them.
        durable: survive a power loss once this returns, with `into`.
        force: for a sharded model, replace files in the directory `into` that have the names of its
            own: its index is removed first and written last, so that none ever names a mixture.
        limits: timeouts, patience, bounds of what may come.

    Returns:
        The catalog of what is now here. In memory each tensor has a buffer of its own, except that
        of very many small ones (under 128 KiB each, over 16 MiB in all) neighbours share one of
        up to 4 MiB. A note says so if nothing could be verified, or if an owner that waits for this
        receiver could not be told that it has landed.

    Raises:
        TransferError: it could not be had; see `retryable`; a `ShareGone` has a `reason`.
        RemoteProtocolError: what its server says makes no sense.
        FormatError: it is not weights, or does not fit `out`.
        LimitExceeded: it does not fit into memory, or asks for more than `limits` allow.
        SourceError: its URL is none, or its owner cannot read it; `SourceChanged` if it, or what
            its server offers, was changed meanwhile.
        DiskError: `into` cannot be written, or holds what would have to be replaced. `NoSpace` is
            raised before the first byte.
        LocalProtocolError: both `out` and `into` are given, or `cast` without `out`; nobody can be
            called `receiver`, or nothing moves at `limit_rate` or over so few `connections`.
        With `into`, the destination is untouched; what came stays beside it as a `.part` file for
        the next attempt, unless the error was an abort or bad content. Of a sharded model, files
        that have landed stay, without an index, unless it was an abort. With `out`, arrays hold
        whatever had arrived.
    """
    if out is not None and into is not None:
        raise LocalProtocolError("fetch: pass out= or into=, not both")
    if cast and out is None:
        raise LocalProtocolError(
            "fetch: cast=True converts to the dtypes of out=, which is not given; what is here "
            "can be converted by weighlock convert, or with ref.torch(dtype=…)"
        )
    how = FetchOptions(
        access=access,
        abort=abort or Abort(),
        connections=connections,
        rate=rate_of(limit_rate),
        verify=verify,
        durable=durable,
        limits=limits or Limits(),
        cast=cast,
        force=force,
        on_pulled=on_pulled,
    )
    patterns = (names,) if isinstance(names, str) else names
    with (
        opened_base(base, how.limits) as opened,
        into.aborting(how.abort) if isinstance(into, Spool) else nullcontext(how.abort) as stop,
    ):
        how = replace(how, abort=stop)
        if is_index(url):
            return fetch_sharded(url, out, into, patterns, opened, progress, how)
        if is_metadata(url):
            return fetch_spread(url, out, into, patterns, progress, how)
        with closing(how.open(url)) as source:
            with Reporting(source, receiver, progress) as reporting:
                one = FileFetch(source, patterns, opened, how)
                fetched = one.fetch(out, into, reporting.told)
            if reporting.unconfirmed:
                fetched = fetched.noted(UNCONFIRMED)
            return noted(fetched, source)
