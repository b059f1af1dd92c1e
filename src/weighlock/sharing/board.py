"""Shares and inboxes as people are shown them: numbered, and for a while after their end.

Knows who takes part and how it ended; neither HTTP nor ids: a number is no credential.
"""

import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from weighlock.sharing.inbox import Inbox
from weighlock.sharing.offer import Offer
from weighlock.sharing.share import Receiver, State
from weighlock.sharing.shared import Share

__all__ = ["Board", "Shown", "TakingPart", "rows"]

_KEPT_ENDED = 64
"""Of those that are over, still shown."""

_ROWS = 2000
"""Tensors listed at a time."""


class TakingPart(NamedTuple):
    """A receiver of a share or a sender to an inbox, and how many bytes are awaited of it."""

    who: Receiver
    of_bytes: int | None
    """None if that is not known."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A share or an inbox at one moment, or as it was when it ended."""

    number: int
    kind: Literal["share", "inbox"]
    title: str
    tensors: int
    bytes: int
    taking_part: tuple[TakingPart, ...] = ()
    ended: str | None = None
    remaining_s: float | None = None

    @classmethod
    def of(cls, number: int, offer: Offer) -> "Shown":
        """How it stands."""
        ended, left = offer.ended, offer.remaining_s
        if isinstance(offer, Share):
            parts = tuple(TakingPart(one, offer.size) for one in offer.receivers.values())
            return cls(number, "share", offer.title, offer.tensors, offer.size, parts, ended, left)
        parts = ()
        if isinstance(offer, Inbox):
            parts = tuple(
                TakingPart(one, _announced(offer, name)) for name, one in offer.senders.items()
            )
        return cls(number, "inbox", "", 0, 0, parts, ended, left)


def _announced(inbox: Inbox, name: str) -> int | None:
    arrival = inbox.arrival(name)
    return None if arrival is None else arrival.size


class Board:
    """The shares and inboxes of one server by number. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0
        self._live: dict[int, Offer] = {}
        self._over: deque[Shown] = deque(maxlen=_KEPT_ENDED)
        self.ended: Counter[tuple[str, str]] = Counter()
        """How many have ended, by kind and reason."""
        self.final: Counter[tuple[str, State]] = Counter()
        """How those who took part stood then, by kind and state."""

    def next_number(self) -> int:
        """A number that none has had here."""
        with self._lock:
            self._last += 1
            return self._last

    def put(self, number: int, offer: Offer) -> None:
        """Show it from now on."""
        with self._lock:
            self._live[number] = offer
        if offer.ended is not None:  # meanwhile, before it could be taken down
            self.take_down(number)

    def take_down(self, number: int) -> None:
        """It is over: how is shown, until others have ended after it."""
        offer = self._find(number)
        if offer is None:
            return
        shown = Shown.of(number, offer)
        with self._lock:
            if self._live.pop(number, None) is None:
                return
            self._over.appendleft(shown)
            self.ended[shown.kind, shown.ended or "revoked"] += 1
            self.final.update((shown.kind, part.who.state) for part in shown.taking_part)

    def _find(self, number: int) -> Offer | None:
        with self._lock:
            return self._live.get(number)

    def share(self, number: int) -> Share | None:
        """The share of that number, if it lives."""
        offer = self._find(number)
        return offer if isinstance(offer, Share) else None

    def shown(self, number: int) -> Shown | None:
        """How what has that number stands, or stood when it ended not long ago."""
        offer = self._find(number)
        if offer is not None:
            return Shown.of(number, offer)
        with self._lock:
            return next((each for each in self._over if each.number == number), None)

    def live(self) -> Sequence[tuple[int, Offer]]:
        """Those that live, the newest first."""
        with self._lock:
            return list(reversed(self._live.items()))

    def over(self) -> Sequence[Shown]:
        """The latest of those that are over, the last one first."""
        with self._lock:
            return list(self._over)


def rows(share: Share, offset: int) -> tuple[int, list[tuple[object, ...]]]:
    """Some tensors of a share, from that one on, and how many there are in all.

    A row is name, dtype, shape and bytes; a tensor known under another name has no bytes, and that
    name at the end.
    """
    file = share.contents.file
    specs, aliases = file.specs, file.aliases
    found: list[tuple[object, ...]] = [
        (spec.name, spec.dtype, spec.shape, spec.nbytes) for spec in specs[offset : offset + _ROWS]
    ]
    if aliases and offset + _ROWS > len(specs):
        found += list(_alias_rows(share, max(0, offset - len(specs)), _ROWS - len(found)))
    return len(specs) + len(aliases), found


def _alias_rows(share: Share, first: int, count: int) -> Iterator[tuple[object, ...]]:
    file = share.contents.file
    some = list(file.aliases.items())[first : first + count]
    kept = {name for _, name in some}
    by_name = {spec.name: spec for spec in file.specs if spec.name in kept}
    for alias, name in some:
        if name in by_name:
            yield alias, by_name[name].dtype, by_name[name].shape, 0, name
