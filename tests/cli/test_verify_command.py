"""`weighlock verify` as a real process."""

import json
import os
import re

import ml_dtypes
import numpy as np
import pytest
from cli_checks import ESCAPES, assert_refused, layers, on_a_terminal, save, succeeded

import weighlock

NAN, INF = np.nan, np.inf


def with_bits(dtype, *codes):
    return np.array(codes, np.uint8).view(dtype)


ODD = {
    # array, NaN in it, Inf in it
    "f64": (np.array([1, NAN, INF, -INF]), 1, 2),
    "f32": (np.array([[NAN, 1], [-INF, NAN]], np.float32), 2, 1),
    "f16": (np.array([INF, 65504], np.float16), 0, 1),
    "bf16": (np.array([NAN, INF, -INF, 3e38], ml_dtypes.bfloat16), 1, 2),
    "f8_e4m3": (with_bits(ml_dtypes.float8_e4m3fn, 0x7F, 0xFF, 0x7E, 0), 2, 0),
    "f8_e5m2": (with_bits(ml_dtypes.float8_e5m2, 0x7C, 0xFC, 0x7D, 0x7B), 1, 2),
    "f8_e8m0": (with_bits(ml_dtypes.float8_e8m0fnu, 0xFF, 0, 0x7F), 1, 0),
    "f8_e4m3fnuz": (with_bits(ml_dtypes.float8_e4m3fnuz, 0x80, 0x7F, 0), 1, 0),
    "f8_e5m2fnuz": (with_bits(ml_dtypes.float8_e5m2fnuz, 0x80, 0x7F, 0), 1, 0),
    "c64": (np.array([complex(NAN, 1), complex(1, INF), complex(NAN, INF), 1], np.complex64), 2, 1),
    "number": (np.array(NAN, np.float32), 1, 0),
}
FINE = {
    "i64": np.array([2**63 - 1, -(2**63)]),
    "u16": np.array([0x7F80, 0xFFFF], np.uint16),
    "bool": np.array([True]),
    "f4": with_bits(ml_dtypes.float4_e2m1fn, 7, 15),
    "empty": np.zeros((0, 3), np.float32),
    "largest": np.array([3.4e38, -0.0, 1e-45], np.float32),
}


@pytest.fixture
def odd(tmp_path):
    arrays = {name: array for name, (array, _, _) in ODD.items()} | FINE
    return save(tmp_path / "odd.safetensors", arrays)


def test_a_good_file(tmp_path, weighlock_command):
    path = save(tmp_path / "a.safetensors", layers())
    said = succeeded(weighlock_command("verify", path))
    assert said == f"{path}: valid (headers and sizes): 7 tensors, 368 B\n"
    said = succeeded(weighlock_command("verify", "--data", "--finite", path))
    assert said == f"{path}: valid (all data, 0 tensors not finite): 7 tensors, 368 B\n"


def test_nan_and_inf_are_counted_for_every_type(odd, weighlock_command):
    result = weighlock_command("verify", "--data", "--json", odd)
    facts = json.loads(succeeded(result))
    assert facts["valid"] is True
    assert facts["tensors"] == len(ODD) + len(FINE)
    assert facts["not_finite"] == {
        name: {"nan": nan, "inf": inf} for name, (_, nan, inf) in ODD.items()
    }
    lines = succeeded(weighlock_command("verify", "--data", odd)).splitlines()
    assert lines[0].split() == ["f64", "1", "NaN", "2", "Inf"]
    assert len(lines) == len(ODD) + 1
    assert f"{len(ODD)} tensors not finite" in lines[-1]


def test_finite_makes_it_the_exit_code(odd, tmp_path, weighlock_command):
    result = weighlock_command("verify", "--data", "--finite", odd)
    assert result.returncode == 1
    assert "not finite" in result.stdout
    assert "Traceback" not in result.stderr
    result = weighlock_command("verify", "--data", "--finite", "--json", odd)
    assert result.returncode == 1
    assert set(json.loads(result.stdout)["not_finite"]) == set(ODD)
    fine = save(tmp_path / "fine.safetensors", FINE)
    succeeded(weighlock_command("verify", "--data", "--finite", fine))


def test_without_data_nothing_is_counted(odd, weighlock_command):
    facts = json.loads(succeeded(weighlock_command("verify", "--json", odd)))
    assert facts["valid"] is True
    assert "not_finite" not in facts


def test_blocks_are_counted_to_their_ends(tmp_path, weighlock_command):
    array = np.zeros(2_500_000, np.float16)
    array[[0, (1 << 20) - 1, 1 << 20, 2_499_999]] = NAN
    array[[1, (1 << 21) - 1, 1 << 21]] = INF
    path = save(tmp_path / "a.safetensors", {"long": array, "wide": array.reshape(1, -1)})
    facts = json.loads(succeeded(weighlock_command("verify", "--data", "--json", path)))
    assert facts["not_finite"] == {"long": {"nan": 4, "inf": 3}, "wide": {"nan": 4, "inf": 3}}


def test_progress_goes_to_stderr(odd):
    said, shown = on_a_terminal("verify", "--data", odd)
    assert re.search(r"reading .*odd\.safetensors: 147 B in .* s \(.*/s\)", shown)
    assert "B/s" not in said


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_that_was_cut_or_grew(tmp_path, weighlock_command, change):
    path = save(tmp_path / "a.safetensors", layers())
    os.truncate(path, os.path.getsize(path) + change)
    assert_refused(weighlock_command("verify", path), "a.safetensors")
    told = weighlock_command("verify", path, "--data", "--json")
    assert told.returncode == 1
    facts = json.loads(told.stdout)
    assert facts["valid"] is False
    assert facts["error"] in told.stderr


@pytest.fixture
def model(tmp_path):
    save(tmp_path / "model", layers(), max_shard_bytes=150)
    return tmp_path / "model"


def test_a_sharded_model(model, weighlock_command):
    assert "7 tensors" in succeeded(weighlock_command("verify", model))
    assert "7 tensors" in succeeded(weighlock_command("verify", "--data", model))


def test_a_shard_that_is_missing_cut_or_swapped(model, weighlock_command):
    shards = sorted(model.glob("*.safetensors"))
    content = shards[1].read_bytes()
    shards[1].write_bytes(content[:-1])
    assert_refused(weighlock_command("verify", model), shards[1].name)
    shards[1].write_bytes(shards[0].read_bytes())
    assert_refused(weighlock_command("verify", model), shards[1].name)
    shards[1].unlink()
    assert_refused(weighlock_command("verify", model), shards[1].name)
    shards[1].write_bytes(content)
    succeeded(weighlock_command("verify", model))


def test_a_tensor_the_index_does_not_know(model, weighlock_command):
    shard = min(model.glob("*.safetensors"))
    with weighlock.open(shard) as catalog:
        arrays = catalog.load() | {"extra": np.zeros(3)}
    save(shard, arrays)
    assert_refused(weighlock_command("verify", model), shard.name, "'extra'")


def test_an_index_that_lists_nothing_of_its_shards(model, weighlock_command):
    (model / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    shard = min(model.glob("*.safetensors"))
    assert_refused(weighlock_command("verify", model), shard.name, "does not list")
    for verb in ("ls", "info"):
        assert shard.name in weighlock_command(verb, model).stderr


@pytest.mark.parametrize("told", [5, "5", {"a": 1}, 10**30, -1, None])
def test_a_total_size_that_is_not_that_of_the_tensors_is_noted(model, weighlock_command, told):
    path = model / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["metadata"]["total_size"] = told
    path.write_text(json.dumps(index))
    result = weighlock_command("verify", "--json", model)
    (note,) = json.loads(succeeded(result))["notes"]
    assert "total_size" in note
    assert f"note: {note}" in result.stderr


def test_a_total_size_that_is_right_or_not_given_is_not_noted(model, weighlock_command):
    path = model / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    for told in (index["metadata"]["total_size"], float(index["metadata"]["total_size"])):
        index["metadata"]["total_size"] = told
        path.write_text(json.dumps(index))
        assert not weighlock_command("verify", model).stderr
    del index["metadata"]
    path.write_text(json.dumps(index))
    assert not weighlock_command("verify", model).stderr


def test_what_is_left_out_is_told(tmp_path, weighlock_command):
    np.savez(tmp_path / "a.npz", ok=np.ones(3), text=np.array(["x"]))
    result = weighlock_command("verify", "--json", tmp_path / "a.npz")
    assert json.loads(succeeded(result))["unreadable"] == {"text": "its elements are texts"}
    assert "note: text is left out" in result.stderr


def test_hostile_names(tmp_path, weighlock_command):
    path = save(tmp_path / f"a{ESCAPES}", {ESCAPES: np.array([NAN])})
    said = succeeded(weighlock_command("verify", "--data", path))
    assert r"\x1b[31mred\x1b[0m\nnext" in said
    assert len(said.splitlines()) == 2
    facts = json.loads(succeeded(weighlock_command("verify", "--data", "--json", path)))
    assert facts["not_finite"] == {ESCAPES: {"nan": 1, "inf": 0}}
    assert facts["path"] == str(path)


def test_several_paths(odd, model, tmp_path, weighlock_command):
    fine = save(tmp_path / "fine.safetensors", FINE)
    lines = succeeded(weighlock_command("verify", fine, model)).splitlines()
    assert [line.partition(": ")[0] for line in lines] == [str(fine), str(model)]
    assert weighlock_command("verify", "--finite", fine, model).returncode == 0
    assert weighlock_command("verify", "--finite", fine, odd).returncode == 1
    assert weighlock_command("verify", "--data", fine, odd).returncode == 0


def test_one_of_several_that_is_not_valid(tmp_path, weighlock_command):
    fine, cut = (save(tmp_path / name, FINE) for name in ("fine", "cut"))
    os.truncate(cut, os.path.getsize(cut) - 1)
    result = weighlock_command("verify", cut, tmp_path / "none", fine)
    assert result.returncode == 1
    assert result.stdout.startswith(f"{fine}: valid")
    assert len(result.stderr.splitlines()) == 2
    result = weighlock_command("verify", cut, tmp_path / "none", fine, "--json")
    assert result.returncode == 1
    facts = json.loads(result.stdout)
    assert [each["valid"] for each in facts] == [False, None, True]
    assert str(cut) in facts[0]["error"]
