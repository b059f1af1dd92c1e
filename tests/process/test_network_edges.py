"""Faults of the way that need a certain moment: a stale journal, a stop while hands are shaken."""

import contextlib
import errno
import functools
import http.client
import itertools
import json
import pickle
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from blake3 import blake3

import weighlock
from process.certificates import certificates, needs_openssl
from process.plain_server import PlainServer, RawServer, Reply, asked_range, ranged
from waiting import until
from weighlock import Limits
from weighlock.errors import Aborted, DiskError, PeerLost, ShareGone, SourceChanged, WeighlockError
from weighlock.sources.access import Address
from weighlock.sources.http_remote import Remote
from weighlock.sources.http_replies import Resource
from weighlock.sources.receipt import Receipt
from weighlock.sources.upload import Upload
from weighlock.tensors.spec import Span
from weighlock.transfer.contents import Contents
from weighlock.transfer.layout import lay_out
from weighlock.transfer.pieces import piece_length

__all__ = ["certificates"]  # a fixture of this module

pytestmark = pytest.mark.usefixtures("no_leaks")

BRIEF = Limits(patience_s=0.2, connect_s=2.0, idle_s=2.0)


def model(value, megabytes, directory):
    """The bytes of a file of one tensor."""
    path = directory / f"{value}.made"
    weighlock.save(path, {"a": np.full(megabytes << 20, value, np.uint8)}, durable=False)
    content = path.read_bytes()
    path.unlink()
    return content


# What an attempt left is of one file of one place.


@pytest.fixture
def cut_off():
    """A server that gives up on a path from a byte on, while `cuts` says so."""
    cuts, etags = {}, {}

    def behave(request, content):
        if request.span[0] >= cuts.get(request.path, len(content)):
            return Reply(503)
        return ranged(request, content, etags.get(request.path, f'"{request.path}"'))

    with PlainServer({}, behave) as server:
        server.cuts, server.etags = cuts, etags
        yield server


@pytest.mark.parametrize(
    "between", ["larger", "smaller", "no validator", "same validator", "share"]
)
def test_a_file_is_never_finished_with_blocks_of_another(between, cut_off, tmp_path):
    server, into = cut_off, tmp_path / "model.safetensors"
    sizes = {"larger": 30, "smaller": 12, "share": 26}
    server.files = {
        "/a": model(1, 18, tmp_path),
        "/b": model(2, sizes.get(between, 18), tmp_path),
    }
    server.cuts.update({"/a": 12 << 20, "/b": 16 << 20 if between != "smaller" else 8 << 20})
    if between == "no validator":
        server.etags["/b"] = None
    if between == "same validator":
        server.etags.update({"/a": '"1"', "/b": '"1"'})
    with pytest.raises(PeerLost):
        weighlock.fetch(server.url("/a"), into=into, limits=BRIEF)
    if between == "share":
        abandon_a_share(server.files["/b"], into, tmp_path)
    else:
        with pytest.raises(PeerLost):
            weighlock.fetch(server.url("/b"), into=into, limits=BRIEF)
    server.cuts.clear()
    weighlock.fetch(server.url("/a"), into=into).close()
    assert into.read_bytes() == server.files["/a"]
    assert [entry.name for entry in tmp_path.iterdir()] == [into.name]


def abandon_a_share(content, into, directory):
    """Fetch from a share that goes away after some blocks."""
    path = directory / "shared.safetensors"
    path.write_bytes(content)
    with weighlock.Server("127.0.0.1", 0) as server:
        share = server.share(weighlock.open(path))

        def after_some(done, total):
            if done > 9 << 20:
                server.close(grace_s=0)

        with pytest.raises(WeighlockError):
            weighlock.fetch(share.url, into=into, limits=BRIEF, progress=after_some, connections=1)
    path.unlink()


def test_an_attempt_at_the_same_file_is_still_taken_up(cut_off, tmp_path):
    server, into = cut_off, tmp_path / "model.safetensors"
    server.files = {"/a": model(1, 18, tmp_path)}
    server.cuts["/a"] = 16 << 20
    with pytest.raises(PeerLost):
        weighlock.fetch(server.url("/a"), into=into, limits=BRIEF)
    server.cuts.clear()
    asked = len(server.requests)
    weighlock.fetch(server.url("/a"), into=into).close()
    assert into.read_bytes() == server.files["/a"]
    pulled = sum(last - first for first, last in (r.span for r in server.requests[asked:]))
    assert pulled < 12 << 20


def test_a_changed_resource_gives_none_of_its_new_bytes(tmp_path):
    """Not even those that came while it was asked where the resource is now."""
    versions = {
        path: save_bytes(tmp_path, v=np.full(3, value, np.uint8), pad=np.zeros(4 << 20, np.uint8))
        for path, value in (("/v1", 1), ("/v2", 2))
    }

    def behave(request, content):
        if request.path == "/latest":
            return Reply(307, {"Location": f"/v{len(server.asked('/latest'))}"})
        if request.path == "/v1" and len(server.asked("/v1")) > 1:
            return Reply(403)
        return ranged(request, content, etag=f'"{request.path}"')

    with (
        PlainServer({**versions, "/latest": b""}, behave) as server,
        weighlock.open(server.url("/latest"), limits=BRIEF) as catalog,
    ):
        with pytest.raises(SourceChanged):
            catalog["pad"].load()
        assert catalog["v"].load().tolist() == [1, 1, 1]


def save_bytes(directory, **arrays):
    path = directory / "made"
    weighlock.save(path, arrays, durable=False)
    content = path.read_bytes()
    path.unlink()
    return content


def test_refs_of_a_url_that_redirects_survive_pickling(tmp_path):
    content = save_bytes(tmp_path, v=np.arange(3 << 20, dtype=np.uint8))

    def behave(request, _):
        if request.path == "/latest":
            return Reply(302, {"Location": "/there"})
        return ranged(request, content)

    with PlainServer({"/latest": b"", "/there": content}, behave) as server:
        with weighlock.open(server.url("/latest")) as catalog:
            ref = pickle.loads(pickle.dumps(catalog["v"]))
        assert (ref.load() == np.arange(3 << 20, dtype=np.uint8)).all()
        ref.source.close()


# A host of several addresses.


def test_every_address_of_a_host_gets_its_share_of_the_time(tmp_path, monkeypatch):
    """The first may be a way that swallows everything, as IPv6 is in some networks."""
    content = model(1, 3, tmp_path)
    given = []

    class Noting(socket.socket):
        def connect(self, target):
            given.append((target[0], self.gettimeout()))
            super().connect(target)

    with PlainServer({"/a": content}) as server:
        names = ["127.0.0.2", "127.0.0.3", "127.0.0.1"]  # nobody listens at the first two
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (at, server.port)) for at in names]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        monkeypatch.setattr(socket, "socket", Noting)
        fetched = weighlock.fetch(
            f"http://two.example:{server.port}/a", limits=Limits(connect_s=90), connections=1
        )
        assert len(fetched)
    assert [at for at, _ in given[:3]] == names
    assert given[0][1] <= 30
    assert given[1][1] <= 45
    assert 45 < given[2][1] <= 90


# Patience ends.


def test_a_server_that_always_breaks_off_at_the_same_byte_is_given_up(tmp_path):
    """What lands again, from the start each time, is no progress."""
    content = model(1, 3, tmp_path)

    def behave(request, _):
        return Reply(200, {"Content-Length": str(len(content))}, content[: 22 << 17])

    with PlainServer({"/a": content}, behave) as server:
        start = time.monotonic()
        with pytest.raises(PeerLost):
            weighlock.fetch(server.url("/a"), into=tmp_path / "a.safetensors", limits=BRIEF)
        assert time.monotonic() - start < 5
    for left in tmp_path.iterdir():
        left.unlink()


def range_head(content, first, last, more=""):
    return (
        f'HTTP/1.1 206 Partial Content\r\nETag: "1"\r\n{more}'
        f"Content-Range: bytes {first}-{last - 1}/{len(content)}\r\n"
    ).encode()


def test_endless_trailers_are_not_read_to_their_end(tmp_path):
    content = model(1, 3, tmp_path)

    def answer(sock):
        first, last = asked_range(sock)
        last = min(last, len(content))
        head = range_head(content, first, last, "Transfer-Encoding: chunked\r\n") + b"\r\n"
        sock.sendall(head + b"%x\r\n%s\r\n0\r\n" % (last - first, content[first:last]))
        while True:
            sock.sendall(b"X-More: and more\r\n" * 100)

    with RawServer(answer) as server:
        start = time.monotonic()
        with pytest.raises(WeighlockError):
            weighlock.fetch(server.url("/a"), limits=BRIEF)
        assert time.monotonic() - start < 5


# Who says stop is heard.


@pytest.mark.parametrize("answers", [0, 1, 2])
@pytest.mark.parametrize("way", ["fetch", "stream"])
def test_a_stop_is_heard_while_a_server_is_silent(way, answers, tmp_path):
    """Before the first reply, and on a connection that has been used before."""
    content = model(1, 20, tmp_path)
    left = [answers]
    lock = threading.Lock()

    def answer(sock):
        while (asked := asked_range(sock)) is not None:
            with lock:
                left[0] -= 1
                if left[0] < 0:
                    sock.recv(1)
                    return
            first, last = asked[0], min(asked[1], len(content))
            head = range_head(content, first, last, f"Content-Length: {last - first}\r\n")
            sock.sendall(head + b"\r\n" + content[first:last])

    with RawServer(answer) as server:
        url = server.url("/a")
        assert_stopped(way, url)


@needs_openssl
@pytest.mark.parametrize("way", ["fetch", "stream"])
def test_a_stop_is_heard_while_hands_are_shaken(way):
    with RawServer(lambda sock: sock.recv(1) and sock.recv(100_000) and sock.recv(1)) as server:
        assert_stopped(way, f"https://127.0.0.1:{server.port}/a")


def assert_stopped(way, url):
    abort = weighlock.Abort()
    timer = threading.Timer(0.3, abort.set)
    timer.start()
    start = time.monotonic()
    limits = Limits(idle_s=6, connect_s=6)
    done = weighlock.fetch if way == "fetch" else lambda *a, **o: list(weighlock.stream(*a, **o))
    with pytest.raises(Aborted):
        done(url, abort=abort, limits=limits, connections=1)
    assert time.monotonic() - start < 3
    timer.join()


# An owner that ends, or has not begun.


class Slow:
    """A source that can be made to wait."""

    label = "slow"

    def __init__(self, content):
        self._content = content
        self.size = len(content)
        self.go_on = threading.Event()
        self.go_on.set()
        self.is_asked = threading.Event()
        self.slow_s = self.ready_at = None

    def be_slow(self, seconds):
        """Give nothing for so long after the next read has begun."""
        self.slow_s, self.ready_at = seconds, None

    def read_into(self, offset, buffer):
        self.is_asked.set()
        self.go_on.wait(20)
        if self.slow_s is not None:
            self.ready_at = self.ready_at or time.monotonic() + self.slow_s
            until(lambda: time.monotonic() >= self.ready_at)
        buffer[:] = self._content[offset : offset + len(buffer)]

    def close(self):
        pass


def test_a_share_that_ends_while_it_is_hashed_says_so(tmp_path):
    source = Slow(model(1, 5, tmp_path))
    failures = []
    with weighlock.Server("127.0.0.1", 0) as server:
        share = server.share(weighlock.open(source))
        source.go_on.clear()
        source.is_asked.clear()

        def fetch():
            try:
                weighlock.fetch(share.url, limits=Limits(patience_s=1))
            except WeighlockError as error:
                failures.append(error)

        thread = threading.Thread(target=fetch)
        thread.start()
        assert source.is_asked.wait(10)
        share.revoke()
        source.go_on.set()
        thread.join(20)
    assert [type(failure) for failure in failures] == [ShareGone]


def test_an_owner_whose_disk_is_slow_says_how_far_it_is(tmp_path):
    """And goes on from there: whoever is patient with it needs no patience beyond that."""
    source = Slow(model(1, 5, tmp_path))
    with weighlock.Server("127.0.0.1", 0) as server:
        share = server.share(weighlock.open(source))
        source.be_slow(2.2)  # a little longer than a reply takes
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port)) as asking:
            asking.request("GET", Address.of(share.url).beside("digests/0").target)
            reply = asking.getresponse()
            assert (reply.status, reply.getheader("Retry-After")) == (503, "0")
            said = json.loads(reply.read())
        assert said["error"] == "hashing"
        assert 0 < said["done"] < said["total"] == 6
        source.be_slow(2.2)
        got = weighlock.fetch(share.url, limits=Limits(patience_s=0))
        assert got["a"].load().tobytes() == b"\1" * (5 << 20)


def hashing_owner(content, told):
    """Speaks like a share that tells how many blocks are hashed, before it gives the digests."""
    replies = iter(told)

    def behave(request, content):
        if request.method == "POST":
            return Reply(200, {}, b'{"lives":true}')
        if content is not None:
            reply = ranged(request, content)
            reply.headers["Weighlock"] = "1"
            return reply
        hashed = next(replies, None)
        if hashed is None:
            content = server.files["/s/x/model.safetensors"]
            starts = range(0, len(content), 1 << 20)
            digests = (blake3(content[at : at + (1 << 20)]).digest() for at in starts)
            return Reply(200, {"Weighlock": "1"}, b"".join(digests))
        body = json.dumps({"error": "hashing", "done": hashed, "total": 10**9}).encode()
        return Reply(503, {"Retry-After": "0", "Content-Type": "application/json"}, body)

    server = PlainServer({"/s/x/model.safetensors": content}, behave)
    return server


def test_an_owner_that_hashes_on_is_waited_for_and_one_that_only_says_so_is_not(tmp_path):
    content = model(1, 19, tmp_path)
    limits = Limits(patience_s=0.3)
    for told, is_had in (
        (range(1, 21), True),  # for a second, three times the patience
        (itertools.repeat(3), False),
        (itertools.cycle((1, 2)), False),
        (itertools.count(21), False),  # more than there are
        (itertools.count(1), False),
    ):
        with hashing_owner(content, told) as server:
            url = server.url("/s/x/model.safetensors")
            if is_had:
                assert weighlock.fetch(url, limits=limits).nbytes == 19 << 20
            else:
                with pytest.raises(PeerLost, match="503"):
                    weighlock.fetch(url, limits=limits)


def test_an_inbox_that_looks_at_what_it_has_is_waited_for(tmp_path):
    size, told = 10 << 20, iter(range(1, 11))

    def behave(request, content):
        hashed = next(told, None)
        if hashed is None:
            return Reply(200, {}, bytes(320))
        return Reply(503, {}, json.dumps({"error": "hashing", "done": hashed}).encode())

    with PlainServer({}, behave) as server:
        upload = Upload(server.url("/i/x"), "a", limits=Limits(patience_s=0.2))
        with contextlib.closing(upload):
            ask = functools.partial(upload.digests, 0, size)
            assert upload.connections.persist(ask) == bytes(320)


def test_a_range_that_has_begun_is_whole_although_its_file_is_closed():
    arrays = {f"{'x' * 60}{n}": np.full(1000, n, np.float32) for n in range(1000)}
    file = lay_out(arrays)
    contents = Contents(file)
    pieces = contents.pieces(Span(0, file.size))
    total = piece_length(next(pieces))
    contents.close()
    try:
        total += sum(map(piece_length, pieces))
    except WeighlockError:
        return
    assert total == file.size


def is_served():
    """Whether a server of this process has a thread for somebody."""
    return any(thread.name == "weighlock-serve" for thread in threading.enumerate())


def test_a_server_closed_before_it_started_says_nothing():
    server = weighlock.Server("127.0.0.1", 0, start=False)
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(b"GET /s/0123/model.safetensors HTTP/1.1\r\nHost: here\r\n\r\n")
        until(is_served)
        server.close(grace_s=1)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1000) == b""


def test_a_port_that_is_taken_is_told_with_what_to_do():
    with weighlock.Server("127.0.0.1", 0) as server:
        with pytest.raises(DiskError, match=f":{server.port}: .*; choose another port") as caught:
            weighlock.Server("127.0.0.1", server.port)
        assert caught.value.errno == errno.EADDRINUSE
    with pytest.raises(DiskError, match="is it one of this machine"):
        weighlock.Server("192.0.2.1", 0, insecure=True)  # an address for documentation


@needs_openssl
@pytest.mark.parametrize("is_plain", [True, False])
def test_who_is_turned_away_is_told_so_only_where_there_is_no_tls(certificates, is_plain):
    """What came in plain text would be taken for a server that speaks no TLS, for good."""
    cert = None if is_plain else certificates.path("server")
    limits = Limits(connections_per_peer=1)
    with (
        weighlock.Server("127.0.0.1", 0, tls_cert=cert, limits=limits) as server,
        socket.create_connection(("127.0.0.1", server.port)),
    ):
        until(is_served)
        with socket.create_connection(("127.0.0.1", server.port)) as second:
            assert second.recv(1000)[:12] == (b"HTTP/1.1 503" if is_plain else b"")


@needs_openssl
def test_a_peer_that_never_shakes_hands_does_not_hold_up_the_end(certificates):
    server = weighlock.Server(
        "127.0.0.1",
        0,
        tls_cert=certificates.path("server"),
        limits=Limits(connect_s=8),
    )
    with socket.create_connection(("127.0.0.1", server.port)):
        until(is_served)
        start = time.monotonic()
        server.close(grace_s=0.1)
        assert time.monotonic() - start < 3


_MANY_DESCRIPTORS = """
import os, resource, sys
import numpy as np
import weighlock
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (1500, most))
held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
with weighlock.Server("127.0.0.1", 0) as server:
    share = server.share({"a": np.ones(4, np.float32)})
    print(share.url, flush=True)
    more = []
    try:
        while True:
            more.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    print("full", flush=True)
    sys.stdin.readline()
    for fd in more:
        os.close(fd)
    print("free", flush=True)
    sys.stdin.readline()
"""


def test_a_server_with_many_descriptors_survives_having_none_left():
    process = subprocess.Popen(
        [sys.executable, "-c", _MANY_DESCRIPTORS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        url = process.stdout.readline().strip()
        assert process.stdout.readline() == "full\n"
        address = Address.of(url)
        with socket.create_connection((address.host, address.port)):
            assert "no descriptors left" in process.stderr.readline()
            process.stdin.write("go on\n")
            process.stdin.flush()
            assert process.stdout.readline() == "free\n"
            assert weighlock.fetch(url)["a"].load().tolist() == [1, 1, 1, 1]
        process.stdin.write("end\n")
        process.stdin.flush()
    assert process.returncode == 0


# What is said to an owner, and what it says.


def receipt_at(server, ticket):
    """A receipt for a resource that a redirect led to."""
    there = Address.of(server.url("/s/x/model.safetensors"))
    remote = Remote(ticket, resource=Resource(there, 10, is_share=True), limits=BRIEF)
    return remote, Receipt(remote)


def test_an_answer_that_nests_without_end_is_no_answer():
    def behave(request, content):
        return Reply(200, {}, b'{"x":' + b"[" * 30_000)

    with PlainServer({}, behave) as server:
        remote, receipt = receipt_at(server, server.url("/s/x/model.safetensors"))
        receipt.try_to_say("landed")
        receipt.close()
        remote.close()
        assert server.requests


def test_the_proof_of_a_ticket_stays_with_its_origin():
    with weighlock.Server("127.0.0.1", 0) as owner, PlainServer({}, lambda *_: Reply(500)) as other:
        share = owner.share({"a": np.ones(3, np.float32)}, receivers=["site-1"])
        remote, receipt = receipt_at(other, share.url_for("site-1"))
        receipt.try_to_say("started")
        receipt.close()
        remote.close()
        assert other.requests
        assert not any("weighlock-mac" in request.headers for request in other.requests)


def test_a_tied_tensor_is_streamed_once():
    tied = np.arange(13 << 20, dtype=np.uint8)
    with weighlock.Server("127.0.0.1", 0) as server:
        share = server.share({"emb": tied, "other": np.ones(5 << 20, np.uint8), "head": tied})
        found = dict(weighlock.stream(share.url))
    assert np.shares_memory(found["emb"], found["head"])
    assert (found["head"] == tied).all()


def test_the_scheme_of_a_request_has_no_case():
    with weighlock.Server() as server:
        url = server.share({"a": np.ones(3)}).url
        for scheme in ("http", "HTTP", "Https"):
            connection = http.client.HTTPConnection("127.0.0.1", server.port)
            with contextlib.closing(connection):
                connection.request("HEAD", f"{scheme}{url.removeprefix('http')}")
                assert connection.getresponse().status == 200
