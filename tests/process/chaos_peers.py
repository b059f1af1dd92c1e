"""Both sides of a transfer for tests: owners in processes of their own, owners that lie, receivers.

Nothing here knows the inside of the library: owners and receivers are what a user would write.
"""

import contextlib
import json
import os
import queue
import re
import select
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass, field

import numpy as np

import weighlock
from waiting import DEADLINE_S

IMPATIENT = weighlock.Limits(idle_s=0.7, patience_s=1, head_s=1, connect_s=0.7)

MB = 1 << 20


def model(megabytes=3.3, seed=1):
    """A model whose blocks all differ, with tensors that cross their bounds."""
    dice = np.random.default_rng(seed)
    count = int(megabytes * MB) // 4
    return {
        "large": dice.random(count - 100, np.float32),
        "small": dice.random((10, 10), np.float32),
        "scalar": np.float64(seed),
    }


def same(catalog, tensors):
    """Whether a catalog holds exactly these tensors."""
    return set(catalog) == set(tensors) and all(
        catalog[name].load().tobytes() == np.asarray(array).tobytes()
        for name, array in tensors.items()
    )


def holds(path, tensors):
    """Whether a file holds exactly these tensors."""
    with weighlock.open(path) as catalog:
        return same(catalog, tensors)


def parts(directory):
    """Names of what interrupted fetches left in a directory."""
    return [name for name in os.listdir(directory) if ".part-" in name]


class InThread:
    """A call in a thread of its own; what it returned or raised is kept."""

    def __init__(self, call, *args, **options):
        self.error = self.result = None
        self._call = lambda: call(*args, **options)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self):
        try:
            self.result = self._call()
        except BaseException as error:
            self.error = error

    def end(self, timeout_s=DEADLINE_S):
        """What it returned; raises what it raised."""
        self.thread.join(timeout_s)
        assert not self.thread.is_alive(), "the call did not return"
        if self.error is not None:
            raise self.error
        return self.result


# --- owners in a process ---

OWNER = """
import json, resource, sys, threading
sys.path.insert(0, sys.argv[2])
import weighlock
from process.chaos_peers import model
options = json.loads(sys.argv[1])
if options.get("nofile"):
    resource.setrlimit(resource.RLIMIT_NOFILE, (options["nofile"], options["nofile"]))
server = weighlock.Server(
    options.get("host", "127.0.0.1"),
    options.get("port", 0),
    insecure="host" in options,
    limits=weighlock.Limits(**options.get("limits", {})),
)
tensors = options["path"] and weighlock.open(options["path"]) or model(options["megabytes"])
print(server.share(tensors).url, flush=True)
sys.stdin.read()  # until told to stop
server.close()
"""

TESTS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@dataclass
class Process:
    """A process of the library, and the URL of what it offers."""

    child: subprocess.Popen
    url: str = ""

    @property
    def pid(self):
        return self.child.pid

    def stop(self):
        """Tell an owner to close its server and end."""
        self.child.stdin.close()
        self.child.stdin = None  # else waiting for its output would write to it

    def status(self, name):
        """A number out of /proc/PID/status."""
        with open(f"/proc/{self.pid}/status") as status:
            return int(re.search(rf"{name}:\s+(\d+)", status.read())[1])

    def cpu_s(self):
        """Processor time it has used."""
        with open(f"/proc/{self.pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def _running(command):
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield Process(child)
    finally:
        if child.poll() is None:
            child.kill()
        child.communicate(timeout=DEADLINE_S)


@contextlib.contextmanager
def owner(megabytes=3.3, *, path=None, netns=None, **options):
    """A process that shares `model(megabytes)`, or the file at `path`."""
    options |= {"megabytes": megabytes, "path": path and str(path)}
    within = ["ip", "netns", "exec", netns] if netns else []
    with _running([*within, sys.executable, "-c", OWNER, json.dumps(options), TESTS]) as process:
        process.url = process.child.stdout.readline().strip()
        assert process.url, process.child.stderr.read()
        yield process


@contextlib.contextmanager
def serve(path, secret, port=0):
    """`weighlock serve` of one file."""
    arguments = [path, "--secret", secret, "--port", port, "--json"]
    command = [sys.executable, "-m", "weighlock", "serve", *map(str, arguments)]
    with _running(command) as process:
        line = process.child.stdout.readline()
        assert line, process.child.stderr.read()
        process.url = json.loads(line)["shares"][0]["url"]
        yield process


@contextlib.contextmanager
def pull(url, path, *options):
    """`weighlock pull` under way."""
    command = [sys.executable, "-m", "weighlock", "pull", url, path, *options]
    with _running([*map(str, command)]) as process:
        yield process


# --- an owner that says what the test tells it to ---


@dataclass(frozen=True)
class Request:
    """What a receiver asked, and which of its requests of this kind it was, from 0."""

    target: str
    number: int
    first: int | None
    last: int | None

    @property
    def kind(self):
        """file, digests or report"""
        if "/receivers/" in self.target:
            return "report"
        return "digests" if "/digests/" in self.target else "file"


def reply(status, headers, body=b""):
    """The bytes of a reply; a length that is given is not corrected."""
    headers = {"Content-Length": len(body), **headers}
    lines = [f"{name}: {text}" for name, text in headers.items() if text is not None]
    return "\r\n".join([f"HTTP/1.1 {status} X", *lines, "", ""]).encode("latin-1") + body


@dataclass
class Scripted:
    """An owner of a file that answers with `answer(request)`, to the letter.

    What `answer` returns is sent; None closes the connection; a callable is given the socket.
    """

    content: bytes
    answer: object = None
    url: str = ""
    requests: list = field(default_factory=list)

    def honest(self, request):
        """What an owner that does not lie would answer."""
        from blake3 import blake3

        if request.kind == "report":
            return reply(200, {}, b'{"lives":true}')
        if request.kind == "digests":
            blocks = range(0, len(self.content), MB)
            digests = b"".join(blake3(self.content[at : at + MB]).digest() for at in blocks)
            return reply(200, {"Weighlock": 1}, digests)
        first, last = request.first, min(request.last, len(self.content) - 1)
        return self.range(first, self.content[first : last + 1])

    def range(self, first, body, **headers):
        """A reply that says it is a range from there."""
        said = {
            "ETag": '"one"',
            "Weighlock": 1,
            "Content-Range": f"bytes {first}-{first + len(body) - 1}/{len(self.content)}",
        }
        return reply(206, {**said, **headers}, body)

    def __enter__(self):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._wake, self._woken = os.pipe()
        self._threads = queue.SimpleQueue()
        self.is_ending = False
        self.hung = threading.Event()
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/s/x/model.safetensors"
        return self

    def __exit__(self, *_):
        self.is_ending = True
        os.close(self._woken)  # whoever waits sees the end of the pipe
        self._accepting.join()
        while not self._threads.empty():
            self._threads.get().join()
        self._listener.close()
        os.close(self._wake)

    def _accept(self):
        while True:
            ready, _, _ = select.select([self._listener, self._wake], [], [])
            if self._wake in ready:
                return
            sock, _ = self._listener.accept()
            thread = threading.Thread(target=self._converse, args=(sock,))
            self._threads.put(thread)
            thread.start()

    def _converse(self, sock):
        with sock, contextlib.suppress(OSError):
            sock.settimeout(DEADLINE_S)
            while (head := self._head(sock)) is not None:
                answer = (self.answer or self.honest)(self._request(head))
                if answer is None:
                    return
                if callable(answer):
                    answer(sock)
                    return
                sock.sendall(answer)

    def _head(self, sock):
        head = b""
        while b"\r\n\r\n" not in head:
            ready, _, _ = select.select([sock, self._wake], [], [])
            if self._wake in ready or not (data := sock.recv(65536)):
                return None
            head += data
        return head.decode("latin-1")

    def _request(self, head):
        found = re.search(r"range: bytes=(\d+)-(\d+)", head, re.IGNORECASE)
        first, last = map(int, found.groups()) if found else (None, None)
        target = head.split(" ")[1]
        kind = Request(target, 0, first, last).kind
        number = sum(request.kind == kind for request in self.requests)
        request = Request(target, number, first, last)
        self.requests.append(request)
        return request

    def hang(self, sock):
        """Keep the connection and say nothing more; `hung` tells that it came to this."""
        self.hung.set()
        select.select([self._wake], [], [])
