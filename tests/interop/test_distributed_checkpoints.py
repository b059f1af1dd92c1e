"""Distributed checkpoints: equal to what torch loads, in any chunks, read only where asked."""

import os
import pickle
import warnings
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import weighlock
from interop.make_dcp import grid, write_dcp
from process.plain_server import PlainServer
from suites.counting import CountingSource
from weighlock.errors import FormatError
from weighlock.formats.dcp import open_dcp_source
from weighlock.limits import Limits
from weighlock.sources.local import FileSource
from weighlock.tensors.assembled import AssembledRef
from weighlock.tensors.stored import StoredRef

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.*", "ignore::FutureWarning")

BIG = torch.arange(40 * 30, dtype=torch.float32).reshape(40, 30)
CUBE = torch.arange(4 * 6 * 5).reshape(4, 6, 5)
SHARDED = {
    "rows": (BIG, grid((40, 30), (10, 20, 33), ())),
    "columns": (BIG.bfloat16(), grid((40, 30), (), (7, 8))),
    "both": (CUBE, grid((4, 6, 5), (1,), (2, 3), (4,))),
    "bricks": (BIG * 2, [((0, 0), (20, 11)), ((0, 11), (20, 19)), ((20, 0), (20, 30))]),
    "whole": (BIG.half(), grid((40, 30), (), ())),
    "flags": (CUBE > 7, grid((4, 6, 5), (3,), (), ())),
}


def loaded_by_torch(directory, like):
    state = {name: torch.zeros_like(tensor) for name, (tensor, _) in like.items()}
    dcp.load(state, checkpoint_id=str(directory), no_dist=True)
    return state


@pytest.fixture
def sharded(tmp_path):
    directory = tmp_path / "sharded"
    write_dcp(directory, SHARDED, {"step": 7, "config": {"lr": 0.5, "none": None}}, ranks=3)
    return directory


def test_what_torch_saved_is_what_it_was(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    others = {
        "bf16": torch.ones(2, 3, dtype=torch.bfloat16),
        "fp8": torch.ones(4).to(torch.float8_e4m3fn),
        "complex": torch.tensor([1 + 2j, 3j]),
        "transposed": torch.arange(12).reshape(3, 4).T,
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
    }
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 7, **others}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=str(tmp_path / "ckpt"), no_dist=True)
    with weighlock.open(tmp_path / "ckpt") as catalog:
        for name, tensor in model.state_dict().items():
            assert torch.equal(catalog[f"model.{name}"].torch(), tensor)
        for name, tensor in others.items():
            assert catalog[name].torch().dtype == tensor.dtype
            read, kept = (t.contiguous().view(-1) for t in (catalog[name].torch(), tensor))
            assert torch.equal(read.view(torch.uint8), kept.view(torch.uint8))
        moments = optimizer.state_dict()["state"][0]["exp_avg"]
        assert torch.equal(catalog["optim.state.0.exp_avg"].torch(), moments)
        assert catalog.extras["step"] == 7
        assert catalog.extras["optim.param_groups.0.betas"] == (0.9, 0.999)
        assert catalog.extras["optim.param_groups.0.foreach"] is None
        assert isinstance(catalog["model.0.weight"], StoredRef)


def test_chunks_of_many_ranks_are_put_together_as_torch_does(sharded):
    reference = loaded_by_torch(sharded, SHARDED)
    with weighlock.open(sharded) as catalog:
        assert list(catalog) == list(SHARDED)
        assert isinstance(catalog["rows"], AssembledRef)
        for name, tensor in reference.items():
            ref = catalog[name]
            assert torch.equal(ref.torch(), tensor)
            assert torch.equal(ref[1:3, ..., 2].to(), tensor[1:3, ..., 2])
            joined = b"".join(map(bytes, ref.pieces(64)))
            assert joined == tensor.contiguous().view(torch.uint8).numpy().tobytes()
        assert dict(catalog.extras) == {"step": 7, "config": {"lr": 0.5, "none": None}}


def test_filling_arrays_that_are_there_of_any_strides(sharded):
    with weighlock.open(sharded) as catalog:
        array = np.zeros((30, 40), np.float32).T
        catalog["rows"].load(out=array)
        np.testing.assert_array_equal(array, BIG.numpy())
        target = {"rows": torch.zeros(40, 30), "both": torch.zeros_like(CUBE)}
        catalog.only(target).load_into(target)
        assert torch.equal(target["rows"], BIG)
        assert torch.equal(target["both"], CUBE)


def counted(directory):
    """The catalog of a directory, and the sources of its files, which count what is read."""
    sources = {}

    def open_file(path, *, hold):
        return sources.setdefault(os.path.basename(path), CountingSource(FileSource(path)))

    metadata = FileSource(directory / ".metadata")
    place_of = partial(os.path.join, directory)
    catalog = open_dcp_source(metadata, place_of, Limits(), open_file)
    metadata.close()
    return catalog, sources


def test_opening_reads_the_metadata_and_a_slice_only_its_chunks(sharded):
    catalog, sources = counted(sharded)
    with catalog:
        assert sources == {}
        ref = catalog["rows"]
        assert ref.spec.nbytes == 4800
        assert [source.taken() for source in sources.values()] == [[]] * 3
        ref[12:14]  # the head of that chunk is read once
        assert [bool(source.taken()) for source in sources.values()].count(True) == 1
        np.testing.assert_array_equal(ref[12:14], BIG[12:14].numpy())
        ((_, length),) = [read for source in sources.values() for read in source.taken()]
        assert length == 2 * 30 * 4
        np.testing.assert_array_equal(ref[9:11, :5], BIG[9:11, :5].numpy())
        assert [bool(source.taken()) for source in sources.values()].count(True) == 2


def test_refs_and_catalogs_survive_pickling(sharded):
    with weighlock.open(sharded) as catalog:
        copy = pickle.loads(pickle.dumps(catalog))
        ref = pickle.loads(pickle.dumps(catalog["columns"]))
    with copy:
        assert torch.equal(copy["both"].torch(), CUBE)
    assert torch.equal(ref.torch(), BIG.bfloat16())


def test_the_metadata_can_be_named_itself(sharded):
    with weighlock.open(sharded / ".metadata") as catalog:
        assert len(catalog) == len(SHARDED)


def test_by_url_only_what_is_asked_for_travels(sharded):
    files = {f"/ckpt/{name}": (sharded / name).read_bytes() for name in os.listdir(sharded)}
    with PlainServer(files) as server, weighlock.open(server.url("ckpt/.metadata")) as catalog:
        assert len(server.requests) == 1
        assert torch.equal(catalog["rows"].torch(), BIG)
        assert {request.path for request in server.requests} == set(files)


@pytest.mark.parametrize("shards", [(), ("--max-shard-size", "3kB")], ids=["one", "many"])
def test_commands(sharded, tmp_path, weighlock_command, shards):
    target = tmp_path / "out"
    done = weighlock_command("convert", sharded, target, *shards)
    assert done.returncode == 0, done.stderr
    assert weighlock_command("diff", sharded, target).returncode == 0
    with weighlock.open(target) as catalog:
        for name, (tensor, _) in SHARDED.items():
            assert torch.equal(catalog[name].torch(), tensor)
    if not shards:
        for command in (["info", "--json"], ["verify", "--data"], ["scan"]):
            done = weighlock_command(*command, sharded)
            assert done.returncode == 0, done.stdout + done.stderr


def test_a_changed_byte_of_a_chunk_is_found_by_its_checksum(sharded):
    with weighlock.open(sharded) as catalog:
        catalog.check()
    path = sharded / "__1_0.distcp"
    content = bytearray(path.read_bytes())
    content[content.index(BIG[10:20].numpy().tobytes()) + 5] ^= 1
    path.write_bytes(content)
    with weighlock.open(sharded) as catalog, pytest.raises(FormatError, match="checksum"):
        catalog.check()


def test_a_share_of_it_is_fetched_equal_and_nothing_is_kept_in_memory(sharded):
    with weighlock.open(sharded) as catalog, weighlock.Server("127.0.0.1", 0) as server:
        share = server.share(catalog)
        fetched = weighlock.fetch(share.url)
        for name, (tensor, _) in SHARDED.items():
            assert torch.equal(fetched[name].torch(), tensor)
