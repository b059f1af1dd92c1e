"""What the records of plain tensors mean: views of storages that lie outside the pickle.

By exact names, like `rebuild`. Knows storages and the arithmetic of views; not what wraps tensors,
nor what is composed of several.
"""

from typing import Any

from weighlock.errors import FormatError, LayoutError
from weighlock.formats.inline_storage import inline_storage
from weighlock.formats.meanings import (
    ANY,
    MOST,
    Meaning,
    Storage,
    StoredTensor,
    Unreadable,
    check_product,
    ints,
    short,
)
from weighlock.formats.pickle_records import Call, Global, PersistentId
from weighlock.formats.rebuild_numpy import raw_bytes
from weighlock.formats.torch_names import canonical, storage_dtype
from weighlock.tensors.spec import Layout

__all__ = ["BUILDERS", "is_module", "old_tensor", "storage_of", "torch_dtype", "view_of", "whole"]


def is_module(record: PersistentId) -> bool:
    """Whether this is a class with its source text, which old files hold beside storages."""
    return type(record.pid) is tuple and bool(record.pid) and record.pid[0] == "module"


def storage_of(record: Any) -> Storage:
    """The storage a persistent id names: ('storage', class, key, location, count, …)."""
    if type(record) is Call and type(record.func) is Global:
        return _inline(record)
    if type(record) is not PersistentId:
        raise LayoutError("a tensor's storage is not given as torch gives it")
    if record.meaning is None:
        record.meaning = _storage(record.pid)
    if type(record.meaning) is not Storage:
        raise LayoutError("a tensor stands where a tensor's storage should")
    return record.meaning


def _inline(record: Call) -> Storage:
    """The storage in `_load_from_bytes(bytes)`."""
    name = canonical(record.func.module, record.func.name)
    raw = raw_bytes(record.args[0]) if name == _FROM_BYTES and len(record.args) == 1 else None
    if raw is None:
        raise LayoutError("a tensor's storage is not given as torch gives it")
    known: Any = getattr(record, "known", None)
    if known is None:
        known = record.known = inline_storage(raw, storage_of)
    storage: Storage = known
    return storage


_FROM_BYTES = ("torch.storage", "_load_from_bytes")


def _storage(pid: Any) -> Storage:
    if type(pid) is not tuple or len(pid) not in (5, 6) or pid[0] != "storage":
        raise LayoutError("a tensor's storage is not given as torch gives it")
    kind, key, count = pid[1], pid[2], pid[4]
    dtype = storage_dtype(kind.module, kind.name) if type(kind) is Global else None
    if dtype is None:
        raise LayoutError(f"storage {short(key)} is of an unknown class")
    if type(key) is not str or type(count) is not int or not 0 <= count < MOST:
        raise LayoutError(f"storage {short(key)} claims {short(count)} elements")
    if len(pid) == 5 or pid[5] is None:
        return Storage(key, dtype, count)
    view = pid[5]
    if type(view) is not tuple or len(view) != 3 or not all(type(n) is int for n in view[1:]):
        raise LayoutError(f"storage {key!r} is a part of another in a way that is not torch's")
    first, part = view[1:]
    if first < 0 or part < 0 or first + part > count:
        raise LayoutError(
            f"storage {key!r} of {count:,} elements has a part from {first:,} of {part:,}"
        )
    return Storage(key, dtype, count, first, part)


def whole(storage: Storage) -> StoredTensor:
    """A storage by itself, seen as a tensor of one dimension."""
    return StoredTensor(storage, storage.dtype or "uint8", Layout.contiguous((storage.available,)))


def view_of(storage: Storage, elements: int, offset: Any, size: Any, stride: Any) -> Layout:
    """The layout of a tensor, which must lie within so many elements of its storage."""
    shape, strides = ints(size, "size"), ints(stride, "stride", most=ANY)
    if type(offset) is not int or offset < 0:
        raise LayoutError(f"a tensor starts at {short(offset)} of storage {storage.key!r}")
    if len(shape) != len(strides):
        raise LayoutError(f"a tensor has {len(shape)} sizes and {len(strides)} strides")
    check_product(shape)
    if 0 in shape:
        return Layout.contiguous(shape)  # nothing is read: it may start and step wherever it likes
    if 1 in shape:  # a step over a single element is never taken; it may be any number
        strides = tuple(step if n > 1 else 0 for n, step in zip(shape, strides, strict=True))
    if offset >= MOST or max(strides, default=0) >= MOST:
        raise LayoutError(f"a tensor steps out of storage {storage.key!r}")
    last = offset
    for n, step in zip(shape, strides, strict=True):
        last += (n - 1) * step
    if last >= elements:
        raise LayoutError(
            f"a tensor reaches to element {last + 1:,} of storage {storage.key!r}, "
            f"which has {elements:,}"
        )
    return Layout(offset, shape, strides)


def _tensor_v2(call: Call) -> Meaning:
    args = call.args
    if len(args) < 4:
        raise LayoutError(f"a tensor is rebuilt from {len(args)} arguments")
    storage = storage_of(args[0])
    layout = view_of(storage, storage.available, args[1], args[2], args[3])
    conj, neg = _bits(args[6] if len(args) > 6 else None)
    dtype = storage.dtype or "uint8"
    if conj and not dtype.startswith("complex"):
        raise LayoutError(f"a tensor of {dtype} claims to be conjugated")
    return StoredTensor(storage, dtype, layout, conj, neg)


def _tensor_v3(call: Call) -> Meaning:
    args = call.args
    if len(args) < 7:
        raise LayoutError(f"a tensor is rebuilt from {len(args)} arguments")
    storage = storage_of(args[0])
    dtype = torch_dtype(args[6])
    width = _WIDTHS.get(dtype)
    if width is None:
        return Unreadable(f"torch.{dtype} is not read")
    if storage.dtype:
        raise LayoutError(f"storage {storage.key!r} of {storage.dtype} is used as {dtype}")
    layout = view_of(storage, storage.available // width, args[1], args[2], args[3])
    conj, neg = _bits(args[7] if len(args) > 7 else None)
    if conj and not dtype.startswith("complex"):
        raise LayoutError(f"a tensor of {dtype} claims to be conjugated")
    return StoredTensor(storage, dtype, layout, conj, neg)


_LONGEST_DTYPE = 64


def torch_dtype(record: Any) -> str:
    """Torch's name of the dtype a record stands for."""
    is_torch = type(record) is Global and canonical(record.module, record.name)[0] == "torch"
    if not is_torch or len(record.name) > _LONGEST_DTYPE:
        raise LayoutError(f"a tensor's dtype is {short(record)}")
    name: str = record.name
    return name


def old_tensor(call: Call) -> Meaning:
    """A tensor from before 2017: an object of its class whose state is the view."""
    state = call.states[-1] if call.states else None
    if type(state) is not tuple or len(state) != 4:
        raise LayoutError("an old tensor's state is not (storage, offset, size, stride)")
    return _tensor_v2(Call(call.func, state))


def _bits(metadata: Any) -> tuple[bool, bool]:
    """The lazy conjugate and negative bits."""
    # TorchScript says beside it of what type it is.
    if type(metadata) is Call and type(metadata.func) is Global and len(metadata.args) == 2:
        is_typed = metadata.func.module == "torch.jit._pickle"
        metadata = metadata.args[0] if is_typed else metadata
    if metadata is None:
        return False, False
    if type(metadata) is not dict:
        raise LayoutError(f"a tensor's metadata is {short(metadata)}")
    return metadata.get("conj") is True, metadata.get("neg") is True


def _of_npu(call: Call) -> Meaning:
    """As `_rebuild_tensor_v2`, and then what only its device understands."""
    return _tensor_v2(Call(call.func, call.args[:6]))


def _of_fastai(call: Call) -> Meaning:
    """Likewise, with the class of the tensor before and sometimes its attributes behind."""
    return _tensor_v2(Call(call.func, call.args[1:7]))


def _bare(call: Call) -> Meaning | None:
    """A storage in bytes by itself; bytes that hold none are an object like any other."""
    try:
        return whole(storage_of(call))
    except FormatError:
        return None


BUILDERS = {
    ("torch._utils", "_rebuild_tensor"): _tensor_v2,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
    ("torch_npu.utils.storage", "_rebuild_npu_tensor"): _of_npu,
    ("torch_npu.utils.tensor_methods", "_rebuild_npu_tensor"): _of_npu,
    ("fastai.torch_core", "_fa_rebuild_tensor"): _of_fastai,
    ("fastai2.torch_core", "_fa_rebuild_tensor"): _of_fastai,
    _FROM_BYTES: _bare,
}
"""Records that are views of storages, by name."""

_WIDTHS = {
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "float4_e2m1fn_x2"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz"), 1),
    "complex128": 16,
}
"""Bytes of an element, of the types that are read."""
