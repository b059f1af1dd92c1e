"""A12: the destination is a link or a directory, or becomes one, or its directory goes away.

A save replaces a name in the directory it has opened. It never writes through a link, and never
into a directory that took the place of the one it was given.
"""

import contextlib
import os

import pytest

import weighlock
from crash.disks import NamedDisk, PlainDisk
from crash.saves import NEW, SHARD_BYTES, SHARDED, SINGLE, WAYS, beside, put_old, seen
from weighlock.errors import DiskError

DISKS = {"posix": None, "named": NamedDisk(), "plain": PlainDisk()}


@pytest.fixture(params=DISKS)
def disk(request):
    return DISKS[request.param]


@pytest.fixture
def elsewhere(tmp_path):
    """A directory the destination is not in, with an old file and an empty directory."""
    place = tmp_path / "elsewhere"
    (place / "directory").mkdir(parents=True)
    put_old(place / "file")
    return place


@pytest.fixture
def here(tmp_path):
    place = tmp_path / "here"
    place.mkdir()
    return place


def unharmed(elsewhere):
    return (
        seen(elsewhere / "file") == "old"
        and sorted(os.listdir(elsewhere)) == ["directory", "file"]
        and os.listdir(elsewhere / "directory") == []
    )


def writing(path, disk, **options):
    """A writer that has everything and is not finished."""
    writer = weighlock.Writer(path, disk=disk, **options)
    for name, array in NEW.items():
        writer.write(name, array)
    return writer


# --- what is there before ---


@pytest.mark.parametrize("way", SINGLE)
def test_a_link_is_replaced_and_what_it_points_to_is_not_touched(
    here, elsewhere, no_leaks, way, disk
):
    link = here / "model"
    for target in ("file", "directory", "none"):
        link.symlink_to(elsewhere / target)
        SINGLE[way](link, disk)
        assert not link.is_symlink()
        assert seen(link) == "new"
        assert beside(link) == []
        assert unharmed(elsewhere)
        link.unlink()


def test_another_name_of_the_old_file_keeps_the_old_file(here, elsewhere, no_leaks, disk):
    os.link(elsewhere / "file", here / "model")
    SINGLE["planned"](here / "model", disk)
    assert seen(here / "model") == "new"
    assert unharmed(elsewhere)


@pytest.mark.parametrize("inside", [[], ["file"]])
@pytest.mark.parametrize("way", SINGLE)
def test_a_directory_is_not_replaced_by_a_file(here, no_leaks, way, inside):
    (here / "model").mkdir()
    for name in inside:
        (here / "model" / name).touch()
    with pytest.raises(DiskError, match="directory"):
        SINGLE[way](here / "model")
    assert os.listdir(here / "model") == inside
    assert beside(here / "model") == []


@pytest.mark.parametrize("way", WAYS)
def test_what_is_no_file_at_all_is_not_replaced(here, no_leaks, way):
    """A device, say, by root: `/dev/null` would be a file ever after. A pipe stands for it here."""
    os.mkfifo(here / "model")
    with pytest.raises(DiskError, match="model"):
        WAYS[way](here / "model")
    assert (here / "model").is_fifo()
    assert beside(here / "model") == []


@pytest.mark.parametrize("name", ["", ".", "..", "model/", "model/."])
def test_a_path_that_can_only_be_a_directory_is_refused(here, no_leaks, name):
    with pytest.raises(DiskError):
        weighlock.save(os.path.join(here, name), NEW)
    assert os.listdir(here) == []


@pytest.mark.parametrize("way", SHARDED)
def test_an_empty_directory_is_replaced_by_a_sharded_save(here, no_leaks, way):
    (here / "model").mkdir()
    SHARDED[way](here / "model")
    assert seen(here / "model") == "new"


@pytest.mark.parametrize(
    "kind", ["file", "link to a file", "link to a directory", "link to a ghost"]
)
@pytest.mark.parametrize("way", SHARDED)
def test_what_is_not_an_empty_directory_is_not_replaced_by_a_sharded_save(
    here, elsewhere, no_leaks, way, kind
):
    path = here / "model"
    if kind == "file":
        put_old(path)
    else:
        path.symlink_to(
            elsewhere / {"a file": "file", "a directory": "directory"}.get(kind[8:], "none")
        )
    with pytest.raises(DiskError, match="exists"):
        SHARDED[way](path)
    assert path.is_symlink() == (kind != "file")
    assert beside(path) == []
    assert unharmed(elsewhere)


def test_a_directory_with_something_in_it_is_not_replaced_by_a_sharded_save(here, no_leaks):
    (here / "model").mkdir()
    (here / "model" / "precious").write_text("text")
    with pytest.raises(DiskError, match="empty"):
        weighlock.save(here / "model", NEW, max_shard_bytes=SHARD_BYTES)
    assert (here / "model" / "precious").read_text() == "text"
    assert beside(here / "model") == []


# --- what becomes of it meanwhile ---


@pytest.mark.parametrize("header_bytes", [64, 4096])
def test_a_link_that_appears_meanwhile_is_replaced(here, elsewhere, no_leaks, disk, header_bytes):
    for target in ("file", "directory", "none"):
        writer = writing(here / "model", disk, header_bytes=header_bytes)
        (here / "model").symlink_to(elsewhere / target)
        writer.finish()
        assert not (here / "model").is_symlink()
        assert seen(here / "model") == "new"
        assert unharmed(elsewhere)
        (here / "model").unlink()


@pytest.mark.parametrize("header_bytes", [64, 4096])
def test_a_directory_that_appears_meanwhile_is_not_replaced(here, no_leaks, disk, header_bytes):
    writer = writing(here / "model", disk, header_bytes=header_bytes)
    (here / "model").mkdir()
    with pytest.raises(DiskError, match="directory"):
        writer.finish()
    assert os.listdir(here) == ["model"]
    assert os.listdir(here / "model") == []


def test_an_old_file_that_goes_away_meanwhile_does_not_matter(here, no_leaks, disk):
    put_old(here / "model")
    writer = writing(here / "model", disk)
    (here / "model").unlink()
    writer.finish()
    assert seen(here / "model") == "new"
    assert beside(here / "model") == []


@pytest.mark.parametrize("header_bytes", [64, 4096])
def test_a_directory_that_is_removed_meanwhile_is_told(tmp_path, no_leaks, header_bytes):
    place = tmp_path / "place"
    place.mkdir()
    writer = writing(place / "model", None, header_bytes=header_bytes)
    place.rmdir()
    with pytest.raises(DiskError, match="model"):
        writer.finish()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("header_bytes", [64, 4096])
def test_a_directory_that_is_moved_meanwhile_gets_the_file_where_it_is_now(
    tmp_path, here, no_leaks, disk, header_bytes
):
    """The directory that was opened is meant, whatever has its name now."""
    writer = writing(here / "model", disk, header_bytes=header_bytes)
    here.rename(tmp_path / "moved")
    here.mkdir()
    writer.finish()
    assert os.listdir(here) == []
    assert seen(tmp_path / "moved" / "model") == "new"
    assert beside(tmp_path / "moved" / "model") == []


@pytest.mark.parametrize("header_bytes", [64, 4096])
def test_a_directory_that_becomes_a_link_meanwhile_is_not_followed(
    tmp_path, here, elsewhere, no_leaks, disk, header_bytes
):
    writer = writing(here / "model", disk, header_bytes=header_bytes)
    here.rename(tmp_path / "moved")
    here.symlink_to(elsewhere)
    writer.finish()
    assert unharmed(elsewhere)
    assert seen(tmp_path / "moved" / "model") == "new"


@pytest.mark.parametrize("header_bytes", [64, 4096])
def test_a_relative_path_is_meant_where_the_process_was_at_the_beginning(
    here, elsewhere, no_leaks, monkeypatch, disk, header_bytes
):
    monkeypatch.chdir(here)
    writer = writing("model", disk, header_bytes=header_bytes)
    monkeypatch.chdir(elsewhere)
    writer.finish()
    assert unharmed(elsewhere)
    assert seen(here / "model") == "new"
    assert beside(here / "model") == []


def sharded_with(path, at, change, specs=None):
    """Save into shards, with something changed before a tensor is given."""

    def tensors():
        for number, item in enumerate(NEW.items()):
            if number == at:
                change()
            yield item

    weighlock.save(path, tensors(), specs, max_shard_bytes=SHARD_BYTES)


@pytest.mark.parametrize("at", range(len(NEW)))
@pytest.mark.parametrize("kind", ["file", "link", "full directory"])
def test_what_appears_meanwhile_is_not_replaced_by_a_sharded_save(
    here, elsewhere, no_leaks, kind, at
):
    path = here / "model"

    def appear():
        if kind == "file":
            put_old(path)
        elif kind == "link":
            path.symlink_to(elsewhere / "directory")
        else:
            path.mkdir()
            put_old(path / "file")

    with pytest.raises(DiskError, match="model"):
        sharded_with(path, at, appear)
    assert beside(path) == []
    assert unharmed(elsewhere)
    assert path.is_symlink() == (kind == "link")
    if kind != "link":
        assert seen(path if kind == "file" else path / "file") == "old"


@pytest.mark.parametrize("at", range(len(NEW)))
def test_a_directory_that_becomes_a_link_meanwhile_gets_no_shard(
    tmp_path, here, elsewhere, no_leaks, at
):
    """Shards have paths: the save may fail, or put the whole where the directory is now."""

    def replace():
        here.rename(tmp_path / "moved")
        here.symlink_to(elsewhere)

    with contextlib.suppress(DiskError):
        sharded_with(here / "model", at, replace)
    assert seen(tmp_path / "moved" / "model") in ("new", "absent")
    assert beside(tmp_path / "moved" / "model") == []
    assert unharmed(elsewhere)


@pytest.mark.parametrize("at", range(len(NEW)))
def test_a_relative_path_of_a_sharded_save_is_meant_where_the_process_was(
    here, elsewhere, no_leaks, monkeypatch, at
):
    monkeypatch.chdir(here)
    sharded_with("model", at, lambda: monkeypatch.chdir(elsewhere))
    assert seen(here / "model") == "new"
    assert unharmed(elsewhere)
