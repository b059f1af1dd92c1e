"""The life of a share and of each of its receivers. Pure: the clock is an argument.

Knows what receivers say of themselves, silence, and reasons to end; not sockets, not tensors.

A share with named receivers settles when each of them is final; one without, a while after the last
request. Requests for data say nothing about a receiver: behind a cache one of them may have served
four. Only what a receiver says counts, and only `landed` makes it LANDED.

A receiver speaks in attempts. One that crashed and comes back begins a new attempt, which overtakes
the old one: what the old one still says is late, except that it landed, which stays true.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypeAlias

__all__ = [
    "FINAL",
    "TRANSITIONS",
    "Event",
    "Life",
    "Outcome",
    "Reason",
    "Receiver",
    "State",
    "Tombstones",
]

Reason: TypeAlias = Literal["revoked", "expired", "settled", "changed"]

_KEPT_ATTEMPTS = 8
_UNNAMED_RECEIVERS = 256
"""Receivers that are remembered of a share that is for nobody in particular; they settle nothing,
and the first are forgotten first."""


class State(StrEnum):
    """Where a receiver of a share is, or a sender to an inbox.

    While the share lives, who failed, aborted or was lost may come back, and land.
    """

    WAITING = "waiting"
    """Was not heard yet."""
    STARTED = "started"
    """Is under way."""
    LANDED = "landed"
    """Has said that it has everything it wanted; that is never undone."""
    FAILED = "failed"
    """Has said that it cannot; `cause` is why."""
    ABORTED = "aborted"
    """Was told to stop where it is."""
    LOST = "lost"
    """Was silent for `idle_s`, or not through when the share ended."""


class Event(StrEnum):
    """What a receiver says, or what its silence or the share's end says of it."""

    STARTED = "started"
    ALIVE = "alive"
    LANDED = "landed"
    FAILED = "failed"
    ABORTED = "aborted"
    SILENT = "silent"
    OVER = "over"


_W, _S, _L, _F, _A, _X = State

FINAL = frozenset({_L, _F, _A, _X})
"""A share settles when each of its named receivers is in one of these."""

TRANSITIONS: Mapping[State, Mapping[Event, State]] = {
    #      started   alive   landed   failed   aborted   silent   over
    state: dict(zip(Event, row, strict=True))
    for state, row in (
        (_W, (_S, _S, _L, _F, _A, _W, _X)),
        (_S, (_S, _S, _L, _F, _A, _X, _X)),
        (_L, (_L, _L, _L, _L, _L, _L, _L)),
        (_F, (_S, _S, _L, _F, _A, _F, _F)),
        (_A, (_S, _S, _L, _F, _A, _A, _A)),
        (_X, (_S, _S, _L, _F, _A, _X, _X)),
    )
}
"""The whole life of a receiver. A report of an attempt that is over or overtaken is not looked up
here, unless it says `landed`."""


@dataclass(frozen=True, slots=True)
class Receiver:
    """A receiver of a share, or a sender to an inbox, as its owner knows it."""

    name: str
    state: State = State.WAITING
    bytes_here: int = 0
    """Bytes it says it has verified."""
    seconds: float = 0.0
    """From its beginning, as it says, to its last word, or until now."""
    cause: str | None = None
    """What it says went wrong."""

    @property
    def rate(self) -> float:
        """Bytes a second so far."""
        return self.bytes_here / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a share ended, or how it stands, per receiver."""

    reason: Reason | None
    """Why it is over; None if it is not."""
    receivers: Mapping[str, Receiver]

    @property
    def landed(self) -> tuple[str, ...]:
        """Who has said that it has what it wanted: after `fetch`, verified and in its place."""
        return self._in(State.LANDED)

    @property
    def missing(self) -> tuple[str, ...]:
        """Everybody else."""
        return tuple(name for name in self.receivers if name not in self.landed)

    def __getitem__(self, name: str) -> State:
        return self.receivers[name].state

    def _in(self, state: State) -> tuple[str, ...]:
        return tuple(name for name, found in self.receivers.items() if found.state is state)


class _Record:
    """What is remembered of one receiver."""

    def __init__(self) -> None:
        self.state = State.WAITING
        self.attempt: str | None = None
        self.stale: deque[str] = deque(maxlen=_KEPT_ATTEMPTS)
        self.first_at: float | None = None
        self.heard_at = 0.0
        self.bytes_here = 0
        self.cause: str | None = None

    def take(
        self,
        event: Event,
        attempt: str,
        now: float,
        bytes_here: int,
        cause: str,
        began_at: float,
    ) -> None:
        if event is not Event.LANDED and attempt in self.stale:
            return
        if self.state is State.LANDED:
            return
        if attempt != self.attempt:
            if attempt not in self.stale:
                self.first_at = began_at
            if self.attempt is not None:
                self.stale.append(self.attempt)
            self.attempt = attempt
            self.bytes_here = 0
            self.cause = None
        self.state = TRANSITIONS[self.state][event]
        self.heard_at = now
        # Reports overtake each other on the way.
        self.bytes_here = max(self.bytes_here, bytes_here)
        if event in (Event.FAILED, Event.ABORTED):
            self.stale.append(attempt)
            self.attempt = None
            self.cause = cause or None

    def pass_by(self, event: Event) -> None:
        self.state = TRANSITIONS[self.state][event]

    def shown(self, name: str, now: float) -> Receiver:
        until = self.heard_at if self.state in FINAL else now
        seconds = 0.0 if self.first_at is None else max(0.0, until - self.first_at)
        return Receiver(name, self.state, self.bytes_here, seconds, self.cause)


class Life:
    """Begins when it is made, ends once, and keeps the reason.

    Reports and requests end it or keep it alive at once; `tick` is to be called now and then, and
    sees what has *not* happened for too long.

    Args:
        clock: seconds on a clock that only moves forward.
        receivers: names of those who are to receive it; with them it settles when each is final.
        expires_s: how long it lasts at the most; None: until something else ends it.
        idle_s: silence after which a receiver is LOST and, if there are no names, the share
            settles; None: never.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        receivers: Iterable[str] = (),
        expires_s: float | None = None,
        idle_s: float | None = None,
    ) -> None:
        self._clock = clock
        self._began_at = clock()
        self._ends_at = None if expires_s is None else self._began_at + expires_s
        self._idle_s = idle_s
        self._named = {name: _Record() for name in receivers}
        self._unnamed: OrderedDict[str, _Record] = OrderedDict()
        self._last_at = self._began_at
        self._requests = 0
        self._ended: Reason | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Those who are to receive it."""
        return tuple(self._named)

    @property
    def idle_s(self) -> float | None:
        """How long a receiver may be silent."""
        return self._idle_s

    @property
    def ended(self) -> Reason | None:
        """Why it is over; None while it lasts."""
        if self._ended is None and self._ends_at is not None and self._clock() >= self._ends_at:
            self._finish("expired")
        return self._ended

    @property
    def remaining_s(self) -> float | None:
        """What is left of it; None if nothing bounds it."""
        if self.ended is not None:
            return 0.0
        return None if self._ends_at is None else max(0.0, self._ends_at - self._clock())

    @property
    def outcome(self) -> Outcome:
        """How it stands, and for good once it is over: for those it is for, or those who came."""
        reason, now = self.ended, self._clock()
        shown = {name: each.shown(name, now) for name, each in self._known.items()}
        return Outcome(reason, shown)

    @property
    def landed(self) -> int:
        """How many have landed."""
        return sum(record.state is State.LANDED for record in self._known.values())

    def receiver(self, name: str) -> Receiver:
        """How one stands; of whom nothing is known, it is as if it had yet to come."""
        record = self._known.get(name)
        return Receiver(name) if record is None else record.shown(name, self._clock())

    def end(self, reason: Reason) -> bool:
        """End it; returns False if it was over already, for whatever reason that was."""
        if self.ended is not None:
            return False
        self._finish(reason)
        return True

    def enter(self) -> None:
        """A request begins; while it lasts nothing is idle."""
        self._requests += 1
        self._last_at = self._clock()

    def leave(self) -> None:
        """That request is over."""
        self._requests -= 1
        self._last_at = self._clock()

    def report(
        self,
        name: str,
        event: Event,
        attempt: str,
        bytes_here: int = 0,
        cause: str = "",
        seconds: float = 0.0,
    ) -> None:
        """A receiver says something; repeats, and what comes late, change nothing.

        Args:
            name: who it is.
            event: what it says.
            attempt: which of its attempts.
            bytes_here: bytes it has verified.
            cause: what went wrong.
            seconds: how long that attempt has lasted. Its first word may be its last one: of who
                has no name, nobody hears before.
        """
        if self.ended is not None:
            return
        record = self._known.get(name) or self._newcomer(name)
        if record is None:
            return
        now = self._clock()
        began_at = max(self._began_at, now - max(0.0, seconds))  # nobody receives what is not there
        record.take(event, attempt, now, bytes_here, cause, began_at)
        self._last_at = self._clock()
        self._settle()

    def tick(self) -> float | None:
        """Look what has not happened for too long.

        Returns:
            Seconds until it is worth looking again; None: nothing is awaited.
        """
        if self.ended is not None:
            return None
        now, due = self._clock(), []
        if self._idle_s is not None:
            for record in self._known.values():
                if record.state is State.STARTED:
                    if now >= record.heard_at + self._idle_s:
                        record.pass_by(Event.SILENT)
                    else:
                        due.append(record.heard_at + self._idle_s)
            self._settle()
            if not self._named:
                if self._requests:
                    due.append(now + self._idle_s)
                elif now >= self._last_at + self._idle_s:
                    self._finish("settled")
                else:
                    due.append(self._last_at + self._idle_s)
        if self._ended is not None:
            return None
        if self._ends_at is not None:
            due.append(self._ends_at)
        return max(0.0, min(due) - now) if due else None

    def forgive(self, seconds: float) -> None:
        """For so long this side was stopped and could not listen: that was not others' silence."""
        if self.ended is not None:
            return
        now = self._clock()
        self._last_at = min(now, self._last_at + seconds)
        for record in self._known.values():
            if record.state is State.STARTED:  # the others are not awaited
                record.heard_at = min(now, record.heard_at + seconds)

    def _finish(self, reason: Reason) -> None:
        self._ended = reason
        for record in self._known.values():
            record.pass_by(Event.OVER)

    def _settle(self) -> None:
        if self._named and all(each.state in FINAL for each in self._named.values()):
            self._finish("settled")

    @property
    def _known(self) -> "Mapping[str, _Record]":
        return self._named or self._unnamed

    def _newcomer(self, name: str) -> _Record | None:
        if self._named:
            return None
        while len(self._unnamed) >= _UNNAMED_RECEIVERS:
            self._unnamed.popitem(last=False)
        record = self._unnamed[name] = _Record()
        return record


class Tombstones:
    """How shares ended that are gone: so many, the oldest are forgotten first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._graves: OrderedDict[bytes, tuple[Reason, tuple[tuple[str, str], ...]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._graves)

    def put(self, key: bytes, reason: Reason, landed: Iterable[tuple[str, str]] = ()) -> None:
        """Remember one, whose landing was confirmed, and of what."""
        self._graves.pop(key, None)  # an id that lived twice is remembered from its last end on
        self._graves[key] = reason, tuple(landed)
        while len(self._graves) > self._most:
            self._graves.popitem(last=False)

    def get(self, key: bytes) -> Reason | None:
        """The reason, if there was such a share and it is not forgotten."""
        found = self._graves.get(key)
        return None if found is None else found[0]

    def landed(self, key: bytes, name: str) -> str | None:
        """What that one's landing was confirmed of: it may ask again, its reply was lost.

        Returns:
            None if it was not.
        """
        found = self._graves.get(key)
        return None if found is None else dict(found[1]).get(name)
