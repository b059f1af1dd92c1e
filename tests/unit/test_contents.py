"""The bytes of a virtual file: which pieces they come in, and what is held for them."""

import io
import os
import threading
import weakref
import zipfile

import numpy as np
import pytest
from transfer_samples import read, whole
from unit_samples import descriptors_of, sample

import weighlock
from waiting import until
from weighlock.errors import ShortRead, SourceChanged, SourceError
from weighlock.limits import Limits
from weighlock.sources.local import BytesSource, FileSource
from weighlock.tensors.dtypes import DType
from weighlock.tensors.spec import Layout, Span, TensorSpec
from weighlock.tensors.stored import StoredRef
from weighlock.transfer.contents import Contents
from weighlock.transfer.layout import lay_out
from weighlock.transfer.pieces import FilePart, Several, views_of

MB = 1_000_000


def contents_of(tensors, **options):
    return Contents(lay_out(tensors), **options)


def pieces_of(contents):
    return [
        bytes(piece) if isinstance(piece, memoryview) else piece
        for piece in contents.pieces(Span(0, contents.size))
    ]


@pytest.fixture
def stored(tmp_path):
    """A file of two large tensors and many small ones, opened."""
    arrays = {f"small.{n}": sample("U8", (100,), n) for n in range(200)}
    arrays |= {f"large.{n}": sample("F32", (50_000,), n) for n in range(2)}
    weighlock.save(tmp_path / "a.safetensors", arrays, durable=False)
    with weighlock.open(tmp_path / "a.safetensors") as catalog:
        yield catalog


def test_memory_is_sent_as_it_lies():
    array = sample("U8", (MB,))
    contents = contents_of({"a": array})
    *_, piece = contents.pieces(Span(0, contents.size))
    assert np.shares_memory(np.frombuffer(piece, np.uint8), array)


def test_a_file_is_one_span_for_the_kernel(stored):
    contents = contents_of(stored)
    pieces = pieces_of(contents)
    assert len(pieces) <= 3  # the header, and all tensors as neighbours in one file
    (part,) = [piece for piece in pieces if isinstance(piece, FilePart)]
    assert isinstance(part.file, FileSource)
    assert part.length == stored.nbytes


def test_tiny_tensors_go_through_one_buffer():
    arrays = {f"a{n}": sample("U8", (100,), n) for n in range(1000)}
    contents = contents_of(arrays)
    (piece,) = pieces_of(contents)  # with the header
    assert piece == whole(contents)
    assert piece.endswith(arrays["a999"].tobytes())


def test_small_arrays_come_together_as_they_lie():
    arrays = {f"a{n}": sample("BF16", (20, 300), n) for n in range(100)}
    contents = contents_of(arrays)
    _, *several = contents.pieces(Span(0, contents.size))  # after the header
    (piece,) = several
    assert all(map(np.shares_memory, piece.buffers, arrays.values()))
    assert b"".join(views_of(piece)) == b"".join(array.tobytes() for array in arrays.values())
    assert piece.length == sum(array.nbytes for array in arrays.values())


def test_many_tiny_arrays_do_not_ask_too_much_of_one_call():
    contents = contents_of({f"a{n}": sample("U8", (500,), n) for n in range(1500)})
    pieces = list(contents.pieces(Span(0, contents.size)))
    counts = [len(piece.buffers) for piece in pieces if isinstance(piece, Several)]
    assert counts
    assert max(counts) <= 1024 == os.sysconf("SC_IOV_MAX")


@pytest.mark.parametrize("first", [0, 1, 7, 300, 65_535, 65_536, 65_537, 100_000])
@pytest.mark.parametrize("length", [0, 1, 8, 65_536, 150_001])
def test_ranges_around_the_edges_of_pieces(first, length, stored):
    mixed = dict(stored) | {"memory": sample("U8", (70_000,)), "turned": sample("F32", (90, 90)).T}
    contents = contents_of(mixed)
    content = whole(contents)
    length = min(length, len(content) - first)
    assert read(contents, first, length) == content[first : first + length]
    contents.close()


def test_gathered_tensors_are_kept_within_a_bound():
    arrays = {f"a{n}": sample("U8", (100, 100), n).T for n in range(10)}
    contents = contents_of(arrays, limits=Limits(gathered_bytes=35_000))
    content = whole(contents)
    for name in arrays:
        assert arrays[name].tobytes() in content
    assert 0 < contents._kept.nbytes <= 35_000
    assert whole(contents) == content  # what was dropped is gathered again
    contents.close()


def test_large_gathered_tensor_lies_in_a_file_that_has_no_name(tmp_path):
    array = np.arange(9 * MB, dtype=np.uint8).reshape(1000, 9000).T
    contents = contents_of({"a": array}, directory=str(tmp_path))
    content = whole(contents)
    assert content.endswith(array.tobytes())
    assert os.listdir(tmp_path) == []
    assert descriptors_of(tmp_path) == 2  # the file and its directory
    contents.close()
    assert descriptors_of(tmp_path) == 0


def test_deflated_checkpoint_is_served_without_unpacking_it_first(tmp_path):
    import torch

    raw, packed = io.BytesIO(), io.BytesIO()
    tensor = torch.arange(20_000, dtype=torch.int32)
    torch.save({"a": tensor, "b": tensor[5:]}, raw)
    with (
        zipfile.ZipFile(raw) as old,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    contents = contents_of(weighlock.open(packed.getvalue()))
    content = whole(contents)
    catalog = weighlock.open(content)
    assert catalog["b"].load().tobytes() == tensor[5:].numpy().tobytes()
    assert read(contents, len(content) - 1001, 1001) == content[-1001:]
    contents.close()


def test_copy_makes_memory_free_to_be_written():
    array = sample("F32", (100,)).copy()
    before = array.tobytes()
    contents = contents_of({"a": array, "empty": np.zeros(0)})
    contents.copy_memory()
    array[:] = 0
    assert whole(contents).endswith(before)


def test_gathering_at_once_makes_strided_memory_free_to_be_written(tmp_path):
    array = sample("F32", (50, 60)).copy()
    before = np.ascontiguousarray(array.T).tobytes()
    contents = contents_of({"a": array.T}, directory=str(tmp_path))
    contents.gather_all()
    array[:] = 0
    assert whole(contents).endswith(before)
    contents.close()


def test_originals_of_copies_are_let_go():
    array = sample("F32", (100,)).copy()
    expected, gone = array.tobytes(), weakref.ref(array)
    contents = contents_of({"a": array})
    contents.copy_memory()
    del array
    assert gone() is None
    assert whole(contents).endswith(expected)


def test_arrays_are_pinned_however_they_lie_and_files_never(tmp_path):
    strided = sample("F32", (30, 20)).T
    assert contents_of({"a": strided, "b": strided.copy()}).pinned_bytes == 2 * strided.nbytes
    weighlock.save(tmp_path / "a.safetensors", {"a": strided}, durable=False)
    with weighlock.open(tmp_path / "a.safetensors") as catalog:
        assert contents_of(catalog).pinned_bytes == 0


def test_tied_tensors_are_copied_once():
    array = sample("F32", (100,)).copy()
    contents = contents_of({"a": array, "b": array})
    contents.copy_memory()
    assert contents.pinned_bytes == array.nbytes


def test_file_that_changes_is_noticed(tmp_path):
    path = tmp_path / "a.safetensors"
    weighlock.save(path, {"a": sample("U8", (100_000,))}, durable=False)
    with weighlock.open(path) as catalog:
        contents = contents_of(catalog)
        with open(path, "r+b") as file:
            file.seek(1000)
            file.write(b"changed")
        os.utime(path, ns=(1, 1))
        with pytest.raises(SourceChanged):
            read(contents, 0, contents.size)


def test_file_that_became_shorter_is_noticed(tmp_path):
    path = tmp_path / "a.safetensors"
    weighlock.save(path, {"a": sample("U8", (100_000,))}, durable=False)
    with weighlock.open(path) as catalog:
        contents = contents_of(catalog)
        os.truncate(path, 5000)
        with pytest.raises((ShortRead, SourceChanged)):
            read(contents, 0, contents.size)


def test_after_closing_what_must_be_gathered_is_an_error():
    contents = contents_of({"a": sample("F32", (50, 60)).T})
    contents.close()
    contents.close()
    with pytest.raises(SourceError, match="over"):
        whole(contents)


def test_closing_ends_the_gathering_of_a_large_tensor():
    shape = (32, 1024, 1024)
    closers = []

    class Slow(BytesSource):
        def read_into(self, offset, buffer):
            if not closers:  # somebody closes while it is being gathered
                closers.append(threading.Thread(target=contents.close))
                closers[0].start()
                until(lambda: contents._closing)
            super().read_into(offset, buffer)

    spec = TensorSpec("a", DType.U8, shape)
    ref = StoredRef(spec, Slow(bytes(2048)), Span(0, 2048), Layout(0, shape, (0, 1, 0)))
    contents = Contents(lay_out({"a": ref}))
    with pytest.raises(SourceError, match="share is over"):
        read(contents, contents.size - 10, 10)
    closers[0].join()


def test_closing_lets_go_of_everything():
    contents = contents_of({"a": sample("F32", (50, 60)).T, "b": sample("U8", (10,))})
    contents.copy_memory()
    whole(contents)
    contents.close()
    assert contents._kept.nbytes == 0
    assert not contents.file.segments
