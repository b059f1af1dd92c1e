"""An arrival takes blocks from anybody in any order, and is never a mixture."""

import tracemalloc

import numpy as np
import pytest
from blake3 import blake3
from transfer_samples import content

import weighlock
from weighlock.disk.resumable import ResumableFile
from weighlock.errors import ChunkCorrupt, LayoutError, PeerLost, Refused
from weighlock.sharing.arrival import Arrival, NotAwaited, root_of

__all__ = ["content"]  # a fixture of this module

MB = 1 << 20


@pytest.fixture
def begin(tmp_path, content):
    """Begins an arrival of the content; gives it and its file."""
    opened = []

    def make(content=content):
        file = ResumableFile(tmp_path / "out.safetensors", durable=False)
        opened.append(file)
        header = content[: 8 + int.from_bytes(content[:8], "little")]
        return Arrival(file, header, len(content), "0", is_adopted=bool(file.adopted_bytes))

    yield make
    for file in opened:
        file.discard()


def block_of(content, block):
    return content[block * MB : (block + 1) * MB]


class Body:
    """Gives the bytes of a block; calls what is told after so many of them."""

    def __init__(self, data, after=None, then=None):
        self.data, self.done, self.after, self.then = data, 0, after, then

    def fill(self, view):
        view[:] = self.data[self.done : self.done + len(view)]
        self.done += len(view)
        if self.then is not None and self.done >= self.after:
            then, self.then = self.then, None
            then()


def bring(arrival, content, block, *, piece=MB, digest=None, **body):
    data = block_of(content, block)
    digest = digest or blake3(data).digest()
    arrival.receive(block, digest, Body(data, **body).fill, memoryview(bytearray(piece)))


def root(content):
    blocks = range(0, len(content), MB)
    return root_of(b"".join(blake3(content[at : at + MB]).digest() for at in blocks))


def changed(content, at):
    other = bytearray(content)
    other[at] ^= 1
    return bytes(other)


@pytest.mark.parametrize("piece", [MB, 65536, 70_001])
def test_blocks_land_whole_or_in_pieces(begin, content, tmp_path, piece):
    arrival = begin()
    for block in (2, 0, 0, 1):
        assert not arrival.seal(root(content), "0")
        bring(arrival, content, block, piece=piece)
    assert arrival.bytes_here == len(content)
    assert arrival.seal(root(content), "0")
    arrival.complete()
    arrival.file.commit()
    assert (tmp_path / "out.safetensors").read_bytes() == content


@pytest.mark.parametrize("piece", [MB, 65536])
def test_a_sealed_arrival_takes_nothing(begin, content, piece):
    arrival = begin()
    for block in range(3):
        bring(arrival, content, block)
    assert arrival.seal(root(content), "0")
    with pytest.raises(NotAwaited):
        bring(arrival, changed(content, 2 * MB + 5), 2, piece=piece)
    assert not arrival.seal(root(changed(content, 5)), "0")  # which does not open it again
    with pytest.raises(NotAwaited):
        bring(arrival, changed(content, 2 * MB + 5), 2, piece=piece)
    assert arrival.root == root(content)


def test_who_overtakes_an_arrival_opens_what_was_sealed(begin, content):
    arrival = begin()
    for block in range(3):
        bring(arrival, content, block)
    assert arrival.seal(root(content), "0")
    arrival.belong_to("1")
    other = changed(content, 2 * MB + 5)
    bring(arrival, other, 2)
    with pytest.raises(Refused, match="another one under the same name"):
        arrival.seal(root(other), "0")
    assert not arrival.is_sealed
    assert arrival.seal(root(other), "1")


def test_a_block_half_written_is_not_here(begin, content):
    arrival = begin()
    bring(arrival, content, 1)

    def lost():
        raise PeerLost("cut")

    other = changed(content, MB + 5)
    with pytest.raises(PeerLost):
        bring(arrival, other, 1, piece=65536, after=200_000, then=lost)
    assert arrival.bytes_here == 0
    assert arrival.page(0)[32:64] == bytes(32)


def test_of_two_that_bring_a_block_in_pieces_the_later_goes_first(begin, content):
    arrival = begin()
    other = changed(content, MB + 5)
    with pytest.raises(NotAwaited):
        bring(
            arrival,
            other,
            1,
            piece=65536,
            after=200_000,
            then=lambda: bring(arrival, content, 1, piece=131072),
        )
    assert arrival.page(0)[32:64] == blake3(block_of(content, 1)).digest()


@pytest.mark.parametrize("piece", [MB, 65536])
def test_what_does_not_match_does_not_count(begin, content, piece):
    arrival = begin()
    right = blake3(block_of(content, 0)).digest()
    for at in (20, MB - 1):
        with pytest.raises(ChunkCorrupt):
            bring(arrival, changed(content, at), 0, piece=piece, digest=right)
    with pytest.raises(LayoutError, match="another header"):
        bring(arrival, changed(content, 20), 0, piece=piece)
    assert arrival.bytes_here == 0


def test_what_an_earlier_attempt_left_is_found_by_its_content(begin, content, tmp_path):
    arrival = begin()
    for block in (0, 2):
        bring(arrival, content, block)
    arrival.keep()
    arrival = begin()
    assert arrival.has_some
    page = arrival.page(0)
    assert [page[at : at + 32] != bytes(32) for at in (0, 64)] == [True, True]
    assert page[32:64] != blake3(block_of(content, 1)).digest()
    assert not arrival.seal(root(content), "0")
    bring(arrival, content, 1)
    assert arrival.seal(root(content), "0")
    arrival.complete()
    arrival.file.commit()
    assert (tmp_path / "out.safetensors").read_bytes() == content


def test_what_an_earlier_attempt_left_is_looked_at_little_by_little(begin, content):
    arrival = begin()
    bring(arrival, content, 1)
    arrival.keep()
    arrival, known = begin(), []
    while (page := arrival.page(0, wait_s=0)) is None:
        known.append(arrival.known_blocks)
    assert known == sorted(set(known))  # more each time
    assert len(known) >= 1
    assert arrival.known_blocks == arrival.blocks == 3
    assert page[32:64] == blake3(block_of(content, 1)).digest()


@pytest.fixture
def headed(tmp_path):
    """A file whose header takes more than two blocks."""
    path = tmp_path / "headed"
    weighlock.save(path, {"x": np.ones(700_000, np.int8)}, metadata={"long": "y" * (5 * MB // 2)})
    return path.read_bytes()


@pytest.mark.parametrize("piece", [MB, 65536, 70_001])
def test_a_long_header_must_come_as_it_was_announced(begin, headed, piece):
    arrival = begin(headed)
    for block, at in ((1, MB + 3), (2, 2 * MB), (2, 5 * MB // 2)):
        with pytest.raises(LayoutError, match=f"block {block} holds another header"):
            bring(arrival, changed(headed, at), block, piece=piece)
    other = changed(headed, len(headed) - 1)
    for block in range(4):
        bring(arrival, other, block, piece=piece)
    assert arrival.seal(root(other), "0")


def test_an_arrival_does_not_hold_the_header_it_was_announced_with(begin, headed):
    tracemalloc.start()
    arrival = begin(headed)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < MB // 2
    assert not arrival.has_some
