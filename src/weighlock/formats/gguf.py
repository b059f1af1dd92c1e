"""GGUF files: a header of keys, values and tensors, then the tensors, each at a multiple of 32.

Plain numbers become arrays. Block-quantised tensors stay what they are, bytes: their type is named
in the metadata, and what the blocks mean is for those who compute with them. Knows types and where
tensors lie; the header's own bytes are `gguf_header`'s.
"""

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from weighlock.errors import FormatError, HeaderError, LayoutError, TruncatedFile
from weighlock.formats.gguf_header import Described, Head
from weighlock.limits import Limits
from weighlock.tensors.adjusted import AdjustedRef
from weighlock.tensors.catalog import Beside, Catalog
from weighlock.tensors.dtypes import DType
from weighlock.tensors.spec import Span, TensorSpec
from weighlock.tensors.stored import StoredRef

if TYPE_CHECKING:
    from weighlock.sources.base import Source
    from weighlock.tensors.ref import TensorRef

__all__ = ["TYPES_KEY", "open_gguf"]

TYPES_KEY = "gguf.tensor_types"
"""The metadata entry that names the type of each block-quantised tensor, as JSON."""

_ALIGNMENT = 32
_MOST_ALIGNMENT = 1 << 20

_PLAIN = {
    0: DType.F32,
    1: DType.F16,
    24: DType.I8,
    25: DType.I16,
    26: DType.I32,
    27: DType.I64,
    28: DType.F64,
    30: DType.BF16,
}


class _Blocks(NamedTuple):
    """How a quantised type lies in a file."""

    name: str
    elements: int
    nbytes: int


_QUANTISED = {
    2: _Blocks("Q4_0", 32, 18),
    3: _Blocks("Q4_1", 32, 20),
    6: _Blocks("Q5_0", 32, 22),
    7: _Blocks("Q5_1", 32, 24),
    8: _Blocks("Q8_0", 32, 34),
    9: _Blocks("Q8_1", 32, 40),
    10: _Blocks("Q2_K", 256, 84),
    11: _Blocks("Q3_K", 256, 110),
    12: _Blocks("Q4_K", 256, 144),
    13: _Blocks("Q5_K", 256, 176),
    14: _Blocks("Q6_K", 256, 210),
    15: _Blocks("Q8_K", 256, 292),
    16: _Blocks("IQ2_XXS", 256, 66),
    17: _Blocks("IQ2_XS", 256, 74),
    18: _Blocks("IQ3_XXS", 256, 98),
    19: _Blocks("IQ1_S", 256, 50),
    20: _Blocks("IQ4_NL", 32, 18),
    21: _Blocks("IQ3_S", 256, 110),
    22: _Blocks("IQ2_S", 256, 82),
    23: _Blocks("IQ4_XS", 256, 136),
    29: _Blocks("IQ1_M", 256, 56),
    34: _Blocks("TQ1_0", 256, 54),
    35: _Blocks("TQ2_0", 256, 66),
    39: _Blocks("MXFP4", 32, 17),
    40: _Blocks("NVFP4", 64, 36),
    41: _Blocks("Q1_0", 128, 18),
}


def open_gguf(source: "Source", limits: Limits | None = None) -> Catalog:
    """The catalog of a GGUF file. Reads the header only.

    Raises:
        FormatError: it is of an unknown version, broken, or contradicts itself.
        LimitExceeded: it holds more than the limits allow.
    """
    limits = limits or Limits()
    head = Head(source, limits)
    alignment = _alignment(head.values, source.label)
    data_start = -(-head.end // alignment) * alignment
    refs: dict[str, TensorRef] = {}
    unreadable: dict[str, str] = {}
    types: dict[str, str] = {}
    extents: list[tuple[int, int, str]] = []
    for tensor in head.tensors:
        if tensor.offset % alignment:
            raise LayoutError(
                f"tensor {tensor.name!r} begins at byte {tensor.offset:,} of the data, "
                f"which is no multiple of {alignment:,}",
                source=source.label,
            )
        try:
            spec = _spec(tensor)
        except FormatError as error:
            raise type(error)(str(error), source=source.label) from error
        if spec is None:
            unreadable[tensor.name] = f"its type has the number {tensor.kind}, which is not known"
            continue
        span = Span(data_start + tensor.offset, spec.nbytes)
        if span.end > source.size:
            raise TruncatedFile(
                f"tensor {tensor.name!r} ends at byte {span.end:,}, the file has {source.size:,}",
                source=source.label,
            )
        ref: TensorRef = StoredRef(spec, source, span)
        refs[tensor.name] = AdjustedRef(ref, swap=True) if _swaps(spec, head.order) else ref
        extents.append((span.offset, span.end, tensor.name))
        if tensor.kind in _QUANTISED:
            types[tensor.name] = _QUANTISED[tensor.kind].name
    _check_apart(extents, source.label)
    metadata = {key: _as_text(value) for key, value in head.values.items() if _is_scalar(value)}
    if types:
        metadata[TYPES_KEY] = msgspec.json.encode(types).decode()
    extras = {key: value for key, value in head.values.items() if not _is_scalar(value)}
    beside = Beside({}, extras, _notes(types), unreadable)
    return Catalog(refs, metadata, source.close, beside=beside)


def _notes(types: dict[str, str]) -> tuple[str, ...]:
    if not types:
        return ()
    counts = ", ".join(f"{count} {name}" for name, count in Counter(types.values()).most_common())
    return (
        f"{len(types):,} tensors are block-quantised ({counts}) and given as the bytes of their "
        f"blocks; metadata[{TYPES_KEY!r}] names the type of each",
    )


def _swaps(spec: TensorSpec, order: str) -> bool:
    return order == ">" and spec.dtype.bits > 8


def _spec(tensor: Described) -> TensorSpec | None:
    """What a ref to the tensor gives: numbers, or bytes of blocks; None if its type is unknown."""
    plain = _PLAIN.get(tensor.kind)
    if plain is not None:
        return TensorSpec(tensor.name, plain, tensor.shape)
    blocks = _QUANTISED.get(tensor.kind)
    if blocks is None:
        TensorSpec(
            tensor.name, DType.U8, tensor.shape
        )  # its name and sizes are checked all the same
        return None
    row = tensor.shape[-1] if tensor.shape else 1
    if row % blocks.elements:
        raise LayoutError(
            f"tensor {tensor.name!r} has rows of {row:,} elements, which are not whole blocks of "
            f"{blocks.elements} that {blocks.name} has"
        )
    row_bytes = row // blocks.elements * blocks.nbytes
    return TensorSpec(tensor.name, DType.U8, (*tensor.shape[:-1], row_bytes))


def _check_apart(extents: list[tuple[int, int, str]], label: str) -> None:
    """No byte of the data belongs to two tensors."""
    extents.sort()
    reached, previous = 0, ""
    for begin, end, name in extents:
        if begin < reached and begin < end:
            raise LayoutError(
                f"tensor {name!r} begins at byte {begin:,}, within tensor {previous!r}, which ends "
                f"at {reached:,}",
                source=label,
            )
        if end > reached:
            reached, previous = end, name


def _alignment(values: dict[str, Any], label: str) -> int:
    found = values.get("general.alignment", _ALIGNMENT)
    is_power = type(found) is int and 0 < found <= _MOST_ALIGNMENT and found & (found - 1) == 0
    if not is_power:
        shown = found if type(found) is int else type(found).__name__
        raise HeaderError(
            f"its alignment is {shown}: a power of two up to {_MOST_ALIGNMENT:,} was expected",
            source=label,
        )
    return int(found)


def _is_scalar(value: object) -> bool:
    return isinstance(value, (str, bool, int, float))


def _as_text(value: str | bool | float) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)
