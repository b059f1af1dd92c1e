"""Files that are taken up again: whose may be adopted, and what is left when."""

import contextlib
import errno
import os
import subprocess
import sys

import pytest
from unit_samples import descriptors_of, quick_collections

from weighlock.disk.effects import PosixDisk
from weighlock.disk.owner import NOBODY, Owner, owner_of, temporary_name
from weighlock.disk.resumable import ResumableFile
from weighlock.errors import DiskError, NotDurable

__all__ = ["quick_collections"]  # a fixture of this module

HERE = Owner.current()
DEAD = Owner(HERE.pid, str(int(HERE.started) + 1), HERE.boot)
"""A process of the same number that was started at another time."""


@pytest.fixture
def path(tmp_path):
    yield tmp_path / "model.safetensors"
    assert descriptors_of(tmp_path) == 0


def make(path, **options):
    return ResumableFile(path, durable=False, **options)


def beside(path):
    return sorted(name for name in os.listdir(path.parent) if name != path.name)


def plant(path, owner, content=b"planted", name=None):
    """A temporary of that destination as another process would have left it."""
    place = path.parent / temporary_name(name or path.name, owner)
    place.write_bytes(content)
    return place


def read(file, offset, count):
    buffer = bytearray(count)
    return bytes(buffer) if file.read_into(offset, memoryview(buffer)) else None


def content_of(file):
    buffer = bytearray(os.fstat(file.descriptor()).st_size)
    assert file.read_into(0, memoryview(buffer))
    return bytes(buffer)


def test_a_new_file_lies_beside_its_destination_and_says_whose_it_is(path):
    file = make(path)
    (name,) = beside(path)
    assert owner_of(name, path.name) == HERE
    assert file.temporary_path == str(path.parent / name)
    assert file.adopted_bytes == 0
    file.discard()
    assert beside(path) == []


def test_it_is_put_in_place_whole(path):
    path.write_bytes(b"old")
    file = make(path)
    file.write(3, memoryview(b"def"))
    file.write(0, memoryview(b"abc"))
    assert path.read_bytes() == b"old"
    file.commit()
    assert path.read_bytes() == b"abcdef"
    assert beside(path) == []


def test_what_is_kept_is_nobodys_and_is_adopted(path):
    file = make(path)
    file.write(0, memoryview(b"abc"))
    file.keep()
    file.keep()
    (name,) = beside(path)
    assert owner_of(name, path.name) == NOBODY
    again = make(path)
    assert again.adopted_bytes == 3
    assert content_of(again) == b"abc"
    (name,) = beside(path)
    assert owner_of(name, path.name) == HERE
    again.discard()
    assert beside(path) == []


def test_nothing_more_can_be_written_to_what_was_kept(path):
    file = make(path)
    file.write(0, memoryview(b"abc"))
    file.keep()
    with pytest.raises(DiskError):
        file.write(0, memoryview(b"abc"))
    with pytest.raises(DiskError):
        file.commit()
    file.discard()
    assert len(beside(path)) == 1


def test_nothing_is_kept_of_a_file_nobody_wrote_to(path):
    make(path).keep()
    assert beside(path) == []


class Failing(PosixDisk):
    """The machine's disk, whose n-th call of one operation ends with an error, done or not."""

    def __init__(self, operation, error, *, n=1, done=False):
        real = getattr(self, operation)
        left = iter([False] * (n - 1) + [True])

        def call(*arguments):
            fails = next(left, False)
            result = None if fails and not done else real(*arguments)
            if fails:
                raise error
            return result

        setattr(self, operation, call)


def refused(number):
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    ("operation", "error", "is_done"),
    [
        ("rename", refused(errno.EBUSY), False),
        ("rename", refused(errno.EISDIR), False),
        ("rename", KeyboardInterrupt(), False),
        ("rename", KeyboardInterrupt(), True),
        ("sync", KeyboardInterrupt(), False),
        ("sync", KeyboardInterrupt(), True),
        ("close", KeyboardInterrupt(), True),
    ],
)
def test_what_could_not_be_put_in_place_is_kept(path, operation, error, is_done):
    path.write_bytes(b"old")
    file = ResumableFile(path, disk=Failing(operation, error, done=is_done))
    file.write(0, memoryview(b"abc"))
    with pytest.raises((DiskError, KeyboardInterrupt)):
        file.commit()
    if operation == "rename" and is_done:
        assert not file.keep()  # it came when all was done
        assert (path.read_bytes(), beside(path)) == (b"abc", [])
        return
    assert file.keep()
    assert file.keep()
    file.discard()  # what was left is nobody's by now
    assert path.read_bytes() == b"old"
    again = make(path)
    assert content_of(again) == b"abc"
    again.commit()
    assert (path.read_bytes(), beside(path)) == (b"abc", [])


@pytest.mark.parametrize("operation", ["sync", "close"])
def test_what_the_system_lost_is_not_kept(path, operation):
    """The pages are gone: what the file holds now is not what was written."""
    path.write_bytes(b"old")
    file = ResumableFile(path, disk=Failing(operation, refused(errno.EIO), done=True))
    file.write(0, memoryview(b"abc"))
    with pytest.raises(DiskError) as caught:
        file.commit()
    assert caught.value.errno == errno.EIO
    assert not file.keep()
    assert (path.read_bytes(), beside(path)) == (b"old", [])


def test_a_file_in_place_is_not_kept_beside_it(path):
    file = ResumableFile(path, disk=Failing("sync", refused(errno.EIO), n=2))
    file.write(0, memoryview(b"abc"))
    with pytest.raises(NotDurable, match="is in place"):
        file.commit()
    assert not file.keep()
    assert (path.read_bytes(), beside(path)) == (b"abc", [])


def test_what_is_forgotten_is_kept(path):
    file = make(path)
    file.write(0, memoryview(b"abc"))
    del file
    again = make(path)
    assert content_of(again) == b"abc"
    again.discard()
    assert beside(path) == []


@pytest.mark.parametrize("owner", [DEAD, NOBODY, Owner(HERE.pid, HERE.started, "deadbeef")])
def test_what_the_dead_left_is_adopted(owner, path):
    plant(path, owner)
    file = make(path)
    assert content_of(file) == b"planted"
    assert len(beside(path)) == 1
    file.discard()


@pytest.mark.parametrize("owner", [HERE, Owner(1, "0", "0"), Owner(2**22 + 1, "5", "0")])
def test_what_may_be_a_living_ones_is_left_alone(owner, path):
    planted = plant(path, owner)
    file = make(path)
    assert file.adopted_bytes == 0
    file.discard()
    assert planted.read_bytes() == b"planted"


def test_what_another_machine_may_be_writing_is_left_alone(path, monkeypatch):
    """Where others may write too, an unknown boot is an earlier one of ours, or a living one."""
    monkeypatch.setattr("weighlock.disk.judging.LOCAL", frozenset())
    planted = plant(path, Owner(HERE.pid, HERE.started, "deadbeef"))
    plant(path, NOBODY, b"let go of")
    file = make(path)
    assert content_of(file) == b"let go of"
    file.discard()
    assert planted.read_bytes() == b"planted"


def test_living_process_keeps_its_file(path):
    script = (
        "import sys; from weighlock.disk.resumable import ResumableFile\n"
        "file = ResumableFile(sys.argv[1]); file.write(0, memoryview(b'mine'))\n"
        "print('ready', flush=True); sys.stdin.read(1); import os; os._exit(9)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    mine = make(path)
    assert mine.adopted_bytes == 0
    mine.discard()
    process.communicate("x")
    file = make(path)  # it died: now it may be had
    assert content_of(file) == b"mine"
    file.discard()


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors.part",
        ".model.safetensors.part-",
        ".model.safetensors.part-1-2-3",
        f".model.safetensors.part-0-0-0-{'0' * 15}",
        f".model.safetensors.part-0-0-0-{'0' * 16}.bak",
        f".model.safetensors.part-x-0-0-{'0' * 16}",
        f".other.safetensors.part-0-0-0-{'0' * 16}",
        f"model.safetensors.part-0-0-0-{'0' * 16}",
    ],
)
def test_files_of_other_names_are_not_ours(name, path):
    (path.parent / name).write_bytes(b"foreign")
    file = make(path)
    assert file.adopted_bytes == 0
    file.discard()
    assert (path.parent / name).read_bytes() == b"foreign"


def test_temporary_of_another_destination_is_not_adopted(path):
    planted = plant(path, NOBODY, name="model.safetensors.part-x")
    other = plant(path, NOBODY, name="model")
    file = make(path)
    assert file.adopted_bytes == 0
    file.discard()
    assert planted.exists()
    assert other.exists()


@pytest.mark.parametrize("kind", ["symlink", "directory", "fifo"])
def test_what_is_no_plain_file_is_not_opened(kind, path, tmp_path):
    planted = path.parent / temporary_name(path.name, NOBODY)
    secret = tmp_path / "elsewhere"
    secret.write_bytes(b"precious")
    if kind == "symlink":
        planted.symlink_to(secret)
    elif kind == "directory":
        planted.mkdir()
    else:
        os.mkfifo(planted)
    file = make(path)
    assert file.adopted_bytes == 0
    file.write(0, memoryview(b"new"))
    file.commit()
    assert secret.read_bytes() == b"precious"
    assert os.path.lexists(planted)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file away")
def test_file_of_another_user_is_not_adopted(path):
    planted = plant(path, NOBODY)
    os.chown(planted, 12345, 12345)
    file = make(path)
    assert file.adopted_bytes == 0
    file.discard()
    assert planted.exists()


def test_file_that_is_linked_elsewhere_is_not_written_through(path, tmp_path):
    # A second name: whoever holds it would see the other file change.
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    os.link(precious, path.parent / temporary_name(path.name, NOBODY))
    file = make(path)
    file.write(0, memoryview(b"new"))
    file.discard()
    assert precious.read_bytes() == b"precious"


def test_the_longest_is_adopted(path):
    plant(path, NOBODY, b"a")
    plant(path, DEAD, b"abc")
    plant(path, NOBODY, b"ab")
    file = make(path)
    assert content_of(file) == b"abc"
    file.discard()


def test_empty_leftover_is_as_good_as_none(path):
    plant(path, NOBODY, b"")
    file = make(path)
    assert file.adopted_bytes == 0
    file.discard()


def test_two_who_come_at_once_do_not_share_a_file(path):
    plant(path, NOBODY)
    first, second = make(path), make(path)
    assert [first.adopted_bytes, second.adopted_bytes] == [7, 0]
    first.write(0, memoryview(b"first.."))
    second.write(0, memoryview(b"second"))
    first.commit()
    assert path.read_bytes() == b"first.."
    second.commit()
    assert path.read_bytes() == b"second"
    assert beside(path) == []


@pytest.mark.parametrize(
    ("operation", "n", "error"),
    [
        ("names", 1, KeyboardInterrupt()),
        ("reopen", 2, KeyboardInterrupt()),
        ("rename", 1, KeyboardInterrupt()),
        ("unlink", 1, KeyboardInterrupt()),
        ("close", 1, KeyboardInterrupt()),
        ("close", 1, refused(errno.EIO)),
    ],
)
def test_a_fault_while_taking_up_costs_nothing_of_what_is_there(path, operation, n, error):
    plant(path, NOBODY, b"longest")
    plant(path, NOBODY, b"long")
    is_done = operation not in ("names", "reopen")
    disk = Failing(operation, error, n=n, done=is_done)
    try:
        file = make(path, disk=disk)
    except KeyboardInterrupt:
        assert descriptors_of(path.parent) == 0
        file = make(path)
    assert content_of(file) == b"longest"
    file.discard()
    assert beside(path) == []


def test_who_loses_the_race_for_the_name_begins_anew(path):
    class Slow(PosixDisk):
        def rename(self, directory, old, new):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(old, dir_fd=directory)  # somebody else was here
            super().rename(directory, old, new)

    plant(path, NOBODY)
    file = make(path, disk=Slow())
    assert file.adopted_bytes == 0
    file.discard()
    assert beside(path) == []


def test_forked_child_removes_and_keeps_nothing(path):
    file = make(path)
    file.write(0, memoryview(b"abc"))
    before = beside(path)
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            file.keep()
            file.discard()
        os._exit(0)
    os.waitpid(pid, 0)
    assert beside(path) == before
    file.commit()
    assert path.read_bytes() == b"abc"


def test_a_forked_child_does_not_hold_what_its_parent_let_go_of(path):
    """A lock belongs to the open file, which the child has as well."""
    gate, opened = os.pipe()
    file = make(path)
    file.write(0, memoryview(b"abc"))
    pid = os.fork()
    if pid == 0:
        os.close(opened)
        os.read(gate, 1)  # as long as the parent needs
        os._exit(0)
    file.keep()
    again = make(path)
    adopted = again.adopted_bytes
    again.discard()
    os.close(opened)
    os.waitpid(pid, 0)
    os.close(gate)
    assert adopted == 3


def test_reading_what_was_written(path):
    file = make(path)
    file.write(5, memoryview(b"abc"))
    assert read(file, 0, 8) is not None
    assert read(file, 0, 9) is None
    assert file.allocated_bytes() >= 3
    file.truncate(6)
    assert content_of(file) == b"\0\0\0\0\0a"
    file.discard()
