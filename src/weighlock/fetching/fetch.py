"""Fetch weights from a URL: to memory, into arrays somebody has, or to a file. One visible call.

Knows which landing a wish needs and what must be checked before the first byte; pulling, bases and
landings are its neighbours'.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace

from weighlock.abort import Abort
from weighlock.disk.atomic import AtomicFile
from weighlock.disk.lease import Lease, SpoolFile
from weighlock.disk.resumable import ResumableFile
from weighlock.disk.spool import Spool
from weighlock.errors import (
    Aborted,
    FormatError,
    LayoutError,
    LocalProtocolError,
    ProtocolError,
)
from weighlock.fetching.bases import BaseContents, take_from_base, take_from_part
from weighlock.fetching.filling import Received, into_arrays, into_new_memory
from weighlock.fetching.journal import Journal
from weighlock.fetching.moving import Progress
from weighlock.fetching.pulling import Puller
from weighlock.fetching.reporting import UNCONFIRMED, Reporting
from weighlock.formats.detect import open_catalog, open_source
from weighlock.formats.remote import is_index, noted, open_url
from weighlock.formats.safetensors import arrange, build_header
from weighlock.formats.sharded import INDEX_NAME, read_index
from weighlock.formats.spooled import open_landed, open_landed_shards
from weighlock.limits import Limits
from weighlock.sources.access import Access, Address
from weighlock.sources.grid import block_span
from weighlock.sources.http import HttpSource
from weighlock.sources.local import FileSource
from weighlock.tensors.catalog import Catalog
from weighlock.tensors.convert import as_ref
from weighlock.tensors.stored import StoredRef
from weighlock.transfer.landing import FileLanding, Landing, MemoryLanding, PartLanding
from weighlock.transfer.rate import Rate

__all__ = ["How", "fetch"]


@dataclass(frozen=True, slots=True)
class How:
    """What every file of one fetch has in common."""

    access: Access | None = None
    abort: Abort = field(default_factory=Abort)
    connections: int = 4
    rate: Rate | None = None
    verify: bool = True
    durable: bool = True
    limits: Limits = field(default_factory=Limits)

    def open(self, url: str) -> HttpSource:
        """The file behind a URL."""
        self.abort.check()
        return HttpSource(
            url, access=self.access, verify=self.verify, limits=self.limits, abort=self.abort
        )

    def puller(self, source: HttpSource) -> Puller:
        """Connections to it."""
        return Puller(source.remote, connections=self.connections, rate=self.rate)


def fetch(
    url: str,
    *,
    out: "Mapping[str, object] | object | None" = None,
    into: "str | os.PathLike[str] | Spool | None" = None,
    names: str | Sequence[str] | None = None,
    base: "Mapping[str, object] | str | os.PathLike[str] | None" = None,
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
    opened = _open_base(base)
    try:
        with (
            into.aborting(how.abort) if isinstance(into, Spool) else nullcontext(how.abort) as stop
        ):
            how = replace(how, abort=stop)
            if is_index(url):
                return _fetch_sharded(url, out, into, patterns, opened, progress, how)
            with closing(how.open(url)) as source:
                with Reporting(source, receiver, progress) as reporting:
                    one = _One(source, patterns, opened, how)
                    fetched = one.fetch(out, into, reporting.told)
                if reporting.unconfirmed:
                    fetched = fetched.noted(UNCONFIRMED)
                return noted(fetched, source)
    finally:
        if isinstance(base, (str, os.PathLike)) and opened is not None:
            opened.close()


def _open_base(base: "Mapping[str, object] | str | os.PathLike[str] | None") -> Catalog | None:
    if base is None or isinstance(base, Catalog):
        return base
    if isinstance(base, (str, os.PathLike)):
        return open_catalog(base)
    return Catalog({name: as_ref(name, value) for name, value in base.items()})


class _One:
    """The fetch of one file."""

    def __init__(
        self,
        source: HttpSource,
        patterns: Sequence[str] | None,
        base: Catalog | None,
        how: How,
    ) -> None:
        self._source = source
        self._patterns = patterns
        self._base = base if source.verifies else None
        self._how = how

    def fetch(
        self,
        out: object | None,
        into: "str | os.PathLike[str] | Spool | None",
        tell: Callable[[int, int], None] | None,
    ) -> Catalog:
        if isinstance(into, Spool) and self._patterns is None:
            return open_landed(self.to_spool(into, tell), self._how.limits)
        if into is not None and not isinstance(into, Spool) and self._patterns is None:
            return self._to_file(into, Progress(self._source.size, tell))
        remote = open_source(self._source, self._how.limits)
        chosen = _chosen(remote, self._patterns)
        if not all(isinstance(r, StoredRef) and r.contiguous_span for r in chosen.values()):
            return self._unlike_a_share(chosen, out, into)
        if into is not None:
            return self._part_to_file(remote, chosen, into, tell)
        received: Received = (
            into_new_memory(chosen, self._how.limits)
            if out is None
            else into_arrays(chosen, out, strict=self._patterns is None)
        )
        landing = MemoryLanding(received.targets, self._source.size)
        progress = Progress(_bytes_of(landing, self._source.size), tell)
        self._pull(remote, landing, progress)
        received.complete()
        return received.catalog

    def _pull(self, remote: Catalog | None, landing: Landing, progress: Progress) -> None:
        blocks = list(landing.blocks)
        if self._base is not None and remote is not None:
            with closing(BaseContents(self._source, remote, self._base)) as base:
                blocks = take_from_base(
                    self._source, base, blocks, landing, self._counting(progress)
                )
        self._how.puller(self._source).pull(blocks, landing, progress)

    def _counting(self, progress: Progress) -> Callable[[int], None]:
        def count(block: int) -> None:
            self._how.abort.check()
            progress.add(block_span(block, self._source.size).length)

        return count

    def to_spool(self, spool: Spool, tell: Callable[[int, int], None] | None) -> Lease:
        """Land the whole file in a spool."""
        size = self._source.size
        remote = self._known()
        with spool.file(size) as file:
            landing = FileLanding(file, size)
            self._pull(remote, landing, Progress(size, tell))
            landing.complete()
            return file.finish()

    def _known(self) -> Catalog | None:
        """The catalog of a share, or where there is a base: lies are found before any block."""
        if self._source.remote.resource.is_share or self._base is not None:
            return open_source(self._source, self._how.limits)
        return None

    def _to_file(self, into: "str | os.PathLike[str]", progress: Progress) -> Catalog:
        source = self._source
        remote = self._known()
        file = ResumableFile(into, durable=self._how.durable)
        try:
            file.reserve(max(0, source.size - file.allocated_bytes()))
            whole = FileLanding(file, source.size)
            landing: Landing = whole
            blocks = list(whole.blocks)
            etag = source.remote.resource.etag
            if file.adopted_bytes and source.verifies:
                blocks = take_from_part(source, whole, blocks, self._counting(progress))
            elif not source.verifies and etag is not None and source.remote.resource.has_ranges:
                landing = journal = Journal(whole, file, etag)
                here = set(journal.take_up())
                for block in here:
                    progress.add(block_span(block, source.size).length)
                blocks = [block for block in blocks if block not in here]
            if self._base is not None and remote is not None:
                with closing(BaseContents(source, remote, self._base)) as base:
                    blocks = take_from_base(source, base, blocks, landing, self._counting(progress))
            self._how.puller(source).pull(blocks, landing, progress)
            whole.complete()
            with closing(FileSource(file.temporary_path)) as complete:
                open_catalog(complete, self._how.limits)  # it is what it claims to be
            file.commit()
        except (FormatError, ProtocolError, Aborted):
            file.discard()
            raise
        except BaseException:
            file.keep()
            raise
        return open_catalog(into, self._how.limits)

    def _part_to_file(
        self,
        remote: Catalog,
        chosen: Catalog,
        into: "str | os.PathLike[str] | Spool",
        tell: Callable[[int, int], None] | None,
    ) -> Catalog:
        by_span = {ref.span: ref for ref in reversed(_stored(chosen))}
        refs = [by_span[span] for span in sorted(by_span, key=lambda span: span.offset)]
        aliases = {
            ref.name: by_span[ref.span].name
            for ref in _stored(chosen)
            if by_span[ref.span].name != ref.name
        }
        metadata = {key: text for key, text in remote.metadata.items() if key not in remote.aliases}
        specs = [ref.spec for ref in refs]
        arrangement = arrange(specs)
        header = build_header(specs, arrangement.offsets, {**metadata, **aliases})
        moves = [(ref.span, len(header) + arrangement.offsets[ref.name]) for ref in refs]
        with (
            into.file() if isinstance(into, Spool) else AtomicFile(into, durable=self._how.durable)
        ) as file:
            file.reserve(len(header) + arrangement.data_bytes)
            landing = PartLanding(file, header, moves, self._source.size)
            self._pull(remote, landing, Progress(_bytes_of(landing, self._source.size), tell))
            landing.complete()
            if isinstance(file, SpoolFile):
                return open_landed(file.finish(), self._how.limits)
        assert not isinstance(into, Spool)  # noqa: S101
        return open_catalog(into, self._how.limits)

    def _unlike_a_share(
        self, chosen: Catalog, out: object | None, into: "str | os.PathLike[str] | Spool | None"
    ) -> Catalog:
        """A checkpoint on a plain server, whose tensors do not lie as they are wanted."""
        if into is not None:
            return _saved(into, chosen, self._how)
        if out is not None:
            received = into_arrays(chosen, out, strict=self._patterns is None, lazily=True)
            received.complete()
            return received.catalog
        arrays = chosen.load()
        return Catalog(
            {name: as_ref(name, array) for name, array in arrays.items()}, chosen.metadata
        )


def _saved(into: "str | os.PathLike[str] | Spool", chosen: Catalog, how: How) -> Catalog:
    from weighlock.formats.save import save

    if isinstance(into, Spool):
        return save(into, chosen, limits=how.limits)
    save(into, chosen, durable=how.durable)
    return open_catalog(into, how.limits)


def _chosen(remote: Catalog, patterns: Sequence[str] | None) -> Catalog:
    if patterns is None:
        return remote
    chosen = remote.select(*patterns)
    if not chosen:
        raise LayoutError(f"no tensor matches {' or '.join(map(repr, patterns))}")
    return chosen


def _stored(catalog: Catalog) -> list[StoredRef]:
    return [ref for ref in catalog.values() if isinstance(ref, StoredRef)]


def _bytes_of(landing: Landing, size: int) -> int:
    return sum(block_span(block, size).length for block in landing.blocks)


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
                one = _One(source, None, base, how)
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
        chosen = _chosen(whole, patterns)
        if into is not None:
            return noted(_saved(into, chosen, how), first)
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
