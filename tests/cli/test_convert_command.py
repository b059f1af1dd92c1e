"""`weighlock convert` as a real process."""

import json

import ml_dtypes
import numpy as np
import pytest
from cli_checks import (
    ESCAPES,
    assert_refused,
    assert_wrong_usage,
    at_once,
    layers,
    on_a_terminal,
    save,
    succeeded,
)

import weighlock


@pytest.fixture
def source(tmp_path):
    return save(tmp_path / "in.safetensors", layers(), metadata={"step": "7"})


@pytest.fixture
def target(tmp_path):
    return tmp_path / "out.safetensors"


@pytest.fixture
def convert(weighlock_command):
    def run(*arguments):
        return weighlock_command("convert", *arguments, "--no-sync")

    return run


def loaded(path):
    with weighlock.open(path) as catalog:
        return {name: ref.load() for name, ref in catalog.items()}, dict(catalog.metadata)


def test_a_copy_is_the_same_and_says_so_in_one_line(source, target, weighlock_command):
    result = weighlock_command("convert", source, target)
    assert succeeded(result) == f"{target}: 7 tensors, 368 B\n"
    arrays, metadata = loaded(target)
    assert list(arrays) == list(layers())
    assert all(np.array_equal(arrays[name], array) for name, array in layers().items())
    assert metadata == {"step": "7"}


def test_progress_goes_to_stderr(source, target):
    said, shown = on_a_terminal("convert", source, target)
    assert f"{source} → {target}: 368 B in " in shown
    assert "B/s" not in said


def test_json(source, target, convert):
    facts = json.loads(succeeded(convert(source, target, "--json")))
    assert {"source": str(source), "target": str(target), "tensors": 7, "bytes": 368}.items() <= (
        facts.items()
    )


def test_select_and_rename(source, target, convert):
    options = ["--select", "layers.[01].*", "--select", "embed*"]
    renames = ["--rename", r"^layers\.(\d+)=blocks.\1", "--rename", r"(?<=\.)weight$=w"]
    succeeded(convert(source, target, *options, *renames))
    arrays, _ = loaded(target)
    assert list(arrays) == [
        "embed.w",
        "blocks.0.attn.w",
        "blocks.0.norm.bias",
        "blocks.1.attn.w",
        "blocks.1.norm.bias",
    ]
    assert (arrays["blocks.1.attn.w"] == 1).all()


def test_a_selection_of_nothing_is_refused(source, target, convert):
    assert_refused(convert(source, target, "--select", "nothing.*"), "nothing.*")
    result = convert(source, target, "--select", "layers.*", "--select", "typo*")
    assert_refused(result, "no tensor matches 'typo*'")
    assert "layers" not in result.stderr


def test_a_rename_that_matches_nothing_is_refused(source, target, convert):
    result = convert(source, target, "--rename", "^layers=blocks", "--rename", "a=b=c")
    assert_refused(result, "--rename 'a=b=c'", "no name of a tensor matches 'a=b'")
    assert not target.exists()
    assert not target.exists()


def test_names_that_collide_are_refused(source, target, convert):
    result = convert(source, target, "--rename", r"\d+=N")
    assert_refused(result, "layers.0.attn.weight", "layers.1.attn.weight", "layers.N.attn.weight")
    assert_refused(convert(source, target, "--rename", ".*="), "empty")
    assert not target.exists()


def test_wrong_usage(source, target, convert):
    wrong = [
        ["--rename", "no equals sign"],
        ["--rename", "(=x"],
        ["--rename", r"a=\9"],
        ["--metadata", "no equals sign"],
        ["--dtype", "float7"],
        ["--max-shard-size", "many"],
        ["--tied", "loosely"],
    ]
    for _, result in at_once(lambda options: convert(source, target, *options), wrong):
        assert_wrong_usage(result)
    assert not target.exists()


@pytest.mark.parametrize("spelling", ["bf16", "torch.bfloat16"])
def test_dtype_converts_floating_point_tensors_and_no_others(tmp_path, target, convert, spelling):
    arrays = {
        "single": np.linspace(-3, 3, 50, dtype=np.float32),
        "double": np.linspace(-3, 3, 50),
        "half": np.linspace(-3, 3, 50).astype(np.float16),
        "already": np.linspace(-3, 3, 50).astype(ml_dtypes.bfloat16),
        "number": np.arange(5),
        "flags": np.array([True, False]),
        "complex": np.array([1 + 2j], np.complex64),
        "huge": np.array([1e39, -1e39, np.nan]),
    }
    source = save(tmp_path / "in.safetensors", arrays)
    succeeded(convert(source, target, "--dtype", spelling))
    found, _ = loaded(target)
    for name in ("single", "double", "half", "already"):
        assert found[name].dtype == ml_dtypes.bfloat16
        assert np.array_equal(found[name], arrays[name].astype(ml_dtypes.bfloat16))
    for name in ("number", "flags", "complex"):
        assert found[name].dtype == arrays[name].dtype
        assert np.array_equal(found[name], arrays[name])
    assert np.isinf(found["huge"][:2].astype(np.float32)).all()


@pytest.mark.parametrize("dtype", ["f4", "f6_e2m3", "i8", "bool", "c64", "u4"])
def test_a_dtype_that_would_destroy_weights_is_refused(source, target, convert, dtype):
    assert_wrong_usage(convert(source, target, "--dtype", dtype))
    assert not target.exists()


def test_shards(source, tmp_path, convert, weighlock_command):
    model = tmp_path / "model"
    succeeded(convert(source, model, "--max-shard-size", "150"))
    names = sorted(entry.name for entry in model.iterdir())
    assert names[-1] == "model.safetensors.index.json"
    assert all(name.startswith("model-0000") for name in names[:-1])
    assert len(names) > 2
    arrays, _ = loaded(model)
    assert all(np.array_equal(arrays[name], array) for name, array in layers().items())
    succeeded(weighlock_command("verify", "--data", model))
    again = tmp_path / "again.safetensors"
    succeeded(convert(model, again))
    arrays, metadata = loaded(again)
    assert list(arrays) == list(layers())
    assert metadata == {"step": "7"}


def test_shards_do_not_go_into_a_directory_that_is_in_use(source, tmp_path, convert):
    model = tmp_path / "model"
    model.mkdir()
    (model / "notes.txt").write_text("mine")
    assert_refused(convert(source, model, "--max-shard-size", "1kB"), "not an empty directory")
    assert [entry.name for entry in model.iterdir()] == ["notes.txt"]


def test_what_exists_is_replaced_only_with_force(source, target, convert):
    target.write_bytes(b"before")
    assert_refused(convert(source, target), str(target), "--force")
    assert target.read_bytes() == b"before"
    succeeded(convert(source, target, "--force"))
    assert len(loaded(target)[0]) == 7
    succeeded(convert(source, target, "-f"))


def test_a_file_converted_onto_itself(source, convert):
    assert_refused(convert(source, source), "--force")
    assert len(loaded(source)[0]) == 7
    succeeded(convert(source, source, "--force", "--select", "layers.2.*", "--dtype", "f16"))
    arrays, metadata = loaded(source)
    assert list(arrays) == ["layers.2.attn.weight", "layers.2.norm.bias"]
    assert all((array == 2).all() and array.dtype == np.float16 for array in arrays.values())
    assert metadata == {"step": "7"}
    assert [entry.name for entry in source.parent.iterdir()] == ["in.safetensors"]


def test_metadata_is_added_to_what_is_there(source, target, convert):
    succeeded(convert(source, target, "--metadata", "author=me", "--metadata", "note=a=b"))
    assert loaded(target)[1] == {"step": "7", "author": "me", "note": "a=b"}
    succeeded(convert(source, target, "--metadata", "step=8", "-f"))
    assert loaded(target)[1] == {"step": "8"}


@pytest.fixture
def tied(tmp_path):
    array = np.arange(16, dtype=np.float32)
    tensors = {"embed": array, "other": np.ones(2), "head": array}
    return save(tmp_path / "tied.safetensors", tensors, tied="alias", metadata={"step": "7"})


def test_tied_tensors_once_or_once_for_each_name(tied, tmp_path, convert):
    modes = [[], ["--tied", "copy"], ["--tied", "alias"]]
    extras = [[], ["--metadata", "author=me"], ["--dtype", "bf16"]]
    cases = [mode + extra for mode in modes for extra in extras]

    def target(options):
        return tmp_path / f"out {' '.join(options)}"

    for options, result in at_once(lambda words: convert(tied, target(words), *words), cases):
        succeeded(result)
        with weighlock.open(target(options)) as catalog:
            assert sorted(catalog) == ["embed", "head", "other"]
            assert np.array_equal(catalog["head"].load(), catalog["embed"].load())
            one = catalog["head"].identity() == catalog["embed"].identity()
            assert one == ("alias" in options)
            author = {"author": "me"} if "--metadata" in options else {}
            names = {"head": "embed"} if "alias" in options else {}
            assert dict(catalog.metadata) == {"step": "7"} | author | names


def test_a_tied_name_that_was_left_out_does_not_come_back(tied, target, convert):
    succeeded(convert(tied, target, "--select", "embed"))
    assert list(loaded(target)[0]) == ["embed"]
    succeeded(convert(tied, target, "-f", "--rename", "^head$=lm_head"))
    assert sorted(loaded(target)[0]) == ["embed", "lm_head", "other"]


def test_hostile_names_and_paths(tmp_path, convert):
    source = save(tmp_path / f"in {ESCAPES}", {ESCAPES: np.arange(3)})
    target = tmp_path / f"out {ESCAPES}"
    succeeded(convert(source, target))
    assert list(loaded(target)[0]) == [ESCAPES]
    assert_refused(convert(source, target), "--force")
    assert_refused(convert(source, tmp_path / "x", "--dtype", "f16", "--select", "?"), "no tensor")


@pytest.mark.parametrize(
    ("where", "says"),
    [("missing/out", "No such file"), ("", "directory"), ("in.safetensors/x", "")],
)
def test_a_target_that_cannot_be_written(source, tmp_path, convert, where, says):
    assert_refused(convert(source, tmp_path / where, "--force"), says)
    assert [entry.name for entry in tmp_path.iterdir()] == ["in.safetensors"]


def test_a_source_that_is_broken_leaves_the_target(source, target, convert):
    target.write_bytes(b"before")
    with open(source, "ab") as file:
        file.write(b"more")
    assert_refused(convert(source, target, "--force"), "in.safetensors")
    assert target.read_bytes() == b"before"
    assert sorted(entry.name for entry in source.parent.iterdir()) == [source.name, target.name]


def test_what_a_reader_should_know_is_told(tmp_path, target, convert):
    path = tmp_path / "two.npy"
    with open(path, "wb") as file:
        np.save(file, np.arange(4))
        np.save(file, np.arange(4))
    result = convert(path, target)
    succeeded(result)
    assert "only the first array is read" in result.stderr
    target.unlink()
    facts = json.loads(succeeded(convert(path, target, "--json")))
    assert facts["tensors"] == 1
    assert "only the first array is read" in facts["notes"][0]


def test_packed_numbers_stay_and_that_is_said(target, convert, tmp_path):
    source = tmp_path / "packed.safetensors"
    arrays = {"p": np.zeros(4, ml_dtypes.float4_e2m1fn), "w": np.zeros(4, np.float32)}
    weighlock.save(source, arrays, durable=False)
    result = convert(source, target, "--dtype", "bf16")
    succeeded(result)
    assert "note: 'p': of less than a byte each, numbers are not converted" in result.stderr
    with weighlock.open(target) as catalog:
        assert [ref.dtype.name for ref in catalog.values()] == ["F4", "BF16"]
