"""Everything a server has on offer, by id, and what is remembered of what it had. Knows no HTTP."""

import threading
from collections.abc import Iterator

from blake3 import blake3

from weighlock.errors import LocalProtocolError
from weighlock.limits import Limits
from weighlock.sharing.offer import Offer
from weighlock.sharing.share import Reason, Tombstones
from weighlock.sharing.watch import Watch

__all__ = ["Offers"]


class Offers:
    """Offers by id, looked after until they end. From any thread.

    Args:
        limits: how many there may be, how many bytes they may pin, how many graves are kept.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._live: dict[bytes, Offer] = {}
        self._pinned: dict[bytes, int] = {}
        self._pinned_bytes = 0
        self._closed = False
        self._tombstones = Tombstones(limits.tombstones)
        self._watch = Watch()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Offer]:
        return iter(self._everything())

    @property
    def pinned_bytes(self) -> int:
        """Bytes of arrays that are kept in memory because they are on offer."""
        return self._pinned_bytes

    def close(self) -> None:
        """Revoke everything. Idempotent."""
        with self._lock:
            self._closed = True
        self._watch.close()
        for offer in self._everything():
            offer.revoke()

    def check_room(self, pinned_bytes: int = 0) -> None:
        """Raise if one more, that pins so many bytes, is too much.

        Raises:
            LimitExceeded: it is.
            LocalProtocolError: nothing can be offered any more.
        """
        if self._closed:
            raise LocalProtocolError("the server is closed; nothing can be offered there any more")
        self._limits.check("shares", len(self._live) + 1, "shares and inboxes of one server")
        self._limits.check(
            "pinned_bytes",
            self.pinned_bytes + pinned_bytes,
            "bytes that shares of one server keep in memory",
        )

    def add(self, offer_id: str, offer: Offer, pinned_bytes: int = 0) -> None:
        """Offer it from now on.

        Raises:
            LocalProtocolError: the id is taken, or nothing can be offered any more.
            LimitExceeded: it has become too much meanwhile.
        """
        key = _key(offer_id)
        with self._lock:
            if key in self._live:
                raise LocalProtocolError("a share of that id is there already")
            self.check_room(pinned_bytes)
            self._live[key] = offer
            self._pinned[key] = pinned_bytes
            self._pinned_bytes += pinned_bytes
        self._watch.note(offer, 0.0)

    def forget(self, offer_id: str, offer: Offer) -> None:
        """It is over; how is remembered."""
        key = _key(offer_id)
        outcome = offer.outcome
        names = outcome.landed if offer.names else ()  # only who has a name can ask again
        landed = [(name, offer.landed_root(name)) for name in names]
        with self._lock:
            if self._live.get(key) is offer and outcome.reason is not None:
                del self._live[key]
                self._pinned_bytes -= self._pinned.pop(key)
                self._tombstones.put(key, outcome.reason, landed)
        self._watch.drop(offer)

    def find(self, offer_id: str) -> "Offer | Reason | None":
        """What is offered under an id, or why it no longer is; None: nobody knows."""
        key = _key(offer_id)
        with self._lock:
            offer = self._live.get(key)
        reason = None
        if offer is not None:
            reason = offer.ended
            if reason is None:
                return offer
            offer.look()  # it has expired, and is now told so
        with self._lock:
            # Somebody else may be about to bury it.
            return self._tombstones.get(key) or reason

    def was_confirmed(self, offer_id: str, name: str) -> bool:
        """Whether an offer that is over knew of that name's landing."""
        return self.landed_root(offer_id, name) is not None

    def landed_root(self, offer_id: str, name: str) -> str | None:
        """What landed under a name in an offer that is over; None if it knew of nothing."""
        key = _key(offer_id)
        with self._lock:
            offer = self._live.get(key)
            if offer is None:
                return self._tombstones.landed(key, name)
        return offer.landed_root(name) if offer.has_landed(name) else None

    def note(self, offer: Offer) -> None:
        """Somebody was heard there: there may be silence to notice, sooner than before."""
        if offer.idle_s is not None and offer.ended is None:
            self._watch.note(offer, offer.idle_s)

    def _everything(self) -> list[Offer]:
        with self._lock:
            return list(self._live.values())


def _key(offer_id: str) -> bytes:
    # Looked up by a hash of it, so that the time of a miss says nothing about ids that exist.
    return blake3(offer_id.encode()).digest()
