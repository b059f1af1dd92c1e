"""What the records of a torch pickle mean: tensors, arrays, numbers, containers.

Decided by exact names in tables, after the pickle has been read. Pure: no bytes of a tensor are
touched, and nothing is imported or called. Knows records; not files, and not names of tensors.
"""

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from weighlock.errors import LayoutError
from weighlock.formats.pickle_records import Call, Global, PersistentId
from weighlock.formats.torch_names import (
    STORAGE_WIDTHS,
    TENSOR_CLASSES,
    canonical,
    storage_dtype,
)
from weighlock.tensors.spec import Layout

__all__ = [
    "InlineTensor",
    "Meaning",
    "Storage",
    "StoredTensor",
    "Unreadable",
    "attributes_of",
    "dtype_of",
    "is_module",
    "raw_bytes",
    "storage_of",
    "tensor_of",
]


@dataclass(frozen=True, slots=True)
class Storage:
    """A run of bytes outside the pickle, as the pickle describes it."""

    key: str
    dtype: str
    """Torch's name of its element type; "" if it is bytes."""
    elements: int
    """Number of elements; of bytes, if it has no type."""
    first: int = 0
    """Where a part of it begins that goes as a storage of its own (files before 2018)."""
    count: int = -1
    """How many elements that part has; all, if negative."""

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return STORAGE_WIDTHS[self.dtype]

    @property
    def available(self) -> int:
        """Elements a tensor on it may use."""
        return self.elements if self.count < 0 else self.count


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A view of a storage."""

    storage: Storage
    dtype: str
    """Torch's name."""
    layout: Layout
    conj: bool = False
    neg: bool = False


@dataclass(frozen=True, slots=True)
class InlineTensor:
    """A numpy array whose bytes lie in the pickle itself."""

    dtype: "np.dtype[Any]"
    shape: tuple[int, ...]
    fortran: bool
    data: bytes


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A tensor of a kind that is not read, and why."""

    reason: str


Meaning: TypeAlias = StoredTensor | InlineTensor | Unreadable


def tensor_of(record: Any) -> Meaning | None:
    """The tensor a record stands for; None if it stands for none.

    Raises:
        LayoutError: it claims to be a tensor and contradicts itself.
    """
    # Wrappers hold wrappers: parameters hold tensors with attributes, those hold plain ones.
    for _ in range(16):
        if type(record) is PersistentId:
            return None if is_module(record) else _whole(storage_of(record))
        if type(record) is not Call or type(record.func) is not Global:
            return None
        name = canonical(record.func.module, record.func.name)
        inner = _unwrapped(name, record)
        if inner is None:
            break
        record = inner
    else:
        raise LayoutError("a tensor is wrapped in more than 16 others")
    build = _BUILDERS.get(name)
    if build is not None:
        if record.items or record.appended:
            raise LayoutError(f"a tensor made by {name[1]} has items set on it")
        meaning: Meaning | None = build(record)
        return meaning
    if name[0] == "torch" and name[1] in TENSOR_CLASSES and record.states:
        return _old_tensor(record)
    return None


def is_module(record: PersistentId) -> bool:
    """Whether this is a class with its source text, which old files hold beside storages."""
    return type(record.pid) is tuple and bool(record.pid) and record.pid[0] == "module"


def storage_of(record: Any) -> Storage:
    """The storage a persistent id names: ('storage', class, key, location, count, …)."""
    pid = record.pid if type(record) is PersistentId else None
    if type(pid) is not tuple or len(pid) not in (5, 6) or pid[0] != "storage":
        raise LayoutError("a tensor's storage is not given as torch gives it")
    kind, key, count = pid[1], pid[2], pid[4]
    dtype = storage_dtype(kind.module, kind.name) if type(kind) is Global else None
    if dtype is None:
        raise LayoutError(f"storage {_short(key)} is of an unknown class")
    if type(key) is not str or type(count) is not int or count < 0:
        raise LayoutError(f"storage {_short(key)} claims {_short(count)} elements")
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


def _whole(storage: Storage) -> StoredTensor:
    """A storage by itself, seen as a tensor of one dimension."""
    return StoredTensor(storage, storage.dtype or "uint8", Layout.contiguous((storage.available,)))


def _unwrapped(name: tuple[str, str], call: Call) -> Any | None:
    """What a wrapper holds; None if this is no wrapper."""
    args = call.args
    if name in _PARAMETERS:
        if args:
            return args[0]
        # 2016: an empty Parameter whose state is (data, requires_grad, …)
        state = call.states[0] if call.states else None
        if type(state) is tuple and state:
            return state[0]
    elif name in _REBUILD_PARAMETER and args:
        return args[0]
    elif name in _FROM_TYPE and len(args) >= 3 and type(args[2]) is tuple:
        inner = Call(args[0], args[2])
        return inner if type(args[0]) is Global else None
    return None


_PARAMETERS = {("torch.nn.parameter", "Parameter"), ("torch.nn.parameter", "Buffer")}
_REBUILD_PARAMETER = {
    ("torch._utils", "_rebuild_parameter"),
    ("torch._utils", "_rebuild_parameter_with_state"),
}
_WITH_STATE = ("torch._utils", "_rebuild_parameter_with_state")
_FROM_TYPE = {("torch._tensor", "_rebuild_from_type"), ("torch._tensor", "_rebuild_from_type_v2")}


def attributes_of(record: Any) -> dict[Any, Any]:
    """What was set on a tensor or parameter beside its data, by name."""
    found: dict[Any, Any] = {}
    for _ in range(16):
        if type(record) is not Call or type(record.func) is not Global:
            break
        name = canonical(record.func.module, record.func.name)
        if (name in _FROM_TYPE or name == _WITH_STATE) and len(record.args) > 3:
            states = record.args[3] if type(record.args[3]) is tuple else (record.args[3],)
            for state in states:
                found.update(state if type(state) is dict else {})
        inner = _unwrapped(name, record)
        if inner is None:
            break
        record = inner
    return found


def _ints(value: Any, what: str) -> tuple[int, ...]:
    """A tuple of plain non-negative ints, also as torch.Size or a list."""
    if type(value) is Call and type(value.func) is Global and value.func.name == "Size":
        value = value.args[0] if value.args else ()
    if type(value) not in (tuple, list) or not all(type(n) is int for n in value):
        raise LayoutError(f"a tensor's {what} {_short(value)} is not a tuple of ints")
    if any(n < 0 for n in value):
        raise LayoutError(f"a tensor's {what} {_short(value)} is negative")
    return tuple(value)


def _view(storage: Storage, offset: Any, size: Any, stride: Any) -> Layout:
    shape, strides = _ints(size, "size"), _ints(stride, "stride")
    if type(offset) is not int or offset < 0:
        raise LayoutError(f"a tensor starts at {_short(offset)} of storage {storage.key!r}")
    if len(shape) != len(strides):
        raise LayoutError(f"a tensor has {len(shape)} sizes and {len(strides)} strides")
    if math.prod(shape) >= 2**60 or len(shape) > 64:
        raise LayoutError(f"a tensor of shape {_short(shape)} is larger than any file")
    return Layout(offset, shape, strides)


def _fits(storage: Storage, layout: Layout, elements: int) -> Layout:
    low, count = layout.cover()
    if count and low + count > elements:
        raise LayoutError(
            f"a tensor reaches to element {low + count:,} of storage {storage.key!r}, "
            f"which has {elements:,}"
        )
    return layout


def _tensor_v2(call: Call) -> Meaning:
    args = call.args
    if len(args) < 4:
        raise LayoutError(f"a tensor is rebuilt from {len(args)} arguments")
    storage = storage_of(args[0])
    layout = _fits(storage, _view(storage, *args[1:4]), storage.available)
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
    dtype = args[6]
    if type(dtype) is not Global or canonical(dtype.module, dtype.name)[0] != "torch":
        raise LayoutError(f"a tensor's dtype is {_short(dtype)}")
    width = _WIDTHS.get(dtype.name)
    if width is None:
        return Unreadable(f"torch.{dtype.name} is not read")
    if storage.dtype:
        raise LayoutError(f"storage {storage.key!r} of {storage.dtype} is used as {dtype.name}")
    layout = _fits(storage, _view(storage, *args[1:4]), storage.available // width)
    conj, neg = _bits(args[7] if len(args) > 7 else None)
    if conj and not dtype.name.startswith("complex"):
        raise LayoutError(f"a tensor of {dtype.name} claims to be conjugated")
    return StoredTensor(storage, dtype.name, layout, conj, neg)


def _old_tensor(call: Call) -> Meaning:
    state = call.states[-1] if call.states else None
    if type(state) is not tuple or len(state) != 4:
        raise LayoutError("an old tensor's state is not (storage, offset, size, stride)")
    return _tensor_v2(Call(call.func, state))


def _bits(metadata: Any) -> tuple[bool, bool]:
    """The lazy conjugate and negative bits."""
    if metadata is None:
        return False, False
    if type(metadata) is not dict:
        raise LayoutError(f"a tensor's metadata is {_short(metadata)}")
    return metadata.get("conj") is True, metadata.get("neg") is True


def _numpy(call: Call) -> Meaning | None:
    """`_reconstruct(ndarray, (0,), b'b')` with state (version, shape, dtype, fortran, data)."""
    state = call.states[-1] if call.states else None
    if type(state) is not tuple or len(state) != 5:
        return None
    dtype = dtype_of(state[2])
    if dtype is None:
        return Unreadable("a numpy array of objects or of a type that is not a number")
    return _inline(dtype, state[1], state[3] is True, raw_bytes(state[4]))


def _from_buffer(call: Call) -> Meaning | None:
    """`_frombuffer(data, dtype, shape, order)`."""
    if len(call.args) != 4:
        return None
    data, dtype_record, shape, order = call.args
    dtype = dtype_of(dtype_record)
    if dtype is None:
        return Unreadable("a numpy array of a type that is not a number")
    return _inline(dtype, shape, order == "F", raw_bytes(data))


def _scalar(call: Call) -> Meaning | None:
    if len(call.args) != 2:
        return None
    dtype = dtype_of(call.args[0])
    if dtype is None:
        return None
    return _inline(dtype, (), False, raw_bytes(call.args[1]))


def _inline(dtype: "np.dtype[Any]", shape: Any, fortran: bool, data: bytes | None) -> Meaning:
    sizes = _ints(shape, "size")
    if data is None:
        return Unreadable("a numpy array whose data is not bytes")
    wanted = math.prod(sizes) * dtype.itemsize
    if wanted != len(data):
        raise LayoutError(
            f"a numpy array of {dtype} {_short(sizes)} takes {wanted:,} bytes, "
            f"{len(data):,} are there"
        )
    return InlineTensor(dtype, sizes, fortran, data)


def dtype_of(record: Any) -> "np.dtype[Any] | None":
    """A number type from `dtype('f4', False, True)` and its state; None for anything else."""
    if type(record) is not Call or type(record.func) is not Global or not record.args:
        return None
    module, name = canonical(record.func.module, record.func.name)
    code = record.args[0]
    if (module, name) != ("numpy", "dtype") or type(code) is not str or code not in _NUMBERS:
        return None
    state = record.states[-1] if record.states else None
    order = state[1] if type(state) is tuple and len(state) > 1 else "<"
    return np.dtype((">" if order == ">" else "<") + code if code != "b1" else "?")


_NUMBERS = {
    *("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"),
}


def raw_bytes(record: Any) -> bytes | None:
    """Bytes, also as `encode(text, 'latin1')`, in which older pickles carry them."""
    if type(record) is bytes:
        return record
    if type(record) is Call and type(record.func) is Global:
        name = canonical(record.func.module, record.func.name)
        args = record.args
        if name == ("_codecs", "encode") and len(args) == 2 and args[1] in ("latin1", "latin-1"):
            try:
                return args[0].encode("latin1") if type(args[0]) is str else None
            except UnicodeEncodeError:
                return None
        if name in (("builtins", "bytes"), ("builtins", "bytearray")) and not args:
            return b""
        if name == ("builtins", "bytearray") and len(args) >= 1:
            return raw_bytes(args[0])
    return None


def _short(value: Any) -> str:
    """A value for a message: never the repr of something nested."""
    if type(value) in (int, str, bool, float, type(None)):
        text = repr(value)
    elif type(value) in (tuple, list) and len(value) <= 8 and all(type(n) is int for n in value):
        text = repr(tuple(value))
    else:
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def _unread(what: str) -> Any:
    return lambda call: Unreadable(what)


_BUILDERS = {
    ("torch._utils", "_rebuild_tensor"): _tensor_v2,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
    ("torch._utils", "_rebuild_qtensor"): _unread("a quantised tensor"),
    ("torch._utils", "_rebuild_sparse_tensor"): _unread("a sparse tensor"),
    ("torch._utils", "_rebuild_sparse_csr_tensor"): _unread("a sparse tensor"),
    ("torch._utils", "_rebuild_nested_tensor"): _unread("a nested tensor"),
    ("torch._utils", "_rebuild_meta_tensor_no_storage"): _unread("a tensor without data (meta)"),
    ("torch._utils", "_rebuild_wrapper_subclass"): _unread("a tensor that wraps others"),
    ("numpy._core.multiarray", "_reconstruct"): _numpy,
    ("numpy._core.numeric", "_frombuffer"): _from_buffer,
    ("numpy._core.multiarray", "scalar"): _scalar,
}

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
