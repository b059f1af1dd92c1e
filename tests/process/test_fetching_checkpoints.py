"""Whatever `open` understands behind a URL, `fetch` and `stream` bring, every tensor of it."""

import io
import os

import numpy as np
import pytest
import torch

import weighlock
from interop.make_dcp import grid, write_dcp
from process.plain_server import PlainServer
from weighlock.abort import Abort
from weighlock.errors import Aborted, LayoutError, LimitExceeded
from weighlock.limits import Limits

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.*", "ignore::UserWarning")

BIG = torch.arange(40 * 30, dtype=torch.float32).reshape(40, 30)


def saved(thing):
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


def arrays():
    buffer = io.BytesIO()
    np.savez_compressed(buffer, c=np.arange(6.0), f=np.asfortranarray(np.ones((2, 3), ">i4")))
    return buffer.getvalue()


def distributed(directory):
    rows = BIG, grid((40, 30), (10, 20, 33), ())
    tensors = {"rows": rows, "whole": (BIG[:2].clone(), grid((2, 30), (), ()))}
    write_dcp(directory, tensors, {"step": 7}, ranks=3)
    return {name: (directory / name).read_bytes() for name in os.listdir(directory)}


INNER = saved({"in": torch.arange(5.0), "w": torch.ones(3)})
CHECKPOINTS = {
    "strided": ("x.pt", lambda _: {"x.pt": saved({"t": BIG.T, "w": BIG, "n": np.ones(3)})}),
    "parts of one storage": (
        "x.pt",
        lambda _: {
            "x.pt": saved({"a": BIG[:10], "b": BIG[10:25], "c": BIG[25:], "b2": BIG[10:25]})
        },
    ),
    # The bytes of the inner one begin where those of other tensors lie in the outer one.
    "nested in bytes": ("x.pt", lambda _: {"x.pt": saved({"w": BIG, "blob": INNER})}),
    "only nested": ("x.pt", lambda _: {"x.pt": saved({"blob": INNER})}),
    "quantised": (
        "x.pt",
        lambda _: {"x.pt": saved({"q": torch.quantize_per_tensor(BIG, 0.1, 3, torch.qint8)})},
    ),
    "sparse": ("x.pt", lambda _: {"x.pt": saved({"s": torch.eye(4).to_sparse()})}),
    "deflated arrays": ("x.npz", lambda _: {"x.npz": arrays()}),
    "in chunks": (".metadata", distributed),
}


@pytest.fixture(params=CHECKPOINTS.values(), ids=CHECKPOINTS)
def offered(request, tmp_path):
    """A URL, and what is to come from it."""
    name, make = request.param
    files = make(tmp_path / "made")
    with PlainServer({f"/ckpt/{file}": content for file, content in files.items()}) as server:
        url = server.url(f"ckpt/{name}")
        with weighlock.open(url) as catalog:
            yield url, {key: ref.load() for key, ref in catalog.items()}, catalog.groups


def same(fetched, wanted):
    found = {
        name: value if isinstance(value, np.ndarray) else value.load() for name, value in fetched
    }
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name


def test_to_memory_into_arrays_and_one_by_one(no_leaks, offered):
    url, wanted, groups = offered
    fetched = weighlock.fetch(url)
    same(fetched.items(), wanted)
    assert fetched.groups == groups
    out = {name: np.zeros_like(array) for name, array in wanted.items()}
    weighlock.fetch(url, out=out)
    same(out.items(), wanted)
    same(weighlock.stream(url), wanted)


def test_to_a_file_and_into_a_spool(no_leaks, offered, tmp_path):
    url, wanted, _ = offered
    told = []
    with weighlock.fetch(
        url, into=tmp_path / "model", progress=lambda *done: told.append(done)
    ) as catalog:
        same(catalog.items(), wanted)
    assert told[-1][0] == told[-1][1] > 0
    with weighlock.Spool(tmp_path / "spool") as spool, weighlock.fetch(url, into=spool) as catalog:
        same(catalog.items(), wanted)


def test_only_what_is_named(no_leaks, offered, tmp_path):
    url, wanted, _ = offered
    last = list(wanted)[-1]
    only = {last: wanted[last]}
    same(weighlock.fetch(url, names=last).items(), only)
    same(weighlock.stream(url, names=last), only)
    with weighlock.fetch(url, names=last, into=tmp_path / "part") as catalog:
        same(catalog.items(), only)
    with pytest.raises(LayoutError, match="no tensor matches"):
        weighlock.fetch(url, names="nothing")
    with pytest.raises(LayoutError, match="no tensor matches"):
        list(weighlock.stream(url, names="nothing"))


def test_nothing_is_left_behind_by_what_ends_early(no_leaks, offered, tmp_path):
    url, _, _ = offered
    abort = Abort()
    abort.set("enough")
    with pytest.raises(Aborted):
        weighlock.fetch(url, into=tmp_path / "model", abort=abort)
    with pytest.raises(Aborted):
        next(weighlock.stream(url, abort=abort))
    with pytest.raises(LimitExceeded):
        weighlock.fetch(url, limits=Limits(memory_bytes=3))
    assert not list(tmp_path.glob("*model*"))


def test_a_distributed_checkpoint_is_pulled_under_the_name_of_its_directory(
    tmp_path, weighlock_command
):
    files = {f"/run/step-7/{n}": raw for n, raw in distributed(tmp_path / "made").items()}
    with PlainServer(files) as server:
        done = weighlock_command("pull", server.url("run/step-7/.metadata"), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    with weighlock.open(tmp_path / "step-7.safetensors") as catalog:
        assert torch.equal(catalog["rows"].torch(), BIG)
