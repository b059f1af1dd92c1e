"""What is known of a tensor without its bytes: `TensorSpec`, `Span`, `Layout`.

Checked arithmetic only: a value of these types that exists is consistent. Knows no source and no
array. Specs and spans are structs, of which a model may have a million: made five times as fast as
frozen dataclasses, and nothing the garbage collector need look at.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import msgspec
from msgspec.structs import force_setattr

from weighlock.errors import LayoutError, UnsupportedDType
from weighlock.tensors.dtypes import DType

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weighlock.tensors.dtypes import DTypeLike

__all__ = ["Layout", "Span", "SpecLike", "TensorSpec"]

_LARGEST = 2**63 - 1
_MOST_DIMENSIONS = 64  # numpy's own bound since 2.0


class TensorSpec(msgspec.Struct, frozen=True, gc=False):
    """Name, element type and shape of a tensor.

    `dtype` may be given in any form `DType.of` takes, `shape` as any iterable of ints.

    Raises:
        LayoutError: the name cannot be a name, or no file can hold the shape.
        UnsupportedDType: the dtype is none of safetensors'.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        check_name(self.name)
        if type(self.dtype) is not DType:
            force_setattr(self, "dtype", DType.of(self.dtype))
        if type(self.shape) is not tuple:
            force_setattr(self, "shape", tuple(self.shape))
        shape = self.shape
        for size in shape:
            if type(size) is not int:
                shape = _as_ints(self.name, shape)
                force_setattr(self, "shape", shape)
                break
        if len(shape) > _MOST_DIMENSIONS:  # before multiplying: a long product takes for ever
            raise LayoutError(
                f"tensor {self.name!r} has {len(shape)} dimensions, at most {_MOST_DIMENSIONS}"
                " can be represented"
            )
        bits = reach = self.dtype.bits
        for size in shape:
            if size < 0:
                raise LayoutError(f"tensor {self.name!r} has a negative size in shape {shape}")
            bits *= size
            reach *= size or 1  # numpy refuses [2**40, 2**40, 0] too, though it holds nothing
        if reach > _LARGEST:
            raise LayoutError(f"tensor {self.name!r} of shape {shape} is larger than any file")
        if bits % 8:
            raise LayoutError(
                f"tensor {self.name!r}: shape {shape} of {self.dtype} takes {bits} bits, "
                "which do not fill whole bytes"
            )

    @classmethod
    def of(cls, value: "SpecLike") -> "TensorSpec":
        """A spec from a spec or a `(name, dtype, shape)` triple."""
        if isinstance(value, cls):
            return value
        name, dtype, shape = value  # type: ignore[misc]
        try:
            return cls(name, DType.of(dtype), tuple(shape))
        except UnsupportedDType as error:
            raise UnsupportedDType(f"tensor {name!r}: {error}") from error

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes the tensor takes in a file."""
        return math.prod(self.shape) * self.dtype.bits // 8

    def renamed(self, name: str) -> "TensorSpec":
        """The same tensor under another name."""
        return TensorSpec(name, self.dtype, self.shape)


SpecLike: TypeAlias = "TensorSpec | tuple[str, DTypeLike, Iterable[int]]"


def check_name(name: object) -> None:
    """Raise `LayoutError` unless `name` can name a tensor in a file."""
    if type(name) is not str:
        raise LayoutError(f"tensor name {name!r} is a {type(name).__name__}, not a string")
    if not name or "\0" in name or name == "__metadata__":
        what = "empty" if not name else "reserved" if name == "__metadata__" else "holds NUL"
        raise LayoutError(f"tensor name {name!r} is {what}".replace("is holds", "holds"))
    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise LayoutError(
                f"tensor name {name!r} holds a lone surrogate, which UTF-8 cannot carry"
            ) from error


def _as_ints(name: str, shape: tuple[object, ...]) -> tuple[int, ...]:
    """Sizes as plain ints: numpy integers and the like pass, bools and floats do not."""
    sizes = []
    for size in shape:
        if isinstance(size, bool) or not hasattr(size, "__index__"):
            raise LayoutError(f"tensor {name!r}: {size!r} in shape {shape} is not an integer")
        sizes.append(int(size.__index__()))
    return tuple(sizes)


class Span(msgspec.Struct, frozen=True, gc=False):
    """Bytes `offset` to `offset + length` of a source."""

    offset: int
    length: int

    def __post_init__(self) -> None:
        if self.offset < 0 or self.length < 0:
            raise LayoutError(f"a span cannot start at {self.offset} and be {self.length} long")

    @property
    def end(self) -> int:
        """The first byte after the span."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the elements of a tensor lie, counted in elements from the start of its span."""

    start: int
    """Position of element [0, 0, …]."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Steps between neighbours along each dimension; zero repeats, negative runs backwards."""

    @classmethod
    def contiguous(cls, shape: tuple[int, ...], start: int = 0) -> "Layout":
        """Row-major, without gaps."""
        strides = []
        step = 1
        for size in reversed(shape):
            strides.append(step)
            step *= max(size, 1)
        return cls(start, shape, tuple(reversed(strides)))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in row-major order without gaps."""
        step = 1
        for size, stride in zip(self.shape[::-1], self.strides[::-1], strict=True):
            if size != 1 and stride != step:
                return self.size == 0
            step *= size
        return True

    def cover(self) -> tuple[int, int]:
        """First position and number of positions of the smallest run that holds every element."""
        if 0 in self.shape:
            return self.start, 0
        low = high = self.start
        for size, stride in zip(self.shape, self.strides, strict=True):
            reach = (size - 1) * stride
            if reach < 0:
                low += reach
            else:
                high += reach
        return low, high - low + 1

    @property
    def repeats(self) -> bool:
        """Whether it has more elements than there are positions for them."""
        return self.size > self.cover()[1]
