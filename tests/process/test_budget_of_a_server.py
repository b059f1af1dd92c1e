"""D14, C16: buffers of a server, however many receivers there are and however slow they read."""

import contextlib
import socket
import ssl
import subprocess
import sys
import time
from urllib.parse import urlsplit

import numpy as np
import pytest

import weighlock
from process.certificates import certificates, needs_openssl  # noqa: F401
from process.chaos_peers import InThread
from waiting import DEADLINE_S, settled, until
from weighlock.errors import PeerLost
from weighlock.limits import Budget
from weighlock.transfer.pieces import Several
from weighlock.transfer.sending import Sender

SLOW = 64

OWNER = """
import sys
import numpy as np
import weighlock
kind, path, certificate = sys.argv[1:]
limits = weighlock.Limits(connections=400, connections_per_peer=400)
dice = np.random.default_rng(1)
with weighlock.Server(tls_cert=certificate or None, limits=limits) as server:
    if kind == "small arrays":
        tensors = {f"t{n}": dice.random(4000) for n in range(700)}
    else:
        tensors = weighlock.open(path)
    share = server.share(tensors)
    share.digests.hash_all()
    print(share.url, flush=True)
    sys.stdin.read()
print(server._budget.used, flush=True)
"""


def file_of(kind, directory):
    """What is served, and holds other bytes at each place."""
    path = directory / "source"
    if kind == "a file":
        weighlock.save(path, {"a": np.random.default_rng(1).random(3_000_000)}, durable=False)
    elif kind.startswith("strided"):
        torch = pytest.importorskip("torch")
        rows, count = (400, 20) if kind == "strided tensors" else (100, 300)
        tensors = {f"t{n}": torch.rand(rows, 300, dtype=torch.float64).T for n in range(count)}
        torch.save(tensors, path)
    return path


class Owner:
    def __init__(self, child):
        self.child = child
        self.url = child.stdout.readline().strip()
        assert self.url, child.stderr.read()

    def anonymous(self):
        with open(f"/proc/{self.child.pid}/status") as status:
            return next(int(x.split()[1]) * 1024 for x in status if x.startswith("RssAnon"))


@contextlib.contextmanager
def owner(*arguments):
    child = subprocess.Popen(
        [sys.executable, "-c", OWNER, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield Owner(child)
    finally:
        if child.poll() is None:
            child.kill()
        child.communicate(timeout=DEADLINE_S)


@contextlib.contextmanager
def slow_receivers(url, count, ca=None):
    """So many that ask for everything, each from another place on, take a little and stop."""
    parts = urlsplit(url)
    with contextlib.ExitStack() as stack:
        for number in range(count):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
            stack.callback(sock.close)
            sock.settimeout(DEADLINE_S)
            sock.connect((parts.hostname, parts.port))
            if ca is not None:
                context = ssl.create_default_context(cafile=ca)
                sock = context.wrap_socket(sock, server_hostname=parts.hostname)
                stack.callback(sock.close)
            first = number * 300_000
            sock.sendall(
                f"GET {parts.path} HTTP/1.1\r\nHost: x\r\nRange: bytes={first}-\r\n\r\n".encode()
            )
            assert sock.recv(100).startswith(b"HTTP/1.1 206")
        yield


@needs_openssl
@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize(
    ("kind", "tls"),
    [
        ("a file", True),
        ("small arrays", True),
        ("small arrays", False),
        ("strided tensors", True),
        ("strided small", True),
    ],
)
def test_c16_receivers_that_stop_reading_cost_the_owner_little(tmp_path, request, kind, tls):
    known = request.getfixturevalue("certificates")
    path, certificate = file_of(kind, tmp_path), known.path("server") if tls else ""
    with owner(kind, path, certificate) as peer:
        access = weighlock.Access(
            origins={peer.url.partition("/s/")[0]: weighlock.Credential(ca=known.ca)}
        )
        weighlock.fetch(peer.url, access=access)
        before = peer.anonymous()
        with slow_receivers(peer.url, SLOW, known.ca if tls else None):
            until(settled(peer.anonymous))
            added = peer.anonymous() - before
            # Somebody who reads is served beside them.
            weighlock.fetch(peer.url, access=access)
            beside = peer.anonymous() - before
        assert max(added, beside) <= 64_000_000
        peer.child.stdin.close()
        peer.child.stdin = None  # else waiting for its output would write to it
        assert peer.child.stdout.readline() == "0\n"  # all was given back


@needs_openssl
@pytest.mark.usefixtures("no_leaks")
def test_d14_a_connection_that_is_kept_holds_nothing_between_two_replies(tmp_path, request):
    known = request.getfixturevalue("certificates")
    path = file_of("a file", tmp_path)
    with weighlock.open(path) as stored, weighlock.Server(tls_cert=known.path("server")) as server:
        share = server.share(stored)
        access = weighlock.Access(origins={server.url: weighlock.Credential(ca=known.ca)})
        with weighlock.open(share.url, access=access) as catalog:
            for _ in range(3):
                catalog["a"].load()
            until(lambda: server._budget.used == 0)


@pytest.mark.usefixtures("no_leaks")
def test_d14_without_room_a_receiver_is_told_to_come_back_and_nothing_hangs():
    tensors = {f"t{n}": np.random.default_rng(n).random(500) for n in range(100)}
    limits = weighlock.Limits(patience_s=0.5)
    with weighlock.Server() as server:
        share = server.share(tensors)
        with server._budget.hold(weighlock.Limits().budget_bytes, 1):  # stuck
            with pytest.raises(PeerLost, match="503"):
                weighlock.fetch(share.url, limits=limits)
            waiting = InThread(weighlock.fetch, share.url)
        fetched = waiting.end()
        assert all((fetched[name].load() == array).all() for name, array in tensors.items())
        assert server._budget.used == 0


@contextlib.contextmanager
def tls_pair(certificate):
    """Both ends of a connection under TLS, the server's first."""
    ours, theirs = socket.socketpair()
    here = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    here.load_cert_chain(certificate)
    there = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    there.check_hostname, there.verify_mode = False, ssl.CERT_NONE
    client = InThread(there.wrap_socket, theirs)
    with here.wrap_socket(ours, server_side=True) as server, client.end() as other:
        yield server, other


@needs_openssl
@pytest.mark.parametrize(
    ("sizes", "room"),
    [
        # Small ones before and after large ones, together and alone.
        ([10, 70_000, 10, 65_535, 65_536, 300_000, 20, 30, 0, 2_000_003], 300_000),
        # A step leaves the end of a large one over: alone, it takes no buffer.
        ([70_000, 10, 65_536, (1 << 20) + 20_000, (1 << 20) + 20_000], 0),
    ],
)
def test_several_arrays_arrive_in_order_over_tls(certificates, sizes, room):  # noqa: F811
    arrays = tuple(np.full(size, n, np.uint8) for n, size in enumerate(sizes))
    piece = Several(arrays, sum(sizes))
    budget = Budget(300_000)
    received = bytearray(piece.length)
    with tls_pair(certificates.path("server")) as (ours, theirs):

        def receive():
            done = 0
            while done < len(received):
                done += theirs.recv_into(memoryview(received)[done:])

        receiving = InThread(receive)
        sender, done = Sender(ours, 5.0, budget), 0
        with budget.hold(300_000 - room, 1.0):
            while done < piece.length:
                done += sender.send_step(piece, done)
            sender.end()
        receiving.end()
    assert received == b"".join(arrays)
    assert budget.used == 0


@needs_openssl
def test_who_takes_little_at_a_time_over_tls_is_not_given_up(certificates):  # noqa: F811
    """Python's `send` under TLS comes back when all was sent: its timeout is one for all of it."""
    data = memoryview(bytes(1 << 20))
    with tls_pair(certificates.path("server")) as (ours, theirs):
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)

        def receive():
            done = 0
            while done < len(data):
                done += len(theirs.recv(1 << 14))
                time.sleep(0.02)  # 1.3 s for all of it

        receiving = InThread(receive)
        sender, done = Sender(ours, 1.0), 0
        while done < len(data):
            done += sender.send_step(data, done)
        receiving.end()
