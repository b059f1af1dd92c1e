"""Senders and inboxes for tests: processes as a user would start them, and requests by hand."""

import contextlib
import json
import os
import re
import socket
import sys
from urllib.parse import urlsplit

from blake3 import blake3

import weighlock
from process.chaos_peers import MB, TESTS, _running

__all__ = ["Wire", "announced", "inbox_process", "laid_out", "pushing", "temporaries"]

PUSHER = """
import json, sys
sys.path.insert(0, sys.argv[2])
import weighlock
from process.chaos_peers import model
url, megabytes, seed, options = json.loads(sys.argv[1])
print("started", flush=True)
print(json.dumps(weighlock.push(url, model(megabytes, seed), **options).sent_bytes), flush=True)
"""


def temporaries(directory):
    """Names of what is not complete."""
    return [name for name in os.listdir(directory) if ".part-" in name]


@contextlib.contextmanager
def inbox_process(directory, secret, *options, port=0, under=()):
    """`weighlock serve --inbox`; gives the process with its tickets by name, and its port."""
    arguments = ["--inbox", directory, "--secret", secret, "--port", port, "--json", *options]
    command = [*under, sys.executable, "-m", "weighlock", "serve", *map(str, arguments)]
    with _running(command) as process:
        line = process.child.stdout.readline()
        assert line, process.child.stderr.read()
        process.urls = {found["sender"]: found["url"] for found in json.loads(line)["inbox"]}
        process.port = int(re.search(r":(\d+)/i/", line)[1])
        yield process


@contextlib.contextmanager
def pushing(url, megabytes=3.3, seed=1, **options):
    """A process that pushes `model(megabytes, seed)`."""
    given = json.dumps([url, megabytes, seed, options])
    with _running([sys.executable, "-c", PUSHER, given, TESTS]) as process:
        assert process.child.stdout.readline() == "started\n", process.child.stderr.read()
        yield process


def laid_out(tensors, tmp_path):
    """The bytes of a safetensors file of these tensors."""
    path = tmp_path / "laid-out.safetensors"
    weighlock.save(path, tensors, durable=False)
    content = path.read_bytes()
    path.unlink()
    return content


class Wire:
    """Requests to one sender's place in an inbox, byte for byte, over one connection."""

    def __init__(self, url):
        parts = urlsplit(url)
        self._address = parts.hostname, parts.port
        found = re.fullmatch(r"r=([^.]+)\.([0-9a-f]+)", parts.fragment)
        self.name, self.mac = found.groups() if found else ("stranger", None)
        self.base = f"{parts.path}/senders/{self.name}"
        self.sock = socket.create_connection(self._address, 10)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.sock.close()

    def head(self, method, path, headers):
        headers = {"Host": "x", "Weighlock-Mac": self.mac, **headers}
        lines = [f"{name}: {text}" for name, text in headers.items() if text is not None]
        return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode()

    def send(self, method, path, body=b"", **headers):
        """Send a request; names of headers are written with underscores."""
        headers = {name.replace("_", "-"): text for name, text in headers.items()}
        headers = {"Content-Length": len(body), **headers}
        self.sock.sendall(self.head(method, path, headers) + body)

    def reply(self):
        """Status and decoded body of the next reply; None if the connection ended."""
        head = b""
        while b"\r\n\r\n" not in head:
            try:
                data = self.sock.recv(1)
            except ConnectionResetError:
                return None
            if not data:
                return None
            head += data
        length = int(re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)[1])
        body = b""
        while len(body) < length:
            data = self.sock.recv(length - len(body))
            assert data
            body += data
        status = int(head.split()[1])
        is_json = b"application/json" in head
        return status, json.loads(body) if is_json else body

    def ask(self, method, path, body=b"", **headers):
        self.send(method, self.base + path, body, **headers)
        return self.reply()

    def announce(self, content, **headers):
        header = content[: 8 + int.from_bytes(content[:8], "little")]
        headers = {"Weighlock_Size": len(content), **headers}
        return self.ask("PUT", "/header", header, **headers)

    def put(self, content, first, count, **headers):
        body = content[first * MB : (first + count) * MB]
        digests = "".join(blake3(body[at : at + MB]).hexdigest() for at in range(0, len(body), MB))
        return self.ask(
            "PUT", f"/blocks/{first}", body, **{"Weighlock_Digests": digests, **headers}
        )

    def finish(self, content, **said):
        digests = b"".join(
            blake3(content[at : at + MB]).digest() for at in range(0, len(content), MB)
        )
        report = {"state": "landed", "root": blake3(digests).hexdigest(), **said}
        return self.ask("POST", "", json.dumps(report).encode())


def announced(inbox, content, name="a"):
    """A wire over which a file was announced."""
    wire = Wire(inbox.url_for(name))
    assert wire.announce(content)[0] == 200
    return wire
