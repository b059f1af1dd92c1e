"""Push and inbox between real servers and senders: exact bytes, what is refused, and what is left.

Faults of the way are in `test_inbox_faults`, requests of a hostile sender in
`test_inbox_requests`.
"""

import contextlib
import gc
import io
import os
import subprocess
import threading
import zlib

import ml_dtypes
import numpy as np
import pytest

import weighlock
from conftest import needs_root
from process.certificates import certificates, needs_openssl
from process.chaos_peers import MB, InThread, model, same
from process.inbox_peers import Wire, announced, laid_out, temporaries
from waiting import until
from weighlock import Abort, Access, Credential, Limits, Server, Spool, State, TensorSpec
from weighlock.errors import (
    Aborted,
    DiskError,
    LocalProtocolError,
    Refused,
    ShareGone,
    SourceChanged,
    SpoolClosed,
)
from weighlock.sources.inflated import InflatedSource
from weighlock.sources.local import BytesSource
from weighlock.tensors.dtypes import DType
from weighlock.tensors.spec import Span
from weighlock.tensors.stored import StoredRef

__all__ = ["certificates"]  # a fixture of this module

pytestmark = pytest.mark.usefixtures("no_leaks")

SMALL = {"a": np.arange(1000, dtype=np.float32), "b": np.arange(12, dtype=np.int8)}


@pytest.fixture
def server():
    with Server() as server:
        yield server


@pytest.fixture
def inbox(server, tmp_path):
    return server.inbox(("a", "b"), into=tmp_path / "in")


def landed(inbox):
    """The next that lands: its name, and its tensors as arrays."""
    name, catalog = next(iter(inbox))
    with catalog:
        return name, {tensor: ref.load() for tensor, ref in catalog.items()}


def assert_exact(found, expected):
    assert set(found) == set(expected)
    for name, array in expected.items():
        array = np.asarray(array)
        assert found[name].dtype == array.dtype, name
        assert found[name].shape == array.shape, name
        assert found[name].tobytes() == array.tobytes(), name


# --- what arrives ---


def test_arrays_of_every_kind_arrive_bit_for_bit(inbox):
    dice = np.random.default_rng(3)
    large = dice.random((1200, 1000), np.float32)
    nan = np.array([0x7FC01234, 0xFFC00001], np.uint32).view(np.float32)
    tensors = {
        "large": large,
        "half": dice.random(70_001, np.float32).astype(ml_dtypes.bfloat16),
        "tied": large,
        "turned": large.T,
        "every other": large[::2, ::3],
        "scalar": np.array(2.5),
        "empty": np.zeros((0, 3), np.int8),
        "payloads of NaN": nan,
        "fp8": np.arange(16, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn),
        "flags": dice.random(11) < 0.5,
        **{f"small.{n}": np.arange(n, n + 40, dtype=np.int32) for n in range(300)},
    }
    pushed = weighlock.push(inbox.url_for("a"), tensors, metadata={"round": "7"})
    assert pushed.sent_bytes == pushed.size
    name, catalog = next(iter(inbox))
    with catalog:
        assert name == "a"
        assert catalog.metadata["round"] == "7"
        assert dict(catalog.aliases) == {"tied": "large"}
        assert_exact({name: ref.load() for name, ref in catalog.items()}, tensors)


def test_nothing_at_all_can_be_pushed(inbox):
    weighlock.push(inbox.url_for("a"), {})
    assert landed(inbox) == ("a", {})


def test_a_torch_model_arrives_with_its_ties(inbox):
    torch = pytest.importorskip("torch")
    weight = torch.randn(300, 400).to(torch.bfloat16)
    state = {"in": weight, "out": weight, "t": weight.t(), "s": torch.tensor(3), "v": weight[:, 7]}
    weighlock.push(inbox.url_for("a"), state)
    _, catalog = next(iter(inbox))
    with catalog:
        assert all(torch.equal(catalog[name].torch(), tensor) for name, tensor in state.items())
        assert "out" in catalog.aliases


@pytest.mark.parametrize("legacy", [False, True])
def test_a_checkpoint_is_pushed_as_it_is(inbox, tmp_path, legacy):
    torch = pytest.importorskip("torch")
    state = {"w": torch.randn(1000, 700), "b": torch.randn(700).half()}
    state["turned"] = state["w"].t()
    torch.save(state, tmp_path / "x.pt", _use_new_zipfile_serialization=not legacy)
    with weighlock.open(tmp_path / "x.pt") as catalog:
        weighlock.push(inbox.url_for("a"), catalog)
    _, arrays = landed(inbox)
    assert_exact(arrays, {name: tensor.numpy() for name, tensor in state.items()})


def test_a_file_is_sent_without_being_read_into_memory(inbox, tmp_path):
    weighlock.save(tmp_path / "x.safetensors", model(9.5))
    with weighlock.open(tmp_path / "x.safetensors") as catalog:
        weighlock.push(inbox.url_for("a"), catalog)
    assert (tmp_path / "in" / "a.safetensors").read_bytes() == (
        tmp_path / "x.safetensors"
    ).read_bytes()


def test_what_landed_can_be_shared_and_pushed_on(server, inbox, tmp_path):
    weighlock.push(inbox.url_for("a"), SMALL)
    _, catalog = next(iter(inbox))
    with catalog:
        weighlock.push(inbox.url_for("b"), catalog)
        with weighlock.fetch(server.share(catalog).url) as fetched:
            assert_exact({name: ref.load() for name, ref in fetched.items()}, SMALL)
    assert landed(inbox)[0] == "b"


@needs_openssl
def test_over_tls(certificates, tmp_path):
    cert = certificates.path("server")
    access = Access(origins={"127.0.0.1": Credential(ca=certificates.ca)})
    tensors = model(9.5)
    with Server(tls_cert=cert) as server:
        inbox = server.inbox("a", into=tmp_path / "in")
        weighlock.push(inbox.url_for("a"), tensors, access=access)
        assert_exact(landed(inbox)[1], tensors)
        with pytest.raises(Refused, match="certificate is not trusted"):
            weighlock.push(inbox.url_for("a"), tensors)


# --- the life of an inbox ---


def test_iterating_gives_what_lands_in_that_order_and_ends_when_all_are_final(inbox):
    found = InThread(lambda: [(name, catalog.close()) for name, catalog in inbox])
    weighlock.push(inbox.url_for("b"), SMALL)
    weighlock.push(inbox.url_for("a"), SMALL)
    assert [name for name, _ in found.end()] == ["b", "a"]
    outcome = inbox.wait(0)
    assert outcome.reason == "settled"
    assert set(outcome.landed) == {"a", "b"}
    assert list(inbox) == []


def test_wait_returns_when_enough_have_landed(inbox):
    waiting = InThread(inbox.wait, 20, at_least=1)
    weighlock.push(inbox.url_for("b"), SMALL)
    outcome = waiting.end()
    assert outcome.reason is None
    assert outcome.landed == ("b",)
    assert outcome["a"] is State.WAITING
    assert inbox.senders["b"].bytes_here > 4000


def test_an_inbox_ends_at_its_time_and_says_so(server, tmp_path):
    inbox = server.inbox("a", into=tmp_path / "in", expires_s=0.05)
    assert list(inbox) == []
    with pytest.raises(ShareGone) as caught:
        weighlock.push(inbox.url_for("a"), SMALL)
    assert caught.value.reason == "expired"


def test_catalogs_nobody_asks_for_cost_no_descriptor(server, tmp_path):
    inbox = server.inbox(into=tmp_path / "in")
    before = len(os.listdir("/proc/self/fd"))
    for number in range(20):
        weighlock.push(inbox.url, SMALL, sender=f"s{number}")
    until(lambda: len(os.listdir("/proc/self/fd")) < before + 10)
    inbox.close()
    assert len(os.listdir(tmp_path / "in")) == 20


def test_a_sender_that_is_slow_to_send_is_not_lost(server, tmp_path):
    inbox = server.inbox("a", into=tmp_path / "in", idle_s=0.3)
    # Two blocks' worth in more than four times the silence that is allowed.
    weighlock.push(inbox.url_for("a"), model(2.2), limit_rate=1.5 * MB, connections=1)
    assert inbox.wait(5)["a"] is State.LANDED


def test_pushing_again_what_has_landed_sends_nothing(inbox):
    tensors = model()
    assert weighlock.push(inbox.url_for("a"), tensors).sent_bytes > 3 * MB
    assert weighlock.push(inbox.url_for("a"), tensors).sent_bytes == 0
    with pytest.raises(Refused, match="has landed already"):
        weighlock.push(inbox.url_for("a"), SMALL)
    landed(inbox)


@pytest.mark.parametrize("form", ["specs", "triples", "arrays", "catalog"])
def test_what_is_expected_may_be_told_in_any_form(server, tmp_path, form):
    specs = {
        "specs": {
            name: TensorSpec(name, array.dtype, array.shape) for name, array in SMALL.items()
        },
        "triples": [(name, array.dtype, array.shape) for name, array in SMALL.items()],
        "arrays": SMALL,
        "catalog": weighlock.Catalog.of(SMALL),
    }[form]
    inbox = server.inbox("a", into=tmp_path / "in", specs=specs)
    with pytest.raises(Refused, match="announced"):
        weighlock.push(inbox.url_for("a"), {"a": SMALL["a"]})
    inbox = server.inbox("a", into=tmp_path / "in", specs=specs)
    weighlock.push(inbox.url_for("a"), SMALL)
    assert_exact(landed(inbox)[1], SMALL)


@pytest.mark.parametrize("end", ["settled", "revoked"])
def test_pushing_again_when_the_inbox_is_over_is_told_that_it_landed(server, tmp_path, end):
    """The last to land settles the inbox: its reply may be lost as well as any other's."""
    tensors = model()
    inbox = server.inbox("a" if end == "settled" else ("a", "b"), into=tmp_path / "in")
    url, told = inbox.url_for("a"), []
    size = weighlock.push(url, tensors).size
    if end == "revoked":
        inbox.revoke()
    assert inbox.ended == end
    again = weighlock.push(url, tensors, progress=lambda here, total: told.append((here, total)))
    assert (again.sender, again.size, again.sent_bytes) == ("a", size, 0)
    assert told[-1] == (size, size)
    changed = {**tensors, "large": tensors["large"].copy()}
    changed["large"][-1] += 1  # the same header
    for other in (changed, SMALL):
        with pytest.raises(ShareGone, match="'a' had landed there before, with other") as caught:
            weighlock.push(url, other)
        assert caught.value.reason == end
    assert inbox.outcome["a"] is State.LANDED
    if end == "revoked":
        with pytest.raises(ShareGone, match=r"is over \(revoked\)$"):
            weighlock.push(inbox.url_for("b"), tensors)


def test_the_end_of_an_inbox_tells_only_who_proves_its_name_what_landed(server, tmp_path):
    inbox = server.inbox("a", into=tmp_path / "in")
    weighlock.push(inbox.url_for("a"), SMALL)
    for url, sender in ((inbox.url, "a"), (inbox.url + "#r=a." + "0" * 32, None)):
        with pytest.raises(ShareGone, match=r"is over \(settled\)$"):
            weighlock.push(url, SMALL, sender=sender)


def test_a_landed_file_is_recognised_by_an_inbox_made_later(server, tmp_path):
    tensors = model()
    for _ in range(2):
        with server.inbox("a", into=tmp_path / "in") as inbox:
            last = weighlock.push(inbox.url_for("a"), tensors)
            assert_exact(landed(inbox)[1], tensors)
    assert last.sent_bytes == 0
    with (
        server.inbox("a", into=tmp_path / "in") as inbox,
        pytest.raises(Refused, match="does not replace it"),
    ):
        weighlock.push(inbox.url_for("a"), SMALL)


def test_who_has_no_ticket_gets_a_file_under_a_name_of_ours(server, tmp_path):
    inbox = server.inbox(into=tmp_path / "in")
    weighlock.push(inbox.url, SMALL, sender="index")
    assert landed(inbox)[0] == "index"
    (name,) = os.listdir(tmp_path / "in")
    assert name.startswith("push-")
    for bad in ("../x", "", "a/b", ".hidden", "x" * 65, "a\n"):
        with pytest.raises((LocalProtocolError, Refused)):
            weighlock.push(inbox.url, SMALL, sender=bad or "\0")


# --- refused before any data ---


REFUSALS = {
    "quota": ({"quota_bytes": MB}, "at most 1,048,576 are allowed"),
    "missing": ({"specs": {"x": TensorSpec("x", weighlock.DType.F32, (1,))}}, "'x' is expected"),
    "unexpected": ({"specs": {}}, "'large' is announced and not expected"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_header_is_refused_before_any_data(server, tmp_path, case):
    options, why = REFUSALS[case]
    inbox = server.inbox("a", into=tmp_path / "in", **options)
    told = []
    with pytest.raises(Refused, match=why):
        weighlock.push(inbox.url_for("a"), model(), progress=lambda *now: told.append(now))
    assert told == []  # nothing was even begun
    assert inbox.wait(5)["a"] is State.FAILED
    assert os.listdir(tmp_path / "in") == []


def test_another_dtype_or_shape_than_expected_is_refused(server, tmp_path):
    specs = {"a": TensorSpec("a", weighlock.DType.F32, (10,))}
    inbox = server.inbox("a", into=tmp_path / "in", specs=specs, expires_s=20)
    with Wire(inbox.url_for("a")) as wire:
        for array in (np.zeros(10, np.int32), np.zeros((2, 5), np.float32)):
            status, said = wire.announce(laid_out({"a": array}, tmp_path))
            assert status == 403
            assert "F32 [10] is expected" in said["refused"]
        assert wire.announce(laid_out({"a": np.zeros(10, np.float32)}, tmp_path))[0] == 200


def test_limits_of_the_server_bound_headers(tmp_path):
    with Server(limits=Limits(announced_bytes=1000, tensors=5)) as server:
        inbox = server.inbox("a", into=tmp_path / "in")
        many = {f"{n}": np.zeros(1, np.int8) for n in range(8)}
        with pytest.raises(Refused, match="allowed"):
            weighlock.push(inbox.url_for("a"), many)
    assert os.listdir(tmp_path / "in") == []


def test_a_header_of_megabytes_is_refused_in_words(tmp_path):
    """Its sender is still sending when the answer comes, and must not see a broken connection."""
    with Server(limits=Limits(announced_bytes=1000)) as server:
        inbox = server.inbox("a", into=tmp_path / "in")
        with pytest.raises(Refused, match="1,000 allowed"):
            weighlock.push(inbox.url_for("a"), SMALL, metadata={"x": "y" * 20_000_000})


@contextlib.contextmanager
def small_disk(place):
    """A file system of 8 MB, unmounted at the end even if a test that failed left files open."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


@needs_root
def test_a_full_disk_is_told_before_any_data(server, tmp_path):
    with small_disk(tmp_path / "small") as place:
        inbox = server.inbox(("a", "b", "c"), into=place)
        with pytest.raises(Refused, match="no space"):
            weighlock.push(inbox.url_for("a"), model(20))
        # What was promised to one is not promised to another.
        content = laid_out(model(5), tmp_path)
        with announced(inbox, content, "b"), Wire(inbox.url_for("c")) as late:
            status, said = late.announce(content)
            assert (status, "no space" in said["refused"]) == (507, True)
        # A disk that becomes full on the way is made free again.
        (place / "filler").write_bytes(bytes(7 * MB))
        with pytest.raises(Refused, match="no space"):
            weighlock.push(inbox.url_for("b"), model(5))
        assert os.listdir(place) == ["filler"]
        inbox.close()


@needs_root
def test_room_that_was_promised_to_a_sender_that_is_lost_is_given_to_others(server, tmp_path):
    with small_disk(tmp_path / "small") as place:
        inbox = server.inbox(("a", "b", "c", "d"), into=place, idle_s=1)
        content = laid_out(model(5), tmp_path)
        with announced(inbox, content, "a") as wire:
            assert wire.put(content, 0, 2)[0] == 200
            until(lambda: inbox.outcome["a"] is State.LOST)
            weighlock.push(inbox.url_for("b"), SMALL)  # there is room for both
            weighlock.push(inbox.url_for("c"), model(4, seed=2))
            assert wire.announce(content)[0] == 507
        assert inbox.outcome.landed == ("b", "c")
        (left,) = temporaries(place)
        assert left.startswith(".a.safetensors.part-")  # for when there is room again
        os.unlink(place / "c.safetensors")
        with Wire(inbox.url_for("a")) as wire:
            assert wire.announce(content)[1].get("has_some")
        server.close()


def test_a_quota_that_was_promised_to_a_sender_that_is_lost_is_given_to_others(server, tmp_path):
    with Spool(tmp_path, quota_bytes=8 * MB) as spool:
        inbox = server.inbox(("a", "b", "c"), into=spool, idle_s=1)
        content = laid_out(model(5), tmp_path)
        with announced(inbox, content, "a"), Wire(inbox.url_for("b")) as late:
            assert late.announce(content)[0] == 507
            until(lambda: inbox.outcome["a"] is State.LOST)
            weighlock.push(inbox.url_for("b"), model(5))
        assert_exact(landed(inbox)[1], model(5))
        inbox.close()


def test_who_is_never_lost_is_not_promised_room_for_ever(tmp_path):
    limits = Limits(idle_s=0.5)
    with Spool(tmp_path, quota_bytes=8 * MB) as spool, Server(limits=limits) as server:
        inbox = server.inbox(("a", "b"), into=spool, idle_s=None)
        content = laid_out(model(5), tmp_path)

        def takes(name):
            with Wire(inbox.url_for(name)) as wire:
                return wire.announce(content)[0] == 200

        assert takes("a")
        until(lambda: takes("b"))
        inbox.close()


def test_tickets_are_bound_to_their_names(server, inbox, tmp_path):
    mine, other = inbox.url_for("a"), inbox.url_for("b")
    forged = mine.replace("#r=a.", "#r=b.")
    elsewhere = server.inbox("a", into=tmp_path / "other").url_for("a")
    crossed = mine.partition("#")[0] + "#" + elsewhere.partition("#")[2]
    for url in (inbox.url, forged, crossed):
        with pytest.raises(Refused, match="not the ticket of that sender"):
            weighlock.push(url, SMALL)
    with pytest.raises(Refused, match="is the ticket of 'b'"):
        weighlock.push(other, SMALL, sender="a")
    assert os.listdir(tmp_path / "in") == []
    assert set(inbox.outcome.receivers) == {"a", "b"}
    assert inbox.outcome["a"] is State.WAITING


def test_a_directory_that_cannot_be_made_is_told_at_once(server, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DiskError, match="cannot be made"):
        server.inbox("a", into=tmp_path / "file" / "in")


# --- ranges ---


def test_ranges_come_in_any_order_over_any_connections_and_more_than_once(inbox, tmp_path):
    tensors = model(20.3)
    content = laid_out(tensors, tmp_path)
    with announced(inbox, content) as one, Wire(inbox.url_for("a")) as two:
        for wire, first, count in (
            (one, 16, 5),
            (two, 0, 8),
            (one, 3, 2),
            (two, 16, 5),
            (two, 8, 8),
        ):
            status, said = wire.put(content, first, count)
            assert status == 200
        assert said["bytes"] == len(content)  # counted once
        assert two.finish(content) == (200, {"landed": True, "landing": False})
        assert one.finish(content)[1]["landed"] is True  # a repeat changes nothing
        assert one.put(content, 0, 1)[0] == 409
    assert_exact(landed(inbox)[1], tensors)


def test_what_is_missing_or_different_is_not_taken_for_complete(inbox, tmp_path):
    content = laid_out(model(3.3), tmp_path)
    with announced(inbox, content) as wire:
        assert wire.finish(content)[0] == 409
        wire.put(content, 0, 2)
        assert wire.finish(content)[0] == 409
        other = content[: 3 * MB] + bytes(len(content) - 3 * MB)
        wire.put(other, 2, 2)
        assert wire.finish(content)[0] == 409
        digests = wire.ask("GET", "/digests/0")[1]
        assert len(digests) == 4 * 32
        wire.put(content, 3, 1)
        assert wire.finish(content)[0] == 200
    assert (tmp_path / "in" / "a.safetensors").read_bytes() == content
    landed(inbox)


def test_a_sealed_file_is_not_written(inbox, tmp_path):
    """A straggling range of the same attempt must not change what was checked."""
    content = laid_out(model(2.2), tmp_path)
    other = content[: 2 * MB] + bytes(len(content) - 2 * MB)
    said = []

    def straggle(straggler):
        for number in range(200):
            said.append(straggler.put((content, other)[number % 2], 2, 1)[0])
            if said[-1] == 409:
                return

    with announced(inbox, content) as wire, Wire(inbox.url_for("a")) as straggler:
        wire.put(content, 0, 3)
        straggling = InThread(straggle, straggler)
        until(lambda: len(said) > 3)
        until(lambda: wire.finish(content)[0] == 200)
        straggling.end()
    assert said[-1] == 409
    assert (tmp_path / "in" / "a.safetensors").read_bytes() == content
    landed(inbox)


# --- two attempts under one name ---


def test_the_last_push_under_a_name_counts(inbox, tmp_path):
    first, second = (laid_out(model(3.3, seed), tmp_path) for seed in (1, 2))
    with announced(inbox, first) as one, Wire(inbox.url_for("a")) as two:
        assert one.put(first, 0, 2)[0] == 200
        assert two.announce(second, Weighlock_Attempt="b")[0] == 200
        status, said = one.put(first, 2, 2)
        assert status == 403
        assert "another push" in said["refused"]
        assert one.finish(first)[0] == 403
        assert one.ask("POST", "", b'{"state":"aborted"}')[0] == 200  # has no say any more
        assert two.put(second, 0, 4, Weighlock_Attempt="b")[0] == 200
        assert one.announce(first)[0] == 403
        assert two.finish(second, attempt="b")[1]["landed"] is True
    assert (tmp_path / "in" / "a.safetensors").read_bytes() == second
    landed(inbox)


def test_two_who_push_under_one_name_at_once_never_mix(server, tmp_path):
    for round_ in range(3):
        directory = tmp_path / f"in-{round_}"
        inbox = server.inbox("a", into=directory)
        models = [model(9.5, seed) for seed in (1, 2, 3)]
        calls = [InThread(weighlock.push, inbox.url_for("a"), each) for each in models]
        for call in calls:
            call.thread.join(20)
        assert all(
            call.error is None or isinstance(call.error, (Refused, ShareGone)) for call in calls
        )
        (winner,) = [n for n, call in enumerate(calls) if call.error is None]
        assert_exact(landed(inbox)[1], models[winner])
        inbox.close()
        assert os.listdir(directory) == ["a.safetensors"]


def test_an_abort_that_overtakes_its_own_header_leaves_nothing(inbox, tmp_path):
    content = laid_out(model(), tmp_path)
    with Wire(inbox.url_for("a")) as wire:
        wire.ask("POST", "", b'{"state":"aborted","attempt":"7"}')
        assert wire.announce(content, Weighlock_Attempt="7")[0] == 403
        assert os.listdir(tmp_path / "in") == []
        assert wire.announce(content, Weighlock_Attempt="8")[0] == 200
    inbox.close()
    assert temporaries(tmp_path / "in") == []  # nothing had come


# --- ends ---


def test_an_abort_leaves_nothing_at_the_inbox(inbox, tmp_path):
    abort = Abort()
    started = threading.Event()

    def progress(done, total):
        if done > MB:
            started.set()

    call = InThread(
        weighlock.push,
        inbox.url_for("a"),
        model(20),
        abort=abort,
        progress=progress,
        limit_rate=10 * MB,
    )
    assert started.wait(20)
    abort.set("enough")
    with pytest.raises(Aborted, match="enough"):
        call.end(1)
    until(lambda: inbox.outcome["a"] is State.ABORTED)
    until(lambda: os.listdir(tmp_path / "in") == [])  # what is being written just then ends first


class Stopping(BytesSource):
    """Says stop when it is first read, and counts the bytes that are read of it."""

    def __init__(self, content, abort):
        super().__init__(content)
        self.abort, self.read_bytes = abort, 0

    def read_into(self, offset, buffer):
        self.abort.set("enough")
        self.read_bytes += len(buffer)
        super().read_into(offset, buffer)


def test_an_abort_is_heard_while_a_tensor_is_gathered(inbox):
    abort, count = Abort(), 12 * MB
    packer = zlib.compressobj(0, wbits=-15)
    packed = packer.compress(bytes(count)) + packer.flush()
    source = Stopping(packed, abort)
    inflated = InflatedSource(source, 0, len(packed), count, "packed")
    ref = StoredRef(TensorSpec("a", DType.U8, (count,)), inflated, Span(0, count))
    with pytest.raises(Aborted, match="enough"):
        weighlock.push(inbox.url_for("a"), {"a": ref}, abort=abort)
    assert source.read_bytes < count / 2


def test_a_revoked_inbox_tells_its_senders(inbox, tmp_path):
    seen = threading.Event()
    call = InThread(
        weighlock.push,
        inbox.url_for("a"),
        model(20),
        progress=lambda done, total: done > MB and seen.set(),
        limit_rate=10 * MB,
    )
    assert seen.wait(20)
    inbox.revoke()
    with pytest.raises(ShareGone) as caught:
        call.end(5)
    assert caught.value.reason == "revoked"
    assert list(inbox) == []
    # What came can be resumed by another inbox at the same place; then nothing is left.
    (part,) = temporaries(tmp_path / "in")
    assert "-0-0-" in part or part.split(".part-")[1].startswith("0-")
    (tmp_path / "in" / part).unlink()


def test_a_later_inbox_takes_up_what_an_earlier_one_left(server, tmp_path):
    tensors = model(20.3)
    content = laid_out(tensors, tmp_path)
    with server.inbox("a", into=tmp_path / "in") as inbox, announced(inbox, content) as wire:
        assert wire.put(content, 8, 8)[0] == 200
        assert wire.put(content, 0, 3)[0] == 200
    assert len(temporaries(tmp_path / "in")) == 1
    with server.inbox("a", into=tmp_path / "in") as inbox:
        pushed = weighlock.push(inbox.url_for("a"), tensors)
        assert pushed.sent_bytes == len(content) - 11 * MB
        assert_exact(landed(inbox)[1], tensors)
    assert os.listdir(tmp_path / "in") == ["a.safetensors"]


def test_leftovers_with_tensors_that_are_not_expected_do_not_slip_in(server, tmp_path):
    """A header of the same length from a round that allowed it is not taken over unseen."""
    content = laid_out({"aaaa": np.arange(500_000, dtype=np.float32)}, tmp_path)
    wanted = laid_out({"bbbb": np.arange(500_000, dtype=np.float32)}, tmp_path)
    with server.inbox("a", into=tmp_path / "in") as inbox, announced(inbox, content) as wire:
        wire.put(content, 0, 2)
    specs = {"bbbb": TensorSpec("bbbb", weighlock.DType.F32, (500_000,))}
    with server.inbox("a", into=tmp_path / "in", specs=specs) as inbox:
        with announced(inbox, wanted) as wire:
            digests = wire.ask("GET", "/digests/0")[1]
            assert digests[:32] == bytes(32)
            assert digests[32:] != bytes(32)
            assert wire.finish(content)[0] == 409
            assert wire.put(content, 0, 1)[0] == 403
            assert wire.put(wanted, 0, 1)[0] == 200
            assert wire.finish(wanted)[0] == 200
        landed(inbox)


def test_an_array_changed_while_it_is_pushed_is_noticed(inbox, tmp_path):
    tensors = model(12)
    large = tensors["large"]

    def progress(done, total):
        large[:] += 1  # every block, whatever was hashed or sent of it

    with pytest.raises(SourceChanged):
        weighlock.push(inbox.url_for("a"), tensors, progress=progress, limit_rate=20 * MB)
    until(lambda: inbox.outcome["a"] is State.FAILED)
    inbox.close()
    for name in temporaries(tmp_path / "in"):
        (tmp_path / "in" / name).unlink()  # resumable: the next attempt compares it


def test_a_file_changed_while_it_is_pushed_is_noticed(inbox, tmp_path):
    path = tmp_path / "x.safetensors"
    weighlock.save(path, model(20))

    def progress(done, total):
        with open(path, "r+b") as file:
            file.seek(-MB, io.SEEK_END)
            file.write(os.urandom(MB))

    with weighlock.open(path) as catalog, pytest.raises(SourceChanged):
        weighlock.push(inbox.url_for("a"), catalog, progress=progress)
    inbox.close()
    for name in temporaries(tmp_path / "in"):
        (tmp_path / "in" / name).unlink()


def test_silent_arrivals_make_room_for_new_ones(tmp_path):
    limits = Limits(arrivals=2, idle_s=0.2)
    content = laid_out(model(2.2), tmp_path)
    with Server(limits=limits) as server:
        inbox = server.inbox(into=tmp_path / "in")

        def begin(name):
            with Wire(inbox.url) as wire:
                wire.base = wire.base.replace("stranger", name)
                if (said := wire.announce(content))[0] == 200:
                    wire.put(content, 0, 1)
                return said[0]

        assert [begin(name) for name in ("x", "y", "z")] == [200, 200, 503]
        until(lambda: begin("z") == 200)
        weighlock.push(inbox.url, model(2.2), sender="x")  # taken up again, whether let go or not
        assert landed(inbox)[0] == "x"
        inbox.close()
    for name in temporaries(tmp_path / "in"):
        (tmp_path / "in" / name).unlink()


# --- spools ---

quiet = pytest.mark.filterwarnings("ignore:.*lies on tmpfs:RuntimeWarning")


@quiet
def test_into_a_spool_what_lands_lives_as_long_as_its_catalog(server, tmp_path):
    tensors = model()
    with Spool(tmp_path / "root") as spool, server.inbox(("a", "b"), into=spool) as inbox:
        for name in ("a", "b"):
            weighlock.push(inbox.url_for(name), tensors)
        received = iter(inbox)
        _, catalog = next(received)
        assert same(catalog, tensors)
        with weighlock.fetch(server.share(catalog).url) as fetched:
            assert same(fetched, tensors)
        before = spool.used_bytes
        del catalog
        gc.collect()
        # Its share holds refs of it; the other one waits to be asked for.
        assert spool.used_bytes == before
        _, catalog = next(received)
        with catalog.keep(tmp_path / "kept.safetensors") as kept:
            assert same(kept, tensors)
        assert list(received) == []


@quiet
def test_a_catalog_let_go_frees_its_place_in_the_spool(server, tmp_path):
    with Spool(tmp_path / "root", quota_bytes=5 * MB) as spool:
        inbox = server.inbox(("a", "b"), into=spool)
        weighlock.push(inbox.url_for("a"), model(3.3))
        with pytest.raises(Refused, match="no space"):
            weighlock.push(inbox.url_for("b"), model(3.3))
        received = iter(inbox)
        assert next(received)[0] == "a"  # and is let go at once
        gc.collect()
        assert spool.used_bytes == 0
        inbox.close()


@quiet
def test_aborting_a_spool_ends_the_landings_in_it(server, tmp_path):
    with Spool(tmp_path / "root") as spool:
        inbox = server.inbox(("a", "b"), into=spool)
        seen = threading.Event()
        call = InThread(
            weighlock.push,
            inbox.url_for("a"),
            model(20),
            progress=lambda done, total: done > MB and seen.set(),
            limit_rate=10 * MB,
        )
        assert seen.wait(20)
        spool.abort("not needed")
        with pytest.raises(Refused, match="aborted"):
            call.end(5)
        assert spool.used_bytes == 0
        weighlock.push(inbox.url_for("a"), SMALL)  # the inbox lives on
        assert_exact(landed(inbox)[1], SMALL)
        inbox.close()


@quiet
def test_an_interrupted_push_to_a_spool_is_taken_up_while_the_inbox_lives(server, tmp_path):
    tensors = model(9.5)
    content = laid_out(tensors, tmp_path)
    with Spool(tmp_path / "root") as spool:
        with server.inbox("a", into=spool) as inbox:
            with announced(inbox, content) as wire:
                wire.put(content, 0, 8)
            assert weighlock.push(inbox.url_for("a"), tensors).sent_bytes == len(content) - 8 * MB
            assert_exact(landed(inbox)[1], tensors)
        with server.inbox("a", into=spool) as inbox, announced(inbox, content) as wire:
            wire.put(content, 0, 8)
        assert spool.used_bytes == 0  # nobody can go on with it


@quiet
def test_a_closed_spool_takes_nothing(server, tmp_path):
    with Spool(tmp_path / "root") as spool:
        inbox = server.inbox("a", into=spool)
    with pytest.raises(Refused, match="SpoolClosed"):
        weighlock.push(inbox.url_for("a"), SMALL)
    with Spool(tmp_path / "root") as spool:
        inbox = server.inbox("a", into=spool)
        weighlock.push(inbox.url_for("a"), SMALL)
    with pytest.raises(SpoolClosed):
        next(iter(inbox))


def test_the_next_round_under_the_same_name_is_told_that_the_last_one_landed(server, tmp_path):
    inbox = server.inbox(into=tmp_path / "in")
    before = {"w": np.zeros(3 << 18, np.float32)}
    weighlock.push(inbox.url, before, sender="site")
    with pytest.raises(Refused, match=r"'site' has landed already, with other numbers"):
        weighlock.push(inbox.url, {"w": before["w"] + 1}, sender="site")
    assert weighlock.push(inbox.url, before, sender="site").sent_bytes == 0
    weighlock.push(inbox.url, {"w": before["w"] + 1}, sender="site-again")
    name, kept = landed(inbox)
    assert name == "site"
    assert not kept["w"].any()
