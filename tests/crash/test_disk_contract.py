"""The disks of these tests are disks: one suite, run on the machine's own and on each stand-in.

Below it, the tests of the crash disk's own arithmetic: what is written down is what happened, and
which states a few operations may leave.
"""

import os

import pytest

from crash.crash_disk import Name, RecordingDisk, Sync, Tree, Write, crash_states, replay
from crash.disks import OPERATIONS, Around, FailingDisk, NamedDisk, PlainDisk
from crash.saves import WAYS, put_old
from weighlock.disk.effects import Disk, PosixDisk

DISKS = {
    "posix": lambda root: PosixDisk(),
    "recording": RecordingDisk,
    "recording, named": lambda root: RecordingDisk(root, unnamed=False, inserts=False),
    "named": lambda root: NamedDisk(),
    "plain": lambda root: PlainDisk(),
    "around": lambda root: Around(PosixDisk(), "write"),
    "failing later": lambda root: FailingDisk(PosixDisk(), "write", 10**6, 5),
}


@pytest.fixture(params=DISKS)
def disk(request, tmp_path):
    return DISKS[request.param](tmp_path)


@pytest.fixture
def directory(disk, tmp_path):
    fd = disk.open_directory(str(tmp_path))
    yield fd
    disk.close(fd)


@pytest.fixture
def file(disk, directory):
    fd = disk.create(directory, "file")
    yield fd
    disk.close(fd)


def test_every_disk_has_every_operation(disk):
    names = {name for name in vars(Disk) if not name.startswith("_")}
    assert names == set(OPERATIONS)
    assert all(callable(getattr(disk, name)) for name in names)


def test_an_unnamed_file_is_not_listed_and_gone_when_closed(disk, directory, tmp_path):
    fd = disk.create_unnamed(directory)
    if fd is None:
        return  # as the protocol allows
    assert disk.write(fd, [memoryview(b"bytes")], 0) == 5
    assert os.listdir(tmp_path) == []
    disk.close(fd)
    assert os.listdir(tmp_path) == []


def test_an_unnamed_file_gets_a_name_which_must_be_new(disk, directory, tmp_path):
    fd = disk.create_unnamed(directory)
    if fd is None:
        return  # as the protocol allows
    disk.write(fd, [memoryview(b"bytes")], 0)
    (tmp_path / "taken").write_bytes(b"other")
    with pytest.raises(FileExistsError):
        disk.link(fd, directory, "taken")
    disk.link(fd, directory, "name")
    disk.close(fd)
    assert (tmp_path / "name").read_bytes() == b"bytes"
    assert (tmp_path / "taken").read_bytes() == b"other"


@pytest.mark.parametrize("taken_by", ["file", "directory", "link", "dangling link"])
def test_a_name_that_is_taken_cannot_be_created(disk, directory, tmp_path, taken_by):
    other, name = tmp_path / "other", tmp_path / "name"
    if taken_by == "file":
        name.write_bytes(b"")
    elif taken_by == "directory":
        name.mkdir()
    else:
        name.symlink_to(other)
        if taken_by == "link":
            other.write_bytes(b"")
    with pytest.raises(FileExistsError):
        disk.create(directory, "name")
    assert other.exists() == (taken_by == "link")


def test_what_is_written_is_there_and_what_is_left_out_is_zero(disk, file, tmp_path):
    assert disk.write(file, [memoryview(b"later")], 10) == 5
    assert disk.write(file, [memoryview(b"first")], 0) == 5
    assert (tmp_path / "file").read_bytes() == b"first" + bytes(5) + b"later"


def test_a_copy_is_exact_and_ends_where_the_source_does(disk, file, tmp_path):
    (tmp_path / "source").write_bytes(b"0123456789")
    with open(tmp_path / "source", "rb") as source:
        copied = disk.copy(source.fileno(), 4, file, 2, 100)
        if copied is None:
            return  # as the protocol allows
        assert copied == 6
        assert disk.copy(source.fileno(), 10, file, 8, 100) == 0
    assert (tmp_path / "file").read_bytes() == b"\0\x00456789"


def test_an_insert_shifts_what_follows_or_changes_nothing(disk, file, tmp_path):
    block = disk.block_bytes(file)
    assert block > 0
    assert block % 512 == 0
    disk.write(file, [memoryview(b"bytes" * block)], 0)
    before = (tmp_path / "file").read_bytes()
    inserted = disk.insert(file, 0, block)
    assert (tmp_path / "file").read_bytes() == (bytes(block) if inserted else b"") + before


def test_an_insert_that_is_not_of_whole_blocks_changes_nothing(disk, file, tmp_path):
    disk.write(file, [memoryview(b"bytes")], 0)
    assert not disk.insert(file, 0, 1)
    assert (tmp_path / "file").read_bytes() == b"bytes"


def test_an_insert_that_fails_is_told_from_one_that_cannot_be():
    """Who is told that it cannot be copies what is there, which a failure may have torn."""
    with pytest.raises(OSError, match="Bad file descriptor"):
        PosixDisk().insert(-1, 0, 4096)


def test_a_rename_replaces(disk, directory, file, tmp_path):
    (tmp_path / "other").write_bytes(b"other")
    disk.write(file, [memoryview(b"bytes")], 0)
    disk.sync(file)
    disk.rename(directory, "file", "other")
    disk.sync(directory)
    assert os.listdir(tmp_path) == ["other"]
    assert (tmp_path / "other").read_bytes() == b"bytes"


def test_what_is_not_there_cannot_be_renamed_or_removed(disk, directory):
    with pytest.raises(FileNotFoundError):
        disk.rename(directory, "none", "other")
    with pytest.raises(FileNotFoundError):
        disk.unlink(directory, "none")
    with pytest.raises(FileNotFoundError):
        disk.remove_directory(directory, "none")
    with pytest.raises(FileNotFoundError):
        disk.open_directory("/none/such")


def test_a_directory_is_made_filled_renamed_and_removed_when_empty(disk, directory, tmp_path):
    disk.make_directory(directory, "inner")
    with pytest.raises(FileExistsError):
        disk.make_directory(directory, "inner")
    inner = disk.open_directory(str(tmp_path / "inner"))
    disk.close(disk.create(inner, "file"))
    disk.rename(directory, "inner", "moved")
    disk.sync(inner)
    with pytest.raises(OSError, match="not empty"):
        disk.remove_directory(directory, "moved")
    disk.unlink(inner, "file")
    disk.remove_directory(directory, "moved")
    disk.close(inner)
    assert os.listdir(tmp_path) == []


def test_names_belong_to_the_directory_that_was_opened_wherever_it_is_now(disk, tmp_path):
    (tmp_path / "here").mkdir()
    directory = disk.open_directory(str(tmp_path / "here"))
    (tmp_path / "here").rename(tmp_path / "there")
    (tmp_path / "here").mkdir()
    disk.close(disk.create(directory, "file"))
    disk.close(directory)
    assert os.listdir(tmp_path / "here") == []
    assert os.listdir(tmp_path / "there") == ["file"]


def test_there_is_room(disk, directory):
    assert disk.free_bytes(directory) > 0


# --- the crash disk's own arithmetic ---


@pytest.mark.parametrize("unnamed", [True, False])
@pytest.mark.parametrize("inserts", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_the_log_of_a_save_tells_what_is_on_the_disk(tmp_path, way, inserts, unnamed):
    path = tmp_path / "model"
    if not way.startswith("sharded"):
        put_old(path)
    disk = RecordingDisk(tmp_path, unnamed=unnamed, inserts=inserts)
    WAYS[way](path, disk)
    found = {
        str(file.relative_to(tmp_path)): file.read_bytes()
        for file in tmp_path.rglob("*")
        if file.is_file() and file.name != "source.safetensors"
    }
    assert replay(disk.start, disk.log) == found
    assert disk.log


EMPTY = Tree({0: {"file": 1}}, {1: b"old"})


def states(*log):
    return {
        tuple(sorted(state.files.items()))
        for state in crash_states(EMPTY, log, at_most=10**6, seed=0)
    }


def test_an_unsynced_write_is_there_not_there_or_torn():
    data = bytes([1]) * 512 + bytes([2]) * 512
    contents = {files[0][1] for files in states(Write(1, 0, data))}
    assert contents == {
        b"old",
        data,
        data[:512],
        data[:512] + bytes(512),
        b"old" + bytes(1021),
        b"old" + bytes(509) + data[512:],
    }


def test_a_synced_write_is_there_once_the_sync_is_done():
    log = (Write(1, 0, b"new"), Sync(1))
    settled = {s.files["file"] for s in crash_states(EMPTY, log, at_most=99, seed=0) if s.log[1:]}
    assert settled == {b"new"}


def test_the_sync_of_another_file_settles_nothing():
    log = (Write(1, 0, b"new"), Sync(2))
    left = {s.files["file"] for s in crash_states(EMPTY, log, at_most=99, seed=0) if s.log[1:]}
    assert left == {b"old", b"new"}


def test_unsynced_names_come_and_go_in_any_order():
    two = states(Name(0, "other", 2), Name(0, "file", 2, moved_from="other"))
    assert two == {
        (("file", b"old"),),
        (("file", b"old"), ("other", b"")),
        (("file", b""),),
    }


def test_a_sample_is_the_same_for_the_same_seed():
    log = [Write(1, n, bytes([n]) * 2000) for n in range(6)]

    def sample(seed):
        return [state.fates for state in crash_states(EMPTY, log, at_most=500, seed=seed)]

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
    assert 300 < len(sample(1)) <= 500
