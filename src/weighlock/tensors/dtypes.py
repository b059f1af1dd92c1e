"""The 22 element types of safetensors, one more, and their names elsewhere.

Knows names, widths in bits, and which numpy and torch types carry them. Does not know tensors.
`ml_dtypes` is imported when a type numpy lacks is first asked for.
"""

import functools
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from weighlock.errors import UnsupportedDType

if TYPE_CHECKING:
    from typing import TypeAlias

    DTypeLike: TypeAlias = "DType | str | np.dtype[Any] | type | object"

__all__ = ["DType"]


class DType(StrEnum):
    """An element type, named as safetensors names it: `DType.BF16 == "BF16"`."""

    BOOL = "BOOL"
    F4 = "F4"
    F6_E2M3 = "F6_E2M3"
    F6_E3M2 = "F6_E3M2"
    U8 = "U8"
    I8 = "I8"
    F8_E5M2 = "F8_E5M2"
    F8_E4M3 = "F8_E4M3"
    F8_E8M0 = "F8_E8M0"
    F8_E4M3FNUZ = "F8_E4M3FNUZ"
    F8_E5M2FNUZ = "F8_E5M2FNUZ"
    I16 = "I16"
    U16 = "U16"
    F16 = "F16"
    BF16 = "BF16"
    I32 = "I32"
    U32 = "U32"
    F32 = "F32"
    C64 = "C64"
    F64 = "F64"
    I64 = "I64"
    U64 = "U64"
    C128 = "C128"
    """Double complex numbers: torch's files hold them, safetensors has no name for them."""

    bits: int
    """Width of one element in a file."""

    # The same value as Enum's, which is written in Python: types are looked up for every tensor.
    __hash__ = str.__hash__

    @property
    def in_safetensors(self) -> bool:
        """Whether a safetensors file can hold this type; all but one."""
        return self is not DType.C128

    @property
    def alignment(self) -> int:
        """The number of bytes an element of this type should start on a multiple of."""
        return max(1, self.bits // 8)

    @property
    def is_packed(self) -> bool:
        """Whether several elements share a byte in a file."""
        return self.bits < 8

    @property
    def is_float(self) -> bool:
        """Whether elements are real floating-point numbers."""
        return self.value[0] in "FB" and self is not DType.BOOL

    @property
    def is_complex(self) -> bool:
        """Whether elements are pairs of real and imaginary part."""
        return self in (DType.C64, DType.C128)

    @property
    def numpy(self) -> "np.dtype[Any]":
        """The little-endian numpy type of loaded arrays.

        F4 is loaded one element per byte (`ml_dtypes.float4_e2m1fn`). F6 stays packed, as `uint8`:
        the format does not say in which order its bits lie.
        """
        return _numpy_type(self)

    @property
    def torch_name(self) -> str:
        """The attribute of the `torch` module that carries this type; `uint8` for packed F6."""
        return _TORCH_NAMES[self]

    @classmethod
    def of(cls, value: "DTypeLike") -> "DType":
        """The type meant by a safetensors, torch or numpy name, a numpy dtype or a torch dtype.

        Raises:
            UnsupportedDType: no safetensors type is meant by it.
        """
        if isinstance(value, cls):
            return value
        try:
            found = _named(value) if isinstance(value, str) else _from_object(value)
        except TypeError:  # it cannot even be hashed
            found = None
        if found is None:
            raise UnsupportedDType(f"dtype {value!r} has no safetensors type; there are: {_LISTED}")
        return found


for _bits, _dtypes in {
    4: [DType.F4],
    6: [DType.F6_E2M3, DType.F6_E3M2],
    8: [
        *(DType.BOOL, DType.U8, DType.I8, DType.F8_E5M2, DType.F8_E4M3),
        *(DType.F8_E8M0, DType.F8_E4M3FNUZ, DType.F8_E5M2FNUZ),
    ],
    16: [DType.I16, DType.U16, DType.F16, DType.BF16],
    32: [DType.I32, DType.U32, DType.F32],
    64: [DType.C64, DType.F64, DType.I64, DType.U64],
    128: [DType.C128],
}.items():
    for _dtype in _dtypes:
        _dtype.bits = _bits

_NUMPY_NAMES = {
    DType.BOOL: "?",
    DType.U8: "u1",
    DType.I8: "i1",
    DType.I16: "<i2",
    DType.U16: "<u2",
    DType.F16: "<f2",
    DType.I32: "<i4",
    DType.U32: "<u4",
    DType.F32: "<f4",
    DType.C64: "<c8",
    DType.C128: "<c16",
    DType.F64: "<f8",
    DType.I64: "<i8",
    DType.U64: "<u8",
    DType.F6_E2M3: "u1",
    DType.F6_E3M2: "u1",
}

_ML_NAMES = {
    DType.F4: "float4_e2m1fn",
    DType.F8_E5M2: "float8_e5m2",
    DType.F8_E4M3: "float8_e4m3fn",
    DType.F8_E8M0: "float8_e8m0fnu",
    DType.F8_E4M3FNUZ: "float8_e4m3fnuz",
    DType.F8_E5M2FNUZ: "float8_e5m2fnuz",
    DType.BF16: "bfloat16",
}

_TORCH_NAMES = {
    DType.BOOL: "bool",
    DType.F4: "float4_e2m1fn_x2",
    DType.F6_E2M3: "uint8",
    DType.F6_E3M2: "uint8",
    DType.U8: "uint8",
    DType.I8: "int8",
    DType.F8_E5M2: "float8_e5m2",
    DType.F8_E4M3: "float8_e4m3fn",
    DType.F8_E8M0: "float8_e8m0fnu",
    DType.F8_E4M3FNUZ: "float8_e4m3fnuz",
    DType.F8_E5M2FNUZ: "float8_e5m2fnuz",
    DType.I16: "int16",
    DType.U16: "uint16",
    DType.F16: "float16",
    DType.BF16: "bfloat16",
    DType.I32: "int32",
    DType.U32: "uint32",
    DType.F32: "float32",
    DType.C64: "complex64",
    DType.C128: "complex128",
    DType.F64: "float64",
    DType.I64: "int64",
    DType.U64: "uint64",
}

# Every accepted spelling in lower case. Torch's short names ("half", "long") come from its own
# namespace; "fp16" and its kin are what configuration files write.
_NAMES: dict[str, DType] = {
    **{dtype.lower(): dtype for dtype in DType},
    **{name: dtype for dtype, name in _TORCH_NAMES.items() if dtype.bits != 6},
    **{name: dtype for dtype, name in _ML_NAMES.items()},
    "half": DType.F16,
    "float": DType.F32,
    "double": DType.F64,
    "cfloat": DType.C64,
    "short": DType.I16,
    "int": DType.I32,
    "long": DType.I64,
    "fp16": DType.F16,
    "fp32": DType.F32,
    "fp64": DType.F64,
    "fp8_e4m3": DType.F8_E4M3,
    "fp8_e5m2": DType.F8_E5M2,
    "fp4": DType.F4,
}


_LISTED = ", ".join(dtype for dtype in DType if dtype.in_safetensors)


@functools.cache
def _numpy_type(dtype: DType) -> "np.dtype[Any]":
    name = _NUMPY_NAMES.get(dtype)
    if name is not None:
        return np.dtype(name)
    import ml_dtypes

    found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, _ML_NAMES[dtype]))
    return found


def _named(name: str) -> DType | None:
    return _NAMES.get(name.lower().removeprefix("torch."))


@functools.lru_cache(maxsize=128)
def _from_object(value: object) -> DType | None:
    if value is None:  # which numpy takes for float64
        return None
    if type(value).__module__ == "torch":  # a torch.dtype prints as "torch.bfloat16"
        return _named(str(value))
    try:
        dtype = np.dtype(value)  # type: ignore[call-overload]
    except TypeError:
        return None
    # `name` ignores the byte order: arrays of either order can be written.
    return _NAMES.get(dtype.name) if dtype.names is None else None
