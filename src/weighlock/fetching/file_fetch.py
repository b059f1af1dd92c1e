"""The fetch of one file, to wherever it shall land. Knows which landing a wish needs.

What must be checked is checked before the first byte; pulling, bases and landings are its
neighbours'.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from weighlock.abort import Abort
from weighlock.disk.atomic import AtomicFile
from weighlock.disk.lease import Lease
from weighlock.disk.place import sync_placed
from weighlock.disk.resumable import ResumableFile
from weighlock.disk.spool import Spool
from weighlock.errors import Aborted, FormatError, SourceError
from weighlock.fetching.bases import BaseContents, take_from_base, take_from_part
from weighlock.fetching.filling import Later, Received, into_arrays, into_new_memory, places_of
from weighlock.fetching.gathering import Names, choose, gather
from weighlock.fetching.in_place import Compared, Differs, opened, put_in_place
from weighlock.fetching.journal import Journal
from weighlock.fetching.moving import Progress
from weighlock.fetching.pulling import Puller
from weighlock.formats.detect import check_beginning, open_catalog, open_source
from weighlock.formats.safetensors import arrange, build_header
from weighlock.formats.spooled import open_landed
from weighlock.limits import Limits, check_number
from weighlock.sources.access import Access
from weighlock.sources.grid import block_length
from weighlock.sources.http import HttpSource
from weighlock.sources.http_remote import Remote
from weighlock.sources.local import FileSource
from weighlock.sources.turns import in_turns
from weighlock.tensors.catalog import Catalog
from weighlock.tensors.stored import StoredRef
from weighlock.transfer.landing import FileLanding, Landing, MemoryLanding, PartLanding
from weighlock.transfer.rate import Rate

__all__ = ["FetchOptions", "FileFetch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOptions:
    """What every file of one fetch has in common."""

    access: Access | None = None
    abort: Abort = field(default_factory=Abort)
    connections: int = 4
    rate: Rate | None = None
    verify: bool = True
    durable: bool = True
    limits: Limits = field(default_factory=Limits)
    cast: bool = False
    force: bool = False
    keeps: bool = False
    """A file that lies at the destination stays if it is the same: there may be refs to it."""
    on_pulled: Callable[[int], object] | None = None
    """Called with bytes that came over the network, from any thread."""

    def __post_init__(self) -> None:
        check_number("connections", self.connections, 1, is_whole=True)

    def open(self, url: str) -> HttpSource:
        """The file behind a URL."""
        self.abort.check()
        return HttpSource(
            Remote(
                url, access=self.access, verify=self.verify, limits=self.limits, abort=self.abort
            )
        )

    def puller(self, source: HttpSource) -> Puller:
        """Connections to it."""
        return Puller(
            source.remote,
            connections=self.connections,
            rate=self.rate,
            on_pulled=self.on_pulled,
        )

    def counting(
        self, total_bytes: int, tell: Callable[[int, int], None] | None
    ) -> Callable[[int], None]:
        """What to call after bytes that no puller brought: tells, keeps to the rate, and stops."""
        return self.counted(Progress(total_bytes, tell))

    def counted(self, progress: Progress) -> Callable[[int], None]:
        """Likewise, for what is a part of some progress."""

        def count(count_bytes: int) -> None:
            progress.add(count_bytes)
            if self.on_pulled is not None:
                self.on_pulled(count_bytes)
            if self.rate is not None:
                self.abort.wait(self.rate.pause_for(count_bytes))
            self.abort.check()

        return count


class FileFetch:
    """The fetch of one file.

    Args:
        source: the file, opened.
        names: what is wanted of it; all of it if not given.
        base: a model one has.
        how: what every file of one fetch has in common.
    """

    def __init__(
        self,
        source: HttpSource,
        names: "Names | None",
        base: Catalog | None,
        how: FetchOptions,
    ) -> None:
        self._source = source
        self._names = names
        self._base = base if source.verifies else None
        self._how = how

    def fetch(
        self,
        out: object | None,
        into: "str | os.PathLike[str] | Spool | None",
        tell: Callable[[int, int], None] | None,
    ) -> Catalog:
        """Fetch it: into arrays, to a file or spool, or to memory."""
        if into is not None and self._names is None:
            return self._whole(into, tell)
        remote = open_catalog(self._source, self._how.limits)
        chosen = choose(remote, self._names)
        places = places_of(chosen, self._source)
        if places is None:
            return gather(chosen, out, into, self._how, tell, strict=self._names is None)
        if into is not None and len(chosen) == len(remote):
            return self._whole(into, tell)
        if into is not None:
            return self._part_to_file(remote, chosen, into, tell)
        received: Received = (
            into_new_memory(chosen, places, self._how.limits)
            if out is None
            else into_arrays(chosen, out, strict=self._names is None, cast=self._how.cast)
        )
        landing = MemoryLanding(received, self._source.size)
        later_bytes = sum(each.nbytes for each in received.later)
        progress = Progress(_bytes_of(landing, self._source.size) + later_bytes, tell)
        self._pull(remote, landing, progress, received.make)
        if received.later:
            self._fill_later(received.later, progress)
        return received.complete()

    def _fill_later(self, later: Sequence[Later], progress: Progress) -> None:
        """Read what cannot be received into its place: as many at once as connections."""
        count = self._how.counted(progress)

        def fill(each: Later) -> None:
            each.fill()
            count(each.nbytes)

        in_turns(later, lambda: fill, min(self._how.connections, len(later)))

    def _pull(
        self,
        remote: Catalog | None,
        landing: Landing,
        progress: Progress,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        blocks = list(landing.blocks)
        if self._base is not None and remote is not None:
            if meanwhile is not None:
                meanwhile()
                meanwhile = None
            with closing(BaseContents(self._source, remote, self._base)) as base:
                blocks = take_from_base(
                    self._source, base, blocks, landing, self._counting(progress)
                )
        self._how.puller(self._source).pull(blocks, landing, progress, meanwhile)

    def _counting(self, progress: Progress) -> Callable[[int], None]:
        def count(block: int) -> None:
            self._how.abort.check()
            progress.add(block_length(block, self._source.size))

        return count

    def _whole(
        self,
        into: "str | os.PathLike[str] | Spool",
        tell: Callable[[int, int], None] | None,
    ) -> Catalog:
        if isinstance(into, Spool):
            return open_landed(self.to_spool(into, tell), self._how.limits)
        size = self._source.size
        here = self._here(into, lambda there: FileLanding(there, size), tell)
        return opened(self.to_file(into, tell), self._how.limits) if here is None else here

    def _here(
        self,
        path: "str | os.PathLike[str]",
        landing_in: Callable[[Compared], FileLanding | PartLanding],
        tell: Callable[[int, int], None] | None,
    ) -> Catalog | None:
        """What lies there already, if it is to stay, and is what would land there byte by byte."""
        how, source = self._how, self._source
        if not how.keeps or not source.verifies or not os.path.isfile(path):
            return None
        remote = open_source(source, how.limits)
        try:
            there = FileSource(path)
        except SourceError:
            return None
        try:
            landing = landing_in(Compared(there))
            silent = Progress(source.size, None)
            catalog = open_catalog(there, how.limits)
            # Blocks at the edges, which it has not all of, are pulled to be compared.
            with closing(BaseContents(source, remote, catalog)) as base:
                count = self._counting(silent)
                blocks = take_from_base(source, base, landing.blocks, landing, count)
            how.puller(source).pull(blocks, landing, silent)
            landing.complete()
            if how.durable:
                sync_placed(path)
        except (Differs, FormatError, SourceError):
            there.close()
            return None
        except BaseException:
            there.close()
            raise
        Progress(source.size, tell).add(source.size)
        return catalog

    def _put_in_place(self, file: AtomicFile) -> FileSource:
        return put_in_place(file, keeps=self._how.keeps, abort=self._how.abort)

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

    def to_file(
        self, into: "str | os.PathLike[str]", tell: Callable[[int, int], None] | None
    ) -> FileSource:
        """Land the whole file under a name; returns what was put there, opened.

        Raises:
            SourceChanged: somebody else has put another file there meanwhile.
        """
        source = self._source
        progress = Progress(source.size, tell)
        remote = self._known()
        if remote is None:  # what an earlier attempt left is not touched for a page of some login
            check_beginning(source)
        file = ResumableFile(into, durable=self._how.durable)
        whole = FileLanding(file, source.size)
        landing: Landing = whole
        try:
            file.reserve(max(0, source.size - file.allocated_bytes()))
            blocks = list(whole.blocks)
            etag = source.remote.resource.etag
            if file.adopted_bytes and source.verifies:
                # With another end than before, a journal that may lie there is over.
                file.truncate(max(source.size, file.size) + 1)
                blocks = take_from_part(source, whole, blocks, self._counting(progress))
            elif not source.verifies and etag is not None and source.remote.resource.has_ranges:
                landing = journal = Journal(whole, file, source.remote.address.unsigned, etag)
                here = set(journal.take_up())
                for block in here:
                    progress.add(block_length(block, source.size))
                blocks = [block for block in blocks if block not in here]
            elif file.adopted_bytes:
                file.truncate(0)  # nothing here could tell what it is
            if self._base is not None and remote is not None:
                with closing(BaseContents(source, remote, self._base)) as base:
                    blocks = take_from_base(source, base, blocks, landing, self._counting(progress))
            self._how.puller(source).pull(blocks, landing, progress)
            whole.complete()
            landing = whole  # what the journal said is cut off
            with closing(FileSource(file.temporary_path)) as complete:
                open_catalog(complete, self._how.limits)  # it is what it claims to be
            return self._put_in_place(file)
        except (FormatError, Aborted):
            file.discard()
            raise
        except BaseException as error:
            is_kept = file.keep()
            if is_kept and (source.verifies or landing is not whole):
                done = f"{progress.done:,} of {source.size:,} bytes"
                error.add_note(f"{done} are kept, and the next attempt goes on from there")
            raise

    def _part_to_file(
        self,
        remote: Catalog,
        chosen: Catalog,
        into: "str | os.PathLike[str] | Spool",
        tell: Callable[[int, int], None] | None,
    ) -> Catalog:
        # Names of one tensor get one entry. Those without bytes may share a place: each is its own.
        places = {ref.name: ref.span if ref.nbytes else ref.name for ref in _stored(chosen)}
        kept = {places[ref.name]: ref for ref in reversed(_stored(chosen))}
        refs = sorted(kept.values(), key=lambda ref: ref.span.offset)
        aliases = {
            name: kept[place].name for name, place in places.items() if kept[place].name != name
        }
        metadata = {key: text for key, text in remote.metadata.items() if key not in remote.aliases}
        specs = [ref.spec for ref in refs]
        arrangement = arrange(specs)
        header = build_header(
            specs, arrangement.offsets, {**metadata, **aliases}, limits=self._how.limits
        )
        moves = [(ref.span, len(header) + arrangement.offsets[ref.name]) for ref in refs]

        def landing_in(file: "AtomicFile | Compared") -> PartLanding:
            return PartLanding(file, header, moves, self._source.size)  # type: ignore[arg-type]

        def land(file: AtomicFile) -> None:
            file.reserve(len(header) + arrangement.data_bytes)
            landing = landing_in(file)
            self._pull(remote, landing, Progress(_bytes_of(landing, self._source.size), tell))
            landing.complete()

        if isinstance(into, Spool):
            with into.file() as spooled:
                land(spooled)
                return open_landed(spooled.finish(), self._how.limits)
        here = self._here(into, landing_in, tell)
        if here is not None:
            return here
        file = AtomicFile(into, durable=self._how.durable)
        try:
            land(file)
            return opened(self._put_in_place(file), self._how.limits)
        except BaseException:
            file.discard()
            raise


def _stored(catalog: Catalog) -> list[StoredRef]:
    return [ref for ref in catalog.values() if isinstance(ref, StoredRef)]


def _bytes_of(landing: Landing, size: int) -> int:
    return sum(block_length(block, size) for block in landing.blocks)
