"""Telling an owner how far a fetch is, while it runs and when it ends. Knows words, not bytes.

A named receiver is awaited: its first word comes before the first byte, and its last one is
repeated until it is confirmed or patience ends. Whoever has no name tells only so that people can
look: after a while, and at the end.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress

from weighlock.errors import (
    Aborted,
    PeerLost,
    ProtocolError,
    Refused,
    ShareGone,
    SourceError,
    TransferError,
    TransferTimeout,
    WeighlockError,
)
from weighlock.lifetimes import Lifetime
from weighlock.messages.codecs import DEFAULT, Registry
from weighlock.sources.access import Access, Address
from weighlock.sources.http import HttpSource
from weighlock.sources.receipt import Receipt
from weighlock.sources.ticket import TicketSource
from weighlock.tensors.ref import TensorRef

__all__ = ["UNCONFIRMED", "Reporting", "done"]

_log = logging.getLogger("weighlock")

UNCONFIRMED = "unconfirmed: everything landed here, but its owner could not be told"

_BRIEFLY_S = 0.4
"""Time for the last word of a fetch that has failed: somebody waits for it to end."""

_OFTEN_S = 2.0
"""A word now and then even if nobody needs it: people look at how far it is."""

_LEAST_S = 0.05
"""Whatever an owner asks for, it is not told more often."""


class Reporting(Lifetime):
    """The words of one fetch.

    Args:
        source: the share; anything else is told nothing.
        name: who receives it, if its URL does not say so.
        tell: called with bytes here and bytes in all, as they come.

    Raises:
        Refused: the ticket is another receiver's.
        ShareGone: the share is over.
    """

    def __init__(
        self,
        source: HttpSource,
        name: str | None = None,
        tell: Callable[[int, int], None] | None = None,
    ) -> None:
        self._tell = tell
        self._bytes = 0
        self._over = threading.Event()
        self._remote = source.remote
        self.unconfirmed = False
        """It landed, and its owner waits for it, and could not be told."""
        self._alive_s: float | None = None
        self._receipt: Receipt | None = None
        self._thread: threading.Thread | None = None
        if not source.remote.resource.is_share:
            return
        self._receipt = receipt = Receipt(source.remote, name)
        # Whoever says stop does not wait for an owner that does not answer.
        self._forget = source.remote.abort.on_set(receipt.shut)
        if receipt.is_named:
            self._begin(receipt)
        thread = threading.Thread(
            target=self._keep_telling, args=(receipt,), name="weighlock-report", daemon=True
        )
        with suppress(RuntimeError):  # the system has no more: then nobody hears of it meanwhile
            thread.start()
            self._thread = thread

    def told(self, done_bytes: int, total_bytes: int) -> None:
        """So many bytes are here."""
        self._bytes = done_bytes
        if self._tell is not None:
            self._tell(done_bytes, total_bytes)

    def warn_if_unconfirmed(self) -> None:
        """Log it: for those whose result has no notes."""
        if self.unconfirmed:
            _log.warning("%s: %s", self._remote.label, UNCONFIRMED)

    def _begin(self, receipt: Receipt) -> None:
        try:
            self._alive_s = receipt.say("started").alive_s
        except (Refused, ShareGone, SourceError):
            self._forget()
            receipt.close()
            raise
        except (TransferError, ProtocolError):
            pass  # what stands in between may let only data through

    def _keep_telling(self, receipt: Receipt) -> None:
        while not self._over.wait(self._pause_s):
            said = receipt.try_to_say("alive", self._bytes, within_s=max(1.0, self._pause_s))
            # One that could not be told wants to hear as often as before.
            self._alive_s = said.alive_s or self._alive_s

    @property
    def _pause_s(self) -> float:
        return min(_OFTEN_S, max(_LEAST_S, self._alive_s or _OFTEN_S))

    def _leave(self, error: BaseException | None) -> None:
        self._over.set()
        if self._receipt is None:
            return
        if self._thread is not None:
            self._thread.join(_BRIEFLY_S)
            while self._thread.is_alive():  # the last word does not wait for the one before
                self._receipt.shut()
                self._thread.join(_LEAST_S)
        try:
            self._last_word(self._receipt, error)
        finally:
            self._forget()
            self._receipt.close()

    def _last_word(self, receipt: Receipt, error: BaseException | None) -> None:
        if error is None:
            self._landed(receipt)
        elif isinstance(error, (Aborted, GeneratorExit)):
            receipt.try_to_say("aborted", self._bytes, within_s=_BRIEFLY_S)
        elif isinstance(error, Exception) and not _may_come_back(error):
            receipt.try_to_say("failed", self._bytes, type(error).__name__, _BRIEFLY_S)

    def _landed(self, receipt: Receipt) -> None:
        if not receipt.is_named:
            receipt.try_to_say("landed", self._bytes, within_s=1.0)
            return
        try:
            said = self._remote.persist(lambda: receipt.say("landed", self._bytes))
        except WeighlockError:  # an abort as well: it is here, whoever knows
            self.unconfirmed = True
        else:
            self.unconfirmed = not said.confirmed


def _may_come_back(error: Exception) -> bool:
    """What came is kept for the next attempt under the same name: nothing is over yet."""
    return isinstance(error, (PeerLost, TransferTimeout))


def done(obj: object, *, access: Access | None = None, registry: Registry | None = None) -> None:
    """Tell the owners of refs that were used lazily that this receiver has what it needs.

    Refs of nobody in particular say nothing.

    Args:
        obj: dicts, lists, tuples, sets, catalogs and registered types are looked into.
        access: the hosts that may be dialled, instead of what `unpack` was told.
        registry: the types to look into; the default one if not given.

    Raises:
        Refused: a ref came in a message, and its host is not allowed.
        TransferError, RemoteProtocolError: an owner that waits for this receiver could not be told.
        SourceChanged: it is over, as its owner changed what it offered.
    """
    for source in set(_sources(obj, DEFAULT if registry is None else registry)):
        if source.ticket is None or Address.of(source.ticket).holder is None:
            continue
        is_lazy = isinstance(source, TicketSource)
        remote = (source.connect(access) if is_lazy else source).remote  # type: ignore[union-attr]
        with closing(Receipt(remote)) as receipt:
            remote.persist(lambda: receipt.say("landed"))
        if is_lazy:
            remote.close()


def _sources(obj: object, registry: Registry) -> "Iterator[HttpSource | TicketSource]":
    pending = [obj]
    seen: dict[int, object] = {}  # held, so that no other object gets its id
    while pending:
        found = pending.pop()
        if isinstance(found, TensorRef):
            yield from (s for s in found.sources() if isinstance(s, (HttpSource, TicketSource)))
        elif id(found) not in seen:
            seen[id(found)] = found
            if isinstance(found, Mapping):
                pending.extend(found.values())
            elif isinstance(found, (list, tuple, set, frozenset)):
                pending.extend(found)
            elif (codec := registry.of_type(type(found))) is not None:
                pending.append(codec.encode(found))
