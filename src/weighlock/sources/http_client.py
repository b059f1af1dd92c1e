"""One connection to an HTTP server, and what is believed of its replies. Knows HTTP; not tensors.

Every server is taken for hostile or sloppy: one range per request; the reply must say that it is
that range of that resource; anything else ends the connection before its body is read.
`http.client` speaks the grammar. Its `readinto` may come back short without raising: bytes are
counted here.
"""

import contextlib
import http.client
import re
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal

import msgspec

from weighlock.errors import (
    PeerLost,
    Refused,
    RemoteProtocolError,
    ShareGone,
    SourceChanged,
    SourceError,
)
from weighlock.limits import Limits
from weighlock.sources.access import Access, Address, shown
from weighlock.sources.http_errors import Translated, is_plain
from weighlock.sources.http_head import Reply
from weighlock.sources.timeouts import set_timeout
from weighlock.tensors.spec import Span

__all__ = ["Connection", "Resource", "check_range", "content_range", "raise_for_status"]

_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})")
_BODY_BYTES = 64 * 1024


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


class Connection:
    """A keep-alive connection to one origin. Used by one thread at a time; `shut` by any.

    Args:
        address: whom to dial.
        access: credentials.
        limits: timeouts.
        secured: origins that have spoken TLS before; this one is added when it has.
    """

    def __init__(
        self, address: Address, access: Access, limits: Limits, secured: set[str] | None = None
    ) -> None:
        self.origin = address.origin
        self._address = address
        self._label = shown(address.url)
        self._limits = limits
        self._credential = access.credential(address)
        self._secured = set() if secured is None else secured
        self.is_fresh = True
        """No reply has come over it yet."""
        self.is_shut = False
        """Somebody said stop: it is of no use any more."""
        self._sock: socket.socket | None = None
        self._reply: http.client.HTTPResponse | None = None
        self._tls = self._credential.tls() if address.scheme == "https" else None
        if self._tls is not None:
            self._tls.post_handshake_auth = True  # as http.client does
        # Plain, also for TLS: http.client would shake hands on a socket that nobody could shut.
        self._http = http.client.HTTPConnection(
            address.host, address.port, timeout=limits.connect_s
        )
        self._http.default_port = 443 if self._tls is not None else 80
        self._http.response_class = partial(Reply, most_s=limits.idle_s)  # type: ignore[assignment]
        # http.client's own hook: the socket is known here while it is still connecting.
        self._http._create_connection = self._connect  # type: ignore[attr-defined]

    def _connect(
        self, address: tuple[str, int], timeout: float, source: object = None
    ) -> socket.socket:
        failure: OSError = OSError(f"{address[0]} has no address")
        deadline = time.monotonic() + timeout
        for family, kind, protocol, _, target in socket.getaddrinfo(
            *address, type=socket.SOCK_STREAM
        ):
            sock = self._sock = socket.socket(family, kind, protocol)
            try:
                self._check_shut()
                sock.settimeout(max(0.01, deadline - time.monotonic()))
                sock.connect(target)
                if self._tls is not None:
                    sock = self._sock = self._tls.wrap_socket(
                        sock, server_hostname=address[0], do_handshake_on_connect=False
                    )
                    self._check_shut()
                    sock.do_handshake()
                    self._secured.add(self.origin)
            except OSError as error:
                sock.close()
                self._check_shut()
                if isinstance(error, ssl.SSLError) and not self._may_pass(error):
                    raise
                failure = error
            else:
                return sock
        if isinstance(failure, ssl.SSLError) and is_plain(failure):
            raise PeerLost(f"{self._label}: answered without TLS, which it has spoken before")
        raise failure

    def _may_pass(self, error: ssl.SSLError) -> bool:
        """Whether a handshake may have failed for the moment only."""
        # Who is busy or restarts hangs up, or what stands before it answers in plain text.
        if isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
            return True
        return is_plain(error) and self.origin in self._secured

    def _check_shut(self) -> None:
        if self.is_shut:
            raise PeerLost(f"{self._label}: the connection was shut")

    def request(
        self,
        method: str,
        address: Address,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> http.client.HTTPResponse:
        """Ask; returns when the head of the reply is there.

        Raises:
            PeerLost, TransferTimeout, Refused, RemoteProtocolError: there is none.
        """
        sent = self._begin(address, headers)
        with Translated(self._label, "first_byte"):
            try:
                self._http.request(method, address.target, body, sent)
                reply = self._reply = self._http.getresponse()
            except BaseException:
                self.close()
                raise
        self.is_fresh = False
        return reply

    def upload(
        self,
        address: Address,
        headers: Mapping[str, str],
        length: int,
        send_body: Callable[[socket.socket], None],
    ) -> http.client.HTTPResponse:
        """PUT a body of that length, which is sent over the socket itself.

        Raises:
            PeerLost, TransferTimeout, Refused, RemoteProtocolError: there is no reply.
        """
        sent = self._begin(address, headers)
        with Translated(self._label, "first_byte"):
            try:
                self._http.putrequest("PUT", address.target, skip_accept_encoding=True)
                for name, text in {**sent, "Content-Length": str(length)}.items():
                    self._http.putheader(name, text)
                self._http.endheaders()
                sock: socket.socket = self._http.sock
                # The other side may have had enough: what it says of that may still be there.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    send_body(sock)
                reply = self._reply = self._http.getresponse()
            except BaseException:
                self.close()
                raise
        self.is_fresh = False
        return reply

    def _begin(self, address: Address, headers: Mapping[str, str] | None) -> dict[str, str]:
        """Connect if need be; returns the headers to send."""
        if address is not self._address:
            self._address, self._label = address, shown(address.url)
        if self._http.sock is None:
            with Translated(self._label, "connect"):
                self._http.connect()
                sock: socket.socket = self._http.sock  # type: ignore[assignment]
                self._sock = sock
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                set_timeout(sock, self._limits.idle_s)
        return {
            "Accept-Encoding": "identity",
            "User-Agent": "weighlock",
            **self._credential.headers,
            **(headers or {}),
        }

    def read_into(self, reply: http.client.HTTPResponse, buffer: memoryview) -> None:
        """Fill the buffer from a reply's body.

        Raises:
            PeerLost: the body ended too early.
            TransferTimeout: nothing came for too long.
        """
        done = 0
        while done < len(buffer):
            with Translated(self._label, "idle"):
                got = reply.readinto(buffer[done:])
            if not got:
                self.close()
                raise PeerLost(
                    f"{self._label}: the connection ended after {done:,} of {len(buffer):,} bytes"
                )
            done += got

    def read_digests(self, reply: http.client.HTTPResponse, wanted: int) -> bytes:
        """A body of digests, which must have exactly so many bytes.

        Raises:
            RemoteProtocolError: it has not.
        """
        if reply.length != wanted:
            self.close()
            raise RemoteProtocolError(
                f"{self._label}: {wanted:,} bytes of digests were due, {reply.length} come"
            )
        digests = bytearray(wanted)
        self.read_into(reply, memoryview(digests))
        self.finish(reply)
        return bytes(digests)

    def read_small(self, reply: http.client.HTTPResponse) -> bytes:
        """A short body; more than 64 KiB of it is not read, and the connection ended."""
        with Translated(self._label, "idle"):
            body = reply.read(_BODY_BYTES)
        if not reply.isclosed():
            self.close()
        return body

    def finish(self, reply: http.client.HTTPResponse) -> None:
        """The reply must be over: anything more belongs to nothing that was asked for."""
        if reply.isclosed():
            return
        with Translated(self._label, "idle"):
            more = reply.read(1)
        if more:
            self.close()
            raise RemoteProtocolError(f"{self._label}: sent more than it announced")

    def close(self) -> None:
        """End the connection. Idempotent."""
        self._http.close()
        if self._reply is not None:
            self._reply.close()  # it owns the socket, if it was the last of its connection

    def shut(self) -> None:
        """Wake the thread that waits on this connection; it will see a lost peer."""
        self.is_shut = True
        sock = self._sock  # not http.client's: that one forgets it when a reply is the last
        if sock is not None:
            with contextlib.suppress(OSError):
                # Not the method of an SSL socket: that one forgets its TLS state under the reader.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)


def raise_for_status(
    reply: http.client.HTTPResponse, connection: Connection, label: str, blocks: int = 0
) -> None:
    """Raise what a status means that is not the one hoped for. Reads a short explanation only.

    Args:
        reply: its head.
        connection: it comes over this one.
        label: what errors call the resource.
        blocks: of how many at the most it may say that they are hashed, if digests were asked for.
    """
    status = reply.status
    body = connection.read_small(reply)
    said = _explained(body)
    reason, cause = said.reason, said.cause
    if status in (401, 403, 407):
        raise Refused(f"{label}: access was refused ({status} {reply.reason})")
    if status == 404:
        raise ShareGone(f"{label}: there is nothing (404)", reason="unknown")
    if status == 410 and reason == "changed":
        raise SourceChanged(f"{label}: what it offers was changed by its owner")
    if status == 410:
        raise ShareGone(f"{label}: is over ({reason or 'gone'})", reason=reason or "expired")
    if status == 500 and cause is not None:
        raise SourceError(f"{label}: its owner could not read it ({cause})")
    if status in (408, 429) or status >= 500:
        raise PeerLost(
            f"{label}: answered {status} {reply.reason}",
            retry_after_s=_retry_after(reply),
            hashed_blocks=said.done if said.error == "hashing" and said.done <= blocks else 0,
        )
    raise RemoteProtocolError(f"{label}: answered {status} {reply.reason}")


class _Explanation(msgspec.Struct, frozen=True):
    reason: Literal["unknown", "revoked", "expired", "settled", "changed"] | None = None
    cause: Annotated[str, msgspec.Meta(pattern="^[A-Za-z]{1,40}$")] | None = None
    error: str = ""
    done: Annotated[int, msgspec.Meta(ge=0)] = 0


def _explained(body: bytes) -> _Explanation:
    """Why a share is over, what its owner met, how far it is, where a Weighlock server says so."""
    try:
        return msgspec.json.decode(body, type=_Explanation)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _Explanation()


def _retry_after(reply: http.client.HTTPResponse) -> float | None:
    text = reply.getheader("Retry-After", "")
    return float(text) if text.isascii() and text.isdigit() and len(text) < 6 else None


def content_range(reply: http.client.HTTPResponse) -> tuple[Span, int] | None:
    """The span a reply holds and the size of the whole, if it says so."""
    found = _CONTENT_RANGE.fullmatch(reply.getheader("Content-Range", "").strip())
    if found is None:
        return None
    first, last, total = map(int, found.groups())
    if not first <= last < total:
        return None
    return Span(first, last - first + 1), total


def check_range(
    reply: http.client.HTTPResponse, resource: Resource, span: Span, label: str
) -> None:
    """Raise unless the reply is exactly that span of exactly that resource.

    Args:
        reply: its head.
        resource: what was asked for.
        span: of which these bytes.
        label: what errors call it.

    Raises:
        SourceChanged: it is another version of it.
        RemoteProtocolError: it is something else.
    """
    check_plain(reply, label)
    etag, modified = resource.validator
    if etag is not None and (now := reply.getheader("ETag")) != etag:
        raise SourceChanged(f"{label}: changed since it was opened (ETag {etag}, now {now})")
    if modified is not None and reply.getheader("Last-Modified") != modified:
        raise SourceChanged(
            f"{label}: changed since it was opened (modified {modified}, now "
            f"{reply.getheader('Last-Modified')})"
        )
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
    if found[0] != span:
        raise RemoteProtocolError(
            f"{label}: {span.length:,} bytes from {span.offset:,} were asked for, the reply holds "
            f"{found[0].length:,} from {found[0].offset:,}"
        )
    if reply.length is not None and reply.length != span.length:
        raise RemoteProtocolError(
            f"{label}: announces {reply.length:,} bytes for a range of {span.length:,}"
        )


def check_plain(reply: http.client.HTTPResponse, label: str) -> None:
    """Raise if the body was encoded on the way."""
    encoding = reply.getheader("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise RemoteProtocolError(f"{label}: its reply is encoded ({encoding[:40]!r})")
