"""How long a socket waits. Knows the kernel's timeouts and TLS; not what is sent."""

import socket
import ssl
import struct

__all__ = ["set_timeout"]


def set_timeout(sock: socket.socket, idle_s: float) -> None:
    """Let every wait of a connected socket end after so long.

    By the kernel's own timeout where that is possible: Python's costs a `poll` before each receive,
    and gives up its interpreter lock once more for it. Under TLS it would be tried for ever.
    """
    if isinstance(sock, ssl.SSLSocket):
        sock.settimeout(idle_s)
        return
    sock.settimeout(None)
    most_s = max(idle_s, 0.001)  # zero would be for ever
    timeout = struct.pack("ll", int(most_s), int(most_s % 1 * 1_000_000))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
