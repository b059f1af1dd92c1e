"""A2: power fails before any step of a save, on a real ext4; the old file or the new one is there.

A small ext4 in a file is shut down without flushing its journal, as a power loss would, while a
child waits just before its k-th system call; then it is mounted again and read.
"""

import itertools
import shutil

import pytest

from crash.disks import LyingDisk
from crash.saves import WAYS, beside, planned, put_old, seen
from weighlock.disk.effects import PosixDisk

pytest_plugins = ["crash.fixtures"]
pytestmark = [pytest.mark.root, pytest.mark.slow]


def lose_power(child, rig, job, steps):
    """Cut the power before a step of a save; the name of that step, "done" after the last."""
    with child(steps=True, **job) as saver:
        where = "ready"
        for _ in range(steps):
            where = saver.next()
            assert where, saver.complaint()
            if where == "done":
                break
        rig.cut_power()
    rig.restore_power()
    return where


@pytest.mark.parametrize("disk", ["posix", "plain"])
@pytest.mark.parametrize("way", WAYS)
def test_power_lost_before_any_step_leaves_the_old_or_the_new_file(
    memory_path, child, power_rig, way, disk
):
    before = "absent" if way.startswith("sharded") else "old"
    found = []
    for steps in itertools.count(1):
        directory = power_rig.path / str(steps)
        directory.mkdir()
        path = directory / "model"
        if before == "old":
            put_old(path, durable=True)
        where = lose_power(child, power_rig, {"save": way, "path": path, "disk": disk}, steps)
        found.append((where, seen(path)))
        assert found[-1][1] in (before, "new")
        if directory.exists():  # without an old file nothing made the directory itself durable
            assert all(".part-" in name for name in beside(path)), where
        if where == "done":
            break
        shutil.rmtree(directory, ignore_errors=True)
    assert found[0] == ("open", before)
    assert found[-1] == ("done", "new")
    assert {"fsync", "rename", "pwrite"} < {where for where, _ in found}


@pytest.mark.parametrize("disk", ["posix", "plain"])
def test_what_is_saved_without_durable_is_lost_so_the_rig_does_cut_power(
    memory_path, child, power_rig, disk
):
    path = power_rig.path / "model"
    job = {"save": "planned", "path": path, "disk": disk, "durable": False}
    assert lose_power(child, power_rig, job, 100) == "done"
    assert seen(path) == "absent"


def test_a_directory_that_is_not_synced_comes_back_without_the_new_name(power_rig):
    """Why the last sync is there: the file is synced and renamed, and the name is lost."""
    path = power_rig.path / "model"
    put_old(path, durable=True)
    planned(path, LyingDisk(PosixDisk(), only=2))
    assert seen(path) == "new"
    power_rig.cut_power()
    power_rig.restore_power()
    assert seen(path) == "old"
