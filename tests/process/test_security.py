"""Table E: who gets bytes, who is dialled, what is shown, and what a hostile owner can make us do.

Scenarios are named by their rows in the reliability notes. Certificates are made by `openssl` for
each run.
"""

import contextlib
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import socket
import ssl
import statistics
import subprocess
import sys
import time
import traceback

import numpy as np
import pytest
from blake3 import blake3

import weighlock
from process.certificates import certificates, needs_openssl
from process.plain_server import PlainServer, Reply, ranged
from unit.unit_samples import quick_collections
from waiting import answers, until
from weighlock import Access, Credential, Limits, Server
from weighlock.errors import (
    FormatError,
    LimitExceeded,
    LocalProtocolError,
    NoSpace,
    PeerLost,
    Refused,
    RemoteProtocolError,
    ShareGone,
    SourceError,
    TransferError,
    WeighlockError,
)

__all__ = ["certificates", "quick_collections"]  # fixtures of this module

pytestmark = pytest.mark.usefixtures("no_leaks")

BRIEF = Limits(patience_s=0.2, connect_s=2.0, idle_s=2.0)

ARRAYS = {"a": np.arange(300_000, dtype=np.float32), "b": np.arange(12, dtype=np.int8)}


@pytest.fixture
def server():
    with Server() as server:
        yield server


def answer_of(url, method="GET", headers=()):
    """Status, headers in lower case and body of a reply, without our client."""
    import http.client
    from urllib.parse import urlsplit

    parts = urlsplit(url)
    with contextlib.closing(http.client.HTTPConnection(parts.netloc, timeout=10)) as connection:
        connection.request(method, parts.path, headers=dict(headers))
        reply = connection.getresponse()
        return reply.status, {k.lower(): v for k, v in reply.getheaders()}, reply.read()


def other_id(url, share_id=None):
    return re.sub(r"/s/[0-9a-f]+/", f"/s/{share_id or secrets.token_hex(16)}/", url)


WAYS = {
    "open": lambda url, path, **options: weighlock.open(url, **options),
    "memory": lambda url, path, **options: weighlock.fetch(url, **options),
    "file": lambda url, path, **options: weighlock.fetch(url, into=path, **options),
    "stream": lambda url, path, **options: list(weighlock.stream(url, **options)),
}


@pytest.fixture(params=WAYS)
def way(request, tmp_path):
    def run(url, **options):
        return WAYS[request.param](url, tmp_path / "out.safetensors", limits=BRIEF, **options)

    yield run
    assert os.listdir(tmp_path) == []


# E1, E2, E6: ids.


def test_e1_unknown_id_gets_nothing(server, way):
    share = server.share(ARRAYS)
    with pytest.raises(ShareGone) as caught:
        way(other_id(share.url))
    assert caught.value.reason == "unknown"
    assert not caught.value.retryable


@pytest.mark.parametrize("reason", ["revoked", "expired"])
def test_e1_id_that_is_over_says_why(reason, server, way):
    share = server.share(ARRAYS, expires_s=0.01 if reason == "expired" else None)
    if reason == "revoked":
        share.revoke()
    until(lambda: share.ended)
    with pytest.raises(ShareGone) as caught:
        way(share.url)
    assert caught.value.reason == reason
    assert answer_of(share.url)[0] == 410


def test_e1_revoked_share_serves_no_more_of_an_open_catalog(server):
    share = server.share(ARRAYS)
    with weighlock.open(share.url, limits=BRIEF) as catalog:
        share.revoke()
        with pytest.raises(ShareGone) as caught:
            catalog["a"].load()
    assert caught.value.reason == "revoked"


def test_e6_ticket_of_one_owner_is_unknown_to_another(server, way):
    share = server.share(ARRAYS)
    with Server() as other:
        other.share(ARRAYS)
        url = share.url.replace(str(server.port), str(other.port))
        with pytest.raises(ShareGone) as caught:
            way(url)
    assert caught.value.reason == "unknown"


def test_e6_ticket_of_an_owner_that_was_restarted_is_unknown(way):
    with Server() as server:
        port, url = server.port, server.share(ARRAYS).url
    with Server(port=port) as again:
        again.share(ARRAYS)
        with pytest.raises(ShareGone) as caught:
            way(url)
    assert caught.value.reason == "unknown"


def test_e1_unknown_foreign_and_malformed_ids_get_the_same_reply(server):
    share = server.share(ARRAYS)
    share_id = share.url.split("/")[4]
    with Server() as other:
        foreign = other.share(ARRAYS).url.split("/")[4]
    replies = []
    for wrong in (secrets.token_hex(16), foreign, share_id[:-1] + "0", "0" * 32, share_id[:-1]):
        if wrong == share_id:
            continue
        for path in ("model.safetensors", "digests/0"):
            status, headers, body = answer_of(f"{server.url}/s/{wrong}/{path}")
            headers.pop("date")
            replies.append((status, tuple(sorted(headers.items())), body))
    assert len(set(replies)) == 1
    assert replies[0][0] == 404


@pytest.mark.parametrize("path", ["digests/0", "receivers/anonymous"])
def test_e1_control_requests_need_the_id_too(path, server):
    server.share(ARRAYS)
    method = "POST" if path.startswith("r") else "GET"
    assert answer_of(f"{server.url}/s/{'0' * 32}/{path}", method)[0] == 404


def test_e1_nothing_lists_what_there_is(server):
    share = server.share(ARRAYS)
    share_id = share.url.split("/")[4]
    for path in ("/", "/s", "/s/", "/s/*", "/i/", "/robots.txt", "/metrics", "/%2e%2e/etc/passwd"):
        status, headers, body = answer_of(server.url + path)
        assert status == 404
        assert share_id.encode() not in body
        assert share_id not in str(headers)


def test_e2_ids_are_128_bits_and_never_repeat(server):
    arrays = {"b": ARRAYS["b"]}
    ids = [server.share(arrays).url.split("/")[4] for _ in range(200)]
    assert len(set(ids)) == 200
    assert all(re.fullmatch("[0-9a-f]{32}", found) for found in ids)
    # Every bit is used: of 200 random ids each bit is set in about half.
    bits = np.unpackbits(np.array([list(bytes.fromhex(found)) for found in ids], np.uint8), axis=1)
    assert bits.sum(axis=0).min() > 50
    assert bits.sum(axis=0).max() < 150


@pytest.mark.parametrize(
    "bad", ["", "0", "A" * 32, "0" * 31, "0" * 33, "../" * 11, "0" * 31 + "\n"]
)
def test_e2_chosen_id_must_be_as_long(bad, server):
    if bad == "":
        assert len(server.share(ARRAYS, share_id=bad).url.split("/")[4]) == 32
        return
    with pytest.raises(LocalProtocolError):
        server.share(ARRAYS, share_id=bad)


def test_e2_a_miss_tells_nothing_by_its_time(server):
    share_id = server.share(ARRAYS).url.split("/")[4]
    near = [share_id[:-1] + digit for digit in "0123456789abcdef" if digit != share_id[-1]]
    far = [secrets.token_hex(16) for _ in near]

    def median(ids):
        times = []
        for wrong in ids:
            start = time.perf_counter()
            assert answer_of(f"{server.url}/s/{wrong}/model.safetensors")[0] == 404
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    one, other = median(near), median(far)
    assert min(one, other) >= 0.02  # guessing is slow
    assert abs(one - other) < 0.01


# E3: what is shown.


class Records(logging.Handler):
    """Every log record of the process, as text."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.text = ""

    def emit(self, record):
        self.text += self.format(record) + "\n"


@pytest.fixture
def log():
    records = Records()
    root = logging.getLogger()
    level = root.level
    root.addHandler(records)
    root.setLevel(logging.DEBUG)
    yield records
    root.removeHandler(records)
    root.setLevel(level)


def everything_of(error):
    """All that a program may print of an error."""
    return "".join(traceback.format_exception(error)) + repr(error) + str(error.__dict__)


def test_e3_ids_and_credentials_are_in_no_log_repr_or_error(server, log, tmp_path):
    token = secrets.token_hex(8)  # not in the source, which a traceback shows
    access = Access(origins={server.url: Credential(headers={"Authorization": token})})
    share = server.share(ARRAYS)
    share_id = share.url.split("/")[4]
    seen = [repr(server), repr(share), repr(access)]
    with weighlock.open(share.url, access=access) as catalog:
        seen += [repr(catalog), repr(catalog["a"]), repr(catalog["a"].source)]
        catalog["a"].load()
        weighlock.fetch(share.url, access=access, into=tmp_path / "a").close()
        with pytest.raises(FormatError) as caught:
            weighlock.fetch(share.url, access=access, out={"a": ARRAYS["b"], "b": ARRAYS["b"]})
        seen.append(everything_of(caught.value))
        with pytest.raises(FormatError) as caught:
            weighlock.fetch(share.url, access=access, names="nothing")
        seen.append(everything_of(caught.value))
        share.revoke()
        with pytest.raises(ShareGone) as caught:
            weighlock.open(share.url, access=access)
        seen.append(everything_of(caught.value))
        seen += [repr(share), repr(server)]
    server.close()
    for way in WAYS.values():
        with pytest.raises(PeerLost) as caught:
            way(f"{share.url}?token={token}#r={token}", tmp_path / "b", access=access, limits=BRIEF)
        seen.append(everything_of(caught.value))
    text = "\n".join(seen) + log.text
    assert "127.0.0.1" in text
    assert share_id not in text
    assert token not in text
    assert "share 1: 2 tensors" in log.text


def test_e3_id_behind_a_prefix_of_a_public_url_is_not_shown_either(log):
    with Server(public_url="http://127.0.0.1:9/models") as server:
        share = server.share(ARRAYS)
        share_id = share.url.split("/")[5]
        with pytest.raises(TransferError) as caught:
            weighlock.fetch(share.url, limits=BRIEF)
    assert share_id not in repr(share) + everything_of(caught.value) + log.text


def test_e3_tampered_validator_or_reason_of_an_owner_cannot_print_to_a_terminal(log):
    hostile = "\x1b[31m\x07"
    body = json.dumps({"reason": hostile, "cause": hostile, "error": hostile}).encode()
    for status in (404, 410, 500, 403, 503):
        with (
            PlainServer(behave=lambda r, c, s=status: Reply(s, {}, body)) as owner,
            pytest.raises(TransferError) as caught,
        ):
            weighlock.open(owner.url("/a"), limits=BRIEF)
        assert "\x1b" not in str(caught.value)


# E4: what is dialled.


@pytest.fixture
def dialled(monkeypatch):
    """Fails a test that opens a connection or looks up a name."""

    def refuse(*arguments, **options):
        raise AssertionError(f"dialled {arguments}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "unix:///run/weighlock.sock",
        "http+unix://%2Frun%2Fweighlock.sock/a",
        "ftp://127.0.0.1/a",
        "gopher://127.0.0.1/a",
        "http://user:password@127.0.0.1/a",
        "https://user@127.0.0.1/a",
        "http:///etc/passwd",
        "http://",
        "http://127.0.0.1:99999/",
        "http://[::1/",
        "//127.0.0.1/a",
        "http://127.0.0.1\r\nHost: x/",
    ],
)
@pytest.mark.usefixtures("dialled")
def test_e4_what_is_no_plain_url_is_refused_before_any_connection(url, way):
    with pytest.raises(SourceError) as caught:
        way(url)
    assert "password" not in str(caught.value)


# E5: TLS.


@pytest.fixture
def tls_server(certificates):
    """Starts servers of our own with a certificate."""
    with contextlib.ExitStack() as servers:

        def start(name="server", **options):
            return servers.enter_context(Server(tls_cert=certificates.path(name), **options))

        yield start


def trusting(server, certificates, **options):
    return Access(origins={server.url: Credential(ca=certificates.ca, **options)})


@needs_openssl
def test_e5_tls_serves_exact_bytes(tls_server, certificates, tmp_path):
    server = tls_server()
    path = tmp_path / "a.safetensors"
    weighlock.save(path, ARRAYS, durable=False)
    with weighlock.open(path) as stored:
        for tensors in (ARRAYS, stored):
            share = server.share(tensors)
            assert share.url.startswith("https://127.0.0.1:")
            got = weighlock.fetch(share.url, access=trusting(server, certificates))
            for name, array in ARRAYS.items():
                assert got[name].load().tobytes() == array.tobytes()
            assert got.notes == ()


@needs_openssl
def test_e5_plaintext_to_a_tls_port_gets_no_payload(tls_server, certificates, way):
    server = tls_server()
    share = server.share(ARRAYS)
    with pytest.raises((PeerLost, RemoteProtocolError)):
        way(share.url.replace("https:", "http:"))
    with socket.create_connection(("127.0.0.1", server.port), 5) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        raw.settimeout(5)
        answer = b""
        with contextlib.suppress(OSError):
            while piece := raw.recv(1000):
                answer += piece
    assert b"HTTP" not in answer
    weighlock.fetch(share.url, access=trusting(server, certificates))  # it lives


@needs_openssl
def test_e5_tls_to_a_plaintext_port_is_refused_without_falling_back(server, certificates, way):
    share = server.share(ARRAYS)
    url = share.url.replace("http:", "https:")
    with pytest.raises(Refused, match="TLS"):
        way(url, access=Access(origins={"127.0.0.1": Credential(ca=certificates.ca)}))


@needs_openssl
@pytest.mark.parametrize("name", ["self-signed", "wrong-host", "expired"])
def test_e5_certificate_that_proves_nothing_is_refused(name, tls_server, certificates, way):
    server = tls_server(name)
    share = server.share(ARRAYS)
    with pytest.raises(Refused, match="certificate is not trusted") as caught:
        way(share.url, access=trusting(server, certificates))
    assert not caught.value.retryable


@needs_openssl
def test_e5_authority_nobody_named_is_not_trusted(tls_server, way):
    with pytest.raises(Refused, match="Credential"):
        way(tls_server().share(ARRAYS).url)


@needs_openssl
def test_e5_server_refuses_tls_older_than_1_2(tls_server, certificates):
    server = tls_server()
    for version, is_served in (("-tls1_1", False), ("-tls1_2", True)):
        result = subprocess.run(
            [
                *("openssl", "s_client", "-connect", f"127.0.0.1:{server.port}", version),
                *("-cipher", "DEFAULT@SECLEVEL=0", "-CAfile", certificates.ca),
            ],
            input=b"",
            capture_output=True,
            timeout=20,
        )
        found = re.search(rb"Cipher\s*(?:is|:) \(?(\w+)", result.stdout)
        assert (found is not None and found[1] not in (b"NONE", b"0000")) is is_served


@needs_openssl
def test_e5_client_refuses_tls_older_than_1_2(certificates, way):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [
            *("openssl", "s_server", "-accept", f"127.0.0.1:{port}", "-tls1_1", "-quiet", "-www"),
            *("-cipher", "DEFAULT@SECLEVEL=0", "-cert", certificates.path("server")),
            *("-key", certificates.path("server")),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until(lambda: answers(port))
        access = Access(origins={"127.0.0.1": Credential(ca=certificates.ca)})
        with pytest.raises(Refused, match="TLS"):
            way(f"https://127.0.0.1:{port}/a", access=access)
    finally:
        process.kill()
        process.wait()


@needs_openssl
def test_e5_certificate_of_clients_is_demanded(tls_server, certificates, tmp_path):
    server = tls_server(client_ca=certificates.ca)
    share = server.share(ARRAYS)
    for cert in (None, certificates.path("other-client")):
        access = trusting(server, certificates, cert=cert)
        # With TLS 1.3 the refusal comes after the client believes that it is connected.
        with pytest.raises((Refused, PeerLost), match=r"TLS|certificate"):
            weighlock.fetch(share.url, access=access, limits=BRIEF)
    access = trusting(server, certificates, cert=certificates.path("client"))
    got = weighlock.fetch(share.url, access=access)
    assert got["a"].load().tobytes() == ARRAYS["a"].tobytes()


@needs_openssl
def test_e5_refused_client_certificate_is_not_worth_another_try(tls_server, certificates):
    server = tls_server(client_ca=certificates.ca)
    share = server.share(ARRAYS)
    with pytest.raises(Refused):
        weighlock.fetch(share.url, access=trusting(server, certificates), limits=BRIEF)


@needs_openssl
def test_e5_peer_that_never_shakes_hands_is_given_up(tls_server, certificates):
    server = tls_server(limits=Limits(connect_s=0.2))
    with socket.create_connection(("127.0.0.1", server.port), 5) as raw:
        raw.settimeout(5)
        assert raw.recv(10) == b""


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.com", ""])
def test_e5_address_others_can_reach_needs_tls_or_a_word(host):
    with pytest.raises(Refused, match="insecure=True"):
        Server(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_e5_wildcard_needs_the_name_others_use(host):
    with pytest.raises(LocalProtocolError, match="public_url"):
        Server(host, insecure=True)


def test_e5_wildcard_with_a_public_url_serves():
    with Server("0.0.0.0", insecure=True, public_url="http://weights.example:1/") as server:
        share = server.share(ARRAYS)
        assert share.url.startswith("http://weights.example:1/s/")
        here = share.url.replace("weights.example:1", f"127.0.0.1:{server.port}")
        assert weighlock.fetch(here)["b"].load().tobytes() == ARRAYS["b"].tobytes()


@pytest.mark.parametrize(
    "url",
    ["weights.example:8400", "ftp://weights.example", "http://", "", "http://a/?b", "http://a/#b"],
)
def test_e5_public_url_that_no_ticket_can_begin_with_is_refused(url):
    with pytest.raises(LocalProtocolError, match="public_url"):
        Server(public_url=url)


@pytest.mark.parametrize("port", [-1, 65536])
def test_number_that_is_no_port_is_refused(port):
    with pytest.raises(LocalProtocolError, match=f"port {port}"):
        Server(port=port)


@pytest.mark.parametrize("given", ["client_ca", "tls_key"])
def test_e5_clients_are_not_admitted_unasked_for_want_of_a_certificate(given):
    with pytest.raises(LocalProtocolError, match=f"{given} without a certificate"):
        Server(**{given: "file.pem"})


@pytest.mark.parametrize(("length", "status"), [(1000, b"206"), (3000, b"431")])
@pytest.mark.parametrize("lines", [1, 50])
def test_e4_head_that_comes_at_once_is_bounded_like_one_that_trickles(lines, length, status):
    with Server(limits=Limits(request_head_bytes=2048)) as server:
        path = server.share(ARRAYS).url.removeprefix(server.url).encode()
        head = b"GET %s HTTP/1.1\r\nHost: a\r\nRange: bytes=0-0\r\n" % path
        more = b"X: %s\r\n" % (b"a" * (length // lines)) * lines
        with socket.create_connection(("127.0.0.1", server.port), 5) as raw:
            raw.sendall(head + more + b"\r\n")
            assert raw.recv(100).split()[1] == status


def test_target_in_the_form_for_proxies_is_understood():
    with Server() as server:
        share = server.share(ARRAYS)
        with socket.create_connection(("127.0.0.1", server.port), 5) as raw:
            raw.sendall(b"HEAD %s HTTP/1.1\r\nHost: a\r\n\r\n" % share.url.encode())
            assert raw.recv(100).split()[1] == b"200"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.9.9.9", "::1"])
def test_e5_loopback_needs_neither(host):
    if host == "::1" and not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("no IPv6 here")
    with Server(host) as server:
        share = server.share(ARRAYS)
        assert weighlock.fetch(share.url)["b"].load().tobytes() == ARRAYS["b"].tobytes()


@needs_openssl
def test_e5_certificate_that_is_none_is_named(certificates, tmp_path):
    for path in (tmp_path / "nowhere.pem", __file__):
        with pytest.raises(SourceError, match=re.escape(str(path))):
            Server(tls_cert=str(path))


# E8: what an owner announces.


def test_e8_fetch_that_never_got_a_byte_leaves_no_file(tmp_path):
    """Not even an empty one: nobody would ever take that up, and each attempt would leave one."""
    with HostileOwner(*file_of({"a": tensor(0, TEN_TB)}, TEN_TB)) as owner:
        for _ in range(3):
            with pytest.raises(NoSpace):
                weighlock.fetch(owner.share_url, into=tmp_path / "a", limits=BRIEF)
    left = os.listdir(tmp_path)
    for name in left:
        os.unlink(tmp_path / name)
    assert left == []


class HostileOwner(PlainServer):
    """Speaks like a share, and announces what it likes. Remembers what was asked of it."""

    def __init__(self, first, size, block=None):
        self.first = first
        self.announced = size
        super().__init__({"/s/x/model.safetensors": b""}, self._behave)
        self.block = block

    @property
    def share_url(self):
        return self.url("/s/x/model.safetensors")

    def _behave(self, request, content):
        if "/digests/" in request.path:
            count = min(1024, -(-self.announced // 2**20))
            first = blake3(self.first).digest()
            return Reply(200, {"Weighlock": "1"}, first + bytes(32 * (count - 1)))
        if request.method == "POST":
            return Reply(200, {}, b'{"lives":true}')
        start, end = request.span
        end = min(end, self.announced)
        headers = {"Weighlock": "1", "ETag": '"x"', "Accept-Ranges": "bytes"}
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{self.announced}"
        body = self.first if start == 0 else b""
        return Reply(206, headers | {"Content-Length": str(end - start)}, body)

    @property
    def blocks_asked(self):
        """Requests for data behind the first block."""
        return [r for r in self.requests if r.span and r.span[0] > 0]


def file_of(header, data_bytes, text=None):
    """The first block of a file with that header."""
    text = json.dumps(header).encode() if text is None else text
    content = len(text).to_bytes(8, "little") + text
    size = len(content) + data_bytes
    return content.ljust(min(size, 2**20), b"\0")[: 2**20], size


def tensor(first, last, dtype="U8", shape=None):
    return {"dtype": dtype, "shape": shape or [last - first], "data_offsets": [first, last]}


TEN_TB = 10 * 10**12


def test_e8_ten_terabytes_do_not_fit_and_nothing_is_asked_for(tmp_path):
    with HostileOwner(*file_of({"a": tensor(0, TEN_TB)}, TEN_TB)) as owner:
        with pytest.raises(NoSpace) as caught:
            weighlock.fetch(owner.share_url, into=tmp_path / "a", limits=BRIEF)
        assert caught.value.wanted_bytes > 9 * 10**12
        with pytest.raises(LimitExceeded) as caught:
            weighlock.fetch(owner.share_url, limits=BRIEF)
        assert caught.value.limit == "memory_bytes"
        with pytest.raises(LimitExceeded):
            list(weighlock.stream(owner.share_url, limits=BRIEF))
        with pytest.raises(NoSpace):
            weighlock.fetch(owner.share_url, into=tmp_path / "a", names="a", limits=BRIEF)
        assert owner.blocks_asked == []
    for name in os.listdir(tmp_path):  # the test above says what is wrong with them
        os.unlink(tmp_path / name)


def test_e8_bound_of_the_caller_counts(server):
    share = server.share(ARRAYS)
    with pytest.raises(LimitExceeded) as caught:
        weighlock.fetch(share.url, limits=Limits(memory_bytes=1000))
    assert (caught.value.asked, caught.value.allowed) == (1_200_012, 1000)


def test_e8_tensor_too_large_for_memory_is_refused_when_it_is_loaded():
    with (
        HostileOwner(*file_of({"a": tensor(0, TEN_TB)}, TEN_TB)) as owner,
        weighlock.open(owner.share_url, limits=BRIEF) as catalog,
    ):
        with pytest.raises((MemoryError, LimitExceeded)):
            catalog["a"].load()
        assert owner.blocks_asked == []


MB = 1_000_000

LIES = {
    "a tensor behind the end": file_of({"a": tensor(0, 3 * MB)}, 2 * MB),
    "bytes nobody names": file_of({"a": tensor(0, MB)}, 2 * MB),
    "a hole": file_of({"a": tensor(0, MB), "b": tensor(MB + 1, 2 * MB)}, 2 * MB),
    "an overlap": file_of({"a": tensor(0, MB), "b": tensor(MB - 1, 2 * MB)}, 2 * MB),
    "a name twice": file_of(
        {}, 2 * MB, b'{"a":%s,"a":%s}' % ((json.dumps(tensor(0, 2 * MB)).encode(),) * 2)
    ),
    "a name that is not text": file_of({}, 2 * MB, b"{1:2}"),
    "a negative size": file_of({"a": tensor(0, 2 * MB, shape=[-2 * MB])}, 2 * MB),
    "an offset below zero": file_of({"a": tensor(-5, 2 * MB)}, 2 * MB),
    "a shape that is another size": file_of({"a": tensor(0, 2 * MB, shape=[3])}, 2 * MB),
    "a shape that overflows": file_of({"a": tensor(0, 2 * MB, shape=[2**32, 2**32])}, 2 * MB),
    "a dtype nobody knows": file_of({"a": tensor(0, 2 * MB, "X9")}, 2 * MB),
    "a header of 2^63 bytes": (b"\xff" * 7 + b"\x7f" + bytes(MB), 2 * MB),
    "a header longer than the file": ((3 * MB).to_bytes(8, "little") + bytes(MB), 2 * MB),
    "no model": (b"<html>" + bytes(2**20 - 6), 2 * MB),
}


@pytest.mark.parametrize("lie", LIES)
def test_e8_header_that_lies_is_refused_before_the_first_block(lie, tmp_path):
    first, size = LIES[lie]
    with HostileOwner(first[: 2**20].ljust(2**20, b"\0"), size) as owner:
        for name, way in WAYS.items():
            with pytest.raises((FormatError, LimitExceeded)):
                way(owner.share_url, tmp_path / "a", limits=BRIEF)
            assert owner.blocks_asked == [], name
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("size", [0, 1, 7])
def test_e8_file_of_next_to_nothing(size, tmp_path):
    with HostileOwner(bytes(size), size) as owner:
        for way in WAYS.values():
            with pytest.raises(WeighlockError):
                way(owner.share_url, tmp_path / "a", limits=BRIEF)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("length", [0, 31, 32 * 1024 + 1, 10**6])
def test_e8_pages_of_digests_have_one_length(length, tmp_path):
    first, size = file_of({"a": tensor(0, 3 * MB)}, 3 * MB)

    def behave(request, content):
        if "/digests/" in request.path:
            return Reply(200, {}, bytes(length))
        reply = ranged(request, first.ljust(size, b"\0"))
        reply.headers["Weighlock"] = "1"
        return reply

    with PlainServer({"/s/x/model.safetensors": b""}, behave) as owner:
        for way in WAYS.values():
            with pytest.raises(RemoteProtocolError, match="digests"):
                way(owner.url("/s/x/model.safetensors"), tmp_path / "a", limits=BRIEF)
    assert os.listdir(tmp_path) == []


def test_e8_names_are_labels_and_never_paths(server, tmp_path):
    arrays = dict.fromkeys(("../../escape", "/etc/passwd", "a/../b", "..", "~"), ARRAYS["b"])
    arrays = {name: array.copy() for name, array in arrays.items()}
    share = server.share(arrays)
    with weighlock.fetch(share.url, into=tmp_path / "a") as catalog:
        assert set(catalog) == set(arrays)
    assert os.listdir(tmp_path) == ["a"]


def test_e8_receiver_is_not_sent_elsewhere_by_a_share(server):
    """A share that redirects its digests or ranges is not followed there."""
    elsewhere = server.share(ARRAYS)
    first, size = file_of({"a": tensor(0, 3 * MB)}, 3 * MB)

    def behave(request, content):
        if "/digests/" in request.path:
            return Reply(302, {"Location": elsewhere.url})
        reply = ranged(request, first.ljust(size, b"\0"))
        reply.headers["Weighlock"] = "1"
        return reply

    with (
        PlainServer({"/s/x/model.safetensors": b""}, behave) as owner,
        pytest.raises(RemoteProtocolError, match="302"),
    ):
        weighlock.fetch(owner.url("/s/x/model.safetensors"), limits=BRIEF)


def test_keys_of_stable_ids_are_private(tmp_path):
    from weighlock.sharing.identity import secret

    path = tmp_path / "state" / "secret"
    key = secret(str(path))
    assert len(key) == 32
    assert secret(str(path)) == key
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.chmod(0o644)
    with pytest.raises(SourceError, match="others can read"):
        secret(str(path))
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(SourceError, match="no key"):
        secret(str(path))
    shutil.rmtree(path.parent)
    assert secret(str(path)) != key


def test_a_key_that_another_server_is_just_making_is_waited_for(tmp_path):
    path = tmp_path / "secret"
    script = (
        "import sys\n"
        "from weighlock.sharing.identity import secret\n"
        "print('here', flush=True)\n"
        "print(secret(sys.argv[1]).hex())"
    )
    with open(path, "wb", buffering=0) as first:
        path.chmod(0o600)
        fcntl.flock(first, fcntl.LOCK_EX)
        second = subprocess.Popen(
            [sys.executable, "-c", script, path], stdout=subprocess.PIPE, text=True
        )
        assert second.stdout.readline() == "here\n"
        with pytest.raises(subprocess.TimeoutExpired):
            second.wait(0.5)  # however long the first one takes
        first.write(bytes(range(32)))
    assert second.communicate()[0].strip() == bytes(range(32)).hex()


def test_a_key_that_is_there_is_read_without_a_lock(tmp_path):
    """NFS has none for a file that is opened for reading."""
    from weighlock.sharing.identity import secret

    path = tmp_path / "secret"
    key = secret(str(path))
    with open(path, "rb") as another:
        fcntl.flock(another, fcntl.LOCK_EX)
        assert secret(str(path)) == key


def test_a_key_of_zeros_is_none(tmp_path):
    from weighlock.sharing.identity import secret

    path = tmp_path / "secret"
    path.write_bytes(bytes(32))
    path.chmod(0o600)
    with pytest.raises(SourceError, match="no key"):
        secret(str(path))


def test_a_key_for_which_there_is_half_the_room_is_not_used(tmp_path, run_python):
    from weighlock.sharing.identity import secret

    path = tmp_path / "secret"
    script = (
        "import resource, sys\n"
        "from weighlock.errors import DiskError\n"
        "from weighlock.sharing.identity import secret\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (16, 16))\n"
        "try:\n"
        "    print(secret(sys.argv[1]))\n"
        "except DiskError as error:\n"
        "    print(error)"
    )
    assert "took 16 of 32 bytes" in run_python(script, path).stdout
    assert len(secret(str(path))) == 32  # when there is room


def test_context_of_servers_is_1_2_or_newer_and_of_clients_verifies(certificates):
    from weighlock.sharing.binding import server_tls

    context = server_tls(certificates.path("server"), None, None)
    assert context.minimum_version >= ssl.TLSVersion.TLSv1_2
    client = Credential(ca=certificates.ca).tls()
    assert client.verify_mode == ssl.CERT_REQUIRED
    assert client.check_hostname
