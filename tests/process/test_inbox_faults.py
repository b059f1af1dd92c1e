"""Push and inbox when something breaks: either side dies, the way cuts, spoils, holds or trickles.

Rows C and D of the reliability notes, for the direction in which the one who sends dials.
"""

import json
import os
import re
import resource
import signal

import numpy as np
import pytest

import weighlock
from conftest import needs_strace
from process.chaos import Rules
from process.chaos_fixtures import chaos, server
from process.chaos_peers import IMPATIENT, MB, InThread, holds, model
from process.inbox_peers import Wire, inbox_process, laid_out, pushing, temporaries
from waiting import settled, until
from weighlock import Limits, State
from weighlock.errors import (
    Aborted,
    ChunkCorrupt,
    PeerLost,
    ProtocolError,
    Refused,
    ShareGone,
    TransferError,
    TransferTimeout,
)

__all__ = ["chaos", "server"]  # fixtures of this module

BRIEF = Limits(idle_s=2, patience_s=4, connect_s=2)


def read_until_landed(process):
    """Who landed next, as `serve --json` tells; None if it ends before."""
    for line in process.child.stdout:
        if "landed" in (facts := json.loads(line)):
            return facts["landed"]
    return None


def size_of(tensors, tmp_path):
    return len(laid_out(tensors, tmp_path))


def up_bytes(proxy):
    return sum(passed.up for passed in proxy.passed)


# --- either side dies ---


def test_a_sender_that_is_killed_is_resumed_by_the_next(server, chaos, tmp_path):
    inbox = server.inbox("a", into=tmp_path / "in")
    proxy = chaos.proxy(inbox.url)
    with pushing(inbox.url_for("a"), 30.3, limit_rate=20 * MB) as sender:
        until(lambda: inbox.senders["a"].bytes_here >= 9 * MB)
        sender.child.kill()
        sender.child.wait()
    until(settled(lambda: inbox.senders["a"].bytes_here))  # what was on its way has ended
    here = inbox.senders["a"].bytes_here
    tensors = model(30.3)
    size = size_of(tensors, tmp_path)
    pushed = weighlock.push(proxy.of(inbox.url_for("a")), tensors)
    assert pushed.sent_bytes == size - here
    assert size - here <= up_bytes(proxy) < size - here + 20_000
    assert inbox.wait(5)["a"] is State.LANDED
    assert holds(tmp_path / "in" / "a.safetensors", tensors)


def test_a_server_that_is_killed_is_taken_up_where_it_was(no_leaks, chaos, tmp_path):
    """Same URL, same ticket; a sender that is under way goes on by itself."""
    tensors = model(40.3)
    size = size_of(tensors, tmp_path)
    place, secret = tmp_path / "in", tmp_path / "secret"
    with inbox_process(place, secret, "--sender", "a") as first:
        url, port = first.urls["a"], first.port
        proxy = chaos.proxy(url)
        call = InThread(weighlock.push, proxy.of(url), tensors, limit_rate=20 * MB, connections=1)
        until(lambda: up_bytes(proxy) > 10 * MB)
        first.child.kill()
        first.child.wait()
    assert len(temporaries(place)) == 1
    with inbox_process(place, secret, "--sender", "a", port=port) as second:
        assert second.urls["a"] == url
        pushed = call.end()
        assert read_until_landed(second) == "a"
    assert os.listdir(place) == ["a.safetensors"]
    assert holds(place / "a.safetensors", tensors)
    # Lost is at most the range that was being sent, and one that was begun in vain.
    assert up_bytes(proxy) < size + 17 * MB
    assert pushed.sent_bytes <= size


def test_what_a_killed_server_had_is_not_sent_again_by_a_later_push(no_leaks, tmp_path):
    tensors = model(20.3)
    content = laid_out(tensors, tmp_path)
    place, secret = tmp_path / "in", tmp_path / "secret"
    with inbox_process(place, secret) as first:
        with Wire(first.urls[None]) as wire:
            wire.base = wire.base.replace("stranger", "me")
            assert wire.announce(content)[0] == 200
            assert wire.put(content, 8, 8)[0] == 200
        url, port = first.urls[None], first.port
        first.child.kill()
    with inbox_process(place, secret, port=port) as second:
        pushed = weighlock.push(url, tensors, sender="me")
        assert pushed.sent_bytes == len(content) - 8 * MB
        assert read_until_landed(second) == "me"
    assert temporaries(place) == []


def test_a_server_killed_after_landing_whose_reply_was_lost(no_leaks, chaos, tmp_path):
    tensors = model()
    place, secret = tmp_path / "in", tmp_path / "secret"
    with inbox_process(place, secret, "--sender", "a") as first:
        url, port = first.urls["a"], first.port
        # Replies: to the header, to the one range, to "landed".
        proxy = chaos.proxy(url, hold_replies=frozenset({2}))
        call = InThread(weighlock.push, proxy.of(url), tensors)
        assert read_until_landed(first) == "a"
        first.child.kill()
        first.child.wait()
    with inbox_process(place, secret, "--sender", "a", port=port) as second:
        proxy.sever()
        assert call.end().size == size_of(tensors, tmp_path)
        assert read_until_landed(second) == "a"
    assert os.listdir(place) == ["a.safetensors"]


@needs_strace
def test_a_disk_that_syncs_slowly_is_waited_for(no_leaks, tmp_path):
    """Longer than any request waits, and than a push without progress is tried again."""
    slow = ("strace", "-D", "-f", "-qq", "-o", "/dev/null", "-e", "trace=fsync")
    slow += ("-e", "inject=fsync:delay_enter=3s:when=1")
    place = tmp_path / "in"
    place.mkdir()  # so that its own making is not synced
    with inbox_process(place, tmp_path / "secret", "--sender", "a", under=slow) as process:
        limits = Limits(idle_s=1.5, patience_s=1.5)
        pushed = weighlock.push(process.urls["a"], model(2.2), limits=limits)
        assert pushed.sent_bytes == pushed.size  # once
        assert read_until_landed(process) == "a"
        process.child.send_signal(signal.SIGTERM)
        process.child.wait(20)
    assert holds(place / "a.safetensors", model(2.2))


@needs_strace
def test_a_push_begins_while_another_is_put_in_its_place(no_leaks, tmp_path):
    """Between its closing and the directory's sync, which takes long here."""
    slow = ("strace", "-D", "-f", "-qq", "-o", "/dev/null", "-e", "trace=fsync")
    slow += ("-e", "inject=fsync:delay_enter=4s:when=2")
    place = tmp_path / "in"
    names = ("--sender", "a", "--sender", "b")
    place.mkdir()  # so that its own making is not synced
    with inbox_process(place, tmp_path / "secret", *names, under=slow) as process:
        first = InThread(weighlock.push, process.urls["a"], model(2.2))
        until((place / "a.safetensors").exists)
        limits = Limits(patience_s=0.5)
        assert weighlock.push(process.urls["b"], model(1.1), limits=limits).sent_bytes
        first.end()
        process.child.send_signal(signal.SIGTERM)
        process.child.wait(20)
    assert holds(place / "b.safetensors", model(1.1))


@needs_strace
def test_a_disk_that_fails_slowly_is_told_to_who_waits(no_leaks, chaos, tmp_path):
    """The sender was told that its file is being put in its place: it asks again, and is told."""
    failing = ("strace", "-D", "-f", "-qq", "-o", "/dev/null", "-e", "trace=fsync")
    failing += ("-e", "inject=fsync:error=EIO:delay_enter=2s")
    place, tensors = tmp_path / "in", model(2.2)
    place.mkdir()  # so that its own making is not synced
    with inbox_process(place, tmp_path / "secret", "--sender", "a", under=failing) as process:
        proxy = chaos.proxy(process.urls["a"])
        with pytest.raises(Refused, match="the inbox failed: NotDurable"):
            weighlock.push(proxy.of(process.urls["a"]), tensors)
        assert up_bytes(proxy) < size_of(tensors, tmp_path) + 20_000  # once
        assert os.listdir(place) == []
        process.child.send_signal(signal.SIGTERM)
        process.child.wait(20)


def test_an_inbox_without_descriptors_keeps_what_came(no_leaks, tmp_path):
    """What has come is opened once more before it is put in its place."""
    content = laid_out(model(2.2), tmp_path)
    place = tmp_path / "in"
    with (
        inbox_process(place, tmp_path / "secret", "--sender", "a") as process,
        Wire(process.urls["a"]) as wire,
    ):
        assert wire.announce(content)[0] == 200
        assert wire.put(content, 0, 3)[0] == 200
        before = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (3, before[1]))
        assert wire.finish(content)[0] == 503
        assert len(temporaries(place)) == 1
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, before)
        assert wire.finish(content)[0] == 200
        assert read_until_landed(process) == "a"
    assert (place / "a.safetensors").read_bytes() == content


@needs_strace
@pytest.mark.parametrize("when", [1, 2])
def test_what_an_earlier_server_put_in_its_place_is_synced_before_it_counts(
    no_leaks, tmp_path, when
):
    """It may have been killed before it was: the file, or the directory it lies in."""
    failing = ("strace", "-D", "-f", "-qq", "-o", "/dev/null", "-e", "trace=fsync")
    failing += ("-e", f"inject=fsync:error=EIO:when={when}")
    content = laid_out(model(2.2), tmp_path)
    place, secret = tmp_path / "in", tmp_path / "secret"
    place.mkdir()
    (place / "a.safetensors").write_bytes(content)
    with (
        inbox_process(place, secret, "--sender", "a", under=failing) as process,
        Wire(process.urls["a"]) as wire,
    ):
        assert wire.announce(content)[1]["has_some"]
        assert wire.ask("GET", "/digests/0")[0] == 200
        status, said = wire.finish(content)
        assert (status, said["refused"]) == (500, "the inbox failed: NotDurable")
        process.child.send_signal(signal.SIGTERM)
        process.child.wait(20)
    assert (place / "a.safetensors").read_bytes() == content
    with inbox_process(place, secret, "--sender", "a") as process:
        assert weighlock.push(process.urls["a"], model(2.2)).sent_bytes == 0


def test_a_server_told_to_end_keeps_what_came(no_leaks, chaos, tmp_path):
    place, secret = tmp_path / "in", tmp_path / "secret"
    with inbox_process(place, secret, "--sender", "a") as first:
        proxy = chaos.proxy(first.urls["a"])
        call = InThread(
            weighlock.push,
            proxy.of(first.urls["a"]),
            model(30),
            limit_rate=20 * MB,
            limits=IMPATIENT,
        )
        until(lambda: up_bytes(proxy) > 9 * MB)
        first.child.send_signal(signal.SIGTERM)
        assert first.child.wait(20) == 0
    with pytest.raises((PeerLost, TransferTimeout)):
        call.end()
    (left,) = os.listdir(place)
    assert ".part-" in left
    (place / left).unlink()


# --- the way breaks ---


def pushed_through(server, chaos, tmp_path, tensors, **how):
    """Push through a proxy; gives the call's end, the inbox and the proxy."""
    options = {name: how.pop(name) for name in ("limits", "connections") if name in how}
    inbox = server.inbox("a", into=tmp_path / "in")
    proxy = chaos.proxy(inbox.url, **how)
    call = InThread(weighlock.push, proxy.of(inbox.url_for("a")), tensors, **options)
    return call, inbox, proxy


def test_C1_a_push_that_is_cut_at_any_phase_goes_on(server, chaos, tmp_path):
    """The first connection ends after so many bytes: in the head, the header, a block, the end."""
    tensors = model(2.2)
    size = size_of(tensors, tmp_path)
    phases = [0, 1, 200, 500, 900, MB // 2, MB + 1000, size, size + 700, size + 1200, size + 1800]
    for number, after in enumerate(phases):
        for how in ("cut", "reset"):
            inbox = server.inbox("a", into=tmp_path / f"in-{number}-{how}")
            rules = Rules(**{how: after})
            proxy = chaos.proxy(inbox.url, up=lambda n, rules=rules: rules if n == 0 else Rules())
            weighlock.push(proxy.of(inbox.url_for("a")), tensors, connections=1)
            assert inbox.outcome.landed == ("a",)
            assert holds(tmp_path / f"in-{number}-{how}" / "a.safetensors", tensors)


def test_C6_every_reply_may_be_lost_once(server, chaos, tmp_path):
    tensors = model(9.5)
    for lost in range(5):
        inbox = server.inbox("a", into=tmp_path / f"in-{lost}")
        proxy = chaos.proxy(inbox.url, drop_replies=frozenset({lost}))
        weighlock.push(proxy.of(inbox.url_for("a")), tensors, connections=1)
        found = [(name, catalog.close()) for name, catalog in inbox]
        assert [name for name, _ in found] == ["a"]  # once
        assert holds(tmp_path / f"in-{lost}" / "a.safetensors", tensors)


@pytest.mark.parametrize("way", ["pass", "swallow"])
def test_C7_every_request_may_come_twice(server, chaos, tmp_path, way):
    tensors = model(9.5)
    call, inbox, _ = pushed_through(
        server, chaos, tmp_path, tensors, duplicate=way, limits=BRIEF, connections=2
    )
    try:
        call.end()
    except (TransferError, ProtocolError):
        assert way == "pass"  # replies that nobody asked for: an error, never another result
    if inbox.outcome.landed:
        assert holds(tmp_path / "in" / "a.safetensors", tensors)
    else:
        assert way == "pass"
    inbox.close()
    for name in temporaries(tmp_path / "in"):
        (tmp_path / "in" / name).unlink()


def test_C4_a_byte_spoiled_on_the_way_up_is_sent_again(server, chaos, tmp_path):
    tensors = model(9.5)
    spoiled = Rules(corrupt=3 * MB + 12345)
    call, _, proxy = pushed_through(
        server, chaos, tmp_path, tensors, up=lambda n: spoiled if n == 0 else Rules(), connections=1
    )
    pushed = call.end()
    assert holds(tmp_path / "in" / "a.safetensors", tensors)
    assert up_bytes(proxy) > pushed.size + MB


def test_C4_a_way_that_always_spoils_ends_the_push(server, chaos, tmp_path):
    spoiled = Rules(corrupt=MB // 2, repeats=True)
    call, inbox, _ = pushed_through(
        server, chaos, tmp_path, model(3.3), up=spoiled, connections=1, limits=BRIEF
    )
    with pytest.raises((ChunkCorrupt, Refused)):
        call.end()
    assert not os.path.exists(tmp_path / "in" / "a.safetensors")
    inbox.close()
    for name in temporaries(tmp_path / "in"):
        (tmp_path / "in" / name).unlink()


@pytest.mark.parametrize("at", [0, 9, 13, 60, 150, 210, 225])
def test_C4_bytes_spoiled_in_replies_never_make_it_seem_landed(server, chaos, tmp_path, at):
    tensors = model(2.2)
    spoiled = Rules(corrupt=at, mask=0x10)
    call, inbox, _ = pushed_through(
        server, chaos, tmp_path, tensors, down=spoiled, connections=1, limits=IMPATIENT
    )
    try:
        call.end()
    except (TransferError, ProtocolError):
        pass
    else:
        assert holds(tmp_path / "in" / "a.safetensors", tensors)
    inbox.close()
    for name in temporaries(tmp_path / "in"):
        (tmp_path / "in" / name).unlink()


def test_C14_latency_and_thin_slices_only_take_longer(server, chaos, tmp_path):
    tensors = model(1.3)
    call, _, _ = pushed_through(
        server,
        chaos,
        tmp_path,
        tensors,
        up=Rules(latency_s=0.002, slice_bytes=8000),
        down=Rules(latency_s=0.05),
    )
    call.end()
    assert holds(tmp_path / "in" / "a.safetensors", tensors)


def test_C15_replies_that_never_come_end_the_push(server, chaos, tmp_path):
    call, inbox, proxy = pushed_through(
        server, chaos, tmp_path, model(2.2), down=Rules(drop=True), limits=IMPATIENT
    )
    with pytest.raises(TransferTimeout):
        call.end()
    assert inbox.outcome["a"] is State.STARTED  # it may come back under its name
    proxy.down = Rules()
    weighlock.push(proxy.of(inbox.url_for("a")), model(2.2))
    assert inbox.wait(5)["a"] is State.LANDED


def test_C2_a_way_that_hangs_is_left_and_tried_again(server, chaos, tmp_path):
    tensors = model(9.5)
    hang = Rules(hang=2 * MB)
    call, _, proxy = pushed_through(
        server,
        chaos,
        tmp_path,
        tensors,
        up=lambda n: hang if n < 2 else Rules(),
        connections=2,
        limits=Limits(idle_s=0.5, patience_s=5),
    )
    call.end()
    assert holds(tmp_path / "in" / "a.safetensors", tensors)
    proxy.release()


def test_D1_an_abort_is_heard_at_every_phase(server, chaos, tmp_path):
    """Held at the header, in a block, and before the last reply."""
    tensors = model(2.2)
    ways = [
        {"hold_replies": frozenset({0})},
        {"up": Rules(hang=MB)},
        {"hold_replies": frozenset({1})},
        {"hold_replies": frozenset({2})},
        {"up": Rules(hang=0)},
    ]
    for number, how in enumerate(ways):
        inbox = server.inbox("a", into=tmp_path / f"in-{number}")
        proxy = chaos.proxy(inbox.url, **how)
        abort = weighlock.Abort()
        call = InThread(
            weighlock.push, proxy.of(inbox.url_for("a")), tensors, abort=abort, connections=1
        )
        if how.get("up") == Rules(hang=0):
            until(lambda proxy=proxy: len(proxy.passed) == 1)
        elif "up" in how:
            until(lambda proxy=proxy: up_bytes(proxy) == MB)
        else:
            held = max(how["hold_replies"])
            until(lambda proxy=proxy, held=held: proxy.replies > held)
        abort.set()
        with pytest.raises(Aborted):
            call.end(2)
        proxy.sever()
        inbox.close()
        for name in temporaries(tmp_path / f"in-{number}"):
            # The word of the abort was held as well: what came is what a lost sender leaves.
            (tmp_path / f"in-{number}" / name).unlink()


def test_C11_senders_that_trickle_are_given_up_and_harm_nobody(no_leaks, tmp_path):
    limits = Limits(idle_s=0.4, head_s=0.4)
    content = laid_out(model(2.2), tmp_path)
    header = content[: 8 + int.from_bytes(content[:8], "little")]
    with weighlock.Server(limits=limits) as server:
        inbox = server.inbox(("a", "b"), into=tmp_path / "in")
        with Wire(inbox.url_for("a")) as wire:
            assert wire.announce(content)[0] == 200
            head = wire.head(
                "PUT",
                f"{wire.base}/blocks/0",
                {"Content-Length": MB, "Weighlock-Digests": "0" * 64},
            )
            wire.sock.sendall(head)

            def is_closed():
                try:
                    wire.sock.sendall(b"x")
                except OSError:
                    return True
                return False

            weighlock.push(inbox.url_for("b"), model(2.2))
            until(is_closed)
        assert len(header) < 1000
        assert inbox.outcome["b"] is State.LANDED
        inbox.close()
    for name in temporaries(tmp_path / "in"):
        (tmp_path / "in" / name).unlink()


# --- two processes, one name ---


def test_two_processes_under_one_name_end_with_one_model(server, tmp_path):
    inbox = server.inbox("a", into=tmp_path / "in")
    url = inbox.url_for("a")
    with pushing(url, 9.5, seed=1) as one, pushing(url, 9.5, seed=2) as two:
        ends = [process.child.communicate(timeout=30) for process in (one, two)]
        codes = [process.child.returncode for process in (one, two)]
    winners = [number for number, code in enumerate(codes) if code == 0]
    assert len(winners) == 1, ends
    (loser,) = {0, 1} - set(winners)
    assert re.search("Refused|ShareGone", ends[loser][1])
    assert inbox.wait(5)["a"] is State.LANDED
    assert holds(tmp_path / "in" / "a.safetensors", model(9.5, winners[0] + 1))
    assert os.listdir(tmp_path / "in") == ["a.safetensors"]


def test_an_inbox_that_was_never_there(server):
    gone = f"{server.url}/i/{'0' * 32}"
    with pytest.raises(ShareGone) as caught:
        weighlock.push(gone, model(1.1))
    assert caught.value.reason == "unknown"


def test_who_comes_before_all_is_offered_waits_for_it(no_leaks):
    key, share_id = bytes(32), "a" * 32
    tensors = {"a": np.arange(10)}
    with weighlock.Server(key=key) as first:
        port, url = first.port, first.share(tensors, share_id=share_id).url
    with weighlock.Server(port=port, key=key, start=False) as second:
        call = InThread(weighlock.fetch, url)
        until(call.thread.is_alive)
        second.share(tensors, share_id=share_id)
        second.start()
        second.start()
        assert call.end()["a"].load().tolist() == list(range(10))
    with weighlock.Server(start=False):
        pass  # and one that was never started is closed like any other
