"""A13: a process that is saving gets SIGINT, SIGTERM or SIGHUP, wherever it is.

Nothing lies beside the destination afterwards, and what is there is the old file or the new one.
A program that uses the library dies by the signal, as its parent expects; the command exits with
128 + n. Every child stops where it is told to and the signal finds it there: no test waits.
"""

import os
import signal
import threading

import pytest

import weighlock
from crash.disks import NamedDisk
from crash.saves import NEW, SHARD_BYTES, WAYS, beside, put_old, seen

pytest_plugins = ["crash.fixtures"]

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]

PROGRAMS = {
    "announced": {"specs": True},
    "as they come": {},
    "announced, named": {"specs": True, "disk": "named"},
    "as they come, named": {"disk": "named"},
    "shards, announced": {"specs": True, "max_shard_bytes": SHARD_BYTES},
    "shards, as they come": {"max_shard_bytes": SHARD_BYTES},
}
"""How a program may save what it makes one by one."""


def prepared(place, *, shards):
    """A destination, and what is there before."""
    place.mkdir()
    path = place / "model"
    if shards:
        return path, "absent"
    put_old(path)
    return path, "old"


def at_every_step(memory_path, child, job, number, *, shards):
    """Send a signal to a child at its first stop, its second, and so on until it has no more.

    Gives the exit code, where it was, and a list of what is wrong.
    """
    for steps in range(1, 1000):
        path, before = prepared(memory_path / str(steps), shards=shards)
        with child(steps=True, **job(path)) as saver:
            where = [saver.next() for _ in range(steps)][-1]
            if where in ("done", ""):
                return
            saver.signal(number)
            while saver.line():  # a handler has steps of its own
                saver.go()
            code = saver.end()
        wrong = []
        if seen(path) not in (before, "new"):
            wrong.append(f"{seen(path)} at {where} {steps}")
        if beside(path):
            wrong.append(f"left {beside(path)} at {where} {steps}")
        yield code, where, wrong


# --- programs that use the library ---


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_that_is_told_to_end_between_tensors_leaves_nothing(
    memory_path, child, program, number
):
    shards = "max_shard_bytes" in PROGRAMS[program]
    for at in (0, 2, len(NEW) - 1):
        path, before = prepared(memory_path / str(at), shards=shards)
        with child(generate=path, **PROGRAMS[program]) as saver:
            assert [saver.next() for _ in range(at + 1)][-1] == f"tensor {at}"
            saver.signal(number)
            assert saver.end() == -number
            complaint = saver.complaint()
        assert seen(path) == before
        assert beside(path) == []
        assert ("KeyboardInterrupt" in complaint) == (number == signal.SIGINT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "disk"),
    [(way, "posix") for way in WAYS] + [("planned", "plain"), ("cramped", "plain")],
)
def test_a_program_that_is_terminated_at_any_step_leaves_nothing(memory_path, child, way, disk):
    def job(path):
        return {"save": way, "path": path, "disk": disk}

    shards = way.startswith("sharded")
    wrong = []
    for code, _, found in at_every_step(memory_path, child, job, signal.SIGTERM, shards=shards):
        assert code == -signal.SIGTERM
        wrong += found
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "disk"), [("planned", "posix"), ("cramped", "plain"), ("sharded", "posix")]
)
def test_a_program_that_is_interrupted_at_any_step_leaves_nothing(memory_path, child, way, disk):
    def job(path):
        return {"save": way, "path": path, "disk": disk}

    shards = way.startswith("sharded")
    wrong = []
    for code, _, found in at_every_step(memory_path, child, job, signal.SIGINT, shards=shards):
        assert code == -signal.SIGINT
        wrong += found
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("program", ["announced", "announced, named", "shards, announced"])
def test_a_signal_while_a_failed_save_is_cleaned_up_does_not_stop_the_cleaning(
    memory_path, child, program, number
):
    """The impatient press Ctrl-C twice; the second one comes while shards are being removed."""

    def job(path):
        return {"generate": path, "fails_at": len(NEW) - 1, **PROGRAMS[program]}

    shards = "max_shard_bytes" in PROGRAMS[program]
    wrong, places = [], []
    for code, where, found in at_every_step(memory_path, child, job, number, shards=shards):
        assert code == -number
        places.append(where)
        wrong += found
    assert not wrong, "\n".join(wrong)
    assert "tensor 4" in places
    assert places[-1] == "close"  # of the directory, the last thing that is done
    if program != "announced":
        assert "unlink" in places


def test_a_program_with_a_handler_of_its_own_ends_as_it_says(memory_path, child):
    for program, options in PROGRAMS.items():
        path, before = prepared(
            memory_path / program.replace(" ", "-"), shards="max_shard_bytes" in options
        )
        with child(generate=path, handler="exit", **options) as saver:
            assert saver.step(3)
            saver.signal(signal.SIGTERM)
            assert saver.end() == 7
        assert seen(path) == before
        assert beside(path) == []


def test_a_program_whose_handler_goes_on_finishes_its_save(memory_path, child):
    for program, options in PROGRAMS.items():
        path, _ = prepared(
            memory_path / program.replace(" ", "-"), shards="max_shard_bytes" in options
        )
        with child(generate=path, handler="go on", **options) as saver:
            assert saver.step(3)
            saver.signal(signal.SIGTERM)
            while saver.next() != "done":
                pass
            saver.go()
            assert saver.end() == 0
        assert seen(path) == "new"
        assert beside(path) == []


# --- the command ---


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shards", "number"),
    [*((False, number) for number in SIGNALS), (True, signal.SIGINT), (True, signal.SIGTERM)],
)
def test_the_command_told_to_end_at_any_step_leaves_nothing_and_exits_by_the_rule(
    memory_path, child, shards, number
):
    weighlock.save(memory_path / "source.safetensors", NEW)

    def job(path):
        options = ["--max-shard-size", str(SHARD_BYTES)] if shards else ["--force"]
        return {"convert": [str(memory_path / "source.safetensors"), str(path), *options]}

    wrong, places = [], []
    for code, where, found in at_every_step(memory_path, child, job, number, shards=shards):
        places.append(where)
        wrong += found
        if code != 128 + number:
            wrong.append(f"exit code {code} at {where} {len(places)}")
    assert not wrong, "\n".join(wrong)
    assert {"copy_file_range", "fsync", "rename"} < set(places)
    assert seen(memory_path / "source.safetensors") == "new"


# --- what the process has of it afterwards ---


@pytest.fixture
def default_signals():
    """As in a program that knows nothing of signals."""
    before = {n: signal.signal(n, signal.SIG_DFL) for n in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def handlers():
    return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]


DEFAULT = [signal.SIG_DFL, signal.SIG_DFL]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("disk", [None, NamedDisk()], ids=["posix", "named"])
def test_a_save_leaves_the_signals_as_they_were(tmp_path, no_leaks, default_signals, way, disk):
    WAYS[way](tmp_path / "model", disk)
    assert handlers() == DEFAULT


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1)])
@pytest.mark.parametrize("end", ["finish", "discard"])
def test_writers_that_end_in_any_order_leave_the_signals_as_they_were(
    tmp_path, no_leaks, default_signals, order, end
):
    writers = [weighlock.Writer(tmp_path / str(n), disk=NamedDisk()) for n in range(3)]
    for n in order:
        getattr(writers[n], end)()
    assert handlers() == DEFAULT


def test_a_writer_that_ends_in_another_thread_leaves_the_signals_to_the_next_one(
    tmp_path, no_leaks, default_signals
):
    """Only the main thread can put the handlers back; the next save in it does."""
    writer = weighlock.Writer(tmp_path / "a", disk=NamedDisk())
    thread = threading.Thread(target=writer.finish)
    thread.start()
    thread.join()
    weighlock.Writer(tmp_path / "b", disk=NamedDisk()).finish()
    assert handlers() == DEFAULT


def test_a_handler_of_the_program_is_not_touched(tmp_path, no_leaks, default_signals):
    def mine(number, frame):
        raise AssertionError

    signal.signal(signal.SIGTERM, mine)
    with weighlock.Writer(tmp_path / "model", disk=NamedDisk()):
        assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL
    assert handlers() == [mine, signal.SIG_DFL]


def test_a_handler_the_program_sets_meanwhile_stays(tmp_path, no_leaks, default_signals):
    def mine(number, frame):
        raise AssertionError

    with weighlock.Writer(tmp_path / "model", disk=NamedDisk()):
        signal.signal(signal.SIGTERM, mine)
    assert handlers() == [mine, signal.SIG_DFL]


FORKS = """
import os, signal, sys
import numpy as np
import weighlock
from weighlock.disk.effects import PosixDisk

class NamedDisk(PosixDisk):
    def create_unnamed(self, directory):
        return None

path, how = sys.argv[1:]
writer = weighlock.Writer(path, disk=NamedDisk())
writer.write("weight", np.arange(5))
pid = os.fork()
if pid == 0:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGTERM)
    elif how == "discards":
        writer.discard()
        os._exit(0)
    elif how == "forgets":
        del writer
    sys.exit(0)
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == (-signal.SIGTERM if how == "killed" else 0)
assert len(os.listdir(os.path.dirname(path))) == 1
writer.finish()
assert weighlock.open(path)["weight"].load().tolist() == [0, 1, 2, 3, 4]
assert os.listdir(os.path.dirname(path)) == ["model"]
"""


@pytest.mark.parametrize("how", ["killed", "discards", "forgets", "exits"])
def test_a_forked_child_takes_nothing_from_its_parent(tmp_path, run_python, how):
    """I10: whatever becomes of the child, the parent's file can be finished."""
    run_python(FORKS, os.path.join(tmp_path, "model"), how)
