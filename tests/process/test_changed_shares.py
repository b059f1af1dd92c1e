"""C18 to C20: what a share offers is changed, removed, or cannot be read.

A share names the same bytes for ever: receivers get those, or are told that the owner changed them.
One share's trouble is no other's.
"""

import contextlib
import fcntl
import os
import signal
import socket
import sys
import termios
import threading
from urllib.parse import urlsplit

import numpy as np
import pytest

import weighlock
from process.chaos import ORDERLY, Rules
from process.chaos_peers import IMPATIENT, MB, InThread, Scripted, holds, model, parts, same
from waiting import settled, until
from weighlock.errors import PeerLost, ShareGone, SourceChanged, SourceError, TransferError
from weighlock.tensors.spec import Span
from weighlock.tensors.stored import StoredRef

pytest_plugins = ["process.chaos_fixtures"]


# --- C18: arrays ---


def test_an_array_that_is_written_after_it_was_shared_is_noticed(tmp_path, server):
    tensors, other = model(3.3), model(1.1, seed=2)
    share, beside = server.share(tensors), server.share(other)
    tensors["large"][500_000] += 1
    path = tmp_path / "model.safetensors"
    with pytest.raises(SourceChanged):
        weighlock.fetch(share.url, into=path, limits=IMPATIENT)
    assert share.ended == "changed"
    for call in (weighlock.fetch, weighlock.open):  # whoever comes later is told at once
        with pytest.raises(SourceChanged):
            call(share.url)
    assert not path.exists()
    for left in parts(tmp_path):  # what matched before the change may stay for the next attempt
        os.unlink(tmp_path / left)
    assert same(weighlock.fetch(beside.url), other)


def test_an_array_that_is_written_while_it_is_received_never_arrives_mixed(server, chaos):
    tensors = model(3.3)
    before = {name: np.array(array) for name, array in tensors.items()}
    share = server.share(tensors)
    proxy = chaos.proxy(share.url, receive_bytes=64 * 1024)
    proxy.down = lambda n: ORDERLY if n == 0 else Rules(hang=3 * MB // 2 if n == 1 else None)
    fetching = InThread(weighlock.fetch, proxy.of(share.url), connections=1)
    until(lambda: len(proxy.passed) > 1 and proxy.passed[1].down == 3 * MB // 2)
    tensors["large"][:] = 0
    proxy.sever()  # what the kernel had taken before is lost with its connection
    with pytest.raises(SourceChanged):
        fetching.end()
    assert before["large"].any()


def test_a_snapshot_may_be_written_at_once(server):
    tensors = model(3.3)
    before = {name: np.array(array) for name, array in tensors.items()}
    share = server.share(tensors, snapshot=True)
    tensors["large"][:] = 0
    tensors["small"][:] = 0
    assert same(weighlock.fetch(share.url), before)
    assert share.ended is None


# --- C19: files ---


@pytest.fixture
def path(tmp_path):
    """A file that was last written long ago: a change shows, however coarse the clock."""
    path = tmp_path / "source.safetensors"
    weighlock.save(path, model(3.3))
    os.utime(path, (1, 1))
    return path


def test_a_file_that_is_unlinked_is_served_from_what_was_opened(server, path):
    with weighlock.open(path) as catalog:
        share = server.share(catalog)
        os.unlink(path)
        assert same(weighlock.fetch(share.url), model(3.3))
        assert share.ended is None


def overwrite(path):
    with open(path, "r+b") as file:
        file.seek(2 * MB)
        file.write(b"other")


def truncate(path):
    os.truncate(path, MB)


def replace(path):
    weighlock.save(path, model(3.3, seed=2))


@pytest.mark.parametrize("change", [overwrite, truncate, replace])
@pytest.mark.parametrize("when", ["before it is asked for", "after it was hashed"])
def test_a_file_that_is_changed_is_not_served(server, path, change, when):
    with weighlock.open(path) as catalog:
        share = server.share(catalog)
        if when == "after it was hashed":
            assert same(weighlock.fetch(share.url), model(3.3))
        change(path)
        with pytest.raises(SourceChanged):
            weighlock.fetch(share.url, limits=IMPATIENT)
        assert share.ended == "changed"


def test_a_catalog_that_is_closed_under_its_share_is_an_error_and_no_crash(server, path):
    catalog = weighlock.open(path)
    share = server.share(catalog)
    catalog.close()
    with pytest.raises((SourceError, TransferError)):
        weighlock.fetch(share.url, limits=IMPATIENT)
    assert same(weighlock.fetch(server.share(model(1.1)).url), model(1.1))


@pytest.mark.parametrize("is_file", [False, True], ids=["memory", "file"])
def test_an_owner_that_came_back_with_another_file_under_its_url_is_noticed(tmp_path, is_file):
    """The same URL, ETag, size and header: only the digests can tell."""
    old, new = model(11.3), model(11.3, seed=2)
    old["scalar"] = new["scalar"]
    contents = []
    for tensors in (old, new):
        weighlock.save(tmp_path / "made", tensors, durable=False)
        contents.append((tmp_path / "made").read_bytes())
    os.unlink(tmp_path / "made")
    into = tmp_path / "model.safetensors" if is_file else None

    def answer(request):
        answered = owner.honest(request)
        if request.kind == "file" and request.last - request.first > MB:
            owner.content = contents[1]  # from the second range on
        return answered

    with Scripted(contents[0], answer) as owner:
        with pytest.raises(SourceChanged, match="other content"):
            weighlock.fetch(owner.url, into=into, connections=1, limits=IMPATIENT)
        assert not is_file or not into.exists()
        with weighlock.fetch(owner.url, into=into, connections=1) as fetched:
            assert same(fetched, new)


# --- C20: tensors that cannot be read ---


class Failing:
    """A source that cannot be read from some byte on."""

    def __init__(self, size, error, at=0):
        self.size, self.error, self.at = size, error, at
        self.is_well = False

    def read_into(self, offset, buffer):
        if offset + len(buffer) > self.at and not self.is_well:
            raise self.error
        buffer[:] = b"\7" * len(buffer)


def failing(error, *, at=0):
    """A tensor of three megabytes whose source fails."""
    source = Failing(3 * MB, error, at)
    spec = weighlock.TensorSpec("bad", weighlock.DType.U8, (3 * MB,))
    return source, {"bad": StoredRef(spec, source, Span(0, 3 * MB))}


FAULTS = {
    "of our tree": SourceError("the disk said no"),
    "of the system": OSError(5, "Input/output error"),
    "of memory": MemoryError(),
    "of any kind": RuntimeError("a fault of the program"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("at", [0, 2 * MB + 5], ids=["at once", "in the middle"])
def test_a_tensor_that_cannot_be_read_is_an_error_for_who_asks_for_it(server, fault, at):
    _, tensors = failing(FAULTS[fault], at=at)
    share, beside = server.share(tensors), server.share(model(1.1))
    limits = weighlock.Limits(patience_s=0.2)
    with pytest.raises((SourceError, PeerLost)) as caught:
        weighlock.fetch(share.url, limits=limits)
    if fault in ("of our tree", "of memory"):
        assert type(FAULTS[fault]).__name__ in str(caught.value)  # I25: the cause is told
    assert same(weighlock.fetch(beside.url), model(1.1))
    with pytest.raises((SourceError, PeerLost)):  # the next one is told as well
        weighlock.fetch(share.url, limits=limits)


def test_a_tensor_that_fails_between_hashing_and_sending_is_an_error(server):
    source, tensors = failing(SourceError("the disk said no"), at=2 * MB + 5)
    share = server.share(tensors)
    source.is_well = True
    assert weighlock.fetch(share.url)["bad"].load().all()
    source.is_well = False
    with pytest.raises(SourceError, match="SourceError"):
        weighlock.fetch(share.url, limits=IMPATIENT)


def test_a_fault_that_has_passed_is_not_told_to_the_next_receiver(server):
    """I17: one receiver met it and went away; the next one finds everything well."""
    source, tensors = failing(SourceError("the disk said no"), at=2 * MB + 5)
    share = server.share(tensors)
    source.is_well = True
    weighlock.fetch(share.url)
    source.is_well = False
    address = urlsplit(share.url)
    with socket.create_connection((address.hostname, address.port)) as sock:
        sock.sendall(f"GET {address.path} HTTP/1.1\r\nHost: x\r\nRange: bytes=0-\r\n\r\n".encode())
        while sock.recv(65536):
            pass  # until the owner breaks off
    source.is_well = True
    assert weighlock.fetch(share.url, limits=IMPATIENT)["bad"].load().all()


# --- the end of a share ---


def test_a_share_that_is_revoked_while_it_is_sent_says_so(tmp_path, server, chaos):
    path = tmp_path / "model.safetensors"
    share = server.share(model(24))
    proxy = chaos.proxy(share.url, down=lambda n: Rules(hang=2 * MB) if n else ORDERLY)
    fetching = InThread(weighlock.fetch, proxy.of(share.url), into=path, connections=2)
    until(lambda: sum(passed.down == 2 * MB for passed in proxy.passed) == 2)
    share.revoke()
    proxy.down = ORDERLY
    proxy.release()
    with pytest.raises(ShareGone) as caught:
        fetching.end()
    assert caught.value.reason == "revoked"
    assert not path.exists()
    for left in parts(tmp_path):
        os.unlink(tmp_path / left)


def test_a_revoked_share_never_sends_bytes_of_another_file(tmp_path, no_leaks):
    """I11: its scratch file is closed, and the number of its descriptor is soon another file's.

    The receiver reads nothing, so that the owner stands in the middle of a send when the share is
    revoked. A signal ends that send early, and what is left of it is sent from the number it has.
    (A timeout would not do: the kernel takes the rest of a `sendfile` before it comes back.)
    """
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret! " * (4 * MB))
    strided = {"a": np.zeros((4 * MB, 4), np.uint16)[:, ::2]}  # gathered into a scratch file
    received = bytearray()
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with weighlock.Server() as server:
            share = server.share(strided)
            address = urlsplit(share.url)
            with socket.create_connection((address.hostname, address.port), timeout=5) as sock:
                sock.sendall(f"GET {address.path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                until(settled(lambda: waiting_in(sock)))  # the kernel has taken what it takes
                (serving,) = [t for t in threading.enumerate() if t.name == "weighlock-serve"]
                share.revoke()
                with contextlib.ExitStack() as files:
                    for _ in range(20):  # one of them gets the number
                        files.enter_context(open(secret, "rb"))
                    signal.pthread_kill(serving.ident, signal.SIGUSR1)
                    while data := _some(sock):
                        received += data
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(received) > MB  # it was under way
    assert received.find(b"secret!") == -1  # not `in`: the report would hold megabytes


def waiting_in(sock):
    """Bytes that have arrived and were not read."""
    count = bytearray(4)
    fcntl.ioctl(sock, termios.FIONREAD, count)
    return int.from_bytes(count, sys.byteorder)


def _some(sock):
    try:
        return sock.recv(1 << 20)
    except OSError:
        return b""


def test_a_share_of_a_fetched_file_gives_the_same_bytes_again(tmp_path, server):
    path = tmp_path / "copy.safetensors"
    with weighlock.fetch(server.share(model(3.3)).url, into=path) as fetched:
        again = server.share(fetched)
        assert same(weighlock.fetch(again.url), model(3.3))
    assert holds(path, model(3.3))
