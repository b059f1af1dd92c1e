"""Torch tensors as refs, as targets and as results. Imports torch, as `weighlock.torch` does.

It does so inside functions: whoever has no torch never pays for it. Knows tensors and their
peculiarities (devices, conjugation, subclasses); not files.
"""

import sys
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from weighlock.errors import LayoutError, UnsupportedDType
from weighlock.tensors.arrays import Array, byte_view
from weighlock.tensors.dtypes import DType
from weighlock.tensors.ref import PIECE_BYTES, ArrayRef, TensorRef
from weighlock.tensors.slicing import Index, narrow, row_blocks
from weighlock.tensors.spec import Layout, TensorSpec

if TYPE_CHECKING:
    import torch

    Tensor: TypeAlias = torch.Tensor

__all__ = [
    "TorchRef",
    "as_target",
    "check_plain",
    "converted",
    "dtype_named",
    "from_array",
    "from_bytes",
    "is_loaded",
    "is_tensor",
    "size_and_dtype",
    "state_dict",
]


def is_tensor(value: object) -> bool:
    """Whether this is a torch tensor. Does not import torch: without it there are none."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_loaded() -> bool:
    """Whether somebody has imported torch."""
    return "torch" in sys.modules


def check_plain(name: str, tensor: "Tensor") -> None:
    """Raise `LayoutError`, with the remedy, unless the tensor is one piece of real memory."""
    import torch

    kind = type(tensor).__name__
    remedy = None
    if kind in ("UninitializedParameter", "UninitializedBuffer"):
        raise LayoutError(f"tensor {name!r} is uninitialised: run the module once first")
    if hasattr(tensor, "full_tensor"):
        remedy = f"is spread over several processes ({kind}): pass tensor.full_tensor()"
    elif tensor.is_nested:
        remedy = "is nested: pass tensor.values() and tensor.offsets() under names of their own"
    elif hasattr(tensor, "__tensor_flatten__") or kind in ("FakeTensor", "FunctionalTensor"):
        remedy = f"is a {kind}, which wraps other tensors: pass those, or tensor.dequantize()"
    elif tensor.is_meta:
        remedy = "has no data (it is on the meta device): load or initialise the module first"
    elif tensor.layout is not torch.strided:
        remedy = f"is sparse ({tensor.layout}): pass tensor.to_dense(), or its parts by name"
    elif tensor.is_quantized:
        remedy = "is quantised: pass tensor.int_repr() and its scale, or tensor.dequantize()"
    elif tensor.numel() and not _has_memory(tensor):
        remedy = f"is a {kind} without memory of its own: pass the tensors it wraps"
    if remedy:
        raise LayoutError(f"tensor {name!r} {remedy}")


def _has_memory(tensor: "Tensor") -> bool:
    try:
        return bool(tensor.untyped_storage().data_ptr())
    except RuntimeError:  # torch's way of saying that there is none
        return False


def from_bytes(buffer: Array, spec: TensorSpec, device: object = None) -> "Tensor":
    """The tensor whose file bytes lie in a uint8 array; shares its memory on the CPU."""
    import torch

    dtype = getattr(torch, spec.dtype.torch_name, None)
    if dtype is None:
        raise UnsupportedDType(
            f"tensor {spec.name!r} is {spec.dtype}, which torch {torch.__version__} lacks"
        )
    shape = spec.shape
    if spec.dtype is DType.F4 and shape and shape[-1] % 2 == 0:
        shape = (*shape[:-1], shape[-1] // 2)
    elif spec.dtype.is_packed:
        shape = (spec.nbytes,)
    if spec.nbytes == 0:
        return torch.empty(shape, dtype=dtype, device=device)
    tensor = torch.from_numpy(buffer).view(dtype).reshape(shape)
    return tensor if device is None else tensor.to(device)


def converted(tensor: "Tensor", spec: TensorSpec, dtype: object) -> "Tensor":
    """A tensor in another dtype, which may be given in any form `DType.of` takes.

    Raises:
        UnsupportedDType: torch has no such type, or elements are packed.
    """
    import torch

    wanted = DType.of(dtype)
    found = getattr(torch, wanted.torch_name, None)
    if wanted is spec.dtype:
        return tensor
    if found is None or wanted.is_packed or spec.dtype.is_packed:
        raise UnsupportedDType(f"tensor {spec.name!r}: torch cannot cast {spec.dtype} to {wanted}")
    return tensor.to(found)


def state_dict(
    refs: Mapping[str, TensorRef], device: object = None, dtype: object = None
) -> "dict[str, Tensor]":
    """Tensors by name; of one that has several names, the same tensor. Floats are converted."""
    found: dict[Hashable, Tensor] = {}
    named: dict[str, Tensor] = {}
    for name, ref in refs.items():
        identity = ref.identity()
        if identity not in found:
            is_float = ref.dtype.is_float and not ref.dtype.is_packed
            found[identity] = ref.torch(device, dtype if is_float else None)
        named[name] = found[identity]
    return named


def from_array(array: Array, *, device: object = None, dtype: object = None) -> "Tensor":
    """A numpy array of any of our dtypes as a tensor; shares its memory if it can stay as it is."""
    import torch

    found = DType.of(array.dtype)
    if found is DType.F4:
        raise UnsupportedDType("torch has F4 only in pairs; ref.torch() gives float4_e2m1fn_x2")
    if not array.flags.c_contiguous or not array.flags.writeable:
        array = array.copy()
    if array.dtype.isnative and found.numpy.isbuiltin == 1:
        tensor = torch.from_numpy(array)
    else:
        raw = array.astype(found.numpy, copy=False).view(f"u{array.dtype.itemsize}")
        tensor = torch.from_numpy(raw).view(getattr(torch, found.torch_name))
    return tensor.to(device=device, dtype=dtype)


def as_target(spec: TensorSpec, tensor: object) -> Array:
    """A CPU tensor's memory as the numpy array to read into."""
    if not is_tensor(tensor):
        raise LayoutError(
            f"tensor {spec.name!r} cannot be read into a {type(tensor).__name__}: "
            "out= takes numpy arrays, torch tensors and writable buffers"
        )
    check_plain(spec.name, tensor)
    ref = TorchRef.of(spec.name, tensor)
    is_f6 = spec.dtype.is_packed and spec.dtype is not DType.F4
    packed = TensorSpec(spec.name, DType.U8, (spec.nbytes,)) if is_f6 else None
    if ref.spec not in (spec, packed):
        raise LayoutError(
            f"tensor {spec.name!r} is {spec.dtype} {list(spec.shape)}, "
            f"out= is {ref.dtype} {list(ref.shape)}"
        )
    if not ref.is_plain:
        raise LayoutError(
            f"tensor {spec.name!r}: out= is on {ref.tensor.device}, or lazily conjugated; "
            "Catalog.load_into reads into those"
        )
    return _numpy_view(ref.tensor, ref.dtype)


def _numpy_view(tensor: "Tensor", dtype: DType) -> Array:
    """The memory of a plain CPU tensor, in its numpy dtype; packed types as bytes."""
    import torch

    if dtype.is_packed:
        packed: Array = tensor.view(torch.uint8).numpy()
        return packed
    if dtype.numpy.isbuiltin == 1:
        plain: Array = tensor.numpy()
        return plain
    whole = torch.uint8 if dtype.bits == 8 else torch.int16
    array: Array = tensor.view(whole).numpy().view(dtype.numpy)
    return array


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TorchRef(TensorRef):
    """A tensor held by torch, on any device. `load()` shares its memory where numpy can see it."""

    spec: TensorSpec
    tensor: Any

    @classmethod
    def of(cls, name: str, tensor: Any) -> "TorchRef":
        """A ref to that tensor under that name.

        Raises:
            LayoutError: it is not one piece of real memory.
            UnsupportedDType: safetensors has no such type.
        """
        check_plain(name, tensor)
        tensor = tensor.detach()
        try:
            dtype = DType.of(tensor.dtype)
        except UnsupportedDType as error:
            raise UnsupportedDType(
                f"tensor {name!r} is {tensor.dtype}, for which safetensors has no type: "
                "convert it, or save it as a view in a type it has"
            ) from error
        shape = tuple(tensor.shape)
        if dtype is DType.F4 and shape:
            shape = (*shape[:-1], shape[-1] * 2)
        return cls(TensorSpec(name, dtype, shape), tensor)

    def __reduce__(self) -> tuple[object, ...]:
        # As an array: torch cannot pickle its small float types, nor is it needed to read them.
        return ArrayRef, (self.spec, np.ascontiguousarray(self.load()).reshape(self.shape))

    @property
    def is_plain(self) -> bool:
        """Whether numpy can see the tensor's memory as it is meant."""
        tensor = self.tensor
        return tensor.device.type == "cpu" and not tensor.is_conj() and not tensor.is_neg()

    def load(self, out: "Array | memoryview | bytearray | Tensor | None" = None) -> Array:
        """The tensor as an array, over the same memory where that is possible."""
        if out is None and self.is_plain and not self.dtype.is_packed:
            return _numpy_view(self.tensor, self.dtype)
        return TensorRef.load(self, out)

    materialize = load

    def torch(self, device: object = None, dtype: object = None) -> "Tensor":
        """The tensor itself, moved or converted if that is asked for."""
        tensor = self.tensor if device is None else self.tensor.to(device)
        return tensor if dtype is None else converted(tensor, self.spec, dtype)

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, number = self.tensor.__dlpack_device__()
        return int(kind), int(number)

    def renamed(self, name: str) -> "TorchRef":
        return replace(self, spec=self.spec.renamed(name))

    def identity(self) -> Hashable:
        tensor = self.tensor
        flags = tensor.is_conj(), tensor.is_neg()
        return (
            str(tensor.device),
            tensor.data_ptr(),
            tensor.shape,
            tensor.stride(),
            self.dtype,
            flags,
        )

    def memory(self) -> memoryview | None:
        plain = self.is_plain and self.tensor.is_contiguous()
        return _bytes_of(self.tensor) if plain else None

    def pieces(self, max_bytes: int = PIECE_BYTES) -> Iterator[memoryview]:
        memory = self.memory()
        if memory is not None:
            yield memory
        else:
            yield from staged_pieces(self.tensor, max_bytes)

    def _slice(self, index: Index) -> Array:
        narrow(Layout.contiguous(self.shape), index)  # the same indices are refused everywhere
        return np.asarray(self.load()[index])


def _bytes_of(tensor: "Tensor") -> memoryview:
    import torch

    if tensor.numel() == 0:
        return memoryview(b"")
    # A tensor of one element is contiguous whatever its strides are, and reshaping keeps them.
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return byte_view(flat.view(torch.uint8).numpy())


def staged_pieces(tensor: "Tensor", max_bytes: int) -> Iterator[memoryview]:
    """Row-major bytes of any tensor through one staging buffer on the CPU.

    `copy_` fetches from a device, gathers strides and resolves conjugation and negation at once.
    """
    import torch

    if not tensor.is_complex() and not tensor.is_neg():
        # Same-width integers: copy_ lacks kernels for some of the small float types.
        width = tensor.element_size()
        tensor = tensor.view(
            {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
        )
    elements = max(1, min(max_bytes // tensor.element_size(), tensor.numel()))
    staging = torch.empty(elements, dtype=tensor.dtype)
    for index in row_blocks(tuple(tensor.shape), elements):
        part = tensor[index]
        staged = staging[: part.numel()]
        staged.view(part.shape).copy_(part)
        yield _bytes_of(staged)


def size_and_dtype() -> tuple[type, type] | None:
    """The classes `torch.Size` and `torch.dtype`, if torch is loaded: without it there are none."""
    torch = sys.modules.get("torch")
    return None if torch is None else (torch.Size, torch.dtype)


def dtype_named(name: str) -> object | None:
    """The torch dtype of that name, if torch is loaded and has it."""
    torch = sys.modules.get("torch")
    return None if torch is None else vars(torch).get(name)
