"""Sweeping: only what is provably dead goes, and what is kept says why."""

import errno
import fcntl
import json
import os

import numpy as np
import pytest

import weighlock
from weighlock.disk.effects import PosixDisk
from weighlock.disk.judging import judge
from weighlock.disk.owner import NOBODY, Owner, temporary_name
from weighlock.disk.spool import PREFIX
from weighlock.errors import DiskError

pytestmark = pytest.mark.usefixtures("no_leaks")

HERE = Owner(100, "5000", "aaaaaaaa")
THEM = Owner(200, "6000", "aaaaaaaa")
BEFORE = Owner(200, "6000", "bbbbbbbb")
UNKNOWN = Owner(200, "6000", "0")


@pytest.mark.parametrize(
    ("owner", "locked", "empty", "started", "kind", "state"),
    [
        (THEM, True, False, "6000", "ext4", "alive"),
        (THEM, False, False, "6000", "ext4", "alive"),  # a file system without locks
        (THEM, True, False, "0", "ext4", "unsure"),  # a forked child, or another container
        (THEM, False, False, "0", "ext4", "dead"),
        (THEM, False, False, "7000", "ext4", "dead"),  # the number is another process's now
        (THEM, False, False, "0", "nfs4", "dead"),  # the boot is this machine's
        (BEFORE, False, False, "0", "ext4", "dead"),
        (BEFORE, False, False, "6000", "xfs", "dead"),  # the same number and tick by chance
        (BEFORE, True, False, "0", "ext4", "unsure"),
        (BEFORE, False, False, "0", "nfs4", "unsure"),
        (BEFORE, False, False, "0", "fuse.sshfs", "unsure"),
        (BEFORE, False, False, "0", "", "unsure"),
        (UNKNOWN, False, False, "0", "ext4", "unsure"),
        (UNKNOWN, False, True, "0", "ext4", "unsure"),
        (None, False, False, "0", "ext4", "unsure"),
        (None, True, True, "0", "ext4", "unsure"),
        (None, False, True, "0", "ext4", "dead"),
        (NOBODY, False, False, "0", "ext4", "dead"),
        (NOBODY, True, False, "0", "ext4", "unsure"),
    ],
)
def test_what_is_judged_how(owner, locked, empty, started, kind, state):
    found, reason = judge(
        owner, is_locked=locked, holds_nothing=empty, here=HERE, started=started, kind=kind
    )
    assert found == state, reason


def make(root, number, *, owner="99999999 1 0\n", files=1):
    """A directory as a spool leaves it."""
    path = root / f"{PREFIX}{number:032x}"
    path.mkdir(0o700)
    if owner is not None:
        (path / "owner").write_text(owner)
    for n in range(files):
        (path / f"{n:032x}").write_bytes(bytes(1000))
    return path


def gone_owner():
    """A process of this boot whose number is another one's, or nobody's, by now."""
    return Owner(os.getpid(), "1", Owner.current().boot).text()


def names(leftovers):
    return [os.path.basename(leftover.path) for leftover in leftovers]


def test_fifty_dead_spools_go_and_the_living_one_among_them_stays(tmp_path):
    dead = [make(tmp_path, n, owner=gone_owner()) for n in range(50)]
    with weighlock.Spool(tmp_path) as spool:
        catalog = weighlock.save(spool, {"w": np.ones(4)})
        dry = weighlock.sweep(tmp_path, dry_run=True)
        assert sorted(names(dry.removed)) == sorted(path.name for path in dead)
        assert all(path.exists() for path in dead)
        report = weighlock.sweep(tmp_path)
        assert report == dry
        assert os.listdir(tmp_path) == [os.path.basename(spool.path)]
        (kept,) = report.kept
        assert (kept.path, kept.state) == (spool.path, "alive")
        assert f"process {os.getpid()} is alive" in kept.reason
        assert report.removed_bytes == sum(found.nbytes for found in report.removed) > 50_000
        assert catalog["w"].load().sum() == 4
        catalog.close()
    assert weighlock.sweep(tmp_path) == weighlock.SweepReport((), ())


def test_one_of_an_earlier_boot_goes(tmp_path):
    boot = f"{int(Owner.current().boot, 16) ^ 1:08x}"
    make(tmp_path, 1, owner=Owner(os.getpid(), "1", boot).text())
    assert len(weighlock.sweep(tmp_path).removed) == 1


@pytest.mark.parametrize("owner", ["", "garbage", "1 2", "1 2 xyz\n", "-1 2 ab\n", "9" * 300, None])
def test_one_that_does_not_say_whose_it_is_stays_if_it_holds_anything(tmp_path, owner):
    full, empty = make(tmp_path, 1, owner=owner), make(tmp_path, 2, owner=owner, files=0)
    report = weighlock.sweep(tmp_path)
    assert names(report.kept) == [full.name]
    assert names(report.removed) == [empty.name]
    assert report.kept[0].state == "unsure"


def test_a_lock_that_is_held_protects(tmp_path):
    path = make(tmp_path, 1, owner=gone_owner())
    with open(path / "owner") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        report = weighlock.sweep(tmp_path)
    assert [(found.state, found.reason) for found in report.kept] == [
        ("unsure", "its lock is held, or cannot be had")
    ]
    assert path.exists()


def test_links_are_neither_followed_nor_believed(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    treasure = elsewhere / "treasure"
    treasure.write_text("dear")
    (elsewhere / "owner").write_text(gone_owner())
    root = tmp_path / "root"
    root.mkdir()
    (root / f"{PREFIX}{1:032x}").symlink_to(elsewhere)  # a spool that is a link
    inside = make(root, 2, owner=gone_owner())  # a link in a spool: the link goes, not the file
    (inside / "link").symlink_to(treasure)
    (inside / "directory").symlink_to(elsewhere)
    pretended = make(root, 3, owner=None)  # an owner that is a link
    (pretended / "owner").symlink_to(elsewhere / "owner")
    report = weighlock.sweep(root)
    assert names(report.removed) == [inside.name]
    assert len(report.kept) == 2
    assert treasure.read_text() == "dear"
    assert sorted(os.listdir(elsewhere)) == ["owner", "treasure"]


def test_what_is_no_spool_is_left_alone(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "owner").write_text(gone_owner())
    (tmp_path / f".model{PREFIX}").write_text("")
    (tmp_path / f"{PREFIX}file").write_text("")
    (tmp_path / temporary_name("a.safetensors", NOBODY)).write_text("half")
    before = sorted(os.listdir(tmp_path))
    report = weighlock.sweep(tmp_path)
    assert report.removed == ()
    assert sorted(os.listdir(tmp_path)) == before
    assert len(weighlock.sweep(tmp_path, parts=True).removed) == 1


def test_a_spool_that_holds_what_no_spool_does_is_reported(tmp_path):
    path = make(tmp_path, 1, owner=gone_owner())
    (path / "directory").mkdir()
    before = sorted(os.listdir(path))
    report = weighlock.sweep(tmp_path)
    assert report.removed == ()
    assert "holds a directory" in report.kept[0].reason
    assert sorted(os.listdir(path)) == before  # not even in part


def test_unfinished_files_go_when_that_is_asked_for(tmp_path):
    gone = Owner(os.getpid(), "1", Owner.current().boot)
    dead = [tmp_path / temporary_name(name, owner) for name in "ab" for owner in (gone, NOBODY)]
    for path in dead:
        path.write_bytes(bytes(10))
    staged = tmp_path / temporary_name("shards", gone)
    staged.mkdir()
    (staged / "model-00001.safetensors").write_bytes(bytes(10))
    living = tmp_path / temporary_name("a")
    living.write_bytes(bytes(10))
    link = tmp_path / temporary_name("c", gone)
    link.symlink_to(living)
    report = weighlock.sweep(tmp_path, parts=True)
    assert sorted(names(report.removed)) == sorted(p.name for p in (*dead, staged))
    assert report.removed_bytes == 50
    assert {*names(report.kept)} == {living.name, link.name}
    assert {*os.listdir(tmp_path)} == {living.name, link.name}
    link.unlink()
    living.unlink()


@pytest.mark.parametrize("root", ["missing", "file", "nul\0"])
def test_a_root_that_is_none_is_refused(tmp_path, root):
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError):
        weighlock.sweep(os.path.join(tmp_path, root))
    assert not (tmp_path / "missing").exists()


def test_the_command_reports_and_sweeps(tmp_path, weighlock_command):
    path = make(tmp_path, 1, owner=gone_owner())
    kept = make(tmp_path, 2, owner="?")
    first = weighlock_command("sweep", tmp_path, "--dry-run", "--json")
    facts = json.loads(first.stdout)
    assert path.exists()
    assert (facts["dry_run"], facts["removed"][0]["path"]) == (True, str(path))
    second = weighlock_command("sweep", tmp_path)
    assert (second.returncode, second.stderr) == (0, "")
    assert "1 removed" in second.stdout
    assert "does not say whose it is" in second.stdout
    assert os.listdir(tmp_path) == [kept.name]
    assert weighlock_command("sweep", tmp_path / "missing").returncode == 1


class MadeMeanwhile(PosixDisk):
    """A disk on which the maker of an empty spool goes on as soon as a sweep has looked."""

    def names(self, directory):
        found = super().names(directory)
        if not found:
            self.close(self.create(directory, "owner", 0o600))
        return found


def test_a_spool_that_is_just_being_made_is_left_alone(tmp_path):
    path = make(tmp_path, 1, owner=None, files=0)
    report = weighlock.sweep(tmp_path, disk=MadeMeanwhile())
    assert report.removed == ()
    assert "could not be removed" in report.kept[0].reason
    assert os.listdir(path) == ["owner"]


class SweptMeanwhile(PosixDisk):
    """A disk on which a sweep comes between making a spool's directory and saying whose it is."""

    def __init__(self, root, step, times):
        self.root, self.step, self.times = root, step, times

    def make_directory(self, directory, name, mode=0o777):
        super().make_directory(directory, name, mode)
        self._sweep("directory")

    def create(self, directory, name, mode=0o666):
        made = super().create(directory, name, mode)
        if name == "owner":
            self._sweep("owner")
        return made

    def _sweep(self, step):
        if self.times and step == self.step:
            self.times -= 1
            weighlock.sweep(self.root)


@pytest.mark.parametrize("times", range(4))
@pytest.mark.parametrize("step", ["directory", "owner"])
def test_a_spool_swept_while_it_is_made_is_made_again(tmp_path, step, times):
    with weighlock.Spool(tmp_path, disk=SweptMeanwhile(tmp_path, step, times)) as spool:
        assert sorted(os.listdir(spool.path)) == ["owner"]
        assert os.listdir(tmp_path) == [os.path.basename(spool.path)]
        assert weighlock.sweep(tmp_path).removed == ()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", ["shards", "file"])
def test_what_is_being_written_is_left_alone_by_who_cannot_see_its_process(
    tmp_path, kind, monkeypatch
):
    """In another container the same machine shows other processes."""
    arrays = {f"t{n}": np.zeros(100, np.float32) for n in range(3)}
    reports = []

    def swept():
        for name, array in arrays.items():
            yield name, array
            with monkeypatch.context() as elsewhere:
                elsewhere.setattr("weighlock.disk.sweep.start_time", lambda pid: "0")
                reports.append(weighlock.sweep(tmp_path, parts=True))

    if kind == "shards":
        weighlock.save(tmp_path / "out", swept(), durable=False, max_shard_bytes=500)
    else:
        with weighlock.Writer(tmp_path / "out", durable=False, disk=NoUnnamed()) as writer:
            for name, array in swept():
                writer.write(name, array)
    assert all(report.removed == () for report in reports)
    assert any(report.kept for report in reports)
    assert list(weighlock.open(tmp_path / "out")) == list(arrays)


class NoUnnamed(PosixDisk):
    """A file system without files that have no name."""

    def create_unnamed(self, directory):
        return None


class Unlisted(PosixDisk):
    """A disk whose n-th listing fails."""

    def __init__(self, n, number):
        self.left, self.number = n, number

    def names(self, directory):
        self.left -= 1
        if self.left == 0:
            raise OSError(self.number, os.strerror(self.number))
        return super().names(directory)


def test_a_root_that_cannot_be_listed_is_an_error_of_ours(tmp_path):
    with pytest.raises(DiskError, match="cannot be swept") as caught:
        weighlock.sweep(tmp_path, disk=Unlisted(1, errno.EIO))
    assert caught.value.errno == errno.EIO


def test_one_that_cannot_be_looked_at_is_reported_and_the_next_one_goes(tmp_path):
    first, second = (make(tmp_path, n, owner=gone_owner()) for n in (1, 2))
    report = weighlock.sweep(tmp_path, disk=Unlisted(2, errno.EIO))
    assert names(report.kept) == [first.name]
    assert "cannot be looked at: Input/output error" in report.kept[0].reason
    assert names(report.removed) == [second.name]


def test_one_that_is_gone_while_it_is_looked_at_is_nobodys_concern(tmp_path):
    make(tmp_path, 1, owner=gone_owner())
    report = weighlock.sweep(tmp_path, disk=Unlisted(2, errno.ENOENT))
    assert (report.removed, report.kept) == ((), ())


class GoneMeanwhile(PosixDisk):
    """A disk on which whoever left something behind comes back for it."""

    def __init__(self, path):
        self.path = path

    def names(self, directory):
        found = super().names(directory)
        if os.path.exists(self.path):
            os.unlink(self.path)
        return found


def test_a_part_that_is_gone_when_it_is_looked_at_is_nobodys_concern(tmp_path):
    path = tmp_path / temporary_name("model.safetensors", Owner(2**22 + 1, "1", "0"))
    path.write_bytes(b"x")
    report = weighlock.sweep(tmp_path, parts=True, disk=GoneMeanwhile(path))
    assert (report.removed, report.kept) == ((), ())
