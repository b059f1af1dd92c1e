"""Sending to an inbox: one request at a time, over a connection that is kept. Knows the wire.

What is sent, how often and over how many connections is the caller's.
"""

import re
import secrets
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.client import HTTPResponse
from typing import Annotated, Literal

import msgspec

from weighlock.abort import Abort
from weighlock.errors import (
    ChunkCorrupt,
    LocalProtocolError,
    PeerLost,
    ProtocolError,
    Refused,
    RemoteProtocolError,
    SourceError,
    TransferError,
)
from weighlock.limits import Limits
from weighlock.sources.access import NAME, Access, Address, shown
from weighlock.sources.connections import Connections
from weighlock.sources.grid import DIGEST_BYTES, block_count, page_blocks
from weighlock.sources.http_client import Connection
from weighlock.sources.http_replies import raise_for_status
from weighlock.sources.words import printable

__all__ = ["NotAnnounced", "Upload"]

_NAME = re.compile(NAME)


class NotAnnounced(TransferError):
    """The inbox knows of no file on its way: it was restarted, or let go of what was silent."""


class _Reply(msgspec.Struct, frozen=True):
    has_some: bool = False
    alive_s: float | None = None
    landed: bool = False
    landing: bool = False
    error: Annotated[str, msgspec.Meta(max_length=200)] = ""
    refused: Annotated[str, msgspec.Meta(max_length=1000)] = ""
    block: int | None = None


class Upload:
    """One sender's way to an inbox.

    Args:
        url: the inbox's, or this sender's ticket of it.
        sender: who sends, if the URL does not say so.
        access: credentials for its origin.
        limits: timeouts, patience.
        abort: ends whatever waits.
    """

    def __init__(
        self,
        url: str,
        sender: str | None = None,
        *,
        access: Access | None = None,
        limits: Limits | None = None,
        abort: Abort | None = None,
    ) -> None:
        address = Address.of(url)
        self.label = shown(url)
        holder = address.holder
        if holder is not None and sender not in (None, holder[0]):
            raise Refused(f"{self.label}: is the ticket of {holder[0]!r}, not of {sender!r}")
        self.sender = sender or f"sender-{secrets.token_hex(4)}"
        if not _NAME.fullmatch(self.sender):
            raise LocalProtocolError(
                f"{sender!r} cannot be a sender's name: 1 to 64 letters, digits and ._- that begin "
                "with a letter or digit"
            )
        self._mac: str | None = None
        if holder is not None:
            self.sender, self._mac = holder
        self._address = address.below(f"senders/{self.sender}")
        self._attempt = secrets.token_hex(8)
        self.connections = Connections(self.label, access, limits, abort)
        """What it goes over."""
        self._speaking: Connection | None = None
        self.alive_s: float | None = None
        """How often the inbox wants to hear of this sender; None: no matter."""

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self.connections.close()

    def announce(self, header: bytes, size: int) -> bool:
        """Announce a file.

        Returns:
            Whether something of it may be there already.

        Raises:
            Refused: the inbox does not take it; the error says why.
            ShareGone: the inbox is over.
        """

        def send(connection: Connection) -> HTTPResponse:
            headers = {**self._headers(), "Weighlock-Size": str(size)}
            return connection.request("PUT", self._address.below("header"), headers, header)

        said = self._asked(send)
        self.alive_s = said.alive_s
        return said.has_some

    def digests(self, page: int, size: int) -> bytes:
        """The digests of what is there of a page of blocks; zeros for what is not."""
        wanted = DIGEST_BYTES * len(page_blocks(page, size))
        with self.connections.lease(self._address) as connection:
            reply = connection.request(
                "GET", self._address.below(f"digests/{page}"), self._headers()
            )
            if reply.status in (403, 409, 500):
                self._understood(reply, connection.read_small(reply))
                raise self._not_announced()
            if reply.status != 200:
                raise_for_status(reply, connection, self.label, block_count(size))
            return connection.read_digests(reply, wanted)

    def put(
        self,
        first: int,
        digests: bytes,
        length: int,
        send_body: Callable[[socket.socket], None],
    ) -> None:
        """Send neighbouring blocks.

        Raises:
            ChunkCorrupt: one did not arrive as it was sent, or was changed here meanwhile.
            NotAnnounced: the inbox awaits nothing; what is there has to be asked anew.
            PeerLost, TransferTimeout: the connection broke; asking what is there tells how far.
        """
        headers = {**self._headers(), "Weighlock-Digests": digests.hex()}

        def send(connection: Connection) -> HTTPResponse:
            return connection.upload(
                self._address.below(f"blocks/{first}"), headers, length, send_body
            )

        if self._asked(send).error:
            raise self._not_announced()

    def finish(self, root: str) -> bool | None:
        """Say that everything was sent.

        Returns:
            False if what is there differs; None if it is still being put in its place.
        """
        said = self._say({"state": "landed", "root": root})
        return None if said.landing and not said.landed else said.landed

    def tell(
        self, state: Literal["alive", "failed", "aborted"], limits: Limits, cause: str = ""
    ) -> None:
        """Say that this sender is still there, or stops; what prevents it is not told."""
        body = msgspec.json.encode({"state": state, "attempt": self._attempt, "cause": cause})
        connection = self._speaking = Connection(
            self._address, self.connections.access, limits, self.connections.secured
        )
        with suppress(TransferError, ProtocolError, SourceError):
            connection.request("POST", self._address, self._headers(), body)
        self._speaking = None
        connection.close()

    def shut(self) -> None:
        """Wake the thread that tells something; it will see a lost peer."""
        speaking = self._speaking
        if speaking is not None:
            speaking.shut()

    def _say(self, facts: dict[str, str]) -> _Reply:
        body = msgspec.json.encode({**facts, "attempt": self._attempt})

        def send(connection: Connection) -> HTTPResponse:
            return connection.request("POST", self._address, self._headers(), body)

        return self._asked(send)

    def _asked(self, send: Callable[[Connection], HTTPResponse]) -> _Reply:
        with self.connections.lease(self._address) as connection:
            reply = send(connection)
            if reply.status not in (200, 403, 409, 413, 422, 500, 507):
                raise_for_status(reply, connection, self.label)
            return self._understood(reply, connection.read_small(reply))

    def _understood(self, reply: HTTPResponse, body: bytes) -> _Reply:
        try:
            said = msgspec.json.decode(body, type=_Reply)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if reply.status in (200, 409, 422):
                raise RemoteProtocolError(
                    f"{self.label}: answered {reply.status}, and what makes no sense"
                ) from error
            said = _Reply()  # whatever stands in between has words of its own
        if reply.status == 422 and said.block is not None:
            raise ChunkCorrupt(
                f"{self.label}: block {said.block} did not arrive as it was sent", chunk=said.block
            )
        if reply.status in (200, 409):
            return said
        if reply.status == 500 and not said.refused:
            raise PeerLost(f"{self.label}: answered 500 {printable(reply.reason)}")
        # The other side's words: shown as one line of printable characters.
        why = (said.refused or said.error or f"{reply.status} {reply.reason}")[:500]
        raise Refused(f"{self.label}: does not take it: {why!r}")

    def _not_announced(self) -> NotAnnounced:
        return NotAnnounced(f"{self.label}: knows of nothing on its way from {self.sender!r}")

    def _headers(self) -> Mapping[str, str]:
        headers = {"Weighlock-Attempt": self._attempt}
        if self._mac is not None:
            headers["Weighlock-Mac"] = self._mac
        return headers
