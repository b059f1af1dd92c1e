"""What the records of tensors mean that are several tensors: quantised, sparse, nested; and meta.

By exact names, like `rebuild`, which gives each builder here a function for plain tensors: what is
composed is composed of those, never of composed ones. Shapes of the parts must fit each other;
numbers in them, such as indices, are data and not looked at.
"""

import struct
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from weighlock.errors import LayoutError
from weighlock.formats.meanings import (
    ComposedTensor,
    InlineTensor,
    Meaning,
    StoredTensor,
    Unreadable,
    check_product,
    ints,
    short,
)
from weighlock.formats.pickle_records import Call, Global
from weighlock.formats.rebuild_stored import storage_of, torch_dtype, view_of, whole
from weighlock.formats.torch_names import canonical

__all__ = ["BUILDERS", "JAGGED", "JAGGED_STATE"]

Plain: TypeAlias = Callable[[Any], Meaning | None]
_Part: TypeAlias = StoredTensor | InlineTensor


class _UnreadablePart(Exception):
    """A part that is a tensor of a kind that is not read."""


def _part(record: Any, plain: Plain, what: str) -> _Part:
    meaning = plain(record)
    if isinstance(meaning, Unreadable):
        raise _UnreadablePart(f"its {what}: {meaning.reason}")
    if not isinstance(meaning, (StoredTensor, InlineTensor)):
        raise LayoutError(f"the {what} of a composed tensor are no tensor but {short(record)}")
    return meaning


def _shape(part: _Part) -> tuple[int, ...]:
    return part.layout.shape if isinstance(part, StoredTensor) else part.shape


def _dtype(part: _Part) -> str:
    return part.cast or (part.dtype if isinstance(part, StoredTensor) else str(part.dtype))


def _number(value: float, code: str) -> InlineTensor:
    data = struct.pack(f"<{code}", value)
    return InlineTensor(np.dtype({"d": "<f8", "q": "<i8"}[code]), (), None, data)


def _list_of(record: Any) -> list[Any] | None:
    """A list, also as TorchScript writes those of numbers."""
    is_typed = type(record) is Call and type(record.func) is Global and len(record.args) == 1
    if is_typed and record.func.module == "torch.jit._pickle":
        record = record.args[0]
    return record if type(record) is list else None


def _numbers(record: Any, code: str) -> InlineTensor | None:
    """A list of numbers, as torch 1.3 wrote scales and zero points, as an array."""
    values, kind = _list_of(record), {"d": float, "q": int}[code]
    if values is None or not all(type(value) is kind for value in values):
        return None
    try:
        data = struct.pack(f"<{len(values)}{code}", *values)
    except struct.error:  # an int of more than 64 bits
        return None
    return InlineTensor(np.dtype({"d": "<f8", "q": "<i8"}[code]), (len(values),), None, data)


_INTEGERS = {"qint8": "int8", "quint8": "uint8", "qint32": "int32"}


_LONGEST_SCHEME = 64


def _quantised(call: Call, plain: Plain) -> Meaning:
    """`(storage, offset, size, stride, (scheme, scale, zero point[, axis]), …)`."""
    if len(call.args) < 5:
        raise LayoutError(f"a quantised tensor is rebuilt from {len(call.args)} arguments")
    storage = storage_of(call.args[0])
    size, scheme = ints(call.args[2], "size"), call.args[4]
    check_product(size)
    if type(scheme) is not tuple or len(scheme) not in (3, 4) or type(scheme[0]) is not Global:
        raise LayoutError(f"a tensor is quantised by {short(scheme)}")
    if not storage.dtype.startswith(("qint", "quint")):
        raise LayoutError(f"a quantised tensor lies in storage {storage.key!r} of {storage.dtype}")
    parts: dict[str, _Part] = {}
    integers = _INTEGERS.get(storage.dtype)
    if integers is None:  # several numbers to a byte, rows padded: as it lies there
        parts["packed"] = whole(storage)._replace(dtype="uint8")
    else:
        layout = view_of(storage, storage.available, *call.args[1:4])
        parts["int_repr"] = StoredTensor(storage, integers, layout)
    parts |= _scales(scheme, size, plain)
    kind = f"quantized {scheme[0].name[:_LONGEST_SCHEME]}"
    return ComposedTensor(kind, storage.dtype, size, _frozen(parts))


def _scales(scheme: Any, size: tuple[int, ...], plain: Plain) -> dict[str, _Part]:
    if len(scheme) == 3:
        _, scale, zero = scheme
        if type(scale) is not float or type(zero) is not int or not -(2**63) <= zero < 2**63:
            raise LayoutError(
                f"a tensor is quantised by the scale {short(scale)} and zero point {short(zero)}"
            )
        return {"scale": _number(scale, "d"), "zero_point": _number(zero, "q")}
    _, scales, zeros, axis = scheme
    along = _list_of(axis)
    axis = along[0] if along is not None and len(along) == 1 else axis
    if type(axis) is not int or not 0 <= axis < len(size):
        raise LayoutError(f"a tensor of {len(size)} dimensions is quantised along {short(axis)}")
    scale_part = _numbers(scales, "d") or _part(scales, plain, "scales")
    zero_part = _numbers(zeros, "q") or _part(zeros, plain, "zero points")
    for part in (scale_part, zero_part):
        if _shape(part) != (size[axis],):
            raise LayoutError(
                f"a tensor of {size[axis]:,} channels has scales or zero points for "
                f"{short(_shape(part))}"
            )
    return {"scale": scale_part, "zero_point": zero_part, "axis": _number(axis, "q")}


_COMPRESSED = {
    "sparse_csr": ("crow_indices", "col_indices"),
    "sparse_bsr": ("crow_indices", "col_indices"),
    "sparse_csc": ("ccol_indices", "row_indices"),
    "sparse_bsc": ("ccol_indices", "row_indices"),
}


def _sparse(call: Call, plain: Plain) -> Meaning:
    """`(layout, (indices, values, size[, coalesced]))`, or with two kinds of indices."""
    layout, data = _as_python_has_it(call.args)
    named = layout.args[0] if type(layout) is Call and len(layout.args) == 1 else layout
    kind = named.removeprefix("torch.") if type(named) is str else short(named)
    least = 4 if kind in _COMPRESSED else 3
    if type(data) is not tuple or not least <= len(data) <= 4:
        raise LayoutError(f"a tensor of layout {short(kind)} is not rebuilt as torch does it")
    if kind == "sparse_coo":
        indices, values = _part(data[0], plain, "indices"), _part(data[1], plain, "values")
        size = ints(data[2], "size")
        _check_coo(_shape(indices), _shape(values), size)
        parts = {"indices": indices, "values": values}
    elif kind in _COMPRESSED:
        outer, inner = (_part(data[n], plain, "indices") for n in (0, 1))
        values, size = _part(data[2], plain, "values"), ints(data[3], "size")
        _check_compressed(kind, _shape(outer), _shape(inner), _shape(values), size)
        names = _COMPRESSED[kind]
        parts = {names[0]: outer, names[1]: inner, "values": values}
    else:
        return Unreadable(f"a tensor of layout {short(kind)} is not read")
    return ComposedTensor(kind, _dtype(values), size, _frozen(parts))


_LAYOUTS = {1: "sparse_coo", 2: "sparse_csr"}
"""Numbers of `c10::Layout`, of those that TorchScript writes."""


def _as_python_has_it(args: tuple[Any, ...]) -> tuple[Any, Any]:
    """Layout and data of a sparse tensor; TorchScript: `(layout, size, grad, …parts, hooks)`."""
    kind = _LAYOUTS.get(args[0]) if args and type(args[0]) is int else None
    if kind is not None and len(args) == (7 if kind in _COMPRESSED else 6):
        return kind, (*args[3:-1], args[1])
    return (args[0], args[1]) if len(args) == 2 else (None, None)


def _check_coo(indices: tuple[int, ...], values: tuple[int, ...], size: tuple[int, ...]) -> None:
    if len(indices) == 2 and values and indices[1] == values[0]:
        sparse = indices[0]
        if sparse <= len(size) and values[1:] == size[sparse:]:
            return
    raise LayoutError(
        f"a sparse tensor of {short(size)} has indices of {short(indices)} "
        f"and values of {short(values)}"
    )


def _check_compressed(
    kind: str,
    outer: tuple[int, ...],
    inner: tuple[int, ...],
    values: tuple[int, ...],
    size: tuple[int, ...],
) -> None:
    batch = len(outer) - 1
    if batch >= 0 and len(inner) == batch + 1 and len(size) >= batch + 2:
        blocks = values[batch + 1 : batch + 3] if kind in ("sparse_bsr", "sparse_bsc") else (1, 1)
        rest = values[batch + (3 if kind in ("sparse_bsr", "sparse_bsc") else 1) :]
        along = 0 if _COMPRESSED[kind][0] == "crow_indices" else 1
        fits = (
            outer[:-1] == inner[:-1] == values[:batch] == size[:batch]
            and inner[-1:] == values[batch : batch + 1]
            and len(blocks) == 2
            and all(blocks)
            and rest == size[batch + 2 :]
            and all(n % b == 0 for n, b in zip(size[batch : batch + 2], blocks, strict=True))
            and outer[-1] == size[batch + along] // blocks[along] + 1
        )
        if fits:
            return
    raise LayoutError(
        f"a {kind} tensor of {short(size)} has indices of {short(outer)} and {short(inner)} "
        f"and values of {short(values)}"
    )


def _nested(call: Call, plain: Plain) -> Meaning:
    """`(buffer, sizes, strides, offsets)`: the last three have a row for each tensor in it."""
    if len(call.args) != 4:
        raise LayoutError(f"a nested tensor is rebuilt from {len(call.args)} arguments")
    names = ("values", "sizes", "strides", "offsets")
    parts = {name: _part(arg, plain, name) for name, arg in zip(names, call.args, strict=True)}
    sizes, strides, offsets = (_shape(parts[name]) for name in names[1:])
    # One that holds nothing has sizes of no dimension.
    if sizes != strides or len(sizes) not in (0, 2) or offsets != (sizes[:1] or (0,)):
        raise LayoutError(
            f"a nested tensor has sizes, strides and offsets of "
            f"{short(sizes)}, {short(strides)}, {short(offsets)}"
        )
    shape = (sizes[0], *([None] * sizes[1])) if sizes else (0,)
    return ComposedTensor("nested", _dtype(parts["values"]), shape, _frozen(parts))


JAGGED = ("torch.nested._internal.nested_tensor", "_rebuild_njt")
JAGGED_STATE = {"_values", "_offsets", "_lengths", "_ragged_idx", "_metadata_cache"}
"""What such a tensor has as attributes, too."""


def _jagged(call: Call, plain: Plain) -> Meaning:
    """`({values, offsets, lengths, _ragged_idx, …},)`: rows end to end, and where each begins."""
    given = call.args[0] if len(call.args) == 1 else None
    if type(given) is not dict:
        raise LayoutError("a nested tensor is not rebuilt as torch does it")
    parts = {name: _part(given.get(name), plain, name) for name in ("values", "offsets")}
    if given.get("lengths") is not None:
        parts["lengths"] = _part(given["lengths"], plain, "lengths")
    values, offsets, ragged = (
        _shape(parts["values"]),
        _shape(parts["offsets"]),
        given.get("_ragged_idx"),
    )
    rows = offsets[0] - 1 if len(offsets) == 1 else -1
    if type(ragged) is not int or not 1 <= ragged <= len(values) or rows < 0:
        raise LayoutError(
            f"a nested tensor of dimension {short(ragged)} has values of {short(values)} "
            f"and offsets of {short(offsets)}"
        )
    if "lengths" in parts and _shape(parts["lengths"]) != (rows,):
        raise LayoutError(f"a nested tensor of {rows:,} rows has other lengths")
    inner = (*values[: ragged - 1], None, *values[ragged:])
    if ragged > 1:
        parts["ragged_dimension"] = _number(ragged, "q")
    return ComposedTensor("nested jagged", _dtype(parts["values"]), (rows, *inner), _frozen(parts))


def _meta(call: Call, plain: Plain) -> Meaning:
    """`(dtype, size, stride, requires_grad)`: what a tensor would be."""
    dtype = call.args[0] if len(call.args) >= 2 else None
    if type(dtype) is not Global or canonical(dtype.module, dtype.name)[0] != "torch":
        raise LayoutError("a tensor without data has no dtype")
    size = ints(call.args[1], "size")
    check_product(size)
    return ComposedTensor("meta", torch_dtype(dtype), size, _frozen({}))


def _frozen(parts: dict[str, _Part]) -> MappingProxyType[str, _Part]:
    return MappingProxyType(parts)


def _told(build: Callable[[Call, Plain], Meaning], what: str) -> Callable[[Call, Plain], Meaning]:
    def built(call: Call, plain: Plain) -> Meaning:
        try:
            return build(call, plain)
        except _UnreadablePart as error:
            return Unreadable(f"{what}, and {error}")

    return built


BUILDERS = {
    ("torch._utils", "_rebuild_qtensor"): _told(_quantised, "a quantised tensor"),
    ("torch._utils", "_rebuild_sparse_tensor"): _told(_sparse, "a sparse tensor"),
    ("torch._utils", "_rebuild_sparse_csr_tensor"): _told(_sparse, "a sparse tensor"),
    ("torch._utils", "_rebuild_nested_tensor"): _told(_nested, "a nested tensor"),
    JAGGED: _told(_jagged, "a nested tensor"),
    ("torch._utils", "_rebuild_meta_tensor_no_storage"): _meta,
}
"""Records that are composed tensors, by name."""
