"""How much memory a transfer adds on both sides: a few buffers, whatever the tensors."""

import shutil

import pytest
from measuring import MB, added_by, in_memory, needs_room, sparse

pytestmark = pytest.mark.memory

SERVING = """
import subprocess
import threading


@contextlib.contextmanager
def measured_owner(pid):
    # Its anonymous memory, sampled: what it maps of libraries it imports late does not count.
    def anonymous():
        with open(f"/proc/{pid}/status") as status:
            return next(int(x.split()[1]) * 1024 for x in status if x.startswith("RssAnon"))

    before = peak = anonymous()
    over = threading.Event()

    def sample():
        nonlocal peak
        while not over.wait(0.003):
            peak = max(peak, anonymous())

    thread = threading.Thread(target=sample)
    thread.start()
    yield
    over.set()
    thread.join()
    print(json.dumps(max(peak, anonymous()) - before))


def serve(path):
    # The owner is a process of its own: what it needs is not what the receiver needs.
    process = subprocess.Popen(
        [sys.executable, "-m", "weighlock", "serve", path, "--port", "0", "--json"]
        + ["--secret", f"{directory}/key"],
        stdout=subprocess.PIPE,
        text=True,
    )
    return process, json.loads(process.stdout.readline())["shares"][0]["url"]


with weighlock.Server() as server:  # what is imported on first use is not what is measured
    share = server.share({"a": np.zeros(3)})
    weighlock.fetch(share.url, into=f"{directory}/small", durable=False).close()
    weighlock.fetch(share.url)
    list(weighlock.stream(share.url))
"""


@pytest.fixture
def directory(tmp_path):
    """A directory for large files, emptied at once; in memory if that is large enough."""
    place = in_memory(2_300 * MB)
    if place is None:
        needs_room(tmp_path, 2_300 * MB)
    yield tmp_path if place is None else type(tmp_path)(place)
    shutil.rmtree(tmp_path if place is None else place)


def test_one_tensor_of_2_gb_to_disk_adds_at_most_64_mb_on_either_side(directory):
    sparse(directory / "a.safetensors", "F32", (500_000_000,), 2_000_000_000)
    receiver, owner = added_by(
        SERVING
        + """
process, url = serve(f"{directory}/a.safetensors")
with measured_owner(process.pid), measured():
    weighlock.fetch(url, into=f"{directory}/out", durable=False).close()
assert os.path.getsize(f"{directory}/out") > 2_000_000_000
process.terminate()
process.wait()
""",
        directory,
    )
    assert receiver <= 64 * MB
    assert owner <= 64 * MB


RECEIVED = {
    "into arrays": """
out = {"weight": np.zeros(50_000_000, np.float32)}
out["weight"][:] = 1  # its pages are there before
with measured():
    weighlock.fetch(url, out=out)
assert not out["weight"].any()
""",
    "to disk, some tensors": """
with measured():
    weighlock.fetch(url, into=f"{directory}/part", names="weight", durable=False).close()
""",
    "to disk, with a base": """
with measured():
    weighlock.fetch(
        url, into=f"{directory}/again", base=f"{directory}/a.safetensors", durable=False
    ).close()
""",
    "opened, and read in slices": """
with measured(), weighlock.open(url) as catalog:
    for first in range(0, 50_000_000, 1_000_000):
        catalog["weight"][first : first + 1_000_000]
""",
}


@pytest.mark.parametrize("case", RECEIVED)
def test_receiving_adds_at_most_64_mb(case, directory):
    sparse(directory / "a.safetensors", "F32", (50_000_000,), 200_000_000)
    script = f"""
process, url = serve(f"{{directory}}/a.safetensors")
{RECEIVED[case]}
process.terminate()
process.wait()
"""
    (added,) = added_by(SERVING + script, directory)
    assert added <= 64 * MB


STREAMED = {
    "large tensors": ("{f't{n}': np.ones(15_000_000, np.float32) for n in range(6)}", 3 * 60),
    "small tensors": ("{f't{n}': np.ones(4_000, np.float32) for n in range(6_000)}", 0),
}


@pytest.mark.parametrize("case", STREAMED)
def test_stream_holds_three_tensors_at_most(case, directory):
    arrays, tensors_mb = STREAMED[case]
    script = f"""
weighlock.save(f"{{directory}}/a.safetensors", {arrays}, durable=False)
process, url = serve(f"{{directory}}/a.safetensors")
with measured():
    count = 0
    for name, array in weighlock.stream(url):
        assert array[-1] == 1
        count += 1
assert count in (6, 6_000)
process.terminate()
process.wait()
"""
    (added,) = added_by(SERVING + script, directory)
    assert added <= (tensors_mb + 64) * MB


OWNED = {
    "arrays": "{f't{n}': np.ones(15_000_000, np.float32) for n in range(4)}",
    "a transposed array": "{'a': np.ones((6_000, 6_000), np.float32).T}",
}


@pytest.mark.parametrize("case", OWNED)
def test_sharing_memory_adds_at_most_64_mb(case, directory):
    # The receiver is a process of its own.
    script = f"""
arrays = {OWNED[case]}
receiver = "import sys, weighlock; weighlock.fetch(sys.argv[1], into=sys.argv[2], durable=False)"
with weighlock.Server(directory=directory) as server, measured():
    share = server.share(arrays)
    subprocess.run([sys.executable, "-c", receiver, share.url, f"{{directory}}/out"], check=True)
"""
    (added,) = added_by(SERVING + script, directory)
    assert added <= 64 * MB


def test_serving_a_strided_checkpoint_adds_at_most_64_mb(directory):
    script = """
import torch

torch.save({"a": torch.ones(5_000, 6_000).T}, f"{directory}/a.pt")
process, url = serve(f"{directory}/a.pt")
with measured_owner(process.pid):
    weighlock.fetch(url, into=f"{directory}/out", durable=False).close()
process.terminate()
process.wait()
"""
    (added,) = added_by(SERVING + script, directory)
    assert added <= 64 * MB
