"""One connection to an HTTP server. Knows sockets and TLS; not what a reply means.

`http.client` speaks the grammar, but for the heads of replies, which `http_head` reads. Its
`readinto` may come back short without raising: bytes are counted here.
"""

import contextlib
import errno
import http.client
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from weighlock.errors import PeerLost, Refused, RemoteProtocolError
from weighlock.limits import Limits
from weighlock.sources.access import Access, Address, shown
from weighlock.sources.http_errors import THEIRS, Translated, is_plain, translated
from weighlock.sources.http_head import Reply
from weighlock.sources.proxies import Proxy, proxy_for
from weighlock.sources.timeouts import set_timeout
from weighlock.sources.words import printable

__all__ = ["Connection"]

_BODY_BYTES = 64 * 1024
"""Of a reply that says what went wrong, all; of a body that is sent, what is sent at a time."""

_RESET = struct.pack("ii", 1, 0)
"""As SO_LINGER: whoever closes waits for nothing, and the other side is told at once."""


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
        self._proxy = proxy_for(address)
        self._sock: socket.socket | None = None
        self._reply: http.client.HTTPResponse | None = None
        self._is_asking = False
        """The request under way holds nothing but a question."""
        self._tls = self._credential.tls() if address.scheme == "https" else None
        if self._tls is not None:
            self._tls.post_handshake_auth = True  # as http.client does
            self._tls.sslsocket_class = _UnderTls
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
        proxy = self._proxy
        place = address if proxy is None else (proxy.host, proxy.port)
        found = socket.getaddrinfo(*place, type=socket.SOCK_STREAM)
        for number, (family, kind, protocol, _, target) in enumerate(found):
            # Not all of it for the first: of two ways to a host one may lead nowhere.
            most_s = (deadline - time.monotonic()) / (len(found) - number)
            sock = self._sock = socket.socket(family, kind, protocol)
            try:
                self._check_shut()
                sock.settimeout(max(0.01, most_s))
                sock.connect(target)
                if self._tls is not None:
                    if proxy is not None:
                        self._tunnel(sock, proxy, address)
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
            except BaseException:
                sock.close()
                raise
            else:
                return sock
        if isinstance(failure, ssl.SSLError) and is_plain(failure):
            raise PeerLost(f"{self._label}: answered without TLS, which it has spoken before")
        raise failure

    def _tunnel(self, sock: socket.socket, proxy: Proxy, address: tuple[str, int]) -> None:
        """Have the proxy connect this socket to the server."""
        host = address[0].encode("idna").decode() if ":" not in address[0] else f"[{address[0]}]"
        there = f"{host}:{address[1]}"
        lines = [f"CONNECT {there} HTTP/1.1", f"Host: {there}"]
        lines += [f"{name}: {text}" for name, text in proxy.headers.items()]
        sock.sendall("\r\n".join([*lines, "", ""]).encode("ascii"))
        reply = Reply(sock, method="CONNECT", most_s=self._limits.connect_s)
        try:
            reply.begin()
            said = f"{self._label}: its proxy {proxy} answered {reply.status}"
        finally:
            reply.close()
        if reply.status in (502, 503, 504):
            raise PeerLost(said)
        if not 200 <= reply.status < 300:
            raise Refused(f"{said} {printable(reply.reason)}")

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
        self._reply, self._is_asking = None, body is None
        with Translated(self._label, "first_byte"):
            try:
                if body is not None:
                    sent["Content-Length"] = str(len(body))
                pieces = None if body is None else _pieces(body)
                self._http.request(method, self._target(address), pieces, sent)
                reply = self._reply = self._http.getresponse()
            except http.client.BadStatusLine as error:
                self.close()
                if self.is_fresh or isinstance(error, http.client.RemoteDisconnected):
                    raise
                # Something was left of the reply before: a new connection may do.
                raise PeerLost(f"{self._label}: the connection was out of step") from error
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
        self._reply, self._is_asking = None, False
        with Translated(self._label, "first_byte"):
            try:
                self._http.putrequest(
                    "PUT",
                    self._target(address),
                    skip_host=any(name.lower() == "host" for name in sent),
                    skip_accept_encoding=True,
                )
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

    def _target(self, address: Address) -> str:
        """What a request names: the whole URL where a proxy reads it."""
        return address.target if self._proxy is None or self._tls is not None else address.url

    def _begin(self, address: Address, headers: Mapping[str, str] | None) -> dict[str, str]:
        """Connect if need be; returns the headers to send."""
        if address is not self._address:
            self._address, self._label = address, shown(address.url)
        if self._http.sock is None:
            self.is_fresh = True
            with Translated(self._label, "connect"):
                self._http.connect()
                sock: socket.socket = self._http.sock  # type: ignore[assignment]
                self._sock = sock
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                set_timeout(sock, self._limits.idle_s)
        sent = {"accept-encoding": ("Accept-Encoding", "identity")}
        sent["user-agent"] = ("User-Agent", "weighlock")
        asked = [*self._credential.headers.items(), *(headers or {}).items()]
        if self._proxy is not None and self._tls is None:
            asked += self._proxy.headers.items()
        for name, text in asked:
            sent[name.lower()] = (name, text)  # a name in other letters is the same header
        return dict(sent.values())

    def read_into(self, reply: http.client.HTTPResponse, buffer: memoryview) -> None:
        """Fill the buffer from a reply's body.

        Raises:
            PeerLost: the body ended too early.
            TransferTimeout: nothing came for too long.
        """
        done, wanted = 0, len(buffer)
        while done < wanted:
            try:  # for every block, and none of ours is raised in there: `Translated` costs more
                got = reply.readinto(buffer[done:] if done else buffer)
            except THEIRS as error:
                raise translated(error, self._label, "idle") from error
            if not got:
                self.close()
                raise PeerLost(
                    f"{self._label}: the connection ended after {done:,} of {wanted:,} bytes"
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
        sock, reply = self._sock, self._reply
        if sock is None:  # not http.client's: that one forgets it when a reply is the last
            return
        with contextlib.suppress(OSError):
            if self._is_asking and (reply is None or not reply.isclosed()):
                # Closed in the midst of a reply, it must be reset. With no room left for what
                # comes, nothing would tell the other side, which would wait for room. What was
                # sent as a body may still have to arrive: that is never taken back.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        with contextlib.suppress(OSError):
            # Not the method of an SSL socket: that one forgets its TLS state under the reader.
            socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _pieces(body: bytes) -> Iterator[memoryview]:
    """A body in pieces of a timeout each: under TLS, that of a `send` counts over all of it."""
    view = memoryview(body)
    for start in range(0, len(view), _BODY_BYTES):
        yield view[start : start + _BODY_BYTES]


class _UnderTls(ssl.SSLSocket):
    """A socket under TLS that is closed if its peer is gone before it could be made.

    Python's own asks that first, and then forgets it unclosed if it was reset.
    """

    def getpeername(self) -> Any:
        try:
            return super().getpeername()
        except OSError as error:
            self.close()
            raise ConnectionResetError(errno.ECONNRESET, "the connection was reset") from error
