"""A tensor not yet read: what every ref can do, and the kind that lies in memory.

Knows specs and how to fill arrays from pieces; where pieces come from is each kind's own.
"""

from abc import abstractmethod
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec.structs import replace

from weighlock.errors import LayoutError, UnsupportedDType
from weighlock.tensors.arrays import (
    Array,
    SlicedArray,
    array_pieces,
    byte_view,
    empty,
    is_masked,
    shares_elements,
    unpack_f4,
)
from weighlock.tensors.dtypes import DType
from weighlock.tensors.slicing import Index, narrow
from weighlock.tensors.spec import Layout, TensorSpec

if TYPE_CHECKING:
    from weighlock.tensors.torch import Tensor

__all__ = ["PIECE_BYTES", "ArrayRef", "TensorRef", "check_ref", "loaded_shape"]

PIECE_BYTES = 4 * 1024 * 1024
"""Default size of the buffer through which a ref is copied."""


class TensorRef:
    """A tensor that is known but not loaded.

    `load()` gives a numpy array, `torch()` a torch tensor, `ref[10:20]` reads those rows only.
    Refs are values: they can be used from any thread, after a fork, and pickled (the pickle holds
    the place of the tensor, not its bytes, unless it lies in memory).
    """

    __slots__ = ()

    spec: TensorSpec

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self.spec.name

    @property
    def dtype(self) -> DType:
        """The tensor's element type; equal to its safetensors name, as in `ref.dtype == "BF16"`."""
        return self.spec.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return self.spec.shape

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.spec.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.spec.size

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in a safetensors file."""
        return self.spec.nbytes

    def get_shape(self) -> list[int]:
        """The shape as a list, as the lazy slices of `safetensors` give it."""
        return list(self.spec.shape)

    def get_dtype(self) -> str:
        """The dtype's safetensors name, as the lazy slices of `safetensors` give it."""
        return self.spec.dtype.value

    def load(self, out: "Array | memoryview | bytearray | Tensor | None" = None) -> Array:
        """Read the tensor.

        Args:
            out: filled instead of a new array: an array or torch tensor of this shape and dtype,
                or a writable buffer of `nbytes` bytes (the file's bytes then).

        Returns:
            The array; `out`, seen as an array, where it was given. F6 comes as packed bytes.

        Raises:
            SourceError: it cannot be read; `SourceChanged` if its file is another one now.
            TransferError: it lies behind a URL, and could not be had.
            LayoutError: it has no whole bytes, or `out` does not fit.
            LimitExceeded: it repeats its elements more often than was allowed at opening.
            SpoolClosed: the spool it lay in is gone.
        """
        self.check_whole()
        if out is None:
            array = empty(loaded_shape(self.spec), self.dtype.numpy)
            self._fill(array)
            return array
        array = _as_target(self.spec, out)
        if array.dtype == np.uint8 and self.dtype is DType.F4:  # pairs, as torch has them
            packed = array if array.flags.c_contiguous else empty(array.shape, array.dtype)
            self._fill_bytes(byte_view(packed))
            array[...] = packed
        elif array.flags.c_contiguous:
            self._fill(array)
        else:
            self._fill_scattered(array)
        return array

    materialize = load

    def torch(self, device: object = None, dtype: object = None) -> "Tensor":
        """Read the tensor as a torch tensor; on the CPU it lies over the buffer that was read.

        Args:
            device: where to; the CPU if not given.
            dtype: of torch, or a name of one, to convert to.

        Raises:
            What `load` raises.
            UnsupportedDType: torch has no such type, or packed elements were to be converted.
        """
        from weighlock.tensors.torch import converted, from_bytes

        self.check_whole()
        buffer = empty((self.nbytes,), np.dtype(np.uint8))
        self._fill_bytes(byte_view(buffer))
        tensor = from_bytes(buffer, self.spec, device)
        return tensor if dtype is None else converted(tensor, self.spec, dtype)

    def __array__(self, dtype: object = None, copy: bool | None = None) -> Array:
        """For `np.asarray(ref)`: the tensor, read. In another dtype, it is held twice meanwhile."""
        if dtype is not None and self.dtype.is_packed and self.dtype is not DType.F4:
            raise UnsupportedDType(f"tensor {self.name!r}: {self.dtype} is no numbers for numpy")
        array = self.load()
        if dtype is not None:
            array = array.astype(dtype, copy=False)  # type: ignore[call-overload]
        return array

    def __dlpack__(self, **how: Any) -> object:
        """For `torch.as_tensor(ref)` and whoever else takes DLPack: the tensor, read."""
        from weighlock.tensors.torch import is_loaded

        return (self.torch() if is_loaded() else self.load()).__dlpack__(**how)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # the CPU: there it is read to

    def __getitem__(self, index: Index) -> SlicedArray:
        """Read a part. Only the bytes that hold it are read; contiguous rows are one read."""
        return self._slice(index).view(SlicedArray)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"tensor {self.name!r} has no dimensions")
        return self.shape[0]

    # Without this, `for x in ref` would fall back to ref[0], ref[1], …: one read per row.
    __iter__ = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} {self.dtype} {list(self.shape)}>"

    @abstractmethod
    def renamed(self, name: str) -> "TensorRef":
        """The same tensor under another name."""

    @abstractmethod
    def identity(self) -> Hashable:
        """Equal for two refs that are the same view of the same memory or file."""

    @abstractmethod
    def pieces(self, max_bytes: int = PIECE_BYTES) -> Iterator[memoryview]:
        """The tensor's bytes as a safetensors file holds them, in order.

        Pieces are views of one buffer, valid until the next is asked for, of at most `max_bytes`.
        What lies contiguous in memory comes as views of it, of any length. What lies strided in a
        source is gathered some 32 MiB at a time, whatever `max_bytes` is.
        """

    def memory(self) -> memoryview | None:
        """The tensor's bytes as a safetensors file holds them, if they lie so in memory."""
        return None

    def sources(self) -> Iterator[object]:
        """What the tensor is read from; nothing for one that lies in memory."""
        yield from ()

    def check_whole(self) -> None:
        """Raise `LimitExceeded` if so much of it is repeated that it is not read as a whole."""

    @abstractmethod
    def _slice(self, index: Index) -> Array: ...

    def _fill(self, array: Array) -> None:
        """Fill a C-contiguous array of the loaded shape and dtype."""
        if self.dtype is DType.F4:
            codes = array.reshape(-1).view(np.uint8)
            done = 0
            for piece in self.pieces():
                unpack_f4(np.frombuffer(piece, np.uint8), codes[done : done + 2 * len(piece)])
                done += 2 * len(piece)
        else:
            self._fill_bytes(byte_view(array))

    def _fill_bytes(self, buffer: memoryview) -> None:
        """Fill a buffer of `nbytes` with the bytes a file holds."""
        done = 0
        for piece in self.pieces():
            buffer[done : done + len(piece)] = piece
            done += len(piece)

    def _fill_scattered(self, array: Array) -> None:
        """Fill an array whose elements do not lie in order."""
        done = 0
        if self.dtype is DType.F4:
            array[...] = self.load()
            return
        for piece in self.pieces():
            values = np.frombuffer(piece, np.uint8).view(self.dtype.numpy)
            array.flat[done : done + values.size] = values
            done += values.size


def check_ref(value: object) -> None:
    """Raise `TypeError` unless it is a ref, as a catalog holds them."""
    if not isinstance(value, TensorRef):
        raise TypeError(
            f"a catalog holds refs, not a {type(value).__name__}: "
            "Catalog.of(tensors) makes one of arrays and torch tensors"
        )


def loaded_shape(spec: TensorSpec) -> tuple[int, ...]:
    """The shape of the array a tensor is loaded as: packed bytes for F6, its own otherwise."""
    if spec.dtype.is_packed and spec.dtype is not DType.F4:
        return (spec.nbytes,)
    return spec.shape


def _as_target(spec: TensorSpec, out: object) -> Array:
    """`out` as an array of the right shape and dtype, or an error with both sides."""
    if is_masked(out):
        raise LayoutError(f"tensor {spec.name!r}: out= is a masked array: pass array.data")
    if isinstance(out, np.ndarray):
        array: Array = out
    elif isinstance(out, (bytearray, memoryview)):
        view = memoryview(out)
        if view.nbytes != spec.nbytes or not view.c_contiguous:
            raise LayoutError(
                f"tensor {spec.name!r} takes {spec.nbytes:,} bytes, out= has {view.nbytes:,}"
                + ("" if view.c_contiguous else ", with gaps between them")
            )
        if view.readonly:
            raise LayoutError(f"tensor {spec.name!r}: out= is read-only")
        if view.nbytes == 0:
            return empty(loaded_shape(spec), spec.dtype.numpy)
        flat = view.cast("B")
        array = np.frombuffer(flat, np.uint8)
        return array if spec.dtype.is_packed else array.view(spec.dtype.numpy).reshape(spec.shape)
    else:
        from weighlock.tensors.torch import as_target

        array = as_target(spec, out)
    if not array.flags.writeable:
        raise LayoutError(f"tensor {spec.name!r}: out= is read-only")
    if array.shape != loaded_shape(spec) or array.dtype != spec.dtype.numpy:
        if spec.dtype is DType.F4 and array.dtype == np.uint8 and array.nbytes == spec.nbytes:
            return array
        raise LayoutError(
            f"tensor {spec.name!r} is {spec.dtype} {list(spec.shape)} and loads as "
            f"{spec.dtype.numpy} {list(loaded_shape(spec))}, "
            f"out= is {array.dtype} {list(array.shape)}"
        )
    if shares_elements(array.shape, array.strides, array.itemsize):
        raise LayoutError(
            f"tensor {spec.name!r}: elements of out= share memory, as those of an expanded one do"
        )
    return array


class ArrayRef(TensorRef, msgspec.Struct, frozen=True, eq=False, gc=False):
    """A tensor in memory. `load()` returns the array itself, not a copy.

    A struct, as specs are: there may be a million, and no array refers to a ref.
    """

    spec: TensorSpec
    array: Array

    @classmethod
    def of(cls, name: str, array: Array) -> "ArrayRef":
        """A ref to that array under that name."""
        return cls(TensorSpec(name, DType.of(array.dtype), array.shape), array)

    def __post_init__(self) -> None:
        spec, array = self.spec, self.array
        # Asked by identity first, which nearly always tells: looking a type up takes three times as
        # long as all the rest.
        is_its_type = (array.dtype is spec.dtype.numpy and not spec.dtype.is_packed) or DType.of(
            array.dtype
        ) is spec.dtype
        if not is_its_type or array.shape != spec.shape:
            raise LayoutError(
                f"tensor {self.name!r} was announced as {self.dtype} {list(self.shape)}, "
                f"the array is {self.array.dtype} {list(self.array.shape)}"
            )

    def load(self, out: "Array | memoryview | bytearray | Tensor | None" = None) -> Array:
        """The array itself; with `out`, a copy into it."""
        return self.array if out is None else TensorRef.load(self, out)

    materialize = load

    def __array__(self, dtype: object = None, copy: bool | None = None) -> Array:
        array = TensorRef.__array__(self, dtype)
        return array.copy() if copy and array is self.array else array

    def renamed(self, name: str) -> "ArrayRef":
        return replace(self, spec=self.spec.renamed(name))

    def identity(self) -> Hashable:
        address = self.array.__array_interface__["data"][0]
        return "memory", address, self.shape, self.array.strides, self.array.dtype.str, self.dtype

    def pieces(self, max_bytes: int = PIECE_BYTES) -> Iterator[memoryview]:
        return array_pieces(self.array, self.dtype, max_bytes)

    def plain(self) -> "Array | None":
        """The array, if its bytes lie in memory as a file holds them."""
        array, dtype = self.array, self.spec.dtype
        wanted = dtype.numpy
        is_plain = array.flags.c_contiguous and (array.dtype is wanted or array.dtype == wanted)
        return array if is_plain and dtype is not DType.F4 else None

    def memory(self) -> memoryview | None:
        plain = self.plain()
        return None if plain is None else byte_view(plain)

    def _slice(self, index: Index) -> Array:
        narrow(Layout.contiguous(self.shape), index)  # the same indices are refused everywhere
        return np.asarray(self.array[index])
