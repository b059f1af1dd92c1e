"""The virtual file: what any tensors are as a safetensors file that nobody wrote."""

import json
import struct

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_samples import every_tensor, expected_bytes, read, whole
from unit_samples import sample

import weighlock
from weighlock.errors import FormatError, LayoutError, LimitExceeded
from weighlock.limits import Limits
from weighlock.sources.local import BytesSource
from weighlock.tensors.dtypes import DType
from weighlock.tensors.spec import Layout, Span, TensorSpec
from weighlock.tensors.stored import StoredRef
from weighlock.transfer.contents import Contents
from weighlock.transfer.layout import lay_out

__all__ = ["every_tensor"]  # a fixture of this module


def contents_of(tensors, metadata=None, **options):
    return Contents(lay_out(tensors, metadata, **options))


def header_of(content):
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), 8 + length


@given(st.data())
def test_any_range_of_any_tensors_is_that_range_of_the_whole(every_tensor, data):
    names = data.draw(st.lists(st.sampled_from(sorted(every_tensor)), unique=True, max_size=6))
    contents = contents_of({name: every_tensor[name] for name in names}, {"made": "here"})
    content = whole(contents)
    assert len(content) == contents.size
    header, start = header_of(content)
    aliases = header.pop("__metadata__", {})
    for name in names:
        entry = header[name if name in header else aliases[name]]
        first, last = entry["data_offsets"]
        assert content[start + first : start + last] == expected_bytes(every_tensor[name])
    for _ in range(5):
        first = data.draw(st.integers(0, len(content)))
        length = data.draw(st.integers(0, len(content) - first))
        assert read(contents, first, length) == content[first : first + length]
    contents.close()


def test_everything_at_once_opens_with_the_reference(every_tensor):
    contents = contents_of(every_tensor)
    reference = dict(safetensors.deserialize(whole(contents)))
    assert set(every_tensor) - set(reference) == {"tied again"}
    for name, entry in reference.items():
        assert bytes(entry["data"]) == expected_bytes(every_tensor[name])
    contents.close()


def test_everything_at_once_opens_with_us_under_every_name(every_tensor):
    contents = contents_of(every_tensor)
    catalog = weighlock.open(whole(contents))
    assert set(catalog) == set(every_tensor)
    for name, tensor in every_tensor.items():
        assert b"".join(map(bytes, catalog[name].pieces())) == expected_bytes(tensor)
    contents.close()


@pytest.mark.parametrize("tied", ["alias", "copy"])
def test_it_reads_as_the_file_that_save_writes(tied, every_tensor, tmp_path):
    path = tmp_path / "a"
    weighlock.save(path, every_tensor, metadata={"k": "v"}, tied=tied, durable=False)
    contents = contents_of(every_tensor, {"k": "v"}, tied=tied)
    with weighlock.open(path) as saved:
        virtual = weighlock.open(whole(contents))
        assert set(virtual) == set(saved)
        assert virtual.aliases == saved.aliases
        for name, ref in saved.items():
            assert virtual[name].spec == ref.spec
            assert list(map(bytes, virtual[name].pieces())) == list(map(bytes, ref.pieces()))
    contents.close()


def test_data_of_every_dtype_is_aligned_to_its_elements(every_tensor):
    file = lay_out(every_tensor)
    assert len(file.header) % 8 == 0
    for segment in file.segments:
        assert segment.span.offset % max(1, segment.ref.dtype.bits // 8) == 0


def test_segments_lie_end_to_end(every_tensor):
    file = lay_out(every_tensor)
    reached = len(file.header)
    for segment in file.segments:
        assert segment.span.offset == reached
        assert segment.span.length == segment.ref.nbytes > 0
        reached = segment.span.end
    assert reached == file.size


@settings(max_examples=40)
@given(st.data())
def test_touched_parts_tile_a_span_behind_the_header(every_tensor, data):
    file = lay_out(every_tensor)
    first = data.draw(st.integers(len(file.header), file.size))
    span = Span(first, data.draw(st.integers(0, file.size - first)))
    reached = span.offset
    for segment, begin, end in file.touched(span):
        assert begin < end <= segment.span.length
        assert segment.span.offset + begin == reached
        reached += end - begin
    assert reached == span.end


def test_same_tensors_give_the_same_file():
    arrays = {"a": sample("F32", (4, 4)), "b": sample("I8", (9,))}
    assert lay_out(arrays).header == lay_out(dict(arrays)).header


def test_nothing_is_a_file_too():
    contents = contents_of({})
    assert dict(weighlock.open(whole(contents))) == {}
    assert contents.size == len(contents.file.header)


@pytest.mark.parametrize(
    "tensors",
    [{"__metadata__": np.zeros(3)}, {"a": np.zeros(3, object)}, {"a": [1, 2]}, {"": "x"}],
)
def test_what_cannot_lie_in_a_safetensors_file_is_refused(tensors):
    with pytest.raises((FormatError, TypeError)):
        lay_out(tensors)


def test_metadata_must_be_text():
    with pytest.raises(FormatError, match="text"):
        lay_out({"a": np.zeros(3)}, {"a": 3})


def test_metadata_of_a_catalog_is_kept_unless_there_is_other(tmp_path):
    weighlock.save(tmp_path / "a", {"a": np.zeros(3)}, metadata={"k": "old"}, durable=False)
    with weighlock.open(tmp_path / "a") as catalog:
        kept, _ = header_of(lay_out(catalog).header)
        replaced, _ = header_of(lay_out(catalog, {"k": "new"}).header)
    assert kept["__metadata__"] == {"k": "old"}
    assert replaced["__metadata__"] == {"k": "new"}


def test_header_has_a_bound():
    with pytest.raises(LayoutError, match="500 are allowed"):
        lay_out({"a" * 1000: np.zeros(3)}, limits=Limits(header_bytes=500))


@pytest.mark.parametrize("strides", [(0, 0), (0, 1), (1, 0), (1, 1), (1, -1)])
def test_tensor_of_a_file_is_not_made_large_by_repeating_its_elements(strides):
    shape = (20_000, 20_000)
    source = BytesSource(bytes(40_000))
    start = 20_000 if -1 in strides else 0
    spec = TensorSpec("a", DType.U8, shape)
    ref = StoredRef(spec, source, Span(0, 40_000), Layout(start, shape, strides))
    assert lay_out({"a": ref}).size > 400_000_000
    with pytest.raises(LimitExceeded, match=r"'a', of repeated elements: 400,000,000 asked"):
        lay_out({"a": ref}, limits=Limits(expanded_bytes=399_999_999))
    once = StoredRef(TensorSpec("a", DType.U8, (200, 200)), source, Span(0, 40_000))
    turned = StoredRef(once.spec, source, once.span, Layout(0, (200, 200), (1, 200)))
    lay_out({"a": once, "b": turned.renamed("b")}, limits=Limits(expanded_bytes=0))


def test_what_is_no_mapping_is_named_with_what_to_pass():
    import torch

    with pytest.raises(LayoutError, match=r"a Linear is .* pass its state_dict\(\)"):
        lay_out(torch.nn.Linear(2, 2))
    for wrong in ("model.pt", None, [("a", sample("F32", (2,)))]):
        with pytest.raises(LayoutError, match=r"pass a state dict, or what weighlock\.open gives"):
            lay_out(wrong)
