"""HTTP servers that are not ours: a correct one, and a way to make it as sloppy as a test wants."""

import contextlib
import re
import socket
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

__all__ = ["PlainServer", "RawServer", "Reply", "Request", "asked_range", "ranged"]

ETAG = '"strong-1"'


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def span(self):
        """First byte and the one after the last that are asked for; None for everything."""
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        return found and (int(found[1]), int(found[2]) + 1)


@dataclass
class Reply:
    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    chunked: bool = False


def ranged(request, content, etag=ETAG):
    """What a correct server answers."""
    headers = {"Accept-Ranges": "bytes"} | ({"ETag": etag} if etag else {})
    if etag and request.headers.get("if-match", etag) != etag:
        return Reply(412, headers)
    if request.span is None:
        return Reply(200, headers, content)
    first, last = request.span
    last = min(last, len(content))
    if first >= len(content):
        return Reply(416, headers | {"Content-Range": f"bytes */{len(content)}"})
    headers["Content-Range"] = f"bytes {first}-{last - 1}/{len(content)}"
    return Reply(206, headers, content[first:last])


class PlainServer:
    """Serves bytes by path, on any free port of this machine.

    Args:
        files: content by path.
        behave: from a request and the content (None if there is none) to a reply; a correct one if
            not given.
        tls: a context to serve TLS with.
    """

    def __init__(self, files=None, behave=None, tls=None):
        self.files = dict(files or {})
        self.behave = behave or ranged
        self.requests = []
        self._peers = set()
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = 1 << 20  # head and body in one packet: two would wait for each other

            def setup(self):
                with server._lock:
                    server._peers.add(self.request)
                super().setup()

            def finish(self):
                with contextlib.suppress(OSError):
                    super().finish()
                with server._lock:
                    server._peers.discard(self.request)

            def handle(self):
                with contextlib.suppress(OSError):  # clients hang up when they do not like a reply
                    super().handle()

            def do_GET(self):
                server._answer(self)

            do_HEAD = do_POST = do_PUT = do_GET

            def log_message(self, *arguments):
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.handle_error = lambda *_: None  # a failed handshake is the test's business
        if tls is not None:
            self._http.socket = tls.wrap_socket(self._http.socket, server_side=True)
        self.port = self._http.server_port
        self.origin = f"{'http' if tls is None else 'https'}://127.0.0.1:{self.port}"
        self._http.daemon_threads = False
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._http.shutdown()
        self._thread.join()
        with self._lock:
            peers = list(self._peers)
        for peer in peers:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(peer, socket.SHUT_RDWR)
        self._http.server_close()  # joins the threads of its connections

    def url(self, path):
        return f"{self.origin}/{path.lstrip('/')}"

    def asked(self, path=None):
        """The requests so far, for one path or in all."""
        return [request for request in self.requests if path is None or request.path == path]

    def _answer(self, handler):
        headers = {name.lower(): value for name, value in handler.headers.items()}
        handler.rfile.read(int(headers.get("content-length", 0)))
        request = Request(handler.command, handler.path, headers)
        with self._lock:
            self.requests.append(request)
        content = self.files.get(handler.path.partition("?")[0])
        if content is None and self.behave is ranged:
            reply = Reply(404)
        else:
            reply = self.behave(request, content)
        if "Date" in reply.headers:  # else it would send two
            handler.send_response_only(reply.status)
        else:
            handler.send_response(reply.status)
        sent = dict(reply.headers)
        if reply.chunked:
            sent["Transfer-Encoding"] = "chunked"
        elif reply.status not in (204, 304):
            sent.setdefault("Content-Length", str(len(reply.body)))
        for name, value in sent.items():
            handler.send_header(name, value)
        handler.end_headers()
        if handler.command == "HEAD":
            return
        body = reply.body
        if reply.chunked:
            pieces = [body[n : n + 70_000] for n in range(0, len(body), 70_000)]
            body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
            body += b"0\r\n\r\n"
        handler.wfile.write(body)
        if "Content-Length" in reply.headers and int(reply.headers["Content-Length"]) > len(body):
            handler.close_connection = True


class RawServer:
    """Answers each connection with a function of its socket, in a thread."""

    def __init__(self, answer):
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._socks, self._threads = [], [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listener.close()
        for sock in self._socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in self._socks:
            sock.close()

    def url(self, path):
        return f"http://127.0.0.1:{self.port}{path}"

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self._socks.append(sock)
                self._threads.append(threading.Thread(target=self._serve, args=(sock,)))
                self._threads[-1].start()

    def _serve(self, sock):
        with contextlib.suppress(OSError):
            self._answer(sock)


def asked_range(sock):
    """The next request's range; None when there is none."""
    head = b""
    while b"\r\n\r\n" not in head:
        data = sock.recv(4096)
        if not data:
            return None
        head += data
    first, last = re.search(rb"bytes=(\d+)-(\d+)", head).groups()
    return int(first), int(last) + 1
