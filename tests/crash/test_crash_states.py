"""A3: whatever of a save survives a power loss, the destination is the old file or the new one.

The states are enumerated (crash_disk.py), not provoked: no root, no luck. The second half breaks
the protocol on purpose, to show that the enumeration sees it.
"""

import functools
import itertools
import os

import pytest

import weighlock
from crash.crash_disk import RecordingDisk, crash_states
from crash.disks import Around, LyingDisk
from crash.saves import NEW, SHARDED, SINGLE, put_old, seen

SEED = int(os.environ.get("CRASH_SEED", "1307"))
RETURNED = "returned"

DISKS = {
    "unnamed": {"unnamed": True},
    "named": {"unnamed": False},
    "unnamed, no inserts": {"unnamed": True, "inserts": False},
    "named, no inserts": {"unnamed": False, "inserts": False},
}


@functools.cache
def content_seen(content):
    """What a reader of a file with these bytes finds; "torn" if it is no file of ours."""
    try:
        return seen(content)
    except (weighlock.WeighlockError, AssertionError) as error:
        return f"torn ({error})"


def tree_seen(files, name, scratch, judged):
    """What a reader of a directory in such a state finds."""
    inside = {path: data for path, data in files.items() if path.startswith(f"{name}/")}
    key = tuple(sorted(inside.items()))
    if key not in judged:
        place = scratch / str(len(judged))
        for path, data in inside.items():
            os.makedirs(place / os.path.dirname(path), exist_ok=True)
            if not path.endswith("/"):
                (place / path).write_bytes(data)
        try:
            judged[key] = seen(place / name)
        except (weighlock.WeighlockError, AssertionError) as error:
            judged[key] = f"torn ({error})"
    return judged[key]


def bad_states(disk, look, *, before, after="new", at_most=3000, durable=True):
    """States in which the destination is not what it may be."""
    print(f"CRASH_SEED={SEED}")
    for state in crash_states(disk.start, disk.log, at_most=at_most, seed=SEED):
        allowed = {after} if durable and RETURNED in state.marks else {before, after}
        found = look(state.files)
        strangers = [
            path
            for path in state.files
            if path.split("/")[0] not in ("model", "source.safetensors")
            and ".part-" not in path.split("/")[0]
        ]
        if found not in allowed or strangers:
            yield f"{found}, not one of {allowed}; strangers: {strangers}\n{state}"


def first(problems):
    return next(iter(problems), None)


@pytest.mark.parametrize("before", ["absent", "old"])
@pytest.mark.parametrize("kind", DISKS)
@pytest.mark.parametrize("way", SINGLE)
def test_every_crash_state_of_a_save_is_the_old_or_the_new_file(tmp_path, way, kind, before):
    path = tmp_path / "model"
    if way == "copied":
        weighlock.save(tmp_path / "source.safetensors", NEW)
    if before == "old":
        put_old(path)
    disk = RecordingDisk(tmp_path, **DISKS[kind])
    SINGLE[way](path, disk)
    disk.mark(RETURNED)

    assert not first(bad_states(disk, lambda f: content_seen(f.get("model")), before=before))


@pytest.mark.parametrize("kind", ["unnamed", "named"])
@pytest.mark.parametrize("way", SHARDED)
def test_every_crash_state_of_a_sharded_save_is_no_directory_or_the_whole(tmp_path, way, kind):
    root = tmp_path / "disk"
    root.mkdir()
    disk = RecordingDisk(root, **DISKS[kind])
    SHARDED[way](root / "model", disk)
    disk.mark(RETURNED)

    scratch, judged = tmp_path / "scratch", {}
    look = functools.partial(tree_seen, name="model", scratch=scratch, judged=judged)
    assert not first(bad_states(disk, look, before="absent"))


@pytest.mark.parametrize("kind", DISKS)
@pytest.mark.parametrize("before", ["absent", "old"])
@pytest.mark.parametrize("way", SINGLE)
def test_every_crash_state_of_a_save_that_is_given_up_is_what_was_there(
    tmp_path, way, kind, before
):
    path = tmp_path / "model"
    if before == "old":
        put_old(path)
    weighlock.save(tmp_path / "source.safetensors", NEW)
    disk = RecordingDisk(tmp_path, **DISKS[kind])

    class Stop(Around):
        """No header is ever written: the last write of each way fails."""

        def instead(self, real, fd, data, offset):
            if offset == 0:
                raise KeyboardInterrupt
            return real(fd, data, offset)

    with pytest.raises(KeyboardInterrupt):
        SINGLE[way](path, Stop(disk, "write"))
    disk.mark(RETURNED)

    look = lambda files: content_seen(files.get("model"))  # noqa: E731
    assert not first(bad_states(disk, look, before=before, after=before))
    assert set(os.listdir(tmp_path)) <= {"model", "source.safetensors"}


@pytest.mark.parametrize("kind", ["unnamed", "named"])
def test_a_save_that_is_not_durable_may_be_lost_after_it_returned(tmp_path, kind):
    path = tmp_path / "model"
    put_old(path)
    disk = RecordingDisk(tmp_path, **DISKS[kind])
    SINGLE["planned"](path, disk, durable=False)
    disk.mark(RETURNED)

    states = crash_states(disk.start, disk.log, at_most=2500, seed=SEED)
    found = {content_seen(state.files.get("model")) for state in states if state.marks}
    assert {"old", "new"} < found  # and torn ones: it is for the caller to choose


# --- the enumeration sees what is wrong ---


@pytest.mark.parametrize("before", ["absent", "old"])
@pytest.mark.parametrize("kind", ["unnamed", "named"])
@pytest.mark.parametrize("way", SINGLE)
def test_without_the_sync_of_the_file_a_torn_one_is_found(tmp_path, way, kind, before):
    path = tmp_path / "model"
    weighlock.save(tmp_path / "source.safetensors", NEW)
    if before == "old":
        put_old(path)
    disk = RecordingDisk(tmp_path, **DISKS[kind])
    SINGLE[way](path, LyingDisk(disk, only=1))
    disk.mark(RETURNED)

    problems = bad_states(disk, lambda f: content_seen(f.get("model")), before=before)
    assert any(problem.startswith("torn") for problem in problems)


@pytest.mark.parametrize("before", ["absent", "old"])
@pytest.mark.parametrize("kind", ["unnamed", "named"])
def test_without_the_sync_of_the_directory_a_finished_save_is_lost(tmp_path, kind, before):
    path = tmp_path / "model"
    if before == "old":
        put_old(path)
    disk = RecordingDisk(tmp_path, **DISKS[kind])
    SINGLE["planned"](path, LyingDisk(disk, only=2))
    disk.mark(RETURNED)

    problems = list(bad_states(disk, lambda f: content_seen(f.get("model")), before=before))
    assert problems
    assert {problem.split(",")[0] for problem in problems} == {before}


@pytest.mark.parametrize("way", SHARDED)
def test_without_any_one_sync_of_a_sharded_save_a_bad_state_is_found(tmp_path, way):
    """Of three shards, their index, the directory they lie in, and the one that lies in."""
    found = {}
    for only in itertools.count(1):
        root = tmp_path / f"disk{only}"
        root.mkdir()
        disk = RecordingDisk(root)
        lying = LyingDisk(disk, only=only)
        SHARDED[way](root / "model", lying)
        if lying.calls < only:
            break
        disk.mark(RETURNED)
        look = functools.partial(
            tree_seen, name="model", scratch=tmp_path / f"scratch{only}", judged={}
        )
        found[only] = first(bad_states(disk, look, before="absent")) is not None
    assert list(found.values()) == [True] * 6


def test_writing_over_the_old_file_is_found(tmp_path):
    path = tmp_path / "model"
    put_old(path)
    whole = tmp_path / "source.safetensors"
    weighlock.save(whole, NEW)
    disk = RecordingDisk(tmp_path)
    with open(path, "r+b") as file:
        disk.write(file.fileno(), [memoryview(whole.read_bytes())], 0)
        disk.sync(file.fileno())
    disk.mark(RETURNED)

    assert first(bad_states(disk, lambda f: content_seen(f.get("model")), before="old"))
