"""Several that write to one name: each gets what it asked for, or an error, and never another's.

That another process is later by an instant is brought about where this one renames: the system call
is the real one, and the other's file is in its place when it returns.
"""

import os
import shutil
import threading

import numpy as np
import pytest

import weighlock
from process.plain_server import PlainServer
from weighlock.errors import SourceChanged

pytestmark = pytest.mark.usefixtures("no_leaks")

OURS = {"a": np.full(300_000, 1.0), "b": np.full(10, 3.0)}
THEIRS = {"a": np.full(300_000, 2.0), "b": np.full(10, 4.0)}


@pytest.fixture
def overtaken(monkeypatch):
    """Has a file put under a name right after this process has put its own there."""
    real = os.rename

    def overtake(name, other):
        def rename(old, new, **directories):
            real(old, new, **directories)
            if new == name:
                # As another process does: under a name of its own, then in one step.
                place = f"/proc/self/fd/{directories['dst_dir_fd']}"
                shutil.copy(other, f"{place}/.theirs")
                real(f"{place}/.theirs", f"{place}/{name}")

        monkeypatch.setattr(os, "rename", rename)

    return overtake


@pytest.fixture
def server():
    with weighlock.Server() as server:
        yield server


@pytest.fixture
def theirs(tmp_path):
    weighlock.save(tmp_path / "theirs.safetensors", THEIRS)
    return tmp_path / "theirs.safetensors"


@pytest.mark.parametrize("names", [None, "a"])
def test_a_fetch_never_gives_what_another_put_under_its_name(
    server, tmp_path, overtaken, theirs, names
):
    share = server.share(OURS)
    overtaken("m.safetensors", theirs)
    with pytest.raises(SourceChanged, match="another process or thread"):
        weighlock.fetch(share.url, into=tmp_path / "m.safetensors", names=names)
    with weighlock.open(tmp_path / "m.safetensors") as left:
        assert left["a"][0] == 2.0, "the other's file stays"


@pytest.mark.parametrize("names", [None, "a"])
def test_what_another_put_there_is_as_good_if_it_is_the_same(server, tmp_path, overtaken, names):
    share = server.share(OURS)
    weighlock.fetch(share.url, into=tmp_path / "same.safetensors", names=names).close()
    overtaken("m.safetensors", tmp_path / "same.safetensors")
    with weighlock.fetch(share.url, into=tmp_path / "m.safetensors", names=names) as catalog:
        assert np.array_equal(catalog["a"].load(), OURS["a"])


def test_threads_that_fetch_two_shares_to_one_name(server, tmp_path):
    shares = [server.share(OURS), server.share(THEIRS)]
    wrong, changed = [], []

    def fetch(number):
        for _ in range(10):
            try:
                catalog = weighlock.fetch(
                    shares[number % 2].url, into=tmp_path / "m", durable=False
                )
                with catalog:
                    value = catalog["a"][0]
            except SourceChanged as error:
                changed.append(error)
                continue
            if value != 1 + number % 2:
                wrong.append(value)

    threads = [threading.Thread(target=fetch, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(changed) < 60, "some came through"


def test_a_shard_is_never_one_that_another_put_under_its_name(server, tmp_path, overtaken):
    for name, tensors in (("ours", OURS), ("theirs", THEIRS)):
        weighlock.save(tmp_path / name, tensors, max_shard_bytes=2_000_000)
    shard = sorted(path.name for path in (tmp_path / "ours").glob("*.safetensors"))[0]
    index = "model.safetensors.index.json"
    files = {f"/m/{path.name}": path.read_bytes() for path in (tmp_path / "ours").iterdir()}
    with PlainServer(files) as plain:
        catalog = weighlock.fetch(plain.url(f"/m/{index}"), into=tmp_path / "first")
        with catalog:
            os.replace(tmp_path / "theirs" / shard, tmp_path / "first" / shard)
            with pytest.raises(SourceChanged):
                catalog["a"].load()
        overtaken(shard, tmp_path / "first" / shard)
        with pytest.raises(SourceChanged, match="another process or thread"):
            weighlock.fetch(plain.url(f"/m/{index}"), into=tmp_path / "second")
    assert not (tmp_path / "second" / index).exists()
    shutil.rmtree(tmp_path / "second")  # with what is kept for the next attempt


@pytest.mark.parametrize("is_at_once", [True, False])
def test_an_inbox_never_gives_what_another_put_under_a_name(
    server, tmp_path, overtaken, theirs, is_at_once
):
    inbox = server.inbox(("n",), into=tmp_path / "in")
    if is_at_once:
        overtaken("n.safetensors", theirs)
    weighlock.push(inbox.url_for("n"), OURS)
    if not is_at_once:
        os.replace(theirs, tmp_path / "in" / "n.safetensors")
    with pytest.raises(SourceChanged, match="another process or thread"):
        next(iter(inbox))


def test_what_landed_in_an_inbox_may_be_linked_before_it_is_looked_at(server, tmp_path):
    inbox = server.inbox(("n",), into=tmp_path / "in")
    weighlock.push(inbox.url_for("n"), OURS)
    os.link(tmp_path / "in" / "n.safetensors", tmp_path / "archived")
    (tmp_path / "archived").chmod(0o444)
    name, catalog = next(iter(inbox))
    with catalog:
        assert name == "n"
        assert np.array_equal(catalog["a"].load(), OURS["a"])
