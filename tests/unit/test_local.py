"""Files and memory as sources."""

import errno
import os
import pickle
import threading

import numpy as np
import pytest
from unit_samples import descriptors_of, quick_collections

from weighlock.errors import ShortRead, SourceChanged, SourceError
from weighlock.sources.base import Source
from weighlock.sources.local import BytesSource, FileSource, Fingerprint

__all__ = ["quick_collections"]  # a fixture of this module

leaves_nothing = pytest.mark.usefixtures("no_leaks")

CONTENT = bytes(range(256)) * 4


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture(params=[True, False], ids=["held", "not held"])
def source(request, path):
    source = FileSource(path, hold=request.param)
    yield source
    source.close()


def read(source, offset, count):
    buffer = bytearray(count)
    source.read_into(offset, memoryview(buffer))
    return bytes(buffer)


def later(path):
    """Make sure that the clock of the file system shows the next change."""
    status = os.stat(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000))


def test_a_file_is_read_at_any_offset(source):
    assert read(source, 0, 1024) == CONTENT
    assert read(source, 300, 10) == CONTENT[300:310]
    assert read(source, 1023, 1) == CONTENT[-1:]
    assert read(source, 5, 0) == b""
    assert source.size == 1024


def test_it_is_a_source(source, path):
    assert isinstance(source, Source)
    assert isinstance(BytesSource(b""), Source)
    assert source.label == str(path)
    assert str(path) in repr(source)


@pytest.mark.parametrize(("offset", "count", "got"), [(1020, 10, 4), (1024, 1, 0), (5000, 7, 0)])
def test_a_read_beyond_the_end_raises_with_both_numbers(source, offset, count, got):
    with pytest.raises(ShortRead, match="ends at byte") as caught:
        read(source, offset, count)
    assert (caught.value.wanted, caught.value.got) == (count, got)


def test_a_truncated_file_is_a_changed_one(source, path):
    os.truncate(path, 500)
    for offset, count in [(0, 1000), (0, 10), (600, 10)]:
        with pytest.raises(SourceChanged, match="had 1,024 bytes and has 500 now"):
            read(source, offset, count)


def test_a_grown_file_is_a_changed_one(source, path):
    with open(path, "ab") as file:
        file.write(b"more")
    with pytest.raises(SourceChanged, match=r"1,024 bytes and has 1,028"):
        read(source, 0, 10)


def test_a_file_written_in_place_is_a_changed_one(source, path):
    with open(path, "r+b") as file:
        file.write(b"other")
    later(path)
    with pytest.raises(SourceChanged, match="open it again"):
        read(source, 0, 10)


def test_a_replaced_file_is_a_changed_one(source, path, tmp_path):
    other = tmp_path / "other"
    other.write_bytes(CONTENT)
    os.replace(other, path)
    with pytest.raises(SourceChanged):
        read(source, 0, 10)


@leaves_nothing
def test_an_unlinked_file_can_be_read_while_it_is_held(path):
    held, loose = FileSource(path), FileSource(path, hold=False)
    path.unlink()
    assert read(held, 0, 10) == CONTENT[:10]
    with pytest.raises(SourceError, match="cannot be opened") as caught:
        read(loose, 0, 10)
    assert caught.value.errno == errno.ENOENT
    held.close()


def test_reading_after_closing_raises(source):
    source.close()
    source.close()
    with pytest.raises(SourceError, match="after it was closed"):
        read(source, 0, 1)


@leaves_nothing
def test_closing_waits_for_the_read_that_is_under_way(path):
    source = FileSource(path)
    with source.descriptor() as fd:
        source.close()
        assert os.pread(fd, 4, 0) == CONTENT[:4]
        with pytest.raises(SourceError):
            read(source, 0, 1)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_only_a_held_file_costs_a_descriptor(path):
    loose = [FileSource(path, hold=False) for _ in range(10)]
    assert descriptors_of(path) == 0
    held = FileSource(path)
    assert descriptors_of(path) == 1
    held.close()
    assert read(loose[0], 0, 1) == CONTENT[:1]
    assert descriptors_of(path) == 0


@leaves_nothing
def test_a_forgotten_source_lets_go_of_its_file(path):
    FileSource(path)  # no_leaks would notice


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda base: base / "missing", "No such file"),
        (lambda base: base, "is a directory"),
        (lambda base: "a\0b", "cannot be a path"),
    ],
)
@leaves_nothing
def test_what_cannot_be_opened_says_why(tmp_path, make, says):
    for hold in (True, False):
        with pytest.raises(SourceError, match=says):
            FileSource(make(tmp_path), hold=hold)


@leaves_nothing
def test_a_named_pipe_is_refused_without_waiting_for_a_writer(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SourceError, match="not a regular file"):
        FileSource(tmp_path / "pipe")


def test_a_relative_path_is_remembered_as_an_absolute_one(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = FileSource("file", hold=False)
    monkeypatch.chdir("/")
    assert read(source, 0, 3) == CONTENT[:3]


def test_a_source_is_its_path_and_fingerprint(path, tmp_path):
    first, second = FileSource(path), FileSource(path, hold=False)
    assert first == second
    assert hash(first) == hash(second)
    (tmp_path / "other").write_bytes(CONTENT)
    assert first != FileSource(tmp_path / "other", hold=False)
    later(path)
    assert first != FileSource(path, hold=False)
    assert first != "file"
    first.close()


def test_an_unpickled_source_is_a_reference_that_holds_nothing(source):
    pickled = pickle.dumps(source)
    assert len(pickled) < 500 + len(source.path)
    again = pickle.loads(pickled)
    assert again == source
    assert again._fd == -1
    assert read(again, 10, 5) == CONTENT[10:15]


def test_an_unpickled_source_of_a_changed_file_raises(source, path):
    pickled = pickle.dumps(source)
    later(path)
    with pytest.raises(SourceChanged):
        read(pickle.loads(pickled), 0, 1)


@leaves_nothing
def test_a_file_that_is_not_the_expected_one_is_refused_at_opening(path):
    before = Fingerprint.of(os.stat(path))
    FileSource(path, fingerprint=before).close()
    later(path)
    with pytest.raises(SourceChanged):
        FileSource(path, fingerprint=before)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """20 MiB: read by two threads."""
    path = tmp_path_factory.mktemp("large") / "file"
    content = np.arange(5 << 20, dtype=np.uint32)
    content.tofile(path)
    yield path, content
    path.unlink()


@pytest.mark.parametrize("offset", [0, 1, 4096, 3 << 20])
@pytest.mark.parametrize("count", [8 << 20, (8 << 20) + 13, 16 << 20])
def test_two_threads_read_what_one_would(large, offset, count):
    path, content = large
    source = FileSource(path)
    buffer = np.empty(count, np.uint8)
    source.read_into(offset, memoryview(buffer))
    assert np.array_equal(buffer, content.view(np.uint8)[offset : offset + count])
    source.close()


@leaves_nothing
def test_what_goes_wrong_in_either_thread_is_raised(large):
    path, _ = large
    source = FileSource(path)
    for offset in (15 << 20, 25 << 20):
        with pytest.raises(ShortRead):
            read(source, offset, 10 << 20)
    source.close()


@leaves_nothing
def test_closing_from_another_thread_never_mixes_up_files(path):
    """Readers get the right bytes or an error, while sources are opened and closed."""
    wrong = []

    def work(source):
        try:
            while True:
                if read(source, 256, 256) != CONTENT[:256]:
                    wrong.append(source)
        except SourceError:
            return

    for _ in range(20):
        source = FileSource(path)
        threads = [threading.Thread(target=work, args=(source,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        source.close()
        for thread in threads:
            thread.join()
    assert wrong == []


@pytest.mark.parametrize("made", [bytes, bytearray, memoryview, lambda b: np.frombuffer(b, "u1")])
def test_bytes_are_a_source(made):
    source = BytesSource(memoryview(made(CONTENT)), label="given")
    assert (source.size, source.label) == (1024, "given")
    assert read(source, 300, 10) == CONTENT[300:310]
    with pytest.raises(ShortRead) as caught:
        read(source, 1020, 10)
    assert (caught.value.wanted, caught.value.got) == (10, 4)
    source.close()
    assert "1,024" in repr(source)


def test_bytes_are_not_copied():
    content = bytearray(b"abcd")
    source = BytesSource(content)
    content[0:1] = b"x"
    assert read(source, 0, 4) == b"xbcd"


def test_a_pickle_of_bytes_holds_them():
    again = pickle.loads(pickle.dumps(BytesSource(CONTENT, label="given")))
    assert read(again, 0, 1024) == CONTENT
    assert again.label == "given"


@leaves_nothing
def test_a_file_that_rests_costs_no_descriptor_and_is_read_on(path):
    source = FileSource(path)
    with source.descriptor():
        source.rest()
        assert source.is_held  # as long as somebody uses it
        assert read(source, 0, 4) == CONTENT[:4]
    assert not source.is_held
    assert descriptors_of(path) == 0
    source.rest()
    assert read(source, 100, 4) == CONTENT[100:104]
    path.write_bytes(CONTENT[::-1])
    with pytest.raises(SourceChanged):
        read(source, 0, 4)
    source.close()
    with pytest.raises(SourceError, match="used after it was closed"):
        read(source, 0, 4)
