"""From a request to an inbox to what is to be answered. Knows paths and headers; sends nothing.

PUT  /i/<id>/senders/<name>/header        the header; Weighlock-Size says how long the file is
GET  /i/<id>/senders/<name>/digests/<k>   the digests of what is here of 1,024 blocks
PUT  /i/<id>/senders/<name>/blocks/<n>    up to eight blocks; Weighlock-Digests says which
POST /i/<id>/senders/<name>               {"state": landed|alive|failed|aborted, "root": …}

409 says that a sender has to announce its file again, and look what is here of it.
"""

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

import msgspec
import numpy as np

from weighlock.errors import (
    Aborted,
    ChunkCorrupt,
    FormatError,
    LimitExceeded,
    NoSpace,
    Refused,
    ShareGone,
    TransferTimeout,
    WeighlockError,
)
from weighlock.limits import Budget, Limits
from weighlock.sharing.arrival import Arrival, NotAwaited
from weighlock.sharing.inbox import Inbox
from weighlock.sharing.placing import NotPlaced
from weighlock.sharing.routes import HASH_WAIT_S, Answer, busy, failure, gone, hashing, json_answer
from weighlock.sharing.share import Event
from weighlock.sources.access import NAME
from weighlock.sources.grid import BLOCK_BYTES, BLOCKS_PER_PAGE, BLOCKS_PER_RANGE, DIGEST_BYTES
from weighlock.tensors.arrays import byte_view, empty

__all__ = ["Body", "InboxRoute", "Reception", "answer_landed", "find_inbox"]

_PATH = re.compile(
    rf"/i/([0-9a-f]{{32}})/senders/({NAME})"
    r"(?:/(header)|/digests/(\d{1,9})|/blocks/(\d{1,12}))?"
)
_ATTEMPT = re.compile("[0-9a-f]{1,32}")

_HEADERS = 4
"""How many of the longest headers are received at once; of shorter ones, as many as take that."""

_HEADER_S, _HEADER_BYTES_PER_S = 30.0, 64 * 1024
"""Time for a header to arrive."""

_PIECE_BYTES = 64 * 1024
"""Received at once while many are sending."""

_OFTEN_S = 0.2
"""How often it is noted how far a sender is."""

_WAIT_S = 5.0
"""How long a sender waits for room in the budget; then it is told to come back."""


@dataclass(frozen=True, slots=True)
class InboxRoute:
    """What a path names."""

    inbox_id: str
    sender: str
    is_header: bool = False
    page: int | None = None
    block: int | None = None

    @property
    def methods(self) -> tuple[str, ...]:
        """What may be done with it."""
        if self.is_header or self.block is not None:
            return ("PUT",)
        return ("POST",) if self.page is None else ("GET", "HEAD")


def find_inbox(path: str) -> InboxRoute | None:
    """What a path names, if it is one of an inbox."""
    found = _PATH.fullmatch(path.partition("?")[0])
    if found is None:
        return None
    inbox_id, sender, header, page, block = found.groups()
    return InboxRoute(
        inbox_id,
        sender,
        header is not None,
        None if page is None else int(page),
        None if block is None else int(block),
    )


class Body(Protocol):
    """The body of a request, still to be received."""

    left: int
    """Bytes of it."""

    def fill(self, buffer: memoryview) -> None:
        """Receive so many bytes of it."""


class _Report(msgspec.Struct, frozen=True):
    state: Literal["alive", "landed", "failed", "aborted"]
    attempt: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{1,32}$")] = "0"
    root: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")] = "0" * 64
    cause: Annotated[str, msgspec.Meta(max_length=200)] = ""


def _read_report(body: bytes) -> _Report | None:
    try:
        return msgspec.json.decode(body, type=_Report)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def answer_landed(reason: str, root: str, body: bytes) -> Answer:
    """The reply to a sender that has landed, the inbox being over: its reply may have been lost.

    Args:
        reason: why it is over.
        root: what the digests of all that landed come down to.
        body: what it says now. If that is that everything was sent, and names the same root, it is
            true; otherwise it is told that something of it landed, and may compare.
    """
    report = _read_report(body)
    if report is not None and report.state == "landed" and report.root == root:
        return json_answer(200, landed=True)
    return gone(reason, landed=True)


class _Busy(Exception):
    """There is no room at the moment: come again a little later."""


class Reception:
    """Answers requests to inboxes.

    Args:
        limits: how long a header may be.
        budget: where buffers count that senders fill, as slowly as they like.
    """

    def __init__(self, limits: Limits, budget: Budget) -> None:
        self._limits = limits
        self._budget = budget
        # Headers may be long, and their senders slow: they are not to be in the way of data.
        self._headers = Budget(_HEADERS * limits.announced_bytes)
        # One header at a time: parsed it takes many times its length.
        self._announcing = threading.Lock()

    def answer(self, inbox: Inbox, route: InboxRoute, body: bytes) -> Answer:
        """The reply to a question, or to what a sender says."""
        if route.page is not None:
            return _told(lambda: _digests(inbox, route.sender, route.page or 0))
        report = _read_report(body)
        if report is None:
            return failure(400, error="not a report")
        return _told(lambda: self._reported(inbox, route.sender, report))

    def _reported(self, inbox: Inbox, sender: str, report: _Report) -> Answer:
        if report.state == "landed":
            has_landed = inbox.finish(sender, report.attempt, report.root)
            if has_landed is False:
                return failure(409, error="what is here differs")
            return json_answer(200, landed=bool(has_landed), landing=has_landed is None)
        if report.state == "alive":
            inbox.report(sender, Event.ALIVE, report.attempt)
        else:
            inbox.give_up(sender, Event(report.state), report.attempt, report.cause)
        return json_answer(200, landed=False)

    def receive(
        self, inbox: Inbox, route: InboxRoute, headers: Mapping[str, str], body: Body
    ) -> Answer:
        """The reply to what was sent, once it has arrived.

        Raises:
            PeerLost, TransferTimeout: it did not.
        """
        attempt = headers.get("weighlock-attempt", "0")
        if not _ATTEMPT.fullmatch(attempt):
            return failure(400, error="no such attempt")
        if route.block is not None:
            return _told(lambda: self._take_blocks(inbox, route, attempt, headers, body))
        return _told(lambda: self._take_header(inbox, route.sender, attempt, headers, body))

    def _take_header(
        self, inbox: Inbox, sender: str, attempt: str, headers: Mapping[str, str], body: Body
    ) -> Answer:
        size = headers.get("weighlock-size", "")
        if not re.fullmatch(r"\d{1,18}", size):
            return failure(400, error="Weighlock-Size is missing")
        self._limits.check("announced_bytes", body.left, f"bytes of the header of {sender}")
        with self._room(self._headers, body.left):
            header = bytearray(body.left)
            _fill_in_time(body, memoryview(header))
            with self._announcing:
                arrival = inbox.begin(sender, attempt, bytes(header), int(size))
        return json_answer(200, has_some=arrival.has_some, alive_s=inbox.alive_s)

    @contextlib.contextmanager
    def _room(self, budget: Budget, count: int) -> Iterator[None]:
        """While a buffer of so many bytes is in use."""
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(budget.hold(count, _WAIT_S))
            except TransferTimeout as error:
                raise _Busy(str(error)) from error
            yield

    def _take_blocks(
        self,
        inbox: Inbox,
        route: InboxRoute,
        attempt: str,
        headers: Mapping[str, str],
        body: Body,
    ) -> Answer:
        arrival = inbox.arrival(route.sender)
        digests = _hex(headers.get("weighlock-digests", ""))
        if digests is None:
            return failure(400, error="Weighlock-Digests is missing")
        first = route.block or 0
        if arrival is None or not inbox.takes(route.sender, arrival):
            if arrival is not None and inbox.landed_root(route.sender):
                _check_landed(arrival, route.sender, first, digests)
            return failure(409, error="no header was announced, or it has landed")
        blocks = arrival.check_run(first, body.left, len(digests) // DIGEST_BYTES)
        size = self._budget.fitting(min(BLOCK_BYTES, body.left), _PIECE_BYTES)
        told_at = time.monotonic()
        with self._room(self._budget, size):
            buffer = byte_view(empty((size,), np.dtype(np.uint8)))

            def fill(view: memoryview) -> None:
                body.fill(view)
                if arrival.is_sealed or arrival.attempt != attempt:
                    raise _why_not(inbox, route.sender, arrival)

            for number, block in enumerate(blocks):
                at = number * DIGEST_BYTES
                try:
                    arrival.receive(block, digests[at : at + DIGEST_BYTES], fill, buffer)
                except (NoSpace, Aborted):
                    inbox.drop(route.sender, arrival)
                    raise
                if time.monotonic() > told_at + _OFTEN_S:
                    told_at = time.monotonic()
                    inbox.report(route.sender, Event.ALIVE, attempt, arrival.bytes_here)
        inbox.report(route.sender, Event.ALIVE, attempt, arrival.bytes_here)
        return json_answer(200, bytes=arrival.bytes_here)


def _check_landed(arrival: Arrival, sender: str, first: int, digests: bytes) -> None:
    """Refuse blocks that are not those that have landed: a push again is one of the same tensors.

    Who sends the same again, as it did not hear that they had arrived, is told what is here.
    """
    page, at = divmod(first, BLOCKS_PER_PAGE)
    here = arrival.page(page, HASH_WAIT_S)
    there = here and here[at * DIGEST_BYTES :][: len(digests)]
    if there and there != digests[: len(there)]:
        raise Refused(
            f"{sender!r} has landed already, with other numbers in the same tensors: an inbox "
            "takes one model of each sender; push under another name, or to the next round's inbox"
        )


def _why_not(inbox: Inbox, sender: str, arrival: Arrival) -> WeighlockError:
    """Why what comes is no longer awaited."""
    if inbox.ended is not None:
        return ShareGone("the inbox is over", reason=inbox.ended)
    if not inbox.takes(sender, arrival):
        return NotAwaited("it has landed, or was let go of")
    return Refused("another push under this name was begun after it")


def _fill_in_time(body: Body, header: memoryview) -> None:
    """Receive a header, from a peer that may be slow, but not for hours."""
    deadline = time.monotonic() + _HEADER_S + len(header) / _HEADER_BYTES_PER_S
    for start in range(0, len(header), _PIECE_BYTES):
        body.fill(header[start : start + _PIECE_BYTES])
        if time.monotonic() > deadline:
            raise TransferTimeout("the header takes too long", phase="idle")


def _digests(inbox: Inbox, sender: str, page: int) -> Answer:
    """The digests of what is here of some blocks."""
    arrival = inbox.arrival(sender)
    if arrival is None:
        return failure(409, error="no header was announced")
    if page >= arrival.pages:
        return failure(404, error="not found")
    digests = arrival.page(page, HASH_WAIT_S)
    if digests is None:
        return hashing(arrival.known_blocks, arrival.blocks)
    headers = {"Content-Type": "application/octet-stream", "Cache-Control": "no-store"}
    return Answer(200, headers, digests)


def _hex(text: str) -> bytes | None:
    try:
        digests = bytes.fromhex(text)
    except ValueError:
        return None
    count, rest = divmod(len(digests), DIGEST_BYTES)
    return digests if not rest and 0 < count <= BLOCKS_PER_RANGE else None


def _told(work: Callable[[], Answer]) -> Answer:
    """What the work answers, or why it could not be done, as far as a sender may know."""
    try:
        return work()
    except NotAwaited:
        return failure(409, error="what was announced is no longer awaited")
    except ChunkCorrupt as error:
        return failure(422, error="mismatch", block=error.chunk)
    except NoSpace as error:
        return failure(
            507, refused=f"no space: {error.wanted_bytes} bytes needed, {error.free_bytes} free"
        )
    except LimitExceeded as error:
        if error.limit == "arrivals":  # some will have landed, or be silent for long enough
            return busy("too many are on their way")
        return failure(413, refused=str(error)[:500])
    except (FormatError, Refused) as error:
        return failure(403, refused=str(error)[:500])
    except (_Busy, NotPlaced) as error:
        return busy(str(error))
    except ShareGone as error:
        return gone(error.reason)
    except Aborted:
        return failure(403, refused="the owner of the inbox has aborted it")
    except (WeighlockError, MemoryError) as error:
        if isinstance(error, WeighlockError) and error.retryable:
            raise
        return failure(500, refused=f"the inbox failed: {type(error).__name__}")
