"""Torch tensors as refs, as targets and as results."""

import warnings

import numpy as np
import pytest
import torch
from unit_samples import WHOLE_BYTES, file_bytes, same_bits, sample, tensor_of

import weighlock
from weighlock.errors import LayoutError, UnsupportedDType
from weighlock.tensors.dtypes import DType
from weighlock.tensors.spec import TensorSpec
from weighlock.tensors.torch import (
    TorchRef,
    check_plain,
    from_array,
    from_bytes,
    is_tensor,
    staged_pieces,
)


def saved(tensor, tmp_path):
    """What a file holds of a tensor, as an array."""
    path = tmp_path / "a.safetensors"
    weighlock.save(path, {"a": tensor}, durable=False)
    with weighlock.open(path) as catalog:
        return catalog["a"].load()


COMPLEX = torch.tensor([[1 + 2j, 3 - 4j], [5 + 6j, -7 + 8j]], dtype=torch.complex64)

PECULIAR = {
    "plain": lambda: torch.arange(6.0).reshape(2, 3),
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).T,
    "permuted": lambda: torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
    "stepped": lambda: torch.arange(20.0)[::3],
    "offset": lambda: torch.arange(20.0)[7:],
    "expanded": lambda: torch.tensor([[1.0], [2.0]]).expand(2, 5),
    "expanded scalar": lambda: torch.tensor(3.0).expand(2, 3),
    "flipped": lambda: torch.arange(6.0).flip(0),
    "one of a step": lambda: torch.arange(2.0)[::2],
    "one of many steps": lambda: torch.arange(9, dtype=torch.int16).reshape(3, 3)[1:2, ::3],
    "one number": lambda: torch.tensor(3.5),
    "one bfloat16": lambda: torch.tensor(3.5, dtype=torch.bfloat16),
    "one float8": lambda: torch.tensor(3.5).to(torch.float8_e4m3fn),
    "empty": lambda: torch.empty(0, 4),
    "empty in the middle": lambda: torch.empty(2, 0, 3, dtype=torch.bfloat16),
    "conjugated": lambda: COMPLEX.conj(),
    "conjugated and transposed": lambda: COMPLEX.mH,
    "imaginary part": lambda: COMPLEX.imag,
    "negated": lambda: COMPLEX.conj().imag,
    "negated and transposed": lambda: COMPLEX.conj().imag.T,
    "requires grad": lambda: torch.ones(3, requires_grad=True),
    "in a graph": lambda: torch.ones(3, requires_grad=True) * 2,
    "parameter": lambda: torch.nn.Parameter(torch.ones(2, 2)),
    "parameter transposed": lambda: torch.nn.Parameter(torch.arange(4.0).reshape(2, 2)).T,
    "buffer": lambda: torch.nn.Buffer(torch.ones(2)),
    "bools transposed": lambda: torch.tensor([[True, False], [True, True]]).T,
    "channels last": lambda: (
        torch.arange(48.0).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last)
    ),
}


@pytest.mark.parametrize("case", PECULIAR)
def test_peculiar_tensors_are_saved_as_what_they_show(case, tmp_path):
    tensor = PECULIAR[case]()
    shown = (
        tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    )
    found = saved(tensor, tmp_path)
    assert found.shape == tuple(tensor.shape)
    raw = shown.ravel().clone().view(torch.uint8).numpy() if shown.numel() else b""
    assert found.tobytes() == bytes(raw)


@pytest.mark.parametrize("case", PECULIAR)
@pytest.mark.parametrize("max_bytes", [1, 8, 24, 1 << 20])
def test_the_way_through_the_staging_buffer_gives_the_same_bytes(case, max_bytes):
    """What a tensor on a device goes through, here forced on one in memory."""
    tensor = PECULIAR[case]().detach()
    shown = tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    pieces = [bytes(piece) for piece in staged_pieces(tensor, max_bytes)]
    raw = shown.ravel().clone().view(torch.uint8).numpy() if shown.numel() else b""
    assert b"".join(pieces) == bytes(raw)
    assert all(len(piece) <= max(max_bytes, tensor.element_size()) for piece in pieces)


@pytest.mark.parametrize("dtype", [*WHOLE_BYTES, DType.F4])
def test_the_staging_buffer_carries_every_dtype(dtype):
    array = sample(dtype, (6, 8))
    tensor = tensor_of(array)
    assert b"".join(map(bytes, staged_pieces(tensor, 7))) == file_bytes(array)
    if dtype is not DType.F4:
        pieces = b"".join(map(bytes, staged_pieces(tensor.T, 40)))
        assert pieces == np.ascontiguousarray(array.T).tobytes()
        assert list(staged_pieces(tensor[:0], 40)) == []
        assert b"".join(map(bytes, staged_pieces(tensor[1, 2], 40))) == array[1, 2].tobytes()


def test_one_buffer_serves_every_piece():
    pieces = staged_pieces(torch.arange(100.0)[::2], 40)
    addresses = {np.frombuffer(piece, np.uint8).ctypes.data for piece in pieces}
    assert len(addresses) == 1


def sparse_csr():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.eye(3).to_sparse_csr()


def quantised():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


def nested(**options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], **options)


def fake():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.empty(3)


class Wrapper(torch.Tensor):
    """A tensor around another, as quantisation packages make them."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(function)


class Flattenable(Wrapper):
    def __tensor_flatten__(self):
        return ["inner"], None


REFUSED = {
    "meta": (lambda: torch.empty(3, device="meta"), "meta", "load or initialise"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse", r"to_dense\(\)"),
    "sparse csr": (sparse_csr, "sparse", r"to_dense\(\)"),
    "quantised": (quantised, "quantised", r"dequantize\(\)"),
    "nested": (nested, "nested", r"values\(\)"),
    "jagged": (lambda: nested(layout=torch.jagged), "(?i)nested", r"values\(\)"),
    "fake": (fake, "FakeTensor", "pass"),
    "wrapper": (lambda: Wrapper(torch.ones(3)), "Wrapper", "pass"),
    "flattenable wrapper": (lambda: Flattenable(torch.ones(3)), "Flattenable", "pass those"),
    "uninitialised": (
        lambda: torch.nn.LazyLinear(3).weight,
        "(?i)uninitiali[sz]ed",
        "(?i)initiali[sz]e",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_tensors_without_plain_memory_are_refused_by_name_with_the_remedy(case, tmp_path):
    make, kind, remedy = REFUSED[case]
    tensor = make()
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"before")
    for attempt in (
        lambda: check_plain("encoder.weight", tensor),
        lambda: TorchRef.of("encoder.weight", tensor),
        lambda: weighlock.save(path, {"encoder.weight": tensor}),
        lambda: weighlock.save(path, iter([("encoder.weight", tensor)])),
    ):
        with pytest.raises(LayoutError, match=kind) as caught:
            attempt()
        assert caught.match(remedy)
        assert caught.match("'encoder.weight'")
    assert path.read_bytes() == b"before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.safetensors"]


DTENSOR = """
import sys
try:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    mesh = init_device_mesh("cpu", (2,))
    tensor = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
except (ImportError, RuntimeError, ValueError) as error:
    print("skip", error)
    sys.exit()
import weighlock

try:
    weighlock.save(sys.argv[1], {"encoder.weight": tensor, "parameter": torch.nn.Parameter(tensor)})
except weighlock.WeighlockError as error:
    print(type(error).__name__, error)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_real_dtensor_is_refused_by_name_with_the_remedy(tmp_path, run_python):
    said = run_python(DTENSOR, tmp_path / "a.safetensors").stdout
    if said.startswith("skip"):
        pytest.skip(f"this torch makes no DTensor in one process: {said[5:]}")
    assert said.startswith("LayoutError tensor 'encoder.weight' ")
    assert "DTensor" in said
    assert "full_tensor()" in said
    assert list(tmp_path.iterdir()) == []


def test_types_the_format_lacks_are_refused_by_name():
    with pytest.raises(UnsupportedDType, match=r"'a' is torch\.uint4"):
        TorchRef.of("a", torch.empty(2, dtype=torch.uint4))


def test_a_plain_subclass_passes(tmp_path):
    class Named(torch.Tensor):
        pass

    assert saved(torch.ones(2).as_subclass(Named), tmp_path).tolist() == [1, 1]


def test_what_is_a_tensor():
    assert is_tensor(torch.ones(1))
    assert is_tensor(torch.nn.Parameter(torch.ones(1)))
    assert not is_tensor(np.ones(1))
    assert not is_tensor(torch.float32)


@pytest.mark.parametrize("dtype", WHOLE_BYTES)
def test_load_shares_the_memory_numpy_can_see(dtype):
    tensor = tensor_of(sample(dtype, (4, 6)))
    array = TorchRef.of("a", tensor).load()
    assert array.ctypes.data == tensor.data_ptr()
    assert TorchRef.of("a", tensor.T).load().strides == array.T.strides
    assert TorchRef.of("a", tensor).torch() is not None
    assert TorchRef.of("a", tensor).torch().data_ptr() == tensor.data_ptr()


def test_loading_what_numpy_cannot_see_copies():
    array = TorchRef.of("a", COMPLEX.conj()).load()
    assert np.array_equal(array, COMPLEX.conj().resolve_conj().numpy())
    packed = tensor_of(sample("F4", (4, 6)))
    assert same_bits(TorchRef.of("a", packed).load(), sample("F4", (4, 6)))


def test_a_ref_does_not_hold_on_to_the_graph():
    weight = torch.ones(3, requires_grad=True)
    ref = TorchRef.of("a", weight * 2)
    assert ref.torch().grad_fn is None
    assert not ref.torch().requires_grad


def test_the_same_view_of_the_same_memory_is_the_same_tensor():
    tensor = torch.arange(6.0).reshape(2, 3)

    def identity(other):
        return TorchRef.of("a", other).identity()

    parameter = torch.nn.Parameter(tensor)
    assert identity(tensor) == identity(tensor[:]) == identity(parameter)
    for other in (
        tensor.T,
        tensor.reshape(3, 2),
        tensor[:1],
        tensor[:, 1:],
        tensor.view(torch.int32),
        tensor.clone(),
        tensor.expand(1, 2, 3),
    ):
        assert identity(other) != identity(tensor)
    assert identity(COMPLEX) != identity(COMPLEX.conj())


def test_from_bytes_lies_over_the_buffer():
    buffer = np.zeros(24, np.uint8)
    tensor = from_bytes(buffer, TensorSpec("a", "F32", (2, 3)))
    buffer[:4] = np.float32(1).reshape(1).view(np.uint8)
    assert tensor[0, 0] == 1
    assert from_bytes(buffer, TensorSpec("a", "F32", (2, 3)), "cpu").shape == (2, 3)
    assert from_bytes(buffer[:4], TensorSpec("a", "F32", ())).shape == ()


def test_from_bytes_of_packed_types():
    buffer = np.arange(6, dtype=np.uint8)
    f4 = from_bytes(buffer, TensorSpec("a", "F4", (3, 4)))
    assert (f4.dtype, f4.shape) == (torch.float4_e2m1fn_x2, (3, 2))
    f6 = from_bytes(buffer, TensorSpec("a", "F6_E2M3", (2, 4)))
    assert (f6.dtype, f6.shape) == (torch.uint8, (6,))
    empty = from_bytes(buffer[:0], TensorSpec("a", "F4", (0, 4)))
    assert (empty.dtype, empty.shape) == (torch.float4_e2m1fn_x2, (0, 2))


def test_from_array_of_other_byte_orders():
    for code in ("i2", "u4", "f4", "f8", "c8"):
        array = np.arange(4).astype(f">{code}")
        assert from_array(array).tolist() == array.tolist()


def test_from_array_to_a_device_and_dtype():
    tensor = from_array(np.arange(3, dtype=np.float32), device="cpu", dtype=torch.bfloat16)
    assert tensor.dtype is torch.bfloat16
    assert from_array(np.arange(3, dtype=np.float32), device="meta").is_meta


def test_a_state_dict_round_trips_through_a_file(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).to(torch.bfloat16)
    path = tmp_path / "a.safetensors"
    weighlock.save(path, module.state_dict(), durable=False)
    with weighlock.open(path) as catalog:
        assert catalog.metadata == {"format": "pt"}
        for name, value in module.state_dict().items():
            assert torch.equal(catalog[name].torch(), value)
