"""The body of a request, from a socket into buffers. Knows sockets and lengths; not HTTP.

Every wait is bounded: a peer that sends nothing, or next to nothing, is given up.
"""

import socket
import ssl
import struct
import time

from weighlock.errors import PeerLost, TransferTimeout

__all__ = ["Incoming"]

_LEAST_RATE = 256
"""Bytes a second below which a peer is not slow but holding a connection."""

_WAIT_ALL = getattr(socket, "MSG_WAITALL", 0)


class Incoming:
    """Bytes that are announced and not yet here.

    Args:
        sock: where they come from.
        first: what of them, and perhaps of what follows, was read already.
        length: how many there are.
        idle_s: time without a byte after which the peer is given up.
    """

    def __init__(self, sock: socket.socket, first: bytes, length: int, idle_s: float) -> None:
        self._sock = sock
        self._first = memoryview(first)
        self.left = length
        """Bytes still to be read."""
        self._idle_s = idle_s
        self._flags = 0 if isinstance(sock, ssl.SSLSocket) else _WAIT_ALL
        self._started = time.monotonic()
        self._received = 0
        if self._flags:
            # The kernel's own timeout, as for sending: the socket itself blocks.
            timeout = struct.pack("ll", int(idle_s), int(idle_s % 1 * 1_000_000))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)

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
        done = min(len(self._first), len(buffer))
        buffer[:done] = self._first[:done]
        self._first = self._first[done:]
        while done < len(buffer):
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
            self._received += got
            elapsed = time.monotonic() - self._started
            if elapsed > self._idle_s and self._received < _LEAST_RATE * elapsed:
                raise TransferTimeout(
                    f"{self._received:,} bytes in {elapsed:.0f} s: the peer sends too little",
                    phase="idle",
                )
        self.left -= done

    def drain(self) -> None:
        """Read what is left and forget it, so that the connection can go on."""
        buffer = memoryview(bytearray(min(self.left, 64 * 1024)))
        while self.left:
            self.fill(buffer[: min(len(buffer), self.left)])
