"""One digest for every block, whoever asks first."""

import threading
from contextlib import contextmanager

import numpy as np
import pytest
from blake3 import blake3
from transfer_samples import whole

import weighlock
from weighlock.errors import SourceChanged
from weighlock.sources.grid import BLOCK_BYTES, DIGEST_BYTES
from weighlock.transfer.contents import Contents
from weighlock.transfer.digests import Digests, hash_block, in_two_threads
from weighlock.transfer.layout import lay_out


@pytest.fixture(scope="module")
def arrays():
    random = np.random.default_rng(0)
    return {
        "a": random.integers(0, 256, BLOCK_BYTES // 2, np.uint8),
        "b": random.integers(0, 256, 2 * BLOCK_BYTES, np.uint8),
        "c": random.integers(0, 256, (100, 200), np.uint8).T,
    }


@pytest.fixture
def contents(arrays):
    contents = Contents(lay_out(arrays))
    yield contents
    contents.close()


def expected(content):
    blocks = range(0, len(content), BLOCK_BYTES)
    return b"".join(blake3(content[n : n + BLOCK_BYTES]).digest() for n in blocks)


def test_a_page_is_the_digests_of_its_blocks_one_after_another(contents):
    digests = Digests(contents)
    assert digests.pages == 1
    assert digests.page(0) == expected(whole(contents))


def test_files_are_hashed_as_memory_is(arrays, contents, tmp_path):
    weighlock.save(tmp_path / "a", arrays, durable=False)
    with weighlock.open(tmp_path / "a") as catalog:
        stored = Contents(lay_out(catalog))
        assert Digests(stored).page(0) == expected(whole(stored))


def test_one_block_by_itself(contents):
    buffer = memoryview(bytearray(BLOCK_BYTES))
    content = whole(contents)
    for block in range(3):
        span = content[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
        assert hash_block(contents, block, buffer) == blake3(span).digest()


def test_hashing_everything_makes_every_page_ready(contents):
    digests = Digests(contents)
    digests.hash_all()
    assert digests.page(0, wait_s=0) == expected(whole(contents))


def test_many_who_ask_at_once_get_the_same(contents):
    digests, found = Digests(contents), []
    threads = [
        threading.Thread(target=lambda: found.append(digests.page(0, wait_s=10))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {expected(whole(contents))}
    assert len(found) == 8


def test_who_will_not_wait_is_told_so(contents):
    digests = Digests(contents)
    digests._hashing.acquire()
    assert digests.page(0, wait_s=0.001) is None
    digests._hashing.release()
    assert digests.page(0) is not None


def test_what_took_too_long_is_gone_on_with_by_who_asks_next(contents):
    digests, hashed = Digests(contents), []
    while (page := digests.page(0, wait_s=0)) is None:
        hashed.append(digests.hashed_blocks)
    assert hashed == sorted(set(hashed))  # more each time
    assert len(hashed) >= 1
    assert digests.hashed_blocks == digests.blocks == 3
    assert page == expected(whole(contents))


def test_room_is_held_only_by_who_hashes(contents):
    digests, held = Digests(contents), []

    @contextmanager
    def room():
        held.append(digests.hashed_blocks)
        yield

    with digests._hashing:
        assert digests.page(0, 0.001, room) is None
    assert held == []
    assert digests.page(0, -1, room) == digests.page(0, -1, room)
    assert held == [0]


def test_written_memory_is_found_by_looking_again(arrays):
    arrays = {"a": arrays["b"].copy()}
    contents = Contents(lay_out(arrays))
    digests = Digests(contents)
    assert digests.still_matches(1)  # nobody was told of any digest yet
    digests.hash_all()
    assert all(digests.still_matches(block) for block in range(3))
    arrays["a"][BLOCK_BYTES] ^= 1
    assert [digests.still_matches(block) for block in range(3)] == [True, False, True]


def test_a_page_that_failed_can_be_asked_for_again(arrays, tmp_path):
    path = tmp_path / "a"
    weighlock.save(path, {"a": arrays["b"]}, durable=False)
    content = path.read_bytes()
    with weighlock.open(path) as catalog:
        digests = Digests(Contents(lay_out(catalog)))
        with open(path, "ab") as file:
            file.write(b"more")
        for _ in range(2):
            with pytest.raises(SourceChanged):
                digests.page(0)
    assert len(content) > BLOCK_BYTES


def test_an_empty_file_still_has_a_header_to_hash():
    digests = Digests(Contents(lay_out({})))
    assert len(digests.page(0)) == DIGEST_BYTES


def test_work_is_done_once_for_every_block():
    done = []
    in_two_threads(range(100), lambda block, buffer: done.append((block, len(buffer))))
    assert sorted(done) == [(block, BLOCK_BYTES) for block in range(100)]


def test_first_failure_ends_the_work_and_is_raised():
    done = []

    def work(block, buffer):
        if block == 5:
            raise OSError("five")
        done.append(block)

    with pytest.raises(OSError, match="five"):
        in_two_threads(range(100_000), work)
    assert len(done) < 100_000
    assert threading.active_count() < 20
