"""How much memory combining adds: a few blocks, whatever the model and however many contribute."""

import shutil

import numpy as np
import pytest
from measuring import MB, added_by, in_memory, needs_room, sparse

import weighlock

pytestmark = pytest.mark.memory

PRELUDE = """
import weighlock.combining.incremental, weighlock.combining.kin
small = {"weight": np.ones(3, np.float32)}
weighlock.mean([small, small], out=f"{directory}/small", durable=False).close()
"""


@pytest.fixture
def directory(tmp_path):
    """A directory for large files, emptied at once; in memory if that is large enough."""
    place = in_memory(1_500 * MB)
    if place is None:
        needs_room(tmp_path, 1_500 * MB)
        place = str(tmp_path)
    yield place
    shutil.rmtree(place)


def models(directory, count, dtype, nbytes):
    from pathlib import Path

    width = {"BF16": 2, "F32": 4}[dtype]
    return [
        str(sparse(Path(directory) / f"{n}", dtype, (nbytes // width // 1000, 1000), nbytes))
        for n in range(count)
    ]


CASES = {
    "eight of bf16": (8, "BF16", 60 * MB, "weighlock.mean(paths, out=out, durable=False)"),
    "sixty-four of bf16": (64, "BF16", 12 * MB, "weighlock.mean(paths, out=out, durable=False)"),
    "four of f32": (4, "F32", 200 * MB, "weighlock.mean(paths, out=out, durable=False)"),
    "a median of many": (64, "BF16", 2 * MB, "weighlock.median(paths, out=out, durable=False)"),
    "a step": (2, "F32", 200 * MB, "weighlock.apply(*paths, 0.5, out, durable=False)"),
    "adding": (
        2,
        "BF16",
        200 * MB,
        "m = weighlock.Mean(directory + '/acc', durable=False); m.add(paths[0]); m.add(paths[1]); "
        "m.finish(out, durable=False); m.close()",
    ),
    "transposed tensors": (
        3,
        "F32",
        80 * MB,
        "weighlock.mean([{'weight': a.T} for a in loaded], out=out, durable=False)",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_at_most_128_mb_are_added(case, directory):
    """D12, for any size and number."""
    count, dtype, nbytes, call = CASES[case]
    paths = models(directory, count, dtype, nbytes)
    script = f"""{PRELUDE}
paths, out = {paths!r}, f"{{directory}}/out"
loaded = [weighlock.open(path)["weight"].load() for path in paths] if "loaded" in {call!r} else []
with measured():
    {call}
"""
    assert max(added_by(script, directory)) <= 128 * MB


@pytest.mark.parametrize(("count", "nbytes"), [(12, 100 * MB), (64, 8 * MB)])
def test_from_the_wire(directory, count, nbytes):
    (path,) = models(directory, 1, "BF16", nbytes)
    script = f"""{PRELUDE}
import subprocess
owner = subprocess.Popen(
    [sys.executable, "-m", "weighlock", "serve", {path!r}, "--port", "0", "--json"]
    + ["--secret", f"{{directory}}/key"], stdout=subprocess.PIPE, text=True)
url = json.loads(owner.stdout.readline())["shares"][0]["url"]
with weighlock.open(url) as catalog:
    catalog["weight"][:1]
    with measured():
        weighlock.mean([url] * {count}, out=f"{{directory}}/out", durable=False)
owner.terminate()
owner.wait()
owner.stdout.close()
"""
    assert max(added_by(script, directory)) <= 128 * MB


@pytest.mark.parametrize(
    "call",
    [
        "weighlock.difference(urls[1], urls[0], out)",
        "weighlock.mean(urls, out=out, integers='round')",
    ],
)
def test_integers_from_the_wire(directory, call):
    """They are counted in eight bytes each, whatever they lie in."""
    paths = [f"{directory}/{number}" for number in range(2)]
    for number, path in enumerate(paths):
        weighlock.save(path, {"weight": np.full(40 * MB, number, np.uint8)}, durable=False)
    script = f"""{PRELUDE}
import subprocess
owner = subprocess.Popen(
    [sys.executable, "-m", "weighlock", "serve", *{paths!r}, "--port", "0", "--json"]
    + ["--secret", f"{{directory}}/key"], stdout=subprocess.PIPE, text=True)
urls = [share["url"] for share in json.loads(owner.stdout.readline())["shares"]]
out = f"{{directory}}/out"
try:
    for url in urls:
        with weighlock.open(url) as catalog:
            catalog["weight"][:1]
    with measured():
        {call}
finally:
    owner.terminate()
    owner.wait()
    owner.stdout.close()
"""
    assert max(added_by(script, directory)) <= 128 * MB


def test_under_a_limit_of_the_address_space(directory):
    """A machine whose memory holds less than one of the models."""
    paths = models(directory, 8, "BF16", 150 * MB)
    script = f"""{PRELUDE}
import resource
now = field("VmSize")
resource.setrlimit(resource.RLIMIT_AS, (now + 140_000_000, now + 140_000_000))
with measured():
    weighlock.mean({paths!r}, range(1, 9), f"{{directory}}/out", durable=False, threads=2)
"""
    assert max(added_by(script, directory)) <= 128 * MB
