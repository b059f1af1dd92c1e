"""Connections that one side gives up: the other notices soon, and nothing is taken back by it."""

import contextlib
import gc
import socket
import struct
import sys
import threading
import time

import numpy as np
import pytest

import weighlock
from process.certificates import certificates, needs_openssl
from process.plain_server import RawServer
from waiting import until
from weighlock import Abort, Access, Credential, Limits
from weighlock.errors import Aborted, PeerLost, TransferTimeout
from weighlock.sources.access import Address
from weighlock.sources.connections import Connections
from weighlock.sources.http_client import Connection
from weighlock.transfer.sending import Sender

__all__ = ["certificates"]  # a fixture of this module

pytestmark = pytest.mark.usefixtures("no_leaks")

WEIGHTS = {"a": np.random.default_rng(0).integers(0, 255, 20 << 20, dtype=np.uint8)}


class Stopped(Exception):
    """What a progress callback raises."""


@pytest.fixture(params=["plain", pytest.param("tls", marks=needs_openssl)])
def way(request):
    """A server, and what it takes to dial it."""
    if request.param == "plain":
        with weighlock.Server() as server:
            yield server, None
        return
    made = request.getfixturevalue("certificates")
    with weighlock.Server("127.0.0.1", 0, tls_cert=made.path("server")) as server:
        yield server, Access(origins={f"127.0.0.1:{server.port}": Credential(ca=made.ca)})


def aborted(url, access):
    abort = Abort()
    with pytest.raises(Aborted):
        weighlock.fetch(url, access=access, abort=abort, progress=lambda *_: abort.set())


def failed(url, access):
    def fail(*_):
        raise Stopped

    with pytest.raises(Stopped):
        weighlock.fetch(url, access=access, progress=fail)


@pytest.mark.parametrize("ends", [aborted, failed])
def test_a_fetch_that_ends_early_leaves_its_owner_no_connections(way, ends):
    server, access = way
    share = server.share(WEIGHTS)
    for _ in range(20):
        ends(share.url, access)
    # Long before a peer that says nothing is given up.
    until(lambda: server._listener.connections == 0, within_s=4)


def asked(server, share):
    """A connection over which a whole share was asked for, and that says no more."""
    sock = socket.create_connection(("127.0.0.1", server.port))
    path = share.url.partition(f":{server.port}")[2]
    sock.sendall(f"GET {path} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n".encode())
    sock.shutdown(socket.SHUT_WR)
    return sock


def test_who_says_no_more_after_a_request_gets_the_whole_reply():
    with weighlock.Server() as server:
        share = server.share(WEIGHTS)
        received = bytearray()
        with asked(server, share) as sock:
            while data := sock.recv(1 << 20):
                received += data
        head, _, body = bytes(received).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert np.array_equal(weighlock.open(body)["a"].load(), WEIGHTS["a"])


@pytest.mark.slow
def test_who_hangs_up_and_takes_nothing_is_given_up_before_others():
    with weighlock.Server(limits=Limits(idle_s=120)) as server:
        share = server.share(WEIGHTS)
        with asked(server, share):
            until(lambda: server._listener.connections == 1)
            until(lambda: server._listener.connections == 0, within_s=30)


@contextlib.contextmanager
def connected():
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as ours,
        listener.accept()[0] as theirs,
    ):
        yield ours, theirs


@pytest.mark.parametrize("has_hung_up", [True, False])
def test_only_who_has_hung_up_is_given_up_early(has_hung_up):
    with connected() as (ours, theirs):
        if has_hung_up:
            theirs.shutdown(socket.SHUT_WR)
        sender = Sender(ours, 1.0, hung_up_s=0.1)
        start = time.monotonic()
        expected = BrokenPipeError if has_hung_up else TransferTimeout
        with pytest.raises(expected):
            sender.send_bytes(bytes(64 << 20))
        took = time.monotonic() - start
        assert took < 0.9 if has_hung_up else took >= 1.0


def test_who_hangs_up_and_reads_in_its_own_time_gets_everything():
    content = np.random.default_rng(1).bytes(32 << 20)
    with connected() as (ours, theirs):
        theirs.shutdown(socket.SHUT_WR)
        received = bytearray()

        def read():
            pause = threading.Event()
            while data := theirs.recv(1 << 20):
                received.extend(data)
                pause.wait(0.02)  # slower than what is sent, so that each send has to wait

        reading = threading.Thread(target=read)
        reading.start()
        Sender(ours, 5.0, hung_up_s=1.0).send_bytes(content)
        ours.shutdown(socket.SHUT_WR)
        reading.join()
        assert received == content


def until_the_end(sock, found):
    """All that comes, and how it ends."""
    try:
        while data := sock.recv(1 << 16):
            found.append(data)
        found.append("end")
    except ConnectionResetError:
        found.append("reset")


def test_what_was_answered_or_is_being_sent_is_not_reset():
    found = []

    def answer(sock):
        request = b""
        while b"\r\n\r\n" not in request:
            request += sock.recv(4096)
        if request.startswith(b"GET"):
            sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        else:
            found.append(request.partition(b"\r\n\r\n")[2])
        until_the_end(sock, found)

    with RawServer(answer) as server:
        address = Address.of(server.url("/x"))
        idle = Connection(address, Access(), Limits())
        assert idle.read_small(idle.request("GET", address)) == b"ok"
        idle.shut()
        idle.close()
        until(lambda: found == ["end"])
        found.clear()

        sending = Connection(address, Access(), Limits())

        def send(sock):
            sock.sendall(b"x" * 100_000)
            sending.shut()

        with pytest.raises(PeerLost):
            sending.upload(address, {}, 200_000, send)
        until(lambda: found and found[-1] == "end")
        assert sum(map(len, found[:-1])) == 100_000


def test_who_resets_before_hands_are_shaken_leaves_no_socket_open():
    address = Address.of("https://127.0.0.1:1/x")
    with connected() as (ours, theirs):
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        theirs.close()
        tls = Connection(address, Access(), Limits())._tls
        with pytest.raises(ConnectionResetError):
            tls.wrap_socket(ours, server_hostname="h", do_handshake_on_connect=False)
        gc.collect()  # it would be warned of


def test_sockets_that_are_older_than_who_keeps_them_are_closed_by_him(monkeypatch):
    """The collector may end the oldest of a ring first, and a socket that ends by itself warns."""
    told = []
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: told.append(str(raised.exc_value)))
    with weighlock.Server() as server:
        url = server.share({"a": np.ones(4)}).url
        first = Connections("first")
        with first.lease(Address.of(url)) as connection:
            connection.request("GET", Address.of(url), {}).read()
        ring = [Connections("second")]
        ring.append(ring)
        with ring[0].lease(Address.of(url)) as other:
            other.request("GET", Address.of(url), {}).read()
        kept, older = ring[0]._own().idle, first._own().idle
        kept[:], older[:] = older[:], kept[:]
        del ring, kept, connection, other
        gc.collect()
        first.close()
    assert not told
