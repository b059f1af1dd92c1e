"""What the records of a torch pickle mean: tensors, arrays, numbers, containers.

Decided by exact names in tables, after the pickle has been read. Pure: no bytes of a tensor are
touched, and nothing is imported or called. Knows records; not files, and not names of tensors.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from weighlock.errors import LayoutError
from weighlock.formats import rebuild_numpy
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
from weighlock.formats.torch_names import TENSOR_CLASSES, canonical, storage_dtype
from weighlock.tensors.spec import Layout

__all__ = ["attributes_of", "is_module", "storage_of", "tensor_of"]


def tensor_of(record: Any) -> Meaning | None:
    """The tensor a record stands for; None if it stands for none.

    Raises:
        LayoutError: it claims to be a tensor and contradicts itself.
    """
    record = _innermost(record)
    if type(record) is PersistentId:
        return None if is_module(record) else _whole(storage_of(record))
    if type(record) is not Call or type(record.func) is not Global:
        return None
    name = canonical(record.func.module, record.func.name)
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
    if type(record) is not PersistentId:
        raise LayoutError("a tensor's storage is not given as torch gives it")
    if record.meaning is None:
        record.meaning = _storage(record.pid)
    storage: Storage = record.meaning
    return storage


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


def _whole(storage: Storage) -> StoredTensor:
    """A storage by itself, seen as a tensor of one dimension."""
    return StoredTensor(storage, storage.dtype or "uint8", Layout.contiguous((storage.available,)))


def _innermost(record: Any) -> Any:
    """What is left without wrappers: parameters hold tensors with attributes, those plain ones."""
    for _ in range(16):
        if type(record) is not Call or type(record.func) is not Global:
            return record
        if record.func.name not in _WRAPPERS:
            return record
        inner = _unwrapped(canonical(record.func.module, record.func.name), record)
        if inner is None:
            return record
        record = inner
    raise LayoutError("a tensor is wrapped in more than 16 others")


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
_WRAPPERS = {
    *("Parameter", "Buffer", "_rebuild_parameter", "_rebuild_parameter_with_state"),
    *("_rebuild_from_type", "_rebuild_from_type_v2"),
}
"""The last parts of the names above and below: what is not among them wraps nothing."""
_WITH_STATE = ("torch._utils", "_rebuild_parameter_with_state")
_FROM_TYPE = {("torch._tensor", "_rebuild_from_type"), ("torch._tensor", "_rebuild_from_type_v2")}


_NOTHING: Mapping[Any, Any] = MappingProxyType({})


def attributes_of(record: Any) -> Mapping[Any, Any]:
    """What was set on a tensor or parameter beside its data, by name; objects in an array, too."""
    if type(record) is Call and type(record.func) is Global:
        if record.func.name == "_reconstruct":
            return dict(enumerate(rebuild_numpy.objects_of(record)))
        if record.func.name not in _WRAPPERS:
            return _NOTHING  # nearly always: a plain tensor
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


def _view(storage: Storage, elements: int, offset: Any, size: Any, stride: Any) -> Layout:
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
    layout = _view(storage, storage.available, args[1], args[2], args[3])
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
        raise LayoutError(f"a tensor's dtype is {short(dtype)}")
    width = _WIDTHS.get(dtype.name)
    if width is None:
        return Unreadable(f"torch.{dtype.name} is not read")
    if storage.dtype:
        raise LayoutError(f"storage {storage.key!r} of {storage.dtype} is used as {dtype.name}")
    layout = _view(storage, storage.available // width, args[1], args[2], args[3])
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
        raise LayoutError(f"a tensor's metadata is {short(metadata)}")
    return metadata.get("conj") is True, metadata.get("neg") is True


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
    ("torch.nn.parameter", "UninitializedParameter"): _unread("a parameter that has no data yet"),
    ("torch.nn.parameter", "UninitializedBuffer"): _unread("a buffer that has no data yet"),
    **rebuild_numpy.BUILDERS,
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
