"""Memory for tensors that are to arrive: new buffers, or arrays and parameters somebody has.

Checks names, shapes, dtypes and sizes before anything is asked for. Knows no connection.
"""

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from weighlock.errors import Aborted, LayoutError, LimitExceeded
from weighlock.limits import Limits
from weighlock.sources.local import BytesSource
from weighlock.tensors.arrays import Array, byte_view, empty, flat_bytes
from weighlock.tensors.catalog import Beside, Catalog
from weighlock.tensors.convert import as_ref
from weighlock.tensors.dtypes import DType
from weighlock.tensors.filling import check_apart, slots_of, targets_of
from weighlock.tensors.naming import some_names
from weighlock.tensors.ref import ArrayRef, TensorRef
from weighlock.tensors.spec import Span, TensorSpec
from weighlock.tensors.stored import StoredRef
from weighlock.transfer.landing import Targets

_SMALL_BYTES = 128 * 1024
"""Below this a tensor is small."""

_MANY_BYTES = 16 * 1024 * 1024
"""Small tensors of so much in all are received together; fewer are not worth it."""

_TOGETHER_BYTES = 4 * 1024 * 1024
"""So much of them lies in one piece of memory: two huge pages."""

__all__ = ["Later", "Received", "check_memory", "into_arrays", "into_new_memory", "places_of"]


class Later(NamedTuple):
    """A tensor that cannot be received into its place: read by itself, piece by piece."""

    nbytes: int
    fill: Callable[[], None]


class Received(Targets, Protocol):
    """Tensors that are to arrive, and where their bytes go."""

    @property
    def later(self) -> Sequence[Later]:
        """Those that are to be filled when the others are there."""

    def make(self) -> None:
        """Make what they go to, in the order of the file. Once, by one thread.

        Meanwhile others may ask for buffers: they wait for those that are not made yet.
        """

    def complete(self) -> Catalog:
        """They are all there: give them."""


Place: TypeAlias = tuple[Span, str, TensorRef]
"""The bytes of a tensor in a file, its name, and its ref there."""


def places_of(chosen: Catalog, source: object) -> list[Place] | None:
    """Where tensors that have bytes lie in a file, in its order, if they lie there as in a share.

    That is, each in one piece and no two partly the same: only then can blocks be put in place as
    they come. In a checkpoint on a plain server a tensor may be a view of another, the same bytes
    as another dtype, or deflated. The answer is None then.
    """
    places: list[Place] = []
    for name, ref in chosen.items():
        span = ref.contiguous_span if isinstance(ref, StoredRef) and ref.source is source else None
        if span is None:
            return None
        if span.length:
            places.append((span, name, ref))
    places.sort(key=lambda place: place[0].offset)
    for (span, _, ref), (other, _, again) in pairwise(places):
        if span.offset + span.length > other.offset and (
            span != other or ref.dtype != again.dtype or ref.shape != again.shape
        ):
            return None
    return places


def into_new_memory(
    chosen: Catalog, places: Sequence[Place], limits: Limits, *, apart: bool = False
) -> Received:
    """New arrays for tensors. Names of the same tensor have one array together.

    Args:
        chosen: what arrives.
        places: where it lies.
        limits: how much memory it may take.
        apart: each in memory of its own, also where very many are small.

    Raises:
        LimitExceeded: more bytes than the machine, or the limits, allow.
    """
    arrays = _NewArrays(chosen, places, apart)
    check_memory(sum(span.length for span in arrays.spans), limits)
    return arrays


class _NewArrays:
    """Tensors in new arrays. For 100,000 of them, making takes a quarter of a second or more.

    So one thread makes them while others receive already. Where very many are small, neighbours lie
    in one piece of memory as they do in the file: a block is received straight into it, instead of
    being cut up. It lives as long as one of them.
    """

    later: Sequence[Later] = ()

    def __init__(self, chosen: Catalog, places: Sequence[Place], apart: bool) -> None:
        self._chosen = chosen
        self._places = places
        tensors: list[_Tensor] = []
        for span, _, ref in places:
            if not tensors or tensors[-1][0].offset != span.offset:  # not another name of one
                tensors.append((span, ref.spec))
        self._runs: list[Sequence[_Tensor]]
        self._runs = [(each,) for each in tensors] if apart else _runs(tensors)
        self.spans = [_covering(run) for run in self._runs]
        self._refs: list[TensorRef] = []
        self._buffers: list[Array] = []
        self._more = threading.Condition()
        self._is_over = False

    def make(self) -> None:
        try:
            for run in self._runs:
                if len(run) == 1:
                    ref, buffer = _new(run[0][1])
                    self._add(buffer)
                    self._refs.append(ref)
                else:
                    self._make_together(run)
        finally:
            with self._more:
                self._is_over = True
                self._more.notify_all()

    def _make_together(self, run: "Sequence[_Tensor]") -> None:
        span = _covering(run)
        # A full run gets whole huge pages; a short one must not, there may be as many as tensors.
        is_full = span.length > _TOGETHER_BYTES - _SMALL_BYTES
        whole = empty((_TOGETHER_BYTES if is_full else span.length,), np.dtype(np.uint8))
        self._add(whole[: span.length])
        for place, spec in run:
            start = place.offset - span.offset
            array: Array = np.ndarray(spec.shape, spec.dtype.numpy, whole, start)
            self._refs.append(ArrayRef(spec, array))

    def _add(self, buffer: Array) -> None:
        with self._more:
            self._buffers.append(buffer)
            self._more.notify_all()

    def buffer(self, number: int) -> Array:
        if number >= len(self._buffers):
            with self._more:
                self._more.wait_for(lambda: number < len(self._buffers) or self._is_over)
            if number >= len(self._buffers):
                raise Aborted("there is no memory for what arrives")
        return self._buffers[number]

    def complete(self) -> Catalog:
        refs: dict[str, TensorRef | None] = dict.fromkeys(self._chosen)
        number, reached = -1, -1
        for span, name, ref in self._places:
            if span.offset != reached:
                number, reached = number + 1, span.offset
            made = self._refs[number]
            refs[name] = made if made.spec is ref.spec else _also(made, ref.spec)
        complete = {
            name: _new(self._chosen[name].spec)[0] if ref is None else ref  # of no bytes
            for name, ref in refs.items()
        }
        beside = Beside(aliases=self._chosen.aliases, groups=self._chosen.groups)
        return Catalog(complete, self._chosen.metadata, beside=beside)


_Tensor: TypeAlias = tuple[Span, TensorSpec]


def _runs(tensors: "Sequence[_Tensor]") -> "list[Sequence[_Tensor]]":
    """Which of them lie in one piece of memory: neighbours, where very many are small."""
    small = sum(span.length for span, _ in tensors if span.length < _SMALL_BYTES)
    if small < _MANY_BYTES:
        return [(tensor,) for tensor in tensors]
    # Where a tensor of each type may begin; packed ones are no arrays of numpy's.
    steps = {dtype: dtype.numpy.alignment for dtype in DType if not dtype.is_packed}
    runs: list[Sequence[_Tensor]] = []
    first, start, reached = 0, 0, -1
    for number, (span, spec) in enumerate(tensors):
        offset, length = span.offset, span.length
        step = steps.get(spec.dtype) if length < _SMALL_BYTES else None
        is_next = (
            step is not None
            and offset == reached
            and offset + length - start <= _TOGETHER_BYTES
            and (offset - start) % step == 0
        )
        if not is_next:
            if number:
                runs.append(tensors[first:number])
            first, start = number, offset
        reached = -1 if step is None else offset + length
    return [*runs, tensors[first:]]


def _covering(run: "Sequence[_Tensor]") -> Span:
    start = run[0][0].offset
    return Span(start, run[-1][0].end - start)


def _new(spec: TensorSpec) -> tuple[TensorRef, Array]:
    """A tensor in memory of its own, and that memory."""
    if spec.dtype.is_packed:
        buffer = empty((spec.nbytes,), np.dtype(np.uint8))
        return StoredRef(spec, BytesSource(byte_view(buffer)), Span(0, spec.nbytes)), buffer
    array = empty(spec.shape, spec.dtype.numpy)
    return ArrayRef(spec, array), flat_bytes(array)


def _also(ref: TensorRef, spec: TensorSpec) -> TensorRef:
    """The same tensor under another name."""
    if isinstance(ref, StoredRef):
        return StoredRef(spec, ref.source, ref.span)
    return ArrayRef(spec, ref.load().view(spec.dtype.numpy).reshape(spec.shape))


def into_arrays(
    chosen: Catalog, out: object, *, strict: bool, cast: bool = False, lazily: bool = False
) -> "_GivenArrays":
    """The arrays, tensors or module that receive the tensors of the same names.

    Args:
        chosen: what arrives.
        out: a mapping of names to arrays or tensors, or a torch module.
        strict: each side must have every name of the other.
        cast: convert where dtypes differ; refused otherwise.
        lazily: read each ref by itself afterwards, instead of giving targets.

    Raises:
        LayoutError: names, shapes or dtypes differ, or arrays partly share memory. Nothing was
            asked for then.
    """
    slots = slots_of(out)
    absent = [name for name in chosen if name not in slots]
    missing = [name for name in slots if name not in chosen] if strict else []
    if absent or missing:
        raise LayoutError(
            f"names differ: {some_names(missing)} of out= not at the URL, {some_names(absent)} of "
            f"the URL not in out=; "
            + ("names= chooses those that have a place" if absent else "names='*' leaves the rest")
        )
    check_apart({name: slots[name] for name in chosen})
    buffers: dict[Span, Array] = {}
    taken: dict[int | None, Span] = {}
    later: list[Later] = []
    for name, ref in chosen.items():
        slot = slots[name]
        slot.check(ref, cast=cast)
        memory = slot.memory() if slot.dtype is ref.dtype else None
        span = ref.contiguous_span if isinstance(ref, StoredRef) else None
        address = _address(memory)
        if lazily or memory is None or span is None or span in buffers or address in taken:
            # Strided, on a device, of another type; a second array for the same tensor, or the same
            # one for another: tied parameters of which two were saved. The last one counts then.
            if lazily or span is None or taken.get(address) != span:
                later.append(Later(ref.nbytes, partial(slot.fill, ref)))
        elif span.length:
            buffers[span] = np.frombuffer(memory, np.uint8)
            taken[address] = span
    refs = {name: as_ref(name, value) for name, value in targets_of(out).items() if name in chosen}
    spans = sorted(buffers, key=attrgetter("offset"))
    return _GivenArrays(
        spans, [buffers[span] for span in spans], Catalog(refs, chosen.metadata), later
    )


@dataclass(frozen=True, slots=True)
class _GivenArrays:
    """Tensors in arrays somebody has."""

    spans: Sequence[Span]
    buffers: Sequence[Array]
    catalog: Catalog
    later: Sequence[Later]

    def make(self) -> None:
        """Nothing: they are there."""

    def buffer(self, number: int) -> Array:
        return self.buffers[number]

    def complete(self) -> Catalog:
        return self.catalog


def check_memory(wanted: int, limits: Limits) -> None:
    """Raise `LimitExceeded` if so many bytes cannot be held."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    allowed = min(limits.memory_bytes, machine)
    if wanted > allowed:
        raise LimitExceeded(
            f"{wanted:,} bytes would be held in memory, {allowed:,} are allowed; fetch to a file "
            "(into=), a part (names=), or one tensor at a time (stream)",
            limit="memory_bytes",
            asked=wanted,
            allowed=allowed,
        )


def _address(memory: memoryview | None) -> int | None:
    if memory is None or not len(memory):
        return None
    address: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    return address
