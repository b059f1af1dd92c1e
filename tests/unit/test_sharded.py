"""A model in several files and its index."""

import json
import os
import pickle
import threading

import pytest
from unit_samples import descriptors_of, encode, same_bits, sample

import weighlock
from weighlock.errors import (
    FormatError,
    HeaderError,
    LayoutError,
    LimitExceeded,
    SourceError,
    TruncatedFile,
)
from weighlock.formats.sharded import build_index, shard_name
from weighlock.limits import Limits

ARRAYS = {f"t{n}": sample("F32", (4, 4), seed=n) for n in range(6)}


def entry(array):
    return ("F32", array.shape, array.tobytes())


@pytest.fixture
def model(tmp_path):
    """Three shards of two tensors, and the index, written by hand."""
    directory = tmp_path / "model"
    directory.mkdir()
    names = list(ARRAYS)
    weight_map = {}
    for number in range(3):
        shard = f"part-{number}.safetensors"
        held = names[2 * number : 2 * number + 2]
        (directory / shard).write_bytes(encode({name: entry(ARRAYS[name]) for name in held}))
        weight_map |= dict.fromkeys(held, shard)
    write_index(directory, weight_map, {"total_size": 384, "note": "by hand"})
    return directory


def write_index(directory, weight_map, metadata=None):
    index = {"weight_map": weight_map} | ({"metadata": metadata} if metadata else {})
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def index_of(directory):
    return json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]


@pytest.mark.parametrize("name", ["", "model.safetensors.index.json"])
def test_a_directory_or_its_index(model, name):
    with weighlock.open(model / name) as catalog:
        assert list(catalog) == list(ARRAYS)
        for name, array in ARRAYS.items():
            assert same_bits(catalog[name].load(), array)
        assert dict(catalog.metadata) == {"total_size": "384", "note": "by hand"}
        assert catalog.nbytes == 384


def test_a_shard_is_opened_when_one_of_its_tensors_is_asked_for(model):
    with weighlock.open(model) as catalog:
        assert descriptors_of(model) == 0
        assert len(catalog) == 6
        assert "t5" in catalog
        catalog["t1"]
        assert descriptors_of(model) == 1
        catalog["t0"].load()
        assert descriptors_of(model) == 1
        catalog["t5"].load()
        assert descriptors_of(model) == 2
    assert descriptors_of(model) == 0


def test_only_so_many_shards_keep_a_descriptor(model):
    with weighlock.open(model, Limits(open_files=1)) as catalog:
        for name, array in ARRAYS.items():
            assert same_bits(catalog[name].load(), array)
        assert descriptors_of(model) == 1


def test_threads_open_a_shard_once(model):
    together = threading.Barrier(8)
    sources = []

    def work():
        together.wait()
        sources.append(catalog["t3"].source)

    with weighlock.open(model) as catalog:
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({id(source) for source in sources}) == 1
        assert descriptors_of(model) == 1


def test_a_pickled_sharded_ref_is_small(model):
    with weighlock.open(model) as catalog:
        pickled = pickle.dumps(catalog["t4"])
        assert len(pickled) < 1000 + len(str(model))
    assert same_bits(pickle.loads(pickled).load(), ARRAYS["t4"])


def test_shards_of_a_closed_model_stay_closed(model):
    catalog = weighlock.open(model)
    catalog["t0"].load()
    catalog.close()
    catalog.close()
    for name in ("t0", "t1", "t4"):
        with pytest.raises(SourceError, match="closed"):
            catalog[name].load()
    assert descriptors_of(model) == 0


def test_a_cache_of_links_into_one_directory_of_blobs_is_read(model, tmp_path):
    """How the hub's cache lies: names are links, blobs lie side by side elsewhere."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    model.rename(blobs)
    snapshot.mkdir()
    for blob in list(blobs.iterdir()):
        blob.rename(blobs / f"blob-{blob.name}")
        (snapshot / blob.name).symlink_to(os.path.join("..", "blobs", f"blob-{blob.name}"))
    with weighlock.open(snapshot) as catalog:
        assert same_bits(catalog["t3"].load(), ARRAYS["t3"])


@pytest.mark.parametrize(
    ("shard", "error", "says"),
    [
        ("../part-0.safetensors", LayoutError, "without a path"),
        ("/etc/passwd", LayoutError, "without a path"),
        ("sub/part.safetensors", LayoutError, "without a path"),
        ("a\\b", LayoutError, "without a path"),
        ("..", LayoutError, "without a path"),
        ("", LayoutError, "without a path"),
        ("a\0b", LayoutError, "without a path"),
        ("missing.safetensors", TruncatedFile, "not there"),
        (7, HeaderError, "'t0' is mapped to 7"),
        (None, HeaderError, "'t0' is mapped to None"),
    ],
)
def test_an_index_that_points_elsewhere_is_refused(model, shard, error, says):
    write_index(model, index_of(model) | {"t0": shard})
    with pytest.raises(error, match=says):
        weighlock.open(model)


def test_a_link_out_of_the_directory_is_refused(model, tmp_path):
    outside = tmp_path / "outside.safetensors"
    (model / "part-1.safetensors").rename(outside)
    (model / "part-1.safetensors").symlink_to(outside)
    with pytest.raises(LayoutError, match="link out of its directory"):
        weighlock.open(model)


def test_a_link_to_nothing_is_a_missing_shard(model):
    (model / "part-1.safetensors").unlink()
    (model / "part-1.safetensors").symlink_to("nothing")
    with pytest.raises(TruncatedFile, match="nothing"):
        weighlock.open(model)


def test_a_tensor_its_shard_does_not_hold(model):
    write_index(model, index_of(model) | {"t9": "part-0.safetensors"})
    with weighlock.open(model) as catalog:
        with pytest.raises(LayoutError, match="no tensor 't9'"):
            catalog["t9"]
        catalog["t0"].load()


def test_a_tensor_in_two_shards(model):
    both = {"t2": entry(ARRAYS["t2"]), "t0": entry(ARRAYS["t0"])}
    (model / "part-1.safetensors").write_bytes(encode(both))
    catalog = weighlock.open(model)
    with pytest.raises(LayoutError, match=r"'t0', which the index places in 'part-0"):
        catalog["t2"]
    catalog.close()
    assert descriptors_of(model) == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "JSON"),
        ("[]", "no weight_map"),
        ("{}", "no weight_map"),
        ('{"weight_map": []}', "no weight_map"),
        ('{"weight_map": {"a": "b", "a": "c"}}', "twice"),
        ('{"weight_map": {}, "metadata": 5}', "metadata"),
        ("\xff", "UTF-8"),
        ("[" * 100_000, "JSON"),
    ],
)
def test_what_is_no_index_is_refused(model, text, says):
    path = model / "model.safetensors.index.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(HeaderError, match=says) as caught:
        weighlock.open(model)
    assert str(path) in str(caught.value)


def test_a_shard_that_is_broken_says_which(model):
    (model / "part-2.safetensors").write_bytes(b"broken")
    with weighlock.open(model) as catalog:
        catalog["t0"].load()
        with pytest.raises(FormatError, match=r"part-2\.safetensors"):
            catalog["t5"]


def test_names_of_shards():
    assert shard_name(1, 3) == "model-00001-of-00003.safetensors"
    assert shard_name(123456, 123456) == "model-123456-of-123456.safetensors"


def test_an_index_is_plain_json():
    index = json.loads(build_index({"b": "2", "a": "1"}, 10))
    assert index == {"metadata": {"total_size": 10}, "weight_map": {"b": "2", "a": "1"}}
    assert list(index["weight_map"]) == ["b", "a"]


def test_an_index_of_nothing(tmp_path):
    write_index(tmp_path, {})
    with weighlock.open(tmp_path) as catalog:
        assert len(catalog) == 0
        assert catalog.shards() == {}


@pytest.mark.parametrize(
    "name",
    ["model.safetensors.index.json", "model.safetensors.fp16.index.json", "whatever.index.json"],
)
def test_an_index_of_nothing_beside_shards_tells_what_it_does_not_list(model, name):
    (model / "model.safetensors.index.json").unlink()
    (model / name).write_text('{"weight_map": {}}')
    (model / "notes.bin.txt").write_text("no shard")
    with weighlock.open(model / name) as catalog:
        assert not catalog
        assert descriptors_of(model) == 0
        assert list(catalog.notes) == [
            "part-0.safetensors: its index does not list 't0', 't1'",
            "part-1.safetensors: its index does not list 't2', 't3'",
            "part-2.safetensors: its index does not list 't4', 't5'",
        ]
    with pytest.raises(LimitExceeded, match=r"3 .*2"):
        weighlock.open(model / name, Limits(shards=2))


def test_tensors_that_an_index_does_not_list_are_told(model):
    weight_map = index_of(model)
    del weight_map["t3"]
    write_index(model, weight_map)
    with weighlock.open(model) as catalog:
        assert list(catalog) == list(weight_map)
        assert catalog.notes == ("part-1.safetensors: its index does not list 't3'",)


def test_a_model_without_tensors_has_nothing_to_tell(tmp_path):
    weighlock.save(tmp_path / "model", {}, max_shard_bytes=1000)
    with weighlock.open(tmp_path / "model") as catalog:
        assert catalog.notes == ()
