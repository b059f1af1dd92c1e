"""A resource on an HTTP server, and all that is asked of it: what it is, ranges, digests, reports.

Knows the wire of a share: data are GETs of one immutable resource, digests lie beside it. How many
connections work at once, and on what, is the caller's.
"""

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from http.client import HTTPResponse
from typing import Protocol, TypeVar

import msgspec
from blake3 import blake3

from weighlock.abort import Abort
from weighlock.errors import (
    ChunkCorrupt,
    PeerLost,
    Refused,
    RemoteProtocolError,
    SourceChanged,
    TransferError,
)
from weighlock.limits import Limits
from weighlock.sources.access import Access, Address, shown
from weighlock.sources.connections import Connections
from weighlock.sources.digest_pages import DigestPages
from weighlock.sources.grid import (
    BLOCK_BYTES,
    DIGEST_BYTES,
    block_count,
    page_blocks,
    pages_of,
)
from weighlock.sources.http_client import Connection
from weighlock.sources.http_replies import (
    LEAST_PART_BYTES,
    Resource,
    check_plain,
    check_range,
    content_range,
    is_empty,
    raise_for_status,
)
from weighlock.sources.retrying import Retrying
from weighlock.tensors.spec import Span

__all__ = ["BlockPlace", "Remote"]

_REDIRECTS = (301, 302, 303, 307, 308)

_EXPIRED = (400, 401, 403, 404, 410)
"""What the target of a redirect says when its time is over; 400 is what S3 says of a token."""

T = TypeVar("T")


class BlockPlace(Protocol):
    """Where blocks are received to, by one connection at a time."""

    def views(self, block: int) -> Sequence[memoryview]:
        """Buffers that together take the block."""

    def landed(self, block: int) -> None:
        """The block is complete and matches its digest, where there is one."""


class Remote:
    """A resource behind a URL, with connections that are kept for the next request.

    Args:
        url: http or https. Redirects are followed, never from https to http.
        access: credentials for its origin.
        verify: check blocks against their digests, where the server is a Weighlock one.
        limits: timeouts, patience, redirects.
        abort: ends whatever waits for a reply.
        resource: what the URL is known to hold; asked for if not given.

    Raises:
        ShareGone, Refused, PeerLost, TransferTimeout, RemoteProtocolError: it cannot be opened.
        Aborted: somebody said stop.
    """

    def __init__(
        self,
        url: str,
        *,
        access: Access | None = None,
        verify: bool = True,
        limits: Limits | None = None,
        abort: Abort | None = None,
        resource: Resource | None = None,
    ) -> None:
        self.address = Address.of(url)
        self.label = shown(url)
        self.verify = verify
        self.connections = Connections(self.label, access, limits, abort)
        """What it is asked over."""
        self._pages = DigestPages(self.label)
        self.first = b""
        """The start of the file, which came with the first reply; not verified."""
        try:
            if resource is None:
                resource, self.first = self.persist(self._probe)
            self.resource = resource
        except BaseException:
            self.connections.close()
            raise

    @property
    def limits(self) -> Limits:
        """Timeouts, patience, redirects."""
        return self.connections.limits

    @property
    def abort(self) -> Abort:
        """Ends whatever waits for a reply."""
        return self.connections.abort

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.resource.size

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self.connections.is_closed

    @property
    def verifies(self) -> bool:
        """Whether what is read is checked against digests."""
        return self.verify and self.resource.is_share

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self.connections.close()

    def lease(self) -> AbstractContextManager[Connection]:
        """A connection for one thread; kept for the next if nothing goes wrong."""
        return self.connections.lease(self.resource.address)

    def persist(
        self,
        attempt: Callable[[], T],
        retrying: Retrying | None = None,
        sleep: Callable[[float], object] | None = None,
    ) -> T:
        """Try until it works, another try cannot help, or patience is at its end."""
        try:
            return self.connections.persist(attempt, retrying, sleep)
        except ChunkCorrupt as corrupt:
            self.report_mismatch(corrupt.chunk)
            raise

    def receive(self, connection: Connection, blocks: range, place: BlockPlace) -> None:
        """Ask for neighbouring blocks in one request, and land each that matches its digest.

        Raises:
            ChunkCorrupt: one does not match. Those before it have landed.
            PeerLost, TransferTimeout: the connection broke; likewise.
            ShareGone, SourceChanged, RemoteProtocolError: asking again will not help.
        """
        verifies = self.verifies
        if verifies:
            self.load_digests(blocks)
            if 0 in blocks and self._land_first(place):
                blocks = blocks[1:]
                if not blocks:
                    return
        start = blocks.start * BLOCK_BYTES
        span = Span(start, min(blocks.stop * BLOCK_BYTES, self.size) - start)
        body = _Body(self, connection, span)
        for block in blocks:
            hasher = blake3()
            for view in place.views(block):
                body.read_into(view)
                if verifies:
                    hasher.update(view)
            if verifies and not self._pages.matches(block, hasher.digest()):
                connection.close()
                self._pages.doubt(block)
                raise ChunkCorrupt(
                    f"{self.label}: block {block} does not match its digest", chunk=block
                )
            place.landed(block)
        body.finish()

    def _land_first(self, place: BlockPlace) -> bool:
        """Land the first block as it came with the first reply, if it is whole and matches."""
        first, self.first = self.first, b""
        if len(first) != min(BLOCK_BYTES, self.size):
            return False
        if not self._pages.matches(0, blake3(first).digest()):
            return False
        rest = memoryview(first)
        for view in place.views(0):
            view[:] = rest[: len(view)]
            rest = rest[len(view) :]
        place.landed(0)
        return True

    def read_into(self, connection: Connection, span: Span, buffer: memoryview) -> None:
        """Fill the buffer with that span, of which nothing is checked."""
        body = _Body(self, connection, span)
        body.read_into(buffer)
        body.finish()

    def ask_range(self, connection: Connection, span: Span) -> tuple[HTTPResponse, int]:
        """The reply to a request for that span, and how many bytes of it its body holds."""
        resource = self.resource
        headers = {}
        if resource.has_ranges:
            headers["Range"] = f"bytes={span.offset}-{span.end - 1}"
            if resource.etag is not None:
                headers["If-Match"] = resource.etag
        reply = _request(connection, resource.address, headers)
        if reply.status == 412:
            connection.close()
            raise SourceChanged(f"{self.label}: changed since it was opened")
        if reply.status not in (200, 206):
            is_expired = resource.address != self.address and reply.status in _EXPIRED
            # A share is where it is: it was asked for there, or its URL came in a message.
            has_moved = reply.status in _REDIRECTS and not resource.is_share
            if is_expired or has_moved:
                self._resolve_again(connection)
            raise_for_status(reply, connection, self.label)
        try:
            return reply, check_range(reply, resource, span, self.label)
        except BaseException:
            connection.close()  # before its body comes
            raise

    def _resolve_again(self, connection: Connection) -> None:
        """Ask where the resource is now, and try again: its place is not known, or has expired."""
        connection.close()
        before = self.resource
        now, _ = self._probe()  # what came with it may be of another file
        if (now.size, now.validator, now.is_share) != (
            before.size,
            before.validator,
            before.is_share,
        ):
            raise SourceChanged(f"{self.label}: changed since it was opened")
        self.resource = now
        raise PeerLost(f"{self.label}: is at another place now", retry_after_s=0)

    def load_digests(self, blocks: range) -> None:
        """Have the digests of neighbouring blocks, from pages that are asked for once each.

        Raises:
            SourceChanged: one was doubted, asked for again, and is of another file now.
        """
        for page in pages_of(blocks):
            self._pages.load(page, self._fetch_page)

    def matches(self, block: int, digest: bytes) -> bool:
        """Whether a block with that digest is the owner's; then it is so for good."""
        self.load_digests(range(block, block + 1))
        return self._pages.matches(block, digest)

    def _fetch_page(self, page: int) -> bytes:
        wanted = DIGEST_BYTES * len(page_blocks(page, self.size))
        with self.lease() as connection:
            reply = _request(connection, self.resource.address.beside(f"digests/{page}"), {})
            if reply.status != 200:
                raise_for_status(reply, connection, self.label, block_count(self.size))
            return connection.read_digests(reply, wanted)

    def report_mismatch(self, block: int) -> None:
        """Tell the owner of a block that does not match, time after time.

        Raises:
            SourceChanged: the owner looked, and finds that its tensor was changed.
        """
        body = msgspec.json.encode({"state": "mismatch", "block": block})
        address = self.resource.address.beside("receivers/anonymous")
        headers = {"Content-Type": "application/json"}
        with contextlib.suppress(TransferError, RemoteProtocolError), self.lease() as connection:
            reply = connection.request("POST", address, headers, body)
            if reply.status != 200:
                raise_for_status(reply, connection, self.label)
            connection.read_small(reply)

    def _probe(self) -> tuple[Resource, bytes]:
        """Ask for the first block: it tells what is there, and most often holds the header.

        Returns:
            What is there, and the block.
        """
        address = self.address
        wanted = {"Range": f"bytes=0-{BLOCK_BYTES - 1}"}
        for _ in range(self.limits.redirects + 1):
            with self.connections.lease(address, is_kept=False) as connection:
                reply = connection.request("GET", address, wanted)
                if reply.status == 416 and not is_empty(reply):
                    # Some servers do so where the range ends behind the file, caches by mistake.
                    connection.close()
                    reply = connection.request("GET", address)
                location = reply.getheader("Location", "")
                if reply.status not in _REDIRECTS or not location:
                    return self._first_reply(connection, reply, address)
                target = address.redirected(location)
            if address.scheme == "https" and target.scheme != "https":
                raise Refused(f"{self.label}: redirects from https to http, which is not followed")
            address = target
        raise Refused(f"{self.label}: redirects more than {self.limits.redirects} times")

    def _first_reply(
        self, connection: Connection, reply: HTTPResponse, address: Address
    ) -> tuple[Resource, bytes]:
        if is_empty(reply):
            return Resource(address, 0), b""
        if reply.status not in (200, 206):
            raise_for_status(reply, connection, self.label)
        check_plain(reply, self.label)
        found = content_range(reply)
        if found is not None:
            span, size = found
            least, most = min(size, LEAST_PART_BYTES), min(size, BLOCK_BYTES)
            if span.offset != 0 or not least <= span.length <= most:
                raise RemoteProtocolError(
                    f"{self.label}: its first {BLOCK_BYTES:,} bytes were asked for, the reply "
                    f"holds {span.length:,} from {span.offset:,} of {size:,}"
                )
            length = span.length
        elif reply.status == 206 or reply.length is None:
            raise RemoteProtocolError(f"{self.label}: does not say how long it is")
        else:  # the server knows no ranges and has begun to send everything
            size, length = reply.length, min(reply.length, BLOCK_BYTES)
        etag = reply.getheader("ETag") or None
        # One without quotes is none, and servers that send it may not know it again.
        is_strong = etag is not None and etag[0] == etag[-1] == '"' != etag
        first = bytearray(length)
        connection.read_into(reply, memoryview(first))
        resource = Resource(
            address,
            size,
            etag if is_strong else None,
            reply.getheader("Last-Modified"),
            None if is_strong else etag,
            is_share=reply.getheader("Weighlock") == "1",
            has_ranges=found is not None,
            is_private="private" in reply.getheader("Cache-Control", "").lower(),
        )
        return resource, bytes(first)


class _Body:
    """The bytes of a span, one after the other, in as many replies as the server gives them."""

    def __init__(self, remote: Remote, connection: Connection, span: Span) -> None:
        self._remote = remote
        self._connection = connection
        self._rest = span
        """What was not asked for, or did not come with the reply."""
        self._ask()

    def _ask(self) -> None:
        rest = self._rest
        self._reply, self._left = self._remote.ask_range(self._connection, rest)
        self._rest = Span(rest.offset + self._left, rest.length - self._left)

    def read_into(self, view: memoryview) -> None:
        """Fill a view with what comes next."""
        wanted = len(view)
        while wanted > self._left:
            self._connection.read_into(self._reply, view[: self._left])
            view, wanted = view[self._left :], wanted - self._left
            self._connection.finish(self._reply)
            self._ask()
        self._connection.read_into(self._reply, view)
        self._left -= wanted

    def finish(self) -> None:
        """Nothing more may come."""
        self._connection.finish(self._reply)


def _request(connection: Connection, address: Address, headers: dict[str, str]) -> HTTPResponse:
    was_used = not connection.is_fresh
    try:
        return connection.request("GET", address, headers)
    except PeerLost:
        if not was_used:
            raise
        if connection.is_shut:  # somebody said stop
            raise
        # A server may close a connection that was idle; that is no failure yet.
        return connection.request("GET", address, headers)
