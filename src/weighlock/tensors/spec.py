"""What is known of a tensor without its bytes: `TensorSpec`, `Span`, `Layout`.

Checked arithmetic only: a value of these types that exists is consistent. Knows no source and no
array. Specs and spans are structs, of which a model may have a million: made five times as fast as
frozen dataclasses, and nothing the garbage collector need look at.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import msgspec
from msgspec.structs import force_setattr

from weighlock.errors import LayoutError, UnsupportedDType
from weighlock.tensors.dtypes import DType

if TYPE_CHECKING:
    from weighlock.tensors.dtypes import DTypeLike

__all__ = ["Layout", "Span", "SpecLike", "SpecsLike", "TensorSpec"]

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

    if TYPE_CHECKING:  # as it behaves; at run time it is msgspec's own, which is fast

        def __init__(self, name: str, dtype: "DTypeLike", shape: "Iterable[int]") -> None: ...

    def __post_init__(self) -> None:
        check_name(self.name)
        if type(self.dtype) is not DType:
            force_setattr(self, "dtype", DType.of(self.dtype))
        if type(self.shape) is not tuple:
            force_setattr(self, "shape", _as_shape(self.name, self.shape))
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
        """A spec from a spec or a `(name, dtype, shape)` triple.

        Raises:
            LayoutError: it is neither.
        """
        if isinstance(value, cls):
            return value
        if type(value) is not tuple or len(value) != 3:
            found = getattr(value, "spec", None)
            if isinstance(found, cls):  # a ref
                return found
            if isinstance(value, (tuple, list)) and len(value) == 3:
                return cls.of(tuple(value))  # type: ignore[arg-type]
            advice = "; of a mapping, pass its values()" if isinstance(value, str) else ""
            raise LayoutError(
                "a spec is (name, dtype, shape), as in ('w', 'f32', (2, 3)), "
                f"not {repr(value)[:200]}{advice}"
            )
        name, dtype, shape = value
        try:
            return cls(name, DType.of(dtype), shape)
        except UnsupportedDType as error:
            raise UnsupportedDType(f"tensor {name!r}: {error}") from error

    @classmethod
    def several(cls, values: object) -> "list[TensorSpec]":
        """Specs from specs and triples, or from what holds them by name: a catalog, a mapping.

        In a mapping, `(dtype, shape)` and anything that has a `spec`, or a dtype and a shape as
        arrays and torch tensors have, is the spec of its name.

        Raises:
            LayoutError: something among them is none.
        """
        if isinstance(values, Mapping):
            return [_named(cls, name, value) for name, value in values.items()]
        if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
            raise LayoutError(
                f"specs= takes specs or (name, dtype, shape) triples, not a {type(values).__name__}"
            )
        return [cls.of(value) for value in values]

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
SpecsLike: TypeAlias = "Mapping[str, object] | Iterable[SpecLike]"


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


def _named(kind: type[TensorSpec], name: str, value: object) -> TensorSpec:
    """The spec of a name in a mapping."""
    found = getattr(value, "spec", value)
    if isinstance(found, kind):
        return found if found.name == name else found.renamed(name)
    if hasattr(found, "dtype") and hasattr(found, "shape"):
        return kind.of((name, found.dtype, tuple(found.shape)))
    if isinstance(found, (tuple, list)) and len(found) == 2:
        return kind.of((name, *found))
    return kind.of(found)  # type: ignore[arg-type]


def _as_shape(name: object, shape: object) -> tuple[int, ...]:
    """A shape as a tuple, of whatever its sizes are."""
    if isinstance(shape, (str, bytes)) or not isinstance(shape, Iterable):
        raise LayoutError(
            f"tensor {name!r}: a shape is several sizes, as in (2, 3) or (3,), "
            f"not {repr(shape)[:80]}"
        )
    return tuple(shape)


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
