"""What the records of a torch pickle mean: tensors, arrays, numbers, containers.

Decided by exact names in tables, after the pickle has been read. Pure: no bytes of a tensor are
touched, and nothing is imported or called. Knows records; not files, and not names of tensors.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from weighlock.errors import LayoutError
from weighlock.formats import rebuild_composed, rebuild_numpy, rebuild_stored
from weighlock.formats.meanings import (
    ComposedTensor,
    InlineTensor,
    Meaning,
    StoredTensor,
    Unreadable,
)
from weighlock.formats.pickle_records import Call, Global, PersistentId
from weighlock.formats.rebuild_stored import (
    is_module,
    old_tensor,
    storage_of,
    torch_dtype,
    whole,
)
from weighlock.formats.torch_names import TENSOR_CLASSES, canonical

__all__ = ["attributes_of", "is_module", "objects_in", "storage_of", "tensor_of"]


def tensor_of(record: Any) -> Meaning | None:
    """The tensor a record stands for; None if it stands for none.

    Raises:
        LayoutError: it claims to be a tensor and contradicts itself.
    """
    record, casts = _innermost(record)
    meaning = _stored(record)
    if meaning is None and type(record) is Call and type(record.func) is Global:
        name = canonical(record.func.module, record.func.name)
        compose = rebuild_composed.BUILDERS.get(name)
        if compose is not None:
            _check_untouched(record, name)
            meaning = compose(record, _plain)
        else:
            meaning = _unknown(record)
    return _cast(meaning, casts) if casts else meaning


def _plain(record: Any) -> Meaning | None:
    """The tensor a record stands for, if it is not composed of others."""
    record, casts = _innermost(record)
    meaning = _stored(record)
    return _cast(meaning, casts) if casts else meaning


def _stored(record: Any) -> Meaning | None:
    """The plain tensor that a record without wrappers is."""
    if type(record) is PersistentId:
        if type(record.meaning) is StoredTensor:  # the oldest files name tensors themselves
            return record.meaning
        return None if is_module(record) else whole(storage_of(record))
    if type(record) is not Call or type(record.func) is not Global:
        return None
    name = canonical(record.func.module, record.func.name)
    build = _BUILDERS.get(name)
    if build is not None:
        _check_untouched(record, name)
        meaning: Meaning | None = build(record)
        return meaning
    if name[0] == "torch" and name[1] in TENSOR_CLASSES and record.states:
        return old_tensor(record)
    return None


_FIRST_ARGS = 4
_LONGEST_NAME = 128


def _unknown(record: Call) -> Meaning | None:
    """What somebody's own function would make a tensor of: a storage, and how it is looked at."""
    if "_rebuild_" not in record.func.name:
        return None
    has_storage = any(
        type(part) is PersistentId and not is_module(part) for part in record.args[:_FIRST_ARGS]
    )
    name = record.func.dotted[:_LONGEST_NAME]
    return Unreadable(f"a tensor that is rebuilt by {name}") if has_storage else None


def _check_untouched(record: Call, name: tuple[str, str]) -> None:
    if record.items or record.appended:
        raise LayoutError(f"a tensor made by {name[1]} has items set on it")


def _innermost(record: Any) -> tuple[Any, tuple[str, ...]]:
    """What is left without wrappers, and the types into which those turn its numbers.

    Parameters hold tensors with attributes, those tensors of a device, those plain ones.
    """
    casts: tuple[str, ...] = ()
    for _ in range(16):
        if type(record) is not Call or type(record.func) is not Global:
            return record, casts
        if record.func.name not in _WRAPPERS:
            return record, casts
        name = canonical(record.func.module, record.func.name)
        inner = _unwrapped(name, record)
        if inner is None:
            return record, casts
        if name in _OF_DEVICE:
            casts = (*casts, torch_dtype(record.args[1]))
        record = inner
    raise LayoutError("a tensor is wrapped in more than 16 others")


def _cast(meaning: Meaning | None, casts: tuple[str, ...]) -> Meaning | None:
    """A tensor whose numbers are turned into another type: numpy has no bfloat16, for one."""
    if len(set(casts)) > 1:
        return Unreadable(f"a tensor that is turned into torch.{casts[1]} and torch.{casts[0]}")
    if isinstance(meaning, StoredTensor):
        return meaning._replace(cast=casts[0])
    if isinstance(meaning, InlineTensor):
        return replace(meaning, cast=casts[0])
    if isinstance(meaning, ComposedTensor) and meaning.dtype != casts[0]:
        return Unreadable(
            f"a {meaning.kind} tensor of {meaning.dtype} that is turned into torch.{casts[0]}"
        )
    return meaning


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
    elif name in _OF_DEVICE:
        if len(args) != 4:
            raise LayoutError(f"a tensor of a device is rebuilt from {len(args)} arguments")
        return args[0]
    elif name in _OF_JAX and len(args) >= 3 and type(args[1]) is tuple:
        inner = Call(args[0], args[1])
        inner.states = [args[2]]
        return inner if type(args[0]) is Global else None
    elif name in _FROM_TYPE and len(args) >= 3 and type(args[2]) is tuple:
        inner = Call(args[0], args[2])
        return inner if type(args[0]) is Global else None
    return None


_PARAMETERS = {
    ("torch.nn.parameter", "Parameter"),
    ("torch.nn.parameter", "Buffer"),
    ("torch.autograd.variable", "Variable"),  # what tensors were wrapped in up to 0.3
}
_OF_JAX = {
    ("jax._src.array", "_reconstruct_array"),
    ("jax._src.device_array", "reconstruct_device_array"),
}
"""`(function, its arguments, the state of what it makes, …)`: an array of numpy's."""
_REBUILD_PARAMETER = {
    ("torch._utils", "_rebuild_parameter"),
    ("torch._utils", "_rebuild_parameter_with_state"),
}
_OF_DEVICE = {
    ("torch._utils", "_rebuild_device_tensor_from_numpy"),
    ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"),
    ("torch._utils", "_rebuild_xla_tensor"),
}
"""`(array or tensor, dtype, device, requires_grad)`: of XLA, HPU and others without storages."""
_WRAPPERS = {
    *("Parameter", "Buffer", "Variable", "_rebuild_parameter", "_rebuild_parameter_with_state"),
    *("_rebuild_from_type", "_rebuild_from_type_v2"),
    *(name for _, name in _OF_DEVICE | _OF_JAX),
}
"""The last parts of the names above and below: what is not among them wraps nothing."""
_WITH_STATE = ("torch._utils", "_rebuild_parameter_with_state")
_FROM_TYPE = {("torch._tensor", "_rebuild_from_type"), ("torch._tensor", "_rebuild_from_type_v2")}


_NOTHING: Mapping[Any, Any] = MappingProxyType({})


def objects_in(record: Any) -> list[Any]:
    """What an array of objects holds: the list itself, which many arrays may share."""
    is_array = type(record) is Call and type(record.func) is Global
    return rebuild_numpy.objects_of(record) if is_array and _holds_objects(record) else []


def _holds_objects(record: Call) -> bool:
    name: str = record.func.name
    return name == "_reconstruct"


def attributes_of(record: Any) -> Mapping[Any, Any]:
    """What was set on a tensor or parameter beside its data, by name; objects in an array, too."""
    if type(record) is Call and type(record.func) is Global:
        if _holds_objects(record):
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
            if name == rebuild_composed.JAGGED:
                return {k: v for k, v in found.items() if k not in rebuild_composed.JAGGED_STATE}
            break
        record = inner
    return found


def _unread(what: str) -> Any:
    return lambda call: Unreadable(what)


_BUILDERS = {
    ("torch._utils", "_rebuild_wrapper_subclass"): _unread("a tensor that wraps others"),
    ("torch.nn.parameter", "UninitializedParameter"): _unread("a parameter that has no data yet"),
    ("torch.nn.parameter", "UninitializedBuffer"): _unread("a buffer that has no data yet"),
    **rebuild_stored.BUILDERS,
    **rebuild_numpy.BUILDERS,
}
