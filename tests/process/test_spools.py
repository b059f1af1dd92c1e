"""Spools and processes: forks, deaths of every kind, other users, threads (D3-D8, E9)."""

import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading

import numpy as np
import pytest

import weighlock
from conftest import needs_root
from waiting import until
from weighlock.errors import DiskError, SpoolClosed

MB = 1 << 20

START = """
import gc, multiprocessing, os, signal, sys, threading
import numpy as np
import weighlock

root = sys.argv[1]
spool = weighlock.Spool(root)
catalog = weighlock.save(spool, {"w": np.arange(1000)})


def entries():
    return sorted(os.listdir(spool.path))


def intact():
    return len(entries()) == 2 and int(catalog["w"].load().sum()) == 499500

"""

FORKS = {
    "returns": "sys.exit(0)",
    "leaves at once": "os._exit(0)",
    "raises": "raise ZeroDivisionError",
    "drops its refs": "del catalog, spool; gc.collect(); sys.exit(0)",
    "closes": "catalog.close(); spool.close(); sys.exit(0)",
    "aborts": "spool.abort(); sys.exit(0)",
    "is killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "is told to end": "os.kill(os.getpid(), signal.SIGTERM)",
}


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


@pytest.mark.parametrize("end", FORKS)
def test_a_forked_child_deletes_nothing(run_python, root, end):
    script = f"""{START}
file = spool.file(100)
pid = os.fork()
if pid == 0:
    os.close(2)
    {FORKS[end]}
os.waitpid(pid, 0)
file.discard()
assert intact()
print("well")
"""
    assert run_python(script, root).stdout == "well\n"
    assert os.listdir(root) == []


def test_a_forked_child_reads_and_is_told_why_it_cannot_land(run_python, root):
    script = f"""{START}
from weighlock.errors import DiskError, SpoolClosed
file = spool.file(100)
pid = os.fork()
if pid == 0:
    assert catalog["w"].load()[-1] == 999
    for use in (spool.file, lambda: file.write(0, memoryview(b"x")), file.finish,
                lambda: weighlock.save(spool, {{"w": np.ones(3)}}),
                lambda: catalog.keep(root + "/k")):
        try:
            use()
        except SpoolClosed as error:
            assert f"process {{os.getppid()}}" in str(error), error
        else:
            os._exit(1)
    own = weighlock.Spool(root)
    assert weighlock.save(own, catalog)["w"].load()[-1] == 999
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
assert len(entries()) == 3
del file
assert intact()
"""
    run_python(script, root)
    assert os.listdir(root) == []


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_by_reference_and_delete_nothing(run_python, root, tmp_path, method):
    path = tmp_path / "script.py"
    path.write_text(
        f"""
import multiprocessing, sys
import numpy as np
import weighlock

def work(ref):
    return int(ref.load().sum())

if __name__ == "__main__":
    spool = weighlock.Spool(sys.argv[1])
    catalog = weighlock.save(spool, {{"w": np.arange(1000)}})
    for _ in range(10 if {method!r} == "fork" else 1):
        with multiprocessing.get_context({method!r}).Pool(2) as pool:
            assert pool.map(work, [catalog["w"]] * 4) == [499500] * 4
    assert work(catalog["w"]) == 499500
"""
    )
    done = subprocess.run([sys.executable, path, root], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert os.listdir(root) == []


ENDS = {
    "exit": "",
    "exception": "raise SystemExit(3)",
    "uncollected": "gc.disable(); cycle = [catalog, spool]; cycle.append(cycle)",
    "daemon": """
def read():
    while True:
        catalog["w"].load()
threading.Thread(target=read, daemon=True).start()
""",
    "global in a module": "import types; sys.modules['kept'] = types.ModuleType('kept'); "
    "sys.modules['kept'].catalog = catalog",
    "landing": "file = spool.file(10); file.write(0, memoryview(b'abc'))",
    "sigterm": "os.kill(os.getpid(), signal.SIGTERM)",
    "sighup": "os.kill(os.getpid(), signal.SIGHUP)",
    "sigint": "os.kill(os.getpid(), signal.SIGINT)",
}


@pytest.mark.parametrize("end", ENDS)
def test_however_a_process_ends_in_python_nothing_is_left(run_python, root, end):
    result = run_python(f"{START}\n{ENDS[end]}", root, check=False)
    if end != "sigint":
        assert result.stderr == ""
    assert "Exception ignored" not in result.stderr
    codes = {"sigterm": -signal.SIGTERM, "sighup": -signal.SIGHUP, "sigint": -signal.SIGINT}
    assert result.returncode == codes.get(end, 3 if end == "exception" else 0)
    assert os.listdir(root) == []


@pytest.mark.parametrize("end", ["os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_what_a_process_could_not_remove_is_swept(run_python, root, end):
    run_python(f"{START}\nfile = spool.file(10)\n{end}", root, check=False)
    (left,) = os.listdir(root)
    assert len(os.listdir(root / left)) == 3
    report = weighlock.sweep(root)
    assert [os.path.basename(found.path) for found in report.removed] == [left]
    assert os.listdir(root) == []


def test_a_living_process_s_spool_is_kept_by_the_sweep_of_another(root):
    script = f"{START}\nprint('up', flush=True)\nsys.stdin.read()\nassert intact()"
    with subprocess.Popen(
        [sys.executable, "-c", script, root], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"up\n"
        report = weighlock.sweep(root)
        assert (report.removed, len(report.kept)) == ((), 1)
        assert f"process {process.pid} is alive" in report.kept[0].reason
        process.stdin.close()
        assert process.wait(30) == 0
    assert os.listdir(root) == []


def test_a_spool_outlived_by_a_forked_child_is_kept_until_that_is_gone(root):
    script = f"""{START}
if os.fork() == 0:
    print("up", flush=True)
    sys.stdin.read()
    os._exit(0)
os._exit(0)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script, root], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"up\n"
        assert process.wait(30) == 0
        report = weighlock.sweep(root)
        assert [found.state for found in report.kept] == ["unsure"]
        process.stdin.close()
        process.stdout.read()
    until(lambda: len(weighlock.sweep(root).removed) == 1)
    assert os.listdir(root) == []


def test_sweeps_and_new_spools_get_on(root):
    root.mkdir()
    stop = threading.Event()
    thread = threading.Thread(
        target=lambda: [weighlock.sweep(root) for _ in iter(stop.is_set, True)]
    )
    thread.start()
    try:
        for _ in range(150):
            with weighlock.Spool(root) as spool, spool.file(3) as file:
                file.write(0, memoryview(b"abc"))
                assert os.path.exists(file.path)
    finally:
        stop.set()
        thread.join()
    assert os.listdir(root) == []


def test_closing_while_eight_threads_load(root, no_leaks):
    """Loads complete with the right bytes, or raise SpoolClosed."""
    expected = np.arange(2000, dtype=np.int64)
    total, outcomes = itertools.count(), []
    rounds = 150

    def load(catalog, barrier):
        barrier.wait()
        try:
            for _ in range(20):
                found = catalog["w"].load()
                next(total)
                if not np.array_equal(found, expected):
                    outcomes.append("wrong bytes")
        except SpoolClosed:
            outcomes.append("closed")
        except BaseException as error:
            outcomes.append(error)

    for _ in range(rounds):
        spool = weighlock.Spool(root)
        catalog = weighlock.save(spool, {"w": expected})
        barrier = threading.Barrier(9)
        threads = [threading.Thread(target=load, args=(catalog, barrier)) for _ in range(8)]
        for thread in threads:
            thread.start()
        barrier.wait()
        spool.close()
        for thread in threads:
            thread.join()
        assert set(outcomes) <= {"closed"}, outcomes
    assert outcomes  # somebody came too late, in some round
    assert os.listdir(root) == []


def test_catalogs_dropped_closed_and_kept_in_many_threads(root, tmp_path, no_leaks):
    failures = []

    def work(spool, n):
        try:
            for turn in range(20):
                catalog = weighlock.save(spool, {"w": np.full(100, n * 100 + turn)})
                ref = catalog["w"]
                if turn % 3 == 0:
                    catalog.keep(tmp_path / f"{n}.safetensors", durable=False).close()
                elif turn % 3 == 1:
                    del catalog
                assert (ref.load() == n * 100 + turn).all()
                if turn % 3 == 2:
                    catalog.close()
        except BaseException as error:
            failures.append(error)

    with weighlock.Spool(root, quota_bytes=100 * MB) as spool:
        threads = [threading.Thread(target=work, args=(spool, n)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert spool.used_bytes == 0
        assert os.listdir(spool.path) == ["owner"]
    for n in range(6):
        with weighlock.open(tmp_path / f"{n}.safetensors") as kept:
            assert kept["w"].load()[0] == n * 100 + 18


OTHER = 65534
"""The user `nobody`."""

AS_OTHER = f"""
import os, sys
import weighlock
weighlock.Spool, weighlock.sweep

os.setgid({OTHER})
os.setuid({OTHER})
"""


@needs_root
def test_another_user_s_root_is_refused(tmp_path, run_python):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    os.chown(foreign, OTHER, OTHER)
    with pytest.raises(DiskError, match=f"belongs to user {OTHER}"):
        weighlock.Spool(foreign)
    ours = tmp_path / "ours"
    ours.mkdir()
    (tmp_path / "link").symlink_to(foreign)
    with pytest.raises(DiskError, match="leads to what belongs"):
        weighlock.Spool(tmp_path / "link")
    (tmp_path / "planted").symlink_to(ours)
    os.chown(tmp_path / "planted", OTHER, OTHER, follow_symlinks=False)
    for use in (weighlock.Spool, weighlock.sweep):
        with pytest.raises(DiskError, match=f"belongs to user {OTHER}"):
            use(tmp_path / "planted")
    assert os.listdir(foreign) == os.listdir(ours) == []


@needs_root
def test_another_user_sees_sweeps_and_touches_nothing(run_python):
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o1777)
        with weighlock.Spool(directory) as spool:
            catalog = weighlock.save(spool, {"w": np.ones(5)})
            script = f"""{AS_OTHER}
path, file = sys.argv[1:]
for use in (lambda: os.listdir(path), lambda: open(file), lambda: open(path + "/owner"),
            lambda: os.rmdir(path), lambda: os.symlink("/", path + "/x")):
    try:
        use()
    except PermissionError:
        continue
    sys.exit("got in")
report = weighlock.sweep(os.path.dirname(path))
assert report.removed == () and "cannot be opened" in report.kept[0].reason, report
with weighlock.Spool(os.path.dirname(path)) as own:
    pass
"""
            run_python(script, spool.path, catalog["w"].source.path)
            assert catalog["w"].load().sum() == 5
            catalog.close()
        assert os.listdir(directory) == []


def test_a_name_planted_in_a_spool_is_not_written_through(root, tmp_path, monkeypatch):
    target = tmp_path / "target"
    target.write_text("dear")
    with weighlock.Spool(root) as spool:
        monkeypatch.setattr(os, "urandom", lambda count: bytes(count))
        os.symlink(target, os.path.join(spool.path, bytes(16).hex()))
        with pytest.raises(DiskError, match="File exists"):
            spool.file(4)
        assert spool.used_bytes == 0
        monkeypatch.undo()
    assert target.read_text() == "dear"
    assert os.listdir(root) == []
