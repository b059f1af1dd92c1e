"""Tensors of a torch checkpoint as refs: what `rebuild` understood, put over the bytes of storages.

Knows meanings and sources; not which container the storages lie in.
"""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from weighlock.errors import FormatError, LayoutError, UnsupportedDType
from weighlock.formats.meanings import (
    ComposedTensor,
    InlineTensor,
    Meaning,
    Storage,
    StoredTensor,
)
from weighlock.formats.rebuild_numpy import NOT_BYTES, bytes_of, check_length
from weighlock.limits import Limits
from weighlock.sources.local import BytesSource
from weighlock.tensors.adjusted import AdjustedRef
from weighlock.tensors.convert import CastRef
from weighlock.tensors.dtypes import DType
from weighlock.tensors.ref import ArrayRef, TensorRef
from weighlock.tensors.spec import Layout, Span, TensorSpec
from weighlock.tensors.stored import Readable, StoredRef

__all__ = ["StoragePlace", "check_size", "make_refs"]


class StoragePlace(NamedTuple):
    """Where the bytes of a storage lie."""

    source: Readable
    span: Span


def make_refs(
    tensors: Mapping[str, Meaning],
    place_of: Callable[[Storage], StoragePlace],
    *,
    swap: bool,
    label: str,
    limits: Limits,
) -> tuple[dict[str, TensorRef], dict[str, str]]:
    """Refs by name, and the names of what is not read with the reason.

    Args:
        tensors: what the pickle describes.
        place_of: finds the bytes of a storage, and raises if there are other than so many.
        swap: numbers are stored with their bytes reversed.
        label: the file, for errors.
        limits: what tensors of repeated elements may take when they are read.
    """
    place_of, data_of = _with_inline(place_of), _data_by_text()
    refs: dict[str, TensorRef] = {}
    unreadable: dict[str, str] = {}
    for name, meaning in tensors.items():
        try:
            if isinstance(meaning, StoredTensor):
                ref = _stored(name, meaning, place_of, swap, limits)
                refs[name] = CastRef.of(ref, _dtype(meaning.cast)) if meaning.cast else ref
            elif isinstance(meaning, InlineTensor):
                ref = _inline(name, meaning, data_of(meaning))
                refs[name] = CastRef.of(ref, _dtype(meaning.cast)) if meaning.cast else ref
            elif isinstance(meaning, ComposedTensor):
                if not meaning.parts:
                    unreadable[name] = f"it has no data ({meaning.kind}), only a dtype and a shape"
            else:
                unreadable[name] = meaning.reason
        except UnsupportedDType as error:
            unreadable[name] = str(error)
        except FormatError as error:
            told = str(error).removeprefix(f"{error.source}: ")
            raise type(error)(f"tensor {name!r}: {told}", source=label) from error
    return refs, unreadable


def _with_inline(place_of: Callable[[Storage], StoragePlace]) -> Callable[[Storage], StoragePlace]:
    """Finds storages whose bytes lie in the pickle, too; one source for each."""
    sources: dict[int, BytesSource] = {}

    def found(storage: Storage) -> StoragePlace:
        if storage.data is None:
            return place_of(storage)
        source = sources.setdefault(id(storage.data), BytesSource(storage.data, "the pickle"))
        start = storage.first * storage.width
        return StoragePlace(source, Span(start, storage.available * storage.width))

    return found


def _data_by_text() -> Callable[[InlineTensor], bytes]:
    """Gives the bytes of arrays; those that lie in one text share what is made of it."""
    made: dict[tuple[int, str], bytes | None] = {}

    def found(meaning: InlineTensor) -> bytes:
        text = meaning.text
        if text is None:
            return meaning.data
        key = id(text.text), text.encoding
        if key not in made:
            made[key] = bytes_of(text)
        data = made[key]
        if data is None:
            raise UnsupportedDType(NOT_BYTES)
        check_length(meaning.dtype, meaning.shape, len(data))
        return data

    return found


def _inline(name: str, meaning: InlineTensor, data: bytes) -> TensorRef:
    flat, axes = np.frombuffer(data, meaning.dtype), meaning.axes
    if axes is None:
        array = flat.reshape(meaning.shape)
    else:
        lying = [meaning.shape[axes.index(axis)] for axis in range(len(axes))]
        array = flat.reshape(lying).transpose(axes)
    if meaning.dtype == meaning.dtype.newbyteorder("<"):
        return ArrayRef.of(name, array)
    # Not turned now: many arrays may lie in the same bytes, and each would take memory of its own.
    spec = TensorSpec(name, DType.of(meaning.dtype), meaning.shape)
    strides = tuple(stride // array.itemsize for stride in array.strides)
    source = BytesSource(data, "the pickle")
    layout = None if axes is None else Layout(0, spec.shape, strides)
    return AdjustedRef(StoredRef(spec, source, Span(0, spec.nbytes), layout), swap=True)


def _stored(
    name: str,
    meaning: StoredTensor,
    place_of: Callable[[Storage], StoragePlace],
    swap: bool,
    limits: Limits,
) -> TensorRef:
    dtype = _dtype(meaning.dtype)
    layout = meaning.layout
    if dtype is DType.F4:
        layout = _of_pairs(layout)
    spec = TensorSpec(name, dtype, layout.shape)
    source, span = place_of(meaning.storage)
    ref: TensorRef
    if layout.is_contiguous:
        start, nbytes = layout.start * dtype.bits // 8, spec.nbytes
        if nbytes != span.length:  # else it is the whole storage, as nearly every tensor is
            span = Span(span.offset + (start if nbytes else 0), nbytes)
        ref = StoredRef(spec, source, span)
    else:
        ref = StoredRef(spec, source, span, layout, limits)
    if (swap and dtype.bits > 8) or meaning.conj or meaning.neg:
        return AdjustedRef(ref, swap and dtype.bits > 8, meaning.conj, meaning.neg)
    return ref


@functools.cache
def _dtype(name: str) -> DType:
    try:
        return DType.of(f"torch.{name}")
    except UnsupportedDType as error:
        raise UnsupportedDType(f"torch.{name} is not read") from error


def _of_pairs(layout: Layout) -> Layout:
    """The layout of single 4-bit numbers, from that of torch's pairs of them."""
    if not layout.is_contiguous or not layout.shape:
        raise UnsupportedDType("torch.float4_e2m1fn_x2 is read only where it is contiguous")
    shape = (*layout.shape[:-1], 2 * layout.shape[-1])
    return Layout.contiguous(shape, 2 * layout.start)


def check_size(storage: Storage, available: int) -> None:
    """Raise unless a storage has as many bytes as its element count needs."""
    if storage.elements * storage.width != available:
        raise LayoutError(
            f"storage {storage.key!r} is said to hold {storage.elements:,} elements of "
            f"{storage.width} bytes, {available:,} bytes are there"
        )
