"""Push weights to an inbox: for those who can dial and cannot be dialled. One visible call.

Knows what is to be sent and in which order things are said; bytes, digests and connections are its
neighbours'. What the inbox has already is not sent again: that is resume.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
from blake3 import blake3

from weighlock.abort import Abort
from weighlock.errors import (
    Aborted,
    ChunkCorrupt,
    PeerLost,
    ShareGone,
    ShortRead,
    SourceChanged,
    TransferError,
    TransferTimeout,
)
from weighlock.fetching.moving import Move, Moving, Progress, rate_of
from weighlock.fetching.plan import Plan
from weighlock.limits import Limits, check_number
from weighlock.sources.access import Access
from weighlock.sources.grid import (
    BLOCK_BYTES,
    BLOCKS_PER_PAGE,
    DIGEST_BYTES,
    RANGE_BYTES,
    block_count,
    block_length,
)
from weighlock.sources.http_replies import SHARE_FILE, LandedBefore
from weighlock.sources.upload import NotAnnounced, Upload
from weighlock.tensors.arrays import byte_view, empty
from weighlock.tensors.spec import Span
from weighlock.transfer.contents import Contents
from weighlock.transfer.digests import hash_block, in_two_threads
from weighlock.transfer.layout import lay_out
from weighlock.transfer.pieces import FilePart, Piece, Several, piece_length
from weighlock.transfer.rate import Rate
from weighlock.transfer.sending import Sender

__all__ = ["Pushed", "push"]

_TRIES = 3
"""How often what is there is compared and completed before that is given up."""

_RESTARTS = 100
"""How often an inbox may forget what is on its way, each time having taken some more of it."""

_LANDING_S = 600.0
"""How long an inbox may take to put a file in its place, beside a second for each MB."""

_LANDING_PAUSE_S = 0.2

_PACED_BYTES = 1024 * 1024
"""Sent at a time where the rate is bounded: between two steps is a pause."""

_BRIEFLY_S = 0.4
"""Time for the last word of a push that has failed."""


@dataclass(frozen=True, slots=True)
class Pushed:
    """What a push did."""

    sender: str
    """The name it was sent under."""
    size: int
    """Bytes of the file that landed."""
    sent_bytes: int
    """Bytes of it that had to be sent."""


def push(
    url: str,
    tensors: Mapping[str, object],
    *,
    sender: str | None = None,
    metadata: Mapping[str, str] | None = None,
    tied: Literal["copy", "alias"] = "alias",
    access: Access | None = None,
    abort: Abort | None = None,
    progress: Callable[[int, int], None] | None = None,
    connections: int = 4,
    limit_rate: float | None = None,
    directory: str | None = None,
    limits: Limits | None = None,
) -> Pushed:
    """Push weights to an inbox. Returns when they have landed there.

    Args:
        url: the inbox's, or this sender's ticket of it.
        tensors: a catalog, or names and arrays, torch tensors or refs; not to be written until this
            returns.
        sender: the name to send under, where the inbox does not name its senders. The same name
            takes up what an earlier push left.
        metadata: text beside the tensors; a catalog's own is kept if this is not given.
        tied: send tensors that are the same view once, with the other names in the metadata
            (`"alias"`), or once for each name.
        access: credentials.
        abort: `abort.set()` in any thread ends this with `Aborted`.
        progress: called with bytes there and bytes in all, from any thread.
        connections: requests under way at once.
        limit_rate: bytes a second at the most.
        directory: where tensors are laid down that must be gathered first; the system's temporary
            directory if not given.
        limits: timeouts, patience.

    Raises:
        Refused: the inbox does not take it: another sender's ticket, tensors that are not expected,
            a quota, a full disk. Before anything was sent, unless the disk filled up meanwhile or
            a later push under the same name overtook this one.
        TransferError: it could not be brought there; see `retryable`; a `ShareGone` has a `reason`.
        RemoteProtocolError: what the inbox says makes no sense.
        SourceError: the URL is none, or a tensor cannot be read; `SourceChanged` if one was changed
            while it was sent.
        LayoutError, UnsupportedDType: the tensors cannot lie in a safetensors file.
        LimitExceeded: a tensor of a file is made larger by repeating its elements than `limits`
            allow.
        DiskError: what must be gathered first cannot be laid down.
        LocalProtocolError: nobody can be called `sender`, or nothing moves at `limit_rate` or over
            so few `connections`.
    """
    limits = limits or Limits()
    rate = rate_of(limit_rate)
    check_number("connections", connections, 1, is_whole=True)
    file = lay_out(tensors, metadata, tied=tied, limits=limits)
    contents = Contents(file, directory=directory, limits=limits, abort=abort)
    with (
        closing(contents),
        closing(Upload(url, sender, access=access, limits=limits, abort=abort)) as upload,
    ):
        try:
            return _Push(upload, contents, connections, rate).run(progress)
        except BaseException as error:
            _say_why(upload, error, limits)
            raise


def _say_why(upload: Upload, error: BaseException, limits: Limits) -> None:
    """Tell the inbox, unless another attempt under this name may take it up."""
    brief = replace(limits, connect_s=_BRIEFLY_S, idle_s=_BRIEFLY_S)
    if isinstance(error, Aborted):
        upload.tell("aborted", brief)
    elif isinstance(error, Exception) and not isinstance(error, (PeerLost, TransferTimeout)):
        upload.tell("failed", brief, type(error).__name__)


@contextmanager
def _heard(upload: Upload) -> Iterator[None]:
    """Let the inbox hear of this sender meanwhile, as often as it wants."""
    over = threading.Event()
    every_s, limits = upload.alive_s, upload.connections.limits
    if every_s is None:
        yield
        return

    def keep_telling() -> None:
        brief = replace(limits, connect_s=min(every_s, 5.0), idle_s=min(every_s, 5.0))
        while not over.wait(max(0.05, every_s)):
            upload.tell("alive", brief)

    thread = threading.Thread(target=keep_telling, name="weighlock-report", daemon=True)
    with suppress(RuntimeError):  # the system has no more: then it hears of blocks only
        thread.start()
    try:
        yield
    finally:
        over.set()
        if thread.ident is not None:
            thread.join(_BRIEFLY_S / 2)
        while thread.is_alive():
            upload.shut()
            thread.join(0.01)


class _Push:
    """The push of one file."""

    def __init__(
        self, upload: Upload, contents: Contents, connections: int, rate: Rate | None
    ) -> None:
        self._upload = upload
        self._contents = contents
        self._size = contents.size
        self._threads = connections
        self._rate = rate
        self._step_bytes = RANGE_BYTES
        if rate is not None:
            # So little that the other side does not take the pauses for death.
            self._step_bytes = int(min(_PACED_BYTES, max(4096, rate.bytes_per_s)))
        self._digests = bytearray(DIGEST_BYTES * block_count(self._size))
        self._hashed = bytearray(block_count(self._size))
        self._sent_bytes = 0
        self._lock = threading.Lock()

    def run(self, tell: Callable[[int, int], None] | None) -> Pushed:
        """Announce, send what is missing, and have it confirmed."""
        try:
            has_some = self._announce()
            with _heard(self._upload):
                self._contents.gather_all()  # not before: it may have been refused
                return self._run(has_some, tell)
        except LandedBefore as over:
            return self._landed_before(over, tell)
        except ShareGone as error:
            if error.reason != "unknown":
                raise
            label = self._upload.label
            told = "there is nothing (404)"
            if label.endswith(SHARE_FILE):
                told = "is the URL of a share: pull it; push takes the URL of an inbox"
            raise ShareGone(f"{label}: {told}", reason="unknown") from error

    def _landed_before(self, over: LandedBefore, tell: Callable[[int, int], None] | None) -> Pushed:
        """The inbox is over. If what had landed there is this, all is well: a reply was lost."""
        self._contents.gather_all()
        in_two_threads(range(block_count(self._size)), self._note_digest)
        try:
            if self._finish():
                Progress(self._size, tell).add(self._size)
                return Pushed(self._upload.sender, self._size, self._sent_bytes)
        except LandedBefore:
            pass
        raise ShareGone(
            f"{self._upload.label}: is over ({over.reason}); {self._upload.sender!r} had landed "
            "there before, with other tensors",
            reason=over.reason,
        )

    def _run(self, has_some: bool, tell: Callable[[int, int], None] | None) -> Pushed:
        tries = 0
        for _ in range(_RESTARTS):
            before = self._sent_bytes
            try:
                blocks = self._differing() if has_some else list(range(block_count(self._size)))
                there = self._size - sum(block_length(block, self._size) for block in blocks)
                progress = Progress(self._size, tell)
                progress.add(there)
                self._send(blocks, progress)
                if self._finish():
                    return Pushed(self._upload.sender, self._size, self._sent_bytes)
                tries += 1
            except NotAnnounced:
                tries += self._sent_bytes == before
            if tries == _TRIES:
                break
            has_some = self._announce()
        raise TransferError(
            f"{self._upload.label}: what is there under {self._upload.sender!r} is not what was "
            f"sent, {tries} times"
        )

    def _announce(self) -> bool:
        announce = partial(self._upload.announce, self._contents.file.header, self._size)
        return self._upload.connections.persist(announce)

    def _finish(self) -> bool:
        """Say that everything was sent, and wait for it to be put in its place."""
        connections = self._upload.connections
        root = blake3(bytes(self._digests)).hexdigest()
        deadline = time.monotonic() + _LANDING_S + self._size / 1e6
        while (landed := connections.persist(partial(self._upload.finish, root))) is None:
            if time.monotonic() > deadline:
                raise TransferTimeout(
                    f"{self._upload.label}: everything is there, but was not put in its place in "
                    f"{_LANDING_S + self._size / 1e6:.0f} s",
                    phase="idle",
                )
            connections.abort.wait(_LANDING_PAUSE_S)
        return landed

    def _differing(self) -> list[int]:
        """Blocks that are not there as they are here."""
        missing: set[int] = set()
        for page in range(-(-block_count(self._size) // BLOCKS_PER_PAGE)):
            there = self._upload.connections.persist(
                partial(self._upload.digests, page, self._size)
            )
            first = page * BLOCKS_PER_PAGE
            known = {
                first + number: there[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
                for number in range(len(there) // DIGEST_BYTES)
            }
            in_two_threads(known, partial(self._compare, known, missing))
        return sorted(missing)

    def _compare(
        self, known: Mapping[int, bytes], missing: set[int], block: int, buffer: memoryview
    ) -> None:
        self._upload.connections.abort.check()
        if not any(known[block]) or self._digest(block, buffer) != known[block]:
            missing.add(block)

    def _note_digest(self, block: int, buffer: memoryview) -> None:
        self._upload.connections.abort.check()
        self._digest(block, buffer)

    def _digest(self, block: int, buffer: memoryview) -> bytes:
        at = block * DIGEST_BYTES
        if not self._hashed[block]:
            self._digests[at : at + DIGEST_BYTES] = hash_block(self._contents, block, buffer)
            self._hashed[block] = 1
        return bytes(self._digests[at : at + DIGEST_BYTES])

    def _send(self, blocks: list[int], progress: Progress) -> None:
        connections = self._upload.connections
        moving = Moving(connections, Plan(blocks), self._size, progress, self._rate)
        if blocks:
            moving.run(min(self._threads, -(-len(blocks) // 8)), self._mover)

    def _mover(self, moving: Moving) -> Move:
        buffer = byte_view(empty((BLOCK_BYTES,), np.dtype(np.uint8)))

        def move(run: range) -> None:
            digests = b"".join(self._digest(block, buffer) for block in run)
            start = run.start * BLOCK_BYTES
            span = Span(start, min(run.stop * BLOCK_BYTES, self._size) - start)
            try:
                self._upload.put(
                    run.start,
                    digests,
                    span.length,
                    lambda sock: self._send_span(sock, span, moving),
                )
            except ChunkCorrupt as error:
                self._check_unchanged(error.chunk, buffer)
                raise
            with self._lock:
                self._sent_bytes += span.length
            for block in run:
                moving.moved(block)

        return move

    def _check_unchanged(self, block: int, buffer: memoryview) -> None:
        at = block * DIGEST_BYTES
        if hash_block(self._contents, block, buffer) != self._digests[at : at + DIGEST_BYTES]:
            raise SourceChanged(f"block {block} of what is pushed was changed meanwhile")

    def _send_span(self, sock: socket.socket, span: Span, moving: Moving) -> None:
        sender = Sender(sock, self._upload.connections.limits.idle_s)
        for piece in self._contents.pieces(span):
            for step in _steps(piece, self._step_bytes):
                done = 0
                while done < piece_length(step):
                    try:
                        sent = sender.send_step(step, done)
                    except ShortRead as error:
                        raise SourceChanged(f"{self._upload.label}: {error}") from error
                    moving.pace(sent)
                    done += sent


def _steps(piece: Piece, most: int) -> Iterator[Piece]:
    """A piece in parts of so many bytes at the most."""
    for start in range(0, piece_length(piece), most):
        count = min(most, piece_length(piece) - start)
        if isinstance(piece, FilePart):
            yield FilePart(piece.file, piece.offset + start, count)
        elif isinstance(piece, Several):
            yield piece.part(start, count)
        else:
            yield piece[start : start + count]
