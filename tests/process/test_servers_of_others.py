"""What servers, caches and gateways of others do that is allowed, common, or passes.

What was pulled before must outlive all of it: a page of some login in place of a file, a signature
that has expired, a range that is refused by mistake.
"""

import http.client
import json
import os
import re

import numpy as np
import pytest

import weighlock
from process.plain_server import PlainServer, RawServer, Reply, asked_range, ranged
from weighlock import Limits
from weighlock.errors import FormatError, PeerLost, Refused, RemoteProtocolError, ShareGone

pytestmark = pytest.mark.usefixtures("no_leaks")

BRIEF = Limits(patience_s=0.2, connect_s=2.0, idle_s=2.0)
MB = 1 << 20
PATH = "/models/a.safetensors"
ARRAYS = {"a": np.random.default_rng(0).standard_normal(3_000_000).astype(np.float32)}
PAGE = Reply(200, {"Content-Type": "text/html"}, b"<!doctype html><title>Log in</title>" * 50)


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    path = tmp_path_factory.mktemp("others") / "a.safetensors"
    weighlock.save(path, ARRAYS, durable=False)
    return path.read_bytes()


@pytest.fixture
def server(content):
    with PlainServer({PATH: content}) as server:
        yield server


def cut_off(server, url, path, **options):
    """A fetch that ends after its first 8 MiB; gives what the server answered until then."""

    def behave(request, content):
        is_late = request.span is not None and request.span[0] >= 8 * MB
        return Reply(403) if is_late else ranged(request, content)

    server.behave = behave
    with pytest.raises(Refused):
        weighlock.fetch(url, into=path, connections=1, limits=BRIEF, **options)
    server.behave = ranged


def taken_up(server, url, path):
    """The ranges that another attempt asks for."""
    before = len(server.requests)
    weighlock.fetch(url, into=path, connections=1).close()
    return [request.span for request in server.requests[before + 1 :]]


@pytest.mark.parametrize(
    "stray",
    [
        PAGE,
        Reply(200, {}, b""),
        Reply(200, {}, b'{"error": "quota"}'),
        Reply(200, {}, b"version https://git-lfs.github.com/spec/v1\n"),
        Reply(416, {"Content-Range": "bytes */0"}),
    ],
    ids=["a login page", "nothing", "an error", "a pointer", "an empty file"],
)
def test_an_answer_that_is_no_weights_takes_nothing_away(server, stray, content, tmp_path):
    path = tmp_path / "b.safetensors"
    cut_off(server, server.url(PATH), path)
    server.behave = lambda request, content: stray
    with pytest.raises(FormatError):
        weighlock.fetch(server.url(PATH), into=path)
    server.behave = ranged
    assert taken_up(server, server.url(PATH), path) == [(0, MB), (8 * MB, len(content))]
    assert path.read_bytes() == content


def test_a_new_signature_goes_on_where_the_old_one_ended(server, content, tmp_path):
    path = tmp_path / "b.safetensors"
    url = server.url(PATH) + "?X-Amz-Date=1&X-Amz-Signature="
    cut_off(server, url + "old", path)
    assert taken_up(server, url + "new", path) == [(0, MB), (8 * MB, len(content))]
    assert path.read_bytes() == content


def test_another_file_behind_the_same_path_begins_anew(server, content, tmp_path):
    path = tmp_path / "b.safetensors"
    cut_off(server, server.url(PATH) + "?id=1", path)
    asked = taken_up(server, server.url(PATH) + "?id=2", path)
    assert sum(last - first for first, last in asked) == len(content)


@pytest.fixture
def sharded(tmp_path):
    """A sharded model of three files behind a server."""
    arrays = {name: np.full(300_000, n, np.float32) for n, name in enumerate("abc")}
    weighlock.save(tmp_path / "made", arrays, max_shard_bytes=1_200_000, durable=False)
    files = {f"/m/{entry.name}": entry.read_bytes() for entry in (tmp_path / "made").iterdir()}
    with PlainServer(files) as server:
        yield server


def test_a_page_in_place_of_one_shard_leaves_the_others(sharded, tmp_path):
    url, target = sharded.url("/m/model.safetensors.index.json"), tmp_path / "pulled"
    last = "/m/model-00003-of-00003.safetensors"
    sharded.behave = lambda request, content: (
        PAGE if request.path == last else ranged(request, content)
    )
    with pytest.raises(FormatError, match="HTML"):
        weighlock.fetch(url, into=target)
    landed = [name for name in os.listdir(target) if not name.startswith(".")]
    assert sorted(landed) == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2)]
    sharded.behave, before = ranged, len(sharded.requests)
    with weighlock.fetch(url, into=target) as catalog:
        assert [float(catalog[name].load()[0]) for name in "abc"] == [0, 1, 2]
    asked = [request.path for request in sharded.requests[before:]]
    assert max(asked.count(f"/m/{name}") for name in landed) <= 2  # only what it is, no data


def test_files_of_another_fetch_get_no_index(sharded, tmp_path):
    """What was exchanged after it had landed is not named by the index of this model."""
    url, target = sharded.url("/m/model.safetensors.index.json"), tmp_path / "pulled"
    first, last = (f"model-0000{n}-of-00003.safetensors" for n in (1, 3))

    def behave(request, content):
        if request.path == f"/m/{last}" and (target / first).exists():
            (target / first).write_bytes((target / first).read_bytes())
        return ranged(request, content)

    sharded.behave = behave
    with pytest.raises(weighlock.errors.DiskError, match="another fetch"):
        weighlock.fetch(url, into=target)
    assert not (target / "model.safetensors.index.json").exists()
    for left in target.glob(".*.part-*"):  # for the next attempt
        left.unlink()


@pytest.mark.parametrize("says", ["bytes */{}", None], ids=["the size", "nothing"])
def test_a_range_that_is_refused_by_mistake(says, tmp_path):
    """Some servers refuse a range that ends behind the file, and caches do so by mistake."""
    weighlock.save(tmp_path / "a", {"a": np.arange(7)}, durable=False)
    content = (tmp_path / "a").read_bytes()

    def behave(request, content):
        if request.span is None or request.span[1] <= len(content):
            return ranged(request, content)
        return Reply(416, {"Content-Range": says.format(len(content))} if says else {})

    with PlainServer({PATH: content}, behave) as server:
        with weighlock.open(server.url(PATH)) as catalog:
            assert catalog["a"].load().tolist() == list(range(7))
        weighlock.fetch(server.url(PATH), into=tmp_path / "b").close()
    assert (tmp_path / "b").read_bytes() == content


def test_a_long_index_of_a_server_without_ranges(tmp_path):
    name = "model-00001-of-00001.safetensors"
    weighlock.save(tmp_path / name, {"a": np.arange(7)}, durable=False)
    index = {"metadata": {"note": "x" * 3 * MB}, "weight_map": {"a": name}}
    files = {
        "/m/model.safetensors.index.json": json.dumps(index).encode(),
        f"/m/{name}": (tmp_path / name).read_bytes(),
    }
    with PlainServer(files, lambda request, content: Reply(200, {}, content)) as server:
        url = server.url("/m/model.safetensors.index.json")
        with weighlock.open(url) as catalog:
            assert catalog["a"].load().tolist() == list(range(7))
        with weighlock.fetch(url, into=tmp_path / "pulled") as catalog:
            assert catalog["a"].load().tolist() == list(range(7))


def speaking(content, before=b"", after=b""):
    """A server that says something before every head, and something after every body."""

    def answer(sock):
        while (asked := asked_range(sock)) is not None:
            body = content[slice(*asked)]
            said = f"bytes {asked[0]}-{asked[0] + len(body) - 1}/{len(content)}"
            head = (
                f"HTTP/1.1 206 OK\r\nContent-Range: {said}\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            sock.sendall(before + head.encode() + body + after)

    return RawServer(answer)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n", b""),
        (b"HTTP/1.1 102 Processing\r\n\r\n" * 3, b""),
        (b"", b"\r\n"),
    ],
    ids=["hints", "processing", "a line too much"],
)
def test_what_comes_between_replies_is_passed_over(before, after, content):
    with speaking(content, before, after) as server:
        catalog = weighlock.fetch(server.url(PATH), connections=1, limits=BRIEF)
    assert catalog["a"].load().tobytes() == ARRAYS["a"].tobytes()


def test_hints_without_end_are_not_listened_to(content):
    with (
        speaking(content, b"HTTP/1.1 102 Processing\r\n\r\n" * 20_000) as server,
        pytest.raises((RemoteProtocolError, PeerLost)),
    ):
        weighlock.fetch(server.url(PATH), limits=BRIEF)


def test_a_redirect_without_a_place_says_so(server):
    server.behave = lambda request, content: Reply(301)
    with pytest.raises(RemoteProtocolError, match="301"):
        weighlock.open(server.url(PATH))
    assert len(server.requests) == 1


def test_a_share_behind_a_token_is_verified(tmp_path):
    """A gateway that wants a query wants it of digests and reports as well."""
    with weighlock.Server() as owner:
        share = owner.share(ARRAYS)

        def behave(request, _):
            if "token=t" not in request.path:
                return Reply(403)
            return _passed_on(owner.port, request)

        with PlainServer(behave=behave) as gateway:
            path = re.sub("^http://[^/]*", "", share.url)
            catalog = weighlock.fetch(gateway.url(path) + "?token=t", limits=BRIEF)
        assert catalog.notes == ()
        assert catalog["a"].load().tobytes() == ARRAYS["a"].tobytes()


def _passed_on(port, request):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    ours = ("host", "content-length")
    headers = {key: text for key, text in request.headers.items() if key not in ours}
    body = b"{}" if request.method == "POST" else None
    connection.request(request.method, request.path, body, headers)
    reply = connection.getresponse()
    body = reply.read()
    connection.close()
    kept = ("ETag", "Content-Range", "Weighlock", "Content-Type")
    return Reply(reply.status, {n: reply.getheader(n) for n in kept if reply.getheader(n)}, body)


def test_a_header_in_other_letters_is_the_same_header():
    heads = []

    def answer(sock):
        head = b""
        while b"\r\n\r\n" not in head and (data := sock.recv(4096)):
            head += data
        heads.append(head)
        sock.sendall(b"HTTP/1.1 404 None\r\nContent-Length: 0\r\n\r\n")

    credential = weighlock.Credential({"user-agent": "mine"})
    with RawServer(answer) as server:
        access = weighlock.Access(origins={server.url(""): credential})
        with pytest.raises(ShareGone):
            weighlock.open(server.url(PATH), access=access)
    assert re.findall(rb"(?im)^user-agent: (.*)\r$", heads[0]) == [b"mine"]


def test_a_rate_that_is_none_tells_the_inbox_nothing(tmp_path):
    with weighlock.Server() as owner:
        inbox = owner.inbox("a", into=tmp_path / "in")
        with pytest.raises(weighlock.errors.LocalProtocolError):
            weighlock.push(inbox.url_for("a"), ARRAYS, limit_rate=0)
        assert inbox.senders["a"].state is weighlock.State.WAITING


def test_a_push_that_is_sent_elsewhere_says_where(server):
    server.behave = lambda request, _: Reply(308, {"Location": "https://other.example/i/1"})
    with pytest.raises(RemoteProtocolError, match=r"308.* it leads to https://other\.example/i/"):
        weighlock.push(server.url("/i/0123456789abcdef0123456789abcdef"), {"a": np.arange(3)})
