"""Messages between real processes: offered, passed on, fetched; owners mixed, receivers named."""

import contextlib
import dataclasses
import http.server
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import weighlock
from weighlock import Access
from weighlock.errors import (
    Aborted,
    LimitExceeded,
    LocalProtocolError,
    MessageInvalid,
    Refused,
    RemoteProtocolError,
    ShareGone,
    SourceChanged,
)
from weighlock.tensors.stored import StoredRef

HERE = Access(allow=["127.0.0.1"])
RNG = np.random.default_rng(5)
WEIGHTS = {f"layer.{n}": RNG.standard_normal((500, 401)) for n in range(3)}
WEIGHTS["turned"] = WEIGHTS["layer.0"].T
WEIGHTS["tied"] = WEIGHTS["layer.1"]
WEIGHTS["bias"] = RNG.standard_normal(7)
MESSAGE = {"round": 3, "weights": WEIGHTS, "metrics": {"loss": 0.5, "steps": [1, 2]}}


@pytest.fixture
def server(no_leaks):
    with weighlock.Server() as server:
        yield server


def assert_weights(found, expected=WEIGHTS):
    assert list(found) == list(expected)
    for name, array in expected.items():
        got = found[name]
        got = got.load() if isinstance(got, weighlock.TensorRef) else got
        assert got.dtype == array.dtype, name
        assert np.array_equal(got, array), name


def test_an_object_travels_as_a_few_bytes_and_its_tensors_when_asked(server):
    packed = server.pack(MESSAGE)
    assert len(packed.body) < 1000
    assert b"".join(packed.parts) == packed.body
    message = weighlock.unpack(packed.body, access=HERE)
    assert message["metrics"] == MESSAGE["metrics"]
    assert isinstance(message["weights"]["layer.0"], StoredRef)
    assert np.array_equal(message["weights"]["layer.2"][3:5], WEIGHTS["layer.2"][3:5])
    assert_weights(message["weights"])
    assert_weights(weighlock.resolve(message)["weights"])


def test_nothing_to_offer_is_known_to_the_sender(server):
    packed = server.pack({"bias": WEIGHTS["bias"]})
    assert packed.share is None
    assert np.array_equal(weighlock.unpack(packed.body)["bias"], WEIGHTS["bias"])
    assert server.pack(MESSAGE, threshold_bytes=None).share is None
    forwarded = weighlock.unpack(server.pack(MESSAGE).body)
    assert server.pack(forwarded).share is None


def test_a_misspelt_option_is_refused_even_if_nothing_is_offered(server):
    for obj in ({"round": 3}, MESSAGE):
        with pytest.raises(TypeError, match="'recievers'"):
            server.pack(obj, recievers=["site-1"])


def test_resolve_asks_each_owner_once_and_keeps_what_is_tied(server):
    message = weighlock.unpack(server.pack(MESSAGE).body, access=HERE)
    seen = []
    found = weighlock.resolve(message, progress=lambda done, total: seen.append((done, total)))
    assert found["weights"]["tied"] is found["weights"]["layer.1"]
    total = sum(WEIGHTS[name].nbytes for name in ("layer.0", "layer.1", "layer.2", "turned"))
    assert seen[-1] == (total, total)
    assert isinstance(message["weights"]["layer.0"], StoredRef)  # the object itself is as it was
    assert weighlock.resolve(found) is found


def test_resolve_to_torch(server):
    torch = pytest.importorskip("torch")
    obj = {"a": torch.randn(300, 300, dtype=torch.bfloat16), "b": torch.ones(3), "n": np.ones(2)}
    message = weighlock.unpack(server.pack(obj).body, access=HERE)
    found = weighlock.resolve(message, tensors="torch")
    assert torch.equal(found["a"], obj["a"])
    assert torch.equal(found["b"], obj["b"])
    assert isinstance(found["n"], np.ndarray)  # it was no ref


def test_resolve_to_a_directory(server, tmp_path):
    first = weighlock.unpack(server.pack(MESSAGE).body, access=HERE)
    second = weighlock.unpack(server.pack({"w": WEIGHTS["layer.0"] + 1}).body, access=HERE)
    part = {"part": [first["weights"]["layer.2"], first["weights"]["bias"]], "other": second}
    for obj, files in ((first, 1), (part, 2)):
        place = tmp_path / str(files)
        found = weighlock.resolve(obj, into=place)
        assert len(list(place.iterdir())) == files
        if obj is first:
            assert_weights(found["weights"])
        else:
            assert np.array_equal(found["part"][0].load(), WEIGHTS["layer.2"])
            assert np.array_equal(found["other"]["w"].load(), WEIGHTS["layer.0"] + 1)
        again = weighlock.resolve(obj, into=place)  # the same files, whole already
        assert len(list(place.iterdir())) == files
        del found, again


def test_catalogs_and_registered_objects_are_looked_into(server):
    @dataclasses.dataclass
    class Update:
        weights: object
        site: str

    registry = weighlock.Registry()
    registry.register_dataclass(Update, name="update")
    catalog = weighlock.Catalog(
        {name: weighlock.tensors.convert.as_ref(name, array) for name, array in WEIGHTS.items()},
        {"round": "3"},
    )
    packed = server.pack([Update(catalog, "a"), (Update(WEIGHTS, "b"), 1)], registry=registry)
    message = weighlock.unpack(packed.body, access=HERE, registry=registry)
    assert message[0].weights.metadata == {"round": "3"}
    found = weighlock.resolve(message, registry=registry)
    assert isinstance(found[0].weights, weighlock.Catalog)
    assert not isinstance(found[0].weights["layer.0"], StoredRef)
    assert_weights(found[0].weights)
    assert_weights(found[1][0].weights)
    assert found[0].site == "a"


class TestReceivers:
    def test_each_has_its_own_message_and_the_share_settles(self, server):
        packed = server.pack(MESSAGE, receivers=["site-1", "site-2"])
        with pytest.raises(LocalProtocolError, match="body_for"):
            _ = packed.body
        assert packed.body_for("site-1") != packed.body_for("site-2")
        for name in packed.receivers:
            message = weighlock.unpack(packed.body_for(name), access=HERE)
            assert_weights(weighlock.resolve(message)["weights"])
        outcome = packed.share.wait(timeout_s=20)
        assert outcome.reason == "settled"
        assert {r.state for r in outcome.receivers.values()} == {weighlock.State.LANDED}

    def test_who_reads_lazily_says_when_it_is_done(self, server):
        packed = server.pack(MESSAGE, receivers="site-1")
        message = weighlock.unpack(packed.body, access=HERE)
        assert message["weights"]["layer.0"][0, 0] == WEIGHTS["layer.0"][0, 0]
        weighlock.resolve(message["weights"]["layer.1"], confirm=False)
        assert packed.share.ended is None
        weighlock.done(message)
        assert packed.share.wait(timeout_s=20).reason == "settled"

    def test_also_for_refs_in_objects_of_registered_types(self, server):
        @dataclasses.dataclass
        class Update:
            weights: object

        registry = weighlock.Registry()
        registry.register_dataclass(Update, name="update")
        packed = server.pack({"u": [Update(WEIGHTS)]}, receivers="site-1", registry=registry)
        message = weighlock.unpack(packed.body, access=HERE, registry=registry)
        weighlock.done(message)  # does not know the type
        assert packed.share.ended is None
        weighlock.done(message, registry=registry)
        assert packed.share.wait(timeout_s=20).reason == "settled"

    def test_a_forwarded_ticket_is_good_twice_and_not_for_another(self, server):
        packed = server.pack(MESSAGE, receivers=["site-1"], expires_s=600)
        message = weighlock.unpack(packed.body, access=HERE)
        assert_weights(message["weights"])
        assert_weights(message["weights"])
        body = packed.body.replace(b"#r=site-1.", b"#r=site-2.")
        with pytest.raises(Refused):
            weighlock.resolve(weighlock.unpack(body, access=HERE))

    def test_a_ticket_of_a_share_that_is_over_says_so(self, server):
        packed = server.pack(MESSAGE)
        message = weighlock.unpack(packed.body, access=HERE)
        packed.share.revoke()
        with pytest.raises(ShareGone) as caught:
            message["weights"]["layer.0"].load()
        assert caught.value.reason == "revoked"
        with pytest.raises(ShareGone):
            weighlock.resolve(message)


class TestLies:
    def test_a_message_that_could_not_be_read_leaves_no_share(self, server):
        with pytest.raises(LimitExceeded):
            server.pack(MESSAGE, limits=weighlock.Limits(message_tree_bytes=100))
        assert "with 0 shares" in repr(server)

    def test_a_draft_sealed_with_another_share_is_noticed(self, server):
        draft = weighlock.pack(MESSAGE)
        share = server.share(draft.tensors, metadata={"more": "x" * 200})
        message = weighlock.unpack(draft.seal(share.url), access=HERE)
        with pytest.raises(SourceChanged):
            message["weights"]["layer.0"].load()

    def test_a_ref_that_is_not_what_the_share_says_is_noticed(self, server):
        share = server.share({"a": np.zeros((100, 100)), "b": np.zeros(10, np.float32)})
        draft = weighlock.pack(
            {"a": np.zeros((50, 200)), "b": np.zeros(10, np.float32)}, threshold_bytes=0
        )
        assert draft.file_bytes == share.size
        message = weighlock.unpack(draft.seal(share.url), access=HERE)
        with pytest.raises(MessageInvalid, match=r"F64 \[50, 200\] .* has F64 \[100, 100\]"):
            weighlock.resolve(message)

    def test_what_changed_meanwhile_is_noticed(self, server):
        array = np.zeros(50_000)
        message = weighlock.unpack(server.pack({"a": array}).body, access=HERE)
        array[7] = 1
        with pytest.raises(SourceChanged):
            message["a"].load()

    def test_a_redirect_is_not_followed(self, server):
        url = server.pack(MESSAGE).share.url
        with redirecting(to=url) as elsewhere:
            body = weighlock.pack(MESSAGE).seal(elsewhere)
            message = weighlock.unpack(body, access=HERE)
            with pytest.raises(RemoteProtocolError, match="302"):
                message["weights"]["layer.0"].load()
            with pytest.raises(RemoteProtocolError, match="302"):
                weighlock.resolve(message, confirm=False)

    def test_a_pickled_ref_may_dial_nobody(self, server):
        message = weighlock.unpack(server.pack(MESSAGE).body, access=HERE)
        ref = pickle.loads(pickle.dumps(message["weights"]["layer.0"]))
        with pytest.raises(Refused):
            ref.load()
        assert np.array_equal(weighlock.resolve(ref, access=HERE), WEIGHTS["layer.0"])

    def test_resolve_can_be_aborted_and_bounded(self, server):
        message = weighlock.unpack(server.pack(MESSAGE).body, access=HERE)
        abort = weighlock.Abort()
        abort.set("enough")
        with pytest.raises(Aborted, match="enough"):
            weighlock.resolve(message, abort=abort)
        with pytest.raises(LimitExceeded):
            weighlock.resolve(message, limits=weighlock.Limits(memory_bytes=1_000_000))


@contextlib.contextmanager
def redirecting(to):
    """A server that sends everybody elsewhere."""

    class Elsewhere(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(302)
            self.send_header("Location", to)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{httpd.server_port}/s/0/model.safetensors"
        finally:
            httpd.shutdown()
            thread.join()


OWNER = """
import sys
import numpy as np
import weighlock
with weighlock.Server() as server:
    seed = int(sys.argv[1])
    weights = {f"w{n}": np.random.default_rng(seed + n).random(30_000) for n in range(3)}
    packed = server.pack({"from": seed, "weights": weights, "tag": np.array([seed])})
    print(packed.body.hex(), flush=True)
    sys.stdin.read()
"""

FORWARDER = """
import sys
sockets = []
sys.addaudithook(lambda event, _: sockets.append(event) if event.startswith("socket.") else None)
import weighlock
bodies = [bytes.fromhex(line) for line in sys.argv[1:]]
for body in bodies:
    assert weighlock.pack(weighlock.unpack(body)).seal() == body
mixed = weighlock.pack([weighlock.unpack(body) for body in bodies]).seal()
assert sockets == [], sockets
print(mixed.hex())
with weighlock.Server() as server:
    first, second = weighlock.unpack(mixed, access=weighlock.Access(allow=["127.0.0.1"]))
    first["weights"]["w0"] = first["weights"]["w0"].load()     # fetched: now its own to offer
    del first["weights"]["w1"]
    second["weights"]["w2"] = second["weights"]["w2"].load() * 2
    packed = server.pack([first, second, {"mine": second["weights"]["w2"]}])
    assert sorted(packed.share.contents.file.segments[n].ref.name for n in range(2)) == ["w0", "w2"]
    print(packed.body.hex(), flush=True)
    sys.stdin.read()
"""

WORKER = """
import json, os, sys
import weighlock
message = weighlock.unpack(bytes.fromhex(sys.argv[1]), access=weighlock.Access(allow=["127.0.0.1"]))
found = weighlock.resolve(message)
print(json.dumps([
    [part["from"], int(part["tag"][0]), {n: float(a.sum()) for n, a in part["weights"].items()}]
    for part in found[:2]
]))
if len(found) > 2:
    assert found[2]["mine"] is found[1]["weights"]["w2"]
"""


@contextlib.contextmanager
def program(script, *arguments):
    process = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.stdin.close()
        assert process.wait(timeout=60) == 0
        process.stdout.close()


def test_a_chain_of_processes_with_mixed_owners(run_python):
    """D10: some refs pass untouched, some are fetched in the middle, some replaced, some added."""
    import json

    def total(seed, number):
        return float(np.random.default_rng(seed + number).random(30_000).sum())

    with program(OWNER, 10) as one, program(OWNER, 20) as other:
        bodies = [process.stdout.readline().strip() for process in (one, other)]
        with program(FORWARDER, *bodies) as middle:
            mixed, changed = (middle.stdout.readline().strip() for _ in range(2))
            for url in (bytes.fromhex(body) for body in bodies):
                ticket = url[url.index(b"http://") : url.index(b"model.safetensors")]
                assert ticket in bytes.fromhex(mixed)
            untouched = json.loads(run_python(WORKER, mixed).stdout)
            edited = json.loads(run_python(WORKER, changed).stdout)
    whole = [[seed, seed, {f"w{n}": total(seed, n) for n in range(3)}] for seed in (10, 20)]
    assert untouched == whole
    del whole[0][2]["w1"]
    assert edited[0] == whole[0]
    assert edited[1][2]["w0"] == whole[1][2]["w0"]
    assert edited[1][2]["w2"] == pytest.approx(2 * total(20, 2))


MANY = """
import os, sys
import weighlock
refs = weighlock.unpack(sys.stdin.buffer.read(), access=weighlock.Access(allow=["127.0.0.1"]))
before, most = len(os.listdir("/proc/self/fd")), 0
for number, ref in enumerate(refs):
    assert ref[0] == number
    most = max(most, len(os.listdir("/proc/self/fd")) - before)
print(most)
"""


def test_many_shares_in_one_message_cost_few_descriptors(server):
    """D9: a message may name thousands of owners; each ref read by itself keeps few connections."""
    count = 60
    drafts = [weighlock.pack([np.array([n])], threshold_bytes=0) for n in range(count)]
    shares = [server.share(draft.tensors) for draft in drafts]
    refs = [
        weighlock.unpack(draft.seal(share.url))[0]
        for draft, share in zip(drafts, shares, strict=True)
    ]
    body = weighlock.pack(refs).seal()
    assert len(body) / count <= 120
    result = subprocess.run(
        [sys.executable, "-c", MANY], input=body, capture_output=True, check=True, timeout=120
    )
    assert int(result.stdout) <= 3


def test_the_example_runs():
    example = Path(__file__).parent.parent.parent / "examples" / "relay.py"
    result = subprocess.run(
        [sys.executable, example, "24"], capture_output=True, text=True, timeout=120, check=True
    )
    said = dict(
        line.split(": ", 1) for line in result.stdout.splitlines() if "worker: round" not in line
    )
    assert said["server"] == "worker has landed"
    assert said["worker"].startswith("24 MB here")
    assert "round 3, by the relay, mask of 1,000,000" in result.stdout
    assert "peak memory" in said["relay"]
    assert os.path.exists(example)


@pytest.mark.filterwarnings("ignore:.*lies on.*:RuntimeWarning")
def test_resolve_to_a_spool(server, tmp_path):
    with weighlock.Spool(tmp_path) as spool:
        message = weighlock.unpack(server.pack(MESSAGE).body, access=HERE)
        found = weighlock.resolve(message, into=spool)
        assert spool.used_bytes > 4 * WEIGHTS["layer.0"].nbytes - 1
        assert_weights(found["weights"])
        part = weighlock.resolve([message["weights"]["layer.2"]], into=spool)
        assert np.array_equal(part[0].load(), WEIGHTS["layer.2"])
        del found, part
        assert spool.used_bytes == 0


def test_who_may_be_dialled_can_be_told_when_it_is_done(server):
    packed = server.pack({"w": np.zeros(100_000)}, receivers=["a"])
    message = weighlock.unpack(packed.body)
    with pytest.raises(Refused, match="is not allowed"):
        weighlock.done(message)
    weighlock.done(message, access=weighlock.Access(allow="127.0.0.1"))
    assert packed.share.wait(30).landed == ("a",)
