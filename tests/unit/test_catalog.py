"""A catalog is an ordered mapping that cannot be changed."""

import pickle
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from unit_samples import descriptors_of, same_bits, sample

import weighlock
from weighlock.errors import LayoutError, SourceError
from weighlock.tensors.catalog import Catalog
from weighlock.tensors.dtypes import DType
from weighlock.tensors.ref import ArrayRef, TensorRef

NAMES = ["encoder.1.weight", "encoder.0.weight", "encoder.0.bias", "Encoder.x", "head"]


@pytest.fixture
def arrays():
    return {name: sample("F32", (3, n + 1), seed=n) for n, name in enumerate(NAMES)}


@pytest.fixture
def catalog(arrays):
    refs = {name: ArrayRef.of(name, array) for name, array in arrays.items()}
    return Catalog(refs, {"step": "7"})


@pytest.fixture(params=["file", "sharded"])
def opened(request, arrays, tmp_path):
    """The same tensors in a file, or in shards of one tensor each."""
    path = tmp_path / "model"
    sharded = {"max_shard_bytes": 1} if request.param == "sharded" else {}
    weighlock.save(path, arrays, durable=False, metadata={"step": "7"}, **sharded)
    with weighlock.open(path) as catalog:
        yield catalog


def test_it_is_a_mapping_in_the_order_of_the_file(opened, arrays):
    assert isinstance(opened, Mapping)
    assert not isinstance(opened, dict)
    assert list(opened) == NAMES
    assert list(opened.keys()) == NAMES
    assert [ref.name for ref in opened.values()] == NAMES
    assert [(name, ref.name) for name, ref in opened.items()] == [(n, n) for n in NAMES]
    assert len(opened) == 5
    assert "head" in opened
    assert "tail" not in opened
    assert 5 not in opened
    assert opened.get("tail") is None
    assert opened.get("head").name == "head"
    assert list(dict(opened)) == NAMES
    assert list({**opened}) == NAMES
    assert opened.keys() & {"head", "tail"} == {"head"}
    assert bool(opened)
    for name in NAMES:
        assert isinstance(opened[name], TensorRef)
        assert same_bits(opened[name].load(), arrays[name])


def test_a_name_that_is_not_there_is_a_key_error(opened):
    with pytest.raises(KeyError, match="tail"):
        opened["tail"]


def test_it_cannot_be_changed(opened):
    with pytest.raises(TypeError):
        opened["head"] = None
    with pytest.raises(TypeError):
        del opened["head"]
    with pytest.raises(TypeError):
        opened.metadata["step"] = "8"
    with pytest.raises(AttributeError):
        opened.metadata = {}
    with pytest.raises(AttributeError):
        opened.clear()


def test_an_empty_catalog():
    empty = Catalog({})
    assert (len(empty), list(empty), empty.nbytes, dict(empty.metadata)) == (0, [], 0, {})
    assert not empty
    assert empty.load() == {}
    empty.load_into({})
    empty.close()


def test_metadata_is_a_copy():
    given = {"a": "b"}
    catalog = Catalog({}, given)
    given["a"] = "c"
    assert dict(catalog.metadata) == {"a": "b"}


def test_nbytes_counts_a_tensor_of_several_names_once():
    array = np.zeros((3, 4), np.float32)
    refs = {name: ArrayRef.of(name, array) for name in "ab"}
    assert Catalog(refs).nbytes == 48
    refs["c"] = ArrayRef.of("c", array.copy())
    assert Catalog(refs).nbytes == 96


def test_repr_says_how_much_and_where_it_is(catalog, arrays, tmp_path):
    assert repr(catalog) == f"<Catalog of 5 tensors, {catalog.nbytes} bytes>"
    assert repr(catalog.select("head")) == "<Catalog of 1 tensor, 60 bytes>"
    path = tmp_path / "a.safetensors"
    weighlock.save(path, {"a": np.zeros(2, np.float32)}, durable=False)
    opened = weighlock.open(path)
    assert repr(opened) == f"<Catalog of 1 tensor, 8 bytes, {path}>"
    opened.close()
    assert repr(opened) == f"<Catalog of 1 tensor, 8 bytes, {path}, closed>"
    weighlock.save(tmp_path / "shards", arrays, durable=False, max_shard_bytes=1)
    with weighlock.open(tmp_path / "shards") as sharded:
        before = descriptors_of(tmp_path / "shards")
        assert repr(sharded) == "<Catalog of 5 tensors, sharded>"
        assert descriptors_of(tmp_path / "shards") == before  # nothing is opened for it


def test_a_catalog_of_what_is_in_memory(arrays, catalog):
    tensor = torch.arange(6.0).reshape(2, 3)
    made = Catalog.of({**arrays, "t": tensor, "r": catalog["head"]}, {"step": "8"})
    assert list(made) == [*NAMES, "t", "r"]
    assert made.metadata == {"step": "8"}
    assert made["head"].load() is arrays["head"]
    assert made["t"].torch().data_ptr() == tensor.data_ptr()
    assert made["r"].name == "r"
    assert Catalog.of(made) is made
    assert Catalog.of(made, {"a": "b"}).metadata == {"a": "b"}
    assert list(Catalog.of({})) == []
    with pytest.raises(LayoutError, match="'x' is a list: pass a numpy array"):
        Catalog.of({"x": [1, 2]})
    with pytest.raises(LayoutError, match=r"pass its state_dict\(\)"):
        Catalog.of(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("position", ["first", "last"])
def test_what_is_no_ref_is_refused_where_it_is_given(catalog, position):
    others = dict(catalog)
    mixed = {"x": np.zeros(2), **others} if position == "first" else {**others, "x": np.zeros(2)}
    with pytest.raises(TypeError, match=r"not a ndarray: Catalog\.of\(tensors\)"):
        Catalog(mixed)


def test_an_unknown_name_tells_those_near_it(catalog):
    with pytest.raises(KeyError) as caught:
        catalog["encoder.0.wieght"]
    told = str(caught.value)
    assert told.startswith("'encoder.0.wieght' is none of the 5 tensors here; did you mean 'enc")
    assert "'encoder.0.weight'" in told
    with pytest.raises(KeyError, match="did you mean 'head'"):
        catalog["Head"]
    with pytest.raises(KeyError, match=r"tensors here$"):
        catalog["quite another one"]
    assert catalog.get("encoder.0.wieght") is None
    assert pickle.loads(pickle.dumps(caught.value)).args == ("encoder.0.wieght",)


def test_torch_takes_all_of_it(tmp_path):
    module = torch.nn.Linear(3, 2)
    state = {**module.state_dict(), "tied": module.weight.detach(), "count": torch.tensor(7)}
    weighlock.save(tmp_path / "a.safetensors", state, durable=False, tied="alias")
    with weighlock.open(tmp_path / "a.safetensors") as catalog:
        found = catalog.torch()
        assert list(found) == list(catalog)
        assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
        assert found["tied"].data_ptr() == found["weight"].data_ptr()
        fresh = torch.nn.Linear(3, 2)
        fresh.load_state_dict(catalog.only(["weight", "bias"]).torch())
        assert torch.equal(fresh.weight, module.weight)
        half = catalog.torch(dtype="bf16")
        assert half["weight"].dtype is torch.bfloat16
        assert half["count"].dtype is torch.int64  # no float: it is a number of something


@pytest.mark.parametrize(
    ("patterns", "found"),
    [
        (["encoder.*"], ["encoder.1.weight", "encoder.0.weight", "encoder.0.bias"]),
        (["encoder.?.weight"], ["encoder.1.weight", "encoder.0.weight"]),
        (["*.[1-9].*"], ["encoder.1.weight"]),
        (["head", "*.bias"], ["encoder.0.bias", "head"]),
        (["head", "h*"], ["head"]),
        (["*"], NAMES),
        (["E*"], ["Encoder.x"]),
        (["ead"], []),
        (["nothing.*"], []),
        ([], []),
        (["encoder"], []),
    ],
    ids=repr,
)
def test_select_keeps_what_matches_in_the_catalog_s_order(catalog, patterns, found):
    selected = catalog.select(*patterns)
    assert isinstance(selected, Catalog)
    assert list(selected) == found
    assert dict(selected.metadata) == {"step": "7"}
    assert list(catalog) == NAMES


def test_a_pattern_matches_newlines_too():
    refs = {"a\nb": ArrayRef.of("a\nb", np.zeros(1))}
    assert list(Catalog(refs).select("a*")) == ["a\nb"]


def test_select_of_shards_opens_only_what_it_keeps(arrays, tmp_path):
    weighlock.save(tmp_path / "model", arrays, durable=False, max_shard_bytes=1)
    (tmp_path / "model" / "model-00002-of-00005.safetensors").write_bytes(b"broken")
    with weighlock.open(tmp_path / "model") as catalog:
        selected = catalog.select("*.bias", "head")
        assert same_bits(selected["head"].load(), arrays["head"])


def test_rename_by_mapping_keeps_the_others(catalog, arrays):
    renamed = catalog.rename({"head": "lm_head", "encoder.1.weight": "first"})
    assert list(renamed) == ["first", "encoder.0.weight", "encoder.0.bias", "Encoder.x", "lm_head"]
    assert all(ref.name == name for name, ref in renamed.items())
    assert same_bits(renamed["lm_head"].load(), arrays["head"])
    assert dict(renamed.metadata) == {"step": "7"}
    assert list(catalog) == NAMES


def test_rename_by_function(opened, arrays):
    renamed = opened.rename(lambda name: name.removeprefix("encoder."))
    assert list(renamed) == ["1.weight", "0.weight", "0.bias", "Encoder.x", "head"]
    assert renamed["0.bias"].name == "0.bias"
    assert same_bits(renamed["0.bias"].load(), arrays["encoder.0.bias"])


def test_names_can_be_swapped(catalog, arrays):
    swapped = catalog.rename({"head": "Encoder.x", "Encoder.x": "head"})
    assert same_bits(swapped["head"].load(), arrays["Encoder.x"])
    assert same_bits(swapped["Encoder.x"].load(), arrays["head"])


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ({"tail": "x"}, "cannot rename 'tail'"),
        ({"head": "Encoder.x"}, "'Encoder.x' and 'head' would both be named 'Encoder.x'"),
        (lambda name: "same", "'encoder.1.weight' and 'encoder.0.weight' would both"),
        ({"head": ""}, "empty"),
        ({"head": "__metadata__"}, "reserved"),
        (lambda name: None, "NoneType"),
    ],
)
def test_renaming_that_would_lose_a_tensor_is_refused(catalog, names, says):
    with pytest.raises(LayoutError, match=says):
        catalog.rename(names)
    assert list(catalog) == NAMES


def test_load_gives_every_array(opened, arrays):
    loaded = opened.load()
    assert list(loaded) == NAMES
    assert all(same_bits(loaded[name], arrays[name]) for name in NAMES)


def test_tied_tensors_are_loaded_once(tmp_path):
    array = np.ones(4, np.float32)
    path = tmp_path / "a.safetensors"
    weighlock.save(path, {"a": array, "b": array, "c": array * 2}, tied="alias", durable=False)
    with weighlock.open(path) as catalog:
        loaded = catalog.load()
    assert loaded["a"] is loaded["b"]
    assert loaded["c"] is not loaded["a"]


def test_two_byte_orders_of_one_memory_are_two_tensors():
    array = np.arange(4, dtype="<f4")
    refs = {"a": ArrayRef.of("a", array), "b": ArrayRef.of("b", array.view(">f4"))}
    loaded = Catalog(refs).load()
    assert loaded["a"][1] == 1
    assert loaded["b"][1] == array.view(">f4")[1]


def test_closing_closes_what_is_behind_every_ref(opened):
    refs = list(opened.values())
    opened.close()
    opened.close()
    for ref in refs:
        with pytest.raises(SourceError, match="closed"):
            ref.load()


def test_a_closed_catalog_opens_nothing_any_more(arrays, tmp_path):
    weighlock.save(tmp_path / "model", arrays, durable=False, max_shard_bytes=1)
    catalog = weighlock.open(tmp_path / "model")
    catalog["head"].load()
    catalog.close()
    for name in catalog:  # shards that were not opened before do not open now
        with pytest.raises(SourceError, match="closed"):
            catalog[name].load()


def test_leaving_the_block_closes(arrays, tmp_path):
    path = tmp_path / "a.safetensors"
    weighlock.save(path, arrays, durable=False)
    with weighlock.open(path) as catalog:
        assert descriptors_of(tmp_path) == 1
    assert descriptors_of(tmp_path) == 0
    assert list(catalog) == NAMES  # names and shapes are still known
    assert catalog["head"].shape == (3, 5)


def test_what_was_selected_from_a_catalog_is_closed_with_it(opened):
    part = opened.select("head").rename({"head": "tail"})
    part.close()
    opened["head"].load()  # the part did not own the file
    opened.close()
    with pytest.raises(SourceError):
        part["tail"].load()


def test_a_pickled_catalog_is_a_catalog_of_references(opened, arrays):
    pickled = pickle.dumps(opened)
    again = pickle.loads(pickled)
    assert list(again) == NAMES
    assert dict(again.metadata) == dict(opened.metadata)
    assert all(same_bits(again[name].load(), arrays[name]) for name in NAMES)


def test_a_pickled_catalog_knows_its_shards(opened):
    again = pickle.loads(pickle.dumps(opened))
    assert list(again.shards()) == list(opened.shards())


def test_a_pickled_catalog_can_be_closed_by_itself(opened, arrays):
    again = pickle.loads(pickle.dumps(opened))
    again["head"].load()
    again.close()
    with pytest.raises(SourceError, match="closed"):
        again["head"].load()
    assert same_bits(opened["head"].load(), arrays["head"])


def test_pickled_catalogs_cost_no_descriptors(opened, tmp_path):
    before = descriptors_of(tmp_path)
    copies = [pickle.loads(pickle.dumps(opened)) for _ in range(50)]
    assert descriptors_of(tmp_path) == before
    assert len(copies) == 50


def test_map_changes_each_ref(catalog):
    doubled = catalog.map(lambda ref: ArrayRef.of(ref.name, ref.load() * 2))
    assert same_bits(doubled["head"].load(), catalog["head"].load() * 2)
    assert list(doubled) == NAMES


def test_shards_of_a_sharded_catalog_and_of_none(arrays, tmp_path, catalog):
    weighlock.save(tmp_path / "model", arrays, durable=False, max_shard_bytes=60)
    with weighlock.open(tmp_path / "model") as opened:
        shards = opened.shards()
        assert list(shards) == sorted(shards)
        assert [name for shard in shards.values() for name in shard] == NAMES
    assert catalog.shards() == {}


def test_a_torch_module_loads_a_catalog_by_its_own_means(tmp_path):
    """`Module.load_state_dict` takes tensors; a catalog gives them one by one."""
    module = torch.nn.Linear(3, 2)
    weighlock.save(tmp_path / "a.safetensors", module.state_dict(), durable=False)
    other = torch.nn.Linear(3, 2)
    with weighlock.open(tmp_path / "a.safetensors") as catalog:
        other.load_state_dict({name: ref.torch() for name, ref in catalog.items()})
        assert catalog["weight"].dtype is DType.F32
    assert torch.equal(other.weight, module.weight)
