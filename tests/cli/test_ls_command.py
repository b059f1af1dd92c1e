"""`weighlock ls` as a real process."""

import json
import os

import ml_dtypes
import numpy as np
from cli_checks import ESCAPES, assert_refused, layers, save, succeeded


def test_names_dtypes_shapes_and_bytes_in_the_order_of_the_file(tmp_path, weighlock_command):
    arrays = {
        "b": np.zeros((1000, 2), np.float32),
        "a.long.name": np.zeros((), ml_dtypes.bfloat16),
        "empty": np.zeros((0, 3), bool),
    }
    path = save(tmp_path / "a.safetensors", arrays)
    assert succeeded(weighlock_command("ls", path)).splitlines() == [
        "b            F32   [1000, 2]  8,000",
        "a.long.name  BF16  []             2",
        "empty        BOOL  [0, 3]         0",
        "3 tensors, 2,001 elements, 8 kB",
    ]


def test_patterns_choose(tmp_path, weighlock_command):
    path = save(tmp_path / "a.safetensors", layers())
    lines = succeeded(weighlock_command("ls", path, "layers.1.*", "embed*")).splitlines()
    assert [line.split()[0] for line in lines[:-1]] == [
        "embed.weight",
        "layers.1.attn.weight",
        "layers.1.norm.bias",
    ]
    assert lines[-1].startswith("3 tensors")
    named = succeeded(weighlock_command("ls", path, "--names", "layers.1.*", "--names", "embed*"))
    assert named.splitlines() == lines


def test_each_pattern_must_match(tmp_path, weighlock_command):
    path = save(tmp_path / "a.safetensors", layers())
    one = "no tensor matches 'nothing', and there is no such file"
    assert_refused(weighlock_command("ls", path, "nothing"), one)
    assert_refused(weighlock_command("ls", path, "embed*", "nothing", "--json"), one)
    result = weighlock_command("ls", path, "--names", "nothing")
    assert_refused(result, "no tensor matches 'nothing'")
    assert "file" not in result.stderr


def test_several_paths(tmp_path, weighlock_command):
    one = save(tmp_path / "one.safetensors", {"w": np.zeros(2), "b": np.zeros(1)})
    other = save(tmp_path / "other.npz", {"w": np.zeros(3)})
    assert succeeded(weighlock_command("ls", one, other)).splitlines() == [
        f"{one}:",
        "w  F64  [2]  16",
        "b  F64  [1]   8",
        "2 tensors, 3 elements, 24 B",
        "",
        f"{other}:",
        "w  F64  [3]  24",
        "1 tensor, 3 elements, 24 B",
    ]
    facts = json.loads(succeeded(weighlock_command("ls", one, other, "b", "--json")))
    (b,) = facts[0]["tensors"]  # a pattern that one of them matches is no mistake
    assert (facts[0]["path"], b["name"]) == (str(one), "b")
    assert facts[1] == {"path": str(other), "tensors": [], "notes": [], "unreadable": {}}
    assert_refused(weighlock_command("ls", one, other, "c"), "no tensor matches 'c'")


def test_one_of_several_that_cannot_be_listed(tmp_path, weighlock_command):
    one = save(tmp_path / "one.safetensors", {"w": np.zeros(2)})
    broken = tmp_path / "broken"
    broken.write_bytes(b"x" * 100)
    result = weighlock_command("ls", broken, one)
    assert result.returncode == 1
    assert result.stdout.splitlines()[0] == f"{one}:"
    (line,) = result.stderr.splitlines()
    assert line.startswith("weighlock: ")
    assert "broken" in line
    result = weighlock_command("ls", broken, one, "--json")
    assert result.returncode == 1
    first, second = json.loads(result.stdout)
    assert first == {"path": str(broken), "error": first["error"]}
    assert [fact["name"] for fact in second["tensors"]] == ["w"]


def test_fold_shows_layers_that_differ_in_their_number_as_one(tmp_path, weighlock_command):
    arrays = layers() | {"layers.3.attn.weight": np.zeros((2, 2)), "model2.x": np.zeros(2)}
    path = save(tmp_path / "a.safetensors", arrays)
    lines = succeeded(weighlock_command("ls", "--fold", path)).splitlines()
    assert [line.split() for line in lines] == [
        ["embed.weight", "F32", "[8,", "4]", "128"],
        ["layers.#.attn.weight", "3", "x", "F32", "[4,", "4]", "192"],
        ["layers.#.norm.bias", "3", "x", "F32", "[4]", "48"],
        ["layers.3.attn.weight", "F64", "[2,", "2]", "32"],
        ["model2.x", "F64", "[2]", "16"],
        ["9", "tensors,", "98", "elements,", "416", "B"],
    ]


def test_json(tmp_path, weighlock_command):
    path = save(tmp_path / "a.safetensors", layers())
    facts = json.loads(succeeded(weighlock_command("ls", path, "--json")))
    assert facts[1] == {
        "name": "layers.0.attn.weight",
        "dtype": "F32",
        "shape": [4, 4],
        "bytes": 64,
    }
    assert len(facts) == 7
    folded = json.loads(succeeded(weighlock_command("ls", path, "--json", "--fold")))
    assert folded[1] == {
        "name": "layers.#.attn.weight",
        "dtype": "F32",
        "shape": [4, 4],
        "bytes": 192,
        "count": 3,
    }


def test_shards_and_directories(tmp_path, weighlock_command):
    save(tmp_path / "model", layers(), max_shard_bytes=100)
    one = save(tmp_path / "a.safetensors", layers())
    alike = succeeded(weighlock_command("ls", one))
    assert succeeded(weighlock_command("ls", tmp_path / "model")) == alike
    index = tmp_path / "model" / "model.safetensors.index.json"
    assert succeeded(weighlock_command("ls", index)) == alike


def test_tied_tensors_show_every_name_and_count_once(tmp_path, weighlock_command):
    array = np.zeros((4, 4), np.float32)
    path = save(tmp_path / "a.safetensors", {"embed": array, "head": array}, tied="alias")
    lines = succeeded(weighlock_command("ls", path)).splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["embed", "head"]
    assert lines[-1].endswith("64 B")


def test_names_from_a_file_cannot_move_a_terminal(tmp_path, weighlock_command):
    names = [ESCAPES, "größe", "\u202egnp", "\U000e0001", "😀"]
    path = save(tmp_path / "a.safetensors", {name: np.zeros(1) for name in names})
    for options in ([], ["--fold"]):
        lines = succeeded(weighlock_command("ls", path, *options)).splitlines()
        assert len(lines) == 6
        assert lines[0].startswith(r"\x1b[31mred\x1b[0m\nnext\r\x07\x7f\x9b2J")
        assert lines[1].startswith("größe")
    facts = json.loads(succeeded(weighlock_command("ls", path, "--json")))
    assert [fact["name"] for fact in facts] == names


def test_a_terminal_without_unicode_gets_something_too(tmp_path, weighlock_command):
    path = save(tmp_path / "a.safetensors", {"größe": np.zeros(1), "plain": np.zeros(1)})
    result = weighlock_command("ls", path, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert result.returncode == 0
    assert result.stderr == ""
    assert "plain" in result.stdout
    assert len(result.stdout.splitlines()) == 3


def test_what_cannot_be_listed(tmp_path, weighlock_command):
    assert_refused(weighlock_command("ls", tmp_path / "missing"), "missing", "No such file")
    assert_refused(weighlock_command("ls", tmp_path), "holds no")
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert_refused(weighlock_command("ls", broken), "broken.safetensors", "git lfs pull")
    assert_refused(weighlock_command("ls", tmp_path / ESCAPES), r"\x1b[31mred")
