"""From a request to what is to be answered. Knows paths, ranges and headers; sends nothing."""

import http
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec

from weighlock.errors import PeerLost, ShareGone, TransferTimeout
from weighlock.sharing.share import Event
from weighlock.sharing.shared import Share
from weighlock.sources.grid import BLOCK_BYTES, block_count
from weighlock.tensors.spec import Span
from weighlock.transfer.upstream import UpstreamFailed

__all__ = [
    "HASH_WAIT_S",
    "Answer",
    "Route",
    "answer_confirmed",
    "answer_data",
    "answer_digests",
    "answer_report",
    "busy",
    "failure",
    "find",
    "gone",
    "hashing",
    "json_answer",
    "not_allowed",
    "not_forwarded",
    "requested_span",
]

_PATH = re.compile(
    r"/s/([0-9a-f]{32})/(?:(model\.safetensors)|digests/(\d{1,9})|receivers/([A-Za-z0-9._-]{1,64}))"
)
_RANGE = re.compile(r"bytes=(?:(\d{1,19})-(\d{0,19})|-(\d{1,19}))")

HASH_WAIT_S = 2.0
"""How long a request for digests hashes, or waits for another that does, before its reply."""

_YEAR_S = 365 * 24 * 3600


@dataclass(frozen=True, slots=True)
class Route:
    """What a path names."""

    share_id: str
    page: int | None = None
    """A page of digests."""
    receiver: str | None = None
    """A receiver that says something."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply: its head, and the body as bytes or as a span of a share."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    span: Span | None = None
    phrase: str = ""
    """What the status line says beside the status; what HTTP calls it, if nothing is given."""

    @property
    def length(self) -> int:
        """Bytes of the body."""
        return len(self.body) if self.span is None else self.span.length


def find(path: str) -> Route | None:
    """What a path names, if it can name anything here."""
    found = _PATH.fullmatch(path.partition("?")[0])
    if found is None:
        return None
    share_id, _, page, receiver = found.groups()
    return Route(share_id, None if page is None else int(page), receiver)


def json_answer(status: int, **facts: object) -> Answer:
    """A reply that tells facts in JSON. Never to be kept by a cache."""
    headers = {"Content-Type": "application/json", "Cache-Control": "no-store"}
    return Answer(status, headers, msgspec.json.encode(facts))


def failure(status: int, **why: object) -> Answer:
    """A reply that says what is the matter: with a status of 400 and more."""
    return json_answer(status, **why)


def not_allowed(methods: str) -> Answer:
    """The reply to a method that this path does not know."""
    refusal = failure(405, error="method not allowed")
    return Answer(405, {**refusal.headers, "Allow": methods}, refusal.body)


def busy(what: str) -> Answer:
    """The reply of one who has no time or room just now."""
    answer = failure(503, error=what)
    return Answer(503, {**answer.headers, "Retry-After": "1"}, answer.body)


def hashing(done: int, total: int) -> Answer:
    """The reply of one who is still hashing what was asked for, and how many blocks are done.

    Who asked is to come again at once: what it waits for is done while it asks.
    """
    answer = failure(503, error="hashing", done=done, total=total)
    return Answer(503, {**answer.headers, "Retry-After": "0"}, answer.body)


def gone(reason: str | None, **more: object) -> Answer:
    """The reply for an id that is over, or that nobody knows."""
    if reason is None:
        return failure(404, error="not found")
    return failure(410, error="gone", reason=reason, **more)


def not_forwarded(failed: UpstreamFailed) -> Answer:
    """The reply for what lies on another server, which does not give it.

    A failure that may pass is one here too, and says so: who asked has its own patience. It is told
    in the status line as well, which receivers show and logs of proxies keep.
    """
    error = failed.error
    cause, told = type(error).__name__, failed.told
    if isinstance(error, ShareGone):
        return gone(error.reason, upstream=told)
    if not error.retryable:
        return failure(500, error="unreadable", cause=cause, upstream=told)
    status = http.HTTPStatus(504 if isinstance(error, TransferTimeout) else 502)
    answer = failure(status, error="upstream", cause=cause, upstream=told)
    after_s = (error.retry_after_s if isinstance(error, PeerLost) else None) or 1.0
    headers = {**answer.headers, "Retry-After": str(math.ceil(after_s))}
    return Answer(status, headers, answer.body, phrase=f"{status.phrase}: {failed}")


def requested_span(text: str | None, size: int) -> Span | None:
    """The one range a request asks for; None for everything.

    Several ranges, or what is not understood, count as everything, as RFC 9110 has it.

    Raises:
        ValueError: the range lies outside.
    """
    found = _RANGE.fullmatch(text.replace(" ", "").lower()) if text else None
    if found is None:
        return None
    first, last, suffix = found.groups()
    if suffix is not None:
        length = min(int(suffix), size)
        if not length:
            raise ValueError("empty")
        return Span(size - length, length)
    start = int(first)
    end = min(int(last) + 1, size) if last else size
    if last and int(last) < start:
        return None
    if start >= size:
        raise ValueError("outside")
    return Span(start, end - start)


def answer_data(share: Share, headers: Mapping[str, str]) -> Answer:
    """The reply to a GET or HEAD of the file itself."""
    common = {
        "ETag": share.etag,
        "Accept-Ranges": "bytes",
        "Cache-Control": _cache_control(share),
        "Weighlock": "1",
    }
    wanted = headers.get("if-match")
    if wanted is not None and not _lists(wanted, share.etag):
        return Answer(412, common)
    known = headers.get("if-none-match")
    if known is not None and _lists(known.replace("W/", ""), share.etag):
        return Answer(304, common)
    try:
        text = headers.get("range")
        if headers.get("if-range", share.etag).strip() != share.etag:
            text = None  # of another version: then the whole of this one
        span = requested_span(text, share.size)
    except ValueError:
        return Answer(416, {**common, "Content-Range": f"bytes */{share.size}"})
    if not share.cacheable:
        # By default nginx takes a gigabyte at once, and nothing more while its client reads that.
        common["X-Accel-Buffering"] = "no"
    common |= {
        "Content-Type": "application/octet-stream",
        "Content-Disposition": 'attachment; filename="model.safetensors"',
        "X-Content-Type-Options": "nosniff",
    }
    if span is None:
        return Answer(200, common, span=Span(0, share.size))
    common["Content-Range"] = f"bytes {span.offset}-{span.end - 1}/{share.size}"
    return Answer(206, common, span=span)


def _lists(value: str, etag: str) -> bool:
    return value.strip() == "*" or etag in [tag.strip() for tag in value.split(",")]


def _cache_control(share: Share) -> str:
    if not share.cacheable:
        return "private, no-transform"
    remaining = share.remaining_s
    return f"public, no-transform, max-age={_YEAR_S if remaining is None else int(remaining)}"


def answer_digests(share: Share, page: int, wait_s: float) -> Answer:
    """The reply to a GET of a page of digests.

    Raises:
        SourceError: the tensors could not be read, or have changed.
        UpstreamFailed: they lie on another server, which does not give them.
    """
    if page >= share.digests.pages:
        return failure(404, error="not found")
    digests = share.digest_page(page, wait_s)
    if digests is None:
        return hashing(share.digests.hashed_blocks, share.digests.blocks)
    headers = {
        "Content-Type": "application/octet-stream",
        "Cache-Control": _cache_control(share),
        "Weighlock": "1",
    }
    return Answer(200, headers, digests)


class _Report(msgspec.Struct, frozen=True):
    state: Literal["started", "alive", "landed", "failed", "aborted", "mismatch"]
    attempt: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{1,32}$")] = "0"
    bytes: Annotated[int, msgspec.Meta(ge=0, le=2**62)] = 0
    cause: Annotated[str, msgspec.Meta(max_length=200)] = ""
    block: int | None = None
    seconds: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0


def read_report(body: bytes) -> _Report | None:
    """What a receiver says of itself, if it can be understood."""
    try:
        return msgspec.json.decode(body, type=_Report)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def answer_report(share: Share, name: str, mac: str | None, body: bytes) -> Answer:
    """The reply to what a receiver says of itself."""
    report = read_report(body)
    if report is None:
        return failure(400, error="not a report")
    if report.state == "mismatch":
        if report.block is None or not 0 <= report.block < block_count(share.size):
            return failure(400, error=f"no such block of {BLOCK_BYTES} bytes")
        share.check_block(report.block)
    else:
        if not share.admits(name, mac):
            return failure(403, error="not the ticket of that receiver")
        event, cause = Event(report.state), report.cause
        share.report(name, event, report.attempt, report.bytes, cause, report.seconds)
    if share.ended is not None and report.state != "landed":
        return gone(share.ended)
    confirmed = report.state == "landed" and share.has_landed(name)
    return json_answer(200, lives=share.ended is None, confirmed=confirmed, alive_s=share.alive_s)


def answer_confirmed(body: bytes) -> Answer | None:
    """The reply to one who landed and asks again, the share being over: its reply was lost.

    Returns:
        None if that is not what it says.
    """
    report = read_report(body)
    if report is None or report.state != "landed":
        return None
    return json_answer(200, lives=False, confirmed=True)
