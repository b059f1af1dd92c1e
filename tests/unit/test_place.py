"""Directories that are made on the way: they are there after a power loss, too."""

import errno
import os

import pytest

from weighlock.disk.effects import PosixDisk
from weighlock.disk.place import make_directories
from weighlock.errors import DiskError, NotDurable

pytestmark = pytest.mark.usefixtures("no_leaks")


class Watched(PosixDisk):
    """The machine's disk: which directories were synced, and with what they held."""

    def __init__(self, number=0):
        self.number = number
        self.synced = {}

    def sync(self, fd):
        if self.number:
            raise OSError(self.number, os.strerror(self.number))
        super().sync(fd)
        self.synced[os.readlink(f"/proc/self/fd/{fd}")] = os.listdir(fd)


@pytest.mark.parametrize("ending", ["", "/", "//"])
def test_each_directory_that_is_made_is_synced_where_it_lies(tmp_path, ending):
    (tmp_path / "a").mkdir()
    disk = Watched()
    make_directories(f"{tmp_path}/a/b/c{ending}", disk)
    assert disk.synced == {f"{tmp_path}/a": ["b"], f"{tmp_path}/a/b": ["c"]}
    again = Watched()
    make_directories(f"{tmp_path}/a/b/c{ending}", again)
    assert again.synced == {}


def test_a_path_may_be_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    disk = Watched()
    make_directories("b/c", disk)
    assert disk.synced == {f"{tmp_path}": ["b"], f"{tmp_path}/b": ["c"]}


def test_directories_that_cannot_be_synced_at_all_are_tolerated(tmp_path):
    make_directories(tmp_path / "a" / "b", Watched(errno.EINVAL))
    assert os.listdir(tmp_path / "a") == ["b"]


def test_a_sync_that_fails_is_told(tmp_path):
    with pytest.raises(NotDurable, match="was made, but") as caught:
        make_directories(tmp_path / "a", Watched(errno.EIO))
    assert caught.value.errno == errno.EIO
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("name", ["file", "file/below", "nul\0"])
def test_what_cannot_be_made_is_told(tmp_path, name):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DiskError, match="cannot be made"):
        make_directories(f"{tmp_path}/{name}")
