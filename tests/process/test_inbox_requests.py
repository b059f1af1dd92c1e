"""What a hostile or plain client can say to an inbox, byte for byte: it costs nobody anything."""

import contextlib
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from blake3 import blake3

import weighlock
from process.chaos_peers import MB, _running, model
from process.inbox_peers import Wire, announced, laid_out, temporaries
from waiting import until
from weighlock import Limits, Server, State

pytestmark = pytest.mark.usefixtures("no_leaks")

needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")


@pytest.fixture
def server():
    with Server(limits=Limits(idle_s=2, head_s=2)) as server:
        yield server


@pytest.fixture
def inbox(server, tmp_path):
    inbox = server.inbox("a", into=tmp_path / "in")
    yield inbox
    inbox.close()
    for name in temporaries(tmp_path / "in"):
        (tmp_path / "in" / name).unlink()


@pytest.fixture
def content(tmp_path):
    return laid_out(model(2.2), tmp_path)


def digest(data):
    return blake3(data).hexdigest()


def still_works(inbox, content, tmp_path):
    """The inbox takes an honest push afterwards."""
    with announced(inbox, content) as wire:
        assert wire.put(content, 0, 3)[0] == 200
        assert wire.finish(content)[0] == 200
    assert (tmp_path / "in" / "a.safetensors").read_bytes() == content
    assert inbox.wait(5)["a"] is State.LANDED


BLOCKS = {
    "a length that is too short": (403, 0, MB - 1, {}),
    "a length that is too long": (403, 0, MB + 1, {}),
    "no bytes": (403, 0, 0, {}),
    "a block beyond the end": (403, 3, MB, {}),
    "blocks beyond the end": (403, 2, 2 * MB, {"Weighlock_Digests": "0" * 128}),
    "a block far beyond the end": (403, 999_999_999_999, MB, {}),
    "no digests": (400, 0, MB, {"Weighlock_Digests": None}),
    "digests that are empty": (400, 0, MB, {"Weighlock_Digests": ""}),
    "half a digest": (400, 0, MB, {"Weighlock_Digests": "0" * 32}),
    "digests that are not hex": (400, 0, MB, {"Weighlock_Digests": "x" * 64}),
    "too many digests": (400, 0, MB, {"Weighlock_Digests": "0" * 64 * 9}),
    "two digests for one block": (403, 0, MB, {"Weighlock_Digests": "0" * 128}),
    "a digest of something else": (422, 0, MB, {}),
    "a negative attempt": (400, 0, MB, {"Weighlock_Attempt": "-1"}),
    "a long attempt": (400, 0, MB, {"Weighlock_Attempt": "0" * 33}),
    "no ticket": (403, 0, MB, {"Weighlock_Mac": None}),
    "another ticket": (403, 0, MB, {"Weighlock_Mac": "0" * 32}),
}


def test_blocks_that_do_not_fit_are_refused_and_the_connection_goes_on(inbox, content, tmp_path):
    with announced(inbox, content) as wire:
        for case, (status, first, length, headers) in BLOCKS.items():
            headers = {"Weighlock_Digests": "0" * 64, **headers}
            found = wire.ask("PUT", f"/blocks/{first}", bytes(length), **headers)
            assert found is not None, case
            assert found[0] == status, case
        assert inbox.senders["a"].bytes_here == 0
    still_works(inbox, content, tmp_path)


def test_a_block_may_not_hold_another_header_than_was_announced(inbox, content):
    other = bytearray(content)
    other[100] ^= 1
    with announced(inbox, content) as wire:
        status, said = wire.put(bytes(other), 0, 1)
        assert (status, "another header" in said["refused"]) == (403, True)


def test_a_header_spoiled_on_the_way_is_a_mismatch_and_no_lie(inbox, content):
    spoiled = bytearray(content)
    spoiled[100] ^= 1
    with announced(inbox, content) as wire:
        right = digest(content[:MB])
        status, said = wire.put(bytes(spoiled), 0, 1, Weighlock_Digests=right)
        assert (status, said["block"]) == (422, 0)
        assert wire.put(content, 0, 1)[0] == 200


HEADERS = {
    "no size": (400, None),
    "a negative size": (400, "-5"),
    "a size that is not a number": (400, "1e6"),
    "a size too small": (403, "100"),
    "a size too large": (403, str(10**17)),
    "a size beyond all": (400, "1" * 40),
}


def test_headers_that_lie_are_refused(inbox, content, tmp_path):
    header = content[: 8 + int.from_bytes(content[:8], "little")]
    with Wire(inbox.url_for("a")) as wire:
        for case, (status, size) in HEADERS.items():
            assert wire.announce(content, Weighlock_Size=size)[0] == status, case
        size = len(content)
        for case, bad in {
            "nothing": b"",
            "seven bytes": header[:7],
            "a part of it": header[:-1],
            "more than it": header + b" ",
            "no JSON": header[:8] + b"x" * (len(header) - 8),
            "a length of 2**63": (2**63).to_bytes(8, "little") + header[8:],
            "names twice": (lambda text: len(text).to_bytes(8, "little") + text)(
                b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
                b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
            ),
        }.items():
            found = wire.ask("PUT", "/header", bad, Weighlock_Size=size)
            assert found[0] == 403, (case, found)
        # A file larger than any disk is told at once, whatever its header allows.
        text = (
            b'{"a":{"dtype":"U8","shape":[1000000000000000],"data_offsets":[0,1000000000000000]}}'
        )
        huge = len(text).to_bytes(8, "little") + text
        assert wire.ask("PUT", "/header", huge, Weighlock_Size=len(huge) + 10**15)[0] == 507
    assert os.listdir(tmp_path / "in") == []
    still_works(inbox, content, tmp_path)


REPORTS = {
    "nothing": b"",
    "no JSON": b"{",
    "a state that is none": b'{"state":"lost"}',
    "a root that is none": b'{"state":"landed","root":"x"}',
    "a negative attempt": b'{"state":"alive","attempt":-1}',
    "deep": b"[" * 60_000,
    "a long cause": json.dumps({"state": "failed", "cause": "x" * 300}).encode(),
}


def test_reports_that_make_no_sense_change_nothing(inbox, content, tmp_path):
    with announced(inbox, content) as wire:
        for case, body in REPORTS.items():
            assert wire.ask("POST", "", body)[0] == 400, case
        assert wire.ask("GET", "/digests/1")[0] == 404
        assert wire.ask("GET", "/digests/-1")[0] == 404
        assert wire.ask("GET", "")[0] == 405
        assert wire.ask("DELETE", "/blocks/0")[0] == 405
        assert wire.ask("POST", "/header")[0] == 405
        assert wire.ask("PUT", "/digests/0")[0] == 405
    still_works(inbox, content, tmp_path)


def test_paths_that_nobody_knows_are_not_found_and_cost_little(server, inbox):
    with Wire(inbox.url_for("a")) as wire:
        for path in (
            "/",
            "/x",
            "/i/",
            f"/i/{'0' * 32}/senders/a/header",
            wire.base + "/blocks/",
            wire.base + "/blocks/-1",
            wire.base + "/blocks/" + "9" * 13,
            wire.base + "/../../../etc/passwd",
            wire.base.replace("/a", "/%2e%2e"),
            "/s/" + "0" * 32 + "/model.safetensors",
        ):
            wire.send("PUT", path, b"x" * 1000)
            assert wire.reply()[0] in (403, 404, 405), path


def test_a_body_whose_end_is_unclear_is_refused(inbox, content):
    """Two lengths, or chunks beside a length: what stands in between could see another request."""
    smuggled = b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n"
    for headers in (
        {"Content-Length": None, "Transfer-Encoding": "chunked"},
        {"Content-Length": len(smuggled), "Transfer-Encoding": "chunked"},
        {"Content-Length": "5, 6"},
        {"Content-Length": "-5"},
        {"Content-Length": "+5"},
        {"Content-Length": "9" * 30},
        {"Content-Length": "9" * 5000},
    ):
        with Wire(inbox.url_for("a")) as wire:
            head = wire.head("PUT", wire.base + "/header", {"Weighlock-Size": 5, **headers})
            wire.sock.sendall(head + smuggled)
            found = wire.reply()
            assert found is None or found[0] in (400, 411, 413), (headers, found)
            assert wire.reply() is None  # and nothing behind it was taken for a request


def test_a_length_beyond_reason_is_refused_without_waiting_for_it(inbox, content):
    with announced(inbox, content) as wire:
        head = wire.head(
            "PUT",
            wire.base + "/blocks/0",
            {"Content-Length": 10**15, "Weighlock-Digests": "0" * 64},
        )
        wire.sock.sendall(head)
        assert wire.reply()[0] == 403
        assert wire.reply() is None


def test_requests_behind_a_body_are_answered_in_turn(inbox, content, tmp_path):
    """Pipelined: the body's last byte and the next request come in one piece."""
    with announced(inbox, content) as wire:
        requests = b""
        for first in range(3):
            body = content[first * MB : (first + 1) * MB]
            headers = {"Content-Length": len(body), "Weighlock-Digests": digest(body)}
            requests += wire.head("PUT", f"{wire.base}/blocks/{first}", headers) + body
        requests += wire.head("GET", f"{wire.base}/digests/0", {})
        requests += wire.head("PUT", f"{wire.base}/blocks/0", {"Content-Length": 3}) + b"abc"
        requests += wire.head("GET", f"{wire.base}/digests/0", {})
        wire.sock.sendall(requests)
        found = [wire.reply() for _ in range(6)]
        assert [status for status, _ in found] == [200, 200, 200, 200, 400, 200]
        assert found[3][1] == found[5][1]
        assert wire.finish(content)[0] == 200


def test_a_sender_that_waits_to_be_asked_is_asked_only_if_it_is_wanted(inbox, content):
    body = content[:MB]
    headers = {
        "Content-Length": MB,
        "Weighlock-Digests": digest(body),
        "Expect": "100-continue",
    }
    with announced(inbox, content) as wire:
        wire.sock.sendall(wire.head("PUT", wire.base + "/blocks/0", headers))
        assert wire.sock.recv(1000).startswith(b"HTTP/1.1 100")
        wire.sock.sendall(body)
        assert wire.reply()[0] == 200
        wire.sock.sendall(wire.head("PUT", wire.base + "/blocks/99", headers))
        assert wire.reply()[0] == 403  # and not 100
        assert wire.reply() is None  # nobody knows what it sends next


def test_a_connection_that_is_to_be_closed_is(inbox, content):
    with announced(inbox, content) as wire:
        assert wire.put(content, 0, 1, Connection="close")[0] == 200
        assert wire.reply() is None


@needs_curl
def test_curl_can_push(inbox, content, tmp_path):
    """Three requests that any client can make."""
    url, _, fragment = inbox.url_for("a").partition("#r=a.")
    base = f"{url}/senders/a"

    def curl(path, data, *options):
        (tmp_path / "body").write_bytes(data)
        done = subprocess.run(
            [
                *("curl", "-sS", "--max-time", "20", "-H", f"Weighlock-Mac: {fragment}"),
                *(*options, base + path),
            ],
            capture_output=True,
            check=True,
        )
        return json.loads(done.stdout)

    upload = ("-T", str(tmp_path / "body"))
    header = content[: 8 + int.from_bytes(content[:8], "little")]
    said = curl("/header", header, *upload, "-H", f"Weighlock-Size: {len(content)}")
    assert said["has_some"] is False
    digests = [digest(content[at : at + MB]) for at in range(0, len(content), MB)]
    for number, each in enumerate(digests):
        body = content[number * MB : (number + 1) * MB]
        for expect in ("Expect: 100-continue", "Expect:"):
            curl(
                f"/blocks/{number}", body, *upload, "-H", f"Weighlock-Digests: {each}", "-H", expect
            )
    root = digest(bytes.fromhex("".join(digests)))
    said = curl("", b"", "-d", json.dumps({"state": "landed", "root": root}))
    assert said["landed"] is True
    assert (tmp_path / "in" / "a.safetensors").read_bytes() == content


def test_heads_without_end_are_refused(server, inbox):
    with Wire(inbox.url_for("a")) as wire:
        wire.sock.sendall(b"PUT /i/x HTTP/1.1\r\n" + b"A: b\r\n" * 10_000)
        found = wire.reply()
        assert found is None or found[0] in (400, 431)


# --- memory ---

INBOX = """
import sys, json, weighlock
server = weighlock.Server(limits=weighlock.Limits(connections_per_peer=256))
print(server.inbox(into=sys.argv[1], idle_s=None).url, flush=True)
sys.stdin.read()
server.close()
"""


@contextlib.contextmanager
def inbox_alone(directory):
    """An inbox in a process of its own, whose memory can be looked at."""
    with _running([sys.executable, "-c", INBOX, str(directory)]) as process:
        process.url = process.child.stdout.readline().strip()
        assert process.url, process.child.stderr.read()
        yield process
        process.stop()
        process.child.wait(20)


def test_slow_senders_do_not_exhaust_memory(tmp_path):
    """64 with half a block each, and 64 with a header of 15 MB that they do not finish."""
    content = laid_out(model(2.2), tmp_path)
    with inbox_alone(tmp_path / "in") as process, contextlib.ExitStack() as opened:
        before = process.status("RssAnon")
        for number in range(64):
            wire = opened.enter_context(Wire(process.url))
            wire.base = wire.base.replace("stranger", f"s{number}")
            assert wire.announce(content)[0] == 200
            headers = {"Content-Length": MB, "Weighlock-Digests": "0" * 64}
            wire.sock.sendall(wire.head("PUT", wire.base + "/blocks/0", headers) + bytes(MB // 2))
        for number in range(64):
            wire = opened.enter_context(Wire(process.url))
            wire.base = wire.base.replace("stranger", f"h{number}")
            headers = {"Content-Length": 15 * MB, "Weighlock-Size": 10**9}
            wire.sock.sendall(wire.head("PUT", wire.base + "/header", headers))
            wire.sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                wire.sock.send(bytes(2 * MB))
        until(lambda: process.status("Threads") > 100)
        grown = process.status("RssAnon") - before
        assert grown < 160 * 1024, f"{grown} kB"
        # Somebody who behaves is served meanwhile.
        weighlock.push(process.url, model(2.2), sender="honest")


def test_many_tiny_pushes_leave_no_growing_memory(tmp_path):
    tensors = {"a": np.zeros(10, np.float32)}
    with inbox_alone(tmp_path / "in") as process:
        for number in range(30):
            weighlock.push(process.url, tensors, sender=f"s{number}")
        before = process.status("RssAnon")
        fds = len(os.listdir(f"/proc/{process.pid}/fd"))
        for number in range(30, 130):
            weighlock.push(process.url, tensors, sender=f"s{number}")
        assert process.status("RssAnon") - before < 4 * 1024
        assert len(os.listdir(f"/proc/{process.pid}/fd")) <= fds + 2
