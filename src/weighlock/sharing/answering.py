"""Who answers: from a request to the share or inbox it is for, and what that says. Sends nothing.

Knows offers, tickets and tombstones; paths, ranges and headers are the routes'.
"""

import logging
import time
from collections.abc import Mapping

from weighlock.errors import SourceChanged, TransferTimeout, WeighlockError
from weighlock.limits import Budget, Limits
from weighlock.sharing.inbox import Inbox
from weighlock.sharing.inbox_routes import InboxRoute, Reception, answer_landed, find_inbox
from weighlock.sharing.offers import Offers
from weighlock.sharing.page import Page, find_page
from weighlock.sharing.routes import (
    HASH_WAIT_S,
    Answer,
    Route,
    answer_confirmed,
    answer_data,
    answer_digests,
    answer_report,
    busy,
    failure,
    find,
    gone,
    not_allowed,
    not_forwarded,
)
from weighlock.sharing.shared import Share
from weighlock.sharing.tickets import MAC, is_genuine
from weighlock.transfer.receiving import Incoming
from weighlock.transfer.upstream import UpstreamFailed

__all__ = ["Answering"]

_log = logging.getLogger("weighlock.server")

_MISS_PAUSE_S = 0.02
"""Pause before an unknown id is denied: nobody guesses 128 bits, but nobody needs to try fast."""


class Answering:
    """Answers the requests of a server.

    Args:
        offers: what there is.
        key: what tickets are made with.
        limits: how much a request may bring.
        budget: where buffers count for what it brings.
        page: answers what is asked of the page for people, if there is one.
    """

    def __init__(
        self,
        offers: Offers,
        key: bytes,
        limits: Limits,
        budget: Budget,
        page: Page | None = None,
    ) -> None:
        self._offers = offers
        self._key = key
        self._page = page
        self._reception = Reception(limits, budget)
        self.is_stopping = False
        """No new requests are taken up."""

    def answer(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[Answer, Share | None]:
        """The reply to a request, and the share it is about, if it is about one."""
        asked = None if self._page is None else find_page(target)
        if self._page is not None and asked is not None:
            answer = self._page.answer(asked, method, headers)
            if answer.status == 401:
                time.sleep(_MISS_PAUSE_S)
            return answer, None
        route = find(target)
        if route is None:
            return self._answer_inbox(method, target, headers, body), None
        found = self._offers.find(route.share_id)
        if not isinstance(found, Share):
            return self._answer_late(method, route, found, headers, body), None
        return self._answer_share(method, route, found, headers, body)

    def receive(self, target: str, headers: Mapping[str, str], body: Incoming) -> Answer:
        """The reply to a PUT, of whose body as much was read as was of use.

        Raises:
            PeerLost, TransferTimeout: the body did not come.
        """
        share = find(target)
        if share is not None:
            return not_allowed(_methods(share))
        found = self._find_inbox("PUT", target, headers)
        if isinstance(found, Answer):
            return found
        inbox, route = found
        with inbox.request():
            answer = self._reception.receive(inbox, route, headers, body)
        self._offers.note(inbox)
        return answer if answer.status != 410 else self._answer_over(inbox.ended, route, headers)

    def _answer_inbox(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes
    ) -> Answer:
        found = self._find_inbox(method, target, headers, body)
        if isinstance(found, Answer):
            return found
        inbox, route = found
        with inbox.request():
            answer = self._reception.answer(inbox, route, body)
        if answer.status == 410:  # since a moment ago
            return self._answer_over(inbox.ended, route, headers, body)
        return answer

    def _find_inbox(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes = b""
    ) -> "Answer | tuple[Inbox, InboxRoute]":
        """The inbox a request is for, if its sender may ask that."""
        route = find_inbox(target)
        if route is None:
            return failure(404, error="not found")
        inbox = self._offers.find(route.inbox_id)
        if not isinstance(inbox, Inbox):
            reason = inbox if isinstance(inbox, str) else None
            return self._answer_over(reason, route, headers, body)
        if not inbox.admits(route.sender, headers.get(MAC)):
            return failure(403, refused="not the ticket of that sender")
        if method not in route.methods:
            return not_allowed(", ".join(route.methods))
        return inbox, route

    def _answer_over(
        self, reason: str | None, route: InboxRoute, headers: Mapping[str, str], body: bytes = b""
    ) -> Answer:
        """The reply about an inbox that is over, or that never was."""
        if reason is None:
            time.sleep(_MISS_PAUSE_S)
            return gone(None)
        if is_genuine(self._key, route.inbox_id, route.sender, headers.get(MAC)):
            root = self._offers.landed_root(route.inbox_id, route.sender)
            if root is not None:
                return answer_landed(reason, root, body)
        return gone(reason)

    def _answer_late(
        self,
        method: str,
        route: Route,
        reason: object,
        headers: Mapping[str, str],
        body: bytes,
    ) -> Answer:
        """The reply about a share that is over, or that never was."""
        if not isinstance(reason, str):
            time.sleep(_MISS_PAUSE_S)
            return gone(None)
        name = route.receiver
        if (
            method == "POST"
            and name is not None
            and is_genuine(self._key, route.share_id, name, headers.get(MAC))
            and self._offers.was_confirmed(route.share_id, name)
        ):
            return answer_confirmed(body) or gone(reason)
        return gone(reason)

    def _answer_share(
        self, method: str, route: Route, share: Share, headers: Mapping[str, str], body: bytes
    ) -> tuple[Answer, Share | None]:
        if method not in _methods(route).split(", "):
            return not_allowed(_methods(route)), None
        try:
            with share.request():
                if route.receiver is not None:
                    answer = answer_report(share, route.receiver, headers.get(MAC), body)
                    self._offers.note(share)
                    return answer, share
                if route.page is not None:
                    return answer_digests(share, route.page, HASH_WAIT_S), share
        except SourceChanged:
            share.end("changed")
            return gone("changed"), None
        except TransferTimeout:
            return busy("no room"), None
        except (WeighlockError, MemoryError) as error:
            if share.ended is not None:
                return gone(share.ended), None
            if isinstance(error, UpstreamFailed):
                _log.warning("digests could not be forwarded: %s", error)
                return not_forwarded(error), None
            return failure(500, error="unreadable", cause=type(error).__name__), None
        return answer_data(share, headers), share


def _methods(route: Route) -> str:
    """What may be done with a part of a share."""
    return "POST" if route.receiver is not None else "GET, HEAD"
