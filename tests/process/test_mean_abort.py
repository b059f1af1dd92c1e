"""Stop is heard while a contributor says nothing, and while one is being unpacked."""

import threading

import numpy as np
import pytest

import weighlock
from process.chaos import Rules
from process.chaos_fixtures import chaos, server  # noqa: F401
from process.chaos_peers import InThread
from waiting import settled, until
from weighlock.errors import Aborted
from weighlock.tensors.ref import ArrayRef
from weighlock.tensors.spec import TensorSpec

SOON_S = 10
"""A third of the time for which a server that says nothing is waited for."""

ARRAY = np.zeros((3000, 1000), np.float32)


def no_readers():
    return not any(t.name.startswith("weighlock-ahead") for t in threading.enumerate())


def added(directory, catalog, abort):
    weighlock.Mean(directory, durable=False, abort=abort).add(catalog)


CALLS = {
    "mean": lambda given, directory, abort: weighlock.mean(
        [given, given], out=directory / "out", abort=abort
    ),
    "median": lambda given, directory, abort: weighlock.median([given, given], abort=abort),
    "Mean.add": lambda given, directory, abort: added(directory, given, abort),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_server_that_says_nothing_does_not_keep_whoever_says_stop(
    call,
    server,  # noqa: F811
    chaos,  # noqa: F811
    tmp_path,
):
    url = server.share({"w": ARRAY}).url
    proxy = chaos.proxy(url, down=Rules(hang=3_000_000))
    abort = weighlock.Abort()
    under_way = InThread(CALLS[call], proxy.of(url), tmp_path, abort)
    until(settled(lambda: proxy.down_bytes // 3_000_000))
    abort.set("enough")
    with pytest.raises(Aborted, match=r"^aborted: enough$"):
        under_way.end(SOON_S)
    until(no_readers)
    assert [path for path in tmp_path.iterdir() if path.is_file()] == []


def test_nor_does_one_that_says_nothing_when_it_is_opened(server, chaos, tmp_path):  # noqa: F811
    url = server.share({"w": ARRAY}).url
    proxy = chaos.proxy(url, down=Rules(hang=10))
    for call in CALLS.values():
        abort = weighlock.Abort()
        before = proxy.down_bytes
        under_way = InThread(call, proxy.of(url), tmp_path, abort)
        until(lambda before=before: proxy.down_bytes > before)
        abort.set()
        with pytest.raises(Aborted):
            under_way.end(SOON_S)


def test_nor_does_what_was_opened_before(server, chaos):  # noqa: F811
    """It does not hear of the stop; the mean does not wait for it."""
    url = server.share({"w": ARRAY}).url
    proxy = chaos.proxy(url, down=Rules(hang=3_000_000))
    abort = weighlock.Abort()
    with weighlock.open(proxy.of(url)) as opened:
        under_way = InThread(weighlock.mean, [opened, opened], abort=abort)
        until(settled(lambda: proxy.down_bytes // 3_000_000))
        abort.set()
        with pytest.raises(Aborted):
            under_way.end(SOON_S)
        proxy.release()
        until(no_readers)


def test_an_owner_that_waits_is_told_of_the_stop(server, chaos, tmp_path):  # noqa: F811
    share = server.share({"w": ARRAY}, receivers=("site",))
    url = share.url_for("site")
    proxy = chaos.proxy(url, down=Rules(hang=3_000_000))
    abort = weighlock.Abort()
    under_way = InThread(added, tmp_path, proxy.of(url), abort)
    until(settled(lambda: proxy.down_bytes // 3_000_000))
    abort.set()
    with pytest.raises(Aborted):
        under_way.end(SOON_S)
    assert share.wait(timeout_s=SOON_S)["site"] == "aborted"


@pytest.mark.parametrize("call", CALLS)
def test_rows_that_are_gathered_are_left_midway(call, tmp_path):
    abort, given = weighlock.Abort(), []

    class Gathered(ArrayRef):
        """One that lies nowhere in order, and takes long: stop is said after its first piece."""

        def memory(self):
            return None

        def pieces(self, max_bytes=1000):
            for piece in super().pieces(max_bytes):
                given.append(len(piece))
                yield piece
                abort.set()

    catalog = weighlock.Catalog({"w": Gathered(TensorSpec("w", "F32", ARRAY.shape), ARRAY)})
    with pytest.raises(Aborted):
        CALLS[call](catalog, tmp_path, abort)
    assert len(given) <= 2
