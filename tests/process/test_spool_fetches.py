"""Fetching into a spool: whole, in part, by rounds, in shards; quota, aborts, and sharing again."""

import gc
import os
import pickle
import threading

import numpy as np
import pytest

import weighlock
from process.plain_server import PlainServer
from weighlock.errors import Aborted, FormatError, NoSpace, SpoolClosed
from weighlock.tensors.spec import Span
from weighlock.transfer.pieces import FilePart

WEIGHTS = {"w": np.arange(700_000, dtype=np.float32), "b": np.ones(3, np.int8)}
MB = 1 << 20


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


@pytest.fixture
def server(no_leaks):
    with weighlock.Server() as server:
        yield server


@pytest.fixture
def spool(root):
    with weighlock.Spool(root) as spool:
        yield spool
    assert os.listdir(root) == []


def assert_same(found, expected=WEIGHTS):
    assert set(found) == set(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name].load(), array)


def test_fetching_into_a_spool(server, spool):
    url = server.share(WEIGHTS, metadata={"round": "3"}).url
    told = []
    found = weighlock.fetch(url, into=spool, progress=lambda *numbers: told.append(numbers))
    assert_same(found)
    assert found.metadata["round"] == "3"
    assert told[-1] == (spool.used_bytes, spool.used_bytes)
    part = weighlock.fetch(url, into=spool, names="b")
    assert_same(part, {"b": WEIGHTS["b"]})
    changed = {**WEIGHTS, "b": WEIGHTS["b"] + 1}
    moved = []
    with server.share(changed) as again:
        new = weighlock.fetch(
            again.url, into=spool, base=found, progress=lambda *numbers: moved.append(numbers)
        )
        assert_same(new, changed)
    found.close(), part.close(), new.close()
    assert spool.used_bytes == 0


def test_a_spool_given_away_lives_as_long_as_the_refs(server, root):
    url = server.share(WEIGHTS).url
    ref = weighlock.fetch(url, into=weighlock.Spool(root))["w"]
    gc.collect()
    np.testing.assert_array_equal(ref.load(), WEIGHTS["w"])
    del ref
    assert os.listdir(root) == []


def test_what_landed_in_a_spool_is_shared_again_by_the_kernel(server, spool):
    catalog = weighlock.fetch(server.share(WEIGHTS).url, into=spool)
    again = server.share(catalog)
    parts = [piece for piece in again.pieces(Span(0, again.size)) if isinstance(piece, FilePart)]
    assert sum(part.length for part in parts) >= WEIGHTS["w"].nbytes
    del catalog, parts
    gc.collect()
    assert_same(weighlock.fetch(again.url))  # the share holds the lease
    spool.close()
    with pytest.raises(weighlock.WeighlockError):
        weighlock.fetch(again.url, limits=weighlock.Limits(patience_s=0.2))


def test_a_quota_ends_a_fetch_before_its_first_byte(server, root):
    share = server.share(WEIGHTS)
    with weighlock.Spool(root, quota_bytes=MB) as spool:
        for names in (None, "w"):
            told = []
            with pytest.raises(NoSpace, match="of its quota of 1,048,576 are free"):
                weighlock.fetch(share.url, into=spool, names=names, progress=told.append)
            assert told == []
        assert (spool.used_bytes, os.listdir(spool.path)) == (0, ["owner"])
    assert os.listdir(root) == []


@pytest.mark.parametrize("how", ["abort", "close", "abort of the fetch"])
def test_a_fetch_under_way_ends_with_the_spool(server, root, how):
    spool, begun, abort = weighlock.Spool(root), threading.Event(), weighlock.Abort()
    errors = []

    def fetch():
        try:
            weighlock.fetch(
                server.share(WEIGHTS).url,
                into=spool,
                abort=abort,
                limit_rate=10_000,
                progress=lambda *_: begun.set(),
            )
        except weighlock.WeighlockError as error:
            errors.append(error)

    thread = threading.Thread(target=fetch)
    thread.start()
    assert begun.wait(20)
    assert len(os.listdir(spool.path)) == 2
    {"abort": spool.abort, "close": spool.close, "abort of the fetch": abort.set}[how]()
    thread.join(20)
    assert not thread.is_alive()
    assert [type(error) for error in errors] == [SpoolClosed if how == "close" else Aborted]
    assert abort.is_set == (how == "abort of the fetch")
    if how != "close":
        assert (spool.used_bytes, os.listdir(spool.path)) == (0, ["owner"])
    spool.close()
    assert os.listdir(root) == []


@pytest.fixture
def sharded(tmp_path):
    """A model in several files behind a plain server: its tensors, the server, its URL."""
    tensors = {f"t.{n:03}": np.full(300, n, np.float32) for n in range(70)}
    weighlock.save(tmp_path / "shards", tensors, max_shard_bytes=1300, durable=False)
    files = {f"/m/{path.name}": path.read_bytes() for path in (tmp_path / "shards").iterdir()}
    with PlainServer(files) as server:
        yield tensors, server, server.url("/m/model.safetensors.index.json")


def test_a_model_in_several_files_lands_in_a_spool(sharded, spool, no_leaks):
    tensors, _, url = sharded
    catalog = weighlock.fetch(url, into=spool)
    assert len(os.listdir(spool.path)) == 71
    assert any("unverified" in note for note in catalog.notes)
    assert_same(catalog, tensors)
    again = pickle.loads(pickle.dumps(catalog))
    assert_same(again, tensors)
    again.close()
    assert_same(catalog, tensors)
    ref = catalog["t.003"]
    del catalog, again
    gc.collect()
    assert len(os.listdir(spool.path)) == 2  # one ref, one file
    assert ref.load()[0] == 3
    del ref
    gc.collect()
    assert spool.used_bytes == 0
    with weighlock.fetch(url, into=spool, names="t.00*") as part:
        assert_same(part, {name: tensors[name] for name in part})
        assert len(part) == 10
    catalog = weighlock.fetch(url, into=spool)
    catalog["t.001"].load()
    catalog.close()  # the files that were never opened go as well
    assert (spool.used_bytes, os.listdir(spool.path)) == (0, ["owner"])


def test_a_model_in_several_files_is_kept_as_a_directory(sharded, spool, tmp_path, no_leaks):
    tensors, _, url = sharded
    catalog = weighlock.fetch(url, into=spool)
    ref, late = catalog["t.003"], catalog["t.069"]  # the last is opened for each read
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").write_text("")
    with pytest.raises(weighlock.WeighlockError):
        catalog.keep(tmp_path / "full")
    assert_same(catalog, tensors)
    with catalog.keep(tmp_path / "kept") as kept:
        assert (spool.used_bytes, os.listdir(spool.path)) == (0, ["owner"])
        spool.close()
        assert_same(kept, tensors)
        assert (ref.load()[0], late.load()[0]) == (3, 69)
        assert_same(catalog, tensors)
        assert set(os.listdir(tmp_path / "kept")) == set(os.listdir(tmp_path / "shards"))
    catalog.close()
    assert len(os.listdir(tmp_path / "kept")) == 71


def test_a_broken_shard_leaves_nothing(sharded, spool, no_leaks):
    _, server, url = sharded
    name = max(server.files)
    name = sorted(name for name in server.files if name.endswith(".safetensors"))[-1]
    server.files[name] = b"x" * 5000
    with pytest.raises(FormatError):
        weighlock.fetch(url, into=spool)
    assert (spool.used_bytes, os.listdir(spool.path)) == (0, ["owner"])


def test_many_shards_need_few_descriptors(sharded, root, run_python):
    _, _, url = sharded
    script = """
import resource, sys
import weighlock
resource.setrlimit(resource.RLIMIT_NOFILE, (52, 52))
with weighlock.Spool(sys.argv[2]) as spool:
    with weighlock.fetch(sys.argv[1], into=spool) as catalog:
        assert sum(ref.load()[0] for ref in catalog.values()) == sum(range(70))
        catalog.keep(sys.argv[2] + "/kept", durable=False).close()
"""
    run_python(script, url, root)
    assert os.listdir(root) == ["kept"]
