"""An inbox: a place to push tensors to, for those who can dial and cannot be dialled.

Knows senders, what may come from them and where it is put; not how it travels. Everything that can
be refused is refused when a header is announced, before any data: names, sizes, tensors that were
not expected, a full disk.
"""

import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress

from blake3 import blake3

from weighlock.disk.resumable import ResumableFile
from weighlock.errors import DiskError, LayoutError, LimitExceeded, Refused, WeighlockError
from weighlock.formats.detect import open_catalog
from weighlock.formats.safetensors import open_safetensors
from weighlock.limits import Limits
from weighlock.sharing.arrival import Announced, Arrival, LandedFile
from weighlock.sharing.offer import Offer, Ticketing
from weighlock.sharing.share import Event, Life, Outcome, Receiver
from weighlock.sources.access import shown
from weighlock.sources.local import FileSource
from weighlock.tensors.catalog import Catalog
from weighlock.tensors.spec import TensorSpec

__all__ = ["Inbox", "made_directory"]


class Inbox(Offer):
    """A place for senders to push tensors to.

    Made by `Server.inbox`. Iterating gives `(name, catalog)` as they land, and ends with the inbox:
    when each of the named senders is final, it expires or is revoked. Each catalog is the
    iterator's to close. As a context manager it is revoked at the end.
    """

    def __init__(
        self,
        ticketing: Ticketing,
        life: Life,
        *,
        directory: str,
        specs: Mapping[str, TensorSpec] | None,
        quota_bytes: int | None,
        durable: bool,
        limits: Limits,
        forget: Callable[[Offer], None],
        on_done: Callable[[Outcome], object] | None = None,
        label: str = "inbox",
    ) -> None:
        super().__init__(ticketing, life, forget=forget, on_done=on_done, label=label)
        self._directory = directory
        self._specs = specs
        self._quota_bytes = quota_bytes
        self._durable = durable
        self._limits = limits
        self._lock = threading.Lock()
        self._arrivals: dict[str, Arrival] = {}
        self._landed: dict[str, Arrival] = {}
        self._told: set[str] = set()
        self._ready: queue.SimpleQueue[tuple[str, Catalog] | None] = queue.SimpleQueue()

    def __repr__(self) -> str:
        return f"<Inbox {shown(self.url)}, {self.ended or 'live'}>"

    def __iter__(self) -> Iterator[tuple[str, Catalog]]:
        while (landed := self._ready.get()) is not None:
            yield landed
        self._ready.put(None)  # for whoever else iterates

    @property
    def senders(self) -> Mapping[str, Receiver]:
        """Who pushes, how far they are: those it is for, or those who came."""
        return self.outcome.receivers

    def begin(self, name: str, attempt: str, header: bytes, size: int) -> Arrival:
        """A sender announces a file; what is here of it from before is taken up.

        Raises:
            FormatError: the header is not valid for a file of that size, or not what is expected.
            LimitExceeded: it is larger than the quota.
            NoSpace: the disk has no room for it.
            Refused: this sender has landed something else already.
        """
        self._check(name, header, size)
        with self._lock:
            arrival = self._landed.get(name) or self._arrivals.get(name)
            if arrival is not None and (arrival.header, arrival.size) != (header, size):
                if name in self._landed:
                    raise Refused(f"{name} has landed already, with other tensors")
                self._arrivals.pop(name).file.discard()
                arrival = None
            if arrival is None:
                arrival = self._earlier(name, header, size)
                if arrival is not None:
                    self._landed[name] = arrival
            if arrival is None:
                arrival = self._arrivals[name] = self._arrival(name, header, size)
        self.report(name, Event.STARTED, attempt, arrival.bytes_here)
        return arrival

    def arrival(self, name: str) -> Arrival | None:
        """What is on its way from a sender, or has landed."""
        with self._lock:
            return self._arrivals.get(name) or self._landed.get(name)

    def has_landed(self, name: str) -> bool:
        """Whether what that sender announced is complete and in its place."""
        with self._lock:
            return name in self._landed

    def finish(self, name: str, attempt: str, root: str) -> bool:
        """A sender says that everything was sent.

        Returns:
            False if what is here is not what it names: it has to look what differs.

        Raises:
            DiskError: it cannot be put in place.
            FormatError: it is not what its header said.
        """
        arrival = self.arrival(name)
        if arrival is None:
            return False
        with arrival.finishing:  # not the inbox's lock: putting it in place may take a while
            if arrival.root != root:
                return False
            if name not in self._told:
                if not self.has_landed(name):
                    self._put_in_place(name, arrival)
                self._told.add(name)
                self._ready.put((name, open_catalog(self._path(name), self._limits)))
        self.report(name, Event.LANDED, attempt, arrival.size)
        return True

    def give_up(self, name: str, event: Event, attempt: str, cause: str) -> None:
        """A sender says that it stops for good: what came of it is of no use."""
        with self._lock:
            arrival = self._arrivals.pop(name, None)
        if arrival is not None:
            arrival.file.discard()
        self.report(name, event, attempt, 0, cause)

    def let_go(self) -> None:
        """Keep what is incomplete for another inbox at the same place; nothing more comes."""
        with self._lock:
            arrivals, self._arrivals = self._arrivals, {}
            landed, self._landed = self._landed, {}
        for arrival in (*arrivals.values(), *landed.values()):
            arrival.file.keep()
        self._ready.put(None)

    def close(self) -> None:
        """Revoke it, and close what landed and nobody asked for; the files stay."""
        self.revoke()
        with suppress(queue.Empty):
            while True:
                landed = self._ready.get_nowait()
                if landed is not None:
                    landed[1].close()
        self._ready.put(None)

    def _leave(self, error: BaseException | None) -> None:
        self.close()

    def _check(self, name: str, header: bytes, size: int) -> None:
        if self._quota_bytes is not None and size > self._quota_bytes:
            raise LimitExceeded(
                f"{size:,} bytes from {name}, at most {self._quota_bytes:,} are allowed",
                limit="quota_bytes",
                asked=size,
                allowed=self._quota_bytes,
            )
        with closing(Announced(header, size, f"what {name} announces")) as announced:
            catalog = open_safetensors(announced, self._limits)
        if 8 + int.from_bytes(header[:8], "little") != len(header):
            raise LayoutError(f"{len(header):,} bytes are not the header of a file")
        if self._specs is not None:
            _check_specs(catalog, self._specs)
        with self._lock:
            known = name in self._arrivals or name in self._landed
            self._limits.check(
                "arrivals", len(self._arrivals) + (not known), "files on their way to an inbox"
            )

    def _path(self, name: str) -> str:
        # Names that the owner chose are file names; what a stranger calls itself never is.
        if name not in self._life.names:
            name = f"push-{blake3(name.encode()).hexdigest(6)}"
        return os.path.join(self._directory, f"{name}.safetensors")

    def _earlier(self, name: str, header: bytes, size: int) -> Arrival | None:
        """What this sender landed here before this inbox was made, if it landed anything.

        A server that was restarted may have put it in place and never said so.
        """
        path = self._path(name)
        if not os.path.lexists(path):
            return None
        file = LandedFile(path)
        first = bytearray(len(header))
        if file.size != size or not file.read_into(0, memoryview(first)) or first != header:
            file.close()
            raise Refused(f"a file of {name} is there already; this inbox does not replace it")
        return Arrival(file, header, size, is_adopted=True)

    def _arrival(self, name: str, header: bytes, size: int) -> Arrival:
        file = ResumableFile(self._path(name), durable=self._durable)
        try:
            file.reserve(max(0, size - file.allocated_bytes()))
            return Arrival(file, header, size, is_adopted=bool(file.adopted_bytes))
        except BaseException:
            file.keep()
            raise

    def _put_in_place(self, name: str, arrival: Arrival) -> None:
        arrival.complete()
        file = arrival.file
        assert isinstance(file, ResumableFile)  # noqa: S101
        try:
            with closing(FileSource(file.temporary_path)) as complete:
                open_catalog(complete, self._limits)  # it is what it claimed to be
            file.commit()
        except WeighlockError:
            with self._lock:
                self._arrivals.pop(name, None)
            file.discard()
            raise
        with self._lock:
            self._landed[name] = self._arrivals.pop(name)


def made_directory(path: "str | os.PathLike[str]") -> str:
    """The directory, made if it is not there.

    Raises:
        DiskError: it cannot be made.
    """
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise DiskError(
            f"{os.fspath(path)}: cannot be made: {error.strerror}", errno=error.errno
        ) from error
    return os.path.abspath(path)


def _check_specs(catalog: Catalog, expected: Mapping[str, TensorSpec]) -> None:
    missing = [name for name in expected if name not in catalog]
    if missing:
        raise LayoutError(f"tensor {missing[0]!r} is expected and not announced")
    for name, ref in catalog.items():
        spec = expected.get(name)
        if spec is None:
            raise LayoutError(f"tensor {name!r} is announced and not expected")
        if (spec.dtype, spec.shape) != (ref.dtype, ref.shape):
            raise LayoutError(
                f"tensor {name!r} is announced as {ref.dtype.value} {list(ref.shape)}, "
                f"{spec.dtype.value} {list(spec.shape)} is expected"
            )
