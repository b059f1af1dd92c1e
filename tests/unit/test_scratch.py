"""A file without a name."""

import os
import threading

import pytest
from unit_samples import quick_collections

from weighlock.disk.effects import PosixDisk
from weighlock.disk.scratch import Scratch
from weighlock.errors import DiskError, NoSpace, ShortRead
from weighlock.tensors.spec import Span

__all__ = ["quick_collections"]  # a fixture of this module

pytestmark = pytest.mark.usefixtures("no_leaks")


class NamedOnly(PosixDisk):
    """A file system on which every file has a name."""

    def create_unnamed(self, directory):
        return None


class Full(PosixDisk):
    def free_bytes(self, directory):
        return 10


@pytest.fixture(params=[PosixDisk, NamedOnly])
def scratch(request, tmp_path):
    scratch = Scratch(str(tmp_path), request.param())
    yield scratch
    scratch.close()


def read(scratch, offset, count):
    buffer = bytearray(count)
    scratch.read_into(offset, memoryview(buffer))
    return bytes(buffer)


def test_what_is_appended_can_be_read_anywhere(scratch):
    assert scratch.append([memoryview(b"abc"), memoryview(b""), memoryview(b"def")], 6) == Span(
        0, 6
    )
    assert scratch.append([memoryview(b"gh")], 2) == Span(6, 2)
    assert scratch.append([], 0) == Span(8, 0)
    assert scratch.size == 8
    assert read(scratch, 0, 8) == b"abcdefgh"
    assert read(scratch, 4, 3) == b"efg"
    with scratch.descriptor() as fd:
        assert os.pread(fd, 3, 5) == b"fgh"


def test_no_name_is_ever_left(scratch, tmp_path):
    scratch.append([memoryview(bytes(100_000))], 100_000)
    assert list(tmp_path.iterdir()) == []


def test_threads_append_side_by_side(scratch):
    spans = {}

    def append(number):
        content = memoryview(bytes([number]) * 5000)
        spans[number] = scratch.append((content[n : n + 100] for n in range(0, 5000, 100)), 5000)

    threads = [threading.Thread(target=append, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, span in spans.items():
        assert read(scratch, span.offset, span.length) == bytes([number]) * 5000


def test_fewer_bytes_than_announced_are_an_error(scratch):
    with pytest.raises(ShortRead) as caught:
        scratch.append([memoryview(b"abc")], 5)
    assert (caught.value.wanted, caught.value.got) == (5, 3)
    assert read(scratch, *vars_of(scratch.append([memoryview(b"next")], 4))) == b"next"


def vars_of(span):
    return span.offset, span.length


def test_more_bytes_than_announced_never_reach_a_neighbour(scratch):
    first = scratch.append([memoryview(b"abcdef")], 3)
    second = scratch.append([memoryview(b"xyz")], 3)
    assert read(scratch, *vars_of(first)) == b"abc"
    assert read(scratch, *vars_of(second)) == b"xyz"


def test_reading_behind_the_end_is_a_short_read(scratch):
    scratch.append([memoryview(b"abc")], 3)
    with pytest.raises(ShortRead):
        read(scratch, 1, 3)


def test_room_is_asked_for_before_anything_is_written(tmp_path):
    scratch = Scratch(str(tmp_path), Full())
    with pytest.raises(NoSpace) as caught:
        scratch.append([memoryview(bytes(11))], 11)
    assert (caught.value.wanted_bytes, caught.value.free_bytes) == (11, 10)
    assert scratch.size == 0
    scratch.close()


def test_after_closing_nothing_is_read_or_written(scratch):
    scratch.append([memoryview(b"abc")], 3)
    scratch.close()
    scratch.close()
    with pytest.raises(DiskError):
        read(scratch, 0, 1)
    with pytest.raises(DiskError):
        scratch.append([memoryview(b"a")], 1)


def test_directory_that_is_not_there(tmp_path):
    with pytest.raises(DiskError, match="nowhere"):
        Scratch(str(tmp_path / "nowhere"))
