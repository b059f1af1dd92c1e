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
        self._tombstones = Tombstones(limits.tombstones)
        self._watch = Watch(self._everything)

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Offer]:
        return iter(self._everything())

    @property
    def pinned_bytes(self) -> int:
        """Bytes of arrays that are kept in memory because they are on offer."""
        with self._lock:
            return sum(self._pinned.values())

    def close(self) -> None:
        """Revoke everything. Idempotent."""
        self._watch.close()
        for offer in self._everything():
            offer.revoke()

    def check_room(self, pinned_bytes: int = 0) -> None:
        """Raise if one more, that pins so many bytes, is too much.

        Raises:
            LimitExceeded: it is.
        """
        self._limits.check("shares", len(self._live) + 1, "shares and inboxes of one server")
        self._limits.check(
            "pinned_bytes",
            self.pinned_bytes + pinned_bytes,
            "bytes that shares of one server keep in memory",
        )

    def add(self, offer_id: str, offer: Offer, pinned_bytes: int = 0) -> None:
        """Offer it from now on.

        Raises:
            LocalProtocolError: the id is taken.
        """
        key = _key(offer_id)
        with self._lock:
            if key in self._live:
                raise LocalProtocolError("a share of that id is there already")
            self._live[key] = offer
            self._pinned[key] = pinned_bytes
        self._watch.note()

    def forget(self, offer_id: str, offer: Offer) -> None:
        """It is over; how is remembered."""
        key = _key(offer_id)
        outcome = offer.outcome
        with self._lock:
            if self._live.get(key) is offer and outcome.reason is not None:
                del self._live[key], self._pinned[key]
                self._tombstones.put(key, outcome.reason, outcome.landed)

    def find(self, offer_id: str) -> "Offer | Reason | None":
        """What is offered under an id, or why it no longer is; None: nobody knows."""
        key = _key(offer_id)
        with self._lock:
            offer = self._live.get(key)
        if offer is not None:
            if offer.ended is None:
                return offer
            offer.look()  # it has expired, and is now told so
        with self._lock:
            return self._tombstones.get(key)

    def was_confirmed(self, offer_id: str, name: str) -> bool:
        """Whether an offer that is over knew of that name's landing."""
        with self._lock:
            return self._tombstones.landed(_key(offer_id), name)

    def note(self) -> None:
        """Somebody began to be heard: there may be silence to notice, sooner than before."""
        self._watch.note()

    def _everything(self) -> list[Offer]:
        with self._lock:
            return list(self._live.values())


def _key(offer_id: str) -> bytes:
    # Looked up by a hash of it, so that the time of a miss says nothing about ids that exist.
    return blake3(offer_id.encode()).digest()
