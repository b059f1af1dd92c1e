"""What a server has on offer: a URL with a life, and names that take part in it. Knows no socket.

A share offers tensors to receivers, an inbox a place to senders; what both have in common is here.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from weighlock.errors import LocalProtocolError
from weighlock.lifetimes import Lifetime
from weighlock.limits import check_number
from weighlock.sharing.share import FINAL, Event, Life, Outcome, Reason, Receiver, State
from weighlock.sharing.tickets import is_genuine, ticket

__all__ = ["Offer", "Ticketing"]

_log = logging.getLogger("weighlock.server")


class Ticketing(NamedTuple):
    """What tickets of one offer are made from."""

    key: bytes
    offer_id: str
    url: str

    def __repr__(self) -> str:
        return "<Ticketing>"  # a key and a capability: shown nowhere


class Offer(Lifetime):
    """Something under a URL, until its life is over.

    Args:
        ticketing: its URL, and what proves that somebody was given one.
        life: how long it lasts, and for whom.
        forget: called once when it is over.
        on_done: called once with the outcome when it is over, from the thread that ended it. What
            it raises is logged, and changes nothing.
        label: what it is called in logs; not its id, which is a credential.
    """

    def __init__(
        self,
        ticketing: Ticketing,
        life: Life,
        *,
        forget: Callable[["Offer"], None],
        on_done: Callable[[Outcome], object] | None = None,
        label: str = "offer",
    ) -> None:
        self.url = ticketing.url
        """The ticket of nobody in particular."""
        self._ticketing = ticketing
        self._life = life
        self._changed = threading.Condition()
        self._is_told = False
        self._pid = os.getpid()
        self._forget = forget
        self._on_done = on_done
        self._label = label
        self._under_way: set[str] = set()

    def _leave(self, error: BaseException | None) -> None:
        self.revoke()

    def url_for(self, name: str) -> str:
        """The ticket of one of those it is for: it proves who its holder is.

        Raises:
            LocalProtocolError: there is no such name here.
        """
        if name not in self._life.names:
            known = ", ".join(self._life.names) or "nobody; pass their names when it is made"
            raise LocalProtocolError(f"no ticket for {name!r}: it is for {known}")
        key, offer_id, url = self._ticketing
        return ticket(url, key, offer_id, name)

    def admits(self, name: str, mac: str | None) -> bool:
        """Whether somebody who says so is that name; where there are no names, everybody is."""
        if not self._life.names:
            return True
        key, offer_id, _ = self._ticketing
        return name in self._life.names and is_genuine(key, offer_id, name, mac)

    @property
    def ended(self) -> Reason | None:
        """Why it is over: revoked, expired, settled or changed; None while it lasts."""
        with self._held():  # to look at a life may be to see that it has expired
            return self._life.ended

    @property
    def remaining_s(self) -> float | None:
        """Seconds left of its life; None if nothing bounds it."""
        with self._held():
            return self._life.remaining_s

    @property
    def outcome(self) -> Outcome:
        """How it stands, per name; final once it is over."""
        with self._held():
            return self._life.outcome

    @property
    def names(self) -> tuple[str, ...]:
        """Those it is for; empty if it is for nobody in particular."""
        return self._life.names

    @property
    def idle_s(self) -> float | None:
        """Silence after which somebody who takes part is lost; None: no matter."""
        return self._life.idle_s

    @property
    def alive_s(self) -> float | None:
        """How often somebody must be heard who takes part; None: no matter."""
        return None if self.idle_s is None else self.idle_s / 3

    def wait(self, timeout_s: float | None = None, at_least: int | None = None) -> Outcome:
        """Wait until it is over, or so many have landed, or the time is up.

        Returns:
            How it stands then; `reason` is None if it is not over.

        Raises:
            LocalProtocolError: this is a forked child, in which nobody will ever say anything; or
                there are not so many names that can land.
        """
        if timeout_s is not None:
            check_number("timeout_s", timeout_s, None)
        if at_least is not None:
            check_number("at_least", at_least, is_whole=True)
            if self.names and at_least > len(self.names):
                raise LocalProtocolError(
                    f"at_least={at_least}: it is for {len(self.names)} in all "
                    f"({', '.join(self.names[:3])}{', …' if len(self.names) > 3 else ''})"
                )
        if os.getpid() != self._pid:
            raise LocalProtocolError(
                "what a forked process has on offer is told to that process only; wait there"
            )
        deadline = None if timeout_s is None else time.monotonic() + timeout_s

        def enough() -> bool:
            if self._life.ended is not None:
                return True
            return at_least is not None and self._life.landed >= at_least

        with self._changed:
            while not enough():
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                expiry = self._life.remaining_s
                bounds = [bound for bound in (left, expiry) if bound is not None]
                self._changed.wait(min(bounds) if bounds else None)
            return self._life.outcome

    def revoke(self) -> None:
        """End it now: those who use it are told so, at the latest after the piece on its way."""
        self.end("revoked")

    def end(self, reason: Reason) -> None:
        """End it for that reason, and let go of what it holds. Idempotent.

        In a forked child nothing happens: it is not the child's to end.
        """
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._life.end(reason)
        self._see()

    def look(self) -> float | None:
        """See what has not happened for too long; returns when to look again."""
        with self._changed:
            again = self._life.tick()
            news = self._news()
        self._tell(news)
        self._see()
        return again

    def forgive(self, seconds: float) -> None:
        """For so long this process could not listen."""
        with self._changed:
            self._life.forgive(seconds)

    def report(
        self,
        name: str,
        event: Event,
        attempt: str,
        bytes_here: int = 0,
        cause: str = "",
        seconds: float = 0.0,
    ) -> None:
        """Somebody says how far it is. Repeats, and what comes late, change nothing."""
        self._hear(name, attempt)
        with self._changed:
            before = self._life.receiver(name)
            self._life.report(name, event, attempt, bytes_here, cause, seconds)
            after = self._life.receiver(name)
            news = []
            if before.state is not after.state:
                self._changed.notify_all()
                if after.state in {State.STARTED, *FINAL}:
                    news.append(after)
                is_under_way = after.state is State.STARTED
                (self._under_way.add if is_under_way else self._under_way.discard)(name)
        self._tell(news)
        self._see()

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """While somebody is being served, nothing is idle."""
        with self._changed:
            self._life.enter()
        try:
            yield
        finally:
            with self._changed:
                self._life.leave()

    def has_landed(self, name: str) -> bool:
        """Whether that one is known to have landed."""
        with self._changed:
            return self._life.receiver(name).state is State.LANDED

    def landed_root(self, name: str) -> str:
        """What tells what that one landed from anything else; nothing if all land the same."""
        return ""

    def let_go(self) -> None:
        """Release what it holds: it is over."""

    def _hear(self, name: str, attempt: str) -> None:
        """Note that somebody was heard."""

    def _held(self) -> contextlib.AbstractContextManager[object]:
        # In a forked child the lock may be held by a thread that does not exist there.
        return self._changed if os.getpid() == self._pid else contextlib.nullcontext()

    def _news(self) -> list[Receiver]:
        """Those who began and, without a word of theirs, are no longer under way."""
        found = []
        for name in tuple(self._under_way):
            one = self._life.receiver(name)
            if one.state is not State.STARTED:
                self._under_way.discard(name)
                if one.state in FINAL:  # or it is one of too many to be remembered
                    found.append(one)
        return found

    def _tell(self, news: list[Receiver]) -> None:
        for one in news:
            _log.info(
                "%s: %s %s, %d bytes in %.1f s%s",
                self._label,
                one.name,
                one.state,
                one.bytes_here,
                one.seconds,
                f" ({one.cause!r})" if one.cause else "",  # a stranger's words, escaped
            )

    def _see(self) -> None:
        """Do once what is to be done when it is over."""
        with self._changed:
            if self._life.ended is None or self._is_told:
                return
            self._is_told = True
            self._changed.notify_all()
            news = self._news()
            outcome = self._life.outcome
        self._tell(news)
        self._forget(self)
        self.let_go()
        if self._on_done is not None:
            try:
                self._on_done(outcome)
            except Exception:
                # Of the user, in whatever thread this is: nobody else may suffer from it.
                _log.exception("on_done failed for what ended as %s", outcome.reason)
