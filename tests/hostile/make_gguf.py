"""GGUF files, right and wrong, written by the specification: every field can be made to lie."""

import struct

import numpy as np

__all__ = ["F16", "F32", "Q4_0", "Q8_0", "Tensor", "gguf", "pair", "sample", "string"]

F32, F16, Q4_0, Q8_0 = 0, 1, 2, 8
_KINDS = ("u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "", "", "u64", "i64", "f64")
_NUMBERS = {
    kind: (number, letter)
    for number, (kind, letter) in enumerate(zip(_KINDS, "BbHhIifB  Qqd", strict=True))
}


class Tensor:
    """A tensor of a file: its data, and what the header says of it."""

    def __init__(self, name, dims, kind, data, offset=None):
        self.name = name
        self.dims = dims  # fastest first
        self.kind = kind
        self.data = data
        self.offset = offset

    @classmethod
    def of(cls, name, array, kind, order="<"):
        raw = array.astype(array.dtype.newbyteorder(order)).tobytes()
        return cls(name, array.shape[::-1], kind, raw)


def string(text, order="<", length=None):
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack(f"{order}Q", len(raw) if length is None else length) + raw


def pair(key, kind, value, order="<"):
    """A key with its value; kind is a name of `_NUMBERS`, "str", or a list of one of these."""
    head = string(key, order)
    if kind == "str":
        return head + struct.pack(f"{order}I", 8) + string(value, order)
    if isinstance(kind, list):
        return head + struct.pack(f"{order}I", 9) + _array(kind[0], value, order)
    number, letter = _NUMBERS[kind]
    return head + struct.pack(f"{order}I{letter}", number, value)


def _array(kind, values, order):
    if kind == "str":
        body = b"".join(string(value, order) for value in values)
        return struct.pack(f"{order}IQ", 8, len(values)) + body
    if isinstance(kind, list):
        body = b"".join(_array(kind[0], value, order) for value in values)
        return struct.pack(f"{order}IQ", 9, len(values)) + body
    number, letter = _NUMBERS[kind]
    return struct.pack(f"{order}IQ{len(values)}{letter}", number, len(values), *values)


def gguf(tensors=(), pairs=(), *, version=3, order="<", alignment=32, counts=None, cut=None):
    """The bytes of a file. `counts` are told instead of the true ones, `cut` bytes are left off."""
    told = counts or (len(tensors), len(pairs))
    head = b"GGUF" + struct.pack(f"{order}IQQ", version, *told) + b"".join(pairs)
    data = b""
    for tensor in tensors:
        data += bytes(-len(data) % alignment)
        offset = len(data) if tensor.offset is None else tensor.offset
        sizes = struct.pack(f"{order}I{len(tensor.dims)}Q", len(tensor.dims), *tensor.dims)
        head += string(tensor.name, order) + sizes + struct.pack(f"{order}IQ", tensor.kind, offset)
        data += tensor.data
    whole = head + bytes(-len(head) % alignment) + data
    return whole[: len(whole) - cut] if cut else whole


def sample(order="<", **options):
    """A small file of two tensors, and their arrays."""
    arrays = {
        "token_embd.weight": np.arange(12, dtype=np.float32).reshape(4, 3),
        "output_norm.weight": np.array([1.5, -2, 0.25], np.float16),
    }
    kinds = {np.dtype(np.float32): F32, np.dtype(np.float16): F16}
    tensors = [Tensor.of(n, a, kinds[a.dtype], order) for n, a in arrays.items()]
    pairs = [pair("general.architecture", "str", "llama", order)]
    return gguf(tensors, pairs, order=order, **options), arrays
