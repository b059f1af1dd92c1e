"""One connection to an HTTP server. Knows sockets and TLS; not what a reply means.

`http.client` speaks the grammar. Its `readinto` may come back short without raising: bytes are
counted here.
"""

import contextlib
import http.client
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from functools import partial

from weighlock.errors import (
    PeerLost,
    RemoteProtocolError,
)
from weighlock.limits import Limits
from weighlock.sources.access import Access, Address, shown
from weighlock.sources.http_errors import Translated, is_plain
from weighlock.sources.http_head import Reply
from weighlock.sources.timeouts import set_timeout

__all__ = ["Connection"]

_BODY_BYTES = 64 * 1024


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
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        for number, (family, kind, protocol, _, target) in enumerate(found):
            # Not all of it for the first: of two ways to a host one may lead nowhere.
            most_s = (deadline - time.monotonic()) / (len(found) - number)
            sock = self._sock = socket.socket(family, kind, protocol)
            try:
                self._check_shut()
                sock.settimeout(max(0.01, most_s))
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
