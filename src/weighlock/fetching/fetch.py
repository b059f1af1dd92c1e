"""Fetch weights from a URL: to memory, into arrays somebody has, or to a file. One visible call.

Knows files and models of many shards; how one file is fetched is `one`'s.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from weighlock.abort import Abort
from weighlock.disk.atomic import AtomicFile
from weighlock.disk.spool import Spool
from weighlock.errors import LocalProtocolError
from weighlock.fetching.bases import Base, opened_base
from weighlock.fetching.filling import into_arrays
from weighlock.fetching.one import How, One, choose, save_chosen
from weighlock.fetching.reporting import UNCONFIRMED, Reporting
from weighlock.formats.detect import open_catalog, open_source
from weighlock.formats.remote import is_index, noted, open_url
from weighlock.formats.sharded import INDEX_NAME, read_index
from weighlock.formats.spooled import open_landed_shards
from weighlock.limits import Limits
from weighlock.sources.access import Access, Address
from weighlock.tensors.catalog import Catalog
from weighlock.tensors.convert import as_ref
from weighlock.transfer.rate import Rate

if TYPE_CHECKING:
    from weighlock.disk.lease import Lease

__all__ = ["fetch"]


def fetch(
    url: str,
    *,
    out: "Mapping[str, object] | object | None" = None,
    into: "str | os.PathLike[str] | Spool | None" = None,
    names: str | Sequence[str] | None = None,
    base: "Base | None" = None,
    receiver: str | None = None,
    access: Access | None = None,
    abort: Abort | None = None,
    progress: Callable[[int, int], None] | None = None,
    connections: int = 4,
    limit_rate: float | None = None,
    verify: bool = True,
    durable: bool = True,
    limits: Limits | None = None,
) -> Catalog:
    """Fetch weights from a URL: to memory, or where you say.

    Args:
        url: of a share, of any file on an HTTP server, or of the index of a sharded model.
        out: a mapping of names to arrays or tensors, or a torch module, that receives them.
        into: a file (for a sharded model, a directory) that receives them. What an interrupted
            fetch left there is taken up. Into a spool: a temporary file, gone with its last ref.
        names: glob patterns; only these tensors.
        base: a model one has, as a catalog, arrays or a path: blocks that are the same in it are
            not pulled.
        receiver: who receives it, as its owner is told; a ticket made for one says so itself.
        access: credentials.
        abort: `abort.set()` in any thread ends this with `Aborted`.
        progress: called with bytes here and bytes in all, from any thread.
        connections: requests under way at once.
        limit_rate: bytes a second at the most.
        verify: check every block against its digest, where the server has them.
        durable: survive a power loss once this returns, with `into`.
        limits: timeouts, patience, bounds of what may come.

    Returns:
        The catalog of what is now here. A note says so if nothing could be verified, or if an owner
        that waits for this receiver could not be told that it has landed.

    Raises:
        TransferError: it could not be had; see `reason` and `retryable`.
        FormatError: it is not weights, or does not fit `out`.
        SourceChanged: its owner changed it meanwhile.
        DiskError: `into` cannot be written. `NoSpace` is raised before the first byte.
        With `into`, the destination is untouched; what came stays beside it as a `.part` file for
        the next attempt, unless the error was an abort or bad content. With `out`, arrays hold
        whatever had arrived.
    """
    if out is not None and into is not None:
        raise LocalProtocolError("fetch: pass out= or into=, not both")
    how = How(
        access,
        abort or Abort(),
        connections,
        None if limit_rate is None else Rate(limit_rate, time.monotonic),
        verify,
        durable,
        limits or Limits(),
    )
    patterns = (names,) if isinstance(names, str) else names
    with (
        opened_base(base) as opened,
        into.aborting(how.abort) if isinstance(into, Spool) else nullcontext(how.abort) as stop,
    ):
        how = replace(how, abort=stop)
        if is_index(url):
            return _fetch_sharded(url, out, into, patterns, opened, progress, how)
        with closing(how.open(url)) as source:
            with Reporting(source, receiver, progress) as reporting:
                one = One(source, patterns, opened, how)
                fetched = one.fetch(out, into, reporting.told)
            if reporting.unconfirmed:
                fetched = fetched.noted(UNCONFIRMED)
            return noted(fetched, source)


def _fetch_sharded(
    url: str,
    out: object | None,
    into: "str | os.PathLike[str] | Spool | None",
    patterns: Sequence[str] | None,
    base: Catalog | None,
    tell: Callable[[int, int], None] | None,
    how: How,
) -> Catalog:
    """Every shard of a model in turn; the index comes last."""
    with closing(how.open(url)) as first:
        index = read_index(first, how.limits)
    address = Address.of(url)
    urls = {name: address.sibling(name).url for name in index.shards}
    if into is not None and patterns is None:
        total = 0
        for shard in urls.values():
            with closing(how.open(shard)) as source:
                total += source.size
        before = 0
        landed: dict[str, Lease] = {}
        if isinstance(into, Spool):
            into.reserve(total)
        else:
            os.makedirs(into, exist_ok=True)
        for name, shard in urls.items():
            with closing(how.open(shard)) as source:
                told = _shifted(tell, before, total)
                one = One(source, None, base, how)
                if isinstance(into, Spool):
                    landed[name] = one.to_spool(into, told)
                else:
                    one.fetch(None, os.path.join(into, name), told).close()
                before += source.size
        if isinstance(into, Spool):
            return noted(open_landed_shards(index, landed, how.limits), first)
        name = os.path.basename(address.target.partition("?")[0]) or INDEX_NAME
        with AtomicFile(os.path.join(into, name), durable=how.durable) as file:
            file.write(0, memoryview(index.raw))
        return noted(open_catalog(os.path.join(into, name), how.limits), first)
    whole = open_url(url, how.limits, open_source, access=how.access, verify=how.verify)
    with whole:
        chosen = choose(whole, patterns)
        if into is not None:
            return noted(save_chosen(into, chosen, how), first)
        if out is not None:
            received = into_arrays(chosen, out, strict=patterns is None, lazily=True)
            received.complete()
            return noted(received.catalog, first)
        arrays = chosen.load()
        refs = {name: as_ref(name, array) for name, array in arrays.items()}
        return noted(Catalog(refs, index.metadata), first)


def _shifted(
    tell: Callable[[int, int], None] | None, before: int, total: int
) -> Callable[[int, int], None] | None:
    if tell is None:
        return None
    return lambda done, _: tell(before + done, total)
