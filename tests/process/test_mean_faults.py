"""Means straight from the wire, contributors that are lost midway, processes that are killed."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

import weighlock
from conftest import needs_strace
from process.chaos import Rules
from process.chaos_fixtures import chaos, server  # noqa: F401
from process.chaos_peers import owner
from threads import no_more_threads
from waiting import settled, until
from weighlock.errors import CombineError, PeerLost, TransferError

PATIENT = weighlock.Limits(patience_s=0.2, idle_s=2, connect_s=2)


def dying(connection):
    """A peer that answers for a while, then breaks off, and is gone."""
    return Rules(reset=3_000_000 if connection < 2 else 0)


def model(seed, rows=3000):
    rng = np.random.default_rng(seed)
    return {
        "w": rng.standard_normal((rows, 1000), np.float32),
        "v": rng.standard_normal(70_001, np.float32).astype(weighlock.DType.BF16.numpy),
        "n": np.arange(5),
    }


MODELS = [model(seed) for seed in range(3)]


def same(found, expected):
    assert list(found) == list(expected)
    for name, ref in expected.items():
        assert found[name].load().tobytes() == ref.load().tobytes(), name


@pytest.fixture
def urls(server):  # noqa: F811
    return [server.share(model).url for model in MODELS]


def test_urls_opened_catalogs_and_files_go_together(urls, tmp_path):
    weighlock.save(tmp_path / "2", MODELS[2], durable=False)
    with weighlock.open(urls[1]) as opened:
        for out in (None, tmp_path / "out"):
            with weighlock.mean([urls[0], opened, tmp_path / "2"], [3, 1, 2], out) as found:
                same(found, weighlock.mean(MODELS, [3, 1, 2]))


def test_where_there_are_no_more_threads_one_reads_and_works(tmp_path, no_leaks):
    """Whoever would read ahead, or help, is done without."""
    for number in range(2):
        weighlock.save(tmp_path / str(number), MODELS[number], durable=False)
    with (
        owner(path=tmp_path / "0") as one,
        owner(path=tmp_path / "1") as other,
        weighlock.open(one.url) as first,
        weighlock.open(other.url) as second,
    ):
        with weighlock.mean([first, second], threads=3) as found:
            want = {name: ref.load() for name, ref in found.items()}
        with no_more_threads(), weighlock.mean([first, second], threads=3) as found:
            assert {name: ref.load().tobytes() for name, ref in found.items()} == {
                name: array.tobytes() for name, array in want.items()
            }


def test_who_is_lost_midway_fails_the_mean_by_name(urls, chaos, tmp_path):  # noqa: F811
    """D16: one fetch dies midway."""
    proxy = chaos.proxy(urls[1], down=dying)
    with pytest.raises(TransferError, match=r"^contributor 2 of 3 \(http.*tensor 'w'") as caught:
        weighlock.mean([urls[0], proxy.of(urls[1]), urls[2]], out=tmp_path / "out", limits=PATIENT)
    assert isinstance(caught.value, PeerLost)
    assert os.listdir(tmp_path) == []


def test_who_is_lost_midway_can_be_left_out_entirely(urls, chaos, tmp_path):  # noqa: F811
    """D16: never mixed. What was made with it until then is thrown away."""
    proxy = chaos.proxy(urls[1], down=dying)
    reports = []
    given = {"a": urls[0], "b": proxy.of(urls[1]), "c": urls[2]}
    with weighlock.mean(
        given,
        [3, 1, 2],
        tmp_path / "out",
        on_lost="exclude",
        limits=PATIENT,
        report=reports.append,
    ) as found:
        same(found, weighlock.mean([MODELS[0], MODELS[2]], [3, 2]))
    assert list(reports[0].excluded) == ["b"]
    assert reports[0].weights == {"a": 0.6, "c": 0.4}
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_owners_that_wait_for_their_receiver_stay_in_while_another_is_left_out(server, lost):  # noqa: F811
    """They are not told of a failure that is not theirs, nor asked anew."""
    shares = [server.share({"w": np.full(3, float(n))}, receivers=("agg",)) for n in range(3)]
    urls = [share.url_for("agg") for share in shares]
    shares[lost].revoke()
    rest = [n for n in range(3) if n != lost]
    found = weighlock.mean(urls, on_lost="exclude", limits=PATIENT)
    assert found["w"].load().tolist() == [sum(rest) / 2] * 3
    for n in rest:
        assert shares[n].wait(timeout_s=10).landed == ("agg",)


def test_who_is_lost_midway_is_told_and_nobody_else(server, chaos):  # noqa: F811
    shares = [server.share(model, receivers=("agg",)) for model in MODELS]
    urls = [share.url_for("agg") for share in shares]
    proxy = chaos.proxy(urls[1], down=dying)
    given = {"a": urls[0], "b": proxy.of(urls[1]), "c": urls[2]}
    same(
        weighlock.mean(given, on_lost="exclude", limits=PATIENT),
        weighlock.mean([MODELS[0], MODELS[2]]),
    )
    for n in (0, 2):
        assert shares[n].wait(timeout_s=10).landed == ("agg",)
    assert shares[1].outcome.landed == ()


INTERRUPTED = """
import sys
import weighlock

print("begins", flush=True)
weighlock.mean(sys.argv[2:], out=sys.argv[1])
"""


@pytest.mark.parametrize("silent", [0, 1])
def test_ctrl_c_is_not_kept_by_a_server_that_says_nothing(urls, chaos, tmp_path, silent):  # noqa: F811
    proxy = chaos.proxy(urls[silent], down=Rules(hang=3_000_000))
    given = [proxy.of(url) if n == silent else url for n, url in enumerate(urls)]
    child = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path / "out"), *given],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with child:
        until(settled(lambda: proxy.down_bytes // 3_000_000))
        child.send_signal(signal.SIGINT)
        _, complaint = child.communicate(timeout=10)  # a third of what it would wait for a server
    assert child.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in complaint
    assert os.listdir(tmp_path) == []


def test_a_contribution_that_dies_on_its_way_is_not_counted(urls, chaos, tmp_path):  # noqa: F811
    proxy = chaos.proxy(urls[1], down=dying)
    with weighlock.Mean(tmp_path / "acc", durable=False, limits=PATIENT) as mean:
        mean.add(urls[0], name="a")
        with pytest.raises(TransferError, match=r"^b: tensor 'w'"):
            mean.add(proxy.of(urls[1]), name="b")
        mean.add(urls[2], name="c")
        assert list(mean.weights) == ["a", "c"]
        found = mean.finish()
        want = weighlock.mean([MODELS[0], MODELS[2]])
        assert found["w"].load().tobytes() == want["w"].load().tobytes()


COUNTED = """
import resource, sys
import numpy as np
import weighlock

directory, what = sys.argv[1:]
descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)

def use_up(done, total):
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, descriptors[1]))

def interrupt(frame, event, arg):
    if event == "return" and frame.f_code.co_name == "rename":
        sys.setprofile(None)
        raise KeyboardInterrupt

progress = use_up if what == "descriptors" else None
mean = weighlock.Mean(directory, durable=what == "sync", progress=progress)
if what == "interrupt":
    sys.setprofile(interrupt)
try:
    mean.add({"w": np.ones(1000, np.float32)}, name="a")
except (weighlock.WeighlockError, KeyboardInterrupt) as error:
    print(type(error).__name__, error, *getattr(error, "__notes__", ()))
else:
    print("counted")
resource.setrlimit(resource.RLIMIT_NOFILE, descriptors)
print(list(mean.weights), list(weighlock.Mean(directory).weights))
"""


def test_a_result_that_is_in_its_place_is_not_opened_to_be_counted(tmp_path, run_python):
    """D16: without a descriptor left it counts, and no error says that it does not."""
    said = run_python(COUNTED, tmp_path, "descriptors").stdout.splitlines()
    assert said == ["counted", "['a'] ['a']"]


def test_ctrl_c_after_the_rename_says_that_it_counts(tmp_path, run_python):
    said = run_python(COUNTED, tmp_path, "interrupt").stdout.splitlines()
    assert said == ["KeyboardInterrupt  a is counted", "['a'] ['a']"]


@needs_strace
@pytest.mark.parametrize(("when", "counts"), [(1, False), (2, True)])
def test_a_sync_that_fails_tells_whether_it_counts(tmp_path, when, counts):
    """Of the file: it is discarded. Of its directory: it is in its place, for now."""
    tracing = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", "trace=fsync"]
    tracing += ["-e", f"inject=fsync:error=EIO:when={when}"]
    command = [*tracing, sys.executable, "-c", COUNTED, str(tmp_path), "sync"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    error, weights = done.stdout.splitlines()
    assert error.startswith("NotDurable")
    assert ("a: is counted: " in error) is counts
    assert weights == ("['a'] ['a']" if counts else "[] []")


ADDING = """
import sys
import numpy as np
import weighlock

directory, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
mean = weighlock.Mean(directory + "/acc", durable=False)
print(list(mean.weights), flush=True)
for number in range(first, count):
    mean.add(f"{directory}/{number}", name=str(number))
    print(number, flush=True)
"""


def adding(directory, first, count):
    return subprocess.Popen(
        [sys.executable, "-c", ADDING, str(directory), str(first), str(count)],
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("progress", [0.0, 0.1, 0.5, 0.9])
def test_a_process_killed_while_it_adds_leaves_whole_contributions(tmp_path, progress):
    """Killed during an add, at any point of it, and gone on with by another process."""
    arrays = [np.full((1500, 1000), n + 1, np.float32) for n in range(4)]
    for number, array in enumerate(arrays):
        weighlock.save(tmp_path / str(number), {"w": array}, durable=False)
    process = adding(tmp_path, 0, 4)
    process.stdout.readline()
    process.stdout.readline()  # the first is in
    target = arrays[0].nbytes * 2 * progress

    def under_way():
        """Whether the next accumulator has so many bytes: it has no name, but a descriptor."""
        if process.poll() is not None:
            return True
        folder = f"/proc/{process.pid}/fd"
        for fd in os.listdir(folder):
            try:
                place = os.readlink(f"{folder}/{fd}")
                is_next = place.startswith(f"{tmp_path}/acc/") and "/accumulator" not in place
                if is_next and os.stat(f"{folder}/{fd}").st_blocks * 512 >= target:
                    return True
            except OSError:
                continue
        return False

    until(under_way)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    left = os.listdir(tmp_path / "acc")
    assert left == ["accumulator.safetensors"] or all(
        ".part-" in name or "acc" in name for name in left
    )
    mean = weighlock.Mean(tmp_path / "acc", durable=False)
    counted = [int(name) for name in mean.weights]
    assert counted == list(range(len(counted)))
    assert counted
    want = np.mean([n + 1 for n in counted])
    assert (mean.finish()["w"].load() == np.float32(want)).all()
    again = adding(tmp_path, len(counted), 4)
    out, _ = again.communicate(timeout=60)
    assert again.returncode == 0
    assert json.loads(out.splitlines()[0].replace("'", '"')) == [str(n) for n in counted]
    with weighlock.Mean(tmp_path / "acc") as whole:
        assert list(whole.weights) == ["0", "1", "2", "3"]
        assert (whole.finish()["w"].load() == 2.5).all()
        with pytest.raises(CombineError, match="2: was counted already"):
            whole.add(tmp_path / "2", name="2")


def test_more_contributors_of_one_server_than_it_gives_a_peer_connections(
    server,  # noqa: F811
    tmp_path,
):
    count = weighlock.Limits().connections_per_peer + 6
    shares = [server.share({"w": np.full(300_000, number, np.float32)}) for number in range(count)]
    options = {"limits": weighlock.Limits(patience_s=5)}
    found = weighlock.mean([share.url for share in shares], out=tmp_path / "out", **options)
    assert (found["w"].load() == np.float32((count - 1) / 2)).all()


FEW_DESCRIPTORS = """
import resource, sys
import weighlock

_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
weighlock.mean(sys.argv[2:], out=sys.argv[1])
"""


def test_sharded_models_share_the_descriptors_there_are(tmp_path):
    """Eight of eight files each would hold 64, and the process may have no more."""
    models = [{f"t{n}": np.full(100, i + n, np.float32) for n in range(8)} for i in range(8)]
    for number, tensors in enumerate(models):
        weighlock.save(tmp_path / str(number), tensors, max_shard_bytes=400, durable=False)
        assert len(os.listdir(tmp_path / str(number))) == 9
    paths = [tmp_path / str(number) for number in range(8)]
    subprocess.run([sys.executable, "-c", FEW_DESCRIPTORS, tmp_path / "out", *paths], check=True)
    with weighlock.open(tmp_path / "out") as mean:
        assert {n: float(ref.load()[0]) for n, ref in mean.items()} == {
            f"t{n}": 3.5 + n for n in range(8)
        }


def test_more_files_than_descriptors_are_averaged(tmp_path):
    """Any number of contributors: a file that cannot keep a descriptor is opened to be read."""
    savers = (
        ("safetensors", lambda path, a: weighlock.save(path, {"w": a}, durable=False)),
        ("pt", lambda path, a: torch.save({"w": torch.from_numpy(a)}, path)),
        ("npz", lambda path, a: np.savez(path, w=a)),
        ("npz", lambda path, a: np.savez_compressed(path, w=a)),
        ("d", lambda path, a: weighlock.save(path, {"w": a}, durable=False, max_shard_bytes=10)),
    )
    paths = []
    for number in range(350):
        ending, save = savers[number % len(savers)]
        paths.append(tmp_path / f"{number}.{ending}")
        save(paths[-1], np.full(1000, number, np.float32))
    subprocess.run([sys.executable, "-c", FEW_DESCRIPTORS, tmp_path / "out", *paths], check=True)
    with weighlock.open(tmp_path / "out") as mean:
        assert (mean["w"].load() == 174.5).all()
