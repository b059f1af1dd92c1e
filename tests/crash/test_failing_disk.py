"""A4, A5 and every other failure of a disk: each operation fails once, with each kind of error.

The n-th call of one operation fails, for n = 1, 2, 3 … until a run comes to its end without. Each
time the error must be of our tree, the old file intact, and nothing left: no name, no descriptor.
"""

import errno
import itertools
import json
import os
import stat

import pytest

import weighlock
from conftest import open_descriptors
from crash.disks import OPERATIONS, Around, FailingDisk, MemoryDisk, NamedDisk, PlainDisk
from crash.rigs import calls_in, traced
from crash.saves import NEW, SHARDED, SINGLE, WAYS, beside, planned, put_old, seen, streamed
from weighlock.disk.effects import PosixDisk
from weighlock.errors import DiskError, LayoutError, NoSpace, NotDurable

pytest_plugins = ["crash.fixtures"]


class NamedMemoryDisk(MemoryDisk, NamedDisk):
    pass


class PlainMemoryDisk(MemoryDisk, PlainDisk):
    pass


DISKS = {"posix": MemoryDisk, "named": NamedMemoryDisk, "plain": PlainMemoryDisk}
ERRORS = [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EACCES]

CALLS = ["pwrite64", "pwritev", "fallocate", "linkat", "renameat", "mkdirat", "unlinkat", "openat"]
HARMLESS = {"free_bytes", "unlink", "unlock", "remove_directory", "close"}
"""Operations that are not needed for a save to succeed."""


def failures(tmp_path, save, make_disk, errors):
    """Run a save with the n-th call of an operation failing: every operation, n, and error.

    Yields the failing disk, the error that was raised, or None, and the destination. No descriptor
    is open then that was not open before.
    """
    numbers = itertools.count()
    for operation, number in itertools.product(OPERATIONS, errors):
        for n in itertools.count(1):
            directory = tmp_path / str(next(numbers))
            directory.mkdir()
            disk = FailingDisk(make_disk(), operation, n, number)
            before = open_descriptors()
            raised = None
            try:
                save(directory / "model", disk)
            except Exception as error:
                raised = error
            if not disk.hit:
                assert (raised, seen(directory / "model")) == (None, "new")
                break
            leaked = {fd: to for fd, to in open_descriptors().items() if before.get(fd) != to}
            assert leaked == {}, (disk, raised)
            yield disk, raised, directory / "model"


def check(disk, raised, path, *, before):
    """What must be true after any failure; a list of what is not."""
    wrong = []
    in_place = str(raised).startswith(f"{path}: is in place") and isinstance(raised, NotDurable)
    if raised is None:
        # Some failures mean nothing: how much is free, a descriptor with nothing to lose.
        if disk.operation not in HARMLESS:
            wrong.append("was swallowed")
    elif not isinstance(raised, DiskError):
        wrong.append(f"raised {raised!r}")
    elif raised.errno != disk.number or path.name not in str(raised):
        wrong.append(f"tells too little: {raised.errno} {raised}")
    elif disk.operation == "sync":
        if not isinstance(raised, NotDurable):
            wrong.append(f"raised {raised!r}")
    elif isinstance(raised, NoSpace) != (disk.number in (errno.ENOSPC, errno.EDQUOT)):
        wrong.append(f"raised {raised!r}")
    if seen(path) != ("new" if raised is None or in_place else before):
        wrong.append(f"left the {seen(path)} file")
    if "is in place" in str(raised) and seen(path) != "new":
        wrong.append(f"says what is not true: {raised}")
    if beside(path) and disk.operation not in ("unlink", "remove_directory"):
        wrong.append(f"left {beside(path)}")
    return [f"{disk} {text}" for text in wrong]


@pytest.mark.slow
@pytest.mark.parametrize("kind", DISKS)
@pytest.mark.parametrize("way", SINGLE)
def test_a_save_survives_any_failure_of_any_operation(tmp_path, way, kind):
    def save(path, disk):
        put_old(path)
        SINGLE[way](path, disk)

    wrong = []
    errors = ERRORS if way == "planned" else ERRORS[:2]  # the kind matters in one place only
    for disk, raised, path in failures(tmp_path, save, DISKS[kind], errors):
        wrong += check(disk, raised, path, before="old")
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("kind", DISKS)
@pytest.mark.parametrize("way", SHARDED)
def test_a_sharded_save_survives_any_failure_of_any_operation(tmp_path, way, kind):
    wrong = []
    for disk, raised, path in failures(tmp_path, SHARDED[way], DISKS[kind], ERRORS[:2]):
        wrong += check(disk, raised, path, before="absent")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP], ids=errno.errorcode.get)
@pytest.mark.parametrize("way", WAYS)
def test_directories_that_cannot_be_synced_at_all_are_tolerated(tmp_path, no_leaks, way, number):
    """A5: some file systems have nothing to sync there, and say so."""

    class OnlyFilesSync(Around):
        def instead(self, real, fd):
            if stat.S_ISDIR(os.fstat(fd).st_mode):
                raise OSError(number, os.strerror(number))
            real(fd)

    WAYS[way](tmp_path / "model", OnlyFilesSync(PosixDisk(), "sync"))
    assert seen(tmp_path / "model") == "new"


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP], ids=errno.errorcode.get)
def test_a_file_that_cannot_be_synced_is_not_tolerated(tmp_path, no_leaks, number):
    path = tmp_path / "model"
    put_old(path)
    with pytest.raises(NotDurable):
        planned(path, FailingDisk(PosixDisk(), "sync", 1, number))
    assert seen(path) == "old"
    assert beside(path) == []


def test_a_failed_sync_is_not_an_error_for_who_did_not_ask_for_one(tmp_path, no_leaks):
    disk = FailingDisk(PosixDisk(), "sync", 1, errno.EIO)
    planned(tmp_path / "model", disk, durable=False)
    assert not disk.hit
    assert seen(tmp_path / "model") == "new"


@pytest.mark.parametrize("operation", ["unlink", "close"])
def test_an_error_while_cleaning_up_does_not_hide_the_first_one(tmp_path, operation):
    path = tmp_path / "model"
    disk = FailingDisk(NamedDisk(), operation, 1, errno.EIO)
    wrong = {"weight": NEW["weight"], "bias": "not a tensor"}
    with pytest.raises(LayoutError, match="bias"):
        streamed(path, disk, wrong)
    assert disk.hit
    assert seen(path) == "absent"


@pytest.mark.parametrize("operation", ["unlink", "close", "remove_directory"])
@pytest.mark.parametrize("way", SHARDED)
def test_an_error_while_cleaning_up_a_sharded_save_does_not_hide_the_first_one(
    tmp_path, way, operation
):
    wrong = {**NEW, "last": "not a tensor"}
    specs = {**NEW, "last": NEW["bias"]}
    calls = FailingDisk(PosixDisk(), operation, 0, errno.EIO)
    with pytest.raises(LayoutError, match="last"):
        SHARDED[way](tmp_path / "model", calls, wrong, announced=specs)
    for n in range(1, calls.calls + 1):
        disk = FailingDisk(PosixDisk(), operation, n, errno.EIO)
        with pytest.raises((LayoutError, DiskError)) as raised:
            SHARDED[way](tmp_path / "model", disk, wrong, announced=specs)
        if isinstance(raised.value, DiskError):
            assert operation == "close", n  # a shard's, before the wrong tensor came
        assert seen(tmp_path / "model") == "absent"


# --- the same with the real system call failing in a real process ---


@pytest.mark.parametrize("disk", ["posix", "plain"])
@pytest.mark.parametrize("way", SINGLE)
def test_a_file_whose_fsync_failed_is_discarded_and_not_synced_again(memory_path, child, way, disk):
    """A4: the kernel has dropped the pages; a second fsync would succeed and mean nothing."""
    path, log = memory_path / "model", memory_path / "log"
    put_old(path)
    with child(save=way, path=path, disk=disk) as saver:
        said, code = traced(saver, log, "fsync", "error=EIO:when=1")
    log_of_fsyncs = calls_in(log)
    log.unlink()
    said = json.loads(said)
    assert (said["raised"], said["errno"], code) == ("NotDurable", errno.EIO, 1)
    assert len(log_of_fsyncs) == 1
    assert "INJECTED" in log_of_fsyncs[0][1]
    assert seen(path) == "old"
    assert beside(path) == []


@pytest.mark.parametrize("way", SHARDED)
def test_a_shard_whose_fsync_failed_is_discarded_with_the_whole(memory_path, child, way):
    """A4, for each file and directory that is synced on the way."""
    path, log = memory_path / "model", memory_path / "log"
    for n in itertools.count(1):
        with child(save=way, path=path) as saver:
            said, _ = traced(saver, log, "fsync", f"error=EIO:when={n}")
        log.unlink()
        if said == "done":
            break
        said = json.loads(said)
        assert said["raised"] == "NotDurable"
        if seen(path) == "new":  # the last one: of the directory the whole lies in
            assert said["says"].startswith(f"{path}: is in place")
            for name in os.listdir(path):
                os.unlink(path / name)
        assert beside(path) == [], n
    assert n == 7  # three shards, their index, the directory and the one it lies in; and one more


@pytest.mark.parametrize("disk", ["posix", "plain"])
def test_a_directory_fsync_that_is_not_supported_is_tolerated(memory_path, child, disk):
    """A5: EINVAL is how a file system says that there is nothing to do."""
    path = memory_path / "disk" / "model"
    path.parent.mkdir()
    put_old(path)
    with child(save="planned", path=path, disk=disk) as saver:
        said, code = traced(saver, memory_path / "log", "fsync", "error=EINVAL:when=2")
    assert (said, code, len(calls_in(memory_path / "log"))) == ("done", 0, 2)
    assert seen(path) == "new"
    assert beside(path) == []


@pytest.mark.parametrize("disk", ["posix", "plain"])
def test_a_directory_fsync_that_fails_is_told(memory_path, child, disk):
    """A5: the file is in place, whole, and may be lost with the power: the error says both."""
    path = memory_path / "disk" / "model"
    path.parent.mkdir()
    put_old(path)
    with child(save="planned", path=path, disk=disk) as saver:
        said, code = traced(saver, memory_path / "log", "fsync", "error=EIO:when=2")
    said = json.loads(said)
    assert (said["raised"], code) == ("NotDurable", 1)
    assert "is in place" in said["says"]
    assert len(calls_in(memory_path / "log")) == 2
    assert seen(path) == "new"
    assert beside(path) == []


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("way", ["planned", "cramped", "sharded", "sharded_as_they_come"])
def test_a_real_save_survives_a_failure_of_any_system_call(memory_path, child, way, call):
    """`weighlock.save` itself, where no disk can be handed in: sharded ones above all."""
    sharded = way.startswith("sharded")
    for n in itertools.count(1):
        place = memory_path / str(n)
        place.mkdir()
        path = place / "model"
        weighlock.save(place / "source.safetensors", NEW)
        if not sharded:
            put_old(path)
        with child(save=way, path=path) as saver:
            said, _ = traced(saver, memory_path / "log", call, f"error=EIO:when={n}")
            assert said, saver.complaint()
        if "INJECTED" not in (memory_path / "log").read_text():
            assert said == "done"
            break
        assert beside(path) == [], (n, said)
        if said == "done":
            # Who made a temporary could not be read: it is only a part of its name.
            assert call == "openat"
            assert seen(path) == "new"
        else:
            assert json.loads(said)["raised"] in ("DiskError", "SourceError"), said
            assert seen(path) == ("absent" if sharded else "old")
