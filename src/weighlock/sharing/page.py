"""What the page for people is told, and by which paths. Knows HTTP heads and JSON; sends nothing.

The page itself is open: it says nothing but that it is there. What it asks for is guarded by a
token, which a person brings in the fragment of the page's URL, so that it is in no log, and which
travels as a bearer token, so that no foreign page can make a browser send it. Shares are numbered:
their ids, which are the credentials of the data, are told one at a time and when asked for.
"""

import hmac
import importlib.resources
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import parse_qs

from weighlock import __version__
from weighlock.errors import LocalProtocolError, SourceChanged, WeighlockError
from weighlock.sharing.board import Board, Shown, TakingPart, rows
from weighlock.sharing.inspection import Inspection, Partly
from weighlock.sharing.metrics import Family, exposition
from weighlock.sharing.routes import Answer, busy, failure, gone, json_answer, not_allowed
from weighlock.sharing.share import FINAL, State
from weighlock.sharing.shared import Share

__all__ = ["Page", "PageRoute", "check_token", "find_page"]

_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
_FILE_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_API = re.compile(
    r"/api/shares(?:/([1-9]\d{0,14})/(tensors|receivers|statistics|ticket))?|/(metrics)"
)
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{16,128}")

_MOST_SHARES = 200
_MOST_RECEIVERS = 1000


def check_token(token: str) -> str:
    """The token, if it can be one.

    Raises:
        LocalProtocolError: it is too short, too long, or no header can carry it.
    """
    if not _TOKEN.fullmatch(token):
        raise LocalProtocolError(
            "the token of the page must be 16 to 128 letters, digits or ._~+/=-, not "
            f"{len(token)} characters"
        )
    return token


class PageRoute(NamedTuple):
    """What a path names of the page: a file of it, or something it asks for."""

    what: str
    number: int = 0
    """Of a share."""
    query: Mapping[str, str] = {}


def find_page(target: str) -> PageRoute | None:
    """What a target names, if it is the page's."""
    path, _, query = target.partition("?")
    if path in _FILES:
        return PageRoute(path)
    found = _API.fullmatch(path)
    if found is None:
        return None
    try:
        asked = parse_qs(query, keep_blank_values=True, errors="strict", max_num_fields=8)
    except ValueError:  # too many, or not UTF-8
        asked = {}
    number, what, metrics = found.groups()
    first = {name: values[0] for name, values in asked.items()}
    return PageRoute(metrics or what or "shares", int(number or 0), first)


@dataclass(frozen=True, slots=True)
class Page:
    """Answers what the page of one server asks, to those who have the token."""

    token: str = field(repr=False)
    board: Board
    families: Callable[[], Iterable[Family]]
    """The server's metrics."""
    inspection: Inspection = field(default_factory=Inspection)

    def answer(self, route: PageRoute, method: str, headers: Mapping[str, str]) -> Answer:
        """The reply to a request for the page, or from it."""
        allowed = "POST" if route.what == "ticket" else "GET, HEAD"
        if method not in allowed.split(", "):
            return not_allowed(allowed)
        if route.what in _FILES:
            name, kind = _FILES[route.what]
            content = importlib.resources.files("weighlock").joinpath("web", name).read_bytes()
            return Answer(200, {**_FILE_HEADERS, "Content-Type": kind}, content)
        if not self._admits(headers.get("authorization", "")):
            refusal = failure(401, error="not the token of this page")
            return Answer(401, {**refusal.headers, "WWW-Authenticate": "Bearer"}, refusal.body)
        if route.what == "metrics":
            kind = "text/plain; version=0.0.4; charset=utf-8"
            text = exposition(self.families())
            return Answer(200, {"Content-Type": kind, "Cache-Control": "no-store"}, text.encode())
        if route.what == "shares":
            return self._shares()
        if route.what == "receivers":
            return self._receivers(route.number)
        share = self.board.share(route.number)
        if share is None:
            shown = self.board.shown(route.number)
            return gone(None if shown is None else shown.ended)
        if route.what == "tensors":
            return _tensors(share, route.query)
        if route.what == "ticket":
            return _ticket(share, route.query)
        return self._statistics(route.number, share, route.query)

    def _admits(self, authorization: str) -> bool:
        scheme, _, token = authorization.partition(" ")
        # Compared as bytes: only those may be anything at all.
        same = hmac.compare_digest(token.strip().encode("latin-1", "replace"), self.token.encode())
        return same and scheme.lower() == "bearer"

    def _shares(self) -> Answer:
        live = self.board.live()
        some = [Shown.of(number, share) for number, share in live[:_MOST_SHARES]]
        shares = [_share_facts(shown) for shown in (*some, *self.board.over())]
        return _reply(version=__version__, live=len(live), shares=shares)

    def _receivers(self, number: int) -> Answer:
        shown = self.board.shown(number)
        if shown is None:
            return gone(None)
        # Who is under way comes first: of thousands only some are told.
        order = sorted(shown.taking_part, key=lambda part: (part.who.state in FINAL, part.who.name))
        facts = [_facts_of(part) for part in order[:_MOST_RECEIVERS]]
        return _reply(share=_share_facts(shown), in_all=len(order), receivers=facts)

    def _statistics(self, number: int, share: Share, query: Mapping[str, str]) -> Answer:
        name = query.get("name", "")
        try:
            found = self.inspection.look(number, share, name)
        except KeyError:
            return failure(404, error="no such tensor")
        except ValueError as error:
            return failure(422, error=str(error))
        except SourceChanged:
            return gone("changed")
        except (WeighlockError, MemoryError) as error:
            return failure(500, error="unreadable", cause=type(error).__name__)
        if found is None:
            return busy("another tensor is being looked at")
        if isinstance(found, Partly):
            partly = json_answer(202, done=found.done_bytes, of=found.of_bytes)
            return Answer(202, {**partly.headers, "Retry-After": "0"}, partly.body)
        return _reply(name=name, statistics=found)


def _reply(**facts: object) -> Answer:
    return json_answer(200, **facts)


def _share_facts(shown: Shown) -> dict[str, object]:
    states = Counter(part.who.state for part in shown.taking_part)
    return {
        "number": shown.number,
        "kind": shown.kind,
        "title": shown.title,
        "tensors": shown.tensors,
        "bytes": shown.bytes,
        "ended": shown.ended,
        "remaining_s": shown.remaining_s,
        "receivers": {state: states[state] for state in State if states[state]},
    }


def _facts_of(part: TakingPart) -> dict[str, object]:
    receiver = part.who
    return {
        "name": receiver.name,
        "state": receiver.state,
        "bytes": receiver.bytes_here,
        "of": part.of_bytes,
        "seconds": receiver.seconds,
        "rate": receiver.rate,
        "cause": receiver.cause,
    }


def _tensors(share: Share, query: Mapping[str, str]) -> Answer:
    text = query.get("offset", "0")
    if not re.fullmatch(r"[0-9]{1,12}", text):
        return failure(400, error="offset must be a number of tensors")
    total, some = rows(share, int(text))
    return _reply(offset=int(text), of=total, rows=some)


def _ticket(share: Share, query: Mapping[str, str]) -> Answer:
    name = query.get("receiver")
    try:
        return _reply(url=share.url if name is None else share.url_for(name))
    except LocalProtocolError:
        return failure(404, error="no such receiver")
