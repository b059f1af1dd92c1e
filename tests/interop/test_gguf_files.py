"""GGUF: files of the reference writer and files by the specification read equal, by ranges too."""

import json

import ml_dtypes
import numpy as np
import pytest
import torch

import weighlock
from hostile.make_gguf import F32, Q4_0, Tensor, gguf, pair, sample
from process.plain_server import PlainServer
from suites.counting import CountingSource
from weighlock.formats.gguf import TYPES_KEY
from weighlock.sources.local import BytesSource

RANDOM = np.random.default_rng(7)
ARRAYS = {
    "f32": RANDOM.standard_normal((4, 6)).astype(np.float32),
    "f16": RANDOM.standard_normal((2, 3, 5)).astype(np.float16),
    "f64": RANDOM.standard_normal(7),
    "i8": np.arange(-3, 9, dtype=np.int8).reshape(3, 4),
    "i16": np.arange(5, dtype=np.int16),
    "i32": np.arange(6, dtype=np.int32).reshape(2, 3),
    "i64": np.array([-(2**60), 5], np.int64),
}


def written(path, endianess=None, arrays=ARRAYS):
    """A file by the reference writer, with a block-quantised and a BF16 tensor; what it holds."""
    reference = pytest.importorskip("gguf", reason="needs gguf, the reference reader and writer")
    order = {} if endianess is None else {"endianess": reference.GGUFEndian[endianess]}
    writer = reference.GGUFWriter(path, "llama", **order)
    writer.add_uint32("llama.block_count", 22)
    writer.add_string("general.name", "tiny – ü")
    writer.add_float64("llama.rope.freq_base", 10000.5)
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    writer.add_array("tokenizer.ggml.tokens", ["<s>", "</s>", "a"])
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0, 2.0])
    for name, array in arrays.items():
        writer.add_tensor(name, array.copy())
    if endianess is None:
        bf16 = RANDOM.standard_normal((3, 4)).astype(ml_dtypes.bfloat16)
        kind = reference.GGMLQuantizationType
        writer.add_tensor("bf16", bf16.view(np.uint8), raw_dtype=kind.BF16)
        quantised = reference.quants.quantize(
            RANDOM.standard_normal((2, 64)).astype(np.float32), kind.Q8_0
        )
        writer.add_tensor("q8", quantised, raw_dtype=kind.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return reference.GGUFReader(path)


def test_every_tensor_equals_that_of_the_reference_reader(tmp_path):
    path = tmp_path / "model.gguf"
    reference = written(path)
    with weighlock.open(path) as catalog:
        assert list(catalog) == [tensor.name for tensor in reference.tensors]
        for tensor in reference.tensors:
            loaded = catalog[tensor.name].load()
            assert loaded.tobytes() == tensor.data.tobytes(), tensor.name
            if tensor.name in ARRAYS:
                assert loaded.dtype == ARRAYS[tensor.name].dtype
                np.testing.assert_array_equal(loaded, ARRAYS[tensor.name])
        assert catalog["bf16"].dtype == "BF16"
        assert catalog["bf16"].shape == (3, 4)
        assert (catalog["q8"].dtype, catalog["q8"].shape) == ("U8", (2, 2 * 34))
        assert json.loads(catalog.metadata[TYPES_KEY]) == {"q8": "Q8_0"}
        assert any("1 Q8_0" in note for note in catalog.notes)


def test_metadata_of_the_reference_writer(tmp_path):
    path = tmp_path / "model.gguf"
    written(path)
    with weighlock.open(path) as catalog:
        assert catalog.metadata["general.name"] == "tiny – ü"
        assert catalog.metadata["llama.block_count"] == "22"
        assert catalog.metadata["llama.rope.freq_base"] == "10000.5"
        assert catalog.metadata["tokenizer.ggml.add_bos_token"] == "false"
        assert catalog.extras["tokenizer.ggml.tokens"] == ["<s>", "</s>", "a"]
        assert catalog.extras["tokenizer.ggml.scores"] == [0.5, -1.0, 2.0]


def test_big_endian_files_of_the_reference_writer(tmp_path):
    path = tmp_path / "model.gguf"
    written(path, "BIG")
    with weighlock.open(path) as catalog:
        assert catalog.metadata["llama.block_count"] == "22"
        assert set(catalog) == set(ARRAYS)
        for name, array in ARRAYS.items():
            np.testing.assert_array_equal(catalog[name].load(), array)
            np.testing.assert_array_equal(catalog[name][1:], array[1:])


def test_the_table_of_types_is_the_reference_s():
    reference = pytest.importorskip("gguf", reason="needs gguf, the reference reader and writer")
    from weighlock.formats.gguf import _PLAIN, _QUANTISED

    sizes = reference.constants.GGML_QUANT_SIZES
    theirs = {int(kind): (kind.name, *sizes[kind]) for kind in sizes}
    ours = {kind: (dtype.value, 1, dtype.bits // 8) for kind, dtype in _PLAIN.items()}
    ours |= {kind: tuple(blocks) for kind, blocks in _QUANTISED.items()}
    assert ours == theirs


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("alignment", [8, 32, 4096])
def test_files_by_the_specification(version, order, alignment):
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensors = [Tensor.of("a", array, F32, order), Tensor.of("b", -array, F32, order)]
    pairs = [
        pair("general.alignment", "u32", alignment, order),
        *(pair(kind, kind, 1, order) for kind in ("u8", "i8", "u16", "i16", "i64", "u64", "bool")),
        pair("nested", [["u16"]], [[1, 2], [], [3]], order),
        pair("flags", ["bool"], [1, 0], order),
    ]
    content = gguf(tensors, pairs, version=version, order=order, alignment=alignment)
    with weighlock.open(content) as catalog:
        np.testing.assert_array_equal(catalog["a"].load(), array)
        np.testing.assert_array_equal(catalog["b"][1], -array[1])
        assert catalog.metadata["i64"] == "1"
        assert catalog.metadata["bool"] == "true"
        assert catalog.extras == {"nested": [[1, 2], [], [3]], "flags": [True, False]}


def test_a_file_of_123_tensors_is_not_taken_for_safetensors():
    """The count is at byte 8, and 123 is `{`."""
    one = np.ones(1, np.float32)
    content = gguf([Tensor.of(f"t{n}", one, F32) for n in range(123)])
    assert content[8:9] == b"{"
    with weighlock.open(content) as catalog:
        assert len(catalog) == 123


def test_a_type_of_tomorrow_is_left_out_and_named():
    array = np.arange(4, dtype=np.float32)
    content = gguf([Tensor("new", (4,), 999, bytes(16)), Tensor.of("a", array, F32)])
    with weighlock.open(content) as catalog:
        assert list(catalog) == ["a"]
        assert "999" in catalog.unreadable["new"]
        np.testing.assert_array_equal(catalog["a"].load(), array)


def test_a_slice_reads_its_rows_only():
    array = np.arange(1000 * 256, dtype=np.float32).reshape(1000, 256)
    source = CountingSource(BytesSource(gguf([Tensor.of("a", array, F32)])))
    with weighlock.open(source) as catalog:
        source.taken()
        np.testing.assert_array_equal(catalog["a"][7:9], array[7:9])
        ((_, length),) = source.taken()
        assert length == 2 * 256 * 4


def test_opening_by_url_takes_one_request_and_a_long_header_few_more():
    array = np.arange(400_000, dtype=np.float32)
    tokens = pair("tokens", ["str"], [f"token-{n}" for n in range(120_000)])
    files = {
        "/short.gguf": gguf([Tensor.of("a", array, F32)]),
        "/long.gguf": gguf([Tensor.of("a", array, F32)], [tokens]),
    }
    assert len(tokens) > 2 << 20
    with PlainServer(files) as server:
        with weighlock.open(server.url("short.gguf")) as catalog:
            assert len(server.asked("/short.gguf")) == 1
            np.testing.assert_array_equal(catalog["a"][300_000:300_010], array[300_000:300_010])
            assert len(server.asked("/short.gguf")) == 2
        with weighlock.open(server.url("long.gguf")) as catalog:
            assert len(server.asked("/long.gguf")) <= 4
            assert catalog.extras["tokens"][-1] == "token-119999"


def test_converted_to_safetensors_it_says_the_same(tmp_path, weighlock_command):
    content, arrays = sample()
    source, target = tmp_path / "model.gguf", tmp_path / "model.safetensors"
    source.write_bytes(content)
    done = weighlock_command("convert", source, target)
    assert done.returncode == 0, done.stderr
    with weighlock.open(target) as catalog:
        assert catalog.metadata["general.architecture"] == "llama"
        for name, array in arrays.items():
            np.testing.assert_array_equal(catalog[name].load(), array)
            assert torch.equal(catalog[name].torch(), torch.from_numpy(array))


def test_a_directory_of_one_file_opens_it(tmp_path):
    (tmp_path / "model.gguf").write_bytes(sample()[0])
    with weighlock.open(tmp_path) as catalog:
        assert len(catalog) == 2


def test_quantised_rows_keep_their_outer_shape():
    blocks = bytes(range(18)) * 6  # 3 rows of 2 blocks of 32 elements
    with weighlock.open(gguf([Tensor("q", (64, 3), Q4_0, blocks)])) as catalog:
        assert catalog["q"].shape == (3, 36)
        assert catalog["q"].load().tobytes() == blocks
        assert catalog["q"][1].tobytes() == blocks[36:72]
