"""A server that forwards what lies on another, which dies, falls silent, or says no.

Owners that die are processes; the forwarder is in this one, where nothing may be left of it. A
receiver hears from the forwarder what happened: its own patience for silence is never needed.
"""

import contextlib
import http.client
import io
import json
import logging
import os
import shutil
import signal
import subprocess
from urllib.parse import urlsplit

import numpy as np
import pytest

import weighlock
from process.chaos_peers import MB, InThread, Scripted, model, owner, same, serve
from process.plain_server import PlainServer
from waiting import until
from weighlock.errors import PeerLost, ShareGone, SourceChanged, SourceError, WeighlockError

pytest_plugins = ["process.chaos_fixtures"]

ONCE = weighlock.Limits(patience_s=0, idle_s=600)
"""A receiver that takes the first word for the last, and would wait for it for very long."""

BRISK = weighlock.Limits(idle_s=1.5)
"""A forwarder that waits for half a second."""

ENDLESS = weighlock.Limits(idle_s=3600, connect_s=3600)


@contextlib.contextmanager
def forwarding(url, limits=BRISK):
    """The share of a server that forwards what is behind a URL."""
    with (
        weighlock.open(url, limits=weighlock.Limits(idle_s=600, patience_s=600)) as catalog,
        weighlock.Server(limits=limits) as server,
    ):
        yield server.share(catalog)


def origin(url):
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def ask(url, first=None, last=None, beside=None):
    """Status line, headers and body of the reply to one request."""
    parts = urlsplit(url)
    path = parts.path if beside is None else parts.path.replace("model.safetensors", beside)
    connection = http.client.HTTPConnection(parts.netloc, timeout=600)
    with contextlib.closing(connection):
        headers = {} if first is None else {"Range": f"bytes={first}-{last}"}
        connection.request("GET", path, headers=headers)
        reply = connection.getresponse()
        return reply.status, f"{reply.reason}\n{reply.headers}", reply.read()


def killed(process):
    process.child.kill()
    process.child.wait()


@pytest.mark.parametrize("is_hashed", [False, True])
def test_a_receiver_hears_that_the_owner_is_dead(no_leaks, is_hashed):
    with owner(3.3) as upstream, forwarding(upstream.url) as share:
        if is_hashed:
            ask(share.url, beside="digests/0")
        killed(upstream)
        with pytest.raises(PeerLost) as caught:
            weighlock.fetch(share.url, limits=ONCE)
        told = f"answered 502 Bad Gateway: upstream {origin(upstream.url)}: Connection refused"
        assert str(caught.value).endswith(told)
        assert share.ended is None


def test_a_receiver_hears_that_the_owner_is_silent_and_goes_on_when_it_speaks(no_leaks):
    with owner(3.3) as upstream, forwarding(upstream.url) as share:
        os.kill(upstream.pid, signal.SIGSTOP)
        try:
            with pytest.raises(
                PeerLost, match=f"504 Gateway Timeout: upstream {origin(upstream.url)}"
            ):
                weighlock.fetch(share.url, limits=ONCE)
            status, head, body = ask(share.url, 2 * MB, 3 * MB)
        finally:
            os.kill(upstream.pid, signal.SIGCONT)
        assert status == 504
        assert "Retry-After: 1" in head
        assert json.loads(body)["cause"] == "TransferTimeout"
        assert same(weighlock.fetch(share.url), model(3.3))


def test_a_patient_receiver_has_everything_when_the_owner_is_back(no_leaks, tmp_path, caplog):
    path = tmp_path / "model.safetensors"
    weighlock.save(path, model(3.3))
    caplog.set_level(logging.WARNING, "weighlock.server")
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(serve(path, tmp_path / "secret"))
        share = stack.enter_context(forwarding(first.url))
        killed(first)
        fetching = InThread(weighlock.fetch, share.url, limits=weighlock.Limits(patience_s=60))
        until(lambda: "Connection refused" in caplog.text)  # it was told so, and asks again
        second = stack.enter_context(serve(path, tmp_path / "secret", urlsplit(first.url).port))
        assert second.url == first.url
        with fetching.end() as fetched:
            assert same(fetched, model(3.3))


def test_a_reply_that_has_begun_ends_when_the_owner_dies(no_leaks):
    """What came is good, and asking for the rest tells why there is none."""
    with owner(64) as upstream, forwarding(upstream.url) as share:
        parts = urlsplit(share.url)
        with contextlib.closing(http.client.HTTPConnection(parts.netloc, timeout=600)) as peer:
            peer.request("GET", parts.path)
            reply = peer.getresponse()
            begun = reply.read(MB)
            killed(upstream)
            with pytest.raises(http.client.IncompleteRead) as caught:
                reply.read()
        came = len(begun) + len(caught.value.partial)
        assert MB <= came < share.size
        status, head, body = ask(share.url, came, share.size - 1)
        assert status == 502
        assert head.startswith(f"Bad Gateway: upstream {origin(upstream.url)}: ")
        assert json.loads(body) == {
            "error": "upstream",
            "cause": "PeerLost",
            "upstream": f"{origin(upstream.url)}: Connection refused",
        }


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_fails_with_a_status(no_leaks):
    with owner(3.3) as upstream, forwarding(upstream.url) as share:
        killed(upstream)
        command = ["curl", "-sS", "--fail-with-body", share.url]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 22
        assert "502" in done.stderr
        assert json.loads(done.stdout)["upstream"].endswith("Connection refused")


def test_each_time_a_range_breaks_off_the_next_try_is_told_why(no_leaks):
    """The first bytes of it are here; those behind them are not, however often it is asked."""
    near = {"near": np.ones(3 * MB // 8)}
    with (
        owner(24) as upstream,
        weighlock.open(upstream.url) as catalog,
        weighlock.Server(limits=BRISK) as server,
    ):
        share = server.share(near | {"large": catalog["large"]})
        killed(upstream)
        with pytest.raises(http.client.IncompleteRead):
            ask(share.url)
        assert [ask(share.url)[0] for _ in range(3)] == [502, 502, 502]
        assert ask(share.url, 1000, 2 * MB)[0] == 206  # what is here is given


@pytest.mark.parametrize(("reason", "remembered"), [("revoked", 9), ("expired", 9), ("unknown", 0)])
def test_a_receiver_hears_that_the_owners_share_is_over(no_leaks, reason, remembered):
    with weighlock.Server(limits=weighlock.Limits(tombstones=remembered)) as server:
        upstream = server.share(model(3.3))
        with forwarding(upstream.url) as share:
            upstream.end("expired" if reason == "expired" else "revoked")
            with pytest.raises(ShareGone) as caught:
                weighlock.fetch(share.url)
            assert caught.value.reason == reason
            status, _, body = ask(share.url, 2 * MB, 3 * MB)
            assert status == 410
            assert json.loads(body)["upstream"].startswith(f"{server.url}: ")
            assert share.ended is None  # for those who have everything, and have not said so


def test_a_named_receiver_that_hears_of_it_has_failed(no_leaks, server):
    """Those who have landed before have, and the share settles by what receivers say."""
    upstream = server.share(model(3.3))
    with (
        weighlock.open(upstream.url) as catalog,
        weighlock.Server() as forwarder,
        forwarder.share(catalog, receivers=("early", "late")) as share,
    ):
        weighlock.fetch(share.url_for("early"))
        upstream.revoke()
        with pytest.raises(ShareGone):
            weighlock.fetch(share.url_for("late"))
        outcome = share.wait(60)
        assert outcome.reason == "settled"
        assert {name: one.state.value for name, one in outcome.receivers.items()} == {
            "early": "landed",
            "late": "failed",
        }


def test_a_change_at_the_owner_ends_what_is_forwarded(no_leaks, tmp_path):
    path = tmp_path / "model.safetensors"
    weighlock.save(path, model(3.3))
    with owner(path=path) as upstream, forwarding(upstream.url) as share:
        with open(path, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"x")
        with pytest.raises(SourceChanged):
            weighlock.fetch(share.url)
        assert share.ended == "changed"


def test_what_opens_the_owners_url_is_not_told(no_leaks, caplog):
    caplog.set_level(logging.DEBUG, "weighlock")
    with weighlock.Server() as first:
        upstream = first.share(model(3.3), receivers=("relay",))
        ticket = upstream.url_for("relay")
        with (
            weighlock.open(ticket) as catalog,
            weighlock.Server(limits=BRISK) as server,
        ):
            share = server.share(catalog)
            first.close()
            for where in (("digests/0",), (None,)):
                status, head, body = ask(share.url, 2 * MB, 3 * MB, *where)
                assert status == 502
                told = head + body.decode() + caplog.text
                assert origin(upstream.url) in told
                assert upstream.url.split("/")[4] not in told
                assert ticket.rpartition(".")[2] not in told
            with pytest.raises(WeighlockError) as caught:
                weighlock.fetch(share.url, limits=ONCE)
            assert upstream.url.split("/")[4] not in str(caught.value)


def test_a_chain_tells_who_did_not_answer(no_leaks):
    with (
        owner(3.3) as upstream,
        forwarding(upstream.url) as middle,
        forwarding(middle.url, weighlock.Limits()) as last,
    ):
        killed(upstream)
        body = ask(last.url, 2 * MB, 3 * MB)[2]
        refused = f"upstream {origin(upstream.url)}: Connection refused"
        told = f"{origin(middle.url)}: answered 502 Bad Gateway: {refused}"
        assert json.loads(body)["upstream"] == told


def test_tensors_that_must_be_unpacked_first_fail_the_same_way(no_leaks):
    packed = io.BytesIO()
    array = np.arange(200_000).reshape(400, 500)
    np.savez_compressed(packed, a=array, b=array.T)
    with contextlib.ExitStack() as plain:
        url = plain.enter_context(PlainServer({"/model.npz": packed.getvalue()})).url("/model.npz")
        with forwarding(url) as share:
            assert ask(share.url)[0] == 200
        with forwarding(url) as share:
            plain.close()
            status, _, body = ask(share.url)
            assert (status, json.loads(body)["cause"]) == (502, "PeerLost")


def content():
    """A safetensors file of a few blocks, as bytes."""
    buffer = io.BytesIO()
    with weighlock.Server() as server, server.share(model(3.3)) as share:
        buffer.write(ask(share.url)[2])
    return buffer.getvalue()


def hanging(upstream, number):
    """An owner that falls silent with its nth request for bytes of the file."""

    def answer(request):
        is_it = request.kind == "file" and request.number >= number
        return upstream.hang if is_it else upstream.honest(request)

    return answer


def test_who_waits_for_the_owner_is_answered_when_the_share_ends(no_leaks):
    with Scripted(content()) as upstream:
        upstream.answer = hanging(upstream, 1)
        with forwarding(upstream.url, ENDLESS) as share:
            asking = InThread(ask, share.url, 2 * MB, 3 * MB)
            upstream.hung.wait()
            share.revoke()
            status, _, body = asking.end()
            assert (status, json.loads(body)["reason"]) == (410, "revoked")


def test_a_server_that_closes_waits_for_no_owner(no_leaks):
    with Scripted(content()) as upstream:
        upstream.answer = hanging(upstream, 1)
        with weighlock.open(upstream.url) as catalog:
            server = weighlock.Server(limits=ENDLESS)
            asking = InThread(ask, server.share(catalog).url, 2 * MB, 3 * MB)
            upstream.hung.wait()
            server.close(grace_s=0)
            with contextlib.suppress(OSError, http.client.HTTPException):
                asking.end()


def test_many_who_ask_hear_of_one_silence(no_leaks):
    """Digests are asked for by one at a time: the others do not wait for a silence of their own."""
    with Scripted(content()) as upstream:
        upstream.answer = hanging(upstream, 1)
        with forwarding(upstream.url) as share:
            asking = [InThread(ask, share.url, n * MB, n * MB + 9) for n in (1, 2, 3, 1, 2, 3)]
            assert [each.end()[0] for each in asking] == [504] * 6
            assert ask(share.url, beside="digests/0")[0] == 504
            upstream.answer = None
            assert same(weighlock.fetch(share.url), model(3.3))


def test_who_shares_is_as_patient_as_the_catalog_was_opened(no_leaks, tmp_path, caplog):
    """What lies in memory is hashed beforehand, and all else with it: nobody waits yet."""
    path = tmp_path / "model.safetensors"
    weighlock.save(path, model(3.3))
    caplog.set_level(logging.INFO, "weighlock.retries")
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(serve(path, tmp_path / "secret"))
        catalog = stack.enter_context(weighlock.open(first.url))
        server = stack.enter_context(weighlock.Server(limits=BRISK))
        killed(first)
        sharing = InThread(server.share, {"near": np.ones(9), "large": catalog["large"]})
        until(lambda: "trying again for up to 30 s" in caplog.text)
        stack.enter_context(serve(path, tmp_path / "secret", urlsplit(first.url).port))
        assert same(
            weighlock.fetch(sharing.end().url), {"near": np.ones(9), "large": model(3.3)["large"]}
        )


def test_a_catalog_that_was_closed_is_forwarded_no_more(no_leaks, server):
    upstream = server.share(model(3.3))
    catalog = weighlock.open(upstream.url)
    with weighlock.Server() as forwarder, forwarder.share(catalog) as share:
        catalog.close()
        with pytest.raises(SourceError, match="could not read it"):
            weighlock.fetch(share.url)
