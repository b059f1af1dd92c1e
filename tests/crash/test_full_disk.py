"""A6, A7, A8: disks that are full, or that may not be written.

Real file systems of a few megabytes in memory (root), and limits of the process (everybody). What
is known not to fit is refused before anything is made for it; what turns out not to fit leaves
nothing behind.
"""

import errno
import json
import os

import numpy as np
import pytest

import weighlock
from conftest import needs_root
from crash.disks import PlainDisk
from crash.saves import NEW, OLD, SHARD_BYTES, WAYS, beside, put_old, seen, streamed
from weighlock.disk.effects import PosixDisk
from weighlock.errors import DiskError, NoSpace

pytest_plugins = ["crash.fixtures"]

MB = 1024 * 1024


class Asked:
    """Tensors of one megabyte, and how many of them were asked for."""

    def __init__(self, count):
        self.count = count
        self.asked = 0
        self.specs = [(f"t{n}", "F32", (MB // 4,)) for n in range(count)]

    def items(self):
        return iter(self)

    def __iter__(self):
        for n in range(self.count):
            self.asked += 1
            yield f"t{n}", np.full(MB // 4, n, np.float32)


@pytest.fixture
def small_disk(tmpfs):
    """Eight megabytes, with an old file on it."""
    disk = tmpfs("size=8m")
    put_old(disk.path / "model")
    return disk


def unchanged(directory):
    """Only the old file is there, and every byte that was free is free again."""
    path = directory / "model"
    return seen(path) == "old" and beside(path) == [] and free(directory) >= 8 * MB - 64 * 1024


def free(directory):
    room = os.statvfs(directory)
    return room.f_bavail * room.f_frsize


# --- A6: it turns out not to fit ---


@needs_root
@pytest.mark.root
@pytest.mark.parametrize("disk", [None, PlainDisk()], ids=["posix", "plain"])
def test_a_disk_that_fills_up_raises_with_both_numbers_and_leaves_nothing(
    small_disk, no_leaks, disk
):
    tensors = Asked(20)
    with pytest.raises(NoSpace) as raised:
        streamed(small_disk.path / "model", disk, tensors)
    assert raised.value.errno == errno.ENOSPC
    assert 0 < raised.value.wanted_bytes <= MB
    assert raised.value.free_bytes < raised.value.wanted_bytes
    assert str(small_disk.path / "model") in str(raised.value)
    assert 7 <= tensors.asked <= 8  # nothing is made for a file that is given up
    assert unchanged(small_disk.path)


@needs_root
@pytest.mark.root
def test_a_disk_that_fills_up_between_shards_leaves_no_shard(small_disk, no_leaks):
    tensors = Asked(20)
    with pytest.raises(NoSpace):
        weighlock.save(small_disk.path / "new", tensors, max_shard_bytes=2 * MB)
    assert tensors.asked <= 8
    assert not (small_disk.path / "new").exists()
    assert unchanged(small_disk.path)


@needs_root
@pytest.mark.root
def test_a_conversion_that_does_not_fit_is_refused_and_the_source_untouched(
    small_disk, tmp_path, weighlock_command, no_leaks
):
    source = tmp_path / "source.safetensors"
    weighlock.save(source, dict(Asked(20)))
    before = source.read_bytes()
    result = weighlock_command("convert", source, small_disk.path / "model", "--force")
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "no space" in result.stderr
    assert f"{20 * MB:,}"[:5] in result.stderr
    assert source.read_bytes() == before
    assert unchanged(small_disk.path)


@needs_root
@pytest.mark.root
def test_a_copy_within_the_disk_that_fills_it_leaves_nothing(tmpfs, no_leaks):
    """Copies in the kernel fail in their own way; their room is known, but was taken meanwhile."""
    disk = tmpfs("size=8m").path
    weighlock.save(disk / "source.safetensors", dict(Asked(3)))
    ballast = disk / "ballast"

    class Meanwhile(PosixDisk):
        def copy(self, *arguments):
            with open(ballast, "wb", buffering=0) as file:
                while file.tell() < 3 * MB:
                    file.write(bytes(MB))
            return super().copy(*arguments)

    with weighlock.open(disk / "source.safetensors") as catalog:
        specs = [ref.spec for ref in catalog.values()]
        writer = weighlock.Writer(disk / "model", specs, disk=Meanwhile())
        with pytest.raises(NoSpace) as raised:
            writer.copy_all(catalog.values())
    assert raised.value.wanted_bytes == 3 * MB
    ballast.unlink()
    assert sorted(os.listdir(disk)) == ["source.safetensors"]
    assert free(disk) > 4 * MB


@needs_root
@pytest.mark.root
def test_a_header_that_no_longer_fits_leaves_nothing(tmpfs, no_leaks):
    """The room kept for the header is too small, and there is no room to move the data to."""
    disk = tmpfs("size=8m").path
    writer = weighlock.Writer(disk / "model", header_bytes=64, disk=PlainDisk())
    for name, array in Asked(5):
        writer.write(name, array)
    with pytest.raises(NoSpace) as raised:
        writer.finish()
    assert raised.value.wanted_bytes > 5 * MB
    assert os.listdir(disk) == []
    assert free(disk) == 8 * MB


# --- A7: it is known not to fit ---


@needs_root
@pytest.mark.root
@pytest.mark.parametrize("shards", [None, 2 * MB])
def test_what_is_known_not_to_fit_is_refused_before_anything_is_asked_for(
    small_disk, no_leaks, shards
):
    tensors = Asked(20)
    path = small_disk.path / ("model" if shards is None else "new")
    with pytest.raises(NoSpace) as raised:
        weighlock.save(path, iter(tensors), tensors.specs, max_shard_bytes=shards)
    assert tensors.asked == 0
    assert 20 * MB <= raised.value.wanted_bytes < 21 * MB
    assert 7 * MB < raised.value.free_bytes <= 8 * MB
    assert unchanged(small_disk.path)


@needs_root
@pytest.mark.root
@pytest.mark.parametrize("shards", [None, 2 * MB])
def test_a_disk_without_a_free_byte_is_refused_before_anything_is_asked_for(
    tmpfs, no_leaks, shards
):
    disk = tmpfs("size=1m").path
    with open(disk / "ballast", "wb") as ballast:
        ballast.write(bytes(MB))
    assert free(disk) == 0
    tensors = Asked(2)
    with pytest.raises(NoSpace) as raised:
        weighlock.save(disk / "model", iter(tensors), tensors.specs, max_shard_bytes=shards)
    assert tensors.asked == 0
    assert raised.value.free_bytes == 0
    assert os.listdir(disk) == ["ballast"]


@needs_root
@pytest.mark.root
def test_what_just_fits_is_written(tmpfs, no_leaks):
    disk = tmpfs("size=8m").path
    tensors = Asked(7)
    weighlock.save(disk / "model", iter(tensors), tensors.specs)
    with weighlock.open(disk / "model") as catalog:
        assert [ref.load()[0] for ref in catalog.values()] == list(range(7))


@needs_root
@pytest.mark.root
def test_a_disk_that_does_not_know_how_much_is_free_is_not_taken_for_full(tmpfs, no_leaks):
    """A file system without a bound says that it has no blocks at all."""
    disk = tmpfs("size=0").path
    assert (free(disk), os.statvfs(disk).f_blocks) == (0, 0)
    weighlock.save(disk / "model", NEW)
    weighlock.save(disk / "new", NEW, max_shard_bytes=SHARD_BYTES)
    assert seen(disk / "model") == seen(disk / "new") == "new"


# --- A8: it may not be written ---


@needs_root
@pytest.mark.root
@pytest.mark.parametrize("way", WAYS)
def test_a_disk_without_inodes_says_that_it_is_full(tmpfs, way, child):
    disk = tmpfs("size=8m,nr_inodes=6").path
    put_old(disk / "model")
    weighlock.save(disk / "source.safetensors", NEW)
    while os.statvfs(disk).f_ffree:
        (disk / f"ballast{os.statvfs(disk).f_ffree}").touch()
    before = sorted(os.listdir(disk))
    path = disk / ("new" if way.startswith("sharded") else "model")
    with pytest.raises(NoSpace) as raised:
        WAYS[way](path)
    assert raised.value.errno == errno.ENOSPC
    assert "0 bytes are needed" not in str(raised.value)  # bytes are not what is missing
    assert sorted(os.listdir(disk)) == before
    assert seen(disk / "model") == "old"


@needs_root
@pytest.mark.root
@pytest.mark.parametrize("way", WAYS)
def test_a_disk_that_is_mounted_read_only_is_a_disk_error(tmpfs, no_leaks, way):
    disk = tmpfs("size=8m")
    put_old(disk.path / "model")
    weighlock.save(disk.path / "source.safetensors", NEW)
    disk.remount("ro")
    path = disk.path / ("new" if way.startswith("sharded") else "model")
    with pytest.raises(DiskError) as raised:
        WAYS[way](path)
    assert raised.value.errno == errno.EROFS
    assert not isinstance(raised.value, NoSpace)
    assert str(path) in str(raised.value)
    assert seen(disk.path / "model") == "old"


@needs_root
@pytest.mark.root
@pytest.mark.parametrize("way", WAYS)
def test_a_directory_of_somebody_else_is_a_disk_error(tmp_path, child, way, let_others_in):
    """The child runs as nobody; the directory lets everybody look and nobody write."""
    place = tmp_path / "theirs"
    place.mkdir()
    put_old(place / "model")
    weighlock.save(place / "source.safetensors", NEW)
    place.chmod(0o755)
    let_others_in(tmp_path)
    path = place / ("new" if way.startswith("sharded") else "model")
    with child(save=way, path=path, user=65534) as saver:
        said = json.loads(saver.next())
    assert (said["raised"], said["errno"]) == ("DiskError", errno.EACCES)
    assert str(path) in said["says"]
    assert seen(place / "model") == "old"
    assert beside(place / "model") == []


@pytest.mark.parametrize("way", WAYS)
def test_a_file_larger_than_the_process_may_write_is_a_disk_error(tmp_path, child, way):
    path = tmp_path / ("new" if way.startswith("sharded") else "model")
    put_old(tmp_path / "model")
    weighlock.save(tmp_path / "source.safetensors", NEW)
    with child(save=way, path=path, limits={"FSIZE": 1000}) as saver:
        said = json.loads(saver.next())
    assert (said["raised"], said["errno"]) == ("DiskError", errno.EFBIG)
    assert seen(tmp_path / "model") == "old"
    assert set(beside(tmp_path / "model")) == set()


@pytest.mark.parametrize("way", WAYS)
def test_a_process_without_descriptors_gets_a_disk_error(tmp_path, child, way):
    """For every number of descriptors that is too small: some error, nothing left."""
    put_old(tmp_path / "model")
    weighlock.save(tmp_path / "source.safetensors", NEW)
    path = tmp_path / ("new" if way.startswith("sharded") else "model")
    refused = 0
    for count in range(4, 20):
        with child(save=way, path=path, limits={"NOFILE": count}) as saver:
            said = saver.next()
        assert beside(tmp_path / "model") in ([], ["new"]), count
        if said == "done":
            break
        assert json.loads(said)["errno"] == errno.EMFILE, said
        assert seen(path) == ("old" if path.name == "model" else "absent")
        refused += 1
    assert said == "done"
    assert seen(path) == "new"
    assert refused >= 2


@pytest.mark.parametrize("way", WAYS)
def test_a_directory_that_does_not_exist_is_named(tmp_path, no_leaks, way):
    path = tmp_path / "none" / "model"
    with pytest.raises((DiskError, weighlock.WeighlockError), match="none"):
        WAYS[way](path)
    assert os.listdir(tmp_path) == []


def test_a_refused_save_leaves_the_source_as_it_was(tmp_path, weighlock_command):
    source = tmp_path / "source.safetensors"
    weighlock.save(source, OLD)
    status, content = source.stat(), source.read_bytes()
    result = weighlock_command(
        "convert", source, tmp_path / "none" / "model", "--max-shard-size", SHARD_BYTES
    )
    assert result.returncode == 1
    assert "none" in result.stderr
    assert (source.stat().st_mtime_ns, source.read_bytes()) == (status.st_mtime_ns, content)
