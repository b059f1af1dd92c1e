"""Memory for tensors that are to arrive: new buffers, or arrays and parameters somebody has.

Checks names, shapes, dtypes and sizes before anything is asked for. Knows no connection.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter

import numpy as np

from weighlock.errors import LayoutError, LimitExceeded
from weighlock.limits import Limits
from weighlock.sources.local import BytesSource
from weighlock.tensors.arrays import Array, byte_view, empty, flat_bytes
from weighlock.tensors.catalog import Beside, Catalog
from weighlock.tensors.convert import as_ref
from weighlock.tensors.filling import slots_of, targets_of
from weighlock.tensors.ref import ArrayRef, TensorRef
from weighlock.tensors.spec import Span
from weighlock.tensors.stored import StoredRef
from weighlock.transfer.landing import Target

_SMALL_BYTES = 128 * 1024
"""Below this, malloc takes memory from its heap; above, from the system."""

_HEAP_BYTES = 16 * 1024 * 1024
"""A piece of the heap; glibc takes up to twice as much from it once it saw as much come back."""

__all__ = ["Received", "check_memory", "into_arrays", "into_new_memory", "lie_apart"]


@dataclass(frozen=True, slots=True)
class Received:
    """Where tensors arrive, and what is there afterwards."""

    targets: list[Target]
    catalog: Catalog
    after: list[Callable[[], object]] = field(default_factory=list)

    def complete(self) -> None:
        """Do what is left when every target is filled."""
        for step in self.after:
            step()


def lie_apart(refs: Iterable[TensorRef], source: object) -> bool:
    """Whether tensors lie in a file as in a share: each in one piece, no two partly the same.

    Only then can blocks be put in place as they come. In a checkpoint on a plain server a tensor
    may be a view of another, the same bytes as another dtype, or deflated.
    """
    held: dict[Span, TensorRef] = {}
    for ref in refs:
        span = ref.contiguous_span if isinstance(ref, StoredRef) and ref.source is source else None
        if span is None:
            return False
        if span.length:
            other = held.setdefault(span, ref)
            if other is not ref and (other.dtype, other.shape) != (ref.dtype, ref.shape):
                return False
    ordered = sorted(held, key=attrgetter("offset"))
    return all(one.offset + one.length <= other.offset for one, other in pairwise(ordered))


def into_new_memory(chosen: Catalog, limits: Limits) -> Received:
    """A buffer of its own for each tensor; they lie apart.

    Names of the same tensor have one buffer together.

    Raises:
        LimitExceeded: more bytes than the machine, or the limits, allow.
    """
    # Who begins where another begins is the same tensor, as they lie apart.
    spans = [_span(ref) for ref in chosen.values()]
    lengths = {span.offset: span.length for span in spans if span.length}
    check_memory(sum(lengths.values()), limits)
    del lengths
    heap_left = _HEAP_BYTES  # a few small ones are not worth it
    buffers: dict[int, Array] = {}
    targets: list[Target] = []
    refs: dict[str, TensorRef] = {}
    for (name, ref), span in zip(chosen.items(), spans, strict=True):
        spec = ref.spec
        buffer = buffers.get(span.offset) if span.length else None
        is_new = buffer is None
        if spec.dtype.is_packed:
            if buffer is None:
                buffer = empty((span.length,), np.dtype(np.uint8))
            refs[name] = StoredRef(spec, BytesSource(byte_view(buffer)), Span(0, span.length))
        elif buffer is None:
            if span.length < _SMALL_BYTES:
                heap_left -= span.length
                if heap_left < 0:
                    _lay_heap_in_huge_pages()
                    heap_left = _HEAP_BYTES
            array = empty(spec.shape, spec.dtype.numpy)
            buffer = flat_bytes(array)
            refs[name] = ArrayRef(spec, array)
        else:  # another name for the same tensor
            refs[name] = ArrayRef(spec, buffer.view(spec.dtype.numpy).reshape(spec.shape))
        if is_new and span.length:
            buffers[span.offset] = buffer
            targets.append(Target(span, buffer))
    targets.sort(key=lambda target: target.span.offset)
    beside = Beside(aliases=chosen.aliases, groups=chosen.groups)
    return Received(targets, Catalog(refs, chosen.metadata, beside=beside))


def _lay_heap_in_huge_pages() -> None:
    """Have malloc cut the next small arrays from huge pages, if it can.

    numpy asks for huge pages for large arrays only. One that is let go of at once leaves a stretch
    of heap with such pages behind: filling small arrays in it takes one fault where it took 512.
    """
    np.empty(_HEAP_BYTES, np.uint8)


def into_arrays(chosen: Catalog, out: object, *, strict: bool, lazily: bool = False) -> Received:
    """The arrays, tensors or module that receive the tensors of the same names.

    Args:
        chosen: what arrives.
        out: a mapping of names to arrays or tensors, or a torch module.
        strict: each side must have every name of the other.
        lazily: read each ref by itself afterwards, instead of giving targets.

    Raises:
        LayoutError: names, shapes or dtypes differ. Nothing was asked for then.
    """
    slots = slots_of(out)
    absent = [name for name in chosen if name not in slots]
    missing = [name for name in slots if name not in chosen] if strict else []
    if absent or missing:
        raise LayoutError(
            f"names differ: {absent[:3]} have no place in out=, {missing[:3]} do not come"
            f" ({len(absent)} and {len(missing)} in all)"
        )
    targets: dict[Span, Target] = {}
    after: list[Callable[[], object]] = []
    for name, ref in chosen.items():
        slot = slots[name]
        slot.check(ref, cast=False)
        memory = slot.memory()
        span = ref.contiguous_span if isinstance(ref, StoredRef) else None
        if lazily or memory is None or span is None or span in targets:
            # Strided, on a device, or a second array for the same tensor: filled piece by piece.
            if (
                lazily
                or span is None
                or span not in targets
                or _address(memory) != _address(byte_view(targets[span].buffer))
            ):
                after.append(lambda slot=slot, ref=ref: slot.fill(ref))  # type: ignore[misc]
        elif span.length:
            targets[span] = Target(span, np.frombuffer(memory, np.uint8))
    refs = {name: as_ref(name, value) for name, value in targets_of(out).items() if name in chosen}
    ordered = sorted(targets.values(), key=lambda target: target.span.offset)
    return Received(ordered, Catalog(refs, chosen.metadata), after)


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


def _span(ref: TensorRef) -> Span:
    span = ref.contiguous_span if isinstance(ref, StoredRef) else None
    assert span is not None  # noqa: S101
    return span
