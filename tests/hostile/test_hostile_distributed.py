"""B5 to B11 for distributed checkpoints: metadata that lies, points elsewhere, or would run code."""

import os
import pickle
import struct
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import SerializationFormat, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

import weighlock
from hostile.watching import watched
from interop.make_dcp import grid, write_dcp
from weighlock.errors import FormatError, LayoutError, LimitExceeded, TruncatedFile, WeighlockError
from weighlock.formats.scanning import scan_source
from weighlock.limits import Limits
from weighlock.sources.local import FileSource

open_catalog = weighlock.open  # imported before anything is watched
TENSOR = torch.arange(24.0).reshape(4, 6)
HALVES = grid((4, 6), (2,), ())
SECOND = MetadataIndex("a", (2, 0))


def made(directory, change=lambda metadata: metadata, **options):
    write_dcp(directory, {"a": (TENSOR, HALVES)}, {"step": 7}, change=change, **options)
    return directory


def placed(index, **changes):
    def change(metadata):
        info = metadata.storage_data[index]
        kept = {k: getattr(info, k) for k in ("relative_path", "offset", "length")}
        metadata.storage_data[index] = _StorageInfo(**{**kept, **changes})
        return metadata

    return change


def chunked(offsets, sizes):
    """The second chunk, said to be elsewhere or of another size."""

    def change(metadata):
        chunks = metadata.state_dict_metadata["a"].chunks
        chunks[1] = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        info = metadata.storage_data.pop(SECOND)
        metadata.storage_data[MetadataIndex("a", offsets)] = info
        return metadata

    return change


def described(**changes):
    def change(metadata):
        there = metadata.state_dict_metadata
        there["a"] = replace(there["a"], **changes)
        return metadata

    return change


def without_places(metadata):
    metadata.storage_data.clear()
    return metadata


def of_another_dtype(metadata):
    metadata.state_dict_metadata["a"].properties.dtype = torch.float64
    return metadata


CASES = {
    "a file above": (placed(SECOND, relative_path="../evil"), LayoutError, "without a path"),
    "an absolute file": (placed(SECOND, relative_path="/etc/passwd"), LayoutError, "without"),
    "no file": (placed(SECOND, relative_path="__9_0.distcp"), TruncatedFile, "not there"),
    "a number as file": (placed(SECOND, relative_path=7), LayoutError, "in 7"),
    "beyond the file": (placed(SECOND, offset=10**9), TruncatedFile, "the file has"),
    "a negative offset": (placed(SECOND, offset=-1), LayoutError, "-1"),
    "an offset of 2**70": (placed(SECOND, offset=2**70), LayoutError, "at 1180591620717411303424"),
    "True as length": (placed(SECOND, length=True), LayoutError, "True"),
    "shorter than it is": (placed(SECOND, length=100), FormatError, "end record"),
    "the other chunk's bytes": (placed(SECOND, offset=3), FormatError, ""),
    "one chunk over another": (chunked((1, 0), (2, 6)), LayoutError, "lies over another"),
    "a hole": (chunked((3, 0), (1, 6)), LayoutError, "hold 18 elements"),
    "out of the tensor": (chunked((3, 0), (2, 6)), LayoutError, "reaches out"),
    "another rank": (chunked((2,), (12,)), LayoutError, "dimensions"),
    "another shape": (chunked((2, 0), (2, 6)), None, ""),
    "sizes that overflow": (
        described(size=torch.Size((2**40, 2**40)), chunks=[]),
        LayoutError,
        "larger than any file",
    ),
    "no chunks": (described(chunks=[]), LayoutError, "no chunks"),
    "no place": (without_places, LayoutError, "where"),
    "another dtype": (of_another_dtype, LayoutError, "F32 [2, 6], F64 [2, 6]"),
    "no metadata at all": (lambda _: {"a": 1}, LayoutError, "a dict where PyTorch has"),
    "a list": (lambda _: [TENSOR.shape], LayoutError, "a list where PyTorch has"),
}


@pytest.mark.parametrize(("change", "kind", "says"), CASES.values(), ids=CASES)
def test_hostile_metadata_is_refused_with_a_reason(tmp_path, change, kind, says, no_leaks):
    directory = made(tmp_path / "ckpt", change)

    def read():
        with open_catalog(directory) as catalog:
            return catalog["a"].load()

    with watched(directory) as seen:
        if kind is None:
            assert read().tobytes() == TENSOR.numpy().tobytes()
        else:
            with pytest.raises(kind) as caught:
                read()
            assert says in str(caught.value)
    assert seen == []


def test_a_link_out_of_the_directory_is_refused(tmp_path):
    directory = made(tmp_path / "ckpt")
    (directory / "__1_0.distcp").rename(tmp_path / "elsewhere")
    (directory / "__1_0.distcp").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LayoutError, match="link out of its directory"):
        open_catalog(directory)


class Evil:
    def __reduce__(self):
        return os.system, ("touch /nowhere/at/all",)


def test_code_in_the_metadata_and_in_objects_is_inert_and_found(tmp_path):
    def planted(metadata):
        metadata.planner_data = Evil()
        return metadata

    directory = tmp_path / "ckpt"
    write_dcp(directory, {"a": (TENSOR, HALVES)}, {"evil": Evil()}, ranks=1, change=planted)
    with watched(directory) as seen, open_catalog(directory) as catalog:
        assert catalog["a"].load().tobytes() == TENSOR.numpy().tobytes()
        assert ("posix", "system") in catalog.globals
        assert "system" in str(catalog.extras["evil"])
    assert seen == []
    for name in (".metadata", "__0_0.distcp"):
        source = FileSource(directory / name)
        found = [(f.module, f.name) for f in scan_source(source) if not f.known]
        source.close()
        assert found == [("posix", "system")], name


def test_chunks_that_were_transformed_are_left_out_and_named(tmp_path):
    directory = made(tmp_path / "ckpt", placed(SECOND, transform_descriptors=["zstd"]))
    with open_catalog(directory) as catalog:
        assert list(catalog) == []
        assert "zstd" in catalog.unreadable["a"]


def test_limits_are_held_before_anything_is_built(tmp_path):
    directory = made(tmp_path / "ckpt")
    for limits in (Limits(tensors=1), Limits(shards=1), Limits(pickle_bytes=100)):
        with pytest.raises(LimitExceeded):
            open_catalog(directory, limits)


def test_every_changed_byte_of_the_metadata_is_a_catalog_or_an_error_of_ours(tmp_path):
    directory = made(tmp_path / "ckpt")
    content = (directory / ".metadata").read_bytes()
    for place in range(0, len(content), 5):
        for value in (0, 0xFF, content[place] ^ 1):
            changed = bytearray(content)
            changed[place] = value
            (directory / ".metadata").write_bytes(changed)
            try:
                with open_catalog(directory) as catalog:
                    for ref in catalog.values():
                        ref.load()
            except WeighlockError:
                continue


def test_an_index_that_hides_its_name_in_a_tuple_is_no_index(tmp_path):
    directory = made(tmp_path / "ckpt")
    raw = pickle.dumps({("a", 1): struct.pack("<I", 1)})
    (directory / ".metadata").write_bytes(raw)
    with pytest.raises(LayoutError):
        open_catalog(directory)


@pytest.mark.filterwarnings("ignore::UserWarning:torch.*", "ignore::FutureWarning")
def test_files_that_are_safetensors_are_said_to_be(tmp_path):
    dcp.save(
        {"w": torch.ones(3)},
        storage_writer=dcp.FileSystemWriter(
            tmp_path / "ckpt", serialization_format=SerializationFormat.SAFETENSORS
        ),
        no_dist=True,
    )
    with open_catalog(tmp_path / "ckpt") as catalog, pytest.raises(LayoutError, match="by itself"):
        catalog["w"]
    with open_catalog(tmp_path / "ckpt" / "__0_0.distcp") as catalog:
        assert list(catalog) == ["w"]
