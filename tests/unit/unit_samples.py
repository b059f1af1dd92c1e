"""Bytes, arrays and sources made by hand, without the code under test."""

import gc
import json
import os

import numpy as np
import pytest

from weighlock.errors import ShortRead, SourceError
from weighlock.tensors.dtypes import DType

FORMAT = [
    *("BOOL", "F4", "F6_E2M3", "F6_E3M2", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"),
    *("F8_E4M3FNUZ", "F8_E5M2FNUZ", "I16", "U16", "F16", "BF16", "I32", "U32", "F32"),
    *("C64", "F64", "I64", "U64"),
]
"""The dtypes of the format, as its documents name them."""

WHOLE_BYTES = [DType(name) for name in FORMAT if name not in ("F4", "F6_E2M3", "F6_E3M2")]
"""Those whose elements fill bytes."""


@pytest.fixture(scope="module", autouse=True)
def quick_collections():
    """Set aside what was loaded before: looking for leaks collects garbage after each test."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def sample(dtype, shape, seed=0):
    """An array of that dtype with every kind of bit pattern in it; F4 as one code a byte."""
    dtype = DType.of(dtype)
    count = int(np.prod(shape))
    width = dtype.numpy.itemsize
    raw = np.random.default_rng(seed).integers(0, 256, count * width, np.uint8)
    if dtype is DType.BOOL:
        raw &= 1
    elif dtype is DType.F4:
        raw &= 15
    return raw.view(dtype.numpy).reshape(shape)


def same_bits(left, right):
    """Equal in shape, dtype and every bit: NaN equals itself, -0.0 is not 0.0."""
    left, right = np.asarray(left), np.asarray(right)
    return (
        left.shape == right.shape
        and left.dtype == right.dtype
        and np.ascontiguousarray(left).tobytes() == np.ascontiguousarray(right).tobytes()
    )


def encode(tensors, metadata=None):
    """A safetensors file as bytes, from `{name: (dtype name, shape, data)}`."""
    header = {"__metadata__": metadata} if metadata is not None else {}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def descriptors_of(path):
    """How many descriptors of this process point to a file, or into a directory."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the one that lists them
        found += target == str(path) or target.startswith(f"{path}/")
    return found


def header_of(path):
    """The header of a file as JSON gives it, and where its data begins."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(length)), 8 + length


class Memory:
    """A source over bytes that remembers what was read, and can fail from some byte on."""

    def __init__(self, data, fails_at=None):
        self.data = bytes(data)
        self.label = "memory"
        self.size = len(self.data)
        self.fails_at = fails_at
        self.reads = []
        self.closed = False

    def read_into(self, offset, buffer):
        self.reads.append((offset, len(buffer)))
        if self.fails_at is not None and offset + len(buffer) > self.fails_at:
            raise SourceError(f"memory: cannot be read at {self.fails_at}")
        found = self.data[offset : offset + len(buffer)]
        if len(found) != len(buffer):
            raise ShortRead("memory: too short", wanted=len(buffer), got=len(found))
        buffer[:] = found

    def close(self):
        self.closed = True


def tensor_of(array):
    """A torch tensor with the same bits, in memory of its own."""
    import torch

    dtype = DType.of(array.dtype)
    raw = torch.frombuffer(bytearray(array.tobytes() or b"\0"), dtype=torch.uint8)
    if array.size == 0:
        packed = 2 if dtype is DType.F4 else 1
        shape = (*array.shape[:-1], array.shape[-1] // packed)
        return torch.empty(shape, dtype=getattr(torch, dtype.torch_name))
    if dtype is DType.F4:
        codes = raw.reshape(array.shape)
        return (codes[..., 0::2] | codes[..., 1::2] << 4).view(torch.float4_e2m1fn_x2)
    return raw.view(getattr(torch, dtype.torch_name)).reshape(array.shape)


def file_bytes(array):
    """What a safetensors file holds of an array."""
    array = np.ascontiguousarray(array)
    if DType.of(array.dtype) is DType.F4:
        codes = array.view(np.uint8).reshape(-1)
        return (codes[0::2] | codes[1::2] << 4).tobytes()
    return array.tobytes()
