"""Requests and replies of one connection. Knows h11 and sockets; what to answer it is told.

h11 speaks the grammar of requests and of reply heads; the bytes of a body never pass through it.
"""

import contextlib
import email.utils
import functools
import http.client
import logging
import time
from collections.abc import Iterator, Mapping
from typing import Protocol

import h11

from weighlock.errors import SourceChanged, TransferTimeout, WeighlockError
from weighlock.limits import Budget, Limits
from weighlock.sharing.listening import Peer
from weighlock.sharing.metrics import Traffic, kind_of
from weighlock.sharing.routes import Answer, busy, failure, gone, not_forwarded
from weighlock.sharing.shared import Share
from weighlock.tensors.spec import Span
from weighlock.transfer.pieces import Piece, piece_length
from weighlock.transfer.receiving import Incoming
from weighlock.transfer.sending import Sender, wait_readable
from weighlock.transfer.upstream import UpstreamFailed

__all__ = ["Answers", "Conversation"]

_log = logging.getLogger("weighlock.server")

_RECEIVE_BYTES = 16 * 1024

_DRAINED_BYTES = 100_000_000
"""Longest body that is read although nobody wants it, so that its sender sees the reply: that of
the longest header there is."""

_HUNG_UP_S = 3.0
"""How long a peer that has hung up may take nothing: long enough for one that only ended its own
side after its request, and writes what it reads to a slow disk."""


class Answers(Protocol):
    """Who knows what to answer."""

    is_stopping: bool
    """No new requests are taken up."""

    def answer(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[Answer, Share | None]:
        """The reply to a request, and the share it is about, if it is about one."""

    def receive(self, target: str, headers: Mapping[str, str], body: Incoming) -> Answer:
        """The reply to a PUT, of whose body as much was read as was of use.

        Raises:
            OSError, TransferTimeout: the body did not come.
        """


class Conversation:
    """Requests and replies of one connection, one after another."""

    def __init__(
        self,
        answers: Answers,
        peer: Peer,
        limits: Limits,
        traffic: Traffic,
        budget: Budget | None = None,
    ) -> None:
        self._answers = answers
        self._peer = peer
        self._traffic = traffic
        self._kind = "other"
        self._limits = limits
        self._sender = Sender(peer.sock, limits.idle_s, budget, hung_up_s=_HUNG_UP_S)
        self._h11 = self._grammar()

    def run(self) -> None:
        """Answer until one side has had enough.

        Raises:
            OSError, TransferTimeout: the connection broke, or the peer does not read.
        """
        while True:
            try:
                request, body = self._next_request()
            except h11.RemoteProtocolError as error:
                self._refuse(error.error_status_hint)
                return
            if request is None:
                return
            self._peer.is_busy = True
            if request.method == b"PUT":
                goes_on = self._receive(request)
                self._peer.is_busy = False
                if not goes_on or self._answers.is_stopping:
                    return
                continue
            self._reply(request, body)
            self._peer.is_busy = False
            if self._h11.our_state is not h11.DONE or self._h11.their_state is not h11.DONE:
                return
            if self._answers.is_stopping:
                return
            self._h11.start_next_cycle()

    def _next_request(self) -> tuple[h11.Request | None, bytes]:
        """The next request with its body; None if the peer has nothing more to say."""
        request: h11.Request | None = None
        body = bytearray()
        deadline = time.monotonic() + self._limits.idle_s
        begun = False
        while True:
            event = self._h11.next_event()
            if event is h11.NEED_DATA:
                if self._h11.they_are_waiting_for_100_continue:
                    self._go_on()
                if not wait_readable(self._peer.sock, deadline - time.monotonic()):
                    return None, b""
                data = self._peer.sock.recv(_RECEIVE_BYTES)
                if data and not begun:
                    begun = True
                    deadline = time.monotonic() + self._limits.head_s
                self._h11.receive_data(data)
            elif isinstance(event, h11.Request):
                request = event
                # h11 bounds a head that is not complete yet: one that came at once may be longer.
                if _head_bytes(event) > self._limits.request_head_bytes:
                    raise h11.RemoteProtocolError("the head is too long", error_status_hint=431)
                if event.method == b"PUT":
                    return request, b""  # its body is received by whom it is for
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > self._limits.request_body_bytes:
                    raise h11.RemoteProtocolError("the body is too long", error_status_hint=413)
            elif isinstance(event, h11.EndOfMessage):
                return request, bytes(body)
            else:  # closed, or paused behind a request that ends the connection
                return None, b""

    def _receive(self, request: h11.Request) -> bool:
        """Reply to a PUT; returns whether the connection can go on."""
        target, headers = _read_head(request)
        self._kind = kind_of(target)
        if "transfer-encoding" in headers:  # of unknown length: nothing here is
            self._refuse(411)
            return False
        length = headers.get("content-length", "0")
        first, _ = self._h11.trailing_data
        waits = self._h11.they_are_waiting_for_100_continue
        ask = self._go_on if waits else None
        body = Incoming(self._peer.sock, first, int(length), self._limits.idle_s, ask)
        answer = self._answers.receive(target, headers, body)
        self._traffic.received_bytes += int(length) - body.left
        is_last = "close" in headers.get("connection", "").lower() or request.http_version < b"1.1"
        goes_on = not is_last and body.is_awaited and body.left <= _DRAINED_BYTES
        if body.is_awaited and body.left <= _DRAINED_BYTES:
            body.drain()  # a reply that comes before its request is read may be lost
        self._send_whole(answer, b"PUT", [] if goes_on else [(b"Connection", b"close")])
        # h11 has not seen the body, so that it cannot tell where the next request begins.
        self._h11 = self._grammar()
        if body.behind:
            self._h11.receive_data(body.behind)
        return goes_on

    def _go_on(self) -> None:
        """Tell a peer that waits for it that its body is wanted."""
        go_on = self._h11.send(h11.InformationalResponse(status_code=100, headers=[]))
        self._sender.send_bytes(go_on or b"")

    def _grammar(self) -> h11.Connection:
        return h11.Connection(h11.SERVER, max_incomplete_event_size=self._limits.request_head_bytes)

    def _refuse(self, status: int) -> None:
        answer = failure(status, error="bad request")
        with contextlib.suppress(h11.LocalProtocolError):
            self._send_whole(answer, b"GET", [(b"Connection", b"close")])

    def _reply(self, request: h11.Request, body: bytes) -> None:
        method = request.method.decode("ascii")
        target, headers = _read_head(request)
        self._kind = kind_of(target)
        answer, share = self._answers.answer(method, target, headers, body)
        if share is None or answer.span is None or method == "HEAD" or not answer.length:
            self._send_whole(answer, request.method)
            return
        with share.request(), contextlib.closing(share.pieces(answer.span)) as pieces:
            try:
                self._send_span(answer, answer.span, share, pieces)
            finally:
                self._sender.end()

    def _head(self, answer: Answer, extra: list[tuple[bytes, bytes]]) -> bytes:
        self._traffic.requests[self._kind, answer.status] += 1
        headers = [(name.encode(), value.encode()) for name, value in answer.headers.items()]
        headers.append((b"Date", _date(int(time.time()))))
        if answer.status != 304:
            headers.append((b"Content-Length", str(answer.length).encode()))
        if self._answers.is_stopping:
            extra = [(b"Connection", b"close")]
        phrase = answer.phrase or http.client.responses.get(answer.status, "")
        reason = phrase.encode("ascii", "replace")
        response = h11.Response(status_code=answer.status, headers=headers + extra, reason=reason)
        return self._h11.send(response) or b""

    def _send_whole(
        self, answer: Answer, method: bytes, extra: list[tuple[bytes, bytes]] | None = None
    ) -> None:
        head = self._head(answer, extra or [])
        has_body = method != b"HEAD" and answer.body
        if has_body:
            head += self._h11.send(h11.Data(data=answer.body)) or b""
        self._h11.send(h11.EndOfMessage())
        self._sender.send_bytes(head)

    def _send_span(self, answer: Answer, span: Span, share: Share, pieces: Iterator[Piece]) -> None:
        try:
            share.try_again(span)
            piece = next(pieces)  # before the head: what cannot be read can still be said
        except SourceChanged:
            share.end("changed")
            self._send_whole(gone("changed"), b"GET")
            return
        except TransferTimeout as error:
            _log.warning("a range was put off: %s", error)
            self._send_whole(busy("no room"), b"GET")
            return
        except Exception as error:  # of a ref that may be anybody's; the connection goes on
            if share.ended is not None:
                self._send_whole(gone(share.ended), b"GET")
                return
            _log.warning("a range could not be read: %s", error)
            if isinstance(error, UpstreamFailed):
                self._send_whole(not_forwarded(error), b"GET")
                return
            self._send_whole(failure(500, error="unreadable", cause=type(error).__name__), b"GET")
            return
        self._sender.begin()
        self._sender.send_bytes(self._head(answer, []), more=True)
        # h11 counts the bytes of the body without ever seeing them.
        self._h11.send_with_data_passthrough(h11.Data(data=_Length(span.length)))  # type: ignore[arg-type]
        at = span.offset
        try:
            while True:
                done, length = 0, piece_length(piece)
                while done < length:
                    if share.ended is not None:
                        raise OSError("the share ended")
                    sent = self._sender.send_step(piece, done)
                    done += sent
                    at += sent
                    self._traffic.sent_bytes += sent
                    share.note_sent(sent)
                try:
                    following = next(pieces, None)
                except (SourceChanged, TransferTimeout):
                    raise
                except Exception as error:
                    _log.warning("a range broke off: %s", error)
                    share.note_failure(span, at)
                    raise OSError(f"a tensor could not be read: {error}") from error
                if following is None:
                    break
                piece = following
            if at < span.end:
                raise OSError(f"{span.end - at:,} bytes of a range were not there")
        except SourceChanged as error:
            share.end("changed")
            raise OSError(str(error)) from error
        except TransferTimeout:
            raise
        except (WeighlockError, MemoryError) as error:
            share.note_failure(span, at)
            raise OSError(str(error)) from error
        self._h11.send(h11.EndOfMessage())


@functools.lru_cache(maxsize=1)  # the same for all replies of a second
def _date(now: int) -> bytes:
    return email.utils.formatdate(now, usegmt=True).encode()


def _read_head(request: h11.Request) -> tuple[str, dict[str, str]]:
    """What a request names, and its headers."""
    headers = {name.decode("ascii"): value.decode("latin-1") for name, value in request.headers}
    try:
        target = request.target.decode("ascii")
    except UnicodeDecodeError:
        return "/", headers
    if target.lower().startswith(("http://", "https://")):  # the form that proxies are asked in
        target = f"/{target.partition('://')[2].partition('/')[2]}"
    return target, headers


def _head_bytes(request: h11.Request) -> int:
    """How long a head is, as it came."""
    lines = sum(len(name) + len(value) + len(b": \r\n") for name, value in request.headers)
    return len(request.method) + len(request.target) + len(b"  HTTP/1.1\r\n\r\n") + lines


class _Length:
    """Stands for bytes that h11 only counts."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length
