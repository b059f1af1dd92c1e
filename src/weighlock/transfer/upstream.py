"""Tensors of another server, read while a receiver waits for them here: those that are forwarded.

Knows how long such a read may take and what its failure may tell; not who asks. A forwarder hardly
has patience of its own: a receiver that hears in time why nothing comes has patience too, and may
know another way. So each read here ends well before the receiver takes the forwarder for dead.
"""

import contextlib
import copy
import random
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from msgspec.structs import replace as replace_struct

from weighlock.abort import Abort
from weighlock.errors import (
    Aborted,
    PeerLost,
    ProtocolError,
    SourceChanged,
    SourceError,
    TransferError,
    TransferTimeout,
    WeighlockError,
)
from weighlock.limits import Limits
from weighlock.sources.http import HttpSource
from weighlock.sources.http_remote import Remote
from weighlock.sources.inflated import InflatedSource
from weighlock.sources.joined import Joined
from weighlock.sources.resting import Resting
from weighlock.sources.retrying import Retrying
from weighlock.sources.ticket import TicketSource
from weighlock.sources.window import Window
from weighlock.sources.words import printable
from weighlock.tensors.adjusted import AdjustedRef
from weighlock.tensors.assembled import AssembledRef
from weighlock.tensors.ref import TensorRef
from weighlock.tensors.stored import Readable, StoredRef

__all__ = ["UpstreamFailed", "Upstreams"]

_PATIENCE_S = 1.0
"""How long a connection that breaks is made again here: a moment's trouble is nobody else's."""

_PART_OF_IDLE = 1 / 3
"""Of `Limits.idle_s`: how long an upstream may say nothing. A receiver waits for all of it."""

_MOST_TEXT = 160

_URL = re.compile(r"(https?://[^/\s]+)/\S*?(?=[:,;)]*(?:\s|$))")

_Far: TypeAlias = HttpSource | TicketSource


class UpstreamFailed(TransferError):
    """What is forwarded could not be had from where it lies."""

    def __init__(self, error: WeighlockError) -> None:
        # Of URLs only the host: what opens them is for this side alone.
        self.told = printable(_URL.sub(r"\1", str(error)), _MOST_TEXT)
        """What receivers may know of it."""
        super().__init__(f"upstream {self.told}")
        # A copy: it may be remembered, and nothing else of the read that met it.
        self.error = copy.copy(error)
        """What happened."""


class Upstreams:
    """What the tensors of one share are forwarded from. For any thread.

    Reads here go over connections of their own: who opened a catalog keeps its patience.

    Args:
        limits: those of the server that forwards.
    """

    def __init__(self, limits: Limits) -> None:
        self._wait_s = limits.idle_s * _PART_OF_IDLE
        self._lock = threading.Lock()
        self._forwarded: dict[int, _Forwarded] = {}
        self._resting = Resting()
        self._over = Abort()
        self._failed: tuple[float, WeighlockError] | None = None
        """When a read failed, and how, if none has worked since."""

    def close(self) -> None:
        """Wake whoever waits for an upstream, and let go of the connections. Idempotent."""
        with self._lock:
            self._over.set("its share is over")
            forwarded, self._forwarded = self._forwarded, {}
        for each in forwarded.values():
            each.close()

    def source(self, source: Readable) -> Readable:
        """The same bytes, read as a forwarder reads; what lies on this machine stays as it is."""
        match source:
            case HttpSource() | TicketSource():
                with self._lock:
                    self._over.check()
                    # It holds the source: nothing else can come to have its id.
                    made = self._forwarded.get(id(source)) or _Forwarded(source, self)
                    return self._forwarded.setdefault(id(source), made)
            case Window():
                return replace(source, source=self.source(source.source))
            case Joined():
                runs = (run._replace(source=self.source(run.source)) for run in source.runs)  # type: ignore[arg-type]
                return Joined(tuple(runs), source.label)
            case InflatedSource():
                inflated = copy.copy(source)
                inflated.source = self.source(source.source)  # type: ignore[assignment]
                return inflated
        return source

    def ref(self, ref: TensorRef) -> TensorRef:
        """The same tensor, read as a forwarder reads."""
        match ref:
            case StoredRef() if (source := self.source(ref.source)) is not ref.source:
                return replace_struct(ref, source=source)
            case AdjustedRef() if (original := self.ref(ref.original)) is not ref.original:
                return replace(ref, original=original)
            case AssembledRef():
                chunks = tuple(chunk._replace(ref=self.ref(chunk.ref)) for chunk in ref.chunks)
                return ref if chunks == ref.chunks else replace(ref, chunks=chunks)
        return ref

    def check(self, since: float = 0.0) -> None:
        """Raise what the last read met, if it failed, and not before that time.

        For who has waited for another that reads: it would only wait once more.

        Args:
            since: by the monotonic clock.

        Raises:
            UpstreamFailed: it did.
        """
        if self._failed is not None and self._failed[0] >= since:
            raise UpstreamFailed(self._failed[1])

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Make what reads meet while the block runs `UpstreamFailed`.

        A source that cannot be read there either, or is another now, is what it is here.
        """
        try:
            yield
        except (Aborted, UpstreamFailed):
            raise
        except (TransferError, ProtocolError) as error:
            failed = UpstreamFailed(error)
            self._failed = time.monotonic(), failed.error
            raise failed from error

    def ask(self, source: HttpSource, read: Callable[[HttpSource], None]) -> None:
        """Read, and again for a moment if the connection breaks.

        Raises:
            UpstreamFailed: nothing came, or the answer was no.
            SourceError: it cannot be read there either; `SourceChanged` if it is another now.
            Aborted: the share is over, or somebody said stop.
        """
        retrying = Retrying(_PATIENCE_S, time.monotonic, random.random)
        with self.telling():
            while True:
                self._over.check()
                try:
                    read(source)
                except PeerLost as error:
                    # Not a silence: a second one would take too long for the receiver.
                    self._over.check()  # a connection shut from outside looks like a lost peer
                    pause_s = retrying.pause_after(error)
                else:
                    self._failed = None
                    return
                self._over.wait(pause_s)

    def connect(self, source: _Far) -> HttpSource:
        """The same file over connections of their own. None is made yet."""
        if isinstance(source, TicketSource):
            source = source.connect()
        known = source.remote
        limits = replace(
            known.limits,
            patience_s=0,
            idle_s=min(known.limits.idle_s, self._wait_s),
            connect_s=min(known.limits.connect_s, self._wait_s),
        )
        remote = Remote(
            known.address.ticket,
            access=known.connections.access,
            verify=known.verify,
            limits=limits,
            abort=known.abort,
            resource=known.resource,
        )
        remote.connections.secured |= known.connections.secured
        return HttpSource(remote, self._resting)


class _Forwarded:
    """One far source, as it is read for receivers."""

    def __init__(self, source: _Far, upstreams: Upstreams) -> None:
        self._source = source
        self._upstreams = upstreams
        self._lock = threading.Lock()
        self._own = upstreams.connect(source)
        self._used = weakref.WeakValueDictionary({id(self._own): self._own})
        self._silence: WeighlockError | None = None

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer."""
        self._ask(lambda own: own.read_into(offset, buffer))

    def read_many(self, parts: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer from its offset, several of them at once."""
        self._ask(lambda own: own.read_many(parts))

    def _ask(self, read: Callable[[HttpSource], None]) -> None:
        # Whoever opened it may have closed it: then it is not to be read any more.
        self._source.read_into(0, memoryview(bytearray()))
        own = self._own
        try:
            self._upstreams.ask(own, read)
        except SourceChanged:
            raise
        except SourceError:
            if own is self._own or self._silence is None:
                raise
            raise UpstreamFailed(self._silence) from None
        except UpstreamFailed as failed:
            if isinstance(failed.error, TransferTimeout):
                self._give_up(own, failed.error)
            raise

    def _give_up(self, own: HttpSource, silence: WeighlockError) -> None:
        """Let nobody who waits for their turn to ask wait for the same silence after that."""
        with self._lock:
            if self._own is not own:
                return
            self._silence = silence
            self._own = self._upstreams.connect(self._source)
            self._used[id(self._own)] = self._own
        own.close()

    def close(self) -> None:
        """Wake whoever reads, and let go of the connections."""
        for own in list(self._used.values()):
            own.close()
            own.remote.connections.shut()
