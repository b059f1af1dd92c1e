"""torch.distributed.checkpoint loads through our reader what it loads through its own, and more."""

import os

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

import weighlock
from interop.make_dcp import grid, write_dcp
from process.plain_server import PlainServer
from weighlock.torch.dcp import CatalogReader

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.*", "ignore::FutureWarning")

STATE = {
    "weight": torch.arange(60 * 50, dtype=torch.float32).reshape(60, 50),
    "half": torch.randn(7, 3).bfloat16(),
    "scalar": torch.tensor(4.5),
    "ids": torch.arange(5),
    "empty": torch.zeros(0, 2),
}


def blank(state=STATE):
    return {name: torch.full_like(tensor, -1) for name, tensor in state.items()}


def check(state, wanted=STATE):
    for name, tensor in wanted.items():
        assert torch.equal(state[name], tensor), name


def as_safetensors(directory):
    weighlock.save(directory / "model.safetensors", STATE)
    return directory / "model.safetensors"


def as_shards(directory):
    weighlock.save(directory / "shards", STATE, max_shard_bytes=6000)
    return directory / "shards"


def as_checkpoint(directory):
    torch.save(STATE, directory / "model.pt")
    return directory / "model.pt"


def as_chunks(directory):
    chunks = {name: (t, grid(t.shape, *[()] * t.dim())) for name, t in STATE.items()}
    chunks["weight"] = (STATE["weight"], grid((60, 50), (20, 21), (30,)))
    write_dcp(directory / "dcp", chunks)
    return directory / "dcp"


@pytest.mark.parametrize("make", [as_safetensors, as_shards, as_checkpoint, as_chunks])
def test_everything_that_opens_loads(tmp_path, make):
    state = blank()
    with CatalogReader(make(tmp_path)) as reader:
        assert isinstance(reader, dcp.StorageReader)
        dcp.load(state, storage_reader=reader, no_dist=True)
    check(state)


def test_from_a_share_by_url_and_from_a_plain_server(tmp_path):
    with weighlock.Server("127.0.0.1", 0) as server:
        share = server.share(STATE)
        state = blank()
        with CatalogReader(share.url) as reader:
            dcp.load(state, storage_reader=reader, no_dist=True)
        check(state)
    files = {"/model.pt": as_checkpoint(tmp_path).read_bytes()}
    with PlainServer(files) as server:
        state = blank()
        with CatalogReader(server.url("model.pt")) as reader:
            dcp.load(state, storage_reader=reader, no_dist=True)
        check(state)


def test_from_a_catalog_that_was_renamed_and_the_caller_s_to_close(tmp_path):
    with weighlock.open(as_safetensors(tmp_path)) as catalog:
        state = {"model": blank()}
        with CatalogReader(catalog.rename(lambda name: f"model.{name}")) as reader:
            dcp.load(state, storage_reader=reader, no_dist=True)
        check(state["model"])
        assert catalog["ids"].load()[3] == 3


def test_other_dtypes_and_strides_are_filled_block_by_block(tmp_path, monkeypatch):
    monkeypatch.setattr("weighlock.torch.dcp._BLOCK_BYTES", 1000)
    state = {
        "weight": torch.zeros(50, 60, dtype=torch.float64).T,
        "half": torch.zeros(7, 3),
        "scalar": torch.tensor(0, dtype=torch.float16),
    }
    with CatalogReader(as_safetensors(tmp_path)) as reader:
        dcp.load(state, storage_reader=reader, no_dist=True)
    for name, tensor in state.items():
        assert torch.equal(tensor, STATE[name].to(tensor.dtype))


def test_values_beside_tensors_come_along_as_plain_values(tmp_path):
    path = tmp_path / "training.pt"
    saved = {"model": STATE, "epoch": 7, "settings": {"lr": 0.5, "names": ["a", "b"]}}
    torch.save(saved, path)
    state = {"model": blank(), "epoch": 0, "settings": {"lr": 0.0, "names": []}}
    with CatalogReader(path) as reader:
        dcp.load(state, storage_reader=reader, no_dist=True)
    check(state["model"])
    assert state["epoch"] == 7
    assert state["settings"] == {"lr": 0.5, "names": ["a", "b"]}


def test_code_in_a_checkpoint_is_not_run_though_torch_s_own_reader_would(tmp_path):
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(marker),)

    chunks = {"a": (torch.ones(3), grid((3,), ()))}
    write_dcp(tmp_path / "dcp", chunks, {"evil": Evil()})
    state = {"a": torch.zeros(3), "evil": None}
    with CatalogReader(tmp_path / "dcp") as reader:
        dcp.load(state, storage_reader=reader, no_dist=True)
    assert torch.equal(state["a"], torch.ones(3))
    assert not marker.exists()
    dcp.load(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert marker.exists()  # so the trap was a trap


def test_a_checkpoint_id_is_where_to_read_from(tmp_path):
    state = blank()
    with CatalogReader(tmp_path / "nowhere") as reader:
        dcp.load(state, checkpoint_id=as_safetensors(tmp_path), storage_reader=reader, no_dist=True)
    check(state)


def test_what_does_not_fit_is_an_error_before_anything_is_read(tmp_path):
    path = as_safetensors(tmp_path)
    for state in ({"nothing": torch.zeros(3)}, {"ids": torch.zeros(6)}):
        with CatalogReader(path) as reader, pytest.raises(BaseException, match=r"nothing|ids|size"):
            dcp.load(state, storage_reader=reader, no_dist=True)


class OneRank(DefaultLoadPlanner):
    """The planner of a rank that holds a part of each tensor."""

    def __init__(self, local):
        super().__init__()
        self.local = local

    def lookup_tensor(self, index):
        return self.local[index.fqn]

    def commit_tensor(self, read_item, tensor):
        pass


def test_a_rank_that_holds_a_part_reads_that_part(tmp_path):
    offsets, sizes = torch.Size((20, 10)), torch.Size((30, 25))
    with CatalogReader(as_chunks(tmp_path)) as reader:
        described = reader.read_metadata().state_dict_metadata["weight"]
        held = [ChunkStorageMetadata(offsets, sizes)]
        items = create_read_items_for_chunk_list("weight", described, held)
        planner = OneRank({"weight": torch.zeros(sizes)})
        reader.read_data(LoadPlan(items), planner).wait()
    assert torch.equal(planner.local["weight"], STATE["weight"][20:50, 10:35])


def test_importing_it_does_not_import_torch(run_python):
    run_python("import weighlock.torch.dcp, sys; assert 'torch' not in sys.modules")


def test_numpy_arrays_load_too(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(6.0))
    state = {"x": torch.zeros(6, dtype=torch.float64)}
    with CatalogReader(tmp_path / "a.npz") as reader:
        dcp.load(state, storage_reader=reader, no_dist=True)
    assert torch.equal(state["x"], torch.arange(6.0, dtype=torch.float64))
