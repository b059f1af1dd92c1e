"""Servers that are not ours: correct ones, sloppy ones, and those that send one elsewhere.

Every way to read must end in the exact bytes or in an error that says what was wrong (I1, I25):
what a server answers is believed only as far as it says that it is what was asked for.
"""

import gzip
import itertools
import json
import os
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
import zipfile
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

import weighlock
from conftest import open_descriptors
from process.certificates import certificates, needs_openssl
from process.plain_server import ETAG, PlainServer, RawServer, Reply, Request, asked_range, ranged
from unit.unit_samples import quick_collections
from weighlock import Access, Credential, Limits
from weighlock.errors import (
    Aborted,
    FormatError,
    LocalProtocolError,
    NoSpace,
    PeerLost,
    Refused,
    RemoteProtocolError,
    ShareGone,
    SourceChanged,
    SourceError,
    TransferError,
    WeighlockError,
)

__all__ = ["certificates", "quick_collections"]  # fixtures of this module

pytestmark = pytest.mark.usefixtures("no_leaks")

BRIEF = Limits(patience_s=0.2, connect_s=2.0, idle_s=2.0)
"""Patience for tests in which nothing will get better."""

PATH = "/models/a.safetensors"

ARRAYS = {
    "a.weight": np.random.default_rng(0).standard_normal((300, 1000)).astype(np.float32),
    "a.bias": np.arange(7, dtype=np.int16),
    "b.weight": np.random.default_rng(1).standard_normal((2000, 1000)).astype(np.float32),
    "scalar": np.array(3.5),
    "nothing": np.zeros((0, 4), np.uint8),
}
"""Two ranges, of which the second is short."""


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    path = tmp_path_factory.mktemp("sloppy") / "a.safetensors"
    weighlock.save(path, ARRAYS, metadata={"made": "here"}, durable=False)
    return path.read_bytes()


@pytest.fixture
def serve(content):
    """Starts a server of one file that answers as it is told to."""
    servers = []

    def start(behave=None, files=None, **options):
        servers.append(PlainServer({PATH: content} if files is None else files, behave, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.__exit__()


def assert_same(found, arrays=ARRAYS):
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()


def loaded(catalog):
    return {name: np.array(ref.load()) for name, ref in catalog.items()}


def is_noted(catalog):
    return [note.partition(":")[0] for note in catalog.notes] == ["unverified"]


# The ways to read a URL. Each gives the arrays it got; those of one file say that nothing was
# verified.


def by_open(url, tmp_path, **options):
    options.pop("connections", None)
    with weighlock.open(url, **options) as catalog:
        assert is_noted(catalog)
        return loaded(catalog)


def by_slices(url, tmp_path, **options):
    with weighlock.open(url, **options) as catalog:
        found = loaded(catalog)
        rows = catalog["b.weight"][7:1999:200]
        assert rows.tobytes() == ARRAYS["b.weight"][7:1999:200].tobytes()
        return found


def to_memory(url, tmp_path, **options):
    catalog = weighlock.fetch(url, **options)
    assert is_noted(catalog)
    return loaded(catalog)


def into_arrays(url, tmp_path, **options):
    out = {name: np.full_like(array, 1) for name, array in ARRAYS.items()}
    catalog = weighlock.fetch(url, out=out, **options)
    assert is_noted(catalog)
    return out


def into_file(url, tmp_path, **options):
    path = tmp_path / "pulled" / "b.safetensors"
    path.parent.mkdir()
    with weighlock.fetch(url, into=path, **options) as catalog:
        assert is_noted(catalog)
        found = loaded(catalog)
    assert [entry.name for entry in path.parent.iterdir()] == ["b.safetensors"]
    return found


def by_stream(url, tmp_path, **options):
    found = dict(weighlock.stream(url, **options))
    return {name: found[name] for name in ARRAYS}


WAYS = [by_open, by_slices, to_memory, into_arrays, into_file, by_stream]


# Servers that are sloppy but can be understood.


def without_validator(request, content):
    return ranged(request, content, etag=None)


def weak(request, content):
    reply = ranged(request, content, etag=None)
    reply.headers["ETag"] = 'W/"1"'
    return reply


def dated(request, content):
    reply = ranged(request, content, etag=None)
    reply.headers["Last-Modified"] = "Mon, 01 Jan 2024 00:00:00 GMT"
    return reply


def status_200(request, content):
    """As the S3 gateway of rclone."""
    reply = ranged(request, content)
    reply.status = 200
    return reply


def chunked(request, content):
    reply = ranged(request, content)
    reply.chunked = True
    return reply


def identity(request, content):
    reply = ranged(request, content)
    reply.headers["Content-Encoding"] = "identity"
    return reply


def closing(request, content):
    """Announces that it hangs up after every reply, and does."""
    reply = ranged(request, content)
    reply.headers["Connection"] = "close"
    return reply


def capped(request, content, most=300_000):
    """Answers with the beginning of a range, as RFC 9110 allows it."""
    first, last = request.span
    headers = {**request.headers, "range": f"bytes={first}-{min(last, first + most) - 1}"}
    return ranged(Request(request.method, request.path, headers), content)


def unquoted(request, content):
    """Sends an ETag that is none, and knows it not again, as Go's server."""
    reply = ranged(request, content, etag="abc")
    return Reply(412) if "if-match" in request.headers else reply


def in_capitals(request, content):
    reply = ranged(request, content)
    reply.headers["Content-Range"] = reply.headers["Content-Range"].capitalize()
    return reply


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "behave",
    [
        *(ranged, without_validator, weak, dated, status_200, chunked, identity, closing),
        *(capped, unquoted, in_capitals),
    ],
)
def test_servers_that_answer_ranges_give_exact_bytes(way, behave, serve, tmp_path):
    server = serve(behave)
    assert_same(way(server.url(PATH), tmp_path))
    assert all(request.span for request in server.requests)


def test_what_is_asked_is_one_range_of_identity_and_of_the_version_first_seen(serve):
    server = serve()
    weighlock.fetch(server.url(PATH))
    for request in server.requests:
        assert request.headers["accept-encoding"] == "identity"
        assert "," not in request.headers["range"]
    assert {request.headers.get("if-match") for request in server.requests[1:]} == {ETAG}


def test_weak_validator_is_never_asked_for(serve):
    server = serve(weak)
    weighlock.fetch(server.url(PATH))
    assert not any({"if-match", "if-range"} & set(r.headers) for r in server.requests)


def test_unverified_slice_reads_exactly_its_bytes(serve, content):
    server = serve()
    with weighlock.open(server.url(PATH)) as catalog:
        asked = len(server.requests)
        catalog["b.weight"][1000:1002]
        (request,) = server.requests[asked:]
    first, last = request.span
    assert last - first == 2 * 1000 * 4
    assert content[first:last] == ARRAYS["b.weight"][1000:1002].tobytes()


# Servers that know no ranges.


@pytest.fixture
def http_server(tmp_path, content):
    """`python -m http.server`, which answers a range with 200 and everything."""
    directory = tmp_path / "served"
    (directory / "models").mkdir(parents=True)
    (directory / PATH[1:]).write_bytes(content)
    weighlock.save(directory / "small.safetensors", {"a": ARRAYS["a.bias"]}, durable=False)
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1"],
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    port = int(process.stdout.readline().split("port ")[1].split()[0])
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait(10)
    process.stdout.close()


def test_python_http_server_gives_whole_files(http_server, tmp_path):
    with urllib.request.urlopen(
        urllib.request.Request(http_server + PATH, headers={"Range": "bytes=0-9"})
    ) as reply:
        assert reply.status == 200  # or this test shows nothing
    for way in (to_memory, into_arrays, into_file, by_stream):
        place = tmp_path / way.__name__
        place.mkdir()
        assert_same(way(http_server + PATH, place))
    with weighlock.open(f"{http_server}/small.safetensors") as catalog:
        assert catalog["a"].load().tobytes() == ARRAYS["a.bias"].tobytes()


def test_python_http_server_cannot_give_parts_and_the_error_says_what_to_do(http_server):
    with weighlock.open(http_server + PATH) as catalog:
        assert list(catalog) == list(ARRAYS)
        with pytest.raises(SourceError, match="fetch it to a file"):
            catalog["b.weight"].load()


def test_some_tensors_from_a_server_without_ranges_come_or_the_error_says_what_to_do(
    http_server,
):
    # They lie behind the first block: asking for them alone gets everything.
    try:
        catalog = weighlock.fetch(http_server + PATH, names="b.*")
    except SourceError as error:
        assert "ranges" in str(error)  # noqa: PT017
    else:
        assert_same(loaded(catalog), {"b.weight": ARRAYS["b.weight"]})


def test_stream_from_a_server_without_ranges_whose_tensors_come_in_batches(serve, tmp_path):
    # Three batches: each would have to be asked for alone.
    arrays = {f"t{n}": np.full(4_000_000, n, np.float32) for n in range(3)}
    path = tmp_path / "large.safetensors"
    weighlock.save(path, arrays, durable=False)
    server = serve(lambda request, content: Reply(200, {}, content), {PATH: path.read_bytes()})
    try:
        found = dict(weighlock.stream(server.url(PATH), limits=BRIEF))
    except SourceError as error:
        assert "ranges" in str(error)  # noqa: PT017
    else:
        assert_same(found, arrays)


def test_everything_sent_for_a_range_is_not_read_to_its_end(serve):
    # 200 and everything is believed at the start only; later the connection is dropped at once.
    def forgetful(request, content):
        if len(server.requests) == 1:
            return ranged(request, content)
        return Reply(200, {"ETag": ETAG}, content)

    server = serve(forgetful)
    with (
        weighlock.open(server.url(PATH), limits=BRIEF) as catalog,
        pytest.raises(RemoteProtocolError, match="without the range"),
    ):
        catalog["b.weight"].load()
    assert len(server.requests) == 2


# Servers that cannot be believed.


def compressed(request, content):
    reply = ranged(request, content)
    reply.headers["Content-Encoding"] = "gzip"
    reply.body = gzip.compress(reply.body[:1000], 1)
    return reply


def without_length(request, content):
    return Reply(200, {}, content, chunked=True)


def without_content_range(request, content):
    reply = ranged(request, content)
    del reply.headers["Content-Range"]
    return reply


def with_unknown_total(request, content):
    reply = ranged(request, content)
    reply.headers["Content-Range"] = reply.headers["Content-Range"].rpartition("/")[0] + "/*"
    return reply


def other_range(request, content):
    first, last = request.span
    last = min(last, len(content))
    headers = {"ETag": ETAG, "Content-Range": f"bytes {first + 1}-{last - 1}/{len(content)}"}
    return Reply(206, headers, content[first + 1 : last])


def crumbs(request, content):
    return capped(request, content, most=1000)


def more_than_asked(request, content):
    headers = {"ETag": ETAG, "Content-Range": f"bytes 0-{len(content) - 1}/{len(content)}"}
    return Reply(206, headers, content)


def several_ranges(request, content):
    headers = {"ETag": ETAG, "Content-Type": "multipart/byteranges; boundary=x"}
    return Reply(206, headers, b"--x\r\n" + content)


def no_http(request, content):
    return Reply(999, {}, b"")


UNBELIEVABLE = [
    compressed,
    without_length,
    without_content_range,
    with_unknown_total,
    other_range,
    crumbs,
    more_than_asked,
    several_ranges,
    no_http,
]


@pytest.mark.parametrize("way", [by_open, to_memory, into_file, by_stream])
@pytest.mark.parametrize("behave", UNBELIEVABLE)
def test_servers_that_cannot_be_believed_are_refused_at_once(way, behave, serve, tmp_path):
    server = serve(behave)
    with pytest.raises((RemoteProtocolError, PeerLost)):
        way(server.url(PATH), tmp_path, limits=BRIEF)
    if behave is not no_http:
        assert len(server.requests) == 1


def after_the_first(later):
    """A server that is right once, and sloppy from then on."""

    def behave(request, content):
        behave.count += 1
        return ranged(request, content) if behave.count == 1 else later(request, content)

    behave.count = 0
    return behave


def of_other_etag(request, content):
    return ranged(request_without(request, "if-match"), content, etag='"other"')


def request_without(request, name):
    headers = {key: value for key, value in request.headers.items() if key != name}
    return type(request)(request.method, request.path, headers)


def of_other_total(request, content):
    reply = ranged(request, content)
    reply.headers["Content-Range"] = reply.headers["Content-Range"].rpartition("/")[0] + "/99999999"
    return reply


def everything_and_a_part_of_it(request, content):
    """nginx, whose file was replaced: 200, another ETag, and less than announced."""
    headers = {"ETag": '"other"', "Content-Length": str(len(content))}
    return Reply(200, headers, content[: len(content) // 4])


def precondition_failed(request, content):
    return Reply(412)


def not_found(request, content):
    return Reply(404)


LATER = {
    of_other_etag: SourceChanged,
    of_other_total: SourceChanged,
    everything_and_a_part_of_it: SourceChanged,
    precondition_failed: SourceChanged,
    compressed: RemoteProtocolError,
    without_content_range: RemoteProtocolError,
    other_range: RemoteProtocolError,
    crumbs: RemoteProtocolError,
    more_than_asked: RemoteProtocolError,
    several_ranges: RemoteProtocolError,
    not_found: ShareGone,
}


@pytest.mark.parametrize("way", [by_open, to_memory, into_arrays, by_stream])
@pytest.mark.parametrize("later", LATER)
def test_servers_that_turn_sloppy_are_noticed(way, later, serve, tmp_path):
    server = serve(after_the_first(later))
    with pytest.raises(LATER[later]) as caught:
        way(server.url(PATH), tmp_path, limits=BRIEF)
    assert not caught.value.retryable


@pytest.mark.parametrize("later", LATER)
def test_a_file_that_changes_while_it_is_pulled_never_gets_its_name(later, serve, tmp_path):
    server = serve(after_the_first(later))
    with pytest.raises(LATER[later]):
        weighlock.fetch(server.url(PATH), into=tmp_path / "b.safetensors", limits=BRIEF)
    assert not (tmp_path / "b.safetensors").exists()
    for left in tmp_path.iterdir():
        # What may stay for the next attempt can be taken for nothing complete.
        with pytest.raises(FormatError):
            weighlock.open(left)
        left.unlink()


def test_two_versions_are_never_mixed_in_a_resumed_file(serve, content, tmp_path):
    """Plain servers have no digests: what an attempt left counts only with the same validator."""
    old = bytearray(content)
    old[-100:] = bytes(100)
    old[len(content) // 2] ^= 255
    version = {"etag": '"old"', "content": bytes(old), "cut": 8_000_000}

    def behave(request, _):
        reply = ranged(request, version["content"], version["etag"])
        if request.span[0] >= version["cut"]:
            return Reply(503)
        return reply

    server = serve(behave)
    path = tmp_path / "b.safetensors"
    with pytest.raises(PeerLost):
        weighlock.fetch(server.url(PATH), into=path, limits=BRIEF)
    version.update(etag='"new"', content=content, cut=len(content))
    weighlock.fetch(server.url(PATH), into=path).close()
    assert path.read_bytes() == content
    assert [entry.name for entry in tmp_path.iterdir()] == ["b.safetensors"]


def test_an_answer_that_makes_no_sense_takes_nothing_away(serve, content, tmp_path):
    """What has landed is no worse for it: the next attempt goes on from there."""
    path = tmp_path / "b.safetensors"

    def behave(request, _):
        return Reply(418) if request.span[0] >= 8_000_000 else ranged(request, content)

    server = serve(behave)
    with pytest.raises(RemoteProtocolError, match="418"):
        weighlock.fetch(server.url(PATH), into=path, connections=1)
    server.behave = ranged
    before = len(server.requests)
    weighlock.fetch(server.url(PATH), into=path, connections=1).close()
    assert path.read_bytes() == content
    asked = [request.span for request in server.requests[before + 1 :]]
    assert asked == [(0, 1 << 20), (8 << 20, len(content))]  # the first block always comes anew


@pytest.mark.parametrize("is_dated", [False, True], ids=["tag alone", "tag and date"])
@pytest.mark.parametrize("way", [by_open, to_memory, into_arrays, into_file, by_stream])
def test_a_file_replaced_by_one_of_its_size_shows_by_its_weak_tag(way, is_dated, serve, tmp_path):
    """Its date may be the same: it has whole seconds, and some tools give all files one."""

    def replaced(request, content):
        reply = ranged(request, content, etag=None)
        reply.headers["ETag"] = f'W/"{min(len(server.requests), 2)}"'
        if is_dated:
            reply.headers["Last-Modified"] = "Thu, 01 Jan 1970 00:00:01 GMT"
        return reply

    server = serve(replaced)
    with pytest.raises(SourceChanged, match="ETag"):
        way(server.url(PATH), tmp_path, limits=BRIEF)
    for left in tmp_path.rglob("*.part-*"):
        left.unlink()


def test_a_weak_tag_takes_up_no_file(serve, content, tmp_path):
    path = tmp_path / "b.safetensors"
    other = bytes(byte ^ 255 for byte in content[4 << 20 : 5 << 20])
    old = content[: 4 << 20] + other + content[5 << 20 :]

    def behave(request, _):
        reply = weak(request, old)
        return Reply(503) if request.span[0] >= 8_000_000 else reply

    server = serve(behave)
    with pytest.raises(PeerLost):
        weighlock.fetch(server.url(PATH), into=path, limits=BRIEF)
    server.behave = weak
    weighlock.fetch(server.url(PATH), into=path).close()
    assert path.read_bytes() == content


def test_short_reply_is_asked_for_again(serve, tmp_path):
    def cut(request, content):
        reply = ranged(request, content)
        cut.count += 1
        if cut.count in (2, 4):
            reply.headers["Content-Length"] = str(len(reply.body))
            reply.body = reply.body[:500_000]
        return reply

    cut.count = 0
    server = serve(cut)
    assert_same(to_memory(server.url(PATH), tmp_path))


def test_endless_body_of_an_error_is_not_read(serve):
    server = serve(lambda request, content: Reply(403, {}, bytes(50_000_000)))
    with pytest.raises(Refused):
        weighlock.open(server.url(PATH), limits=BRIEF)


@pytest.mark.parametrize("ending", ["keep-alive", "close"])
@pytest.mark.parametrize("way", [to_memory, into_file, by_stream])
def test_abort_is_prompt_while_a_server_sends_nothing(way, ending, content, tmp_path):
    """I19. A server that will close the connection (HTTP/1.0, `python -m http.server`) as well."""
    abort = weighlock.Abort()
    with stuck(content, ending) as server:
        timer = threading.Timer(0.3, abort.set)
        timer.start()
        start = time.monotonic()
        with pytest.raises(Aborted):
            way(server.url(PATH), tmp_path, abort=abort, limits=Limits(idle_s=2.5))
        assert time.monotonic() - start < 1.5
        timer.join()  # the fetch may end before the call that ended it


@pytest.mark.parametrize("ending", ["keep-alive", "close"])
def test_reply_that_is_not_believed_is_dropped_at_once(ending, serve):
    # At once means before the error is looked at: whoever keeps it must not keep a socket with it.
    def behave(request, content):
        reply = compressed(request, content)
        reply.headers["Connection"] = ending
        reply.headers["Content-Length"] = "1000000"
        return reply

    server = serve(behave)
    sockets = len([to for to in open_descriptors().values() if to.startswith("socket")])
    with pytest.raises(RemoteProtocolError) as caught:
        weighlock.open(server.url(PATH), limits=BRIEF)
    server.__exit__()  # its own sockets are gone then
    after = len([to for to in open_descriptors().values() if to.startswith("socket")])
    assert caught.value is not None
    assert after == sockets - 1  # the one it listened on


def stuck(content, ending):
    """A server that answers one request, and to others sends a head, a few bytes and no more."""
    numbers = itertools.count()

    def answer(sock):
        number = next(numbers)
        asked = asked_range(sock)
        if asked is None:
            return
        first, last = asked[0], min(asked[1], len(content))
        sock.sendall(
            f"HTTP/1.1 206 Partial Content\r\nContent-Length: {last - first}\r\n"
            f"Content-Range: bytes {first}-{last - 1}/{len(content)}\r\n"
            f"Connection: {ending}\r\n\r\n".encode()
        )
        sock.sendall(content[first:last] if number == 0 else content[first : first + 1000])
        while sock.recv(4096):
            pass

    return RawServer(answer)


# Statuses.


@pytest.mark.parametrize(
    ("status", "error", "is_final"),
    [
        (400, RemoteProtocolError, True),
        (401, Refused, True),
        (403, Refused, True),
        (404, ShareGone, True),
        (407, Refused, True),
        (408, PeerLost, False),
        (410, ShareGone, True),
        (429, PeerLost, False),
        (451, RemoteProtocolError, True),
        (500, PeerLost, False),
        (502, PeerLost, False),
        (503, PeerLost, False),
    ],
)
def test_status_becomes_one_error_and_is_retried_only_where_that_can_help(
    status, error, is_final, serve
):
    server = serve(lambda request, content: Reply(status, {}, b"<html>no</html>"))
    with pytest.raises(error, match=r"127\.0\.0\.1") as caught:
        weighlock.fetch(server.url(PATH), limits=BRIEF)
    assert caught.value.retryable is not is_final
    assert (len(server.requests) == 1) is is_final
    if isinstance(caught.value, ShareGone):
        assert caught.value.reason == ("unknown" if status == 404 else "expired")


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_that_recovers_is_waited_for(status, serve, tmp_path):
    def behave(request, content):
        behave.count += 1
        return Reply(status) if behave.count in (1, 3) else ranged(request, content)

    behave.count = 0
    assert_same(to_memory(serve(behave).url(PATH), tmp_path))


@pytest.mark.parametrize("is_date", [False, True], ids=["seconds", "a date"])
def test_retry_after_is_obeyed(is_date, serve):
    times = []

    def behave(request, content):
        times.append(time.monotonic())
        if len(times) > 1:
            return ranged(request, content)
        # By a clock that is years behind.
        dates = {"Date": "Mon, 01 Jan 2018 00:00:00 GMT"}
        after = "Mon, 01 Jan 2018 00:00:01 GMT" if is_date else "1"
        return Reply(429, {**dates, "Retry-After": after})

    with weighlock.open(serve(behave).url(PATH)):
        assert times[1] - times[0] >= 1


@pytest.mark.parametrize("text", ["99999", "-1", "soon", "Mon, 01 Jan 2040 00:00:00 GMT", "1e9"])
def test_retry_after_never_outlasts_the_patience(text, serve):
    server = serve(lambda request, content: Reply(503, {"Retry-After": text}))
    with pytest.raises(PeerLost):
        weighlock.open(server.url(PATH), limits=BRIEF)


# Redirects.


def redirecting(places):
    """Answers from `{path: location}` where there is one, else as a correct server."""

    def behave(request, content):
        location = places.get(request.path.partition("?")[0])
        if location is not None:
            return Reply(302, {"Location": location})
        return Reply(404) if content is None else ranged(request, content)

    return behave


def chain(count):
    """`/0` leads over `count` redirects to the file."""
    return {f"/{n}": f"/{n + 1}" for n in range(count - 1)} | {f"/{count - 1}": PATH}


@pytest.mark.parametrize("count", [1, 5])
def test_five_redirects_are_followed(count, serve, tmp_path):
    server = serve(redirecting(chain(count)))
    assert_same(to_memory(server.url("/0"), tmp_path))
    # What was found at the end is asked for there.
    assert [request.path for request in server.asked("/0")] == ["/0"]


def test_a_sixth_redirect_is_refused(serve):
    server = serve(redirecting(chain(6)))
    with pytest.raises(Refused, match="more than 5"):
        weighlock.open(server.url("/0"))
    assert server.asked(PATH) == []


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_every_kind_of_redirect_is_followed(status, serve, tmp_path):
    def behave(request, content):
        if request.path == "/0":
            return Reply(status, {"Location": "models/a.safetensors"}, b"it moved")
        return ranged(request, content)

    assert_same(by_open(serve(behave).url("/0"), tmp_path))


@pytest.mark.parametrize(
    "location",
    [
        *("file:///etc/passwd", "ftp://127.0.0.1/a", "//", "http://", ""),
        *("http://u:secret@127.0.0.1/", "http://u:secret@127.0.0.1:port/"),
        *("http://[::1/a", "http://host:port/", "http://127.0.0.1:99999/"),
    ],
)
def test_a_redirect_to_something_else_is_an_error(location, serve):
    server = serve(redirecting({"/0": location}))
    with pytest.raises((SourceError, TransferError, RemoteProtocolError)) as caught:
        weighlock.open(server.url("/0"), limits=BRIEF)
    assert "secret" not in str(caught.value)


def test_a_redirect_in_a_circle_ends(serve):
    server = serve(redirecting({"/0": "/1", "/1": "/0"}))
    with pytest.raises(Refused, match="redirects"):
        weighlock.open(server.url("/0"))
    assert len(server.requests) == 6


def test_credentials_stay_with_their_origin(serve, tmp_path):
    elsewhere = serve()
    server = serve(redirecting({"/0": "/1", "/1": elsewhere.url(PATH)}))
    secret = Credential(headers={"Authorization": "Bearer secret-1"})
    access = Access(origins={f"127.0.0.1:{server.port}": secret})
    assert_same(to_memory(server.url("/0"), tmp_path, access=access))
    assert {r.headers["authorization"] for r in server.requests} == {"Bearer secret-1"}
    assert elsewhere.requests
    assert not any("authorization" in request.headers for request in elsewhere.requests)


def test_each_origin_gets_its_own_credential(serve, tmp_path):
    elsewhere = serve()
    server = serve(redirecting({"/0": elsewhere.url(PATH)}))
    access = Access(
        origins={
            server.origin: Credential(headers={"X-Token": "one"}),
            elsewhere.origin: Credential(headers={"X-Token": "two"}),
        }
    )
    assert_same(to_memory(server.url("/0"), tmp_path, access=access))
    assert {request.headers["x-token"] for request in server.requests} == {"one"}
    assert {request.headers["x-token"] for request in elsewhere.requests} == {"two"}


def signed(lasts, status=403):
    """`/latest` leads to a URL that holds for so many requests; then it must be asked again."""
    uses = {}
    lock = threading.Lock()

    def behave(request, content):
        with lock:
            if request.path == "/latest":
                return Reply(307, {"Location": f"{PATH}?signature={len(uses)}"})
            uses[request.path] = uses.get(request.path, 0) + 1
            if uses[request.path] > lasts or not request.path.endswith(str(len(uses) - 1)):
                return Reply(status, {}, b"<Error>expired</Error>")
        return ranged(request, content)

    return behave


@pytest.mark.parametrize("way", [by_open, to_memory, into_arrays, into_file, by_stream])
def test_expired_target_of_a_redirect_is_resolved_again(way, serve, tmp_path):
    server = serve(signed(lasts=2))
    assert_same(way(server.url("/latest"), tmp_path))
    assert len(server.asked("/latest")) >= 2


def test_target_whose_token_has_expired_as_s3_says_it_is_resolved_again(serve, tmp_path):
    server = serve(signed(lasts=2, status=400))
    assert_same(to_memory(server.url("/latest"), tmp_path))
    assert len(server.asked("/latest")) >= 2


def test_resource_that_is_another_after_resolving_again_is_noticed(serve, content):
    def behave(request, _):
        if request.path == "/latest":
            return Reply(307, {"Location": f"/v{len(server.asked('/latest'))}"})
        if request.path == "/v1" and len(server.asked("/v1")) > 1:
            return Reply(410)
        return ranged(request, content, etag=f'"{request.path}"')

    server = serve(behave)
    with (
        weighlock.open(server.url("/latest"), limits=BRIEF) as catalog,
        pytest.raises(SourceChanged),
    ):
        catalog["b.weight"].load()


@needs_openssl
def test_redirect_from_https_to_http_is_refused(serve, certificates):
    plain = serve()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.path("server"))
    server = serve(redirecting({"/0": "/1", "/1": plain.url(PATH)}), tls=context)
    access = Access(origins={server.origin: Credential(ca=certificates.ca)})
    with pytest.raises(Refused, match="https to http"):
        weighlock.open(server.url("/0"), access=access)
    assert plain.requests == []


@needs_openssl
def test_redirect_from_http_to_https_is_followed_and_verified(serve, certificates, tmp_path):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.path("server"))
    safe = serve(tls=context)
    server = serve(redirecting({"/0": safe.url(PATH)}))
    with pytest.raises(Refused, match="not trusted"):
        weighlock.open(server.url("/0"), limits=BRIEF)
    access = Access(origins={safe.origin: Credential(ca=certificates.ca)})
    assert_same(to_memory(server.url("/0"), tmp_path, access=access))


def hang_up(sock):
    sock.recv(100_000)
    sock.shutdown(socket.SHUT_RDWR)


def reset(sock):
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.recv(1)
    sock.close()


def give_an_internal_error(sock):
    sock.recv(100_000)
    sock.sendall(bytes.fromhex("15 03 03 00 02 02 50"))
    sock.shutdown(socket.SHUT_WR)
    sock.recv(100_000)


def answer_in_plain_text(sock):
    sock.recv(100_000)
    sock.sendall(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    sock.shutdown(socket.SHUT_WR)
    sock.recv(100_000)


@pytest.fixture
def busy(certificates, content):
    """Starts a server that speaks TLS, but not on connections for which it has a fault."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.path("server"))
    servers = []

    def start(faults):
        numbers = itertools.count()

        def answer(sock):
            fault = faults.get(next(numbers))
            if fault is not None:
                fault(sock)
                return
            with context.wrap_socket(sock, server_side=True) as safe:
                while (asked := asked_range(safe)) is not None:
                    body = content[slice(*asked)]
                    said = f"bytes {asked[0]}-{asked[0] + len(body) - 1}/{len(content)}"
                    safe.sendall(
                        f"HTTP/1.1 206 OK\r\nContent-Range: {said}\r\n"
                        f"Content-Length: {len(body)}\r\n\r\n".encode()
                        + body
                    )

        servers.append(RawServer(answer))
        origin = f"https://127.0.0.1:{servers[-1].port}"
        return f"{origin}{PATH}", Access(origins={origin: Credential(ca=certificates.ca)})

    yield start
    for server in servers:
        server.__exit__()


@needs_openssl
@pytest.mark.parametrize(
    ("fault", "number"),
    [
        *((hang_up, 0), (hang_up, 1), (reset, 0), (reset, 1), (answer_in_plain_text, 1)),
        *((give_an_internal_error, 0), (give_an_internal_error, 1)),
    ],
)
def test_a_handshake_that_fails_for_the_moment_is_tried_again(fault, number, busy, tmp_path):
    url, access = busy({number: fault})
    assert_same(to_memory(url, tmp_path, access=access, connections=1))


@needs_openssl
def test_who_has_never_spoken_tls_is_not_asked_again(busy):
    url, access = busy(dict.fromkeys(range(100), answer_in_plain_text))
    with pytest.raises(Refused, match="speaks no TLS"):
        weighlock.fetch(url, access=access)


@needs_openssl
def test_who_always_hangs_up_within_the_handshake_is_lost(busy):
    url, access = busy(dict.fromkeys(range(100), hang_up))
    with pytest.raises(PeerLost, match="TLS"):
        weighlock.fetch(url, access=access, limits=BRIEF)


RED = "\x1b[31m\x9b2J"


def raw_reply(status, headers, body=b""):
    lines = [f"HTTP/1.1 {status}", *headers, f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


@pytest.mark.parametrize(
    "head",
    [
        [f"403 {RED}"],
        [f"418 {RED}"],
        [f"503 {RED}{'x' * 5000}"],
        ["302 Found", f"Location: ftp://elsewhere/{RED}"],
        ["302 Found", f"Location: http://{RED}/a"],
        ["206 OK", "Content-Range: bytes 0-1/2", f"ETag: {RED}", f"Content-Encoding: {RED}"],
    ],
)
@pytest.mark.parametrize("way", ["fetch", "push"])
def test_words_of_a_server_are_shown_as_one_short_printable_line(way, head):
    def answer(sock):
        sock.recv(100_000)
        sock.sendall(raw_reply(*head[:1], head[1:]))
        sock.shutdown(socket.SHUT_WR)
        sock.recv(100_000)

    with RawServer(answer) as server:
        if way == "fetch":
            call = partial(weighlock.fetch, server.url(PATH))
        else:
            call = partial(weighlock.push, server.url("/i/x"), {"a": np.zeros(3)})
        with pytest.raises(WeighlockError) as caught:
            call(limits=BRIEF)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("header", ["ETag", "Last-Modified"])
def test_validators_are_shown_as_printable_lines(header, serve):
    def behave(request, content):
        reply = ranged(request, content, etag=None)
        reply.headers[header] = RED if len(server.requests) > 1 else f"{RED}{'x' * 5000}"
        return reply

    server = serve(behave)
    with pytest.raises(SourceChanged) as caught:
        weighlock.fetch(server.url(PATH), limits=BRIEF)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


# A plain server as a source of every format.


@pytest.fixture(scope="module")
def formats(tmp_path_factory):
    """The same arrays as files of every format, by path."""
    import torch

    place = tmp_path_factory.mktemp("formats")
    arrays = {name: array for name, array in ARRAYS.items() if array.size}
    tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
    tensors["turned"] = tensors["b.weight"].T
    weighlock.save(place / "model.safetensors", arrays, durable=False)
    torch.save(tensors, place / "model.pt")
    torch.save(tensors, place / "legacy.pt", _use_new_zipfile_serialization=False)
    # Every tensor in one piece, some of them in others.
    del tensors["turned"]
    whole = tensors["b.weight"]
    torch.save({**tensors, "rows": whole[3:-2], "first": whole[0]}, place / "views.pt")
    torch.save(tensors, place / "stored.pt")
    with (
        zipfile.ZipFile(place / "stored.pt") as stored,
        zipfile.ZipFile(place / "deflated.pt", "w", zipfile.ZIP_DEFLATED) as deflated,
    ):
        for name in stored.namelist():
            deflated.writestr(name, stored.read(name))
    weighlock.save(place / "sharded", arrays, durable=False, max_shard_bytes=1_500_000)
    files = {f"/{path.relative_to(place)}": path for path in place.rglob("*") if path.is_file()}
    assert len(files) == 10
    return {name: path.read_bytes() for name, path in files.items()}


INDEX = "/sharded/model.safetensors.index.json"
FILES = ["/model.safetensors", "/model.pt", "/legacy.pt", "/views.pt", "/deflated.pt"]
FORMATS = [*FILES, INDEX]


def expected(path):
    arrays = {name: array for name, array in ARRAYS.items() if array.size}
    if path.endswith("/views.pt"):
        arrays |= {"rows": ARRAYS["b.weight"][3:-2], "first": ARRAYS["b.weight"][0]}
    elif path.endswith(("/model.pt", "/legacy.pt")):
        arrays["turned"] = np.ascontiguousarray(ARRAYS["b.weight"].T)
    return arrays


def assert_equal(found, arrays):
    assert set(found) == set(arrays)
    for name, array in arrays.items():
        assert np.ascontiguousarray(found[name]).tobytes() == array.tobytes()
        assert found[name].shape == array.shape


@pytest.fixture
def plain(serve, formats):
    return serve(None, formats)


@pytest.mark.parametrize("path", FORMATS)
def test_every_format_is_opened(path, plain):
    with weighlock.open(plain.url(path)) as catalog:
        assert is_noted(catalog)
        assert_equal(loaded(catalog), expected(path))
        part = catalog["b.weight"][10:20, 5:7]
        assert part.tobytes() == ARRAYS["b.weight"][10:20, 5:7].tobytes()


@pytest.mark.parametrize("path", FORMATS)
def test_every_format_is_fetched_to_memory(path, plain):
    catalog = weighlock.fetch(plain.url(path))
    assert is_noted(catalog)
    before = len(plain.requests)
    assert_equal(loaded(catalog), expected(path))
    assert len(plain.requests) == before  # nothing is left to be asked for


@pytest.mark.parametrize("path", FORMATS)
def test_every_format_is_fetched_into_arrays(path, plain):
    out = {name: np.zeros_like(array) for name, array in expected(path).items()}
    assert is_noted(weighlock.fetch(plain.url(path), out=out))
    assert_equal(out, expected(path))


@pytest.mark.parametrize("path", FILES)
def test_every_format_is_fetched_to_a_file_as_it_is(path, plain, formats, tmp_path):
    target = tmp_path / "pulled"
    with weighlock.fetch(plain.url(path), into=target) as catalog:
        assert is_noted(catalog)
        assert_equal(loaded(catalog), expected(path))
    assert target.read_bytes() == formats[path]


def test_a_sharded_model_is_fetched_to_a_directory_as_it_is(plain, formats, tmp_path):
    target = tmp_path / "pulled"
    told = []
    with weighlock.fetch(
        plain.url(INDEX), into=target, progress=lambda *counts: told.append(counts)
    ) as catalog:
        assert is_noted(catalog)
        assert_equal(loaded(catalog), expected(INDEX))
    found = {f"/sharded/{path.name}": path.read_bytes() for path in target.iterdir()}
    assert found == {name: data for name, data in formats.items() if name.startswith("/sharded/")}
    total = sum(len(data) for name, data in found.items() if name.endswith(".safetensors"))
    assert told[-1] == (total, total)
    assert [done for done, _ in told] == sorted({done for done, _ in told})


@pytest.mark.parametrize("path", FORMATS)
def test_chosen_tensors_of_every_format(path, plain, tmp_path):
    wanted = {name: array for name, array in expected(path).items() if name.startswith("a.")}
    url = plain.url(path)
    catalog = weighlock.fetch(url, names="a.*")
    assert is_noted(catalog)
    assert_equal(loaded(catalog), wanted)
    out = {name: np.zeros_like(array) for name, array in wanted.items()}
    weighlock.fetch(url, names=["a.weight", "a.bias"], out=out)
    assert_equal(out, wanted)
    with weighlock.fetch(url, names="a.*", into=tmp_path / "part.safetensors") as catalog:
        assert is_noted(catalog)
        assert_equal(loaded(catalog), wanted)
    with pytest.raises(FormatError, match="no tensor matches"):
        weighlock.fetch(url, names="c.*")


@pytest.mark.parametrize("path", FORMATS)
def test_every_format_is_streamed(path, plain):
    assert_equal(dict(weighlock.stream(plain.url(path))), expected(path))
    wanted = {name: array for name, array in expected(path).items() if name.startswith("a.")}
    assert_equal(dict(weighlock.stream(plain.url(path), names="a.*")), wanted)


def test_stream_of_a_shard_that_lacks_what_its_index_promises(serve, formats):
    index = json.loads(formats[INDEX])
    index["weight_map"]["promised"] = index["weight_map"]["a.bias"]
    server = serve(None, formats | {INDEX: json.dumps(index).encode()})
    with pytest.raises(FormatError, match="'promised', which its index says"):
        list(weighlock.stream(server.url(INDEX)))


def to_arrays(url, place, **options):
    out = {name: np.zeros_like(array) for name, array in expected(url).items()}
    return weighlock.fetch(url, out=out, **options)


def chosen_to_file(url, place, **options):
    return weighlock.fetch(url, names="*", into=place / "chosen.safetensors", **options)


@pytest.mark.parametrize("path", FORMATS)
@pytest.mark.parametrize("way", [to_memory, to_arrays, chosen_to_file])
def test_progress_and_abort_of_every_format(way, path, plain, tmp_path):
    told = []
    way(plain.url(path), tmp_path, progress=lambda *counts: told.append(counts))
    assert told[-1][0] == told[-1][1]
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    abort = weighlock.Abort()
    began = len(told)

    def stop(*counts):
        told.append(counts)
        abort.set("enough")

    with pytest.raises(Aborted):
        way(plain.url(path), tmp_path, progress=stop, abort=abort, limit_rate=100_000)
    assert len(told) > began


@pytest.mark.parametrize("fault", [None, "touched", "changed there"])
def test_shards_that_have_landed_are_not_pulled_again(fault, serve, formats, tmp_path):
    etags = {path: f'"{path}"' for path in formats}
    server = serve(lambda request, content: ranged(request, content, etags[request.path]), formats)
    target = tmp_path / "pulled"

    def interrupt(done, total):
        if done > 0.9 * total:
            raise ConnectionAbortedError

    with pytest.raises(ConnectionAbortedError):
        weighlock.fetch(server.url(INDEX), into=target, progress=interrupt)
    first = target / "model-00001-of-00003.safetensors"
    if fault == "touched":
        os.utime(first, (1, 1))
    elif fault == "changed there":
        etags[f"/sharded/{first.name}"] = '"another"'
    before = first.stat().st_ino
    told = []
    with weighlock.fetch(
        server.url(INDEX), into=target, progress=lambda *counts: told.append(counts)
    ) as catalog:
        assert_equal(loaded(catalog), expected(INDEX))
    assert (first.stat().st_ino == before) is (fault is None)
    assert told[-1][0] == told[-1][1]
    found = {f"/sharded/{path.name}": path.read_bytes() for path in target.iterdir()}
    assert found == {name: data for name, data in formats.items() if name.startswith("/sharded/")}


def test_room_for_all_shards_is_looked_for_before_the_first(plain, tmp_path, monkeypatch):
    room = SimpleNamespace(f_blocks=1, f_frsize=1, f_bavail=2_000_000)  # one shard, but not all
    monkeypatch.setattr(os, "fstatvfs", lambda fd: room)
    with pytest.raises(NoSpace, match="2,000,000 bytes are free"):
        weighlock.fetch(plain.url(INDEX), into=tmp_path / "pulled")
    assert not list((tmp_path / "pulled").iterdir())


def test_index_that_leads_elsewhere_is_refused(serve, formats, tmp_path):
    path = INDEX
    for name in ("../a.safetensors", "http://127.0.0.1:1/a.safetensors", "/etc/passwd", "..", ""):
        index = b'{"metadata": {}, "weight_map": {"a": "%s"}}' % name.encode()
        server = serve(None, formats | {path: index})
        with pytest.raises(FormatError):
            weighlock.fetch(server.url(path), into=tmp_path / "pulled")
        with pytest.raises(FormatError):
            weighlock.open(server.url(path))
        assert {request.path for request in server.requests} == {path}


@pytest.mark.parametrize("name", ["a b", "a?b", "a#b", "a%41b", "ä", "a:b", "http:b", "a;b&c=d"])
def test_name_of_a_shard_is_the_name_of_a_file_whatever_it_would_mean_in_a_url(
    name, serve, formats, tmp_path
):
    name += ".safetensors"
    weights = dict.fromkeys(expected(FORMATS[0]), name)
    index = json.dumps({"metadata": {}, "weight_map": weights}).encode()
    directory = INDEX.rpartition("/")[0]
    # Colons and the like may come escaped or not; what would end a path must be.
    places = [f"{directory}/{urllib.parse.quote(name, safe)}" for safe in ("", ":;&=")]
    server = serve(None, {INDEX: index} | dict.fromkeys(places, formats["/model.safetensors"]))
    with weighlock.open(server.url(INDEX)) as catalog:
        assert_equal(loaded(catalog), expected(FORMATS[0]))
    weighlock.fetch(server.url(INDEX), into=tmp_path / "pulled").close()
    assert (tmp_path / "pulled" / name).read_bytes() == formats["/model.safetensors"]


def test_missing_shard_is_named(serve, formats, tmp_path):
    missing = "/sharded/model-00002-of-00003.safetensors"
    assert missing in formats
    server = serve(None, {name: data for name, data in formats.items() if name != missing})
    with pytest.raises(ShareGone, match="00002-of-00003"):
        weighlock.fetch(server.url(INDEX), into=tmp_path / "pulled", limits=BRIEF)


@pytest.mark.parametrize("content", [b"", b"<html>log in</html>" * 100, bytes(5000)])
@pytest.mark.parametrize("way", [by_open, to_memory, into_file])
def test_what_is_no_model_is_refused(way, content, serve, tmp_path):
    server = serve(None, {PATH: content})
    with pytest.raises(FormatError):
        way(server.url(PATH), tmp_path, limits=BRIEF)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_out_and_into_at_once_are_a_mistake_of_the_caller(plain, tmp_path):
    with pytest.raises(LocalProtocolError):
        weighlock.fetch(plain.url(FORMATS[0]), out={}, into=tmp_path / "a")
    assert plain.requests == []


def test_out_that_does_not_fit_is_refused_before_anything_is_pulled(plain):
    arrays = expected(FORMATS[0])
    wrong = {name: np.zeros_like(array) for name, array in arrays.items()}
    wrong["b.weight"] = np.zeros((1000, 2000), np.float32)
    for out in (wrong, {"a.bias": arrays["a.bias"]}, wrong | {"more": arrays["a.bias"]}):
        before = len(plain.requests)
        with pytest.raises(FormatError):
            weighlock.fetch(plain.url(FORMATS[0]), out=out)
        assert len(plain.requests) == before + 1
