"""What can be opened, and what is said of what cannot."""

import io
import os
import pickle
import re
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from unit_samples import Memory, descriptors_of, encode

import weighlock
from weighlock.errors import FormatError, SourceError, TruncatedFile
from weighlock.formats.sharded import build_index
from weighlock.sources.local import FileSource

CONTENT = encode({"a": ("U8", (3,), b"abc")}, {"step": "7"})


FLAX = (
    b"\x81\xa6params\x81\xa7Dense_0\x81\xa6kernel\xc7\x1e\x01"
    b"\x93\x92\x02\x02\xa7float32\xc4\x10" + bytes(16)
)
ONNX = b"\x08\x0e\x12\x07pytorch\x1a\x052.1.0:\xa2\x1c\x12\x01g" + bytes(200)
JOBLIB = (
    b"\x80\x04}\x94\x8c\x01a\x94\x8c\x13joblib.numpy_pickle\x94\x8c\x11NumpyArrayWrapper\x94\x93\x94"
    b")\x81\x94}\x94\x8c\x05shape\x94K\x01\x85\x94sb\x01\xff" + np.ones(1).tobytes() + b"s."
)


def zipped(*names):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in names:
            archive.writestr(name, b"{}")
    return file.getvalue()


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(CONTENT)
    return path


@pytest.mark.parametrize(
    "made",
    [
        str,
        Path,
        lambda path: path.parent,
        lambda path: f"{path.parent}/",
        lambda path: path.read_bytes(),
        lambda path: bytearray(path.read_bytes()),
        lambda path: memoryview(path.read_bytes()),
        lambda path: memoryview(np.fromfile(path, np.uint8)),
        lambda path: Memory(path.read_bytes()),
        FileSource,
    ],
    ids=["str", "Path", "directory", "slash", "bytes", "bytearray", "view", "numpy", "own", "file"],
)
def test_everything_that_can_be_opened(path, made):
    with weighlock.open(made(path)) as catalog:
        assert list(catalog) == ["a"]
        assert catalog["a"].load().tobytes() == b"abc"
        assert dict(catalog.metadata) == {"step": "7"}


def test_a_source_of_one_s_own_is_closed_with_the_catalog(path):
    source = Memory(path.read_bytes())
    weighlock.open(source).close()
    assert source.closed


def test_opening_reads_the_header_and_nothing_else():
    source = Memory(encode({"a": ("U8", (1000,), bytes(1000))}))
    catalog = weighlock.open(source)
    repr(catalog["a"])
    read = max(offset + length for offset, length in source.reads)
    assert read <= max(512, source.size - 1000)


def test_the_name_of_a_file_does_not_matter(path):
    other = path.rename(path.with_name("model.bin"))
    with weighlock.open(other) as catalog:
        assert list(catalog) == ["a"]


@pytest.mark.parametrize("target", [5, None, 1.5, ["a"], object()])
def test_what_cannot_be_a_target_is_a_type_error(target):
    with pytest.raises(TypeError, match="pass a path, bytes or a Source"):
        weighlock.open(target)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"abc", "a text of 3 bytes, not weights.*'abc'"),
        (b"ab\0", "3 bytes are too few"),
        (b"\xc3", "1 bytes are too few"),
        ("Kein Modell für Dich. ".encode() * 40, "text.*'Kein Modell für Dich"),
        (b"\xef\xbb\xbfEntry not found", "text.*'Entry not found'"),
        (b"tjgg\x03\0\0\0" + bytes(100), "old GGML file.*GGUF"),
        (b"fmgg\x01\0\0\0" + bytes(100), "old GGML file.*GGUF"),
        (b"lmgg\x80\xca\0\0" + bytes(100), "old GGML file.*GGUF"),
        (b"algg\x01\0\0\0" + bytes(100), "old GGML file.*GGUF"),
        (b"ggjt\x03\0\0\0" + bytes(100), "old GGML file.*GGUF"),
        (FLAX, "Flax checkpoint.*safetensors"),
        (ONNX, "ONNX file.*safetensors"),
        (b"\0\0\x06\x08\x01\x1a\x02\x08\x01\0" + bytes(100), "TensorFlow checkpoint.*safetensors"),
        (JOBLIB, "joblib file.*save it with numpy"),
        (zlib.compress(JOBLIB, 3), "zlib.*joblib"),
        (zlib.compress(JOBLIB), "zlib.*joblib"),
        (b"\x04\x22\x4d\x18" + bytes(100), "lz4: decompress"),
        (b"7z\xbc\xaf\x27\x1c" + bytes(100), "7-Zip archive: unpack"),
        (b"Rar!\x1a\x07\x01\0" + bytes(100), "RAR archive: unpack"),
        (zipped("metadata.json", "config.json", "model.weights.h5"), "Keras archive.*safetensors"),
        (zipped("word/document.xml"), "not a PyTorch checkpoint; unpack"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "git lfs pull"),
        (b"GGUF\x01\0\0\0" + bytes(100), "GGUF of version 1"),
        (b"PK\5\6" + bytes(18), "nothing in it"),
        (b"\xef\xbb\xbf<!doctype html>" + b"x" * 100, "HTML"),
        (b"Entry not found", "text.*'Entry not found'"),
        (b'{"error": "Repository not found"}', "text.*Repository"),
        (b"# A model\r\n\r\n" + b"words " * 200, "text.*A model"),
        (pickle.dumps({"a": 1}, 0), "a pickle"),
        (pickle.dumps([1, 2], 0), "a pickle"),
        (pickle.dumps({"a": 1}, 1), "a pickle"),
        (pickle.dumps([1, 2], 1), "a pickle"),
        (pickle.dumps({"a": 1}, 4), "a pickle"),
        (b"\x93NUMPY\x01\0" + bytes(100), "numpy"),
        (b"\x89HDF\r\n\x1a\n" + bytes(100), "HDF5"),
        (b"\x1f\x8b\x08" + bytes(100), "gzip"),
        (b"\x28\xb5\x2f\xfd" + bytes(100), "zstd"),
        (b"BZh9" + bytes(100), "bzip2"),
        (b"\xfd7zXZ\0" + bytes(100), "xz"),
        (b"<!DOCTYPE html><html>" + b"x" * 100, "HTML"),
        (b"  \n<html>" + b"x" * 100, "HTML"),
        (bytes(4096), "zeros"),
    ],
)
def test_what_is_something_else_is_called_by_its_name(path, content, says):
    path.write_bytes(content)
    for target in (path, path.parent):
        with pytest.raises(FormatError, match=says) as caught:
            weighlock.open(target)
        assert str(path) in str(caught.value)
    with pytest.raises(FormatError, match=says):
        weighlock.open(content)
    assert descriptors_of(path) == 0


def test_a_safetensors_file_is_never_taken_for_something_else():
    """The first eight bytes are a length and may look like anything."""
    for first in (b"\x80", b"\x1f\x8b", b"BZh", b"<", b"\x78\x9c", b"x"):
        length = int.from_bytes(first.ljust(8, b"\0"), "little")
        text = encode({"a": ("U8", (3,), b"abc")})[8:-3].rstrip()
        content = length.to_bytes(8, "little") + text.ljust(length) + b"abc"
        assert list(weighlock.open(content)) == ["a"]


def test_a_pickle_that_only_speaks_of_joblib_is_read():
    thing = {"note": "joblib.numpy_pickle", "w": np.ones(3)}
    assert list(weighlock.open(pickle.dumps(thing, 4))) == ["w"]


def test_a_directory_of_one_file_or_one_index(tmp_path, path):
    (tmp_path / "notes.txt").write_text("beside")
    (tmp_path / ".hidden.safetensors").write_bytes(b"a temporary of someone")
    with weighlock.open(tmp_path) as catalog:
        assert list(catalog) == ["a"]
    (tmp_path / "other.safetensors").write_bytes(CONTENT)
    with pytest.raises(FormatError, match="2 candidates"):
        weighlock.open(tmp_path)
    for entry in tmp_path.iterdir():
        entry.unlink()
    with pytest.raises(FormatError, match="holds no"):
        weighlock.open(tmp_path)


DIRECTORIES = {
    "transformers": ["model.safetensors", "config.json", "tokenizer.json"],
    "transformers, all frameworks": [
        *("model.safetensors", "pytorch_model.bin", "tf_model.h5", "flax_model.msgpack"),
        *("rust_model.ot", "training_args.bin"),
    ],
    "transformers, old": ["pytorch_model.bin", "training_args.bin"],
    "transformers, a variant": ["model.safetensors", "model.fp16.safetensors"],
    "transformers, variants in shards": [
        *("model.safetensors", "model.fp32-00001-of-00002.safetensors"),
        *("model.fp32-00002-of-00002.safetensors", "model.safetensors.index.fp32.json"),
    ],
    "transformers, only a variant": ["model.fp16.safetensors"],
    "diffusers": ["diffusion_pytorch_model.safetensors", "config.json"],
    "diffusers, a variant": [
        "diffusion_pytorch_model.safetensors",
        *("diffusion_pytorch_model.fp16.safetensors", "diffusion_pytorch_model.non_ema.bin"),
    ],
    "diffusers, old": [
        *("diffusion_pytorch_model.bin", "diffusion_pytorch_model.fp16.bin"),
    ],
    "peft": ["adapter_model.safetensors", "adapter_config.json"],
    "peft, old": ["adapter_model.bin", "adapter_config.json"],
    "peft, while it is trained": [
        *("adapter_model.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"),
        *("training_args.bin", "scaler.pt", "trainer_state.json"),
    ],
    "accelerate": [
        *("pytorch_model.bin", "optimizer.bin", "scheduler.bin", "sampler.bin"),
        *("random_states_0.pkl", "random_states_1.pkl", "scaler.pt"),
    ],
    "trainer": [
        *("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state_0.pth"),
        *("rng_state_1.pth", "training_args.bin"),
    ],
    "llama": ["consolidated.00.pth", "params.json"],
    "a checkpoint beside binaries": ["best.pt", "vocabulary.bin", "lexicon.bin"],
    "some binary": ["whatever.bin"],
    "the name begins alike": ["optimizers.pt", "optimizer.pt"],
}


@pytest.mark.parametrize("names", DIRECTORIES.values(), ids=DIRECTORIES)
def test_the_model_of_a_directory_of_each_library(tmp_path, names):
    """It is the first of these names."""
    for name in names:
        (tmp_path / name).write_bytes(CONTENT if name == names[0] else b"something else")
    with weighlock.open(tmp_path) as catalog:
        assert list(catalog) == ["a"]


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors.index.fp16.json",  # transformers
        "diffusion_pytorch_model.safetensors.fp16.index.json",  # diffusers
        "pytorch_model.bin.index.fp16.json",
    ],
)
def test_a_variant_in_shards_is_a_model_where_there_is_no_other(tmp_path, name):
    stem, ending = name.split(".")[:2]
    shard = f"{stem}.fp16-00001-of-00001.{ending}"
    (tmp_path / shard).write_bytes(CONTENT)
    (tmp_path / name).write_bytes(build_index({"a": shard}, 4))
    for target in (tmp_path, tmp_path / name):
        with weighlock.open(target) as catalog:
            assert list(catalog) == ["a"]
    (tmp_path / f"{stem}.{ending}").write_bytes(CONTENT.replace(b'"a"', b'"b"'))
    with weighlock.open(tmp_path) as catalog:
        assert list(catalog) == ["b"]


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["model.safetensors", "consolidated.safetensors"], "2 candidates (consolidated.saf"),
        (["a.safetensors", "a.fp16.safetensors"], "(a.fp16.safetensors, a.safetensors): open"),
        (["consolidated.00.pth", "consolidated.01.pth"], "(consolidated.00.pth, consolidated.01"),
        (["a.bin", "b.bin", "c.bin"], "3 candidates (a.bin, b.bin, c.bin): open one by name"),
        (["a.pt", "b.pt", "c.pt", "d.pt"], "4 candidates (a.pt, b.pt, c.pt, …): open one by name"),
        (["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"], "2 candidates"),
        (["optimizer.pt", "scheduler.pt"], "no model, only what training goes on from (optimizer"),
        (["model_index.json", "unet", "vae"], "pipeline of several models: open one of its dir"),
        (["README.md"], "no model: no *.safetensors, *.bin"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_directory_of_which_nobody_can_know_the_model(tmp_path, names, says):
    for name in names:
        (tmp_path / name).write_bytes(CONTENT)
    with pytest.raises(FormatError, match=re.escape(says)):
        weighlock.open(tmp_path)


def test_what_training_goes_on_from_can_be_opened_by_name(tmp_path):
    (tmp_path / "optimizer.pt").write_bytes(CONTENT)
    with weighlock.open(tmp_path / "optimizer.pt") as catalog:
        assert list(catalog) == ["a"]


def test_an_index_counts_more_than_the_files_beside_it(tmp_path):
    weighlock.save(tmp_path / "model", {"a": np.ones(3), "b": np.ones(3)}, max_shard_bytes=24)
    with weighlock.open(tmp_path / "model") as catalog:
        assert list(catalog) == ["a", "b"]
    index = tmp_path / "model" / "model.safetensors.index.json"
    (tmp_path / "model" / "other.safetensors.index.json").write_bytes(index.read_bytes())
    with pytest.raises(FormatError, match="2 candidates"):
        weighlock.open(tmp_path / "model")


def test_a_missing_shard_is_noticed_at_opening(tmp_path):
    weighlock.save(tmp_path / "model", {"a": np.ones(3), "b": np.ones(3)}, max_shard_bytes=24)
    (tmp_path / "model" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(TruncatedFile, match="model-00002-of-00002"):
        weighlock.open(tmp_path / "model")


def test_what_is_not_there(tmp_path):
    with pytest.raises(SourceError, match="No such file"):
        weighlock.open(tmp_path / "missing")
    with pytest.raises(SourceError, match="No such file"):
        weighlock.open(tmp_path / "missing.index.json")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read(path):
    path.chmod(0)
    with pytest.raises(SourceError, match="Permission denied"):
        weighlock.open(path)


def test_a_state_dict_is_told_how_it_becomes_a_catalog():
    with pytest.raises(TypeError, match=r"cannot open a dict: weighlock\.Catalog\.of\(tensors\)"):
        weighlock.open({"x": np.zeros(2)})


def test_an_empty_path_is_no_directory():
    with pytest.raises(SourceError, match="the path is empty"):
        weighlock.open("")


def test_what_other_functions_take_second_is_no_limits(path):
    with pytest.raises(TypeError, match="limits= takes a Limits, not 'rb'; there is no mode"):
        weighlock.open(path, "rb")
