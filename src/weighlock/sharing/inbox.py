"""An inbox: a place to push tensors to, for those who can dial and cannot be dialled.

Knows senders, what may come from them and which of their attempts counts; not how it travels, nor
where it is put. Everything that can be refused is refused when a header is announced, before any
data: names, sizes, tensors that were not expected, a full disk.

Of several attempts under one name the last that was announced counts: what the others still send
is refused, and changes nothing.
"""

import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from typing import Any

from blake3 import blake3

from weighlock.errors import LayoutError, LimitExceeded, NoSpace, Refused, ShareGone
from weighlock.formats.safetensors import open_safetensors
from weighlock.limits import Limits
from weighlock.sharing.announced import Announced
from weighlock.sharing.arrival import Arrival
from weighlock.sharing.destination import Destination
from weighlock.sharing.offer import Offer, Ticketing
from weighlock.sharing.share import Event, Life, Outcome, Receiver, State
from weighlock.sources.access import shown
from weighlock.tensors.catalog import Catalog
from weighlock.tensors.spec import TensorSpec

__all__ = ["Inbox"]

_LANDING_S = 0.5
"""How long somebody waits for a file to be put in its place before being told to ask again."""

_KEPT_LANDED = 1024
"""Of how many senders without a ticket it is remembered what they landed."""

_KEPT_OVER = 256
"""Of how many attempts it is remembered that they are over."""


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
        self._landings: dict[str, _Landing] = {}
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
            arrival = self._landed.get(name) or self._arrivals.get(name)
            if arrival is not None and not arrival.is_of(header, size):
                if name in self._landed or name in self._landings:
                    raise Refused(f"{name} has landed already, with other tensors")
                self._arrivals.pop(name).discard()
                self._overtake(name, arrival, attempt)
                arrival = None
            if arrival is None:
                self._make_room()
                arrival = self._arrivals[name] = self._arrival(name, attempt, header, size)
            elif arrival.attempt != attempt and name in self._arrivals:
                self._overtake(name, arrival, attempt)
            arrival.used_at = time.monotonic()
        self.report(name, Event.STARTED, attempt, arrival.bytes_here)
        return arrival

    def report(
        self, name: str, event: Event, attempt: str, bytes_here: int = 0, cause: str = ""
    ) -> None:
        with self._lock:
            arrival = self._arrivals.get(name)
            if arrival is not None and arrival.attempt == attempt:
                arrival.used_at = time.monotonic()
        super().report(name, event, attempt, bytes_here, cause)

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
            return self._arrivals.get(name) is arrival and name not in self._landings

    def finish(self, name: str, attempt: str, root: str) -> bool | None:
        """A sender says that everything was sent.

        Returns:
            False if what is here is not what it names: it has to look what differs. None if that is
            still being put in its place.

        Raises:
            DiskError: it cannot be put in place.
            FormatError: it is not what its header said.
            Refused: the attempt is over.
        """
        arrival = self.arrival(name)
        if arrival is None:
            return False
        with self._lock:
            landed, landing = self._landed.get(name), self._landings.get(name)
        if landed is None and landing is None:
            if arrival.attempt != attempt:
                raise Refused(f"this push under {name!r} is over: another one was begun after it")
            if not arrival.seal(root):
                return False
            with self._lock:
                if self._is_over:
                    raise ShareGone("the inbox is over", reason=self.ended or "revoked")
                if name in self._landed:
                    return True
                if self._arrivals.get(name) is not arrival:
                    return False
                landing = self._landings.get(name)
                if landing is None:
                    landing = _Landing(lambda: self._land(name, attempt, arrival))
                    self._landings[name] = landing
                    landing.start()
        elif arrival.root != root:
            return False
        if landing is not None and not landing.is_over(_LANDING_S):
            self.report(name, Event.ALIVE, attempt, arrival.bytes_here)
            return None
        return True

    def give_up(self, name: str, event: Event, attempt: str, cause: str) -> None:
        """A sender says that it stops: aborted for good, or failed and perhaps to come again."""
        discarded: Arrival | None = None
        with self._lock:
            arrival = self._arrivals.get(name)
            if arrival is not None and arrival.attempt == attempt and name not in self._landings:
                arrival.attempt = ""  # nobody's: what is still under way of it is refused
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
            if self._arrivals.get(name) is arrival and name not in self._landings:
                del self._arrivals[name]
        arrival.discard()

    def let_go(self) -> None:
        """Keep what is incomplete for another inbox at the same place; nothing more comes."""
        with self._lock:
            self._is_over = True
            landings = list(self._landings.values())
        for landing in landings:  # what was promised to be put in its place is
            landing.is_over(None)
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
        with closing(Announced(header, size, f"what {name} announces")) as announced:
            catalog = open_safetensors(announced, self._limits)
        if 8 + int.from_bytes(header[:8], "little") != len(header):
            raise LayoutError(f"{len(header):,} bytes are not the header of a file")
        if self._specs is not None:
            _check_specs(catalog, self._specs)

    def _overtake(self, name: str, arrival: Arrival, attempt: str) -> None:
        if arrival.attempt and arrival.attempt != attempt:
            self._over_attempts.append((name, arrival.attempt))
        arrival.attempt = attempt

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
        idle = [name for name in names if name not in self._landings]
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
                if sender not in self._landings
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

    def _land(self, name: str, attempt: str, arrival: Arrival) -> None:
        """Put a sealed file in its place, and tell everybody."""
        try:
            where = self._destination.put(self._file_name(name), arrival)
        except BaseException:
            with self._lock:
                self._arrivals.pop(name, None)
                del self._landings[name]
            arrival.discard()
            raise
        with self._lock:
            self._landed[name] = self._arrivals.pop(name)
            del self._landings[name]
            while not self._life.names and len(self._landed) > _KEPT_LANDED:
                self._landed.popitem(last=False)
        arrival.landed()
        self._ready.put((name, where))
        self.report(name, Event.LANDED, attempt, arrival.size)


class _Landing:
    """A file being put in its place: syncing may take longer than any request waits."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="weighlock-land", daemon=True)
        self.start = self._thread.start

    def is_over(self, wait_s: float | None) -> bool:
        """Wait for it; what went wrong is raised to whoever asks with a bound."""
        if self._thread is threading.current_thread():
            return True  # it ends the inbox itself: the last sender has landed
        self._thread.join(wait_s)
        if self._failure is not None and wait_s is not None:
            raise self._failure
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # told to the sender that asks
            self._failure = error


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
