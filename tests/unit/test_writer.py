"""A safetensors file written tensor by tensor: whole at its path, or not there."""

import contextlib
import os
import threading

import ml_dtypes
import numpy as np
import pytest
import torch
from unit_samples import (
    WHOLE_BYTES,
    Memory,
    header_of,
    quick_collections,
    same_bits,
    sample,
    tensor_of,
)

import weighlock
from weighlock.disk.effects import PosixDisk
from weighlock.errors import DiskError, HeaderError, LayoutError, NoSpace, SourceError
from weighlock.tensors.dtypes import DType
from weighlock.tensors.ref import ArrayRef
from weighlock.tensors.spec import Span, TensorSpec
from weighlock.tensors.stored import StoredRef

__all__ = ["quick_collections"]  # a fixture of this module

ARRAYS = {
    "flags": sample("BOOL", (3,)),
    "half": sample("BF16", (5, 7)),
    "codes": sample("F4", (6, 2)),
    "double": sample("F64", (2, 3)),
    "nothing": np.zeros((0, 4), np.float32),
    "single": sample("F32", (3, 3)),
    "number": np.array(-5, np.int64),
    "small": sample("F8_E4M3", (9,)),
}
SPECS = [(name, array.dtype, array.shape) for name, array in ARRAYS.items()]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


@pytest.fixture(params=["specs", "no specs"])
def specs(request):
    return SPECS if request.param == "specs" else None


def assert_holds(path, arrays):
    with weighlock.open(path) as catalog:
        assert set(catalog) == set(arrays)
        for name, array in arrays.items():
            assert same_bits(catalog[name].load(), array), name


def alone(path):
    return [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_tensors_in_the_order_given(path, specs, no_leaks):
    with weighlock.Writer(path, specs) as writer:
        assert writer.path == str(path)
        for name, array in ARRAYS.items():
            writer.write(name, array)
        assert not path.exists()
    assert_holds(path, ARRAYS)
    with weighlock.open(path) as catalog:
        assert list(catalog) == list(ARRAYS)
    assert alone(path)


def test_tensors_in_any_order(path, specs):
    with weighlock.Writer(path, specs) as writer:
        for name in sorted(ARRAYS):
            writer.write(name, ARRAYS[name])
    assert_holds(path, ARRAYS)
    with weighlock.open(path) as catalog:
        assert list(catalog) == (list(ARRAYS) if specs else sorted(ARRAYS))


def test_with_specs_everything_is_aligned(path):
    with weighlock.Writer(path, SPECS, metadata={"step": "7"}) as writer:
        for name in reversed(ARRAYS):
            writer.write(name, ARRAYS[name])
    header, data_start = header_of(path)
    assert data_start % 64 == 0
    for name, array in ARRAYS.items():
        assert header[name]["data_offsets"][0] % max(1, DType.of(array.dtype).bits // 8) == 0


@pytest.mark.parametrize("dtype", [*WHOLE_BYTES, DType.F4])
@pytest.mark.parametrize("announced", [True, False])
def test_every_dtype_from_numpy_and_torch_in_any_layout(path, dtype, announced):
    array = sample(dtype, (4, 6))
    given = {
        "plain": (array, array),
        "transposed": (array.T, array.T),
        "empty": (array[:0], array[:0]),
        "tensor": (tensor_of(array), array),
    }
    if dtype is not DType.F4:
        given["number"] = (array[0, 0], np.asarray(array[0, 0]))
        given["transposed tensor"] = (tensor_of(array).T, array.T)
    wanted = {name: right for name, (_, right) in given.items()}
    specs = [(name, dtype, right.shape) for name, right in wanted.items()] if announced else None
    with weighlock.Writer(path, specs, durable=False) as writer:
        for name, (tensor, _) in given.items():
            writer.write(name, tensor)
    assert_holds(path, wanted)


def test_big_endian_arrays_are_turned(path):
    array = np.arange(6, dtype=">f4").reshape(2, 3)
    with weighlock.Writer(path, durable=False) as writer:
        writer.write("a", array)
        writer.write("b", array.T)
    assert_holds(path, {"a": array.astype("<f4"), "b": array.T.astype("<f4")})


def test_refs_are_copied_from_file_to_file(path, tmp_path, specs):
    weighlock.save(tmp_path / "other", ARRAYS, durable=False)
    with (
        weighlock.open(tmp_path / "other") as catalog,
        weighlock.Writer(path, specs, durable=False) as writer,
    ):
        for name in ARRAYS:
            writer.copy(name, catalog[name])
    assert_holds(path, ARRAYS)


def test_a_ref_is_written_under_the_name_given(path):
    ref = ArrayRef.of("old", np.ones(3, np.float32))
    with weighlock.Writer(path, durable=False) as writer:
        writer.copy("new", ref)
        writer.write("newer", ref)
    assert_holds(path, {"new": ref.load(), "newer": ref.load()})


def test_copies_from_memory_and_from_files_the_kernel_cannot_copy(path, tmp_path):
    class NoCopy(PosixDisk):
        """A disk that cannot copy between files by itself."""

        def copy(self, source_fd, source_offset, fd, offset, count):
            return None

    weighlock.save(tmp_path / "other", ARRAYS, durable=False)
    with weighlock.open(tmp_path / "other") as catalog:
        for specs in (SPECS, None):
            with weighlock.Writer(path, specs, durable=False, disk=NoCopy()) as writer:
                writer.copy_all(list(catalog.values()))
            assert_holds(path, ARRAYS)
    catalog = weighlock.open((tmp_path / "other").read_bytes())
    with weighlock.Writer(path, SPECS, durable=False) as writer:
        writer.copy_all(list(catalog.values()))
    assert_holds(path, ARRAYS)


def test_progress_counts_every_byte(path, tmp_path, specs):
    weighlock.save(tmp_path / "other", ARRAYS, durable=False)
    steps = []
    with weighlock.open(tmp_path / "other") as catalog:
        total = catalog.nbytes
        with weighlock.Writer(path, specs, durable=False, progress=steps.append) as writer:
            writer.copy_all(list(catalog.values()))
        assert sum(steps) == total
        steps.clear()
        with weighlock.Writer(path, specs, durable=False, progress=steps.append) as writer:
            for name, array in ARRAYS.items():
                writer.write(name, array)
    assert sum(steps) == total


# What is refused, and what is left then.


@pytest.mark.parametrize(
    ("name", "tensor", "says"),
    [
        ("other", np.zeros(3), "'other' was not announced"),
        ("a", np.zeros(4, np.float32), r"'a' was announced as F32 \[3\], but is F32 \[4\]"),
        ("a", np.zeros((3, 1), np.float32), r"but is F32 \[3, 1\]"),
        ("a", np.zeros(3, np.int32), r"but is I32 \[3\]"),
        ("a", torch.zeros(3, dtype=torch.bfloat16), r"but is BF16 \[3\]"),
        ("a", [0.0, 0.0, 0.0], "'a' is a list"),
        ("a", torch.zeros(3, device="meta"), "'a' has no data"),
        ("", np.zeros(3, np.float32), "empty"),
        (None, np.zeros(3, np.float32), "NoneType"),
    ],
)
def test_what_is_not_as_announced_is_refused_by_name_and_may_be_put_right(
    path, name, tensor, says, no_leaks
):
    right = np.ones(3, np.float32)
    with weighlock.Writer(path, [("a", "F32", (3,))], durable=False) as writer:
        with pytest.raises(LayoutError, match=says):
            writer.write(name, tensor)
        writer.write("a", right)
    assert_holds(path, {"a": right})


def test_a_tensor_written_twice_is_refused(path, specs):
    with weighlock.Writer(path, specs, durable=False) as writer:
        for name, array in ARRAYS.items():
            writer.write(name, array)
            with pytest.raises(LayoutError, match=f"{name!r} was already written"):
                writer.write(name, array)
    assert_holds(path, ARRAYS)


def test_missing_tensors_leave_the_destination_untouched(path, no_leaks):
    path.write_bytes(b"before")
    with (
        pytest.raises(LayoutError, match="'half' and 6 more was never written"),
        weighlock.Writer(path, SPECS) as writer,
    ):
        writer.write("flags", ARRAYS["flags"])
    assert path.read_bytes() == b"before"
    assert alone(path)


def test_a_tensor_refused_among_others_leaves_no_hole_in_the_file(path, no_leaks):
    """A tensor counts as written only if its bytes are in the file."""
    one = np.ones(3, np.float32)
    writer = weighlock.Writer(path, [("a", "F32", (3,)), ("b", "F32", (3,))], durable=False)
    with pytest.raises(LayoutError, match="'b' was announced"):
        writer.copy_all([ArrayRef.of("a", one), ArrayRef.of("b", np.ones(4, np.float32))])
    with contextlib.suppress(LayoutError):  # the writer gave up, or "a" is still missing
        writer.write("b", one)
        writer.finish()
    assert not path.exists() or same_bits(weighlock.open(path)["a"].load(), one)


def test_refs_that_break_off_leave_no_hole_in_the_file(path, no_leaks):
    one = np.ones(3, np.float32)

    def refs():
        yield ArrayRef.of("a", one)
        raise RuntimeError("no more")

    writer = weighlock.Writer(path, [("a", "F32", (3,))], durable=False)
    with pytest.raises(RuntimeError, match="no more"):
        writer.copy_all(refs())
    with contextlib.suppress(LayoutError):
        writer.finish()
    assert not path.exists() or same_bits(weighlock.open(path)["a"].load(), one)


def test_an_error_in_the_block_discards(path, specs, no_leaks):
    path.write_bytes(b"before")
    with contextlib.suppress(KeyboardInterrupt), weighlock.Writer(path, specs) as writer:
        writer.write("flags", ARRAYS["flags"])
        raise KeyboardInterrupt
    assert path.read_bytes() == b"before"
    assert alone(path)


def failing(nbytes=100, fails_at=50):
    """A tensor whose source breaks off in the middle."""
    spec = TensorSpec("torn", "U8", (nbytes,))
    return StoredRef(spec, Memory(bytes(nbytes), fails_at=fails_at), Span(0, nbytes))


@pytest.mark.parametrize("announced", [True, False])
def test_a_tensor_that_fails_halfway_ends_the_writer(path, announced, no_leaks):
    path.write_bytes(b"before")
    specs = [("torn", "U8", (100,)), ("good", "U8", (3,))] if announced else None
    writer = weighlock.Writer(path, specs)
    writer.write("good", np.zeros(3, np.uint8))
    with pytest.raises(SourceError, match="cannot be read at 50"):
        writer.copy("torn", failing())
    with pytest.raises(LayoutError, match="after the file was finished or given up"):
        writer.write("torn", np.zeros(100, np.uint8))
    with pytest.raises(LayoutError, match="already finished or discarded"):
        writer.finish()
    with pytest.raises(LayoutError, match="already finished or discarded"):
        writer.finish_in_background()
    assert path.read_bytes() == b"before"
    assert alone(path)


def test_a_block_that_swallows_the_failure_writes_nothing_and_says_so(path):
    def swallow():
        with weighlock.Writer(path, durable=False) as writer, pytest.raises(SourceError):
            writer.copy("torn", failing())

    with pytest.raises(LayoutError, match="given up"):
        swallow()
    assert list(path.parent.iterdir()) == []


def test_a_progress_callback_that_raises_ends_the_writer(path, no_leaks):
    def progress(count):
        raise RuntimeError("stop")

    writer = weighlock.Writer(path, progress=progress)
    with pytest.raises(RuntimeError, match="stop"):
        writer.write("a", np.zeros(3))
    with pytest.raises(LayoutError):
        writer.finish()
    assert list(path.parent.iterdir()) == []


def test_writing_after_the_end_is_refused(path, no_leaks):
    writer = weighlock.Writer(path, durable=False)
    writer.write("a", np.zeros(3, np.float32))
    writer.finish()
    with pytest.raises(LayoutError, match="'b' came after"):
        writer.write("b", np.zeros(3))
    with pytest.raises(LayoutError, match="already finished"):
        writer.finish()
    writer.discard()
    assert_holds(path, {"a": np.zeros(3, np.float32)})


def test_finishing_in_the_block_is_enough(path):
    with weighlock.Writer(path, durable=False) as writer:
        writer.write("a", np.zeros(3, np.float32))
        writer.finish()
    assert_holds(path, {"a": np.zeros(3, np.float32)})


def test_discarding_is_idempotent_and_final(path, no_leaks):
    writer = weighlock.Writer(path)
    writer.write("a", np.zeros(3))
    writer.discard()
    writer.discard()
    with pytest.raises(LayoutError):
        writer.write("b", np.zeros(3))
    assert list(path.parent.iterdir()) == []


def test_a_forgotten_writer_leaves_nothing(path, no_leaks):
    weighlock.Writer(path).write("a", np.zeros(3))


def test_arrays_may_change_once_finishing_in_the_background_has_begun(path, no_leaks):
    array = np.ones(1000, np.float32)
    with weighlock.Writer(path, [("a", "F32", (1000,))]) as writer:
        writer.write("a", array)
        finish = writer.finish_in_background()
        array[:] = 2
        finish.result()
        assert finish.done()
        assert path.exists()
    assert_holds(path, {"a": np.ones(1000, np.float32)})


def test_finishing_in_the_background_says_at_once_what_is_missing(path, no_leaks):
    writer = weighlock.Writer(path, SPECS)
    with pytest.raises(LayoutError, match="never written"):
        writer.finish_in_background()
    assert list(path.parent.iterdir()) == []


def test_what_the_disk_says_in_the_background_is_raised_by_result(path, no_leaks):
    class Failing(PosixDisk):
        """A disk whose renames fail."""

        def rename(self, directory, old, new):
            raise OSError(5, "Input/output error")

    writer = weighlock.Writer(path, durable=False, disk=Failing())
    writer.write("a", np.zeros(3))
    finish = writer.finish_in_background()
    for _ in range(2):
        with pytest.raises(DiskError, match="Input/output error"):
            finish.result()
    assert finish.done()
    assert list(path.parent.iterdir()) == []


def test_an_error_after_finishing_has_begun_in_the_background_gives_one_outcome(path, no_leaks):
    syncing, go_on = threading.Event(), threading.Event()

    class Waiting(PosixDisk):
        """A disk that takes its time."""

        def sync(self, fd):
            syncing.set()
            go_on.wait()
            super().sync(fd)

    path.write_bytes(b"before")
    array = np.arange(1000)
    with contextlib.suppress(KeyError), weighlock.Writer(path, disk=Waiting()) as writer:
        writer.write("a", array)
        finish = writer.finish_in_background()
        syncing.wait()
        raise KeyError
    go_on.set()
    try:
        finish.result()
    except DiskError:
        assert path.read_bytes() == b"before"
    else:
        assert_holds(path, {"a": array})
    assert alone(path)


EXITING = """
import sys
import numpy as np
import weighlock

writer = weighlock.Writer(sys.argv[1])
writer.write("a", np.arange(1000))
writer.finish_in_background()
"""


def test_interpreter_exit_waits_for_the_background(path, run_python):
    run_python(EXITING, path)
    assert_holds(path, {"a": np.arange(1000)})


@pytest.mark.parametrize(
    ("where", "says"),
    [
        (lambda base: base / "missing" / "a", "No such file"),
        (lambda base: base, "is a directory"),
        (lambda base: f"{base}/", "names a directory"),
        (lambda base: base / "..", "names a directory"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_at_once(tmp_path, where, says, no_leaks):
    with pytest.raises(DiskError, match=says):
        weighlock.Writer(where(tmp_path))


def test_a_file_that_cannot_fit_is_refused_before_any_work(path, no_leaks):
    with pytest.raises(NoSpace, match="bytes are needed") as caught:
        weighlock.Writer(path, [("a", "U8", (1 << 55,))])
    assert caught.value.wanted_bytes > 1 << 55
    assert 0 < caught.value.free_bytes < 1 << 55
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize(
    "specs",
    [
        [("a", "F32", (3,)), ("a", "F32", (3,))],
        [("a", "F99", (3,))],
        [("a", "F32", (-3,))],
        [("", "F32", (3,))],
    ],
)
def test_specs_that_cannot_be_are_refused_at_once(path, specs, no_leaks):
    with pytest.raises(weighlock.WeighlockError):
        weighlock.Writer(path, specs)
    assert list(path.parent.iterdir()) == []


# Metadata.


@pytest.mark.parametrize("metadata", [None, {}, {"step": "7"}, {"größe": "x\ny", "": ""}])
def test_metadata_comes_back(path, specs, metadata):
    with weighlock.Writer(path, specs, metadata=metadata, durable=False) as writer:
        for name, array in ARRAYS.items():
            writer.write(name, array)
    with weighlock.open(path) as catalog:
        assert dict(catalog.metadata) == (metadata or {})


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, {"format": "pt"}),
        ({"step": "7"}, {"step": "7", "format": "pt"}),
        ({"format": "flax"}, {"format": "flax"}),
    ],
)
def test_torch_tensors_are_marked_unless_the_metadata_says_otherwise(path, given, found):
    for specs in ([("a", "F32", (3,))], None):
        with weighlock.Writer(path, specs, metadata=given, durable=False) as writer:
            writer.write("a", torch.zeros(3))
        with weighlock.open(path) as catalog:
            assert dict(catalog.metadata) == found


@pytest.mark.parametrize(
    "metadata", [{"step": 7}, {7: "step"}, {"a": None}, {"a": "\ud800"}, {"\ud800": "a"}]
)
def test_metadata_that_is_not_text_is_refused(path, metadata, no_leaks):
    with pytest.raises(HeaderError, match="metadata"):
        weighlock.Writer(path, metadata=metadata)
    assert list(path.parent.iterdir()) == []


def test_the_metadata_given_is_not_changed(path):
    metadata = {"step": "7"}
    with weighlock.Writer(path, metadata=metadata, durable=False) as writer:
        writer.write("a", torch.zeros(3))
    assert metadata == {"step": "7"}


# Room for the header.


class Watched(PosixDisk):
    """The machine's disk, which remembers whether it could make room; it can be told not to."""

    def __init__(self, *, insert=True, copy=True):
        self.inserted = []
        self.can_insert = insert
        self.can_copy = copy

    def insert(self, fd, offset, count):
        self.inserted.append(self.can_insert and super().insert(fd, offset, count))
        return self.inserted[-1]

    def copy(self, source_fd, source_offset, fd, offset, count):
        if not self.can_copy:
            return None
        return super().copy(source_fd, source_offset, fd, offset, count)


MANY = {f"layers.{n}.attention.weight": np.full((3, 11), n, np.uint16) for n in range(300)}


@pytest.fixture(params=["tmp_path", "/dev/shm"])
def anywhere(request, tmp_path):
    """A directory where the tests usually write, and one on tmpfs, which cannot make room."""
    if request.param == "tmp_path":
        yield tmp_path
        return
    if not os.path.ismount("/dev/shm") or not os.access("/dev/shm", os.W_OK):
        pytest.skip("there is no tmpfs at /dev/shm")
    import shutil
    import tempfile
    from pathlib import Path

    directory = tempfile.mkdtemp(dir="/dev/shm")
    yield Path(directory)
    shutil.rmtree(directory)


@pytest.mark.parametrize("header_bytes", [0, 4096, 10_000])
@pytest.mark.parametrize(
    "disk", [{}, {"insert": False}, {"insert": False, "copy": False}], ids=["own", "copy", "read"]
)
def test_a_header_that_outgrows_its_room_moves_the_data(anywhere, header_bytes, disk, no_leaks):
    path = anywhere / "model.safetensors"
    path.write_bytes(b"before")
    watched = Watched(**disk)
    with weighlock.Writer(path, header_bytes=header_bytes, durable=False, disk=watched) as writer:
        for name, array in MANY.items():
            writer.write(name, array)
        assert path.read_bytes() == b"before"
    assert len(watched.inserted) == 1
    if disk or str(anywhere).startswith("/dev/shm"):
        assert watched.inserted == [False]
    assert_holds(path, MANY)
    assert alone(path)
    assert header_of(path)[1] % 64 == 0


def test_a_header_that_fits_moves_nothing(path):
    watched = Watched()
    with weighlock.Writer(path, durable=False, disk=watched) as writer:
        for name, array in MANY.items():
            writer.write(name, array)
    assert watched.inserted == []
    assert_holds(path, MANY)


def test_a_large_data_section_moves_too(anywhere):
    path = anywhere / "model.safetensors"
    arrays = {f"t{n}": np.full(3_000_001, n, np.uint8) for n in range(4)}
    for disk in (Watched(), Watched(insert=False), Watched(insert=False, copy=False)):
        with weighlock.Writer(path, header_bytes=0, durable=False, disk=disk) as writer:
            for name, array in arrays.items():
                writer.write(name, array)
        assert_holds(path, arrays)


def test_a_failure_while_the_data_moves_leaves_nothing(path, no_leaks):
    class Full(PosixDisk):
        """A disk that cannot make room and is full when the data is to be moved."""

        moving = False

        def insert(self, fd, offset, count):
            self.moving = True
            return False

        def copy(self, source_fd, source_offset, fd, offset, count):
            if self.moving:
                raise OSError(28, "No space left on device")
            return super().copy(source_fd, source_offset, fd, offset, count)

    path.write_bytes(b"before")
    writer = weighlock.Writer(path, header_bytes=0, disk=Full())
    for name, array in MANY.items():
        writer.write(name, array)
    with pytest.raises(NoSpace):
        writer.finish()
    assert path.read_bytes() == b"before"
    assert alone(path)


def test_metadata_that_outgrows_the_room_moves_the_data(path):
    metadata = {"notes": "x" * 10_000}
    with weighlock.Writer(path, metadata=metadata, header_bytes=0, durable=False) as writer:
        writer.write("a", np.arange(5))
    with weighlock.open(path) as catalog:
        assert dict(catalog.metadata) == metadata
        assert catalog["a"].load().tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("header_bytes", [0, 256 * 1024])
def test_no_tensors_and_only_empty_tensors(path, header_bytes):
    for arrays in ({}, {"a": np.zeros((0, 3), np.float32)}):
        with weighlock.Writer(path, header_bytes=header_bytes, durable=False) as writer:
            for name, array in arrays.items():
                writer.write(name, array)
        assert_holds(path, arrays)


# Threads.


@pytest.mark.parametrize("announced", [True, False])
def test_threads_write_at_once(path, announced, no_leaks):
    arrays = {f"t{n}": np.full((100, n + 1), n, np.uint16) for n in range(64)}
    specs = [(name, "U16", array.shape) for name, array in arrays.items()] if announced else None
    together = threading.Barrier(8)
    failures = []

    def work(number):
        together.wait()
        try:
            for n in range(number, 64, 8):
                writer.write(f"t{n}", arrays[f"t{n}"])
        except BaseException as error:
            failures.append(error)

    with weighlock.Writer(path, specs, durable=False) as writer:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
    assert_holds(path, arrays)


def test_of_two_threads_with_one_name_only_one_writes(path):
    results = []
    together = threading.Barrier(4)

    def work(number):
        together.wait()
        try:
            writer.write("a", np.full(1000, number))
            results.append(number)
        except LayoutError as error:
            results.append(str(error))

    with weighlock.Writer(path, durable=False) as writer:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    written = [result for result in results if isinstance(result, int)]
    assert len(written) == 1
    assert_holds(path, {"a": np.full(1000, written[0])})


def test_a_bfloat16_scalar(path):
    with weighlock.Writer(path, durable=False) as writer:
        writer.write("a", ml_dtypes.bfloat16(1.5))
    assert_holds(path, {"a": np.array(1.5, ml_dtypes.bfloat16)})
