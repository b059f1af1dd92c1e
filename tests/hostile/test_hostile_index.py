"""B6: an index leads to files beside it and nowhere else, and says what its shards say."""

import json
import os

import numpy as np
import pytest

import weighlock
from hostile.make import entry, file_bytes
from hostile.watching import watched
from weighlock.errors import (
    FormatError,
    HeaderError,
    LayoutError,
    SourceError,
    TruncatedFile,
    WeighlockError,
)

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module", autouse=True)
def _warm(tmp_path_factory):
    """What is imported on first use must not look like the index's doing."""
    directory = tmp_path_factory.mktemp("warm")
    weighlock.save(directory / "s.safetensors", {"t": np.zeros(2, np.float32)}, durable=False)
    write_index(directory, {"t": "s.safetensors"})
    with weighlock.open(directory / INDEX) as catalog:
        catalog["t"].load()
    (directory / INDEX).write_text("[")
    with pytest.raises(HeaderError):
        weighlock.open(directory / INDEX)


def write_index(directory, weight_map, **more):
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map, **more}))
    return directory / INDEX


@pytest.fixture
def model(tmp_path):
    """A directory of two shards, beside a secret that no index may lead to."""
    (tmp_path / "secret").mkdir()
    weighlock.save(tmp_path / "secret" / "x", {"t": np.zeros(2, np.float32)}, durable=False)
    (tmp_path / "secret.safetensors").write_bytes((tmp_path / "secret" / "x").read_bytes())
    home = tmp_path / "model"
    home.mkdir()
    for number in (1, 2):
        values = np.full(2, number, np.float32)
        weighlock.save(home / f"s{number}.safetensors", {f"t{number}": values}, durable=False)
    return home


def everything(target):
    with weighlock.open(target) as catalog:
        catalog.shards()
        return {name: ref.load() for name, ref in catalog.items()}


def refused(index, error, *says):
    """Opening the index raises that, opens nothing outside its directory, leaks nothing."""
    before = os.listdir("/proc/self/fd")
    with watched(os.path.dirname(index)) as seen, pytest.raises(error) as caught:
        everything(index)
    assert seen == []
    assert os.listdir("/proc/self/fd") == before
    message = str(caught.value)
    for fragment in says:
        assert fragment in message
    assert message.isprintable()
    assert len(message) < 20_000


OUTSIDE = [
    *("../secret/x", "../secret.safetensors", "/etc/passwd", "//etc/passwd", "./s1.safetensors"),
    *("sub/s1.safetensors", "s1.safetensors/", "", ".", "..", "..\\secret.safetensors"),
    *("http://127.0.0.1:9/x", "https://127.0.0.1:9/x", "file:///etc/passwd", "s3://bucket/key"),
    *("s1.safetensors\0", "\0"),
]


@pytest.mark.parametrize("shard", OUTSIDE)
def test_shard_that_is_not_a_plain_name_is_refused(model, shard):
    refused(write_index(model, {"t": shard}), LayoutError, repr(shard))


@pytest.mark.parametrize(
    "shard",
    [
        *("missing.safetensors", "S1.SAFETENSORS", "s1.safetensors ", "s1.safetensors\n", "C:x"),
        *("~", "~root", "$HOME", "%2e%2e%2fsecret.safetensors", "s?.safetensors", "n" * 5000),
        *("\u2025", "s1\u2024safetensors"),
    ],
)
def test_shard_that_is_not_there_is_told(model, shard):
    says = () if len(shard) > 100 else (repr(shard),)
    refused(write_index(model, {"t": shard}), TruncatedFile, *says)


@pytest.mark.parametrize("number", [0xD800, 0xDCFF])
def test_shard_whose_name_no_text_can_carry_is_refused(model, number):
    refused(write_index(model, {"t": chr(number)}), FormatError)


@pytest.mark.parametrize("target", ["../secret/x", "../secret.safetensors", "/dev/zero"])
def test_link_out_of_the_directory_is_not_followed(model, target):
    (model / "link.safetensors").symlink_to(target)
    refused(write_index(model, {"t": "link.safetensors"}), LayoutError, "'link.safetensors'")


def test_chain_of_links_out_of_the_directory_is_not_followed(model):
    (model / "one").symlink_to("two")
    (model / "two").symlink_to("../secret.safetensors")
    refused(write_index(model, {"t": "one"}), LayoutError, "'one'")


def test_link_through_a_linked_directory_is_not_followed(model):
    (model / "sub").symlink_to("../secret")
    (model / "link").symlink_to("sub/x")
    refused(write_index(model, {"t": "link"}), LayoutError, "'link'")


@pytest.mark.parametrize("target", ["nothing", "link.safetensors"])
def test_link_to_nothing_is_told(model, target):
    (model / "link.safetensors").symlink_to(target)
    refused(write_index(model, {"t": "link.safetensors"}), TruncatedFile, "'link.safetensors'")


def test_shard_that_is_no_regular_file_is_refused(model):
    (model / "directory").mkdir()
    os.mkfifo(model / "pipe")
    for name in ("directory", "pipe"):
        refused(write_index(model, {"t": name}), SourceError, name)


def test_shard_that_is_the_index_itself_is_refused(model):
    refused(write_index(model, {"t": INDEX}), FormatError, INDEX)


def test_tensor_in_two_shards_is_refused(model):
    both = {name: np.zeros(2, np.float32) for name in ("t1", "t2")}
    weighlock.save(model / "s2.safetensors", both, durable=False)
    index = write_index(model, {"t1": "s1.safetensors", "t2": "s2.safetensors"})
    refused(index, LayoutError, "s2.safetensors", "'t1'", "'s1.safetensors'")


def test_tensor_that_its_shard_lacks_is_told(model):
    index = write_index(model, {"t1": "s1.safetensors", "t3": "s2.safetensors"})
    refused(index, LayoutError, "s2.safetensors", "'t3'")


def test_shards_swapped_in_the_index_are_told(model):
    index = write_index(model, {"t1": "s2.safetensors", "t2": "s1.safetensors"})
    refused(index, LayoutError, "holds tensor", "which the index places in")


def test_damaged_shard_is_told_by_its_name(model):
    content = (model / "s2.safetensors").read_bytes()
    (model / "s2.safetensors").write_bytes(content[:-1])
    index = write_index(model, {"t1": "s1.safetensors", "t2": "s2.safetensors"})
    refused(index, FormatError, "s2.safetensors", "'t2'")


def test_healthy_shards_stay_readable_beside_a_damaged_one(model, no_leaks):
    (model / "s2.safetensors").write_bytes(b"")
    index = write_index(model, {"t1": "s1.safetensors", "t2": "s2.safetensors"})
    with weighlock.open(index) as catalog:
        assert catalog["t1"].load().tolist() == [1, 1]
        with pytest.raises(FormatError, match=r"s2\.safetensors"):
            catalog["t2"]
        assert catalog["t1"].load().tolist() == [1, 1]


MAP = '"weight_map":{"t1":"s1.safetensors"}'
TEXTS = [
    ("", HeaderError, ()),
    ("{", HeaderError, ()),
    ("null", HeaderError, ("weight_map",)),
    ("[]", HeaderError, ("weight_map",)),
    ("{}", HeaderError, ("weight_map",)),
    ('{"weight_map":null}', HeaderError, ("weight_map",)),
    ('{"weight_map":[["t1","s1.safetensors"]]}', HeaderError, ("weight_map",)),
    ('{"weight_map":{"t1":null}}', HeaderError, ("'t1'", "None")),
    ('{"weight_map":{"t1":1}}', HeaderError, ("'t1'", "1")),
    ('{"weight_map":{"t1":["s1.safetensors"]}}', HeaderError, ("'t1'",)),
    ('{"weight_map":{"t1":{"file":"s1.safetensors"}}}', HeaderError, ("'t1'",)),
    ('{"weight_map":{"t1":' + "[" * 400 + "]" * 400 + "}}", HeaderError, ()),
    ('{"weight_map":{"t1":[' + "0," * 100_000 + "0]}}", HeaderError, ("'t1'",)),
    ('{"weight_map":{"t1":"s1.safetensors","t1":"s1.safetensors"}}', HeaderError, ("'t1'",)),
    ('{"weight_map":{"t1":"s1.safetensors","\\u00741":"../x"}}', HeaderError, ("'t1'",)),
    ("{" + MAP + "," + MAP + "}", HeaderError, ("'weight_map'",)),
    ("{" + MAP + ',"metadata":"x"}', HeaderError, ("metadata",)),
    ("{" + MAP + ',"metadata":[]}', HeaderError, ("metadata",)),
    ("{" + MAP + ',"metadata":0}', HeaderError, ("metadata",)),
    ("{" + MAP + ',"metadata":{"total_size":NaN}}', HeaderError, ("NaN",)),
    ("{" + MAP + ',"metadata":{"a":["\\ud800"]}}', HeaderError, ("surrogate",)),
    ("{" + MAP + ',"metadata":{"a":"\\ud800"}}', HeaderError, ("surrogate",)),
    ("{" + MAP + ',"metadata":{"\\ud800":1}}', HeaderError, ("surrogate",)),
    ("{" + MAP + ',"metadata":{"a":1e999}}', HeaderError, ()),
    ("{" + MAP + ',"x":' + "9" * 5000 + "}", HeaderError, ()),
    ("{" + MAP + ',"x":' + "[" * 100_000 + "]" * 100_000 + "}", HeaderError, ("deep",)),
    ("\ufeff{" + MAP + "}", HeaderError, ()),
    ("{" + MAP + "}{}", HeaderError, ()),
    ("{" + MAP + "}\0", HeaderError, ()),
    ('{"weight_map":{"":"s1.safetensors"}}', LayoutError, ("''",)),
    ('{"weight_map":{"a\\u0000":"s1.safetensors"}}', LayoutError, (r"'a\x00'",)),
    ('{"weight_map":{"\\ud800":"s1.safetensors"}}', FormatError, ()),
    ('{"weight_map":{"__metadata__":"s1.safetensors"}}', LayoutError, ("'__metadata__'",)),
    ('{"weight_map":{"' + "n" * 5000 + '":"s1.safetensors"}}', WeighlockError, ()),
]


@pytest.mark.parametrize(("text", "error", "says"), TEXTS, ids=[text[:60] for text, _, _ in TEXTS])
def test_index_that_contradicts_itself_is_refused(model, text, error, says):
    (model / INDEX).write_text(text)
    refused(model / INDEX, error, *says)


def test_index_that_is_not_utf8_is_refused(model):
    (model / INDEX).write_bytes(b'{"weight_map":{"\xff":"s1.safetensors"}}')
    refused(model / INDEX, HeaderError, "UTF-8")


def test_index_longer_than_the_limit_is_not_read(model):
    with open(model / INDEX, "wb") as file:
        file.truncate(100_000_001)
    refused(model / INDEX, HeaderError, "100,000,001", "100,000,000")


def test_directory_with_two_indices_is_not_guessed_about(model):
    write_index(model, {"t1": "s1.safetensors"})
    (model / ("other" + INDEX[5:])).write_text((model / INDEX).read_text())
    with pytest.raises(FormatError, match="2 candidates"):
        weighlock.open(model)


def test_names_in_an_index_are_labels(model):
    name = "../../secret/x"
    weighlock.save(model / "s1.safetensors", {name: np.ones(2, np.float32)}, durable=False)
    index = write_index(model, {name: "s1.safetensors"})
    with watched(model) as seen:
        loaded = everything(index)
    assert seen == []
    assert {key: value.tolist() for key, value in loaded.items()} == {name: [1, 1]}


def test_total_size_and_other_metadata_are_text(model):
    index = write_index(model, {"t1": "s1.safetensors"}, metadata={"total_size": 8, "a": {"b": 1}})
    with weighlock.open(index) as catalog:
        assert dict(catalog.metadata) == {"total_size": "8", "a": '{"b":1}'}


def link_into_blobs(model, blobs, names):
    """Moves files into a directory of blobs and leaves links, as a download cache does."""
    blobs.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        blob = blobs / f"{number:064x}"
        (model / name).rename(blob)
        (model / name).symlink_to(os.path.relpath(blob, model))


def test_cache_of_links_into_one_directory_of_blobs_is_read(tmp_path):
    snapshot = tmp_path / "models--someone--something" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    tensors = {f"t{n}": np.full(3, n, np.float32) for n in range(4)}
    shards = {}
    for name, values in tensors.items():
        shards[name] = f"model-{name}.safetensors"
        weighlock.save(snapshot / shards[name], {name: values}, durable=False)
    write_index(snapshot, shards)
    link_into_blobs(snapshot, snapshot.parent.parent / "blobs", [INDEX, *shards.values()])
    for target in (snapshot, snapshot / INDEX):
        loaded = everything(target)
        assert {key: value.tolist() for key, value in loaded.items()} == {
            key: value.tolist() for key, value in tensors.items()
        }


@pytest.mark.parametrize("kept", ["the index", "one shard as well"])
def test_links_into_the_hub_s_cache_beside_a_copy_of_the_index_are_read(model, tmp_path, kept):
    """What downloads to a directory left: small files copied, large ones as links."""
    write_index(model, {"t1": "s1.safetensors", "t2": "s2.safetensors"})
    cache = tmp_path / "hub" / "models--someone--something"
    (cache / "snapshots").mkdir(parents=True)
    linked = ["s1.safetensors", "s2.safetensors"][: 2 if kept == "the index" else 1]
    link_into_blobs(model, cache / "blobs", linked)
    assert set(everything(model)) == {"t1", "t2"}
    (cache / "blobs" / f"{0:064x}").unlink()
    refused(model / INDEX, TruncatedFile, "'s1.safetensors'")


@pytest.mark.parametrize(
    "target",
    [
        "hub/models--a--b/blobs/secret.safetensors",
        "hub/models--a--b/blobs/" + "0" * 63,
        "hub/models--a--b/blobs/" + "G" * 64,
        "hub/models--a--b/blobs/deeper/" + "0" * 64,
        "hub/models--a--b/" + "0" * 64,
        "hub/models--a--b/refs/" + "0" * 40,
        "hub/models--no-cache/blobs/" + "0" * 64,
        "hub/datasets--a--b/blobs/" + "0" * 64,
        "blobs/" + "0" * 64,
    ],
)
def test_link_to_what_only_looks_like_a_cache_is_not_followed(model, tmp_path, target):
    for kind in ("models", "datasets"):
        (tmp_path / "hub" / f"{kind}--a--b" / "snapshots").mkdir(parents=True)
    secret = tmp_path / target
    secret.parent.mkdir(parents=True, exist_ok=True)
    secret.write_bytes((model / "s1.safetensors").read_bytes())
    (model / "link.safetensors").symlink_to(f"../{target}")
    index = write_index(model, {"t1": "link.safetensors"})
    refused(index, LayoutError, "'link.safetensors'", "cp -rL")


def test_linked_model_directory_is_read(model, tmp_path):
    write_index(model, {"t1": "s1.safetensors", "t2": "s2.safetensors"})
    (tmp_path / "link").symlink_to(model)
    assert set(everything(tmp_path / "link")) == {"t1", "t2"}


def test_cache_whose_shard_leads_out_of_the_blobs_is_refused(model, tmp_path):
    write_index(model, {"t1": "s1.safetensors", "t2": "s2.safetensors"})
    link_into_blobs(model, tmp_path / "blobs", [INDEX, "s1.safetensors"])
    (model / "s2.safetensors").unlink()
    (model / "s2.safetensors").symlink_to("../secret.safetensors")
    with pytest.raises(LayoutError, match=r"s2\.safetensors"):
        weighlock.open(model / INDEX)


def test_more_shards_than_descriptors_may_be_held(tmp_path, no_leaks):
    names = {f"t{n}": f"s{n}.safetensors" for n in range(40)}
    for number, (name, file) in enumerate(names.items()):
        content = file_bytes({name: entry("U8", (1,), (0, 1))}, bytes([number]))
        (tmp_path / file).write_bytes(content)
    write_index(tmp_path, names)
    before = len(os.listdir("/proc/self/fd"))
    with weighlock.open(tmp_path) as catalog:
        loaded = {name: ref.load().tolist() for name, ref in catalog.items()}
        assert len(os.listdir("/proc/self/fd")) - before <= 32
    assert loaded == {f"t{n}": [n] for n in range(40)}
