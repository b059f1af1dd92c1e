"""Checkpoints of PyTorch up to 0.1.9: the same names and bytes that torch itself reads today."""

import numpy as np
import pytest
import torch
from tar_checkpoints import archive, old_parts, old_saved, plain_pickle
from torch_objects import Counted, assert_same, assert_same_tensors, flat

import weighlock
from process.plain_server import PlainServer

DTYPES = [
    *(torch.float64, torch.float32, torch.float16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
]


@pytest.fixture
def theirs(tmp_path):
    """What torch reads; it looks for tar in real files only."""

    def read(raw):
        path = tmp_path / "old.pt"
        path.write_bytes(raw)
        return torch.load(path, weights_only=False)

    return read


@pytest.mark.parametrize("protocol", [0, 1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_and_view(dtype, protocol, theirs):
    base = torch.arange(48).reshape(6, 8).to(dtype)
    state = {"base": base, "t": base.t(), "rows": base[2:4], "steps": base[1::2, 3:7:3]}
    state["nested"] = [base[0], {"deep": (base[5, 7:], torch.ones(3).to(dtype))}]
    state["tied"] = base
    raw = old_saved(state, protocol)
    catalog = assert_same_tensors(raw, flat(theirs(raw)))
    assert catalog["base"].identity() == catalog["tied"].identity()
    assert catalog["base"].identity() != catalog["t"].identity()


def test_what_is_beside_the_tensors(theirs):
    raw = old_saved({"w": torch.ones(2), "epoch": 7, "names": ["a", "b"]})
    catalog = assert_same_tensors(raw, flat(theirs(raw)))
    assert catalog.extras == {"epoch": 7, "names": ["a", "b"]}
    assert catalog.metadata["format"] == "pt"


def test_parameters_and_whole_modules(theirs):
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    raw = old_saved({"model": module, "p": torch.nn.Parameter(torch.arange(3.0))})
    catalog = weighlock.open(raw)
    expected = {f"model.{name}": value for name, value in theirs(raw)["model"].state_dict().items()}
    assert set(catalog) == {*expected, "p"}
    for name, tensor in expected.items():
        assert_same(catalog[name], tensor)
    assert_same(catalog["p"], torch.arange(3.0))


def test_a_bare_tensor():
    assert_same(weighlock.open(old_saved(torch.arange(5)))["tensor"], torch.arange(5))


@pytest.mark.parametrize("order", [("storages", "tensors", "pickle", "sys_info"), None])
def test_members_in_any_order_and_without_system_information(order, theirs):
    parts = old_parts({"w": torch.arange(4.0)})
    raw = archive(parts, order or ("pickle", "storages", "tensors"))
    assert_same_tensors(raw, flat(theirs(raw)))


def test_times_in_extended_headers(theirs):
    raw = old_saved({"w": torch.arange(4.0)}, mtime=1480000000.25)
    assert b"mtime=1480000000.25" in raw
    assert_same_tensors(raw, flat(theirs(raw)))


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_storages_that_are_parts_of_others(theirs):
    state = {"w": torch.arange(10.0)}
    parts = old_parts(state, views=[(5000, 0, 3, 4), (5001, 0, 0, 2)])
    # A tensor over the first of the two: elements 3 to 6 of the whole, and of those 1 and 3.
    tensor = plain_pickle((7000, 5000, type("FloatTensor", (), {"__module__": "torch"})))
    numbers = np.array([2, 2, 1], "<i8").tobytes()
    parts["tensors"] = plain_pickle(2) + parts["tensors"].removeprefix(plain_pickle(1))
    parts["tensors"] += tensor + np.array([1, 0], "<i4").tobytes() + numbers
    parts["pickle"] = b"\x80\x02}(X\x01\0\0\0aX\x04\0\0\x007000QX\x01\0\0\0bX\x04\0\0\x005001Qu."
    catalog = weighlock.open(archive(parts))
    expected = theirs(archive(parts))
    assert catalog["a"].load().tolist() == expected["a"].tolist() == [4.0, 6.0]
    assert catalog["b"].load().tolist() == expected["b"].tolist() == [0.0, 1.0]


def test_an_empty_tensor_without_storage():
    parts = old_parts({"w": torch.arange(2.0)})
    kind = type("FloatTensor", (), {"__module__": "torch"})
    parts["tensors"] = plain_pickle(1) + plain_pickle((7000, None, kind)) + bytes(16)
    parts["pickle"] = b"\x80\x02X\x04\0\0\x007000Q."
    assert weighlock.open(archive(parts))["tensor"].shape == (0,)


def big():
    return {f"layer{n}": torch.full((300, 400), float(n)) for n in range(6)}


def test_opening_and_slicing_read_little():
    source = Counted(old_saved(big()))
    catalog = weighlock.open(source)
    # First bytes, headers, the end, what lies near the start, and a hop behind each storage.
    assert len(source.reads) == 4 + 6
    assert source.taken() < 3 * 64 * 1024
    assert catalog["layer3"][7].tolist() == [3.0] * 400
    assert source.reads == [(source.reads[0][0], 1600)]


def test_remote_by_ranges():
    raw = old_saved(big())
    with PlainServer({"/m.pt": raw}) as server, weighlock.open(server.url("m.pt")) as catalog:
        opened = len(server.asked())
        # The head, the end, and what lies between storages behind the first megabyte.
        assert opened == 1 + 1 + 4
        assert list(catalog) == list(big())
        assert np.asarray(catalog["layer5"][10:12]).tolist() == [[5.0] * 400] * 2
        assert len(server.asked()) == opened + 1


def test_what_is_written_is_what_was_read(tmp_path):
    weighlock.save(tmp_path / "out.safetensors", weighlock.open(old_saved(big())))
    with weighlock.open(tmp_path / "out.safetensors") as target:
        for name, tensor in big().items():
            assert_same(target[name], tensor)
