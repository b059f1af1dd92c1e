"""An inbox: a place to push tensors to, for those who can dial and cannot be dialled.

Knows senders, what may come from them and which of their attempts counts; not how it travels, nor
where it is put. Everything that can be refused is refused when a header is announced, before any
data: names, sizes, tensors that were not expected, a full disk.

Of several attempts under one name the last that was announced counts: what the others still send
is refused, and changes nothing.
"""

import copy
import logging
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from blake3 import blake3

from weighlock.errors import (
    Aborted,
    FormatError,
    LimitExceeded,
    NoSpace,
    NotDurable,
    Refused,
    ShareGone,
    SpoolClosed,
)
from weighlock.limits import Limits
from weighlock.sharing.announced import Announced, check_announced
from weighlock.sharing.arrival import Arrival
from weighlock.sharing.destination import Destination
from weighlock.sharing.offer import Offer, Ticketing
from weighlock.sharing.placing import NotPlaced, Placing
from weighlock.sharing.share import Event, Life, Outcome, Receiver, State
from weighlock.sources.access import shown
from weighlock.tensors.catalog import Catalog
from weighlock.tensors.spec import TensorSpec

__all__ = ["Inbox"]

_log = logging.getLogger("weighlock.server")

_LANDING_S = 0.5
"""How long somebody waits for a file to be put in its place before being told to ask again."""

_KEPT_LANDED = 1024
"""Of how many senders without a ticket it is remembered what they landed."""

_KEPT_OVER = 256
"""Of how many attempts it is remembered that they are over, or why they failed."""

_FINAL = FormatError, NotDurable, SpoolClosed, Aborted
"""Where another try cannot help, or must not be: a second fsync would succeed and mean nothing."""


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
        destination: Destination[Any],
        specs: Mapping[str, TensorSpec] | None,
        quota_bytes: int | None,
        limits: Limits,
        forget: Callable[[Offer], None],
        on_done: Callable[[Outcome], object] | None = None,
        label: str = "inbox",
    ) -> None:
        super().__init__(ticketing, life, forget=forget, on_done=on_done, label=label)
        self._destination = destination
        self._specs = specs
        self._quota_bytes = quota_bytes
        self._limits = limits
        self._lock = threading.Lock()
        self._arrivals: dict[str, Arrival] = {}
        self._placings: dict[str, Placing] = {}
        self._failures: OrderedDict[tuple[str, str], BaseException] = OrderedDict()
        self._landed: OrderedDict[str, Arrival] = OrderedDict()
        self._over_attempts: deque[tuple[str, str]] = deque(maxlen=_KEPT_OVER)
        self._is_over = False
        self._ready: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()

    def __repr__(self) -> str:
        return f"<Inbox {shown(self.url)}, {self.ended or 'live'}>"

    def __iter__(self) -> Iterator[tuple[str, Catalog]]:
        while found := self._next():
            yield found.pop()  # held by nobody here: what is in a spool goes with its last ref
        self._ready.put(None)  # for whoever else iterates

    def _next(self) -> list[tuple[str, Catalog]]:
        landed = self._ready.get()
        return [] if landed is None else [(landed[0], self._destination.open(landed[1]))]

    @property
    def senders(self) -> Mapping[str, Receiver]:
        """Who pushes, how far they are: those it is for, or those who came."""
        return self.outcome.receivers

    def begin(self, name: str, attempt: str, header: bytes, size: int) -> Arrival:
        """A sender announces a file; what is here of it from before is taken up.

        Raises:
            FormatError: the header is not valid for a file of that size, or not what is expected.
            LimitExceeded: it is larger than the quota, or too many are on their way.
            NoSpace: the disk has no room for it.
            Refused: this sender has landed something else already, or the attempt is over.
            ShareGone: the inbox is over.
        """
        self._check(name, header, size)
        with self._lock:
            if self._is_over:
                raise ShareGone("the inbox is over", reason=self.ended or "revoked")
            if (name, attempt) in self._over_attempts:
                raise Refused(f"this push under {name!r} is over: aborted here, or overtaken")
            self._failures.pop((name, attempt), None)  # it begins anew
            arrival = self._landed.get(name) or self._arrivals.get(name)
            if arrival is not None and not arrival.is_of(header, size):
                if name in self._landed or name in self._placings:
                    raise Refused(f"{name} has landed already, with other tensors")
                self._overtake(name, arrival, attempt)
                self._arrivals.pop(name).discard()
                arrival = None
            if arrival is None:
                self._make_room()
                arrival = self._arrivals[name] = self._arrival(name, attempt, header, size)
            elif arrival.attempt != attempt and name in self._arrivals:
                self._overtake(name, arrival, attempt)
            arrival.used_at = time.monotonic()
        self.report(name, Event.STARTED, attempt, arrival.bytes_here)
        return arrival

    def _hear(self, name: str, attempt: str) -> None:
        with self._lock:
            arrival = self._arrivals.get(name)
            if arrival is not None and arrival.attempt == attempt:
                arrival.used_at = time.monotonic()

    def arrival(self, name: str) -> Arrival | None:
        """What is on its way from a sender, or has landed."""
        with self._lock:
            found = self._arrivals.get(name) or self._landed.get(name)
            if found is not None:
                found.used_at = time.monotonic()
            return found

    def takes(self, name: str, arrival: Arrival) -> bool:
        """Whether that is still what is on its way from a sender, and has not landed."""
        with self._lock:
            return self._arrivals.get(name) is arrival and name not in self._placings

    def finish(self, name: str, attempt: str, root: str) -> bool | None:
        """A sender says that everything was sent.

        Returns:
            False if what is here is not what it names: it has to look what differs. None if that is
            still being put in its place.

        Raises:
            DiskError: it cannot be put in place, and is gone.
            NotPlaced: it cannot be put in place now, and is still here.
            FormatError: it is not what its header said.
            Refused: the attempt is over.
            ShareGone: the inbox is over.
        """
        with self._lock:
            self._check_failed(name, attempt)
            arrival = self._arrivals.get(name) or self._landed.get(name)
            placing, has_landed = self._placings.get(name), name in self._landed
        if arrival is None:
            return False
        arrival.used_at = time.monotonic()
        if placing is not None or has_landed:
            if arrival.root != root:
                return False
        elif not arrival.seal(root, attempt):
            return False
        else:
            begun = self._begin_placing(name, attempt, arrival)
            if isinstance(begun, bool):
                return begun
            placing = begun
        if placing is not None and not placing.is_over(_LANDING_S):
            self.report(name, Event.ALIVE, attempt, arrival.bytes_here)
            return None
        return True

    def give_up(self, name: str, event: Event, attempt: str, cause: str) -> None:
        """A sender says that it stops: aborted for good, or failed and perhaps to come again."""
        discarded: Arrival | None = None
        with self._lock:
            arrival = self._arrivals.get(name)
            if arrival is not None and arrival.attempt == attempt and name not in self._placings:
                arrival.belong_to("")  # nobody's: what is still under way of it is refused
                if event is Event.ABORTED:
                    discarded = self._arrivals.pop(name)
            self._over_attempts.append((name, attempt))
        if discarded is not None:
            discarded.discard()
        self.report(name, event, attempt, 0, cause)

    def drop(self, name: str, arrival: Arrival) -> None:
        """What is on its way cannot be put here: make room for others. Its attempt is over."""
        with self._lock:
            self._over_attempts.append((name, arrival.attempt))
            if self._arrivals.get(name) is arrival and name not in self._placings:
                del self._arrivals[name]
        arrival.discard()

    def landed_root(self, name: str) -> str:
        with self._lock:
            return "" if name not in self._landed else self._landed[name].root or ""

    def let_go(self) -> None:
        """Keep what is incomplete for another inbox at the same place; nothing more comes."""
        with self._lock:
            self._is_over = True
            placings = list(self._placings.values())
        for placing in placings:  # what was promised to be put in its place is
            placing.is_over(None)
        with self._lock:
            arrivals, self._arrivals = self._arrivals, {}
        for arrival in arrivals.values():
            arrival.keep()
        self._ready.put(None)

    def close(self) -> None:
        """Revoke it; files in a directory stay, whether somebody asked for them or not."""
        self.revoke()
        with suppress(queue.Empty):
            while True:
                self._ready.get_nowait()
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
        announced = Announced(header, size, f"what {name} announces")
        check_announced(announced, self._specs, self._limits)

    def _overtake(self, name: str, arrival: Arrival, attempt: str) -> None:
        if arrival.attempt and arrival.attempt != attempt:
            self._over_attempts.append((name, arrival.attempt))
        if name in self._placings:
            arrival.attempt = attempt  # and it stays sealed
        else:
            arrival.belong_to(attempt)

    def _make_room(self) -> None:
        """Let go of what has been silent the longest, if there are too many on their way."""
        if len(self._arrivals) < self._limits.arrivals:
            return
        name = self._quietest(self._arrivals)
        if name is None or not self._is_quiet(name):
            self._limits.check(
                "arrivals", len(self._arrivals) + 1, "files on their way to an inbox"
            )
        else:
            self._arrivals.pop(name).keep()

    def _quietest(self, names: Iterable[str]) -> str | None:
        """Of whom nothing was heard for the longest time."""
        idle = [name for name in names if name not in self._placings]
        return min(idle, key=lambda name: self._arrivals[name].used_at, default=None)

    def _is_quiet(self, name: str) -> bool:
        return self._arrivals[name].used_at <= time.monotonic() - self._limits.idle_s

    def _is_awaited(self, name: str) -> bool:
        """Whether room is held for a sender: not for one that is lost, or has given up."""
        with self._held():
            state = self._life.receiver(name).state
        return state is State.STARTED and (self.idle_s is not None or not self._is_quiet(name))

    def _arrival(self, name: str, attempt: str, header: bytes, size: int) -> Arrival:
        file_name = self._file_name(name)
        # A server that was restarted may have put it in place and never said so.
        earlier = self._destination.earlier(file_name, header, size)
        if earlier is not None:
            return Arrival(earlier, header, size, attempt, is_adopted=True)
        while True:
            # What is being put in its place is complete, and its file may be closed by now.
            promised = sum(
                other.bytes_to_come
                for sender, other in self._arrivals.items()
                if sender not in self._placings
            )
            try:
                file, is_adopted = self._destination.file(file_name, size, promised)
                break
            except NoSpace:
                silent = self._quietest(n for n in self._arrivals if not self._is_awaited(n))
                if silent is None:
                    raise
                self._arrivals.pop(silent).keep()
        try:
            return Arrival(file, header, size, attempt, is_adopted=is_adopted)
        except BaseException:
            file.keep()
            raise

    def _file_name(self, name: str) -> str:
        # Names that the owner chose are file names; what a stranger calls itself never is.
        if name in self._life.names:
            return name
        return f"push-{blake3(name.encode()).hexdigest(6)}"

    def _begin_placing(self, name: str, attempt: str, arrival: Arrival) -> Placing | bool:
        """Have a sealed file put in its place; False if it is not here any more, True if it was."""
        with self._lock:
            self._check_failed(name, attempt)
            if self._is_over:
                raise ShareGone("the inbox is over", reason=self.ended or "revoked")
            if name in self._landed:
                return True
            if self._arrivals.get(name) is not arrival:
                return False
            placing = self._placings.get(name)
            if placing is not None:
                return placing
            if arrival.attempt != attempt:  # the other one was told that it may send
                raise Refused(f"this push under {name!r} is over: another one was begun after it")
            if not arrival.is_sealed:  # since a moment ago: who asked at the same time has failed
                raise _not_now(name)
            placing = self._placings[name] = Placing(lambda: self._land(name, attempt, arrival))
        placing.start()  # without the lock: it may be done before this returns
        return placing

    def _land(self, name: str, attempt: str, arrival: Arrival) -> None:
        """Put a sealed file in its place, and tell everybody."""
        is_here = True
        try:
            self._destination.complete(arrival)
            is_here = arrival.is_complete  # unless it is there already, a failure discards it
            where = self._destination.put(self._file_name(name), arrival)
        except BaseException as error:
            why = repr(error)  # not the error: a log holds on to what it is given
            _log.warning("%s: a push of %s is not put in its place: %s", self._label, name, why)
            if not is_here or isinstance(error, _FINAL):
                self._lose(name, attempt, arrival, error)
                raise
            with self._lock:
                del self._placings[name]
                arrival.belong_to(arrival.attempt)
            if isinstance(error, NoSpace):
                raise
            raise _not_now(name) from error
        with self._lock:
            self._landed[name] = self._arrivals.pop(name)
            del self._placings[name]
            while not self._life.names and len(self._landed) > _KEPT_LANDED:
                self._landed.popitem(last=False)
        arrival.landed()
        self._ready.put((name, where))
        self.report(name, Event.LANDED, attempt, arrival.size)

    def _lose(self, name: str, attempt: str, arrival: Arrival, error: BaseException) -> None:
        """What came is of no use; its sender, who may have been told to wait, will hear why."""
        with self._lock:
            del self._placings[name]
            self._arrivals.pop(name, None)
            # A copy: the error itself holds on to all that was going on.
            self._failures[name, attempt] = copy.copy(error)
            if len(self._failures) > _KEPT_OVER:
                self._failures.popitem(last=False)
        arrival.discard()

    def _check_failed(self, name: str, attempt: str) -> None:
        """Raise what an attempt has failed by, as often as it asks; the lock is held."""
        failure = self._failures.get((name, attempt))
        if failure is not None:
            raise copy.copy(failure)


def _not_now(name: str) -> NotPlaced:
    return NotPlaced(f"what came from {name} cannot be put in its place now")
