"""The virtual file: any tensors, laid out as a safetensors file that is never written.

Pure: knows the header and which tensors a range touches. Where their bytes come from is
`contents`'.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from weighlock.formats.virtual import Segment, place_all
from weighlock.limits import Limits
from weighlock.tensors.spec import Span, TensorSpec
from weighlock.tensors.stored import StoredRef

__all__ = ["Segment", "Touched", "VirtualFile", "lay_out"]


Touched: TypeAlias = tuple[Segment, int, int]
"""A tensor that a range of the file touches, and where the part begins and ends, counted from the
tensor's first byte. A bare tuple: there may be thousands in a range."""


@dataclass(frozen=True, slots=True)
class VirtualFile:
    """A safetensors file of known length, of which nothing but the header exists."""

    header: bytes
    segments: Sequence[Segment]
    """In the order of the file, without tensors that have no bytes."""
    size: int
    specs: Sequence[TensorSpec] = ()
    """Of every tensor, in the order of the file."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Names of tensors that have an entry under another name, and that name."""
    _starts: Sequence[int] = field(init=False, repr=False, compare=False)
    _ends: Sequence[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        spans = [segment.span for segment in self.segments]
        object.__setattr__(self, "_starts", [span.offset for span in spans])
        object.__setattr__(self, "_ends", [span.offset + span.length for span in spans])

    def touched(self, span: Span) -> Iterator[Touched]:
        """The parts of tensors a span holds, in order. What is not theirs is the header's."""
        first, last = span.offset, span.end
        if first == last:
            return
        starts, ends = self._starts, self._ends
        for number in range(bisect_right(ends, first), bisect_left(starts, last)):
            start = starts[number]
            yield (
                self.segments[number],
                max(first, start) - start,
                min(last, ends[number]) - start,
            )


def lay_out(
    tensors: Mapping[str, object],
    metadata: Mapping[str, str] | None = None,
    *,
    tied: Literal["copy", "alias"] = "alias",
    limits: Limits | None = None,
) -> VirtualFile:
    """The virtual file of a catalog or state dict.

    The arguments are those of `place_all`, which decides where everything lies.

    Raises:
        LayoutError, UnsupportedDType: as `place_all`.
        LimitExceeded: a tensor of a file is made large by repeating its elements.
    """
    limits = limits or Limits()
    placed = place_all(tensors, metadata, tied=tied, limits=limits)
    for segment in placed.segments:
        ref = segment.ref
        if isinstance(ref, StoredRef) and ref.layout is not None and ref.layout.repeats:
            limits.check("expanded_bytes", ref.nbytes, f"tensor {ref.name!r}, of repeated elements")
    segments = tuple(segment for segment in placed.segments if segment.span.length)
    specs = tuple(segment.ref.spec for segment in placed.segments)
    return VirtualFile(placed.header, segments, placed.size, specs, placed.aliases)
