"""B14 B15: a file that changes, vanishes or fails under its reader raises, and gives no wrong byte.

Nothing is mapped, so that none of it can kill the process: that these tests end is part of them.
"""

import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

import weighlock
from conftest import needs_strace
from waiting import until
from weighlock.errors import ShortRead, SourceChanged, SourceError

ROWS, COLUMNS = 40, 50
LARGE = 3 * 1024 * 1024  # elements: enough for the reads of two threads
LONG_AGO = 1_000_000_000


def values(seed, count=ROWS * COLUMNS):
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def write(path, seed, large=False):
    tensors = {"t": values(seed).reshape(ROWS, COLUMNS)}
    if large:
        tensors["large"] = values(seed, LARGE)
    weighlock.save(path, tensors, durable=False)
    os.utime(path, (LONG_AGO, LONG_AGO))


def wait_for_a_tick(directory, path):
    """Touch a file until the file system's clock has moved on from the last change of another."""
    before, scratch = os.stat(path).st_ctime_ns, directory / "scratch"
    while True:
        scratch.write_bytes(b"")
        if os.stat(scratch).st_ctime_ns > before:
            scratch.unlink()
            return


@pytest.fixture
def path(tmp_path):
    found = tmp_path / "model.safetensors"
    write(found, seed=1)
    wait_for_a_tick(tmp_path, found)
    return found


def overwrite(path):
    with open(path, "r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\1\2\3\4")


def rewrite(path):
    with open(path, "r+b") as file:
        content = file.read()
        file.seek(0)
        file.write(content)  # the very same bytes: still not the file that was opened


def truncate_data(path):
    os.truncate(path, os.path.getsize(path) - 1)


def truncate_to_nothing(path):
    os.truncate(path, 0)


def grow(path):
    with open(path, "ab") as file:
        file.write(b"more")


def replace(path):
    write(f"{path}.new", seed=2)
    os.rename(f"{path}.new", path)


def replace_by_a_copy(path):
    with open(path, "rb") as old, open(f"{path}.new", "wb") as new:
        new.write(old.read())
    os.utime(f"{path}.new", (LONG_AGO, LONG_AGO))
    os.rename(f"{path}.new", path)


def replace_while_linked(path):
    os.link(path, f"{path}.backup")
    replace(path)


def replace_by_a_link(path):
    os.rename(path, f"{path}.old")
    os.symlink(f"{path}.old", path)


def replace_by_a_directory(path):
    os.unlink(path)
    os.mkdir(path)


CHANGES = [
    *(overwrite, rewrite, truncate_data, truncate_to_nothing, grow, replace, replace_by_a_copy),
    *(replace_while_linked, replace_by_a_link, replace_by_a_directory),
]
READS = {
    "load": lambda ref: ref.load(),
    "out": lambda ref: ref.load(out=np.empty(ref.shape, np.float32)),
    "torch": lambda ref: ref.torch(),
    "rows": lambda ref: ref[1:3],
    "column": lambda ref: ref[:, 7],
    "last": lambda ref: ref[-1, -1],
    "pieces": lambda ref: list(ref.pieces()),
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changed_file_raises_whatever_is_read(path, change, no_leaks):
    with weighlock.open(path) as catalog:
        for read in READS.values():
            read(catalog["t"])
        change(path)
        for read in READS.values():
            with pytest.raises((SourceChanged, ShortRead)) as caught:
                read(catalog["t"])
            assert str(path) in str(caught.value)
            assert not caught.value.retryable


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changed_file_raises_for_a_ref_that_holds_no_descriptor(path, change, no_leaks):
    with weighlock.open(path) as catalog:
        ref = pickle.loads(pickle.dumps(catalog["t"]))
    assert ref.load().tobytes() == values(1).tobytes()
    change(path)
    with pytest.raises(SourceError) as caught:
        ref.load()
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changed_file_is_not_copied(path, change, tmp_path, no_leaks):
    target = tmp_path / "copy.safetensors"
    target.write_bytes(b"as it was")
    with weighlock.open(path) as catalog:
        change(path)
        with pytest.raises(SourceError):
            weighlock.save(target, catalog, durable=False)
    assert target.read_bytes() == b"as it was"


def test_change_between_two_pieces_is_noticed(path, no_leaks):
    with weighlock.open(path) as catalog:
        pieces = catalog["t"].pieces(max_bytes=1000)
        assert bytes(next(pieces)) == values(1).tobytes()[:1000]
        truncate_data(path)
        with pytest.raises((SourceChanged, ShortRead)):
            list(pieces)


@pytest.mark.parametrize("change", [overwrite, truncate_data, grow], ids=lambda c: c.__name__)
def test_changed_file_raises_in_a_read_of_two_threads(tmp_path, change, no_leaks):
    path = tmp_path / "large.safetensors"
    write(path, seed=1, large=True)
    wait_for_a_tick(tmp_path, path)
    with weighlock.open(path) as catalog:
        assert catalog["large"].load().tobytes() == values(1, LARGE).tobytes()
        change(path)
        with pytest.raises((SourceChanged, ShortRead)):
            catalog["large"].load()


def test_unlinked_file_is_read_while_it_is_held(path, tmp_path, no_leaks):
    with weighlock.open(path) as catalog:
        pickled = pickle.dumps(catalog["t"])
        path.unlink()
        for read in READS.values():
            read(catalog["t"])
        assert catalog["t"].load().tobytes() == values(1).tobytes()
        weighlock.save(tmp_path / "copy.safetensors", catalog, durable=False)
        with pytest.raises(SourceError, match="cannot be opened"):
            pickle.loads(pickled).load()
    with pytest.raises(SourceError, match="closed"):
        catalog["t"].load()
    with weighlock.open(tmp_path / "copy.safetensors") as copy:
        assert copy["t"].load().tobytes() == values(1).tobytes()


def test_file_put_back_after_being_unlinked_is_another_file(path, no_leaks):
    with weighlock.open(path) as catalog:
        path.unlink()
        catalog["t"].load()
        write(path, seed=1)
        with pytest.raises(SourceChanged):
            catalog["t"].load()


def test_file_is_cut_at_every_length(path, no_leaks):
    content = path.read_bytes()
    header_end = 8 + int.from_bytes(content[:8], "little")
    with weighlock.open(path) as catalog:
        for length in (0, 1, 8, header_end, header_end + 1, len(content) - 1):
            os.truncate(path, length)
            for read in READS.values():
                with pytest.raises((SourceChanged, ShortRead)):
                    read(catalog["t"])


def test_changed_shard_is_told_by_its_name(tmp_path, no_leaks):
    tensors = {f"t{n}": values(n).reshape(ROWS, COLUMNS) for n in range(3)}
    model = tmp_path / "model"
    weighlock.save(model, tensors, durable=False, max_shard_bytes=ROWS * COLUMNS * 4)
    with weighlock.open(model) as catalog:
        catalog.load()
        grow(model / "model-00002-of-00003.safetensors")
        assert catalog["t0"].load().tobytes() == tensors["t0"].tobytes()
        with pytest.raises(SourceChanged, match="model-00002-of-00003"):
            catalog["t1"].load()


def run_with_failing_reads(path, *arguments, fault):
    """Runs the command so that reading that file, and no other, fails."""
    return subprocess.run(
        [
            *("strace", "-f", "-qq", "-o", os.devnull, "-P", path),
            *("-e", "trace=pread64,preadv,preadv2,read"),
            *("-e", f"inject=pread64,preadv,preadv2:{fault}"),
            *(sys.executable, "-m", "weighlock", *map(str, arguments)),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )


@needs_strace
@pytest.mark.parametrize("fault", ["error=EIO", "error=ESTALE", "error=EIO:when=2+"])
@pytest.mark.parametrize("verb", ["ls", "info", "verify --data"])
def test_failing_disk_is_one_line_of_the_command(path, fault, verb):
    verb, *options = verb.split()
    result = run_with_failing_reads(path, verb, path, *options, fault=fault)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("weighlock: ")
    assert result.stderr.count("\n") == 1
    assert str(path) in result.stderr
    said = "Input/output error" if "EIO" in fault else "Stale file handle"
    assert said in result.stderr


@needs_strace
def test_interrupted_read_is_repeated(path):
    result = run_with_failing_reads(path, "verify", path, "--data", fault="error=EINTR:when=1+2")
    assert result.returncode == 0, result.stderr


@needs_strace
def test_read_that_ends_early_is_told(path):
    result = run_with_failing_reads(path, "verify", path, "--data", fault="retval=0:when=4+")
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "bytes were wanted" in result.stderr


@needs_strace
def test_failing_disk_leaves_nothing_of_a_conversion(path, tmp_path):
    before = sorted(os.listdir(tmp_path))
    result = subprocess.run(
        [
            *("strace", "-f", "-qq", "-o", os.devnull, "-P", path),
            *("-e", "trace=pread64,preadv,copy_file_range,sendfile,ioctl"),
            *("-e", "inject=pread64,preadv:error=EIO:when=4+"),
            *("-e", "inject=copy_file_range,sendfile,ioctl:error=EIO"),
            *(sys.executable, "-m", "weighlock", "convert", path, tmp_path / "out.safetensors"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert "Input/output error" in result.stderr
    assert sorted(os.listdir(tmp_path)) == before


STALLED = """
import sys, threading
import weighlock
from waiting import until

def hangs(thread):
    with open(f"/proc/self/task/{thread.native_id}/stat") as status:
        return status.read().rpartition(")")[2].split()[0] == "t"

source, target, what = sys.argv[1:]
catalog = weighlock.open(source)
if what == "load":
    work, end = catalog["t"].load, catalog.close
else:
    writer = weighlock.Writer(target, [catalog["t"].spec])
    work, end = lambda: writer.copy("t", catalog["t"]), writer.discard
print("opened", flush=True)
sys.stdin.readline()  # from now on reads hang
thread = threading.Thread(target=work, daemon=True)
thread.start()
until(lambda: hangs(thread))
end()
print("ended while it hangs" if thread.is_alive() else "waited", flush=True)
"""


@needs_strace
@pytest.mark.parametrize("what", ["load", "copy"])
def test_who_ends_a_stalled_read_from_another_thread_does_not_wait_for_it(path, tmp_path, what):
    """A file on a mount that is dead: the read comes back much later, or never."""
    before = sorted(os.listdir(tmp_path))
    target = tmp_path / "out.safetensors"
    with subprocess.Popen(
        [sys.executable, "-c", STALLED, path, target, what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.path.dirname(os.path.dirname(__file__))},
    ) as reader:
        assert reader.stdout.readline() == "opened\n"
        with subprocess.Popen(
            [
                *("strace", "-f", "-qq", "-o", os.devnull, "-P", path, "-p", str(reader.pid)),
                *("-e", "trace=pread64,preadv,preadv2,copy_file_range,sendfile"),
                *("-e", "inject=pread64,preadv,preadv2,copy_file_range,sendfile:delay_enter=20s"),
            ]
        ) as stalling:
            until(lambda: is_traced(reader.pid))
            reader.stdin.write("go\n")
            reader.stdin.flush()
            assert reader.stdout.readline() == "ended while it hangs\n"
            reader.kill()
            stalling.kill()
    assert sorted(os.listdir(tmp_path)) == before


def is_traced(pid):
    with open(f"/proc/{pid}/status") as status:
        return any(line.split() != ["TracerPid:", "0"] for line in status if "TracerPid" in line)
