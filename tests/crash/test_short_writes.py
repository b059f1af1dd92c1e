"""A9: writes and copies that take only a part, and calls that signals interrupt.

A loop that forgets the rest of a short write writes a file with holes; here it completes exactly,
or raises.
"""

import errno
import json
import os
import signal

import numpy as np
import pytest

import weighlock
from crash.disks import Around, HalfDisk, NamedDisk, PlainDisk
from crash.saves import NEW, SINGLE, WAYS, beside, copied, cramped, put_old, seen
from weighlock.disk.effects import PosixDisk
from weighlock.errors import DiskError

pytest_plugins = ["crash.fixtures"]


@pytest.mark.parametrize(
    "disk", [PosixDisk(), NamedDisk(), PlainDisk()], ids=lambda disk: type(disk).__name__
)
@pytest.mark.parametrize("way", WAYS)
def test_writes_that_take_half_are_completed(tmp_path, no_leaks, way, disk):
    half = HalfDisk(disk, "write")
    WAYS[way](tmp_path / "model", half)
    assert half.calls > len(NEW)
    assert seen(tmp_path / "model") == "new"


@pytest.mark.parametrize("way", ["copied", "cramped"])
def test_copies_that_take_half_are_completed(tmp_path, no_leaks, way):
    class NoInserts(PosixDisk):
        def insert(self, fd, offset, count):
            return False

    half = HalfDisk(NoInserts(), "copy")
    SINGLE[way](tmp_path / "model", half)
    assert half.calls > 5
    assert seen(tmp_path / "model") == "new"


@pytest.mark.parametrize("operation", ["write", "copy"])
def test_a_disk_that_takes_nothing_is_an_error_and_not_an_endless_loop(
    tmp_path, no_leaks, operation
):
    class Nothing(Around):
        def instead(self, real, *arguments):
            return 0

    path = tmp_path / "model"
    put_old(path)
    with pytest.raises((DiskError, weighlock.errors.ShortRead)):
        copied(path, Nothing(PosixDisk(), operation))
    assert seen(path) == "old"
    assert beside(path) == []


def test_a_copy_that_stops_working_halfway_is_completed_by_writing(tmp_path, no_leaks):
    """A file system may copy a part and then say that it cannot."""

    class Stops(HalfDisk):
        def instead(self, real, *arguments):
            return super().instead(real, *arguments) if self.calls == 1 else None

    disk = Stops(PosixDisk(), "copy")
    copied(tmp_path / "model", disk)
    assert disk.calls == 2
    assert seen(tmp_path / "model") == "new"


@pytest.fixture
def reads(monkeypatch):
    """Has the system answer every read of a file by `reads(how)(fd, buffer, offset)`."""
    real = os.preadv

    def change(how):
        def pread(fd, count, offset):
            buffer = bytearray(count)
            return bytes(buffer[: how(real, fd, memoryview(buffer), offset)])

        def preadv(fd, buffers, offset):
            return how(real, fd, memoryview(buffers[0]), offset)

        monkeypatch.setattr(os, "pread", pread)
        monkeypatch.setattr(os, "preadv", preadv)

    return change


def test_reads_that_give_half_are_completed_when_the_data_is_moved(
    tmp_path, no_leaks, reads, monkeypatch
):
    """For a header that outgrew its room, where the file system neither inserts nor copies."""

    def half(real, fd, buffer, offset):
        return real(fd, [buffer[: (len(buffer) + 1) // 2]], offset)

    reads(half)
    cramped(tmp_path / "model", PlainDisk())
    monkeypatch.undo()
    assert seen(tmp_path / "model") == "new"


def test_data_that_cannot_be_read_back_when_it_is_moved_is_an_error_of_ours(
    tmp_path, no_leaks, reads, monkeypatch
):
    def broken(real, fd, buffer, offset):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def empty(real, fd, buffer, offset):
        return 0

    path = tmp_path / "model"
    put_old(path)
    for how, error in ((broken, DiskError), (empty, weighlock.errors.ShortRead)):
        reads(how)
        with pytest.raises(error, match="model"):
            cramped(path, PlainDisk())
        monkeypatch.undo()
        assert seen(path) == "old"
        assert beside(path) == []


def test_progress_counts_every_byte_once_when_a_copy_stops_halfway(tmp_path, no_leaks):
    class Stops(HalfDisk):
        def instead(self, real, *arguments):
            return super().instead(real, *arguments) if self.calls == 1 else None

    weighlock.save(tmp_path / "source.safetensors", NEW)
    steps = []
    with (
        weighlock.open(tmp_path / "source.safetensors") as catalog,
        weighlock.Writer(
            tmp_path / "model", disk=Stops(PosixDisk(), "copy"), progress=steps.append
        ) as writer,
    ):
        writer.copy_all(catalog.values())
    assert sum(steps) == catalog.nbytes


@pytest.mark.parametrize("limit", [1, 600, 1000, 2000, 3000])
@pytest.mark.parametrize("way", SINGLE)
def test_a_write_cut_short_by_the_limit_of_the_process_is_not_taken_for_whole(
    tmp_path, child, way, limit
):
    """The kernel takes what fits below the limit, and refuses the rest with the next call."""
    put_old(tmp_path / "model")
    weighlock.save(tmp_path / "source.safetensors", NEW)
    with child(save=way, path=tmp_path / "model", limits={"FSIZE": limit}) as saver:
        said = json.loads(saver.next())
    assert (said["raised"], said["errno"]) == ("DiskError", errno.EFBIG)
    assert seen(tmp_path / "model") == "old"
    assert beside(tmp_path / "model") == []


@pytest.fixture
def alarms():
    """A signal every fifth of a millisecond, handled by Python; how many were."""
    handled = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: handled.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
    yield handled
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("shards", [None, 3_000_000])
def test_a_storm_of_signals_changes_no_byte(tmp_path, no_leaks, alarms, shards):
    numbers = np.random.default_rng(9)
    tensors = {
        f"layer{n}": numbers.integers(0, 255, size=(n + 1, 70_001), dtype=np.uint8)
        for n in range(12)
    }
    saves = 0
    while saves < 2 or len(alarms) < 50:  # until it has met enough of them
        directory = tmp_path / str(saves)
        directory.mkdir()
        weighlock.save(directory / "a", iter(tensors.items()), max_shard_bytes=shards)
        with weighlock.open(directory / "a") as catalog:
            weighlock.save(directory / "b", catalog, max_shard_bytes=shards)
        with weighlock.open(directory / "b") as catalog:
            assert catalog.keys() == tensors.keys()
            assert all(np.array_equal(catalog[name].load(), tensors[name]) for name in tensors)
        saves += 1
