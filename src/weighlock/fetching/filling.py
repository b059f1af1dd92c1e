"""Memory for tensors that are to arrive: new buffers, or arrays and parameters somebody has.

Checks names, shapes, dtypes and sizes before anything is asked for. Knows no connection.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from weighlock.errors import LayoutError, LimitExceeded
from weighlock.limits import Limits
from weighlock.sources.local import BytesSource
from weighlock.tensors.arrays import byte_view, empty
from weighlock.tensors.catalog import Beside, Catalog
from weighlock.tensors.convert import as_ref
from weighlock.tensors.filling import slots_of, targets_of
from weighlock.tensors.ref import ArrayRef, TensorRef
from weighlock.tensors.spec import Span
from weighlock.tensors.stored import StoredRef
from weighlock.transfer.landing import Target

__all__ = ["Received", "check_memory", "into_arrays", "into_new_memory"]


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


def into_new_memory(chosen: Catalog, limits: Limits) -> Received:
    """A buffer of its own for each tensor, which all lie as they do in a share.

    Names of the same tensor have one buffer together.

    Raises:
        LimitExceeded: more bytes than the machine, or the limits, allow.
    """
    # Pairs, not spans: there may be a million tensors, and a pair is hashed by C.
    pairs = {(span.offset, span.length) for span in map(_span, chosen.values())}
    check_memory(sum(length for _, length in pairs), limits)
    del pairs
    buffers: dict[tuple[int, int], memoryview] = {}
    targets: list[Target] = []
    refs: dict[str, TensorRef] = {}
    for name, ref in chosen.items():
        spec, span = ref.spec, _span(ref)
        key = span.offset, span.length
        view = buffers.get(key)
        if spec.dtype.is_packed:
            if view is None:
                view = byte_view(empty((span.length,), np.dtype(np.uint8)))
            refs[name] = StoredRef(spec, BytesSource(view), Span(0, span.length))
        elif view is None:
            array = empty(spec.shape, spec.dtype.numpy)
            view = byte_view(array)
            refs[name] = ArrayRef(spec, array)
        else:
            flat = np.frombuffer(view, np.uint8)
            refs[name] = ArrayRef(spec, flat.view(spec.dtype.numpy).reshape(spec.shape))
        if key not in buffers:
            buffers[key] = view
            targets.append(Target(span, view))
    targets.sort(key=lambda target: target.span.offset)
    beside = Beside(aliases=chosen.aliases)
    return Received(targets, Catalog(refs, chosen.metadata, beside=beside))


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
                or _address(memory) != _address(targets[span].view)
            ):
                after.append(lambda slot=slot, ref=ref: slot.fill(ref))  # type: ignore[misc]
        elif span.length:
            targets[span] = Target(span, memory)
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
