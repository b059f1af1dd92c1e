"""One tensor at a time, in the order of the file, while the next are already on their way.

Holds the batch that is handed out and the one that is being fetched, each a tensor, or up to 24 MiB
of smaller ones; and what its receiver has not let go of.
"""

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from weighlock.abort import Abort
from weighlock.errors import Aborted, SourceError
from weighlock.fetching.file_fetch import FetchOptions
from weighlock.fetching.filling import into_new_memory, places_of
from weighlock.fetching.gathering import Names, choose, open_spread
from weighlock.fetching.moving import Progress
from weighlock.fetching.reporting import Reporting
from weighlock.fetching.shards import only, shards_of
from weighlock.formats.detect import open_catalog
from weighlock.formats.remote import is_index, is_metadata
from weighlock.formats.sharded import read_index
from weighlock.limits import Limits
from weighlock.sources.access import Access, Address
from weighlock.sources.http import HttpSource
from weighlock.tensors.arrays import Array
from weighlock.tensors.catalog import Catalog
from weighlock.tensors.ref import TensorRef
from weighlock.tensors.stored import StoredRef
from weighlock.transfer.landing import MemoryLanding

if TYPE_CHECKING:
    from weighlock.tensors.spec import Span

__all__ = ["stream"]

_BATCH_BYTES = 24 * 1024 * 1024
"""Small tensors that are fetched together."""


def stream(
    url: str,
    *,
    names: str | Sequence[str] | None = None,
    access: Access | None = None,
    abort: Abort | None = None,
    connections: int = 4,
    verify: bool = True,
    limits: Limits | None = None,
) -> Iterator[tuple[str, Array]]:
    """Fetch tensors one after another, in the order of the file.

    Every array is its receiver's own. Memory holds three tensors at the most, the receiver's among
    them, and 64 MB.

    Args:
        url: of a share, of a file on any HTTP server that answers ranges, of the index of a
            sharded model, whose files then come one after another; or of the `.metadata` of a
            distributed checkpoint, whose tensors come in its order.
        names: glob patterns; only these tensors.
        access: credentials.
        abort: ends it from any thread.
        connections: requests under way at once.
        verify: check every block against its digest, where the server has them.
        limits: timeouts, patience.

    Yields:
        Names and arrays. A tensor of several names comes once for each, as the same array.

    Raises:
        TransferError, RemoteProtocolError, SourceError, FormatError: it could not be had, is not
            weights, or has no tensor of these `names`.
        LimitExceeded: it asks for more than `limits` allow.
    """
    own = Abort()
    how = FetchOptions(
        access=access, abort=own, connections=connections, verify=verify, limits=limits or Limits()
    )
    patterns = (names,) if isinstance(names, str) else names
    stop = abort or Abort()
    if is_metadata(url):
        yield from _spread(url, patterns, replace(how, abort=stop))
        return
    with stop.waking(lambda: own.set(stop.reason)):
        if not is_index(url):
            yield from _one_file(url, patterns, how, stop)
            return
        with closing(how.open(url)) as source:
            index = read_index(source, how.limits)
        for shard, held in shards_of(index, patterns).items():
            yield from _one_file(Address.of(url).sibling(shard).url, only(held, shard), how, stop)


def _spread(
    url: str, names: Sequence[str] | None, how: FetchOptions
) -> Iterator[tuple[str, Array]]:
    """Tensors in chunks, each put together when it is asked for."""
    with open_spread(url, how) as whole:
        for name, ref in choose(whole, names).items():
            how.abort.check()
            yield name, ref.load()


def _one_file(
    url: str, names: Names | None, how: FetchOptions, abort: Abort
) -> Iterator[tuple[str, Array]]:
    with closing(how.open(url)) as source:
        catalog = open_catalog(source, how.limits)
        chosen = choose(catalog, names)
        batches = list(_batches(chosen))
        if len(batches) > 1 and not source.remote.resource.has_ranges:
            raise SourceError(
                f"{source.label}: its server does not answer ranges, so it cannot be streamed; "
                "fetch it to a file first"
            )
        with Reporting(source) as reporting:
            progress = Progress(chosen.nbytes, reporting.told)
            yield from _Prefetched(source, batches, how, abort, progress)
        reporting.warn_if_unconfirmed()


class _Prefetched:
    """Batches, one ahead of the reader."""

    def __init__(
        self,
        source: HttpSource,
        batches: list[list[TensorRef]],
        how: FetchOptions,
        abort: Abort,
        progress: Progress,
    ) -> None:
        self._source = source
        self._how = how
        self._abort = abort
        self._own = how.abort
        self._progress = progress
        self._wanted = batches
        # One slot: the thread fetches a batch, and waits with it until the one before is taken.
        self._batches: queue.Queue[Catalog | BaseException | None] = queue.Queue(1)
        self._room = threading.Semaphore(1)

    def __iter__(self) -> Iterator[tuple[str, Array]]:
        worker = threading.Thread(target=self._work, name="weighlock-stream", daemon=True)
        worker.start()
        try:
            while True:
                batch = self._batches.get()
                if batch is None:
                    worker.join()
                    return
                if isinstance(batch, BaseException):
                    raise batch
                self._room.release()
                refs = dict(batch)
                del batch
                while refs:  # let go of each as it is handed out
                    self._abort.check()  # however much of it is here
                    name = next(iter(refs))
                    yield name, refs.pop(name).load()
        finally:
            if worker.is_alive():  # after a good end the owner is still to be told
                self._own.set("the stream was closed")
            self._room.release()
            while worker.is_alive():
                try:
                    self._batches.get(timeout=0.05)
                except queue.Empty:
                    continue
            worker.join()

    def _work(self) -> None:
        try:
            for batch in self._wanted:
                self._room.acquire()
                self._own.check()
                self._batches.put(self._fetch(batch))
            self._batches.put(None)
        except BaseException as error:
            if not (isinstance(error, Aborted) and not self._abort.is_set and self._own.is_set):
                self._batches.put(error)

    def _fetch(self, batch: list[TensorRef]) -> Catalog:
        catalog = Catalog({ref.name: ref for ref in batch})
        places = places_of(catalog, self._source)
        if places is None:
            return catalog  # gathered when it is asked for: a checkpoint on a plain server
        # Apart: who keeps one of them must not keep its neighbours.
        received = into_new_memory(catalog, places, self._how.limits, apart=True)
        landing = MemoryLanding(received, self._source.size)
        puller = self._how.puller(self._source)
        puller.pull(landing.blocks, landing, self._progress, received.make)
        return received.complete()


def _batches(chosen: Catalog) -> Iterator[list[TensorRef]]:
    """Tensors in the order of the file: one, or several that are small together."""
    stored = [ref for ref in chosen.values() if isinstance(ref, StoredRef)]
    stored.sort(key=lambda ref: ref.span.offset)
    ordered: list[TensorRef] = [*stored]
    ordered += [ref for ref in chosen.values() if not isinstance(ref, StoredRef)]
    batch: list[TensorRef] = []
    held = 0
    place: Span | None = None
    for ref in ordered:
        before, place = place, ref.span if isinstance(ref, StoredRef) and ref.nbytes else None
        if place is not None and place == before:  # another name of the last one, which comes once
            batch.append(ref)
            continue
        if batch and held + ref.nbytes > _BATCH_BYTES:
            yield batch
            batch, held = [], 0
        batch.append(ref)
        held += ref.nbytes
    if batch:
        yield batch
