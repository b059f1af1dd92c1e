"""The body of a request, from a socket into buffers. Knows sockets and lengths; not HTTP.

Every wait is bounded: a peer that sends nothing, or next to nothing, is given up.
"""

import socket
import ssl
import time
from collections.abc import Callable

from weighlock.errors import PeerLost, TransferTimeout
from weighlock.sources.pace import Pace
from weighlock.sources.timeouts import set_timeout

__all__ = ["Incoming"]

_WAIT_ALL = getattr(socket, "MSG_WAITALL", 0)


class Incoming:
    """Bytes that are announced and not yet here.

    Args:
        sock: where they come from.
        first: what of them, and perhaps of what follows, was read already.
        length: how many there are.
        idle_s: time without a byte after which the peer is given up.
        ask: called before the first of them is awaited, if none is here: the peer may be waiting to
            hear that they are wanted.
    """

    def __init__(
        self,
        sock: socket.socket,
        first: bytes,
        length: int,
        idle_s: float,
        ask: Callable[[], None] | None = None,
    ) -> None:
        self._sock = sock
        self._first = memoryview(first)
        self.left = length
        """Bytes still to be read."""
        self._idle_s = idle_s
        self._ask = None if first else ask
        self._flags = 0 if isinstance(sock, ssl.SSLSocket) else _WAIT_ALL
        self._pace = Pace(idle_s)
        set_timeout(sock, idle_s)

    @property
    def is_awaited(self) -> bool:
        """Whether the peer knows that it may send."""
        return self._ask is None

    @property
    def behind(self) -> bytes:
        """What was read already and belongs to what follows."""
        return bytes(self._first)

    def fill(self, buffer: memoryview) -> None:
        """Fill the buffer, which is not longer than what is left.

        Raises:
            PeerLost: the connection ended before.
            TransferTimeout: nothing, or next to nothing, comes.
        """
        if self._ask is not None:
            ask, self._ask = self._ask, None
            ask()
        done = min(len(self._first), len(buffer))
        buffer[:done] = self._first[:done]
        self._first = self._first[done:]
        while done < len(buffer):
            began = time.monotonic()
            try:
                got = self._sock.recv_into(buffer[done:], 0, self._flags)
            except (BlockingIOError, TimeoutError) as error:
                raise TransferTimeout(
                    f"the peer sent nothing for {self._idle_s:g} s", phase="idle"
                ) from error
            except OSError as error:
                raise PeerLost(f"the connection broke: {error.strerror or error}") from error
            if not got:
                raise PeerLost(f"the connection ended with {self.left - done:,} bytes to come")
            done += got
            if self._pace.is_too_slow(time.monotonic() - began, got):
                raise TransferTimeout("the peer sends too little", phase="idle")
        self.left -= done

    def drain(self) -> None:
        """Read what is left and forget it, so that the connection can go on."""
        buffer = memoryview(bytearray(min(self.left, 64 * 1024)))
        while self.left:
            self.fill(buffer[: min(len(buffer), self.left)])
