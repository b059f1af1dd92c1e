"""Bytes out of a socket: memory as it lies, files by `sendfile`, files over TLS through a buffer.

Knows sockets and pieces; not HTTP. Every wait is bounded: a peer that does not read is given up.
"""

import contextlib
import errno
import math
import os
import select
import socket
import ssl
import struct
import time
from collections.abc import Sequence

import numpy as np

from weighlock.errors import ShortRead, SourceError, TransferTimeout
from weighlock.limits import Budget
from weighlock.sources.pace import Pace
from weighlock.sources.timeouts import set_timeout
from weighlock.tensors.arrays import byte_view, empty
from weighlock.transfer.pieces import (
    SMALL_BYTES,
    Buffer,
    Piece,
    Sendable,
    Several,
    bytes_of,
    piece_length,
)

__all__ = ["Sender", "wait_readable"]

_LEAST_STEP_BYTES, _MOST_STEP_BYTES = 1024 * 1024, 8 * 1024 * 1024
"""Sent at a time: between two steps a revoked share is noticed."""

_STEP_S = 0.05
"""What takes longer is sent in smaller steps, what takes less than half of it in larger ones. Each
step is a call with all that lies around it, run when the bytes it sends have emptied the caches."""

_TLS_SENT_BYTES = 64 * 1024
"""Given to TLS at a time: its `send` comes back when all of it is sent, and only then is it seen
that the peer takes something."""

_TLS_BYTES = 256 * 1024
_LEAST_TLS_BYTES = 32 * 1024
_WAIT_S = 5.0
"""How long a reply waits for room in the budget."""

_OF_THE_FILE = frozenset(
    getattr(errno, name)
    for name in ("EIO", "ESTALE", "ENXIO", "EBADMSG", "EUCLEAN")
    if hasattr(errno, name)  # not every system has each, and errors of ours have none at all
)
"""What `sendfile` says of a disk; connections break otherwise."""

_HUNG_UP = getattr(select, "POLLRDHUP", 0)
"""Linux only: elsewhere such a peer is given up like any other that takes nothing."""


def wait_readable(sock: socket.socket, timeout_s: float) -> bool:
    """Wait for something to read."""
    if isinstance(sock, ssl.SSLSocket) and sock.pending():
        return True
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))


class Sender:
    """The way out of one connection.

    Args:
        sock: where bytes go.
        idle_s: time in which a peer must take something.
        budget: where a buffer counts that TLS needs for files.
        hung_up_s: the same for one that has hung up; as long as for others if not given. That alone
            says little: who has said all it wanted to ask may still read on.
    """

    def __init__(
        self,
        sock: socket.socket,
        idle_s: float,
        budget: Budget | None = None,
        *,
        hung_up_s: float | None = None,
    ) -> None:
        self._sock = sock
        self._idle_s = idle_s
        self._look_s = idle_s
        """How long the kernel waits before this looks whether to go on."""
        self._is_tls = isinstance(sock, ssl.SSLSocket)
        self._buffer: memoryview | None = None
        self._budget = budget
        self._held = contextlib.ExitStack()
        self._pace = Pace(idle_s)
        self._step_bytes = _LEAST_STEP_BYTES
        set_timeout(sock, idle_s)  # a blocking sendfile then needs no waiting of ours in between
        if hung_up_s is not None and 0 < hung_up_s < idle_s:
            self._look_s = idle_s / math.ceil(idle_s / hung_up_s)
            if not self._is_tls:
                timeout = struct.pack("ll", int(self._look_s), int(self._look_s % 1 * 1_000_000))
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)

    def begin(self) -> None:
        """A new reply: the least rate is counted from here."""
        self._pace.begin()

    def end(self) -> None:
        """The reply is over: others may need the room."""
        if self._budget is not None:
            self._buffer = None
            self._held.close()

    def send_bytes(self, data: bytes, *, more: bool = False) -> None:
        """Send bytes; `more` follow at once."""
        if more and not self._is_tls:
            self._send(memoryview(data), getattr(socket, "MSG_MORE", 0))
        else:
            self._send(memoryview(data))

    def send_step(self, piece: Piece, done: int) -> int:
        """Send some of a piece, from byte `done` on; returns how many bytes that were.

        Raises:
            ShortRead: the file has become shorter.
            TransferTimeout: the peer takes nothing, or next to nothing.
            OSError: the connection broke.
        """
        step = min(self._step_bytes, piece_length(piece) - done)
        began = time.monotonic()
        if isinstance(piece, memoryview):
            self._send(piece[done : done + step])
        elif isinstance(piece, Several):
            part = piece.part(done, step)
            if self._is_tls:
                self._send_one_by_one(part.buffers)
            else:
                self._send_several(part.buffers)
        elif self._is_tls:
            view = self._tls_buffer()[:step]
            step = len(view)
            piece.file.read_into(piece.offset + done, view)
            began = time.monotonic()
            self._send(view)
        else:
            self._sendfile(piece.file, piece.offset + done, step)
        took_s = time.monotonic() - began
        if self._pace.is_too_slow(took_s, step):
            raise TransferTimeout("the peer takes next to nothing", phase="idle")
        if took_s > _STEP_S:
            self._step_bytes = max(self._step_bytes // 2, _LEAST_STEP_BYTES)
        elif took_s < _STEP_S / 2 and step >= self._step_bytes:
            self._step_bytes = min(self._step_bytes * 2, _MOST_STEP_BYTES)
        return step

    def _tls_buffer(self) -> memoryview:
        if self._buffer is None:
            size = _TLS_BYTES
            if self._budget is not None:
                size = self._budget.fitting(size, _LEAST_TLS_BYTES)
                self._held.enter_context(self._budget.hold(size, _WAIT_S))
            self._buffer = byte_view(empty((size,), np.dtype(np.uint8)))
        return self._buffer

    def _send(self, view: memoryview, flags: int = 0) -> None:
        if self._is_tls and self._look_s < self._idle_s:
            self._sock.settimeout(self._look_s)  # of both directions: only while this one is used
        try:
            done, since = 0, time.monotonic()
            most = _TLS_SENT_BYTES if self._is_tls else len(view)
            while done < len(view):
                try:
                    done += self._sock.send(view[done : done + most], flags)
                    since = time.monotonic()
                except (BlockingIOError, TimeoutError) as error:
                    self._look(since, error)
        finally:
            if self._is_tls and self._look_s < self._idle_s:
                self._sock.settimeout(self._idle_s)

    def _send_several(self, buffers: Sequence[Buffer]) -> None:
        left = list(buffers)
        since = time.monotonic()
        while left:
            try:
                sent = self._sock.sendmsg(left)  # type: ignore[arg-type]
                since = time.monotonic()
            except (BlockingIOError, TimeoutError) as error:
                self._look(since, error)
                continue
            whole = 0
            while whole < len(left) and sent >= left[whole].nbytes:
                sent -= left[whole].nbytes
                whole += 1
            del left[:whole]
            if sent:
                left[0] = bytes_of(left[0])[sent:]

    def _send_one_by_one(self, buffers: Sequence[Buffer]) -> None:
        """The same where only one can be sent at a time: small neighbours are copied together."""
        small: list[memoryview] = []
        for view in map(bytes_of, buffers):
            if len(view) < SMALL_BYTES:
                small.append(view)
                continue
            self._send_copied(small)
            small = []
            self._send(view)
        self._send_copied(small)

    def _send_copied(self, views: Sequence[memoryview]) -> None:
        if len(views) < 2:  # it takes no room to send one as it lies
            for view in views:
                self._send(view)
            return
        buffer, used = self._tls_buffer(), 0
        for rest in views:
            while len(rest):
                some = rest[: len(buffer) - used]
                buffer[used : used + len(some)] = some
                used, rest = used + len(some), rest[len(some) :]
                if used == len(buffer):
                    self._send(buffer)
                    used = 0
        self._send(buffer[:used])

    def _sendfile(self, file: Sendable, offset: int, count: int) -> None:
        with file.descriptor() as fd:
            try:
                self._send_from(fd, offset, count)
            except OSError as error:
                if error.errno not in _OF_THE_FILE:
                    raise
                raise SourceError(
                    f"{file.label}: cannot be read from byte {offset:,} on: {error.strerror}",
                    errno=error.errno,
                ) from error

    def _send_from(self, fd: int, offset: int, count: int) -> None:
        done, since = 0, time.monotonic()
        while done < count:
            try:
                sent = os.sendfile(self._sock.fileno(), fd, offset + done, count - done)
                since = time.monotonic()
            except (BlockingIOError, TimeoutError) as error:
                self._look(since, error)
                continue
            if sent == 0:
                raise ShortRead(f"the file ends at byte {offset + done:,}", wanted=count, got=done)
            done += sent

    def _look(self, since: float, error: OSError) -> None:
        """The peer has taken nothing for a while: raise unless it is to be waited for."""
        waited_s = time.monotonic() - since
        if self._look_s >= self._idle_s or waited_s >= self._idle_s:
            raise TransferTimeout(
                f"the peer took nothing for {self._idle_s:g} s", phase="idle"
            ) from error
        if _has_hung_up(self._sock):
            raise BrokenPipeError(
                errno.EPIPE, f"the peer has hung up, and took nothing for {waited_s:.1f} s"
            ) from error


def _has_hung_up(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, _HUNG_UP)
    return bool(poll.poll(0))
