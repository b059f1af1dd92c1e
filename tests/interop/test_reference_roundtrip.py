"""Files go to the `safetensors` package and come from it without the loss of a bit, in every dtype.

I1: bytes are exact, NaN payloads included. The package is the oracle for everything it can do; what
it cannot (F6 as tensors, F4 in slices) is compared with the bytes it hands out raw.
"""

import itertools
import json

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch

import weighlock
from interop.payloads import DTYPES, SHAPES, TORCH_DTYPES, bits_of, payload, shapes_of, torch_of
from weighlock import DType, Writer

NUMPY_DTYPES = [dtype for dtype in DTYPES if dtype in safetensors.numpy._TYPES]
ALL = [(dtype, shape) for dtype in DTYPES for shape in shapes_of(dtype)]
TORCH = [(dtype, shape) for dtype, shape in ALL if dtype in TORCH_DTYPES]
NUMPY = [(dtype, shape) for dtype, shape in ALL if dtype in NUMPY_DTYPES]


def case_id(value):
    return value.value if isinstance(value, DType) else "x".join(map(str, value)) or "scalar"


def each(cases):
    return pytest.mark.parametrize(("dtype", "shape"), cases, ids=case_id)


def by_hand(tensors, metadata=None):
    """A file made of nothing but the format's own rules: name → (dtype, shape, bytes)."""
    header, data = {"__metadata__": metadata} if metadata else {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def raw_tensors(content):
    """What the reference finds: name → (dtype, shape, bytes)."""
    return {
        name: (found["dtype"], tuple(found["shape"]), bytes(found["data"]))
        for name, found in safetensors.deserialize(content)
    }


def f4_of(raw):
    """The elements of packed F4, one to a byte, taken apart slowly."""
    return bytes(itertools.chain.from_iterable((byte & 15, byte >> 4) for byte in raw))


def test_there_are_22_dtypes_and_the_reference_has_the_same(tmp_path):
    content = by_hand({"t": ("NONE", (), b"")})
    with pytest.raises(safetensors.SafetensorError, match="expected one of") as caught:
        safetensors.deserialize(content)
    known = str(caught.value).split("expected one of ")[1].split(" at line")[0]
    assert len(DTYPES) == 22
    assert known.replace("`", "").split(", ") == [dtype.value for dtype in DTYPES]


@each(TORCH)
def test_torch_tensor_saved_here_is_read_there(tmp_path, dtype, shape):
    path = tmp_path / "t.safetensors"
    tensor = torch_of(dtype, shape)
    weighlock.save(path, {"t": tensor}, durable=False)
    assert raw_tensors(path.read_bytes()) == {"t": (dtype, shape, payload(dtype, shape))}
    loaded = safetensors.torch.load_file(path)["t"]
    assert loaded.dtype == tensor.dtype
    assert loaded.shape == tensor.shape
    assert bits_of(loaded) == payload(dtype, shape)


@each([(dtype, shape) for dtype, shape in ALL if dtype.bits != 6])
def test_numpy_array_saved_here_is_read_there(tmp_path, dtype, shape):
    path = tmp_path / "t.safetensors"
    raw = payload(dtype, shape)
    elements = f4_of(raw) if dtype is DType.F4 else raw
    array = np.frombuffer(elements, np.uint8).view(dtype.numpy).reshape(shape)
    weighlock.save(path, {"t": array}, durable=False)
    assert raw_tensors(path.read_bytes()) == {"t": (dtype, shape, raw)}
    if dtype in NUMPY_DTYPES:
        loaded = safetensors.numpy.load_file(path)["t"]
        assert (loaded.dtype, loaded.shape) == (array.dtype, array.shape)
        assert bits_of(loaded) == raw


@each(TORCH)
def test_torch_tensor_saved_there_is_read_here(tmp_path, dtype, shape):
    path = tmp_path / "t.safetensors"
    tensor = torch_of(dtype, shape)
    safetensors.torch.save_file({"t": tensor}, path)
    with weighlock.open(path) as catalog:
        check_ref(catalog["t"], dtype, shape)
        back = catalog["t"].torch()
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
        assert bits_of(back) == payload(dtype, shape)


@each(NUMPY)
def test_numpy_array_saved_there_is_read_here(tmp_path, dtype, shape):
    path = tmp_path / "t.safetensors"
    array = np.frombuffer(payload(dtype, shape), dtype.numpy).reshape(shape)
    safetensors.numpy.save_file({"t": array}, path)
    with weighlock.open(path) as catalog:
        check_ref(catalog["t"], dtype, shape)


@each(ALL)
def test_file_made_by_hand_is_read_alike(tmp_path, dtype, shape):
    content = by_hand({"first": ("U8", (3,), b"123"), "t": (dtype, shape, payload(dtype, shape))})
    assert raw_tensors(content)["t"] == (dtype, shape, payload(dtype, shape))
    check_ref(weighlock.open(content)["t"], dtype, shape)
    path = tmp_path / "copy.safetensors"
    weighlock.save(path, weighlock.open(content), durable=False)
    assert raw_tensors(path.read_bytes()) == raw_tensors(content)


def check_ref(ref, dtype, shape):
    """A ref says and gives what the payload is, whatever way it is asked."""
    raw = payload(dtype, shape)
    assert (ref.dtype, ref.shape, ref.nbytes) == (dtype, shape, len(raw))
    assert (ref.get_dtype(), ref.get_shape()) == (dtype.value, list(shape))
    assert b"".join(bytes(piece) for piece in ref.pieces(7 * max(1, dtype.bits // 8))) == raw
    buffer = bytearray(len(raw))
    ref.load(out=buffer)
    assert bytes(buffer) == raw
    loaded = ref.load()
    if dtype.bits == 6:
        assert loaded.tobytes() == raw
        assert bits_of(ref.torch()) == raw
        return
    elements = f4_of(raw) if dtype is DType.F4 else raw
    assert (loaded.shape, loaded.dtype) == (shape, dtype.numpy)
    assert bits_of(loaded) == elements
    assert bits_of(ref[...]) == elements
    assert bits_of(ref.torch()) == raw
    expected = np.frombuffer(elements, np.uint8).view(dtype.numpy).reshape(shape)
    for axis, size in enumerate(shape):
        for part in (slice(1, None), slice(None, None, 2), slice(None, None, -1), slice(1, 3)):
            index = (slice(None),) * axis + (part,)
            assert bits_of(ref[index]) == bits_of(expected[index])
        if size:
            index = (..., -1) + (slice(None),) * (len(shape) - axis - 1)
            assert bits_of(ref[index]) == bits_of(expected[index])


SLICES = [
    (slice(1, 3),),
    (slice(None), slice(1, 4)),
    (2,),
    (slice(None), 3),
    (slice(0, 0),),
    (slice(None), slice(None), slice(1, 2)),
]


@each([(dtype, (4, 6)) for dtype in TORCH_DTYPES if dtype is not DType.F4])
def test_lazy_slices_are_those_of_the_reference(tmp_path, dtype, shape):
    path = tmp_path / "t.safetensors"
    safetensors.torch.save_file({"t": torch_of(dtype, shape)}, path)
    with weighlock.open(path) as catalog, safetensors.safe_open(path, "pt") as reference:
        ours, theirs = catalog["t"], reference.get_slice("t")
        assert (ours.get_shape(), ours.get_dtype()) == (theirs.get_shape(), theirs.get_dtype())
        for index in SLICES[:5]:
            expected = theirs[index]
            found = ours[index]
            assert found.shape == tuple(expected.shape)
            assert bits_of(found) == bits_of(expected)
            as_torch = found.to()
            assert (as_torch.dtype, as_torch.shape) == (expected.dtype, expected.shape)
            assert bits_of(as_torch) == bits_of(expected)


STRIDED = {
    "transposed": lambda tensor: tensor.T,
    "every other": lambda tensor: tensor[::2, ::3],
    "column": lambda tensor: tensor[:, 2],
    "inner": lambda tensor: tensor[1:3, 2:6],
}


@pytest.mark.parametrize("view", STRIDED)
@each([(dtype, (4, 8)) for dtype in TORCH_DTYPES])
def test_strided_tensors_are_written_as_if_they_were_contiguous(tmp_path, dtype, shape, view):
    path = tmp_path / "t.safetensors"
    tensor = STRIDED[view](torch_of(dtype, shape))
    weighlock.save(path, {"t": tensor}, durable=False)
    expected = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    assert bits_of(safetensors.torch.load_file(path)["t"]) == bits_of(expected)
    if dtype is DType.F4:
        return
    raw = payload(dtype, shape)
    array = STRIDED[view](np.frombuffer(raw, np.uint8).view(dtype.numpy).reshape(shape))
    weighlock.save(path, {"t": array}, durable=False)
    assert raw_tensors(path.read_bytes())["t"] == (dtype, array.shape, bits_of(array))


def test_strided_f4_arrays_are_packed_in_their_own_order(tmp_path):
    path = tmp_path / "t.safetensors"
    array = np.frombuffer(f4_of(bytes(range(16))), np.uint8).view(DType.F4.numpy).reshape(4, 8).T
    weighlock.save(path, {"t": array}, durable=False)
    dtype, shape, raw = raw_tensors(path.read_bytes())["t"]
    assert (dtype, shape) == ("F4", (8, 4))
    assert f4_of(raw) == bits_of(array)


def test_expanded_conjugated_and_negated_tensors_are_written_as_they_are_meant(tmp_path):
    path = tmp_path / "t.safetensors"
    numbers = torch.tensor([1 + 2j, -3 - 4j], dtype=torch.complex64)
    meant = {
        "expanded": torch.arange(3.0).reshape(3, 1).expand(3, 4),
        "conjugated": numbers.conj(),
        "negated": numbers.conj().imag,
        "part": numbers.real,
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    weighlock.save(path, meant, durable=False)
    loaded = safetensors.torch.load_file(path)
    for name, tensor in meant.items():
        assert torch.equal(loaded[name], tensor.detach().resolve_conj().resolve_neg())


@each([(dtype, (4, 6)) for dtype in NUMPY_DTYPES])
def test_arrays_of_the_other_byte_order_are_written_little_endian(tmp_path, dtype, shape):
    path = tmp_path / "t.safetensors"
    array = np.frombuffer(payload(dtype, shape), dtype.numpy).reshape(shape)
    swapped = array.byteswap().view(array.dtype.newbyteorder(">"))
    weighlock.save(path, {"t": swapped, "strided": swapped[:, ::2]}, durable=False)
    found = raw_tensors(path.read_bytes())
    assert found["t"] == (dtype, shape, payload(dtype, shape))
    assert found["strided"][2] == bits_of(array[:, ::2])
    with weighlock.open(path) as catalog:
        assert catalog["t"].load().dtype.byteorder in "=<|"


def everything():
    """One tensor of each dtype that torch has, narrow ones first: the worst order to align."""
    return {
        f"{dtype}.{number}": torch_of(dtype, shape, number)
        for number, shape in enumerate(SHAPES)
        for dtype in TORCH_DTYPES
        if shape in shapes_of(dtype)
    }


def test_all_dtypes_and_shapes_in_one_file(tmp_path):
    path = tmp_path / "all.safetensors"
    weighlock.save(path, everything(), durable=False)
    loaded = safetensors.torch.load_file(path)
    assert {name: bits_of(tensor) for name, tensor in loaded.items()} == {
        name: bits_of(tensor) for name, tensor in everything().items()
    }
    other = tmp_path / "theirs.safetensors"
    safetensors.torch.save_file(everything(), other)
    with weighlock.open(path) as ours, weighlock.open(other) as theirs:
        assert set(ours) == set(theirs)
        for name in ours:
            assert ours[name].spec == theirs[name].spec
            assert bits_of(ours[name].torch()) == bits_of(theirs[name].torch())


def starts_of(path):
    """Where the data section starts in the file, and where each tensor starts in it."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    return 8 + length, {
        name: (DType(found["dtype"]), found["data_offsets"][0]) for name, found in header.items()
    }


def save_mapping(path):
    weighlock.save(path, everything(), durable=False)


def save_iterable_with_specs(path):
    tensors = everything()
    specs = [weighlock.TensorSpec.of(spec) for spec in specs_of(tensors)]
    weighlock.save(path, iter(tensors.items()), specs, durable=False)


def specs_of(tensors):
    for name, tensor in tensors.items():
        dtype = DType.of(tensor.dtype)
        shape = tuple(tensor.shape)
        yield name, dtype, (*shape[:-1], shape[-1] * 2) if dtype is DType.F4 else shape


def save_sharded(path):
    weighlock.save(path.parent / "shards", everything(), durable=False, max_shard_bytes=300)


@pytest.mark.parametrize("save", [save_mapping, save_iterable_with_specs, save_sharded])
def test_known_tensors_start_on_multiples_of_their_element_size(tmp_path, save):
    path = tmp_path / "t.safetensors"
    save(path)
    files = [path] if path.exists() else sorted((tmp_path / "shards").glob("*.safetensors"))
    assert len(files) == (1 if path.exists() else len(files))
    for file in files:
        data, starts = starts_of(file)
        assert data % 64 == 0
        for name, (dtype, start) in starts.items():
            assert start % max(1, dtype.bits // 8) == 0, name


def test_streamed_tensors_have_an_aligned_data_section_too(tmp_path):
    path = tmp_path / "t.safetensors"
    weighlock.save(path, iter(everything().items()), durable=False)
    data, starts = starts_of(path)
    assert data % 64 == 0
    assert list(starts) == list(everything())
    assert len(safetensors.torch.load_file(path)) == len(starts)


def format_of(path):
    with safetensors.safe_open(path, "pt") as file:
        return (file.metadata() or {}).get("format")


def test_format_is_told_when_torch_tensors_are_written(tmp_path):
    path = tmp_path / "t.safetensors"
    array, tensor = np.zeros(2), torch.zeros(2)
    weighlock.save(path, {"t": tensor}, durable=False)
    assert format_of(path) == "pt"
    weighlock.save(path, {"a": array, "t": tensor}, durable=False)
    assert format_of(path) == "pt"
    weighlock.save(path, iter([("a", array), ("t", tensor)]), durable=False)
    assert format_of(path) == "pt"
    weighlock.save(path, iter([("t", tensor)]), [("t", "F32", [2])], durable=False)
    assert format_of(path) == "pt"
    weighlock.save(path, {"t": tensor}, metadata={"a": "b"}, durable=False)
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"a": "b", "format": "pt"}
    with Writer(path, durable=False) as writer:
        writer.write("a", array)
        writer.write("t", tensor)
    assert format_of(path) == "pt"


def test_format_is_left_alone_when_it_is_given_or_not_known(tmp_path):
    path = tmp_path / "t.safetensors"
    weighlock.save(path, {"t": torch.zeros(2)}, metadata={"format": "mlx"}, durable=False)
    assert format_of(path) == "mlx"
    weighlock.save(path, {"t": np.zeros(2)}, durable=False)
    assert format_of(path) is None
    weighlock.save(path, {}, durable=False)
    assert format_of(path) is None


def test_metadata_goes_both_ways(tmp_path):
    path, back = tmp_path / "t.safetensors", tmp_path / "back.safetensors"
    metadata = {"": "empty key", "quote": '"\\', "control": "\0\x1f\n\x7f", "text": "é😀\u2028"}
    weighlock.save(path, {"t": np.zeros(2)}, metadata=metadata, durable=False)
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata() == metadata
    safetensors.numpy.save_file({"t": np.zeros(2)}, back, metadata=metadata)
    with weighlock.open(back) as catalog:
        assert dict(catalog.metadata) == metadata


def test_empty_files_go_both_ways(tmp_path):
    path = tmp_path / "t.safetensors"
    weighlock.save(path, {}, durable=False)
    assert safetensors.torch.load_file(path) == {}
    safetensors.torch.save_file({}, path)
    with weighlock.open(path) as catalog:
        assert dict(catalog) == {}


@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_both_backends_of_the_reference_read_our_files(tmp_path, backend):
    # Its pread cannot make an F4 tensor to read into: torch has no kernel to fill one.
    tensors = {name: t for name, t in everything().items() if not name.startswith("F4.")}
    path = tmp_path / "t.safetensors"
    weighlock.save(path, tensors, durable=False)
    loaded = safetensors.torch.load_file(path, backend=backend)
    assert {name: bits_of(tensor) for name, tensor in loaded.items()} == {
        name: bits_of(tensor) for name, tensor in tensors.items()
    }


def test_shards_are_files_of_the_reference(tmp_path):
    tensors = everything()
    weighlock.save(tmp_path / "model", tensors, durable=False, max_shard_bytes=200)
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(len(bits_of(t)) for t in tensors.values())
    loaded = {}
    for file in set(index["weight_map"].values()):
        part = safetensors.torch.load_file(tmp_path / "model" / file)
        assert {index["weight_map"][name] for name in part} == {file}
        assert format_of(tmp_path / "model" / file) == "pt"
        loaded |= part
    assert {name: bits_of(tensor) for name, tensor in loaded.items()} == {
        name: bits_of(tensor) for name, tensor in tensors.items()
    }
