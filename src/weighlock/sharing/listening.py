"""Accepting connections: a listening socket, quotas, and threads that serve. Knows no HTTP.

Survives what a listener meets: no descriptors left, peers gone before they are served, floods.
"""

import contextlib
import errno
import logging
import os
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable

from weighlock.errors import DiskError, LocalProtocolError
from weighlock.limits import Limits, check_number

__all__ = ["Listener", "Peer"]

_log = logging.getLogger("weighlock.server")

_BACKLOG = 512
_NO_DESCRIPTORS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n"
    b"Cache-Control: no-store\r\nConnection: close\r\n\r\n"
)


class Peer:
    """One accepted connection, and whether it is in the middle of a reply."""

    def __init__(self, sock: socket.socket, host: str) -> None:
        self.sock = sock
        self.host = host
        self.is_busy = False

    def shut(self) -> None:
        """Wake the thread that serves it, for good."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)


class Listener:
    """Accepts, counts, and gives each connection a thread.

    Args:
        host: the address to bind.
        port: the port, 0 for any.
        serve: called in a thread of its own with each peer; the socket is closed after it.
        limits: how many connections, from one address and in all.
        is_plain: there is no TLS, so that who is turned away can be told. A reply before hands are
            shaken would be taken for a server that speaks no TLS.

    Raises:
        DiskError: the address cannot be bound; `errno` says why.
        LocalProtocolError: it cannot be a port.
    """

    def __init__(
        self,
        host: str,
        port: int,
        serve: Callable[[Peer], None],
        limits: Limits,
        *,
        is_plain: bool = True,
    ) -> None:
        self._serve = serve
        self._limits = limits
        self._is_plain = is_plain
        self._lock = threading.Lock()
        self._peers: dict[Peer, threading.Thread] = {}
        self._per_host: Counter[str] = Counter()
        self._stopping = False
        self.refused = 0
        """Connections turned away because there were too many."""
        self._pid = os.getpid()
        check_number("port", port, None, is_whole=True)
        if not 0 <= port <= 65535:
            raise LocalProtocolError(f"port {port}: ports are numbers from 0 to 65535")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
            self._socket.listen(_BACKLOG)
            self._socket.setblocking(False)
        except OSError as error:
            self._socket.close()
            is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
            hint = "choose another port, or 0 for any" if is_port else "is it one of this machine?"
            raise DiskError(
                f"cannot listen on {host}:{port}: {error.strerror}; {hint}", errno=error.errno
            ) from error
        self.port: int = self._socket.getsockname()[1]
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(
            target=self._accept_all, name="weighlock-accept", daemon=True
        )
        self._thread.start()

    @property
    def is_stopping(self) -> bool:
        """No new requests are to be taken up."""
        return self._stopping

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._peers)

    def close(self, grace_s: float, cut: Callable[[], None] | None = None) -> None:
        """Accept no more; let replies on their way finish for so long, then cut them.

        Args:
            grace_s: how long.
            cut: called then, for what those who serve may wait for besides their peers.
        """
        if os.getpid() != self._pid:
            self._socket.close()
            return
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
            peers = dict(self._peers)
        here = threading.current_thread()  # a peer's, if what was told at an end closes the server
        others = [thread for thread in peers.values() if thread is not here]
        os.write(self._wake_write, b"x")
        self._thread.join()
        # A child that was forked may hold it too, and would leave newcomers waiting, and the port
        # taken: shut, it listens for nobody.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for peer in peers:
            if not peer.is_busy:
                peer.shut()
        until = time.monotonic() + grace_s
        for thread in others:
            thread.join(max(0.0, until - time.monotonic()))
        if cut is not None:
            cut()
        for peer in peers:
            if peers[peer] is not here:
                peer.shut()
        for thread in others:
            thread.join(5)
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _accept_all(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        told = select.poll()
        told.register(self._wake_read, select.POLLIN)
        is_short = False
        while not self._stopping:
            poll.poll()
            if self._stopping:
                return
            try:
                sock, address = self._socket.accept()
            except OSError as error:
                if error.errno in _NO_DESCRIPTORS:
                    if not is_short:  # it is tried ten times a second, and told once
                        _log.warning("no descriptors left for new connections: %s", error.strerror)
                    is_short = True
                    # Still readable: without a pause this would spin until somebody hangs up.
                    told.poll(100)
                continue
            is_short = False
            self._take(sock, str(address[0]))

    def _take(self, sock: socket.socket, host: str) -> None:
        peer = Peer(sock, host)
        thread = threading.Thread(
            target=self._run, args=(peer,), name="weighlock-serve", daemon=True
        )
        with self._lock:
            allowed = (
                not self._stopping
                and len(self._peers) < self._limits.connections
                and self._per_host[host] < self._limits.connections_per_peer
            )
            if allowed:
                self._peers[peer] = thread
                self._per_host[host] += 1
        if not allowed:
            self.refused += 1
            with sock, contextlib.suppress(OSError):
                sock.setblocking(False)
                if self._is_plain:
                    sock.send(_BUSY)
            return
        try:
            thread.start()
        except RuntimeError:  # no more threads
            _log.warning("no thread could be started for a connection")
            self._drop(peer)

    def _run(self, peer: Peer) -> None:
        try:
            self._serve(peer)
        except Exception:
            # The edge of a thread: a fault in serving one peer must not be lost, nor harm others.
            _log.exception("serving %s failed", peer.host)
        finally:
            self._drop(peer)

    def _drop(self, peer: Peer) -> None:
        with contextlib.suppress(OSError):
            peer.sock.close()
        with self._lock:
            if self._peers.pop(peer, None) is not None:
                self._per_host[peer.host] -= 1
                if not self._per_host[peer.host]:
                    del self._per_host[peer.host]
