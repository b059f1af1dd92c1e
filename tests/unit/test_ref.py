"""What every ref can do, whatever it refers to."""

import operator
import pickle
import threading
from multiprocessing import get_context

import numpy as np
import pytest
import torch
from unit_samples import WHOLE_BYTES, Memory, file_bytes, same_bits, sample, tensor_of

import weighlock
from weighlock.errors import LayoutError, UnsupportedDType
from weighlock.sources.local import BytesSource
from weighlock.tensors.dtypes import DType
from weighlock.tensors.ref import ArrayRef, TensorRef
from weighlock.tensors.spec import Layout, Span, TensorSpec
from weighlock.tensors.stored import StoredRef
from weighlock.tensors.torch import TorchRef


def spec_of(array):
    return TensorSpec("weight", array.dtype, array.shape)


def in_array(array):
    return ArrayRef.of("weight", array)


def in_fortran_array(array):
    return ArrayRef.of("weight", np.array(array, order="F"))


def in_source(array):
    data = file_bytes(array)
    return StoredRef(spec_of(array), Memory(b"before" + data + b"after"), Span(6, len(data)))


def in_source_transposed(array):
    if array.dtype == DType.F4.numpy:
        pytest.skip("F4 lies in order, or it cannot be read")
    strides = [1]
    for size in array.shape[:-1]:
        strides.append(strides[-1] * size)
    data = b"##" * array.itemsize + np.ascontiguousarray(array.T).tobytes()
    layout = Layout(2, array.shape, tuple(strides[: array.ndim]))
    return StoredRef(spec_of(array), Memory(b"before" + data), Span(6, len(data)), layout)


def in_tensor(array):
    return TorchRef.of("weight", tensor_of(array))


def in_transposed_tensor(array):
    if array.dtype == DType.F4.numpy:
        pytest.skip("F4 has no transpose in torch")
    tensor = tensor_of(array.T.copy())
    return TorchRef.of("weight", tensor.permute(tuple(reversed(range(array.ndim)))))


KINDS = [
    in_array,
    in_fortran_array,
    in_source,
    in_source_transposed,
    in_tensor,
    in_transposed_tensor,
]
SHAPES = [(), (0,), (6,), (4, 6), (2, 0, 4), (2, 3, 4)]
every_kind = pytest.mark.parametrize("kind", KINDS)
every_dtype = pytest.mark.parametrize("dtype", [*WHOLE_BYTES, DType.F4])


def made(kind, dtype, shape=(4, 6)):
    array = sample(dtype, shape)
    return array, kind(array)


def of_every_shape(kind, dtype):
    for shape in SHAPES:
        if shape or dtype is not DType.F4:  # one F4 alone does not fill a byte
            yield made(kind, dtype, shape)


def raw(tensor):
    """The bytes of a tensor, by torch alone."""
    return bytes(
        tensor.contiguous().reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
    )


@every_kind
@every_dtype
def test_load_and_torch_and_pieces_agree_with_the_array(kind, dtype):
    for array, ref in of_every_shape(kind, dtype):
        assert same_bits(ref.load(), array)
        assert same_bits(ref.materialize(), array)
        assert b"".join(map(bytes, ref.pieces())) == file_bytes(array)
        assert b"".join(map(bytes, ref.pieces(16))) == file_bytes(array)
        tensor = ref.torch()
        assert tensor.dtype is getattr(torch, dtype.torch_name)
        assert tensor.shape == tensor_of(array).shape
        assert raw(tensor) == file_bytes(array)
        assert ref.torch(device="cpu").device.type == "cpu"


@every_kind
@every_dtype
def test_what_is_known_without_reading(kind, dtype):
    for array, ref in of_every_shape(kind, dtype):
        shape = array.shape
        assert (ref.name, ref.dtype, ref.shape) == ("weight", dtype, shape)
        assert ref.nbytes == len(file_bytes(array))
        assert ref.get_shape() == list(shape)
        assert type(ref.get_shape()) is list
        assert ref.get_dtype() == dtype.value
        assert type(ref.get_dtype()) is str
        assert isinstance(ref, TensorRef)
        assert repr(ref) == f"<{type(ref).__name__} 'weight' {dtype} {list(shape)}>"
        if shape:
            assert len(ref) == shape[0]
        else:
            with pytest.raises(TypeError, match="no dimensions"):
                len(ref)


@every_kind
@every_dtype
def test_load_fills_what_it_is_given(kind, dtype):
    for array, ref in of_every_shape(kind, dtype):
        target = np.zeros_like(array)
        assert same_bits(ref.load(out=target), array)
        assert same_bits(target, array)
        for buffer in (bytearray(ref.nbytes), memoryview(bytearray(ref.nbytes))):
            ref.load(out=buffer)
            assert bytes(buffer) == file_bytes(array)
        tensor = tensor_of(np.zeros_like(array))
        ref.load(out=tensor)
        assert raw(tensor) == file_bytes(array)


@every_kind
@every_dtype
def test_load_fills_arrays_whose_elements_do_not_lie_in_order(kind, dtype):
    array, ref = made(kind, dtype)
    for target in (
        np.zeros((6, 4), array.dtype).T,
        np.zeros((8, 12), array.dtype)[::2, ::2],
        np.zeros((4, 6), array.dtype)[::-1, ::-1],
    ):
        ref.load(out=target)
        assert same_bits(target, array)


@every_kind
@every_dtype
def test_load_fills_tensors_whose_elements_do_not_lie_in_order(kind, dtype):
    array, ref = made(kind, dtype)
    wide = tensor_of(np.zeros((8, 12), array.dtype))
    target = wide[::2, ::2]
    ref.load(out=target)
    assert raw(target) == file_bytes(array)
    assert raw(wide[1::2]) == bytes(len(raw(wide)) // 2)


INDICES = [
    0,
    -1,
    slice(1, 3),
    slice(None, None, 2),
    slice(None, None, -1),
    (slice(None), 1),
    (slice(None), slice(1, 5, 3)),
    (1, 2),
    ...,
    (..., 3),
    slice(3, 1),
    (slice(2), slice(-3, None)),
]


@every_kind
@every_dtype
def test_slices_are_numpy_s(kind, dtype):
    array, ref = made(kind, dtype)
    for index in INDICES:
        part = ref[index]
        assert isinstance(part, np.ndarray)
        assert same_bits(part, array[index])


@every_kind
def test_every_kind_refuses_the_same_indices(kind):
    _, ref = made(kind, DType.F32)
    for index in (4, -5, (0, 6), (0, 0, 0), None, [0, 1], True, "a", 1.0):
        with pytest.raises(IndexError):
            ref[index]


@every_kind
def test_a_sliced_result_goes_to_torch_as_transformers_does_it(kind):
    array, ref = made(kind, DType.BF16)
    tensor = ref[...].to(device="cpu", dtype=torch.float32)
    assert tensor.dtype is torch.float32
    assert np.array_equal(tensor.numpy(), array.astype(np.float32), equal_nan=True)
    assert ref[1:3].to(device="cpu", dtype=torch.bfloat16).shape == (2, 6)
    assert ref[0, 0].to(device="cpu").shape == ()


@every_kind
def test_a_ref_is_not_iterated_row_by_row(kind):
    _, ref = made(kind, DType.F32)
    with pytest.raises(TypeError):
        iter(ref)


@every_kind
def test_renaming_keeps_the_tensor_and_the_old_ref(kind):
    array, ref = made(kind, DType.F32)
    other = ref.renamed("other")
    assert (other.name, ref.name) == ("other", "weight")
    assert same_bits(other.load(), array)
    assert other.identity() == ref.identity()
    with pytest.raises(LayoutError):
        ref.renamed("")


@every_kind
def test_two_tensors_are_not_one(kind):
    _, first = made(kind, DType.F32)
    _, second = made(kind, DType.F32)
    assert first.identity() != second.identity()
    hash(first.identity())


@every_kind
@every_dtype
def test_a_ref_survives_pickling(kind, dtype):
    array, ref = made(kind, dtype)
    again = pickle.loads(pickle.dumps(ref))
    assert again.spec == ref.spec
    assert same_bits(again.load(), array)


@every_kind
def test_a_ref_is_a_value_that_cannot_be_changed(kind):
    _, ref = made(kind, DType.F32)
    with pytest.raises(AttributeError):
        ref.spec = None
    with pytest.raises((AttributeError, TypeError)):
        ref.anything = 1


BAD_OUT = {
    "wrong shape": (lambda: np.zeros((6, 4), np.float32), "out= is"),
    "wrong rank": (lambda: np.zeros(24, np.float32), "out= is"),
    "wrong dtype": (lambda: np.zeros((4, 6), np.int32), "out= is"),
    "other byte order": (lambda: np.zeros((4, 6), ">f4"), "out= is"),
    "read-only array": (lambda: np.broadcast_to(np.float32(0), (4, 6)), "read-only"),
    "masked array": (lambda: np.ma.zeros((4, 6), np.float32), r"masked.*array\.data"),
    "short buffer": (lambda: bytearray(95), "takes 96 bytes, out= has 95"),
    "long buffer": (lambda: bytearray(97), "takes 96 bytes, out= has 97"),
    "read-only buffer": (lambda: memoryview(bytes(96)), "read-only"),
    "bytes": (lambda: bytes(96), "bytes"),
    "scattered buffer": (lambda: memoryview(bytearray(192))[::2], "out="),
    "a list": (lambda: [0.0] * 24, "list"),
    "tensor of another shape": (lambda: torch.zeros(6, 4), r"out= is F32 \[6, 4\]"),
    "tensor of another dtype": (lambda: torch.zeros(4, 6, dtype=torch.float16), "out= is F16"),
    "tensor without memory": (lambda: torch.zeros(4, 6, device="meta"), "meta"),
}


@every_kind
@pytest.mark.parametrize("case", BAD_OUT)
def test_what_cannot_be_filled_is_refused_by_name(kind, case):
    _, ref = made(kind, DType.F32)
    make, says = BAD_OUT[case]
    with pytest.raises(LayoutError, match=says) as caught:
        ref.load(out=make())
    assert "'weight'" in str(caught.value)


def test_a_lazily_conjugated_tensor_cannot_be_filled():
    _, ref = made(in_source, DType.C64, (4,))
    with pytest.raises(LayoutError, match="load_into"):
        ref.load(out=torch.zeros(4, dtype=torch.complex64).conj())


def test_an_empty_tensor_fills_an_empty_buffer_of_any_shape():
    _, ref = made(in_source, DType.F32, (0, 3))
    for buffer in (bytearray(), memoryview(bytearray()), memoryview(np.empty((0, 3), np.float32))):
        assert ref.load(out=buffer).shape == (0, 3)


def test_a_typed_memoryview_is_filled():
    array, ref = made(in_source, DType.F32)
    target = np.zeros((4, 6), np.float32)
    ref.load(out=memoryview(target))
    assert same_bits(target, array)


def test_parameters_that_require_grad_are_filled():
    array, ref = made(in_source, DType.F32)
    parameter = torch.nn.Parameter(torch.zeros(4, 6))
    ref.load(out=parameter)
    assert same_bits(parameter.detach().numpy(), array)
    assert parameter.requires_grad
    assert parameter.grad_fn is None


@every_kind
def test_f4_codes_go_into_packed_buffers_of_any_kind(kind):
    array, ref = made(kind, DType.F4)
    wanted = file_bytes(array)
    flat = np.zeros(12, np.uint8)
    ref.load(out=flat)
    assert flat.tobytes() == wanted
    scattered = np.zeros((4, 6), np.uint8)[:, ::2]
    ref.load(out=scattered)
    assert scattered.tobytes() == wanted


def test_f6_comes_as_packed_bytes():
    data = bytes(range(24))
    for dtype in (DType.F6_E2M3, DType.F6_E3M2):
        ref = StoredRef(TensorSpec("weight", dtype, (4, 8)), Memory(data), Span(0, 24))
        assert ref.load().tobytes() == data
        assert ref.load().dtype == np.uint8
        assert ref.load(out=np.zeros(24, np.uint8)).tobytes() == data
        tensor = torch.zeros(24, dtype=torch.uint8)  # as ref.torch() gives it
        ref.load(out=tensor)
        assert bytes(tensor.numpy()) == data
        with pytest.raises(LayoutError, match=r"out= is U8 \[23\]"):
            ref.load(out=tensor[1:])
        buffer = bytearray(24)
        ref.load(out=buffer)
        assert buffer == data
        assert bytes(ref.torch().numpy()) == data
        assert ref[1:3].tobytes() == data[6:18]
        assert ref[1].tobytes() == data[6:12]
        with pytest.raises(LayoutError, match="whole bytes"):
            ref[:, 1]
        with pytest.raises(LayoutError, match="whole bytes"):
            ref[0, :1]


def test_f4_of_odd_rows_comes_to_torch_as_one_row():
    array = sample("F4", (2, 3))
    tensor = in_source(array).torch()
    assert tensor.shape == (3,)
    assert bytes(tensor.view(torch.uint8).numpy()) == file_bytes(array)
    assert same_bits(in_source(array).load(), array)
    assert same_bits(in_source(array)[1], array[1])
    assert same_bits(in_source(array)[:, 1:], array[:, 1:])


def test_an_array_ref_is_the_array():
    array = np.zeros(4, np.float32)
    ref = ArrayRef.of("weight", array)
    assert ref.load() is array
    copy = np.empty(4, np.float32)
    assert ref.load(out=copy) is copy


def test_views_of_one_memory_are_one_only_if_they_see_the_same():
    array = np.arange(12, dtype="<f4")

    def identity(view):
        return ArrayRef.of("weight", view).identity()

    assert identity(array) == identity(array[:])
    for other in (
        array[1:],
        array[:-1],
        array.reshape(3, 4),
        array.reshape(3, 4).T,
        array.view(np.int32),
        array.view(">f4"),  # the same bytes, other numbers
        array.copy(),
    ):
        assert identity(array) != identity(other)


def test_an_array_that_is_not_as_announced_is_refused():
    array = np.zeros(4, np.float32)
    for spec in [("a", "F32", (5,)), ("a", "I32", (4,))]:
        with pytest.raises(LayoutError, match="announced"):
            ArrayRef(TensorSpec.of(spec), array)


def test_torch_shares_the_buffer_that_was_read(tmp_path):
    path = tmp_path / "a.safetensors"
    weighlock.save(path, {"weight": np.arange(4, dtype=np.float32)}, durable=False)
    with weighlock.open(path) as catalog:
        tensor = catalog["weight"].torch()
    assert tensor.tolist() == [0, 1, 2, 3]
    tensor += 1  # it is memory of its own, and writable


# Refs as references: into a file, from other threads and processes.


@pytest.fixture
def stored(tmp_path):
    """A file of 64 tensors of 64 KiB, its catalog, and what is in it."""
    arrays = {f"t{n}": np.full((128, 128), n, np.float32) for n in range(64)}
    path = tmp_path / "model.safetensors"
    weighlock.save(path, arrays, durable=False)
    with weighlock.open(path) as catalog:
        yield catalog, arrays


def test_a_pickled_file_ref_is_small_whatever_its_tensor(tmp_path):
    sizes = []
    for rows in (1, 10_000):
        path = tmp_path / "model.safetensors"
        weighlock.save(path, {"weight": np.zeros((rows, 100), np.uint8)}, durable=False)
        with weighlock.open(path) as catalog:
            sizes.append(len(pickle.dumps(catalog["weight"])))
    assert max(sizes) < 1000 + len(str(tmp_path))
    assert abs(sizes[0] - sizes[1]) < 20


def test_a_pickled_ref_of_a_file_that_changed_raises(tmp_path):
    path = tmp_path / "model.safetensors"
    weighlock.save(path, {"weight": np.zeros(4, np.float32)}, durable=False)
    with weighlock.open(path) as catalog:
        pickled = pickle.dumps(catalog["weight"])
    weighlock.save(path, {"weight": np.ones(4, np.float32)}, durable=False)
    with pytest.raises(weighlock.WeighlockError, match="changed since it was opened"):
        pickle.loads(pickled).load()


def test_a_pickled_ref_in_bytes_carries_them():
    source = BytesSource(b"abcd")
    ref = StoredRef(TensorSpec("weight", "U8", (4,)), source, Span(0, 4))
    assert pickle.loads(pickle.dumps(ref)).load().tobytes() == b"abcd"


def test_sixteen_threads_read_what_one_would(stored):
    catalog, arrays = stored
    failures = []
    together = threading.Barrier(16)

    def work(number):
        together.wait()
        for step in range(64):
            name = f"t{(number * 5 + step) % 64}"
            ref = catalog[name]
            if not np.array_equal(ref.load(), arrays[name]):
                failures.append(name)
            if not np.array_equal(ref[3:5, 7], arrays[name][3:5, 7]):
                failures.append(name)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_threads_share_one_ref_of_a_large_tensor(tmp_path):
    # Above 8 MiB each read uses a helper thread of its own.
    array = np.arange(3 << 20, dtype=np.uint32)
    path = tmp_path / "model.safetensors"
    weighlock.save(path, {"weight": array}, durable=False)
    results = []
    with weighlock.open(path) as catalog:
        ref = catalog["weight"]
        threads = [
            threading.Thread(target=lambda: results.append(np.array_equal(ref.load(), array)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [True] * 4


@pytest.mark.slow
def test_refs_travel_to_spawned_processes(stored):
    catalog, arrays = stored
    with get_context("spawn").Pool(2) as pool:
        loaded = pool.map(operator.methodcaller("load"), [catalog["t3"], catalog["t63"]])
        sliced = pool.apply(operator.getitem, (catalog["t5"], slice(2, 4)))
        pool.close()
        pool.join()
    assert np.array_equal(loaded[0], arrays["t3"])
    assert np.array_equal(loaded[1], arrays["t63"])
    assert np.array_equal(sliced, arrays["t5"][2:4])


FORKED_THREADS = """
import os, sys, threading
from weighlock.sources.local import FileSource

sources = [FileSource(sys.argv[1], hold=False) for _ in range(3000)]
pid = os.fork()
if pid == 0:
    code = 1
    try:
        sys.setswitchinterval(1e-6)
        started, found = threading.Barrier(4), [set() for _ in sources]


        def use():
            started.wait()
            for source, uses in zip(sources, found, strict=True):
                uses.add(source._use())


        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        code = int(any(len(uses) != 1 for uses in found))
    finally:
        os._exit(code)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
print("fine")
"""


def test_threads_of_a_forked_child_count_their_reads_together(tmp_path, run_python):
    """With a count of its own, one thread would close the descriptor under another's read."""
    path = tmp_path / "a"
    path.write_bytes(b"a")
    assert run_python(FORKED_THREADS, path).stdout == "fine\n"


FORK = """
import os, sys, threading
import numpy as np
import weighlock

catalog = weighlock.open(sys.argv[1])
refs = list(catalog.values())
refs[0].load()
holding = sys.argv[2] == "locked"
inside, done = threading.Event(), threading.Event()


def hold():
    # Another thread inside the source's lock, as one is for an instant in every read.
    with refs[0].source._use().lock:
        inside.set()
        done.wait()


if holding:
    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()
children = []
for number in range(4):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            for n, ref in enumerate(refs):
                assert (ref.load() == n).all()
                assert ref[3:5, 7].tolist() == [n, n]
            if number == 3:
                catalog.close()
            code = 0
        finally:
            os._exit(code)
    children.append(pid)
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
assert codes == [0] * 4, codes
done.set()
if holding:
    thread.join()
# What a child closed is its own: the parent reads on.
assert all((ref.load() == n).all() for n, ref in enumerate(refs))
print("fine")
"""


@pytest.mark.parametrize("lock", ["free", "locked"])
def test_refs_work_after_a_fork_also_of_a_locked_source(stored, run_python, lock):
    catalog, _ = stored
    source = catalog["t0"].source
    assert run_python(FORK, source.path, lock).stdout == "fine\n"


FORK_SHARDED = """
import os, sys, threading
import weighlock

catalog = weighlock.open(sys.argv[1])
inside, done = threading.Event(), threading.Event()


def hold():
    with catalog._refs._lock():
        inside.set()
        done.wait()


thread = threading.Thread(target=hold)
thread.start()
inside.wait()
pid = os.fork()
if pid == 0:
    code = 1
    try:
        assert all((ref.load() == int(name[1:])).all() for name, ref in catalog.items())
        code = 0
    finally:
        os._exit(code)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
done.set()
thread.join()
assert all((ref.load() == int(name[1:])).all() for name, ref in catalog.items())
print("fine")
"""


def test_a_sharded_catalog_works_after_a_fork_too(stored, tmp_path, run_python):
    catalog, _ = stored
    weighlock.save(tmp_path / "shards", catalog, durable=False, max_shard_bytes=500_000)
    assert run_python(FORK_SHARDED, tmp_path / "shards").stdout == "fine\n"


MANY = """
import os, pickle, sys
import weighlock


def descriptors():
    return len(os.listdir("/proc/self/fd"))


before = descriptors()
catalog = weighlock.open(sys.argv[1])
refs = list(catalog.values())
assert len(refs) == 10_000
opened = descriptors()
assert opened == before + 1, (before, opened)
copies = [pickle.loads(pickle.dumps(ref)) for ref in refs]
assert descriptors() == opened
values = [int(ref.load()[0]) for ref in copies]
assert values == [n % 251 for n in range(10_000)]
assert descriptors() == opened
catalog.close()
assert descriptors() == before
print("fine")
"""


def test_ten_thousand_refs_cost_no_descriptors_of_their_own(tmp_path, run_python):
    path = tmp_path / "many.safetensors"
    arrays = {f"t{n}": np.array([n % 251], np.uint8) for n in range(10_000)}
    weighlock.save(path, arrays, durable=False)
    assert run_python(MANY, path).stdout == "fine\n"


def test_dimensions_and_elements(tmp_path):
    weighlock.save(tmp_path / "a", {"a": np.zeros((3, 4)), "s": np.array(1.0)}, durable=False)
    with weighlock.open(tmp_path / "a") as catalog:
        assert [(ref.ndim, ref.size) for ref in catalog.values()] == [(2, 12), (0, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_what_takes_tensors_of_others_takes_refs(tmp_path, dtype):
    """Asked as a sequence, a ref would be read row by row, or not at all."""
    tensor = torch.arange(12).reshape(3, 4).to(dtype)
    weighlock.save(tmp_path / "a", {"a": tensor}, durable=False)
    with weighlock.open(tmp_path / "a") as catalog:
        for ref in (catalog["a"], weighlock.Catalog.of({"a": tensor})["a"]):
            for take in (torch.as_tensor, torch.from_dlpack):
                assert torch.equal(take(ref), tensor)
                assert take(ref).dtype is dtype
            assert np.asarray(ref).shape == (3, 4)
            assert torch.equal(ref.torch(dtype="f64"), tensor.double())
            assert ref.torch(dtype=torch.float16).dtype is torch.float16


def test_numpy_takes_refs_where_there_is_no_torch(run_python, tmp_path):
    weighlock.save(tmp_path / "a", {"a": np.arange(3.0)}, durable=False)
    script = """
import sys
import numpy as np
import weighlock
print(np.from_dlpack(weighlock.open(sys.argv[1])["a"]).tolist(), "torch" in sys.modules)
"""
    assert run_python(script, tmp_path / "a").stdout == "[0.0, 1.0, 2.0] False\n"


def test_packed_elements_are_not_converted():
    ref = weighlock.Catalog.of({"a": sample("F4", (2, 4))})["a"]
    with pytest.raises(UnsupportedDType, match="cannot cast F4 to F32"):
        ref.torch(dtype=torch.float32)


def test_targets_whose_elements_share_memory_are_refused():
    ref = weighlock.Catalog.of({"x": np.arange(12.0).reshape(3, 4)})["x"]
    windows = np.lib.stride_tricks.sliding_window_view(np.zeros(6), 4, writeable=True)
    repeated = np.lib.stride_tricks.as_strided(np.zeros(4), (3, 4), (0, 8))
    for out in (windows, repeated, torch.zeros(4, dtype=torch.float64).expand(3, 4)):
        with pytest.raises(LayoutError, match="elements of out= share memory"):
            ref.load(out=out)
    for out in (
        np.zeros((4, 3)).T,
        np.zeros((6, 8))[::2, ::-2],
        np.zeros((5, 3, 1, 4))[1:2, :, 0][0],
    ):
        assert np.array_equal(ref.load(out=out), np.arange(12.0).reshape(3, 4))
    with pytest.raises(LayoutError, match="share memory"):
        weighlock.Catalog.of({"x": np.zeros((3, 4))}).load_into({"x": windows})
