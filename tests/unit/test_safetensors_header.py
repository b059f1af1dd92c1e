"""The header of a safetensors file, read and written (`formats/safetensors.py`)."""

import json

import numpy as np
import pytest
from unit_samples import FORMAT, encode, sample

import weighlock
from weighlock.errors import HeaderError, LayoutError, TruncatedFile, UnsupportedDType
from weighlock.formats.safetensors import arrange, build_header, check_metadata
from weighlock.tensors.dtypes import DType
from weighlock.tensors.spec import TensorSpec


def with_header(text, data=b""):
    raw = text if isinstance(text, bytes) else text.encode()
    return len(raw).to_bytes(8, "little") + raw + data


def entry(dtype="U8", shape=(3,), offsets=(0, 3)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize("name", FORMAT)
def test_every_dtype_of_the_format_is_read(name):
    dtype = DType(name)
    nbytes = 8 * dtype.bits // 8
    data = bytes(range(nbytes))
    if name == "BOOL":
        data = bytes(value % 2 for value in data)
    ref = weighlock.open(encode({"a": (name, (2, 4), data)}))["a"]
    assert (ref.dtype, ref.shape, ref.nbytes) == (name, (2, 4), nbytes)
    buffer = bytearray(nbytes)
    ref.load(out=buffer)
    assert buffer == data


def test_tensors_come_in_the_order_of_the_header():
    header = {"b": entry(offsets=(3, 6)), "a": entry(offsets=(0, 3))}
    catalog = weighlock.open(with_header(json.dumps(header), b"abcdef"))
    assert list(catalog) == ["b", "a"]
    assert catalog["b"].load().tobytes() == b"def"


def test_fields_a_reader_must_ignore_are_ignored():
    header = {"a": entry() | {"more": [1, {"x": None}]}}
    assert list(weighlock.open(with_header(json.dumps(header), b"abc"))) == ["a"]


def test_escaped_names_are_read():
    content = encode({'a"\\\n\x1bü': ("U8", (1,), b"x")})
    assert list(weighlock.open(content)) == ['a"\\\n\x1bü']


@pytest.mark.parametrize("metadata", [None, {}, {"a": "b"}, {"x": 'q"\\', "ü": ""}])
def test_metadata_is_read(metadata):
    content = encode({"t": ("U8", (1,), b"x")}, metadata)
    assert dict(weighlock.open(content).metadata) == (metadata or {})


def test_long_json_in_the_texts_of_metadata_is_read():
    # trainers of adapters keep how often each tag of each picture occurs there
    tags = json.dumps({"5_pictures": {f"tag {n}": n % 7 for n in range(70_000)}})
    metadata = {"ss_tag_frequency": tags, "ss_steps": "7"}
    for spelled in (tags, "[{," * 70_000):  # with escapes, and without
        metadata["ss_tag_frequency"] = spelled
        catalog = weighlock.open(encode({"a": ("U8", (3,), b"abc")}, metadata))
        assert dict(catalog.metadata) == metadata
        assert list(catalog) == ["a"]


def test_no_tensors():
    assert len(weighlock.open(with_header("{}"))) == 0
    assert len(weighlock.open(with_header('{"__metadata__":{}}  '))) == 0


def test_removed_names_of_tied_tensors_are_shown():
    tensors = {"embed": ("U8", (3,), b"abc"), "other": ("U8", (1,), b"x")}
    metadata = {"head": "embed", "note": "text", "format": "embed", "other": "embed", "x": "gone"}
    catalog = weighlock.open(encode(tensors, metadata))
    assert list(catalog) == ["embed", "other", "head"]
    assert catalog["head"].name == "head"
    assert catalog["head"].load().tobytes() == b"abc"
    assert catalog["other"].load().tobytes() == b"x"
    assert catalog.nbytes == 4
    assert dict(catalog.metadata) == metadata


@pytest.mark.parametrize(
    ("content", "error", "says"),
    [
        (b"\x02", TruncatedFile, "too few"),
        ((1 << 63).to_bytes(8, "little") + b"{}", HeaderError, "claims"),
        ((200).to_bytes(8, "little") + b"{}", HeaderError, "claims 200 bytes, the file has 2"),
        (with_header("x{}"), HeaderError, "starts with"),
        (with_header(" {}"), HeaderError, "starts with"),
        (with_header('{"a": 5}'), HeaderError, "'a' is described by a int"),
        (with_header('{"a": {}}'), HeaderError, "'a' has no dtype"),
        (with_header('{"__metadata__": {"a": 5}}'), HeaderError, "__metadata__"),
        (with_header('{"__metadata__": []}'), HeaderError, "__metadata__"),
    ],
)
def test_what_is_no_header_is_refused(content, error, says):
    with pytest.raises(error, match=says):
        weighlock.open(content)


@pytest.mark.parametrize(
    ("entries", "data", "error", "says"),
    [
        ({"a": entry("F9")}, b"abc", UnsupportedDType, "'a' has the unknown dtype"),
        ({"a": entry("u8")}, b"abc", UnsupportedDType, "'a' has the unknown dtype"),
        ({"a": entry(shape=(4,))}, b"abc", LayoutError, r"'a'.*takes 4 bytes"),
        ({"a": entry(shape=(-3,))}, b"abc", LayoutError, "'a' has a negative size"),
        ({"a": entry(shape=(3.0,))}, b"abc", LayoutError, r"'a': shape \[3.0\] is not"),
        ({"a": entry(shape=(True, 3))}, b"abc", LayoutError, r"'a': shape \[True, 3\] is not"),
        ({"a": entry(offsets=("0", 3))}, b"abc", LayoutError, r"data_offsets \['0', 3\] is not"),
        ({"a": entry(offsets=(0, 3, 3))}, b"abc", LayoutError, "3 numbers instead of 2"),
        ({"a": entry(offsets=(3, 0))}, b"abc", LayoutError, "'a' lies at 3 to 0"),
        ({"a": entry(offsets=(-3, 0))}, b"abc", LayoutError, "'a' lies at -3 to 0"),
        ({"a": entry(offsets=(0, 4), shape=(4,))}, b"abc", LayoutError, "'a' lies at 0 to 4 of 3"),
        ({"a": entry()}, b"abcd", LayoutError, "end at byte 3 of the data, the file has 4"),
        (
            {"a": entry(offsets=(1, 4))},
            b"abcd",
            LayoutError,
            "'a' starts at 1 and leaves a hole after byte 0",
        ),
        (
            {"a": entry(), "b": entry(offsets=(2, 5))},
            b"abcde",
            LayoutError,
            "'b' starts at 2 and overlaps tensor 'a', which ends at 3",
        ),
        ({"a": entry(), "b": entry()}, b"abc", LayoutError, "overlaps"),
        ({"": entry()}, b"abc", LayoutError, "empty"),
        ({"a\0": entry()}, b"abc", LayoutError, "NUL"),
        ({"a": entry("F4", (3,), (0, 1))}, b"a", LayoutError, "whole bytes"),
    ],
)
def test_contradictions_are_refused_with_the_tensor_and_the_numbers(entries, data, error, says):
    with pytest.raises(error, match=says) as caught:
        weighlock.open(with_header(json.dumps(entries), data))
    assert str(caught.value).startswith("bytes: ")


@pytest.mark.parametrize(
    "text",
    [
        '{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},'
        '"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}',
        '{"a":{"dtype":"U8","dtype":"I8","shape":[3],"data_offsets":[0,3]}}',
        '{"__metadata__":{"x":"1"},"__metadata__":{"x":"2"},'
        '"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}',
        '{"__metadata__":{"x":"1","x":"2"},"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}',
    ],
)
def test_a_key_twice_is_refused_wherever_it_stands(text):
    with pytest.raises(HeaderError, match="occurs twice"):
        weighlock.open(with_header(text, b"abc"))


def test_wide_elements_come_first_and_equals_keep_their_order():
    specs = [
        TensorSpec("a", "U8", (3,)),
        TensorSpec("b", "F32", (1,)),
        TensorSpec("c", "U8", (1,)),
        TensorSpec("d", "F64", (1,)),
        TensorSpec("e", "F32", (0,)),
        TensorSpec("f", "F32", (2,)),
    ]
    arrangement = arrange(specs)
    assert dict(arrangement.offsets) == {"d": 0, "b": 8, "e": 12, "f": 12, "a": 20, "c": 23}
    assert arrangement.data_bytes == 24


def test_a_header_is_padded_to_64_bytes_or_to_the_room_given():
    specs = [TensorSpec("a", "U8", (3,))]
    header = build_header(specs, {"a": 0})
    assert len(header) % 64 == 0
    assert int.from_bytes(header[:8], "little") == len(header) - 8
    assert json.loads(header[8:]) == {"a": entry()}
    roomy = build_header(specs, {"a": 0}, {"x": "y"}, room=1000)
    assert len(roomy) == 1000
    assert json.loads(roomy[8:])["__metadata__"] == {"x": "y"}
    with pytest.raises(LayoutError, match="takes"):
        build_header(specs, {"a": 0}, room=40)


def test_names_of_any_kind_survive_the_header():
    names = ['a"b', "a\\b", "a\nb", "ü", "😀", "\x1b[31m", "\x7f", "\u2028", "a/../b"]
    content = encode({name: ("U8", (1,), bytes([n])) for n, name in enumerate(names)})
    offsets = {name: n for n, name in enumerate(names)}
    header = build_header([TensorSpec(name, "U8", (1,)) for name in names], offsets)
    for opened in (weighlock.open(content), weighlock.open(header + bytes(range(len(names))))):
        assert list(opened) == names
        assert [int(ref.load()[0]) for ref in opened.values()] == list(range(len(names)))


def test_metadata_is_text_or_refused():
    assert check_metadata(None) == {}
    assert check_metadata({"a": "b"}) == {"a": "b"}
    for wrong in ({"a": 1}, {1: "a"}, {"a": "\ud800"}, {"\ud800": "a"}):
        with pytest.raises(HeaderError, match="metadata"):
            check_metadata(wrong)


def test_what_the_reference_reads_and_what_we_write_are_the_same_bytes_of_data(tmp_path):
    array = sample("BF16", (5, 3))
    weighlock.save(tmp_path / "a", {"a": array}, durable=False)
    assert (tmp_path / "a").read_bytes().endswith(array.tobytes())
    assert np.array_equal(weighlock.open(tmp_path / "a")["a"].load(), array, equal_nan=True)
