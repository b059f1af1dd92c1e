"""A1: a process killed with SIGKILL at any system call of a save leaves the old file or the new.

The real process under the real strace: the n-th call of each kind kills it as it is made, for
n = 1, 2, 3 … until a run comes to its end. What may be left has `.part-` in its name; where the
file system has unnamed files nothing is left, but between the two calls that give the name.
"""

import itertools

import pytest

import weighlock
from crash.rigs import KILLED, calls_in, traced
from crash.saves import NEW, SHARD_BYTES, WAYS, beside, put_old, seen

pytest_plugins = ["crash.fixtures"]

EFFECTS = {
    "pwrite64",
    "pwritev",
    "copy_file_range",
    "fallocate",
    "fsync",
    "linkat",
    "rename",
    "renameat",
    "renameat2",
    "mkdir",
    "mkdirat",
    "unlink",
    "unlinkat",
    "openat",
    "close",
}
"""The calls that change something, and those that open and close what is changed."""


def kill_everywhere(child, directory, job, *, before, prepare):
    """Kill a save at the n-th call of each kind, and give what each death left.

    Yields the call, n, and the destination. `prepare` fills the directory of each run and says
    where its destination is.
    """
    numbers = itertools.count()

    def run(log, calls, inject=None):
        place = directory / str(next(numbers))
        place.mkdir()
        path = prepare(place)
        with child(**job(path)) as saver:
            _, code = traced(saver, log, calls, inject)
            assert code in (0, KILLED), saver.complaint()
        return path, code

    log = directory / "log"
    path, code = run(log, "all")
    assert (code, seen(path)) == (0, "new")
    used = sorted({name for name, _ in calls_in(log)} & EFFECTS)
    assert {"pwrite64", "fsync", "openat", "close"} < set(used)
    found, kills = set(), 0
    for call in used:
        for n in itertools.count(1):
            path, code = run(log, call, f"signal=KILL:when={n}")
            if code == 0:
                assert seen(path) == "new"
                break
            kills += 1
            found.add(seen(path))
            yield call, n, path
    assert found == {before, "new"}
    assert kills > 10


@pytest.mark.slow
@pytest.mark.parametrize("disk", ["posix", "plain"])
@pytest.mark.parametrize("way", WAYS)
def test_a_save_killed_at_any_system_call_leaves_the_old_or_the_new_file(
    memory_path, child, way, disk
):
    before = "absent" if way.startswith("sharded") else "old"

    def prepare(place):
        if before == "old":
            put_old(place / "model")
        return place / "model"

    def job(path):
        return {"save": way, "path": path, "disk": disk}

    for call, n, path in kill_everywhere(child, memory_path, job, before=before, prepare=prepare):
        assert seen(path) in (before, "new"), (call, n)
        left = beside(path)
        assert all(".part-" in name for name in left), (call, n, left)
        if disk == "posix" and before == "old" and call not in ("close", "renameat", "rename"):
            assert left == [], (call, n)


@pytest.mark.slow
@pytest.mark.parametrize("shards", [False, True])
def test_a_conversion_killed_at_any_system_call_leaves_the_old_or_the_new_file(
    memory_path, child, shards
):
    before = "absent" if shards else "old"

    def prepare(place):
        weighlock.save(place / "source.safetensors", NEW)
        if before == "old":
            put_old(place / "model")
        return place / "model"

    def job(path):
        options = ["--max-shard-size", str(SHARD_BYTES)] if shards else ["--force"]
        return {"convert": [str(path.parent / "source.safetensors"), str(path), *options]}

    for call, n, path in kill_everywhere(child, memory_path, job, before=before, prepare=prepare):
        assert seen(path) in (before, "new"), (call, n)
        assert all(".part-" in name for name in beside(path)), (call, n)
        assert seen(path.parent / "source.safetensors") == "new"
