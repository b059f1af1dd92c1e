"""What is believed of the replies of an HTTP server. Knows HTTP; not tensors.

Every server is taken for hostile or sloppy: one range per request; the reply must say that it is
that range of that resource; anything else ends the connection before its body is read.
"""

import http.client
import re
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from typing import Annotated, Literal, NoReturn

import msgspec

from weighlock.errors import (
    PeerLost,
    Refused,
    RemoteProtocolError,
    ShareGone,
    SourceChanged,
    SourceError,
)
from weighlock.sources.access import Address, shown
from weighlock.sources.http_client import Connection
from weighlock.sources.words import printable
from weighlock.tensors.spec import Span

__all__ = [
    "LEAST_PART_BYTES",
    "SHARE_FILE",
    "LandedBefore",
    "Resource",
    "check_plain",
    "check_range",
    "content_range",
    "is_empty",
    "raise_for_status",
]

LEAST_PART_BYTES = 64 * 1024
"""A server may answer with the beginning of what was asked for, but not with crumbs."""

SHARE_FILE, _INBOX = "/s/…/model.safetensors", "/i/…"
"""How the URLs of shares and of inboxes end where they are shown."""

_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})", re.IGNORECASE)


class LandedBefore(ShareGone):
    """The inbox is over, and something of this sender had landed there."""


@dataclass(frozen=True, slots=True)
class Resource:
    """What the first reply said of a resource; pinned for the life of a handle."""

    address: Address
    """Where it was found in the end, redirects followed."""
    size: int
    etag: str | None = None
    """The strong one: it names these bytes."""
    modified: str | None = None
    weak_etag: str | None = None
    is_share: bool = False
    """It comes from a Weighlock server, and has digests."""
    has_ranges: bool = True
    is_private: bool = False
    """No cache between here and there keeps it."""

    @property
    def validator(self) -> tuple[str | None, str | None]:
        """The entity tag and the date that must stay the same from reply to reply.

        A weak tag may name several files of the same meaning: that it is the same proves nothing,
        and it is neither sent nor believed by a later process. That it is another one counts, even
        where the date is the same: a date has whole seconds, and what packs files often sets one
        date for all. Machines that share a name and give weak tags of their own are refused
        thereby, as they are with strong ones: an error is better than a mixture.
        """
        if self.etag is not None:
            return self.etag, None
        return self.weak_etag, self.modified

    def moved(self, address: Address) -> "Resource":
        """The same resource at another address."""
        return replace(self, address=address)


def raise_for_status(
    reply: http.client.HTTPResponse, connection: Connection, label: str, blocks: int = 0
) -> NoReturn:
    """Raise what a status means that is not the one hoped for. Reads a short explanation only.

    Args:
        reply: its head.
        connection: it comes over this one.
        label: what errors call the resource.
        blocks: of how many at the most it may say that they are hashed, if digests were asked for.
    """
    status = reply.status
    body = connection.read_small(reply)
    told = _explained(body)
    reason, cause = told.reason, told.cause
    said = f"{status} {printable(reply.reason)}"
    if status in (401, 403, 407):
        raise Refused(f"{label}: access was refused ({said})")
    if status == 404:
        is_inbox = label.endswith(_INBOX)
        what = "is the URL of an inbox: push to it" if is_inbox else "there is nothing"
        raise ShareGone(f"{label}: {what} (404)", reason="unknown")
    if status == 410 and reason == "changed":
        raise SourceChanged(f"{label}: what it offers was changed by its owner")
    if status == 410 and told.landed:
        raise LandedBefore(
            f"{label}: is over ({reason or 'gone'}); what this sender pushed before had landed",
            reason=reason or "expired",
        )
    if status == 410:
        raise ShareGone(f"{label}: is over ({reason or 'gone'})", reason=reason or "expired")
    if status == 500 and told.error == "unreadable" and cause is not None:
        raise SourceError(f"{label}: its owner could not read it ({cause})")
    if status in (408, 429) or status >= 500:
        raise PeerLost(
            f"{label}: answered {said}",
            retry_after_s=_retry_after(reply),
            hashed_blocks=told.done if told.error == "hashing" and told.done <= blocks else 0,
        )
    location = reply.getheader("Location")
    if 300 <= status < 400 and location:
        said += f", which is not followed here; it leads to {shown(location)}"
    raise RemoteProtocolError(f"{label}: answered {said}")


class _Explanation(msgspec.Struct, frozen=True):
    reason: Literal["unknown", "revoked", "expired", "settled", "changed"] | None = None
    cause: Annotated[str, msgspec.Meta(pattern="^[A-Za-z]{1,40}$")] | None = None
    error: str = ""
    landed: bool = False
    done: Annotated[int, msgspec.Meta(ge=0)] = 0


def _explained(body: bytes) -> _Explanation:
    """Why a share is over, what its owner met, how far it is, where a Weighlock server says so."""
    try:
        return msgspec.json.decode(body, type=_Explanation)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _Explanation()


def _retry_after(reply: http.client.HTTPResponse) -> float | None:
    text = reply.getheader("Retry-After", "").strip()
    if text.isascii() and text.isdigit():
        return float(text) if len(text) < 6 else None
    try:
        # By the server's clock: this one may be set otherwise.
        then, now = map(parsedate_to_datetime, (text, reply.getheader("Date", "")))
        return max(0.0, (then - now).total_seconds())
    except (TypeError, ValueError):  # no date; one with a zone and one without
        return None


def content_range(reply: http.client.HTTPResponse) -> tuple[Span, int] | None:
    """The span a reply holds and the size of the whole, if it says so."""
    found = _CONTENT_RANGE.fullmatch(reply.getheader("Content-Range", "").strip())
    if found is None:
        return None
    first, last, total = map(int, found.groups())
    if not first <= last < total:
        return None
    return Span(first, last - first + 1), total


def is_empty(reply: http.client.HTTPResponse) -> bool:
    """Whether no byte of a file can be had because it has none."""
    length = reply.getheader("Content-Range", "").strip().lower()
    return reply.status == 416 and length == "bytes */0"


def check_range(reply: http.client.HTTPResponse, resource: Resource, span: Span, label: str) -> int:
    """Raise unless the reply is that span of exactly that resource, or begins it.

    Args:
        reply: its head.
        resource: what was asked for.
        span: of which these bytes.
        label: what errors call it.

    Returns:
        How many bytes it holds: all, or fewer.

    Raises:
        SourceChanged: it is another version of it.
        RemoteProtocolError: it is something else.
    """
    check_plain(reply, label)
    etag, modified = resource.validator
    if etag is not None and (now := reply.getheader("ETag")) != etag:
        raise _changed(label, "ETag", etag, now)
    if modified is not None and (now := reply.getheader("Last-Modified")) != modified:
        raise _changed(label, "modified", modified, now)
    found = content_range(reply)
    if found is None:
        if reply.status == 200 and span == Span(0, resource.size):
            found = span, resource.size
        else:
            raise RemoteProtocolError(
                f"{label}: answered {reply.status} without the range that was asked for "
                f"(bytes {span.offset:,} to {span.end:,})"
            )
    if found[1] != resource.size:
        raise SourceChanged(
            f"{label}: had {resource.size:,} bytes when it was opened, has {found[1]:,} now"
        )
    here = found[0]
    least = min(span.length, LEAST_PART_BYTES)
    if here.offset != span.offset or not least <= here.length <= span.length:
        raise RemoteProtocolError(
            f"{label}: {span.length:,} bytes from {span.offset:,} were asked for, the reply holds "
            f"{here.length:,} from {here.offset:,}"
        )
    if reply.length is not None and reply.length != here.length:
        raise RemoteProtocolError(
            f"{label}: announces {reply.length:,} bytes for a range of {here.length:,}"
        )
    return here.length


def _changed(label: str, what: str, before: str, now: str | None) -> SourceChanged:
    before, now = printable(before), printable(now or "none")
    return SourceChanged(f"{label}: changed since it was opened ({what} {before}, now {now})")


def check_plain(reply: http.client.HTTPResponse, label: str) -> None:
    """Raise if the body was encoded on the way."""
    encoding = reply.getheader("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise RemoteProtocolError(f"{label}: its reply is encoded ({encoding[:40]!r})")
