"""Files that appear whole or not at all."""

import itertools
import os

import pytest
from unit_samples import descriptors_of, quick_collections

from weighlock.disk.atomic import AtomicFile
from weighlock.disk.effects import PosixDisk
from weighlock.errors import DiskError, NoSpace, NotDurable, ShortRead

__all__ = ["quick_collections"]  # a fixture of this module

pytestmark = pytest.mark.usefixtures("no_leaks")


class Named(PosixDisk):
    """A disk without unnamed files."""

    def create_unnamed(self, directory):
        return None


@pytest.fixture(params=[PosixDisk, Named], ids=["unnamed", "named"])
def disk(request):
    return request.param()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file"


def names(path):
    return [entry.name for entry in path.parent.iterdir()]


def test_nothing_is_seen_before_the_commit(path, disk):
    path.write_bytes(b"before")
    with AtomicFile(path, disk=disk) as file:
        file.write(3, memoryview(b"def"))
        file.write(0, memoryview(b"abc"))
        assert path.read_bytes() == b"before"
    assert path.read_bytes() == b"abcdef"
    assert names(path) == ["file"]


def test_an_exception_discards(path, disk):
    path.write_bytes(b"before")
    try:
        with AtomicFile(path, disk=disk) as file:
            file.write(0, memoryview(b"abc"))
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert path.read_bytes() == b"before"
    assert names(path) == ["file"]


def test_a_file_is_committed_once(path, disk):
    file = AtomicFile(path, disk=disk)
    file.commit()
    with pytest.raises(DiskError, match="already committed or discarded"):
        file.commit()
    file.discard()
    assert path.read_bytes() == b""
    other = AtomicFile(path, disk=disk)
    other.discard()
    with pytest.raises(DiskError, match="already committed or discarded"):
        other.commit()


def test_copying_between_files(path, disk, tmp_path):
    source = tmp_path / "source"
    source.write_bytes(b"0123456789")
    fd = os.open(source, os.O_RDONLY)
    steps = []
    with AtomicFile(path, disk=disk) as file:
        if file.copy(fd, 2, 1, 5, steps.append):
            assert sum(steps) == 5
        else:
            file.write(1, memoryview(b"23456"))
    assert path.read_bytes() == b"\x0023456"
    file = AtomicFile(path, disk=disk)
    with pytest.raises(ShortRead) as caught:
        file.copy(fd, 8, 0, 5)
    assert (caught.value.wanted, caught.value.got) == (5, 2)
    file.discard()
    os.close(fd)


def test_room_is_made_in_whole_blocks_or_not_at_all(path, disk):
    content = bytes(range(256)) * 64
    with AtomicFile(path, durable=False, disk=disk) as file:
        file.write(0, memoryview(content))
        inserted = file.insert(0, 100)
        assert inserted == 0 or inserted >= 100
        assert file.insert(17, 100) == 0
    assert path.read_bytes()[inserted:] == content


def test_more_than_fits_is_refused_at_once(path, disk):
    file = AtomicFile(path, disk=disk)
    file.reserve(0)
    with pytest.raises(NoSpace) as caught:
        file.reserve(1 << 60)
    assert caught.value.wanted_bytes == 1 << 60
    assert caught.value.free_bytes < 1 << 60
    file.discard()


class Failing(PosixDisk):
    """The machine's disk, on which one kind of call fails."""

    def __init__(self, call, number):
        self.call = call
        self.number = number

    def __getattribute__(self, name):
        if name == object.__getattribute__(self, "__dict__").get("call"):
            number = self.number

            def fail(*arguments):
                raise OSError(number, os.strerror(number))

            return fail
        return super().__getattribute__(name)


@pytest.mark.parametrize(
    ("call", "number", "error"),
    [
        ("create_unnamed", 13, DiskError),
        ("write", 5, DiskError),
        ("write", 28, NoSpace),
        ("write", 122, NoSpace),
        ("sync", 5, NotDurable),
        ("link", 1, DiskError),
        ("rename", 5, DiskError),
    ],
)
def test_what_the_disk_says_names_the_destination_which_stays(path, call, number, error):
    path.write_bytes(b"before")

    def write():
        with AtomicFile(path, disk=Failing(call, number)) as file:
            file.write(0, memoryview(b"abc"))

    with pytest.raises(
        error, match=os.strerror(number) if error is not NoSpace else "no space"
    ) as e:
        write()
    assert e.value.errno == number
    assert str(path) in str(e.value)
    assert path.read_bytes() == b"before"
    assert names(path) == ["file"]


def test_without_durability_nothing_is_synced(path):
    with AtomicFile(path, durable=False, disk=Failing("sync", 5)) as file:
        file.write(0, memoryview(b"abc"))
    assert path.read_bytes() == b"abc"


def test_a_disk_that_takes_little_at_a_time_gets_it_all(path):
    class Slow(PosixDisk):
        def write(self, fd, parts, offset):
            return os.pwrite(fd, parts[0][:3], offset)

    with AtomicFile(path, disk=Slow()) as file:
        file.write(5, memoryview(b"0123"), memoryview(b""), memoryview(b"456"), memoryview(b"789"))
    assert path.read_bytes() == bytes(5) + b"0123456789"


def test_many_parts_are_written_one_after_the_other(path):
    """More than one call takes: IOV_MAX is 1024."""
    parts = [memoryview(bytes([number % 251]) * (number % 7)) for number in range(5000)]
    with AtomicFile(path) as file:
        file.write(3, *parts)
    assert path.read_bytes() == bytes(3) + b"".join(parts)


def test_a_disk_that_takes_nothing_is_an_error(path):
    class Stuck(PosixDisk):
        def write(self, fd, parts, offset):
            return 0

    file = AtomicFile(path, disk=Stuck())
    with pytest.raises(DiskError, match="took 0 of 3 bytes"):
        file.write(0, memoryview(b"abc"))
    file.discard()


class Interrupted:
    """A lock with whose n-th end Ctrl-C comes."""

    def __init__(self, lock, n):
        self.lock = lock
        self.left = n

    def __enter__(self):
        self.lock.acquire()

    def __exit__(self, *_):
        self.lock.release()
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def test_a_signal_between_any_two_steps_leaves_nothing_in_use(path, disk):
    path.write_bytes(b"before")
    for n in itertools.count(1):
        file = AtomicFile(path, disk=disk)
        file._lock = lock = Interrupted(file._lock, n)
        try:
            file.write(0, memoryview(b"abc"))
            file.commit()
        except KeyboardInterrupt:
            file.discard()
        assert descriptors_of(path.parent) == 0, n
        assert names(path) == ["file"], n
        if lock.left > 0:
            lock.left = 0  # none comes any more
            break
        assert path.read_bytes() in (b"before", b"abc")
        path.write_bytes(b"before")
    assert n > 4
    assert path.read_bytes() == b"abc"


FORKED = """
import os, sys
from weighlock.disk.atomic import AtomicFile
from weighlock.disk.effects import PosixDisk


class Named(PosixDisk):
    def create_unnamed(self, directory):
        return None


file = AtomicFile(sys.argv[1], disk=Named())
file.write(0, memoryview(b"abc"))
pid = os.fork()
if pid == 0:
    file.discard()  # the child's copy is not the owner
    os._exit(0)
os.waitpid(pid, 0)
file.commit()
"""


def test_a_forked_child_does_not_remove_its_parent_s_file(path, run_python):
    run_python(FORKED, path)
    assert path.read_bytes() == b"abc"
    assert names(path) == ["file"]
