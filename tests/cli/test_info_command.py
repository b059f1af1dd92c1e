"""`weighlock info` as a real process."""

import json
import os
import pickle

import ml_dtypes
import numpy as np
import pytest
from cli_checks import ESCAPES, assert_refused, layers, save, succeeded

from process.plain_server import PlainServer


def test_a_single_file(tmp_path, weighlock_command):
    arrays = {
        "a": np.zeros((1000, 2), ml_dtypes.bfloat16),
        "b": np.zeros(10, ml_dtypes.bfloat16),
        "c": np.zeros(3, np.int64),
    }
    path = save(tmp_path / "a.safetensors", arrays, metadata={"step": "7", "long": "x" * 500})
    facts = json.loads(succeeded(weighlock_command("info", path, "--json")))
    assert facts == {
        "path": str(path),
        "tensors": 3,
        "parameters": 2013,
        "bytes": 4044,
        "dtypes": {
            "BF16": {"tensors": 2, "parameters": 2010, "bytes": 4020},
            "I64": {"tensors": 1, "parameters": 3, "bytes": 24},
        },
        "tied": {},
        "shards": {},
        "metadata": {"step": "7", "long": "x" * 500},
    } | {key: facts[key] for key in facts if key not in INFO_KEYS}
    text = succeeded(weighlock_command("info", path))
    assert "4,044 (4.04 kB)" in text
    assert "2,013" in text
    assert "step : 7" in text
    assert max(map(len, text.splitlines())) < 300


INFO_KEYS = {"path", "tensors", "parameters", "bytes", "dtypes", "tied", "shards", "metadata"}


def test_a_sharded_model(tmp_path, weighlock_command):
    save(tmp_path / "model", layers(), max_shard_bytes=150, metadata={"step": "7"})
    facts = json.loads(succeeded(weighlock_command("info", tmp_path / "model", "--json")))
    assert facts["tensors"] == 7
    assert facts["bytes"] == 128 + 3 * 80
    assert facts["metadata"] == {"total_size": "368", "step": "7"}
    shards = facts["shards"]
    assert list(shards) == sorted(shards)
    assert sum(shard["tensors"] for shard in shards.values()) == 7
    assert sum(shard["bytes"] for shard in shards.values()) == facts["bytes"]
    text = succeeded(weighlock_command("info", tmp_path / "model"))
    for name in shards:
        assert name in text
    paths = [tmp_path / "model" / name for name in shards]
    assert (facts["format"], facts["files"]) == ("sharded safetensors", len(shards))
    assert facts["file_bytes"] == sum(path.stat().st_size for path in paths)
    assert f"format      sharded safetensors, {len(shards)} files\n" in text


def test_format_and_size_of_every_kind_of_file(tmp_path, weighlock_command):
    torch = pytest.importorskip("torch")
    state = {"a": torch.ones(30)}
    torch.save(state, tmp_path / "zip")
    torch.save(state, tmp_path / "legacy", _use_new_zipfile_serialization=False)
    save(tmp_path / "safe", {"a": np.ones(30)})
    save(tmp_path / "empty", {})
    for name, write in (("npz", np.savez), ("deflated", np.savez_compressed), ("npy", np.save)):
        with open(tmp_path / name, "wb") as file:
            write(file, np.ones(30))
    (tmp_path / "pickle").write_bytes(pickle.dumps({"a": np.ones(30)}))
    formats = {
        "zip": "PyTorch ZIP checkpoint",
        "legacy": "PyTorch legacy checkpoint",
        "safe": "safetensors",
        "empty": "safetensors",
        "npz": "npz",
        "deflated": "npz",
        "npy": "npy",
        "pickle": "pickle",
    }
    paths = [tmp_path / name for name in formats]
    facts = json.loads(succeeded(weighlock_command("info", *paths, "--json")))
    assert [each["format"] for each in facts] == list(formats.values())
    assert [each["file_bytes"] for each in facts] == [path.stat().st_size for path in paths]
    text = succeeded(weighlock_command("info", tmp_path / "npy"))
    assert "format      npy\nfile size   368 (368 B)\n" in text
    with PlainServer({"/m": (tmp_path / "zip").read_bytes()}) as server:
        facts = json.loads(succeeded(weighlock_command("info", server.url("/m"), "--json")))
    assert facts["format"] == "PyTorch ZIP checkpoint"
    assert facts["file_bytes"] == (tmp_path / "zip").stat().st_size


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_format_of_what_many_processes_saved(tmp_path, weighlock_command):
    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    dcp.save({"a": torch.ones(30)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    facts = json.loads(succeeded(weighlock_command("info", tmp_path / "dcp", "--json")))
    assert (facts["format"], facts["files"]) == ("PyTorch distributed checkpoint", 1)


def test_tied_tensors_count_once_and_are_told(tmp_path, weighlock_command):
    array = np.zeros((4, 4), np.float32)
    tensors = {"embed": array, "head": array, "other": array.copy()}
    path = save(tmp_path / "a.safetensors", tensors, tied="alias")
    facts = json.loads(succeeded(weighlock_command("info", path, "--json")))
    assert facts["tensors"] == 3
    assert facts["parameters"] == 32
    assert facts["bytes"] == 128
    assert facts["tied"] == {"head": "embed"}
    assert "head = embed" in succeeded(weighlock_command("info", path))


def test_a_file_of_nothing(tmp_path, weighlock_command):
    path = save(tmp_path / "a.safetensors", {})
    facts = json.loads(succeeded(weighlock_command("info", path, "--json")))
    assert (facts["tensors"], facts["parameters"], facts["bytes"]) == (0, 0, 0)
    succeeded(weighlock_command("info", path))


def test_text_from_a_file_cannot_move_a_terminal(tmp_path, weighlock_command):
    array = np.zeros(4)
    path = save(
        tmp_path / "a.safetensors",
        {"embed": array, ESCAPES: array},
        tied="alias",
        metadata={f"key {ESCAPES}": f"value {ESCAPES}", "\U000e0001": "\u2028"},
    )
    text = succeeded(weighlock_command("info", path))
    assert r"\x1b[31mred" in text
    facts = json.loads(succeeded(weighlock_command("info", path, "--json")))
    assert facts["metadata"][f"key {ESCAPES}"] == f"value {ESCAPES}"
    assert facts["metadata"]["\U000e0001"] == "\u2028"
    assert facts["tied"] == {ESCAPES: "embed"}


def test_a_path_that_is_not_unicode(tmp_path, weighlock_command):
    save(tmp_path / "a.safetensors", {"a": np.zeros(3)})
    path = os.path.join(os.fsencode(tmp_path), b"\xff.safetensors")
    os.rename(tmp_path / "a.safetensors", path)
    name = os.fsdecode(path)
    for verb in (["info"], ["verify"], ["ls"], ["verify", "--data"]):
        succeeded(weighlock_command(*verb, name))
        json.loads(succeeded(weighlock_command(*verb, name, "--json")))


def test_what_is_broken_says_so(tmp_path, weighlock_command):
    path = save(tmp_path / "a.safetensors", layers())
    os.truncate(path, os.path.getsize(path) - 1)
    assert_refused(weighlock_command("info", path), "a.safetensors")


def test_several_paths(tmp_path, weighlock_command):
    one = save(tmp_path / "one.safetensors", {"w": np.zeros(2)})
    np.savez(tmp_path / "other.npz", w=np.zeros(3), text=np.array(["x"]))
    other = tmp_path / "other.npz"
    text = succeeded(weighlock_command("info", one, other))
    assert [line for line in text.splitlines() if line.startswith("path")] == [
        f"path        {one}",
        f"path        {other}",
    ]
    facts = json.loads(succeeded(weighlock_command("info", one, other, "--json")))
    assert [each["parameters"] for each in facts] == [2, 3]
    result = weighlock_command("info", one, tmp_path / "none", "--json")
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    facts = json.loads(result.stdout)
    assert facts[0]["tensors"] == 1
    assert "none: cannot be opened" in facts[1]["error"]


def test_notes_are_facts_too(tmp_path, weighlock_command):
    folder = tmp_path / "model"
    save(folder, layers(), max_shard_bytes=150)
    with PlainServer({f"/{path.name}": path.read_bytes() for path in folder.iterdir()}) as server:
        url = server.url("/model.safetensors.index.json")
        result = weighlock_command("info", url, "--json")
        (note,) = json.loads(succeeded(result))["notes"]
        assert result.stderr == f"note: {note}\n"
    facts = json.loads(succeeded(weighlock_command("info", folder, "--json")))
    assert facts["notes"] == []
