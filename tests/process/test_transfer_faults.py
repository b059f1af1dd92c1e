"""C1 to C9, C14 and C15: what lies between owner and receiver fails, or one of the two does.

The receiver ends with exactly the owner's bytes, or with an error of our tree and an untouched
destination; never later than it was told to wait. Faults happen at a byte, a reply or a connection,
so that every run is the same run.
"""

import contextlib
import itertools
import os
import queue
import shutil
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import numpy as np
import pytest

import weighlock
from process.chaos import ORDERLY, Rules
from process.chaos_peers import (
    IMPATIENT,
    MB,
    InThread,
    Scripted,
    holds,
    model,
    owner,
    parts,
    pull,
    reply,
    same,
    serve,
)
from waiting import DEADLINE_S, until
from weighlock.errors import (
    Aborted,
    ChunkCorrupt,
    LimitExceeded,
    NoSpace,
    PeerLost,
    RemoteProtocolError,
    ShareGone,
    SourceChanged,
    SourceError,
    TransferTimeout,
    WeighlockError,
)

pytest_plugins = ["process.chaos_fixtures"]

TINY = {"a": np.arange(30, dtype=np.float32), "b": np.array([1 << 40, -1])}
HEADS = 4096
"""More than the heads and digests of one fetch."""


def only(number, rules):
    """Rules for one connection, by its number."""
    return lambda this: rules if this == number else ORDERLY


def lengths(chaos, url):
    """Bytes of replies on each connection of a fetch that nothing disturbs."""
    proxy = chaos.proxy(url)
    weighlock.fetch(proxy.of(url), connections=1)
    return [passed.down for passed in proxy.passed]


# --- C1: connections that break ---


@pytest.mark.parametrize("how", [pytest.param("cut", marks=pytest.mark.slow), "reset"])
def test_a_connection_that_breaks_at_any_byte_changes_nothing(tmp_path, server, chaos, how):
    """Every byte of every reply: heads, digests, header and tensors."""
    share = server.share(TINY)
    # A reset throws away what the receiver has not read yet, so that its byte means little.
    step = 1 if how == "cut" else 9
    cases = [
        (connection, at)
        for connection, length in enumerate(lengths(chaos, share.url))
        for at in range(0, length + 1, step)
    ]
    proxies = queue.SimpleQueue()
    for _ in range(16):  # a retry pauses: sixteen fetches at once
        proxies.put(chaos.proxy(share.url))

    def fetch(case):
        connection, at = case
        proxy = proxies.get()
        proxy.passed = []
        proxy.down = only(connection, Rules(**{how: at}))
        seen = []
        path = tmp_path / f"{connection}-{at}"
        try:
            with weighlock.fetch(
                proxy.of(share.url),
                into=None if how == "cut" else path,
                connections=1,
                durable=False,
                progress=lambda *numbers: seen.append(numbers),
            ) as fetched:
                assert same(fetched, TINY)
            assert seen == [(share.size, share.size)]  # its one block counted once
        except (WeighlockError, AssertionError) as error:
            return f"connection {connection}, byte {at}: {type(error).__name__}: {error}"
        finally:
            proxies.put(proxy)

    with ThreadPoolExecutor(16) as pool:
        wrong = [found for found in pool.map(fetch, cases) if found is not None]
    assert not wrong, f"{len(wrong)} of {len(cases)}\n" + "\n".join(wrong[:20])
    assert parts(tmp_path) == []


def test_a_connection_that_breaks_at_the_bounds_of_blocks_is_taken_up_there(server, chaos):
    tensors = model(3.3)
    share = server.share(tensors)
    begins = lengths(chaos, share.url)[1] - share.size
    for block in range(1, 4):
        for beside in (-1, 0, 1):
            at = begins + block * MB + beside
            proxy = chaos.proxy(share.url, down=only(1, Rules(cut=at)))
            seen = []
            fetched = weighlock.fetch(
                proxy.of(share.url), connections=1, progress=lambda *n, seen=seen: seen.append(n[0])
            )
            assert same(fetched, tensors), at
            assert seen == sorted(set(seen))
            assert seen[-1] == share.size
            # The first block comes twice, as the probe and as data; of the block that broke there
            # may be nearly all. Nothing else may come again.
            again = proxy.down_bytes - share.size - MB
            assert again < HEADS + (MB if beside == -1 else 1), at


def test_several_connections_that_break_again_and_again_get_there(server, chaos):
    tensors = model(20)
    share = server.share(tensors)
    proxy = chaos.proxy(
        share.url, down=lambda n: Rules(**{"reset" if n % 2 else "cut": MB + n * 345_678})
    )
    with weighlock.fetch(proxy.of(share.url)) as fetched:
        assert same(fetched, tensors)
    assert len(proxy.passed) > 6


# --- C2: a silent cut ---


_CABLES = itertools.count()


@contextlib.contextmanager
def cable():
    """A namespace with a cable to it; gives its name, its address, and what sets the link."""
    number = next(_CABLES)
    name = f"wl{os.getpid() % 100_000}-{number}"
    network = f"10.213.{(os.getpid() + number) % 256}"  # tests may run beside others

    def ip(*words):
        subprocess.run(["ip", *words], check=True, capture_output=True)

    ip("netns", "add", name)
    try:
        ip("link", "add", name, "type", "veth", "peer", "name", "far", "netns", name)
        ip("addr", "add", f"{network}.1/30", "dev", name)
        ip("link", "set", name, "up")
        ip("-n", name, "addr", "add", f"{network}.2/30", "dev", "far")
        ip("-n", name, "link", "set", "far", "up")
        # At the far end: here the sockets would be told at once that there is no way.
        yield name, f"{network}.2", lambda state: ip("-n", name, "link", "set", "far", state)
    finally:
        # The cable first: a namespace is taken away some time after this, with what is in it.
        subprocess.run(["ip", "link", "del", name], capture_output=True)
        ip("netns", "del", name)


def has_cables():
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    try:
        with cable():
            return True
    except subprocess.CalledProcessError:
        return False


needs_cables = pytest.mark.skipif(not has_cables(), reason="needs root, network namespaces, veth")


@needs_cables
def test_a_cable_that_is_out_for_five_seconds_only_costs_time(tmp_path, no_leaks):
    # More than the kernel's buffers take while the link goes down: the rest is asked for again.
    path = tmp_path / "model.safetensors"
    with cable() as (name, host, link), owner(48, netns=name, host=host) as peer:
        events = []

        def unplug(done, total):
            if done > MB and not events:
                events.append("out")
                link("down")

        limits = weighlock.Limits(idle_s=1, connect_s=1, patience_s=15)
        fetching = InThread(weighlock.fetch, peer.url, into=path, progress=unplug, limits=limits)
        until(lambda: events)
        fetching.thread.join(5)
        assert fetching.thread.is_alive()
        link("up")
        fetching.end().close()
    assert holds(path, model(48))
    assert parts(tmp_path) == []


@needs_cables
def test_a_cable_that_stays_out_is_a_timeout_and_the_owner_lets_go_too(no_leaks):
    with (
        cable() as (name, host, link),
        owner(24, netns=name, host=host, limits={"idle_s": 1}) as peer,
    ):
        before = len(os.listdir(f"/proc/{peer.pid}/fd"))
        unplugged = []

        def unplug(done, total):
            if not unplugged:
                unplugged.append(True)
                link("down")

        # Or lost: who dials again is told after a while that there is no way to it.
        with pytest.raises((TransferTimeout, PeerLost)):
            weighlock.fetch(peer.url, progress=unplug, limits=IMPATIENT)
        until(lambda: len(os.listdir(f"/proc/{peer.pid}/fd")) <= before)


def test_a_way_that_goes_silent_and_comes_back_only_costs_time(server, chaos):
    tensors = model(6)
    share = server.share(tensors)
    proxy = chaos.proxy(share.url)
    proxy.down = lambda n: ORDERLY if n == 0 else Rules(hang=2 * MB if n == 1 else 0)
    limits = weighlock.Limits(idle_s=1, patience_s=10)
    fetching = InThread(weighlock.fetch, proxy.of(share.url), connections=1, limits=limits)
    until(lambda: len(proxy.passed) > 3)  # given up once, and tried in vain
    proxy.down = ORDERLY
    assert same(fetching.end(), tensors)
    assert proxy.down_bytes < share.size + 3 * MB


@pytest.mark.parametrize("at", [0, 100, 2 * MB])
def test_a_way_that_goes_silent_for_ever_is_a_timeout(tmp_path, server, chaos, at):
    path = tmp_path / "model.safetensors"
    share = server.share(model(3.3))
    proxy = chaos.proxy(share.url)
    proxy.down = lambda n: ORDERLY if n == 0 else Rules(hang=at if n == 1 else 0)
    began = time.monotonic()
    with pytest.raises(TransferTimeout):
        weighlock.fetch(proxy.of(share.url), into=path, connections=1, limits=IMPATIENT)
    assert time.monotonic() - began < DEADLINE_S
    assert not path.exists()
    weighlock.fetch(share.url, into=path).close()  # takes up what is left, if anything is
    assert holds(path, model(3.3))


# --- C3: a peer that is frozen ---


def test_an_owner_that_is_frozen_is_a_timeout_and_one_that_thaws_goes_on(no_leaks, chaos):
    with owner(24) as peer:  # more than the kernel has taken when it stops
        proxy = chaos.proxy(peer.url, down=only(1, Rules(hang=2 * MB)))
        limits = weighlock.Limits(idle_s=1, patience_s=10)
        fetching = InThread(weighlock.fetch, proxy.of(peer.url), connections=1, limits=limits)
        until(lambda: len(proxy.passed) > 1 and proxy.passed[1].down == 2 * MB)
        os.kill(peer.pid, signal.SIGSTOP)
        proxy.release()
        until(lambda: len(proxy.passed) > 2)  # given up, and asked again: the kernel still accepts
        with pytest.raises(TransferTimeout):
            weighlock.fetch(peer.url, limits=IMPATIENT)
        os.kill(peer.pid, signal.SIGCONT)
        assert same(fetching.end(), model(24))
        assert same(weighlock.fetch(peer.url), model(24))


@contextlib.contextmanager
def watched(peer):
    """How many threads the owner has while nobody asks."""
    yield peer.status("Threads")


def test_a_receiver_that_is_frozen_harms_no_other(tmp_path, no_leaks):
    path = tmp_path / "model.safetensors"
    with (
        owner(24, limits={"idle_s": 1}) as peer,
        watched(peer) as before,
        pull(peer.url, path, "--limit-rate", "16MB", "--no-sync") as frozen,
    ):
        # More than the kernel takes for it: the owner's threads wait for this receiver.
        until(lambda: parts(tmp_path))
        os.kill(frozen.pid, signal.SIGSTOP)
        for _ in range(3):
            assert same(weighlock.fetch(peer.url, limits=IMPATIENT), model(24))
        until(lambda: peer.status("Threads") <= before)  # the owner has given it up
        os.kill(frozen.pid, signal.SIGCONT)
        assert frozen.child.wait(DEADLINE_S) == 0
    assert holds(path, model(24))
    assert parts(tmp_path) == []


# --- C4: bits that flip ---


@pytest.mark.parametrize("where", ["first reply", "digests", "first block", "last block"])
def test_one_bit_that_flips_once_is_noticed_and_asked_for_again(tmp_path, server, chaos, where):
    tensors = model(3.3)
    share = server.share(tensors)
    begins = lengths(chaos, share.url)[1] - share.size
    # The reply with the digests comes first on the second connection; without the reply that
    # follows, its last byte is the last of that connection.
    proxy = chaos.proxy(share.url, drop_replies=frozenset({2}))
    with contextlib.suppress(WeighlockError):
        weighlock.fetch(proxy.of(share.url), connections=1, limits=weighlock.Limits(patience_s=0))
    digests = proxy.passed[1].down - 1
    connection, at = {
        "first reply": (0, MB // 2),
        "digests": (1, digests),
        "first block": (1, begins + MB // 2),
        "last block": (1, begins + share.size - 1),
    }[where]
    for into in (None, tmp_path / "model.safetensors"):
        proxy = chaos.proxy(share.url, down=only(connection, Rules(corrupt=at, mask=0x10)))
        with weighlock.fetch(proxy.of(share.url), into=into, connections=1) as fetched:
            assert same(fetched, tensors)
    assert share.ended is None


def test_bits_that_always_flip_are_an_error_that_blames_the_way(tmp_path, server, chaos):
    path = tmp_path / "model.safetensors"
    share = server.share(model(3.3))
    proxy = chaos.proxy(share.url, down=Rules(corrupt=MB // 2, repeats=True))
    for into in (None, path):
        with pytest.raises(ChunkCorrupt, match="block"):
            weighlock.fetch(proxy.of(share.url), into=into)
    assert not path.exists()
    assert share.ended is None  # the owner looked, and its tensors are as they were
    weighlock.fetch(share.url, into=path).close()
    assert holds(path, model(3.3))


# --- C5: an owner that lies ---


def lie(change, *, kind="file", first=0):
    """Answers honestly, except for requests of one kind from the first-th on."""

    def answer(owner, request):
        honest = owner.honest(request)
        if request.kind != kind or request.number < first:
            return honest
        return change(owner, request, honest)

    return answer


def body_of(honest):
    return honest.partition(b"\r\n\r\n")[2]


def said(**headers):
    """An honest body under other headers."""
    headers = {name.replace("_", "-"): text for name, text in headers.items()}
    return lambda owner, request, honest: owner.range(request.first, body_of(honest), **headers)


def raw(data):
    return lambda owner, request, honest: data


def drawn_out(piece):
    """The same bytes again and again, until the receiver has had enough."""

    def answer(owner, request, honest):
        def send(sock):
            while not owner.is_ending:
                sock.sendall(piece * 100)

        return send

    return answer


def moved(target):
    return raw(reply(302, {"Location": target}))


LIES = {
    "announces more than the range": (
        lie(
            lambda owner, request, honest: owner.range(
                request.first, body_of(honest), **{"Content-Length": len(body_of(honest)) + 1000}
            ),
            first=1,
        ),
        RemoteProtocolError,
    ),
    "announces less than the range": (
        lie(said(Content_Length=1000), first=1),
        RemoteProtocolError,
    ),
    "sends half and closes": (
        lie(lambda owner, request, honest: lambda sock: sock.sendall(honest[: len(honest) // 2])),
        PeerLost,
    ),
    "another range than was asked for": (
        lie(lambda owner, request, honest: owner.range(MB, owner.content[MB : 2 * MB]), first=1),
        RemoteProtocolError,
    ),
    "a range that begins a byte later": (
        lie(lambda owner, request, honest: owner.range(1, body_of(honest)), first=1),
        (RemoteProtocolError, SourceChanged),
    ),
    "blocks in the wrong order": (
        lie(
            lambda owner, request, honest: owner.range(
                request.first, body_of(honest)[MB:] + body_of(honest)[:MB]
            ),
            first=1,
        ),
        ChunkCorrupt,
    ),
    "the block of another file": (
        lie(
            lambda owner, request, honest: owner.range(request.first, b"x" * len(body_of(honest))),
            first=1,
        ),
        ChunkCorrupt,
    ),
    "a file that has grown": (
        lie(said(Content_Range="bytes 0-2306867/9999999"), first=1),
        SourceChanged,
    ),
    "a range without saying which": (lie(said(Content_Range=None), first=1), RemoteProtocolError),
    "a range that makes no sense": (
        lie(said(Content_Range="bytes 5-2/1"), first=1),
        RemoteProtocolError,
    ),
    "everything instead of a range": (
        lie(lambda owner, request, honest: reply(200, {"Weighlock": 1}, b"x" * 3 * MB), first=1),
        (RemoteProtocolError, SourceChanged),
    ),
    "another version": (lie(said(ETag='"two"'), first=1), SourceChanged),
    "no version any more": (lie(said(ETag=None), first=1), SourceChanged),
    "an encoding": (lie(said(Content_Encoding="gzip"), first=1), RemoteProtocolError),
    "an encoding at once": (lie(said(Content_Encoding="gzip")), RemoteProtocolError),
    "chunks of no length": (
        lie(
            raw(
                b"HTTP/1.1 206 X\r\nTransfer-Encoding: chunked\r\n"
                b"Content-Range: bytes 0-1048575/2306868\r\n\r\nzz\r\n"
            )
        ),
        (RemoteProtocolError, PeerLost),
    ),
    "no reply at all": (lie(raw(None)), PeerLost),
    "a reply that is no HTTP": (lie(raw(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")), RemoteProtocolError),
    "a version of HTTP from the future": (
        lie(raw(b"HTTP/9.9 200 OK\r\n\r\n")),
        RemoteProtocolError,
    ),
    "a status of five digits": (lie(raw(b"HTTP/1.1 20600 OK\r\n\r\n")), RemoteProtocolError),
    "a status nobody asked for": (lie(raw(reply(204, {}))), RemoteProtocolError),
    "a head without end": (lie(drawn_out(b"X: y\r\n")), (RemoteProtocolError, PeerLost)),
    "a line without end": (lie(drawn_out(b"HTTP/1.1 200 O")), (RemoteProtocolError, PeerLost)),
    "to go on, for ever": (
        lie(drawn_out(b"HTTP/1.1 100 Continue\r\n\r\n")),
        (RemoteProtocolError, TransferTimeout, PeerLost),
    ),
    "that nobody has time, for a day": (
        lie(raw(reply(503, {"Retry-After": 86400}))),
        PeerLost,
    ),
    "that it is elsewhere, in a circle": (lie(moved("")), WeighlockError),
    "that it is on this machine's disk": (lie(moved("file:///etc/passwd")), SourceError),
    "that it is at no address": (lie(moved("http://[")), WeighlockError),
    "that it is at no port": (lie(moved("http://127.0.0.1:99999999/")), WeighlockError),
    "that it is behind a line break": (lie(moved("http://127.0.0.1\t:80/")), WeighlockError),
    "digests that are too short": (
        lie(lambda owner, request, honest: reply(200, {}, body_of(honest)[:-1]), kind="digests"),
        RemoteProtocolError,
    ),
    "digests that are too many": (
        lie(lambda owner, request, honest: reply(200, {}, body_of(honest) * 2), kind="digests"),
        RemoteProtocolError,
    ),
    "no digests": (lie(raw(reply(404, {})), kind="digests"), ShareGone),
    "digests of something else": (
        lie(lambda owner, request, honest: reply(200, {}, b"x" * 96), kind="digests"),
        ChunkCorrupt,
    ),
    "the file where digests are due": (
        lie(lambda owner, request, honest: owner.range(0, owner.content[:MB]), kind="digests"),
        RemoteProtocolError,
    ),
}


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    """The bytes of a file in three blocks."""
    path = tmp_path_factory.mktemp("content") / "model.safetensors"
    weighlock.save(path, model(2.2))
    return path.read_bytes()


@pytest.mark.parametrize("what", LIES)
def test_an_owner_that_answers_wrongly_is_not_believed(tmp_path, no_leaks, content, what):
    answer, errors = LIES[what]
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"the old one")
    limits = weighlock.Limits(idle_s=0.5, patience_s=0.3, connect_s=1)
    for into in (None, path):
        with Scripted(content) as lying:
            lying.answer = lambda request, lying=lying: answer(lying, request)
            with pytest.raises(errors):
                InThread(weighlock.fetch, lying.url, into=into, limits=limits).end(5)
    assert path.read_bytes() == b"the old one"
    with Scripted(content) as honest:  # takes up what is left, if anything is
        weighlock.fetch(honest.url, into=path).close()
    assert path.read_bytes() == content


def test_what_follows_a_reply_is_never_taken_for_content(tmp_path, no_leaks, content):
    def answer(request):
        return owner.honest(request) + b"x" * 500

    path = tmp_path / "model.safetensors"
    with Scripted(content, answer) as owner:
        for into in (None, path):
            try:
                with weighlock.fetch(owner.url, into=into) as fetched:
                    assert same(fetched, model(2.2))
            except RemoteProtocolError:
                pass  # it may be taken for the start of the next reply
    assert not path.exists() or path.read_bytes() == content
    assert parts(tmp_path) == []


@pytest.mark.parametrize("size", [10 * 10**12, 2**63, 10**18])
def test_an_owner_that_claims_an_absurd_size_is_refused_before_the_first_block(
    tmp_path, no_leaks, size
):
    """As it says so in the reply, in the header, or in both."""
    path = tmp_path / "model.safetensors"
    for claimed in (size, 4096):
        header = b'{"a":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (size, size)
        start = len(header).to_bytes(8, "little") + header
        total = len(start) + (size if claimed == size else 4096)
        start += b"\0" * (MB - len(start) if claimed == size else 4096)

        def answer(request, start=start, total=total):
            if request.kind == "digests":
                return reply(200, {"Weighlock": 1, "Content-Length": 32 * 1024}, b"x" * 32 * 1024)
            said = {"Content-Range": f"bytes 0-{len(start) - 1}/{total}", "ETag": '"x"'}
            return reply(206, said, start)

        with Scripted(start, answer) as owner:
            for into in (None, path):
                with pytest.raises((WeighlockError,)) as caught:
                    InThread(weighlock.fetch, owner.url, into=into).end(5)
                assert isinstance(caught.value, (LimitExceeded, NoSpace, ValueError))
            assert len(owner.requests) <= 4
    assert os.listdir(tmp_path) == []


# --- C6, C7: replies that are lost, requests that come twice ---


@pytest.mark.parametrize("fate", ["drop_replies", "hold_replies"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_reply_that_is_lost_is_asked_for_again(server, chaos, fate, number):
    """The first reply, the digests, the data: the owner has done its part each time."""
    tensors = model(3.3)
    share = server.share(tensors)
    proxy = chaos.proxy(share.url, **{fate: frozenset({number})})
    limits = weighlock.Limits(idle_s=0.5)
    seen = []
    fetched = weighlock.fetch(
        proxy.of(share.url), connections=1, limits=limits, progress=lambda *n: seen.append(n)
    )
    assert same(fetched, tensors)
    assert seen[-1] == (share.size, share.size)
    assert proxy.replies == 5  # of them the one that was lost, and that of the last word


def test_requests_that_come_twice_give_the_same_bytes(tmp_path, server, chaos):
    tensors = model(20)
    share = server.share(tensors)
    proxy = chaos.proxy(share.url, duplicate="swallow")
    for into in (None, tmp_path / "model.safetensors"):
        with weighlock.fetch(proxy.of(share.url), into=into) as fetched:
            assert same(fetched, tensors)


def test_replies_that_come_twice_are_never_mistaken_for_one_another(tmp_path, server, chaos):
    tensors = model(20)
    share = server.share(tensors)
    path = tmp_path / "model.safetensors"
    for into in (None, path):
        proxy = chaos.proxy(share.url, duplicate="pass")
        try:
            with weighlock.fetch(proxy.of(share.url), into=into, limits=IMPATIENT) as fetched:
                assert same(fetched, tensors)
        except WeighlockError:
            assert not path.exists()
    with weighlock.fetch(share.url, into=path) as fetched:
        assert same(fetched, tensors)


# --- C8, C9: an owner that dies ---


def port_of(url):
    return int(url.split("/")[2].rpartition(":")[2])


def test_an_owner_that_starts_anew_has_another_share_and_says_so(tmp_path, no_leaks, chaos):
    path = tmp_path / "model.safetensors"
    with owner(6) as first:
        proxy = chaos.proxy(first.url, down=only(1, Rules(hang=4 * MB + HEADS)))
        fetching = InThread(weighlock.fetch, proxy.of(first.url), into=path, connections=1)
        until(lambda: len(proxy.passed) > 1 and proxy.passed[1].down >= 4 * MB)
        first.child.kill()
        first.child.wait()
    with owner(6, port=port_of(first.url)) as second:
        proxy.sever()
        with pytest.raises(ShareGone):
            fetching.end(10)
        assert not path.exists()
        assert len(parts(tmp_path)) == 1
        proxy.passed = []
        weighlock.fetch(proxy.of(second.url), into=path).close()
        assert proxy.down_bytes < 4 * MB  # the first block to see what is there, and the rest
    assert holds(path, model(6))


def test_a_file_that_is_served_again_keeps_its_url_and_what_was_pulled_of_it(
    tmp_path, no_leaks, chaos
):
    path, secret = tmp_path / "model.safetensors", tmp_path / "secret"
    weighlock.save(tmp_path / "source", model(6))
    with serve(tmp_path / "source", secret) as first:
        proxy = chaos.proxy(first.url, down=lambda n: Rules(hang=4 * MB + HEADS))
        limits = weighlock.Limits(idle_s=1, patience_s=0.5)
        fetching = InThread(
            weighlock.fetch, proxy.of(first.url), into=path, connections=1, limits=limits
        )
        until(lambda: len(proxy.passed) > 1 and proxy.passed[1].down >= 4 * MB)
        first.child.kill()
        first.child.wait()
        with pytest.raises((PeerLost, TransferTimeout)):
            fetching.end()
    with serve(tmp_path / "source", secret, port_of(first.url)) as second:
        assert second.url == first.url
        proxy.down, proxy.passed = ORDERLY, []
        weighlock.fetch(proxy.of(second.url), into=path).close()
        assert 2 * MB < proxy.down_bytes < 4 * MB
    assert holds(path, model(6))
    assert parts(tmp_path) == []


def test_an_owner_that_is_restarted_within_the_patience_of_a_fetch_costs_it_nothing(
    tmp_path, no_leaks, chaos
):
    path, secret = tmp_path / "model.safetensors", tmp_path / "secret"
    weighlock.save(tmp_path / "source", model(6))
    with serve(tmp_path / "source", secret) as first:
        proxy = chaos.proxy(first.url, down=only(1, Rules(hang=4 * MB)))
        fetching = InThread(weighlock.fetch, proxy.of(first.url), into=path, connections=1)
        until(lambda: len(proxy.passed) > 1 and proxy.passed[1].down == 4 * MB)
        first.child.kill()
        first.child.wait()
    proxy.sever()
    with serve(tmp_path / "source", secret, port_of(first.url)):
        fetching.end().close()
    assert proxy.down_bytes < 9 * MB
    assert holds(path, model(6))
    assert parts(tmp_path) == []


def test_an_owner_that_dies_for_good_is_given_up_in_time(tmp_path, no_leaks, chaos):
    path = tmp_path / "model.safetensors"
    with owner(6) as peer:
        proxy = chaos.proxy(peer.url, down=lambda n: Rules(hang=4 * MB))
        limits = weighlock.Limits(idle_s=1, patience_s=1)
        fetching = InThread(
            weighlock.fetch, proxy.of(peer.url), into=path, connections=1, limits=limits
        )
        until(lambda: len(proxy.passed) > 1 and proxy.passed[1].down == 4 * MB)
        peer.child.kill()
        peer.child.wait()
        proxy.sever()
        with pytest.raises(PeerLost):
            fetching.end(10)
        with pytest.raises(PeerLost):  # by the direct way: nobody listens
            InThread(weighlock.fetch, peer.url, limits=limits).end(10)
    assert not path.exists()
    (left,) = parts(tmp_path)
    os.unlink(tmp_path / left)


# --- C14: slow is not dead ---


@pytest.mark.parametrize(
    ("megabytes", "rules"),
    [
        (2.2, Rules(bytes_per_s=MB)),
        (0.001, Rules(latency_s=0.4)),
        (0.001, Rules(slice_bytes=1)),
        (0.001, Rules(slice_bytes=30, latency_s=0.02)),
    ],
    ids=["bandwidth", "latency", "byte by byte", "pieces with pauses"],
)
def test_a_slow_way_is_no_timeout_while_bytes_move(tmp_path, no_leaks, chaos, megabytes, rules):
    tensors = model(megabytes)
    path = tmp_path / "model.safetensors"
    with weighlock.Server(limits=weighlock.Limits(idle_s=1, head_s=2)) as server:
        share = server.share(tensors)
        proxy = chaos.proxy(share.url, down=rules, up=rules)
        limits = weighlock.Limits(idle_s=1, patience_s=0)  # no second try hides a timeout
        with weighlock.fetch(proxy.of(share.url), into=path, limits=limits) as fetched:
            assert same(fetched, tensors)


def test_an_owner_does_not_give_up_a_receiver_that_takes_little_at_a_time(no_leaks, chaos):
    """The kernel says that there is room again only when a third of its buffer is empty."""
    tensors = model(5)
    with weighlock.Server(limits=weighlock.Limits(idle_s=1)) as server:
        share = server.share(tensors)
        proxy = chaos.proxy(share.url, receive_bytes=64 * 1024)
        proxy.down = lambda n: ORDERLY if n == 0 else Rules(bytes_per_s=1.6 * MB)
        limits = weighlock.Limits(patience_s=0)
        assert same(weighlock.fetch(proxy.of(share.url), limits=limits), tensors)


@pytest.mark.parametrize("at", [HEADS, MB // 2], ids=["from the start", "in the middle"])
def test_a_body_that_only_trickles_is_a_timeout(server, chaos, at):
    """I15: a byte now and then is never a pause as long as a timeout, and never an end."""
    share = server.share(model(3.3))
    proxy = chaos.proxy(share.url, down=lambda n: Rules(trickle=at) if n else ORDERLY)
    fetching = InThread(weighlock.fetch, proxy.of(share.url), limits=IMPATIENT, connections=2)
    with pytest.raises(TransferTimeout) as caught:
        fetching.end(10)
    assert caught.value.phase == "idle"


def test_a_body_that_trickled_once_comes_over_the_next_connection(server, chaos):
    share = server.share(model(3.3))
    proxy = chaos.proxy(share.url, down=lambda n: Rules(trickle=MB // 2) if n == 1 else ORDERLY)
    limits = weighlock.Limits(idle_s=0.5)
    fetching = InThread(weighlock.fetch, proxy.of(share.url), limits=limits, connections=1)
    assert same(fetching.end(10), model(3.3))


# --- C15: replies that never come ---


@pytest.mark.parametrize("where", ["at once", "after the first reply"])
def test_replies_that_never_come_are_a_timeout(server, chaos, where):
    share = server.share(model(2.2))
    proxy = chaos.proxy(share.url, down=Rules(drop=True))
    if where == "after the first reply":
        proxy.down = lambda n: Rules(drop=n > 0)
    for call in (weighlock.fetch, lambda url, **how: list(weighlock.stream(url, **how))):
        with pytest.raises(TransferTimeout):
            InThread(call, proxy.of(share.url), limits=IMPATIENT).end(10)


def test_a_machine_that_does_not_accept_is_a_timeout(no_leaks):
    with unaccepting() as url, pytest.raises(TransferTimeout) as caught:
        InThread(weighlock.fetch, url, limits=IMPATIENT).end(10)
    assert caught.value.phase == "connect"


@contextlib.contextmanager
def unaccepting():
    """A URL where connecting takes for ever: the queue of those who wait is full."""
    with socket.socket() as listener, contextlib.ExitStack() as waiting:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            sock = waiting.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/s/x/model.safetensors"


def connecting_to(url):
    """How many connections to a port of this machine are still coming about."""
    port = f":{urlsplit(url).port:04X}"
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table]
    return sum(row[2].endswith(port) and row[3] == "02" for row in rows)


# --- receivers that are ended ---


@contextlib.contextmanager
def pull_that_hangs(tmp_path, server, chaos, tensors):
    """`weighlock pull` with four of six megabytes on the disk, and waiting for more."""
    share = server.share(tensors)
    proxy = chaos.proxy(share.url, down=lambda n: Rules(hang=4 * MB + HEADS))
    with pull(proxy.of(share.url), tmp_path / "model.safetensors") as process:
        until(lambda: any(size_on_disk(tmp_path / name) >= 3 * MB for name in parts(tmp_path)))
        until(lambda: proxy.passed[-1].down >= 4 * MB)
        yield process, proxy, share


def size_on_disk(path):
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGTERM, 143)],
    ids=["SIGKILL", "SIGINT", "SIGTERM"],
)
def test_a_pull_that_is_ended_by_a_signal_is_taken_up_by_the_next(
    tmp_path, server, chaos, number, code
):
    tensors = model(6)
    path = tmp_path / "model.safetensors"
    with pull_that_hangs(tmp_path, server, chaos, tensors) as (process, proxy, share):
        process.child.send_signal(number)
        assert process.child.wait(5) == code
        assert "Traceback" not in process.child.stderr.read()
    assert not path.exists()
    assert len(parts(tmp_path)) == 1
    proxy.down, proxy.passed = ORDERLY, []
    with pull(proxy.of(share.url), path) as process:
        assert process.child.wait(DEADLINE_S) == 0
    assert proxy.down_bytes < 5 * MB
    assert holds(path, tensors)
    assert parts(tmp_path) == []


def hanging(where):
    """What an owner does that stops answering at some point."""

    def answer(owner, request):
        honest = owner.honest(request)
        if where == "first reply":
            return owner.hang
        if where == "digests" and request.kind == "digests":
            return lambda sock: (sock.sendall(honest[:-10]), owner.hang(sock))
        if where == "first block":
            return lambda sock: (sock.sendall(honest[:50_000]), owner.hang(sock))
        if where == "data" and request.kind == "file" and request.number:
            return lambda sock: (sock.sendall(honest[: len(honest) // 2]), owner.hang(sock))
        if where == "last connection" and request.kind == "file" and request.number:
            last = honest.replace(b"Weighlock: 1", b"Connection: close")
            return lambda sock: (sock.sendall(last[: len(last) // 2]), owner.hang(sock))
        return honest

    return answer


@pytest.mark.parametrize("way", ["to memory", "to a file"])
@pytest.mark.parametrize(
    "where", ["connect", "first reply", "first block", "digests", "data", "last connection"]
)
def test_an_abort_from_another_thread_is_prompt_and_leaves_nothing(
    tmp_path, no_leaks, content, where, way
):
    """I19, wherever the fetch is waiting at that moment."""
    abort = weighlock.Abort()
    path = tmp_path / "model.safetensors"
    limits = weighlock.Limits(idle_s=3, connect_s=3, patience_s=0)
    with contextlib.ExitStack() as stack:
        into = path if way == "to a file" else None
        if where == "connect":
            url = stack.enter_context(unaccepting())
            before = connecting_to(url)
            fetching = InThread(weighlock.fetch, url, into=into, abort=abort, limits=limits)
            until(lambda: connecting_to(url) > before)
        else:
            owner = stack.enter_context(Scripted(content))
            owner.answer = lambda request: hanging(where)(owner, request)
            fetching = InThread(weighlock.fetch, owner.url, into=into, abort=abort, limits=limits)
            assert owner.hung.wait(DEADLINE_S)
        assert fetching.thread.is_alive()
        began = time.monotonic()
        abort.set("enough")
        with pytest.raises(Aborted, match="enough"):
            fetching.end()
        assert time.monotonic() - began < 1.5
    assert os.listdir(tmp_path) == []


def test_an_abort_between_two_tries_is_prompt(tmp_path, no_leaks):
    abort = weighlock.Abort()
    with Scripted(b"", answer=lambda request: None) as owner:  # hangs up on everybody
        limits = weighlock.Limits(patience_s=9)
        fetching = InThread(weighlock.fetch, owner.url, abort=abort, limits=limits)
        # Pauses double from a tenth of a second, and at least half of one is kept.
        until(lambda: len(owner.requests) >= 6)
        began = time.monotonic()
        abort.set("enough")
        with pytest.raises(Aborted, match="enough"):
            fetching.end()
        assert time.monotonic() - began < 1


def test_a_stream_that_is_aborted_or_left_ends_at_once(server, chaos):
    share = server.share(model(6))
    for leave in (True, False):
        proxy = chaos.proxy(share.url, down=lambda n: Rules(hang=2 * MB) if n else ORDERLY)
        abort = weighlock.Abort()
        stream = weighlock.stream(proxy.of(share.url), abort=abort)
        reading = InThread(next, stream)
        until(lambda proxy=proxy: len(proxy.passed) > 1 and proxy.passed[1].down == 2 * MB)
        if leave:
            proxy.release()
            reading.end()
            stream.close()
            continue
        abort.set("enough")
        with pytest.raises(Aborted, match="enough"):
            reading.end(5)
        stream.close()
