"""A reply as it comes over its socket, read with suspicion. Knows `http.client`'s reader, and time.

`http.client` takes the end of a connection for the end of a head, and waits as long as bytes
trickle in. Here a head that breaks off is a lost peer; each head has its time and its size, each
body a least rate. Bodies go from the socket into the caller's buffer, past every other.
"""

import http.client
import socket
import ssl
import time
from typing import Any

from weighlock.sources.pace import Pace

__all__ = ["MOST_HEAD_BYTES", "Reply"]

MOST_HEAD_BYTES = 256 * 1024

_HEAD_PIECE_BYTES = 4096
"""Received at once of a head; what it brings of the body is copied once more."""


class _Reader:
    """Stands for the file that `http.client` makes of a socket for each reply."""

    def __init__(self, sock: socket.socket, idle_s: float) -> None:
        self._sock = sock
        # Nothing is read from it: the socket stays open as long as a file of it is.
        self._keeper = sock.makefile("rb", 0)
        self._is_tls = isinstance(sock, ssl.SSLSocket)
        self._held = b""
        self._at = 0
        """Where what was not taken yet of it begins."""
        self._pace = Pace(idle_s)
        self._deadline: float | None = time.monotonic() + idle_s
        self._head_bytes = 0
        self._between_bytes = 0
        """Read as lines since the last bytes of the body: lengths of chunks, trailers."""

    def makefile(self, mode: str) -> "_Reader":
        """What `http.client` asks its socket for."""
        return self

    def head_is_over(self) -> None:
        """From here on the body comes."""
        self._deadline = None

    def readline(self, limit: int = 65_537) -> bytes:
        """A whole line, or so many bytes of a longer one. A head must not end within one."""
        line = self._taken_line(limit)
        while len(line) < limit and not line.endswith(b"\n"):
            if self._deadline is not None:
                self._check_head(line)
            if not self._hold():
                if self._deadline is None:
                    break
                raise http.client.RemoteDisconnected("the connection ended within a head")
            line += self._taken_line(limit - len(line))
        if self._deadline is not None:
            self._check_head(line)
            self._head_bytes += len(line)
        else:
            self._between_bytes += len(line)
            if self._between_bytes > MOST_HEAD_BYTES:
                raise http.client.LineTooLong("trailer")
        return line

    def _check_head(self, line: bytes) -> None:
        if self._head_bytes + len(line) > MOST_HEAD_BYTES:
            raise http.client.LineTooLong("head")
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise TimeoutError("the head of a reply takes too long")

    def read(self, count: int = -1) -> bytes:
        """So many bytes, fewer at the end of the connection; all up to there if not told."""
        found = bytearray()
        while count < 0 or len(found) < count:
            if self._at == len(self._held) and not self._hold():
                break
            found += self._taken(len(self._held) if count < 0 else count - len(found))
        return bytes(found)

    def readinto(self, buffer: memoryview) -> int:
        """Fill the buffer; it stays short at the end of the connection."""
        self._between_bytes = 0
        held = self._taken(len(buffer))
        done = len(held)
        while done < len(buffer):
            got = self._receive(buffer[done:], socket.MSG_WAITALL)
            if not got:
                break
            done += got
        # Last: the first touch of a new huge page takes as long as receiving a quarter of it, and
        # here other threads would wait for the interpreter meanwhile.
        buffer[: len(held)] = held
        return done

    def flush(self) -> None:
        """Nothing is written."""

    def close(self) -> None:
        """Let the socket go."""
        self._keeper.close()

    def _taken(self, count: int) -> bytes:
        """What is here already, so many bytes of it at the most."""
        taken = self._held[self._at : self._at + count]
        self._at += len(taken)
        return taken

    def _taken_line(self, limit: int) -> bytes:
        """The same up to the end of a line."""
        end = self._held.find(b"\n", self._at) + 1
        return self._taken(min(limit, (end or len(self._held)) - self._at))

    def _hold(self) -> int:
        piece = memoryview(bytearray(_HEAD_PIECE_BYTES))
        got = self._receive(piece)
        self._held, self._at = bytes(piece[:got]), 0
        return got

    def _receive(self, buffer: memoryview, flags: int = 0) -> int:
        began = time.monotonic()
        try:
            if self._is_tls:
                # `recv_into` asks for the same with more ado, for each record of 16 KiB.
                got = self._sock.read(len(buffer), buffer)  # type: ignore[attr-defined]
            else:
                got = self._sock.recv_into(buffer, 0, flags)
        except BlockingIOError as error:
            raise TimeoutError("nothing came for too long") from error
        if self._pace.is_too_slow(time.monotonic() - began, got) and self._deadline is None:
            raise TimeoutError("next to nothing comes")
        return int(got)


class Reply(http.client.HTTPResponse):
    """A reply whose head must be here in so many seconds, and whose body must not trickle."""

    def __init__(self, sock: socket.socket, *args: Any, most_s: float, **options: Any) -> None:
        reader: Any = _Reader(sock, most_s)
        super().__init__(reader, *args, **options)
        self._reader = reader

    def _read_status(self) -> tuple[int, int, str]:
        # What comes before the reply proper is passed over, as `http.client` does with 100 only.
        version, status, reason = super()._read_status()  # type: ignore[misc]
        return version, 100 if 101 < status < 200 else status, reason

    def begin(self) -> None:
        """Read the head."""
        super().begin()
        self._reader.head_is_over()
