"""Where tensors lie in a safetensors file that is never written. Pure: nothing is read.

Who offers such a file and who only speaks of it (a message, before anybody shares anything) must
come to the same bytes: both ask here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from weighlock.formats.safetensors import arrange, build_header, check_metadata, check_storable
from weighlock.formats.save import check_tied, metadata_to_write, source_positions, untied
from weighlock.limits import Limits
from weighlock.tensors.convert import refs_of
from weighlock.tensors.ref import TensorRef
from weighlock.tensors.spec import Span
from weighlock.tensors.torch import TorchRef

__all__ = ["Placed", "Segment", "place_all"]


@dataclass(frozen=True, slots=True)
class Segment:
    """A tensor in a virtual file."""

    span: Span
    """Its bytes in the file."""
    ref: TensorRef


@dataclass(frozen=True, slots=True)
class Placed:
    """The header of a virtual file, and its tensors in the order of the file."""

    header: bytes
    segments: tuple[Segment, ...]
    size: int
    aliases: Mapping[str, str]
    """Names of tensors that have an entry under another name, and that name."""


def place_all(
    tensors: Mapping[str, object],
    metadata: Mapping[str, str] | None = None,
    *,
    tied: Literal["copy", "alias"] = "alias",
    limits: Limits | None = None,
) -> Placed:
    """Lay a catalog or state dict out as a file.

    Args:
        tensors: names and arrays, torch tensors or refs.
        metadata: text beside the tensors; a catalog's own is kept if this is not given.
        tied: whether tensors that are the same view get one entry, or one for each name.
        limits: bounds of the header.

    Raises:
        LayoutError: something is not a plain tensor, or `tied` has another value.
        UnsupportedDType: safetensors cannot hold it.
    """
    limits = limits or Limits()
    check_tied(tied)
    beside = check_metadata(metadata_to_write(tensors, metadata))
    refs = refs_of(tensors)
    for ref in refs:
        check_storable(ref.spec)
    if any(isinstance(ref, TorchRef) for ref in refs):
        beside.setdefault("format", "pt")
    aliases: dict[str, str] = {}
    if tied == "alias":
        refs, aliases = untied(refs, beside)
    positions = source_positions(refs)
    specs = [ref.spec for ref in refs]
    order = sorted(specs, key=lambda spec: positions.get(spec.name, 0))
    arrangement = arrange(order)
    header = build_header(specs, arrangement.offsets, {**beside, **aliases}, limits=limits)
    by_name = {ref.name: ref for ref in refs}
    data_start = len(header)
    laid = ((by_name[name], offset) for name, offset in arrangement.offsets.items())
    segments = tuple(
        Segment(Span(data_start + offset, ref.spec.nbytes), ref) for ref, offset in laid
    )
    return Placed(header, segments, len(header) + arrangement.data_bytes, aliases)
