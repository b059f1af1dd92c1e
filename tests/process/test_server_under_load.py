"""C11 to C13 and C16: receivers that are slow, many, rude or broken, and a server that lives on.

I17: they waste what they are allowed, and nobody else's time. The server is a process of its own,
so that its memory, threads, descriptors and processor time can be looked at.
"""

import contextlib
import os
import resource
import socket
import subprocess
import threading
import time
from urllib.parse import urlsplit

import pytest

import weighlock
from process.chaos import ORDERLY, Rules
from process.chaos_peers import IMPATIENT, MB, InThread, model, owner, same
from waiting import DEADLINE_S, answers, settled, until
from weighlock.errors import PeerLost

pytest_plugins = ["process.chaos_fixtures"]

KB = 1024


def dial(url, stack=None):
    """A connection to the server of a URL."""
    address = urlsplit(url)
    sock = socket.create_connection((address.hostname, address.port), timeout=DEADLINE_S)
    return sock if stack is None else stack.enter_context(sock)


def asking(url, *lines, method="GET", path=None):
    """The bytes of a request."""
    target = urlsplit(url).path if path is None else path
    return "\r\n".join([f"{method} {target} HTTP/1.1", "Host: x", *lines, "", ""]).encode()


def rest_of(sock):
    """What comes until the server closes or resets the connection."""
    received = bytearray()
    with contextlib.suppress(ConnectionError):
        while data := sock.recv(1 << 20):
            received += data
    return bytes(received)


@pytest.fixture
def many_descriptors():
    """Enough of them for a thousand connections from here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096 if hard == resource.RLIM_INFINITY else min(hard, 4096)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# --- C11: slow on purpose ---


def test_clients_that_hold_connections_are_given_up_and_harm_no_receiver(no_leaks):
    """Two hundred: some say nothing, some a byte now and then, some never read what they asked for.

    What the others still get meanwhile is measured: `python -m benchmarks --only receivers-32`.
    """
    room = {"connections": 300, "connections_per_peer": 300}  # they all come from here
    with (
        owner(24, limits={"head_s": 1, "idle_s": 1, **room}) as peer,
        contextlib.ExitStack() as stack,
    ):
        idle = peer.status("Threads")
        silent = [dial(peer.url, stack) for _ in range(67)]
        dripping = [dial(peer.url, stack) for _ in range(67)]
        deaf = [dial(peer.url, stack) for _ in range(66)]
        for sock in deaf:
            sock.sendall(asking(peer.url))
        over = threading.Event()

        def drip():
            request, alive = asking(peer.url), set(dripping)
            for at in range(len(request)):
                for sock in list(alive):
                    try:
                        sock.sendall(request[at : at + 1])
                    except OSError:
                        alive.discard(sock)
                if not alive or over.wait(0.2):
                    return

        dripper = InThread(drip)
        try:
            assert same(weighlock.fetch(peer.url, limits=IMPATIENT), model(24))
            until(lambda: peer.status("Threads") <= idle)  # all of them were given up
            assert same(weighlock.fetch(peer.url, limits=IMPATIENT), model(24))
        finally:
            over.set()
            dripper.end()
        for sock in silent + dripping:
            assert rest_of(sock) == b""
        for sock in deaf:
            assert len(rest_of(sock)) < 24 * MB


# --- C12: many at once ---


@pytest.mark.parametrize(
    "limits",
    [{"connections": 2000, "connections_per_peer": 2000}, {}],
    ids=["no descriptors left", "over the quota"],
)
def test_a_thousand_connections_are_survived(no_leaks, many_descriptors, limits):
    with owner(3.3, nofile=128, limits=limits) as peer:
        address = urlsplit(peer.url)
        with contextlib.ExitStack() as stack:
            for _ in range(1000):
                sock = stack.enter_context(socket.socket())
                sock.setblocking(False)
                sock.connect_ex((address.hostname, address.port))
            descriptors = f"/proc/{peer.pid}/fd"
            until(settled(lambda: len(os.listdir(descriptors))))
            assert len(os.listdir(descriptors)) <= 128
            before = peer.cpu_s()
            with pytest.raises(subprocess.TimeoutExpired):
                peer.child.wait(1)
            assert peer.cpu_s() - before < 0.5  # it waits, and does not spin
        assert same(weighlock.fetch(peer.url), model(3.3))
        assert peer.child.poll() is None
        peer.child.kill()
        assert peer.child.stderr.read().count("no descriptors left") < 5  # told, but not each time


# --- C13: requests that are none ---


def endless(start, piece):
    """A request that goes on until the server has enough of it; bounded, to end in any case."""

    def send(sock, url):
        sock.sendall(start(url))
        for _ in range(16 * MB // len(piece)):
            sock.sendall(piece)

    return send


def once(make):
    return lambda sock, url: sock.sendall(make(url))


def report(*lines, body=b""):
    return lambda url: (
        asking(
            url,
            *lines,
            method="POST",
            path=urlsplit(url).path.rpartition("/")[0] + "/receivers/x",
        )
        + body
    )


HELLO = bytes.fromhex("16030100c8010000c40303") + os.urandom(193)
BOMBS = {
    "a head without end": endless(lambda url: asking(url)[:-2], b"X: " + b"y" * KB + b"\r\n"),
    "a line without end": endless(lambda url: b"GET /", b"y" * KB),
    "a body without end": endless(
        report("Transfer-Encoding: chunked"), b"400\r\n" + b"y" * KB + b"\r\n"
    ),
    "a body of 2**63 bytes": endless(report(f"Content-Length: {2**63}"), b"y" * KB),
    "a length of a thousand digits": once(report("Content-Length: " + "9" * 1000)),
    "a length below nothing": once(report("Content-Length: -1")),
    "two lengths": once(report("Content-Length: 4", "Content-Length: 40", body=b"{}{}")),
    "chunks and a length": once(
        report("Transfer-Encoding: chunked", "Content-Length: 4", body=b"0\r\n\r\nGET / ")
    ),
    "chunks of no length": once(report("Transfer-Encoding: chunked", body=b"zz\r\n")),
    "an unknown method": once(lambda url: asking(url, "Connection: close", method="BREW")),
    "a method with a space": once(lambda url: asking(url, method="GET GET")),
    "no host": once(lambda url: b"GET / HTTP/1.1\r\n\r\n"),
    "a version of the future": once(lambda url: b"GET / HTTP/7.3\r\nHost: x\r\n\r\n"),
    "a path of bytes": once(lambda url: b"GET /\xff\xfe\x00 HTTP/1.1\r\nHost: x\r\n\r\n"),
    "a range of a thousand digits": once(
        lambda url: (
            asking(url, "Range: bytes=" + "9" * 1000 + "-", "If-Match: x")
            + asking(url, "Connection: close", path="/")
        )
    ),
    "a report of a thousand lists": once(
        report("Content-Length: 2000", "Connection: close", body=b"[" * 2000)
    ),
    "garbage": once(lambda url: os.urandom(4096)),
    "a TLS hello": once(lambda url: HELLO),
    "nothing but line ends": endless(lambda url: b"", b"\r\n" * KB),
}


@pytest.fixture(scope="module")
def bombed():
    """One server for all the bombs: it must survive them together."""
    with owner(2.2, limits={"head_s": 1, "idle_s": 1}) as peer:
        yield peer


@pytest.mark.parametrize("what", BOMBS)
def test_a_request_that_is_none_is_refused_or_cut_off(bombed, no_leaks, what):
    before = bombed.status("RssAnon")
    received = b""
    with dial(bombed.url) as sock:
        with contextlib.suppress(ConnectionError):
            BOMBS[what](sock, bombed.url)
        received = rest_of(sock)
    # A reset may overtake the reply; where one came, it refuses.
    statuses = [line.split(b" ")[1] for line in received.split(b"\r\n") if b"HTTP/1.1 " in line]
    assert all(status[:1] == b"4" for status in statuses), received[:200]
    assert bombed.status("RssAnon") - before < 16 * KB  # in KB
    assert same(weighlock.fetch(bombed.url), model(2.2))


def test_many_tiny_requests_are_answered_one_by_one(bombed, no_leaks):
    before = bombed.status("RssAnon")
    tiny = asking(bombed.url, "Range: bytes=0-0") * 100
    with dial(bombed.url) as sock:
        reading = InThread(rest_of, sock)
        for _ in range(20):
            sock.sendall(tiny)
        sock.sendall(asking(bombed.url, "Range: bytes=0-0", "Connection: close"))
        received = reading.end()
    assert received.count(b"HTTP/1.1 206 ") == 2001
    assert bombed.status("RssAnon") - before < 16 * KB


# --- C16: many receivers of different speeds ---


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_receivers_of_all_speeds_cost_the_owner_no_memory(tmp_path, no_leaks, chaos, kind):
    tensors, path = model(6), None
    if kind == "file":
        path = tmp_path / "source.safetensors"
        weighlock.save(path, tensors)
    with owner(6, path=path) as peer:
        before = peer.status("RssAnon")
        speeds = [4 * MB * 1.35**step for step in range(20)]  # to 1.2 GB a second
        fetches = [
            InThread(
                weighlock.fetch,
                chaos.proxy(peer.url, down=Rules(bytes_per_s=speed), receive_bytes=64 * KB).of(
                    peer.url
                ),
                connections=2,
            )
            for speed in speeds
        ]
        peak = 0
        for fetch in fetches:
            while fetch.thread.is_alive():
                peak = max(peak, peer.status("RssAnon"))
                fetch.thread.join(0.05)
        for fetch in fetches:
            assert same(fetch.end(), tensors)
        assert peak - before < 64 * KB  # in KB: 64 MB, however many they are


# --- the end of a server ---


@contextlib.contextmanager
def reply_under_way(chaos):
    """An owner, a fetch with a megabyte of its only range, and the proxy that holds the rest."""
    with owner(7) as peer:
        proxy = chaos.proxy(peer.url, receive_bytes=64 * KB)
        proxy.down = lambda n: ORDERLY if n == 0 else Rules(hang=MB)
        limits = weighlock.Limits(patience_s=0)
        fetching = InThread(weighlock.fetch, proxy.of(peer.url), connections=1, limits=limits)
        until(lambda: len(proxy.passed) > 1 and proxy.passed[1].down == MB)
        try:
            yield peer, fetching
        finally:
            proxy.release()
            fetching.thread.join(DEADLINE_S)
            peer.child.wait(DEADLINE_S)


def test_a_server_that_is_stopped_finishes_the_reply_under_way(no_leaks, chaos):
    with reply_under_way(chaos) as (peer, fetching):
        peer.stop()
        until(lambda: not answers(urlsplit(peer.url).port))
    assert same(fetching.end(), model(7))
    assert peer.child.returncode == 0


def test_a_server_that_is_being_stopped_refuses_who_comes_now(no_leaks, chaos):
    """At once: whoever waits in a queue that nobody serves any more waits for nothing."""
    with reply_under_way(chaos) as (peer, fetching):
        peer.stop()
        until(lambda: not answers(urlsplit(peer.url).port), within_s=2)  # of the five of its grace
        with pytest.raises(PeerLost):
            weighlock.fetch(peer.url, limits=weighlock.Limits(patience_s=0))
    assert same(fetching.end(), model(7))


def test_a_server_that_is_stopped_does_not_wait_for_ever_for_a_receiver(no_leaks, chaos):
    server = weighlock.Server()
    share = server.share(model(24))
    proxy = chaos.proxy(share.url, receive_bytes=64 * KB)
    proxy.down = lambda n: ORDERLY if n == 0 else Rules(hang=MB)
    limits = weighlock.Limits(patience_s=0)
    fetching = InThread(weighlock.fetch, proxy.of(share.url), connections=1, limits=limits)
    until(lambda: len(proxy.passed) > 1 and proxy.passed[1].down == MB)
    began = time.monotonic()
    server.close(grace_s=0.5)
    assert time.monotonic() - began < 5
    proxy.release()
    with pytest.raises(PeerLost):
        fetching.end()
