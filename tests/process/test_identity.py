"""Ids and ETags of shares: the same for content that is the same, never for another."""

import io
import os
import pickle

import numpy as np
import pytest

import weighlock
from process.plain_server import PlainServer, Reply, ranged
from weighlock.sharing.identity import files_at, stable_id

KEY = bytes(32)
ID = "0" * 32


def id_of(path):
    before = files_at(str(path))
    with weighlock.open(path) as catalog:
        return stable_id(KEY, str(path), catalog.readable(), before)


def pickled(path, fill):
    path.write_bytes(pickle.dumps({"w": np.full((4, 4), fill, np.float32)}))
    os.utime(path, (fill, fill))  # clocks of file systems have steps of milliseconds


def replaced(path):
    """The same bytes, written anew."""
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)
    os.utime(path, (1, 1))


def test_a_plain_pickle_that_was_rewritten_has_another_id(tmp_path):
    path = tmp_path / "model.pkl"
    pickled(path, 1)
    first = id_of(path)
    assert id_of(path) == first
    pickled(path, 2)
    assert id_of(path) != first


def test_a_plain_pickle_that_was_rewritten_while_it_was_opened_has_an_id_of_its_own(tmp_path):
    path = tmp_path / "model.pkl"
    pickled(path, 1)
    first = id_of(path)
    before = files_at(str(path))
    pickled(path, 2)
    with weighlock.open(path) as catalog:
        between = stable_id(KEY, str(path), catalog, before)
    assert len({first, between, id_of(path)}) == 3


def test_a_checkpoint_in_the_bytes_of_another_decides_its_id(tmp_path):
    torch = pytest.importorskip("torch")
    ids = []
    for fill in (1.0, 2.0):
        inner = io.BytesIO()
        torch.save({"w": torch.full((3,), fill)}, inner)
        torch.save({"inner": inner.getvalue()}, tmp_path / "model.pt")
        os.utime(tmp_path / "model.pt", (fill, fill))
        ids.append(id_of(tmp_path / "model.pt"))
        assert id_of(tmp_path / "model.pt") == ids[-1]
    assert ids[0] != ids[1]


def test_files_that_hold_no_tensor_but_say_where_they_lie_decide_the_id(tmp_path):
    torch = pytest.importorskip("torch")
    from interop.make_dcp import grid, write_dcp
    from interop.make_deepspeed import write_zero

    weighlock.save(tmp_path / "sharded", {"a": np.ones(99), "b": np.ones(99)}, max_shard_bytes=800)
    write_dcp(tmp_path / "dcp", {"w": (torch.ones(4, 4), grid((4, 4), [2], []))})
    zero = write_zero(tmp_path / "zero", 2, 2)
    for path, deciding in (
        (tmp_path / "sharded", "model.safetensors.index.json"),
        (tmp_path / "dcp", ".metadata"),
        (tmp_path / "zero", f"{zero.name}/mp_rank_00_model_states.pt"),
    ):
        first = id_of(path)
        (path / "training.log").write_text("step 6")
        assert id_of(path) == first
        replaced(path / deciding)
        assert id_of(path) != first


def test_what_lies_behind_a_url_has_a_stable_id_only_if_its_server_tells_versions(tmp_path):
    weighlock.save(tmp_path / "model.safetensors", {"w": np.ones(5)})
    pickled(tmp_path / "model.pkl", 1)
    files = {f"/{name}": (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    etag = '"one"'

    def behave(request, content):
        return ranged(request, content, etag) if content is not None else Reply(404)

    with PlainServer(files, behave) as server:
        model, plain = server.url("/model.safetensors"), server.url("/model.pkl")
        first = id_of(model)
        assert id_of(model) == first
        assert id_of(plain) != id_of(plain)  # which is held in memory, and came from anywhere
        etag = '"two"'
        assert id_of(model) != first
        etag = None
        assert id_of(model) != id_of(model)


def etag_of(tensors):
    with weighlock.Server() as server:
        return server.share(tensors, share_id=ID).etag


def test_an_id_that_is_used_again_for_something_else_has_another_etag(tmp_path):
    path = tmp_path / "model.pkl"
    pickled(path, 1)
    with weighlock.open(path) as catalog:
        plain = etag_of(catalog)
        assert etag_of(catalog) == plain
    pickled(path, 2)
    with weighlock.open(path) as catalog:
        assert etag_of(catalog) != plain
    assert etag_of({"w": np.ones(5)}) == etag_of({"w": np.ones(5)})
    assert etag_of({"w": np.ones(5)}) != etag_of({"w": np.zeros(5)})
    path = tmp_path / "model.safetensors"
    weighlock.save(path, {"w": np.ones(5)})
    with weighlock.open(path) as catalog:
        stored = etag_of(catalog)
        assert etag_of(catalog) == stored
    weighlock.save(path, {"w": np.zeros(5)})
    os.utime(path, (1, 1))
    with weighlock.open(path) as catalog:
        assert etag_of(catalog) != stored
