"""What records can mean, as values, and the checks every number in a record has to pass.

Pure and small: a meaning that exists is consistent in itself. Who decides that a record means one
of these is `rebuild` and `rebuild_numpy`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from weighlock.errors import LayoutError
from weighlock.formats.pickle_records import Call, Global
from weighlock.formats.torch_names import STORAGE_WIDTHS
from weighlock.tensors.spec import Layout

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

__all__ = [
    "ANY",
    "MOST",
    "MOST_DIMENSIONS",
    "ComposedTensor",
    "InlineTensor",
    "Meaning",
    "Storage",
    "StoredTensor",
    "Text",
    "Unreadable",
    "check_product",
    "ints",
    "short",
]

MOST = 2**60
"""No count, size, stride or offset reaches this."""

ANY = 1 << 100_000  # more than any int of a pickle
MOST_DIMENSIONS = 64


class Storage(NamedTuple):
    """A run of bytes outside the pickle, as the pickle describes it."""

    key: str
    dtype: str
    """Torch's name of its element type; "" if it is bytes."""
    elements: int
    """Number of elements; of bytes, if it has no type."""
    first: int = 0
    """Where a part of it begins that goes as a storage of its own (files before 2018)."""
    part: int = -1
    """How many elements that part has; all, if negative."""
    data: memoryview | None = None
    """Its bytes, if they lie in the pickle after all."""

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return STORAGE_WIDTHS[self.dtype]

    @property
    def available(self) -> int:
        """Elements a tensor on it may use."""
        return self.elements if self.part < 0 else self.part


class StoredTensor(NamedTuple):
    """A view of a storage."""

    storage: Storage
    dtype: str
    """Torch's name."""
    layout: Layout
    conj: bool = False
    neg: bool = False
    cast: str = ""
    """Torch's name of the type its numbers are turned into; "" if they stay what they are."""


class Text(NamedTuple):
    """Bytes that a pickle carries as a text: made late, so that records can share them."""

    text: str
    encoding: str


@dataclass(frozen=True, slots=True)
class InlineTensor:
    """A numpy array whose bytes lie in the pickle itself."""

    dtype: "np.dtype[Any]"
    shape: tuple[int, ...]
    axes: tuple[int, ...] | None
    """Which axis of its bytes each of its own is, where they are not the same."""
    data: bytes
    """As many as the shape needs; none if they are to be made of a text."""
    text: Text | None = None
    """What the bytes are made of; whether they are as many as needed is known then."""
    cast: str = ""
    """As of a stored one."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A tensor of a kind that is not read, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class ComposedTensor:
    """A tensor that is several others: a sparse, quantised or nested one. Without parts, a spec."""

    kind: str
    dtype: str
    """Torch's name."""
    shape: tuple[int | None, ...]
    """None for a dimension whose size differs from element to element."""
    parts: "Mapping[str, StoredTensor | InlineTensor]"


Meaning: TypeAlias = StoredTensor | InlineTensor | Unreadable | ComposedTensor


def ints(value: Any, what: str, most: int = MOST) -> tuple[int, ...]:
    """A tuple of plain non-negative ints, also as torch.Size or a list."""
    if type(value) is Call and type(value.func) is Global and value.func.name == "Size":
        value = value.args[0] if value.args else ()
    if type(value) is not tuple and type(value) is not list:
        raise LayoutError(f"a tensor's {what} {short(value)} is not a tuple of ints")
    if len(value) > MOST_DIMENSIONS:
        raise LayoutError(f"a tensor has {len(value):,} dimensions")
    for number in value:
        if type(number) is not int:
            raise LayoutError(f"a tensor's {what} {short(value)} is not a tuple of ints")
        if not 0 <= number < most:
            raise LayoutError(
                f"a tensor's {what} {short(value)} is negative or larger than any file"
            )
    return value if type(value) is tuple else tuple(value)


def check_product(shape: tuple[int, ...]) -> None:
    """Raise `LayoutError` if no file could hold so many elements."""
    product = 1
    for size in shape:
        product *= size or 1
    if product >= MOST // 16:
        raise LayoutError(f"a tensor of shape {short(shape)} is larger than any file")


def short(value: Any) -> str:
    """A value for a message: never the repr of something nested."""
    if type(value) is int and value.bit_length() > 256:
        text = f"an int of {value.bit_length():,} bits"  # Python refuses to spell very long ones
    elif type(value) in (int, str, bool, float, type(None)):
        text = repr(value)
    elif type(value) in (tuple, list) and len(value) <= 8 and all(type(n) is int for n in value):
        text = f"({', '.join(map(short, value))})"
    else:
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."
