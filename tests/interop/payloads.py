"""Bytes of tensors of every dtype, with the values that get lost when somebody converts them."""

import numpy as np
import torch

from weighlock import DType

__all__ = ["DTYPES", "SHAPES", "TORCH_DTYPES", "bits_of", "payload", "shapes_of", "torch_of"]

SHAPES = [(), (1,), (0,), (8,), (3, 0, 2), (4, 6), (6, 1, 4), (2, 3, 1, 2, 4)]

DTYPES = [dtype for dtype in DType if dtype.in_safetensors]

TORCH_DTYPES = [dtype for dtype in DTYPES if dtype.bits != 6]
"""Those torch has a type for: all but the two of six bits."""

# Signalling and quiet NaN with payloads, infinities, minus zero, the smallest and largest numbers.
_PATTERNS = {
    DType.F16: [0x7C01, 0xFE55, 0x7C00, 0xFC00, 0x8000, 0x0001, 0x7BFF],
    DType.BF16: [0x7F81, 0xFFD5, 0x7F80, 0xFF80, 0x8000, 0x0001, 0x7F7F],
    DType.F32: [0x7F800001, 0xFFC12345, 0x7F800000, 0xFF800000, 0x80000000, 1, 0x7F7FFFFF],
    DType.F64: [0x7FF0000000000001, 0xFFF8000000012345, 0x7FF0000000000000, 1 << 63, 1],
    DType.C64: [0x7F800001_FFC12345, 0x80000000_7F800000, 1],
    DType.F8_E5M2: [0x7D, 0xFF, 0x7C, 0xFC, 0x80, 0x01],
    DType.F8_E4M3: [0x7F, 0xFF, 0x7E, 0x80, 0x01],
    DType.F8_E8M0: [0xFF, 0x00, 0xFE],
    DType.F8_E4M3FNUZ: [0x80, 0x7F, 0x01],
    DType.F8_E5M2FNUZ: [0x80, 0x7F, 0x01],
}


def shapes_of(dtype):
    """The shapes this dtype can have: those that fill whole bytes, as torch pairs F4."""
    if dtype is DType.F4:
        return [shape for shape in SHAPES if shape and shape[-1] % 2 == 0]
    return [shape for shape in SHAPES if int(np.prod(shape)) * dtype.bits % 8 == 0]


def payload(dtype, shape, seed=0):
    """The bytes of a tensor in a file."""
    count = int(np.prod(shape, dtype=np.int64)) * dtype.bits // 8
    drawn = np.random.default_rng([seed, count]).integers(0, 256, count, np.uint8)
    if dtype is DType.BOOL:
        return (drawn % 2).tobytes()
    width = max(1, dtype.bits // 8)
    patterns = np.array(_PATTERNS.get(dtype, []), f"<u{width}")[: count // width]
    drawn[: patterns.nbytes] = patterns.view(np.uint8)
    return drawn.tobytes()


def torch_of(dtype, shape, seed=0):
    """A torch tensor that holds the payload."""
    raw = np.frombuffer(payload(dtype, shape, seed), np.uint8).copy()
    if dtype is DType.F4:
        shape = (*shape[:-1], shape[-1] // 2)
    if not raw.size:
        return torch.empty(shape, dtype=getattr(torch, dtype.torch_name))
    return torch.from_numpy(raw).view(getattr(torch, dtype.torch_name)).reshape(shape)


def bits_of(tensor):
    """The bytes of an array or tensor in row-major order, as they lie in memory."""
    if isinstance(tensor, torch.Tensor):
        if tensor.numel() == 0:
            return b""
        return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return np.asarray(tensor).tobytes()
