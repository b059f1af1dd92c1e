"""Resolving to one directory again and again: what an earlier call returned stays good."""

import itertools
import threading

import numpy as np
import pytest

import weighlock
from weighlock import Access

pytestmark = pytest.mark.usefixtures("no_leaks")

HERE = Access(allow=["127.0.0.1"])
RNG = np.random.default_rng(7)
WEIGHTS = {name: RNG.standard_normal(300_000) for name in "abc"}
PARTS = [("a",), ("b",), ("a", "c"), ("a", "b", "c")]


@pytest.fixture
def server():
    with weighlock.Server() as server:
        yield server


@pytest.fixture
def message(server):
    return weighlock.unpack(server.pack(WEIGHTS).body, access=HERE)


def assert_good(found):
    for name, ref in found.items():
        assert np.array_equal(ref.load(), WEIGHTS[name]), name


def test_other_tensors_of_a_message_replace_nothing(message, tmp_path):
    found = [
        weighlock.resolve({name: message[name] for name in names}, into=tmp_path) for names in PARTS
    ]
    for one in found:
        assert_good(one)
    assert len(list(tmp_path.iterdir())) == len(PARTS)


@pytest.mark.parametrize("names", PARTS)
def test_the_same_again_is_the_same_file(server, message, tmp_path, names):
    wanted = {name: message[name] for name in names}
    first = weighlock.resolve(wanted, into=tmp_path)
    (path,) = tmp_path.iterdir()
    before = path.stat()
    seen = []
    second = weighlock.resolve(wanted, into=tmp_path, progress=lambda *told: seen.append(told))
    assert seen[-1] == (sum(ref.nbytes for ref in wanted.values()),) * 2
    assert list(tmp_path.iterdir()) == [path]
    assert path.stat().st_ino == before.st_ino
    assert_good(first)
    assert_good(second)


def test_what_is_there_already_is_not_pulled_again(server, tmp_path):
    packed = server.pack(WEIGHTS)
    message = weighlock.unpack(packed.body, access=HERE)
    first = weighlock.resolve(message, into=tmp_path)
    sent = packed.share.sent_bytes
    second = weighlock.resolve(message, into=tmp_path)
    assert packed.share.sent_bytes - sent < 3 << 20, "of 7 blocks those with the header"
    assert_good(first)
    assert_good(second)


@pytest.mark.parametrize("names", [("a", "c"), ("a", "b", "c")])
@pytest.mark.parametrize("at", [0, 20, 300_000, -1])
def test_a_file_that_is_another_one_is_replaced(message, tmp_path, names, at):
    wanted = {name: message[name] for name in names}
    weighlock.resolve(wanted, into=tmp_path)
    (path,) = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    assert_good(weighlock.resolve(wanted, into=tmp_path))


@pytest.mark.parametrize("names", [("a", "c"), ("a", "b", "c")])
def test_threads_that_resolve_the_same_at_once_all_have_it(message, tmp_path, names):
    wanted = {name: message[name] for name in names}
    found, together = [], threading.Barrier(4)

    def resolve():
        together.wait()
        found.append(weighlock.resolve(wanted, into=tmp_path))

    threads = [threading.Thread(target=resolve) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for one in itertools.chain(found, found):
        assert_good(one)
    assert len(list(tmp_path.iterdir())) == 1
