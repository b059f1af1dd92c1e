"""Directories that appear whole or not at all."""

import os
import signal
import subprocess

import pytest
from unit_samples import quick_collections

from conftest import needs_root
from weighlock.disk.atomic import AtomicFile
from weighlock.disk.directory import AtomicDirectory
from weighlock.disk.effects import PosixDisk
from weighlock.errors import DiskError, NoSpace

__all__ = ["quick_collections"]  # a fixture of this module

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model"


def names(path):
    return sorted(entry.name for entry in path.iterdir())


def put(directory, name, content):
    with AtomicFile(directory.path_of(name)) as file:
        file.write(0, memoryview(content))


@pytest.mark.parametrize("ending", ["", "/"])
@pytest.mark.parametrize("exists", [True, False])
def test_it_appears_with_all_its_files(path, ending, exists):
    if exists:
        path.mkdir()
    with AtomicDirectory(f"{path}{ending}") as directory:
        put(directory, "first", b"1")
        put(directory, "second", b"2")
        directory.rename("second", "other")
        assert not exists or names(path) == []
    assert names(path) == ["first", "other"]
    assert (path / "other").read_bytes() == b"2"
    assert names(path.parent) == ["model"]


def test_an_exception_removes_it(path):
    try:
        with AtomicDirectory(path) as directory:
            put(directory, "first", b"1")
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert names(path.parent) == []


@pytest.mark.parametrize("kind", ["file", "full", "link", "broken link"])
def test_what_exists_is_not_replaced(path, kind):
    if kind == "file":
        path.write_bytes(b"before")
    elif kind == "full":
        path.mkdir()
        (path / "before").write_bytes(b"")
    else:
        path.symlink_to(path.parent if kind == "link" else "nowhere")
    with pytest.raises(DiskError, match="not an empty directory"):
        AtomicDirectory(path)
    assert os.path.lexists(path)
    assert names(path.parent) == ["model"]


def test_a_directory_filled_meanwhile_is_kept(path):
    def write():
        with AtomicDirectory(path) as directory:
            put(directory, "first", b"1")
            path.mkdir()
            (path / "other").write_bytes(b"before")

    with pytest.raises(DiskError, match="cannot be put in place"):
        write()
    assert names(path) == ["other"]
    assert names(path.parent) == ["model"]


class Interrupted(PosixDisk):
    """The machine's disk, on which Ctrl-C comes with the end of a rename."""

    def rename(self, directory, old, new):
        super().rename(directory, old, new)
        raise KeyboardInterrupt


def test_a_signal_just_after_it_was_put_in_place_removes_nothing(path):
    directory = AtomicDirectory(path, disk=Interrupted())
    put(directory, "first", b"1")
    with pytest.raises(KeyboardInterrupt):
        directory.commit()
    directory.discard()
    assert names(path) == ["first"]
    assert names(path.parent) == ["model"]


def test_a_signal_just_after_a_file_was_renamed_inside_leaves_nothing(path):
    def write():
        with AtomicDirectory(path, disk=Interrupted()) as directory:
            put(directory, "first", b"1")
            directory.rename("first", "second")

    with pytest.raises(KeyboardInterrupt):
        write()
    assert names(path.parent) == []


ENDED = """
import os, signal, sys
from weighlock.disk.directory import AtomicDirectory
from weighlock.disk.effects import PosixDisk


class Ended(PosixDisk):
    def rename(self, directory, old, new):
        super().rename(directory, old, new)
        os.kill(os.getpid(), signal.SIGTERM)


directory = AtomicDirectory(sys.argv[1], disk=Ended())
with open(directory.path_of("first"), "w") as file:
    file.write("1")
directory.commit()
"""


def test_a_process_told_to_end_just_after_the_rename_removes_nothing(path, run_python):
    assert run_python(ENDED, path, check=False).returncode == -signal.SIGTERM
    assert names(path) == ["first"]
    assert names(path.parent) == ["model"]


def test_a_forked_child_does_not_lock_what_is_in_place(path):
    gate, opened = os.pipe()
    directory = AtomicDirectory(path)
    pid = os.fork()
    if pid == 0:
        os.close(opened)
        os.read(gate, 1)  # as long as the parent needs
        os._exit(0)
    directory.commit()
    disk = PosixDisk()
    fd = disk.open_directory(str(path))
    could_lock = disk.lock(fd)
    disk.close(fd)
    os.close(opened)
    os.waitpid(pid, 0)
    os.close(gate)
    assert could_lock


@needs_root
@pytest.mark.root
@pytest.mark.parametrize("kind", ["tmpfs", "bind"])
def test_a_mount_point_is_refused_before_anything_is_written(path, kind):
    path.mkdir()
    (path.parent / "other").mkdir()
    how = {"tmpfs": ["-t", "tmpfs", "tmpfs"], "bind": ["--bind", path.parent / "other"]}[kind]
    mounted = subprocess.run(["mount", *how, path], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount here: {mounted.stderr.strip()}")
    try:
        with pytest.raises(DiskError, match=r"a disk is mounted.*name a directory inside"):
            AtomicDirectory(path)
        with AtomicDirectory(path / "model") as directory:
            put(directory, "first", b"1")
        assert names(path / "model") == ["first"]
        assert names(path.parent) == ["model", "other"]
    finally:
        subprocess.run(["umount", path], check=True)


def test_it_is_committed_once(path):
    directory = AtomicDirectory(path)
    directory.commit()
    with pytest.raises(DiskError, match="already committed or discarded"):
        directory.commit()
    with pytest.raises(DiskError, match="already committed or discarded"):
        directory.path_of("a")
    directory.discard()
    assert names(path) == []


def test_more_than_fits_is_refused(path):
    with AtomicDirectory(path) as directory, pytest.raises(NoSpace):
        directory.reserve(1 << 60)


@pytest.mark.parametrize("where", ["missing/model", ".", ".."])
def test_a_place_that_cannot_be(tmp_path, where):
    with pytest.raises(DiskError):
        AtomicDirectory(f"{tmp_path}/{where}")
    assert names(tmp_path) == []
