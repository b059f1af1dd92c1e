"""An HTTP proxy as companies have them: it tunnels to port numbers, and passes plain HTTP on."""

import contextlib
import re
import socket
import threading

from process.plain_server import RawServer

__all__ = ["ForwardProxy"]


class ForwardProxy(RawServer):
    """Leads every host to this machine, whatever its name.

    Args:
        login: what it wants as `Proxy-Authorization`; nothing if not given.
        refusal: the status line it answers with instead of leading anywhere.
    """

    def __init__(self, login=None, refusal=None):
        self.asked = []
        """First lines of requests."""
        self._login = login
        self._refusal = refusal
        super().__init__(self._lead)

    def _lead(self, sock):
        head = _head(sock)
        first = head.partition(b"\r\n")[0].decode()
        self.asked.append(first)
        found = re.search(rb"(?im)^proxy-authorization: (.*)\r$", head)
        if self._login is not None and (found is None or found[1].decode() != self._login):
            sock.sendall(b"HTTP/1.1 407 Who are you\r\nContent-Length: 0\r\n\r\n")
            return
        if self._refusal is not None:
            sock.sendall(f"HTTP/1.1 {self._refusal}\r\nContent-Length: 0\r\n\r\n".encode())
            return
        method, target, _ = first.split(" ")
        port = int(re.search(r":(\d+)(?:/|$)", target)[1])
        with socket.create_connection(("127.0.0.1", port)) as there:
            back = threading.Thread(target=_copy, args=(there, sock))
            back.start()
            if method == "CONNECT":
                sock.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                _copy(sock, there)
            else:
                self._pass_on(head, sock, there)
            back.join()

    def _pass_on(self, head, sock, there):
        """Request for request, as they come over one connection."""
        with contextlib.suppress(OSError):
            while head:
                there.sendall(_direct(head))
                left = int((re.search(rb"(?i)content-length: (\d+)", head) or [0, 0])[1])
                while left and (data := sock.recv(min(left, 65_536))):
                    there.sendall(data)
                    left -= len(data)
                head = _head(sock)
                if head:
                    self.asked.append(head.partition(b"\r\n")[0].decode())
        _end(sock, there)


def _direct(head):
    """The head of a request for the server itself."""
    return re.sub(rb"^(\w+) http://[^/]*", rb"\1 ", head)


def _head(sock):
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        data = sock.recv(1)
        if not data:
            return head
        head += data
    return head


def _copy(source, target):
    with contextlib.suppress(OSError):
        while data := source.recv(65_536):
            target.sendall(data)
    _end(source, target)


def _end(*socks):
    for sock in socks:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
