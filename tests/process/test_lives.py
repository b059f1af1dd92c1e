"""C10, C17, D1, D2, D11: receivers with names, and how a share of theirs ends.

Real servers, sockets and processes; the way between them loses what a test names.
"""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest

import weighlock
from process.chaos_peers import IMPATIENT, MB, InThread, model, parts, same
from waiting import DEADLINE_S, until
from weighlock import Server, State
from weighlock.errors import (
    Aborted,
    LayoutError,
    LocalProtocolError,
    Refused,
    ShareGone,
    WeighlockError,
)
from weighlock.fetching.reporting import UNCONFIRMED

pytest_plugins = ["process.chaos_fixtures"]

SLOW = 400_000
"""Bytes a second of fetches that are still under way when something happens."""


class Memory(bytearray):
    """The bytes of an array, which can be seen to be gone."""


def watched(megabytes=3.3):
    """A model, and whether the memory of its largest tensor is still there."""
    tensors = model(megabytes)
    memory = Memory(tensors["large"].tobytes())
    tensors["large"] = np.frombuffer(memory, np.float32)
    return tensors, weakref.ref(memory)


def is_gone(reference):
    gc.collect()
    return reference() is None


def states(outcome):
    return {name: each.state for name, each in outcome.receivers.items()}


RECEIVER = """
import sys, weighlock
url, path, rate = sys.argv[1:]
catalog = weighlock.fetch(url, into=path, limit_rate=float(rate) or None, durable=False)
print(*catalog.notes)
"""


@contextlib.contextmanager
def receiver(url, path, rate=SLOW):
    """A process that fetches to disk."""
    child = subprocess.Popen(
        [sys.executable, "-c", RECEIVER, url, str(path), str(rate)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
        child.communicate(timeout=DEADLINE_S)


def test_named_receivers_land_and_the_tensors_are_let_go(server):
    tensors, large = watched()
    told = []
    share = server.share(tensors, receivers=("a", "b"), on_done=told.append)
    assert not is_gone(large)
    expected = {name: np.array(array) for name, array in tensors.items()}
    del tensors
    first = InThread(weighlock.fetch, share.url_for("a"))
    assert same(weighlock.fetch(share.url_for("b")), expected)
    assert same(first.end(), expected)
    outcome = share.wait(timeout_s=DEADLINE_S)
    assert outcome.reason == "settled"
    assert outcome.landed == ("a", "b")
    assert outcome.missing == ()
    assert outcome["a"] is State.LANDED
    assert all(each.bytes_here == share.size for each in outcome.receivers.values())
    until(lambda: told)
    until(lambda: is_gone(large))
    with pytest.raises(ShareGone) as gone:
        weighlock.fetch(share.url_for("a"))
    assert gone.value.reason == "settled"
    share.revoke()
    assert told == [outcome]


def test_a_stream_lands_when_it_has_ended_and_not_before(server):
    share = server.share(model(), receivers=("a", "b"))
    for name, _ in weighlock.stream(share.url_for("a")):
        assert share.receivers["a"].state is State.STARTED, name
    assert share.receivers["a"].state is State.LANDED
    streaming = weighlock.stream(share.url_for("b"))
    next(streaming)
    streaming.close()
    assert share.wait(DEADLINE_S)["b"] is State.ABORTED


def test_waiting_ends_in_time_and_when_enough_have_landed(server):
    share = server.share(model(0.1), receivers=("a", "b", "c"))
    outcome = share.wait(timeout_s=0.01)
    assert outcome.reason is None
    assert set(states(outcome).values()) == {State.WAITING}
    waiting = InThread(share.wait, DEADLINE_S, at_least=2)
    weighlock.fetch(share.url_for("a"))
    assert waiting.thread.is_alive()
    weighlock.fetch(share.url_for("c"))
    outcome = waiting.end()
    assert outcome.reason is None
    assert outcome.landed == ("a", "c")
    assert outcome.missing == ("b",)


def test_whoever_comes_to_a_share_for_nobody_in_particular_is_seen(server):
    share = server.share(model(0.1))
    weighlock.fetch(share.url)
    weighlock.fetch(share.url, receiver="me")
    assert len(list(weighlock.stream(share.url))) == 3
    outcome = share.wait(DEADLINE_S, at_least=3)
    assert outcome.reason is None
    assert len(outcome.landed) == 3
    assert share.receivers["me"].state is State.LANDED
    assert sum(name.startswith("anonymous-") for name in share.receivers) == 2
    assert all(each.bytes_here >= share.size - 4096 for each in share.receivers.values())


def test_how_long_a_receiver_without_a_name_took_is_known(server):
    """It says nothing before its end: what it says then is the first that is heard of it."""
    share = server.share(model(2.0))
    weighlock.fetch(share.url, limit_rate=2 * MB, connections=1)
    (receiver,) = share.wait(DEADLINE_S, at_least=1).receivers.values()
    assert 0.3 < receiver.seconds < DEADLINE_S  # a second, less what goes before the bound
    assert 0 < receiver.rate < 8 * MB


def test_c10_a_receiver_that_is_killed_is_lost_and_harms_nobody(tmp_path, server):
    tensors, large = watched()
    share = server.share(tensors, receivers=("a", "b"), idle_s=1.5)
    del tensors
    with receiver(share.url_for("a"), tmp_path / "a") as child:
        until(lambda: share.receivers["a"].bytes_here)
        child.kill()
        weighlock.fetch(share.url_for("b"))
        outcome = share.wait(DEADLINE_S)
    for name in parts(tmp_path):  # it may be taken up, and is not
        (tmp_path / name).unlink()
    assert outcome.reason == "settled"
    assert states(outcome) == {"a": State.LOST, "b": State.LANDED}
    until(lambda: is_gone(large))


def test_a_receiver_that_crashes_and_comes_back_takes_up_what_it_had(tmp_path, server, chaos):
    share = server.share(model(6), receivers=("a", "b"), idle_s=1.5)
    with receiver(share.url_for("a"), tmp_path / "a", rate=3 * MB) as child:
        until(lambda: share.receivers["a"].bytes_here >= 2.5 * MB)
        child.kill()
        child.wait()
    assert parts(tmp_path)
    counted = chaos.proxy(share.url)
    with weighlock.fetch(counted.of(share.url_for("a")), into=tmp_path / "a") as fetched:
        assert same(fetched, model(6))
        assert share.receivers["a"].state is State.LANDED
    assert counted.down_bytes < share.size
    assert share.ended is None
    assert not parts(tmp_path)


OWNER = """
import json, sys
sys.path.insert(0, sys.argv[1])
import weighlock
from process.chaos_peers import model
with weighlock.Server() as server:
    share = server.share(model(), receivers=("a",), idle_s=float(sys.argv[2]))
    print(share.url_for("a"), flush=True)
    print({name: str(each.state) for name, each in share.wait(60).receivers.items()}, flush=True)
"""


@contextlib.contextmanager
def owner(idle_s):
    """A process that shares a model with one receiver, and says how it ended."""
    tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    child = subprocess.Popen(
        [sys.executable, "-c", OWNER, tests, str(idle_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield child, child.stdout.readline().strip()
    finally:
        if child.poll() is None:
            child.kill()
        child.communicate(timeout=DEADLINE_S)


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("how", ["memory", "disk"])
def test_an_owner_that_dies_before_it_is_told_has_still_been_received_from(tmp_path, how):
    with owner(60) as (child, url):

        def kill(done, total):
            if done == total and child.poll() is None:
                child.kill()
                child.wait()

        into = {"into": tmp_path / "a"} if how == "disk" else {}
        fetched = weighlock.fetch(url, progress=kill, limits=IMPATIENT, **into)
        with fetched:
            assert same(fetched, model())
            assert UNCONFIRMED in fetched.notes


def test_c17_an_owner_that_was_stopped_for_twice_the_deadline_loses_nobody(no_leaks):
    with owner(1.0) as (child, url):
        fetching = InThread(weighlock.fetch, url, limit_rate=1.2 * MB)
        end = time.monotonic() + 1
        until(lambda: time.monotonic() > end)
        os.kill(child.pid, signal.SIGSTOP)
        end = time.monotonic() + 2
        until(lambda: time.monotonic() > end)  # the time it is stopped is what is tested
        os.kill(child.pid, signal.SIGCONT)
        fetched = fetching.end()
        assert same(fetched, model())
        assert UNCONFIRMED not in fetched.notes
        assert child.stdout.readline() == "{'a': 'landed'}\n"


LANDED = b'"state":"landed"'


def test_c6_a_reply_to_landed_that_is_lost_is_asked_for_again(server, chaos):
    # The share settles with that word: the second time it is a tombstone that confirms.
    told = []
    share = server.share(model(0.1), receivers=("a",), on_done=told.append)
    proxy = chaos.proxy(share.url, spoiled=LANDED)
    fetched = weighlock.fetch(proxy.of(share.url_for("a")))
    assert proxy.has_spoiled
    assert UNCONFIRMED not in fetched.notes
    assert share.ended == "settled"
    assert share.wait().landed == ("a",)
    until(lambda: len(told) == 1)
    weighlock_done_again = server.share(model(0.1), receivers=("a",))
    with weighlock.open(weighlock_done_again.url_for("a")) as catalog:
        weighlock.done(catalog)
        weighlock.done({"again": [catalog["small"]]})  # over by now, and still confirmed
    assert weighlock_done_again.wait().landed == ("a",)


PHASES = {
    "the first word": b'"state":"started"',
    "the header": b"bytes=0-",
    "digests": b"/digests/",
    "data": b"If-Match",
    "landing": None,
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("to", ["memory", "disk"])
def test_d1_an_abort_is_prompt_and_the_owner_sees_it(tmp_path, server, chaos, phase, to):
    share = server.share(model(), receivers=("a", "b"))
    spoiled = PHASES[phase]
    proxy = chaos.proxy(share.url, spoiled=spoiled or b"never", spoils_by="hold")
    abort = weighlock.Abort()
    rate = {} if spoiled else {"limit_rate": SLOW}
    into = {"into": tmp_path / "a"} if to == "disk" else {}
    fetching = InThread(weighlock.fetch, proxy.of(share.url_for("a")), abort=abort, **rate, **into)
    if spoiled is None:
        until(lambda: share.receivers["a"].bytes_here)
    else:
        until(lambda: proxy.has_spoiled)
    abort.set("the test says so")
    with pytest.raises(Aborted, match="the test says so"):
        fetching.end(5)
    proxy.sever()
    if phase == "the header":  # it had not yet said that it began
        assert share.receivers["a"].state is State.WAITING
    else:
        until(lambda: share.receivers["a"].state is State.ABORTED)
    assert share.ended is None  # "b" may still come
    assert os.listdir(tmp_path) == []


def test_what_was_sent_is_told_while_a_reply_is_under_way(server):
    share = server.share({"a": np.zeros(40 * MB, np.uint8)})
    abort = weighlock.Abort()
    options = {"abort": abort, "connections": 1, "limit_rate": 8 * MB}
    fetching = InThread(weighlock.fetch, share.url, **options)
    seen = set()

    def grew():
        seen.add(share.sent_bytes)
        return len(seen) > 4

    until(grew)  # of a reply of 32 MiB, step by step
    abort.set()
    with pytest.raises(Aborted):
        fetching.end(5)
    assert max(seen) < 32 * MB


def test_d1_an_abort_while_the_last_word_waits_does_not_undo_what_landed(server, chaos):
    share = server.share(model(0.1), receivers=("a", "b"))
    proxy = chaos.proxy(share.url, spoiled=LANDED, spoils_by="hold")
    abort = weighlock.Abort()
    fetching = InThread(weighlock.fetch, proxy.of(share.url_for("a")), abort=abort)
    until(lambda: proxy.has_spoiled)
    abort.set()
    assert UNCONFIRMED in fetching.end(5).notes
    proxy.sever()
    assert share.receivers["a"].state is State.LANDED


def test_d2_a_share_that_is_revoked_ends_for_all_its_receivers(server):
    tensors, large = watched(20)
    names = tuple("abcde")
    told = []
    share = server.share(tensors, receivers=names, on_done=told.append)
    del tensors
    fetches = [
        InThread(weighlock.fetch, share.url_for(name), limit_rate=10 * MB, connections=1)
        for name in names
    ]
    until(lambda: all(each.state is State.STARTED for each in share.receivers.values()))
    share.revoke()
    for fetching in fetches:
        with pytest.raises(ShareGone) as gone:
            fetching.end()
        assert gone.value.reason == "revoked"
    outcome = share.wait()
    assert outcome.reason == "revoked"
    assert set(states(outcome).values()) == {State.LOST}
    assert told == [outcome]
    until(lambda: is_gone(large))


def forged(url, name):
    """The ticket of one receiver, with another name on it."""
    return url.replace("#r=a.", f"#r={name}.")


def test_d11_tickets_of_others_and_forged_ones_are_refused(server):
    share = server.share(model(0.1), receivers=("a", "b"))
    genuine = share.url_for("a")
    for url, options in [
        (forged(genuine, "b"), {}),
        (forged(genuine, "c"), {}),
        (genuine[:-1] + ("0" if genuine[-1] != "0" else "1"), {}),
        (genuine, {"receiver": "b"}),
        (share.url, {"receiver": "a"}),  # a name that nothing proves
    ]:
        with pytest.raises(Refused):
            weighlock.fetch(url, **options)
        if not options:
            with weighlock.open(url) as catalog, pytest.raises(Refused):
                weighlock.done(catalog)
    assert set(states(share.outcome).values()) == {State.WAITING}
    with pytest.raises(LocalProtocolError, match="no ticket for 'c': it is for a, b"):
        share.url_for("c")
    for name in ("", "../b", "a b"):
        with pytest.raises(LocalProtocolError, match="cannot be a name"):
            weighlock.fetch(share.url, receiver=name)
    weighlock.fetch(genuine)
    weighlock.fetch(genuine)  # twice is allowed, and counts once
    weighlock.fetch(share.url)  # so is having it and being nobody
    assert share.outcome.landed == ("a",)


def test_d11_a_ticket_that_comes_after_the_end_is_told_which_end(server):
    share = server.share(model(0.1), receivers=("a",), expires_s=0.05)
    url = share.url_for("a")
    assert share.wait(DEADLINE_S).reason == "expired"
    with pytest.raises(ShareGone) as gone:
        weighlock.fetch(url)
    assert gone.value.reason == "expired"
    assert states(share.outcome) == {"a": State.LOST}


def test_refs_used_lazily_land_when_they_are_closed_or_said_to_be_done(server):
    share = server.share(model(0.1), receivers=("closed", "done", "failed", "aborted", "pickled"))
    with weighlock.open(share.url_for("closed")) as catalog:
        catalog["small"].load()
        assert share.receivers["closed"].state is State.WAITING
    assert share.receivers["closed"].state is State.LANDED

    catalog = weighlock.open(share.url_for("done"))
    weighlock.done({"nested": [(catalog["small"],), {"deep": catalog}]})
    assert share.receivers["done"].state is State.LANDED

    with pytest.raises(ZeroDivisionError), weighlock.open(share.url_for("failed")):
        raise ZeroDivisionError
    assert share.receivers["failed"].state is State.FAILED
    assert share.receivers["failed"].cause == "ZeroDivisionError"

    with pytest.raises(Aborted), weighlock.open(share.url_for("aborted")):
        raise Aborted("enough")
    assert share.receivers["aborted"].state is State.ABORTED

    import pickle

    with weighlock.open(share.url_for("pickled")) as opened:
        ref = pickle.loads(pickle.dumps(opened["small"]))
        weighlock.done([ref])
        assert share.receivers["pickled"].state is State.LANDED
        ref.source.close()
    assert share.wait(DEADLINE_S).reason == "settled"
    catalog.close()


def test_closing_lazily_used_refs_survives_a_lost_reply(server, chaos):
    share = server.share(model(0.1), receivers=("a",))
    proxy = chaos.proxy(share.url, spoiled=LANDED)
    weighlock.open(proxy.of(share.url_for("a"))).close()
    assert proxy.has_spoiled
    assert share.wait(DEADLINE_S).landed == ("a",)


def test_a_callback_that_fails_harms_nobody(server, caplog):
    def fail(outcome):
        raise ZeroDivisionError

    share = server.share(model(0.1), receivers=("a",), on_done=fail)
    expiring = server.share(model(0.1), expires_s=0.05, on_done=fail)
    assert UNCONFIRMED not in weighlock.fetch(share.url_for("a")).notes
    expiring.wait(DEADLINE_S)
    until(lambda: caplog.text.count("ZeroDivisionError") >= 2)
    again = server.share(model(0.1), expires_s=0.05)  # who watches is still there
    told = []
    other = server.share(model(0.1), expires_s=0.05, on_done=told.append)
    until(lambda: told)
    assert again.ended == other.ended == "expired"


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("how", ["a report", "silence"])
def test_a_callback_may_close_the_server(how):
    server = weighlock.Server()
    told = []

    def close(outcome):
        server.close()
        told.append(outcome)

    if how == "silence":
        server.share(model(0.1), idle_s=0.05, on_done=close)
    else:
        share = server.share(model(0.1), receivers=("a",), on_done=close)
        weighlock.fetch(share.url_for("a"), limits=IMPATIENT)
    until(lambda: told)
    with pytest.raises(LocalProtocolError, match="closed"):
        server.share(model(0.1))
    server.close()
    # The thread in which it was called ends after it.
    until(lambda: not any(each.name.startswith("weighlock") for each in threading.enumerate()))


def test_what_a_peer_says_cannot_break_a_log_or_a_connection(server, caplog):
    import http.client
    import json
    from urllib.parse import urlsplit

    caplog.set_level("DEBUG")
    share = server.share(model(0.1))
    parts = urlsplit(share.url)
    path = parts.path.replace("model.safetensors", "receivers/x")
    connection = http.client.HTTPConnection(parts.hostname, parts.port)
    body = json.dumps({"state": "failed", "attempt": "1", "cause": "\x1b[2J\nforged line"})
    connection.request("POST", path, body)
    assert connection.getresponse().read()
    assert "\x1b" not in caplog.text
    assert "\nforged" not in caplog.text
    named = server.share(model(0.1), receivers=("a",))
    path = urlsplit(named.url).path.replace("model.safetensors", "receivers/a")
    connection.request("POST", path, body, {"Weighlock-Mac": "\xe9" * 32})
    assert connection.getresponse().status == 403
    connection.close()
    assert not [record for record in caplog.records if record.exc_info]


def test_e3_tickets_and_keys_are_in_no_log_repr_or_error(server, caplog, tmp_path):
    caplog.set_level("DEBUG")
    share = server.share(model(0.1), receivers=("a", "b"), expires_s=60)
    url = share.url_for("a")
    secrets = [url.split("/s/")[1][:32], url.rpartition(".")[2], server._key.hex()]
    texts = []

    def expect_error(call):
        with pytest.raises(WeighlockError) as caught:
            call()
        texts.extend([str(caught.value), repr(caught.value), repr(caught.value.__cause__)])

    catalog = weighlock.open(url)
    fetched = weighlock.fetch(url, into=tmp_path / "a")
    expect_error(lambda: weighlock.fetch(forged(url, "b")))
    expect_error(lambda: weighlock.fetch(url, receiver="b"))
    expect_error(lambda: share.url_for("c"))
    objects = [share, server, catalog, catalog["small"], fetched, catalog["small"].source]
    objects += [share._ticketing, share._life, share.outcome, share.receivers]
    objects += [catalog["small"].source.remote.address, catalog._receipt]
    share.revoke()
    expect_error(lambda: weighlock.fetch(url))
    catalog.close()
    fetched.close()
    texts += [repr(each) for each in objects] + [str(each) for each in objects]
    texts.append(caplog.text)
    for secret in secrets:
        assert not [text for text in texts if secret in text]


def test_more_than_there_are_are_not_waited_for(server):
    share = server.share(model(0.1), receivers=("a", "b"))
    with pytest.raises(LocalProtocolError, match=r"at_least=5: it is for 2 in all \(a, b\)"):
        share.wait(DEADLINE_S, at_least=5)
    for at_least, timeout_s in (("1", 1), (1.5, 1), (1, "1")):
        with pytest.raises(TypeError, match=r"(at_least|timeout_s) must be a"):
            share.wait(timeout_s, at_least=at_least)
    assert server.share(model(0.1)).wait(0.01, at_least=5).landed == ()


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({"expires_s": -1}, LocalProtocolError),
        ({"expires_s": "60"}, TypeError),
        ({"idle_s": float("nan")}, LocalProtocolError),
        ({"on_done": 3}, TypeError),
    ],
)
def test_a_life_that_cannot_be_meant_is_refused_where_it_is_given(server, tmp_path, wrong, kind):
    for make in (
        lambda: server.share(model(0.1), **wrong),
        lambda: server.inbox(into=tmp_path, **wrong),
    ):
        with pytest.raises(kind, match=next(iter(wrong))):
            make()
    assert repr(server).endswith(" with 0 shares and inboxes>")


def test_a_server_that_is_closed_says_so():
    with Server() as server:
        assert "closed" not in repr(server)
    assert repr(server) == f"<Server {server.url}, closed>"


def test_addresses_that_cannot_be_any_are_told_apart():
    with pytest.raises(TypeError, match="port must be a whole number, not '8'"):
        Server(port="8")
    with pytest.raises(TypeError, match="host is a text"):
        Server(8400)
    with pytest.raises(Refused, match=r"no machine called nohost\.invalid is known here; for one"):
        Server("nohost.invalid")
    with pytest.raises(Refused, match="can be reached by others"):
        Server("0.0.0.0")


def test_a_way_that_cannot_be_meant_is_refused_where_it_is_given(server, tmp_path):
    share, inbox = server.share(model(0.1)), server.inbox(into=tmp_path)
    tensors = model(0.1)
    for connections, kind in ((0, LocalProtocolError), (-1, LocalProtocolError), ("4", TypeError)):
        for move in (
            lambda: weighlock.fetch(share.url, connections=connections),  # noqa: B023
            lambda: next(weighlock.stream(share.url, connections=connections)),  # noqa: B023
            lambda: weighlock.push(inbox.url, tensors, connections=connections),  # noqa: B023
        ):
            with pytest.raises(kind, match="connections"):
                move()
    with pytest.raises(TypeError, match="limit_rate must be a number, not '1MB'"):
        weighlock.fetch(share.url, limit_rate="1MB")
    with pytest.raises(TypeError, match="limit_rate must be a number, not '1MB'"):
        weighlock.push(inbox.url, tensors, limit_rate="1MB")
    with pytest.raises(TypeError, match="quota_bytes must be a number, not '1GB'"):
        server.inbox(into=tmp_path, quota_bytes="1GB")
    with pytest.raises(LayoutError, match="there are no patterns, names= is empty"):
        weighlock.fetch(share.url, names=[])


def test_urls_of_the_other_direction_are_told_apart(server, tmp_path):
    share, inbox = server.share(model(0.1)), server.inbox(("a",), into=tmp_path)
    for url in (share.url, server.share(model(0.1), receivers=["a"]).url_for("a")):
        with pytest.raises(ShareGone, match="is the URL of a share: pull it; push takes"):
            weighlock.push(url, model(0.1))
    for url in (inbox.url, inbox.url_for("a")):
        for pull in (weighlock.fetch, weighlock.open):
            with pytest.raises(ShareGone, match="is the URL of an inbox: push to it"):
                pull(url)
    with pytest.raises(ShareGone, match=r"there is nothing \(404\)$"):
        weighlock.push(inbox.url[:-32] + "0" * 32, model(0.1))
