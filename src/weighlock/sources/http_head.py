"""A reply as it comes over its socket, read with suspicion. Knows `http.client`'s reader, and time.

`http.client` takes the end of a connection for the end of a head, and waits as long as bytes
trickle in. Here a head that breaks off is a lost peer; each head has its time and its size, each
body a least rate. Bodies go from the socket into the caller's buffer, past every other.

`http.client` also reads heads as mail, with some hundred calls for each, and takes the first of two
lengths. Of a reply only a few headers count, and they are read here.
"""

import http.client
import re
import socket
import ssl
import time
from collections.abc import Iterable
from typing import Any

from weighlock.sources.pace import Pace

__all__ = ["MOST_HEAD_BYTES", "Reply"]

MOST_HEAD_BYTES = 256 * 1024

_MOST_LINES = 1000
"""Of one head: each may go on with the one before, which is copied then."""

_SPACE = " \t"

_HEAD_PIECE_BYTES = 4096
"""Received at once of a head; what it brings of the body is copied once more."""

_PLAIN_HEAD = re.compile(rb"(?:[!-9;-~]+:[^\r\n]*\r\n){1,100}\r\n")
_PLAIN_HEADER = re.compile(r"([!-9;-~]+):[ \t]*(.*)\r\n")
"""What nearly all servers write. It is read at once: one by one, lines and headers take Python as
long as anything else about a range."""


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
        self._line_bytes = 0
        """Read as lines: of the head, or since the last bytes of the body (chunks, trailers)."""

    def makefile(self, mode: str) -> "_Reader":
        """What `http.client` asks its socket for."""
        return self

    def head_is_over(self) -> None:
        """From here on the body comes."""
        self._deadline = None
        self._line_bytes = 0

    def plain_head(self) -> str | None:
        """The lines of a head that is here, if each is one header and no more; with their ends."""
        found = _PLAIN_HEAD.match(self._held, self._at)
        if found is None:
            return None
        self._line_bytes += found.end() - self._at
        self._at = found.end()
        return found[0].decode("latin-1")

    def head(self) -> list[bytes]:
        """The lines of a head up to the empty one, without their ends."""
        lines: list[bytes] = []
        while True:
            line = self.readline()
            if line[-1:] != b"\n":
                raise http.client.LineTooLong("header line")  # its rest is no line of its own
            line = line[:-1].removesuffix(b"\r")
            if not line:
                return lines
            lines.append(line)
            if len(lines) > _MOST_LINES:
                raise http.client.HTTPException(f"a head of more than {_MOST_LINES} lines")

    def readline(self, limit: int = 65_537) -> bytes:
        """A whole line, or so many bytes of a longer one. A head must not end within one."""
        line = self._taken_line(limit)
        while len(line) < limit and not line.endswith(b"\n"):
            self._check_time()
            if not self._hold():
                if self._deadline is None:
                    break
                raise http.client.RemoteDisconnected("the connection ended within a head")
            line += self._taken_line(limit - len(line))
        self._line_bytes += len(line)
        if self._line_bytes > MOST_HEAD_BYTES:
            raise http.client.LineTooLong("trailer" if self._deadline is None else "head")
        return line

    def _check_time(self) -> None:
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
        self._line_bytes = 0
        wanted = len(buffer)
        held = self._taken(wanted) if self._at < len(self._held) else b""
        done = len(held)
        while done < wanted:
            got = self._receive(buffer[done:] if done else buffer, socket.MSG_WAITALL)
            if not got:
                break
            done += got
        if held:
            # Last: the first touch of a new huge page takes as long as receiving a quarter of it,
            # and here other threads would wait for the interpreter meanwhile.
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
        first = self._at
        end = self._held.find(b"\n", first) + 1 or len(self._held)
        self._at = min(end, first + limit)
        return self._held[first : self._at]

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


class _Headers:
    """The headers of a reply, in any spelling of their names."""

    __slots__ = ("_values",)

    def __init__(self, values: dict[str, list[str]]) -> None:
        self._values = values
        """By name in small letters, in the order in which they came."""

    @classmethod
    def of_plain(cls, text: str) -> "_Headers":
        """Those of a head of plain headers."""
        found = _PLAIN_HEADER.findall(text)
        values = {name.lower(): [value.rstrip(_SPACE)] for name, value in found}
        if len(values) < len(found):  # some come more than once
            values = {name: [] for name in values}
            for name, value in found:
                values[name.lower()].append(value.rstrip(_SPACE))
        return cls(values)

    @classmethod
    def of_lines(cls, lines: Iterable[bytes]) -> "_Headers":
        """Those of any head, by its lines without their ends.

        What is no header is passed over; a line that begins with a space goes on with the one
        before.
        """
        found: dict[str, list[str]] = {}
        values: list[str] = []
        for line in lines:
            text = line.decode("latin-1")
            if text[0] in " \t":
                if values:
                    values[-1] = f"{values[-1]} {text.strip(_SPACE)}".strip(_SPACE)
                continue
            name, colon, value = text.partition(":")
            if not colon or not name or not name.isprintable() or " " in name:
                values = []
                continue
            values = found.setdefault(name.lower(), [])
            values.append(value.strip(_SPACE))
        return cls(found)

    def get(self, name: str, default: str | None = None) -> str | None:
        """The first of that name."""
        values = self._values.get(name.lower())
        return values[0] if values else default

    def get_all(self, name: str, default: list[str] | None = None) -> list[str] | None:
        """All of that name."""
        return self._values.get(name.lower(), default)


class Reply(http.client.HTTPResponse):
    """A reply whose head must be here in so many seconds, and whose body must not trickle."""

    def __init__(self, sock: socket.socket, *args: Any, most_s: float, **options: Any) -> None:
        reader: Any = _Reader(sock, most_s)
        super().__init__(reader, *args, **options)
        self._reader = reader

    def begin(self) -> None:
        """Read the head, which tells how long the body is and whether it is the last.

        Raises:
            HTTPException: it is none, says two things, or has a body in an encoding that no
                request of ours asks for.
        """
        while True:
            version, status, reason = self._read_status()  # type: ignore[attr-defined]
            headers = _headers_of(self._reader)
            if not 100 <= status < 200 or status == 101:
                break  # what comes before the reply proper is passed over
        is_old = version in ("HTTP/1.0", "HTTP/0.9")
        if not is_old and not version.startswith("HTTP/1."):
            raise http.client.UnknownProtocol(version)
        self.headers = self.msg = headers  # type: ignore[assignment]
        self.code = self.status = status
        self.reason = reason.strip()
        self.version = 10 if is_old else 11
        encoding = self.getheader("Transfer-Encoding", "").lower()
        self.chunked = encoding == "chunked"
        self.chunk_left = None
        self.length = None
        if status in (204, 304) or status < 200 or self._method == "HEAD":  # type: ignore[attr-defined]
            self.length = 0
        elif self._method != "CONNECT" and not self.chunked:  # type: ignore[attr-defined]
            if encoding not in ("", "identity"):  # its bytes are not what was asked for
                raise http.client.HTTPException(f"a body that is {encoding[:60]}")
            self.length = _length_of(headers)
        ends = "close" in self.getheader("Connection", "").lower()
        ends = ends or self._check_close()  # type: ignore[attr-defined]
        self.will_close = ends or (self.length is None and not self.chunked)
        self._reader.head_is_over()


def _headers_of(reader: _Reader) -> _Headers:
    """What follows the first line of a head."""
    plain = reader.plain_head()
    return _Headers.of_lines(reader.head()) if plain is None else _Headers.of_plain(plain)


def _length_of(headers: _Headers) -> int | None:
    """How long a body is, if its head says so."""
    told = set(headers.get_all("content-length") or ())
    if len(told) > 1:
        raise http.client.HTTPException(f"lengths {' and '.join(sorted(told))[:60]} of one body")
    text = told.pop() if told else ""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None
