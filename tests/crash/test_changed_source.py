"""A14: the file that is being converted changes. There is an error and no output, or the old bytes.

Never a mixture: what comes out is what was in the file when it was opened, or nothing.
"""

import os

import numpy as np
import pytest

import weighlock
from crash.disks import Around, PlainDisk
from crash.saves import NEW, SHARD_BYTES, beside, put_old, seen
from weighlock.disk.effects import PosixDisk
from weighlock.errors import ShortRead, SourceChanged

pytest_plugins = ["crash.fixtures"]


def truncate(source):
    os.truncate(source, 0)


def shorten(source):
    os.truncate(source, os.path.getsize(source) - 1)


def overwrite(source):
    """Other bytes of the same length, in place."""
    with open(source, "r+b") as file:
        file.seek(-2900, os.SEEK_END)
        file.write(b"\xee" * 2900)


def grow(source):
    with open(source, "ab") as file:
        file.write(b"more")


def replace(source):
    """Another valid file under the same name."""
    weighlock.save(source, {name: array + 1 for name, array in NEW.items()})


CHANGES = {change.__name__: change for change in (truncate, shorten, overwrite, grow, replace)}


@pytest.fixture(params=CHANGES)
def change(request):
    return CHANGES[request.param]


@pytest.fixture
def source(tmp_path):
    """A file that was last written long ago: a change shows, however coarse the clock."""
    path = tmp_path / "source.safetensors"
    weighlock.save(path, NEW)
    os.utime(path, (1, 1))
    return path


def untouched(path):
    return seen(path) == "old" and beside(path) == []


@pytest.mark.parametrize("disk", [None, PlainDisk()], ids=["by the kernel", "by reading"])
def test_a_source_that_changed_before_it_is_copied_gives_no_output(
    tmp_path, no_leaks, source, change, disk
):
    put_old(tmp_path / "model")
    with weighlock.open(source) as catalog:
        change(source)
        writer = weighlock.Writer(tmp_path / "model", disk=disk)
        with pytest.raises((SourceChanged, ShortRead), match="source"):
            writer.copy_all(catalog.values())
    assert untouched(tmp_path / "model")


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_source_that_changes_between_the_parts_of_a_copy_gives_no_output(
    tmp_path, no_leaks, source, change, at
):
    class Changing(Around):
        """Copies a kilobyte at a time, and something happens before one of them."""

        def instead(self, real, source_fd, source_offset, fd, offset, count):
            if self.calls == at:
                change(source)
            return real(source_fd, source_offset, fd, offset, min(count, 1024))

    put_old(tmp_path / "model")
    disk = Changing(PosixDisk(), "copy")
    with weighlock.open(source) as catalog:
        writer = weighlock.Writer(tmp_path / "model", disk=disk)
        with pytest.raises((SourceChanged, ShortRead), match="source"):
            writer.copy_all(catalog.values())
    assert disk.calls >= at
    assert untouched(tmp_path / "model")


@pytest.mark.parametrize("shards", [None, SHARD_BYTES])
def test_a_source_that_changes_when_the_first_bytes_have_arrived_gives_no_output(
    tmp_path, no_leaks, source, change, shards
):
    put_old(tmp_path / "model")
    path = tmp_path / ("model" if shards is None else "new")
    steps = []

    def progress(count):
        steps.append(count)
        if len(steps) == 1:
            change(source)

    with weighlock.open(source) as catalog, pytest.raises((SourceChanged, ShortRead)):
        weighlock.save(path, catalog, progress=progress, max_shard_bytes=shards)
    assert steps
    assert untouched(tmp_path / "model")


def test_a_source_that_changes_while_it_is_cast_gives_no_output(tmp_path, no_leaks, change):
    """Cast pieces pass through here, four megabytes at a time."""
    source = tmp_path / "source.safetensors"
    weighlock.save(source, {"large": np.ones(3_000_000, np.float32)})
    os.utime(source, (1, 1))
    put_old(tmp_path / "model")
    steps = []

    def progress(count):
        steps.append(count)
        if len(steps) == 1:
            change(source)

    with weighlock.open(source) as catalog:
        half = {
            "large": weighlock.tensors.convert.CastRef.of(catalog["large"], weighlock.DType.F16)
        }
        with pytest.raises((SourceChanged, ShortRead)):
            weighlock.save(tmp_path / "model", half, progress=progress)
    assert untouched(tmp_path / "model")


def test_one_of_several_sources_that_changes_gives_no_output(tmp_path, no_leaks, change):
    source = tmp_path / "source.safetensors"
    weighlock.save(source, NEW, max_shard_bytes=SHARD_BYTES)
    for name in os.listdir(source):
        os.utime(source / name, (1, 1))
    last = sorted(source.glob("*.safetensors"))[-1]
    put_old(tmp_path / "model")

    def change_last(path=last):
        if change is overwrite:
            path.write_bytes(path.read_bytes()[:-10] + b"\xee" * 10)
        else:
            change(path)

    def tensors(refs):
        yield refs[0].name, refs[0]
        change_last()
        yield from ((ref.name, ref) for ref in refs[1:])

    with weighlock.open(source) as catalog:
        refs = list(catalog.values())  # every file is opened now
        with pytest.raises((SourceChanged, ShortRead)):
            weighlock.save(tmp_path / "model", tensors(refs))
    assert untouched(tmp_path / "model")


def test_a_source_that_is_only_deleted_can_still_be_copied(tmp_path, no_leaks, source):
    with weighlock.open(source) as catalog:
        source.unlink()
        weighlock.save(tmp_path / "model", catalog)
    assert seen(tmp_path / "model") == "new"


def test_a_file_can_be_saved_over_itself(tmp_path, no_leaks, source):
    """Its bytes are all in the new file before its name is."""
    with weighlock.open(source) as catalog:
        weighlock.save(source, catalog)
    assert seen(source) == "new"
    assert sorted(os.listdir(tmp_path)) == ["source.safetensors"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "options"),
    [(change, ["--force"]) for change in CHANGES.values()]
    + [(overwrite, ["--max-shard-size", str(SHARD_BYTES)])],
)
def test_a_conversion_whose_source_changes_at_any_step_gives_the_old_bytes_or_none(
    memory_path, child, change, options
):
    """`weighlock convert`, stopped before each of its steps on the disk."""
    shards = options[0] != "--force"
    done = refused = 0
    for steps in range(1, 100):
        place = memory_path / str(steps)
        place.mkdir()
        source, path = place / "source.safetensors", place / "model"
        weighlock.save(source, NEW)
        os.utime(source, (1, 1))
        if not shards:
            put_old(path)
        with child(convert=[str(source), str(path), *options], steps=True) as saver:
            if not saver.step(steps):
                break
            change(source)
            while saver.next():
                pass
            code, complaint = saver.end(), saver.complaint()
        assert beside(path) == []
        if code == 0:
            assert seen(path) == "new"
            done += 1
        else:
            assert (code, complaint.count("\n")) == (1, 1), complaint
            assert "source.safetensors" in complaint
            assert seen(path) == ("absent" if shards else "old")
            refused += 1
    assert refused >= 3
    assert done >= 3
