"""The page and the metrics of a real server: who is told what, and what is logged."""

import http.client
import json
import logging
import re
import subprocess
import sys

import numpy as np
import pytest

import weighlock
from waiting import until

pytestmark = pytest.mark.usefixtures("no_leaks")

ARRAYS = {"a.weight": np.arange(300_000, dtype=np.float32), "a.bias": np.zeros(5, np.int8)}


@pytest.fixture
def server():
    with weighlock.Server(page=True) as server:
        yield server


def token_of(server):
    return server.page_url.partition("#token=")[2]


def ask(server, target, token=None, method="GET"):
    """Status, headers and body of a reply; with the server's token unless another is given."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    bearer = {"Authorization": f"Bearer {token_of(server) if token is None else token}"}
    try:
        connection.request(method, target, headers=bearer)
        reply = connection.getresponse()
        return reply.status, reply.headers, reply.read()
    finally:
        connection.close()


def metrics(server):
    status, headers, body = ask(server, "/metrics")
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    line = re.compile(r'(weighlock_[a-z_]+(?:\{(?:[a-z]+="[^"\n]*",?)*\})?) (\d+)')
    found = {}
    for text in body.decode().splitlines():
        if not text.startswith("#"):
            name, value = line.fullmatch(text).groups()
            assert name not in found
            found[name] = int(value)
    return found


def test_page_is_off_unless_asked_for():
    with weighlock.Server() as server:
        assert server.page_url is None
        for target in ("/", "/page.js", "/api/shares", "/metrics"):
            assert ask(server, target, "")[0] == 404


def test_every_server_has_a_token_of_its_own():
    with weighlock.Server(page=True) as one, weighlock.Server(page=True) as two:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/#token=[0-9a-f]{32}", one.page_url)
        assert token_of(one) != token_of(two)
        assert ask(two, "/api/shares", token_of(one))[0] == 401
    with weighlock.Server(page="chosen-by-somebody") as server:
        assert ask(server, "/api/shares", "chosen-by-somebody")[0] == 200


def test_page_is_open_and_what_it_tells_is_not(server):
    server.share(ARRAYS)
    status, headers, body = ask(server, "/", "")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert b"<!doctype html>" in body
    for target in ("/api/shares", "/api/shares/1/tensors", "/metrics"):
        status, headers, body = ask(server, target, "0" * 32)
        assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
        assert json.loads(body) == {"error": "not the token of this page"}
    status, _, body = ask(server, "/api/shares")
    assert status == 200
    assert json.loads(body)["shares"][0]["tensors"] == 2


def test_statistics_of_a_file_on_disk(server, tmp_path):
    path = tmp_path / "a.safetensors"
    weighlock.save(path, ARRAYS, durable=False)
    with weighlock.open(path) as catalog:
        server.share(catalog)
        status, _, body = ask(server, "/api/shares/1/statistics?name=a.weight")
        assert status == 200
        found = json.loads(body)["statistics"]
        assert found["mean"] == pytest.approx(ARRAYS["a.weight"].mean(dtype=np.float64))
        assert (found["min"], found["max"], found["zeros"]) == (0, 299_999, 1)


def test_file_that_changed_has_no_statistics_and_ends_the_share(server, tmp_path):
    path = tmp_path / "a.safetensors"
    weighlock.save(path, ARRAYS, durable=False)
    with weighlock.open(path) as catalog:
        share = server.share(catalog)
        with open(path, "r+b") as file:
            file.seek(-1, 2)
            file.write(b"x")
        status, _, body = ask(server, "/api/shares/1/statistics?name=a.weight")
        assert (status, json.loads(body)["reason"]) == (410, "changed")
        assert share.ended == "changed"


def test_metrics_count_what_happens(server):
    share = server.share(ARRAYS, receivers=("site-1", "site-2"))
    before = metrics(server)
    assert before["weighlock_shares"] == 1
    assert before["weighlock_sent_bytes_total"] == 0
    assert before["weighlock_pinned_bytes"] == sum(array.nbytes for array in ARRAYS.values())
    assert before['weighlock_receivers{state="waiting"}'] == 2
    weighlock.fetch(share.url_for("site-1"))
    # Who sent the last bytes may count them after their receiver has them.
    until(lambda: metrics(server)["weighlock_sent_bytes_total"] >= share.size)
    after = metrics(server)
    assert after['weighlock_receivers{state="landed"}'] == 1
    assert after['weighlock_receivers{state="waiting"}'] == 1
    assert after['weighlock_requests_total{kind="data",status="206"}'] >= 1
    assert after['weighlock_requests_total{kind="reports",status="200"}'] >= 2
    assert after["weighlock_connections"] >= 1
    share.revoke()
    ask(server, "/api/shares", "wrong")
    over = metrics(server)
    assert over["weighlock_shares"] == over["weighlock_pinned_bytes"] == 0
    assert over['weighlock_shares_ended_total{reason="revoked"}'] == 1
    assert over['weighlock_receivers_ended_total{state="landed"}'] == 1
    assert over['weighlock_receivers_ended_total{state="lost"}'] == 1
    assert over['weighlock_requests_total{kind="page",status="401"}'] == 1
    assert over["weighlock_sent_bytes_total"] == after["weighlock_sent_bytes_total"]


def test_inboxes_and_their_senders_are_shown_and_counted(server, tmp_path):
    inbox = server.inbox(("site-1", "site-2"), into=tmp_path / "in", durable=False)
    weighlock.push(inbox.url_for("site-1"), ARRAYS)
    _, _, body = ask(server, "/api/shares")
    (shown,) = json.loads(body)["shares"]
    assert shown["kind"] == "inbox"
    assert shown["receivers"] == {"waiting": 1, "landed": 1}
    _, _, body = ask(server, "/api/shares/1/receivers")
    landed = json.loads(body)["receivers"][1]
    assert landed["state"] == "landed"
    assert landed["bytes"] == landed["of"] > ARRAYS["a.weight"].nbytes
    found = metrics(server)
    assert found["weighlock_inboxes"] == 1
    assert found['weighlock_senders{state="landed"}'] == 1
    assert found["weighlock_received_bytes_total"] >= ARRAYS["a.weight"].nbytes
    assert ask(server, "/api/shares/1/tensors")[0] == 404
    assert ask(server, "/api/shares/1/ticket", method="POST")[0] == 404
    inbox.close()


def test_log_has_a_line_for_each_start_and_end_and_no_secret(caplog):
    """E3, E11."""
    caplog.set_level(logging.DEBUG, "weighlock")
    with weighlock.Server(page=True) as server:
        token, share = token_of(server), server.share(ARRAYS, receivers=("site-1", "site-2"))
        weighlock.fetch(share.url_for("site-1"))
        ask(server, "/api/shares", "0123456789-wrong")
        report = {"state": "started", "attempt": "1"}
        ticket = share.url_for("site-2")
        say(server, ticket, report)
        say(server, ticket, report | {"state": "failed", "cause": "\x1b[31m\nshare 9: forged"})
        ids = [share.url.split("/")[4], ticket.rpartition(".")[2]]
        assert share.ended == "settled"
    lines = [record.getMessage() for record in caplog.records]
    told = [
        re.sub(r"in [\d.]+ s", "in … s", line) for line in lines if line.startswith("share 1: site")
    ]
    assert told == [
        "share 1: site-1 started, 0 bytes in … s",
        f"share 1: site-1 landed, {share.size} bytes in … s",
        "share 1: site-2 started, 0 bytes in … s",
        "share 1: site-2 failed, 0 bytes in … s ('\\x1b[31m\\nshare 9: forged')",
    ]
    for secret in (token, "0123456789-wrong", *ids):
        assert secret not in "\n".join(lines)
    assert token not in repr(server)


def say(server, ticket, report):
    path, _, fragment = ticket.partition("#r=")
    name, _, mac = fragment.rpartition(".")
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    target = f"/s/{path.split('/')[4]}/receivers/{name}"
    connection.request("POST", target, json.dumps(report), {"Weighlock-Mac": mac})
    assert connection.getresponse().read()
    connection.close()


def test_receiver_that_is_lost_has_a_last_line_too(caplog):
    caplog.set_level(logging.INFO, "weighlock")
    with weighlock.Server() as server:
        share = server.share(ARRAYS, receivers=("site-1",), idle_s=0.05)
        say(server, share.url_for("site-1"), {"state": "started", "attempt": "1"})
        share.wait(20)
        until(lambda: "site-1 lost" in caplog.text)
    assert caplog.text.count("share 1: site-1 ") == 2


def test_looking_does_not_change_what_a_receiver_gets(server):
    """A fetch runs while everything is asked for, again and again."""
    share = server.share(ARRAYS)
    script = "import sys, weighlock; weighlock.fetch(sys.argv[1], limit_rate=2_000_000)"
    receiver = subprocess.Popen([sys.executable, "-c", script, share.url])
    while receiver.poll() is None:
        for target in ("shares", "shares/1/receivers", "shares/1/statistics?name=a.weight"):
            assert ask(server, f"/api/{target}")[0] == 200
    assert receiver.returncode == 0
