"""Where each tensor of a file being written goes: planned from specs, or laid down as they come.

Pure arithmetic over specs and headers; writes nothing.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from weighlock.errors import LayoutError
from weighlock.formats.safetensors import (
    DATA_ALIGNMENT,
    arrange,
    build_header,
    check_name_bytes,
    check_storable,
)
from weighlock.limits import Limits
from weighlock.tensors.spec import TensorSpec

__all__ = ["Placement", "Planned", "Streamed"]


class Placement(Protocol):
    """What a writer asks about the file it writes."""

    data_start: int
    """Where the data section begins."""
    data_bytes: int
    """How long it is, as far as is known."""

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole file, as far as is known."""

    def place(self, spec: TensorSpec) -> int:
        """The offset in the file of a tensor; `LayoutError` if it has no place."""

    def missing(self, written: Collection[str]) -> list[str]:
        """Names that were announced and not written."""

    def lacking(self, metadata: Mapping[str, str]) -> int:
        """Bytes by which the data section must move for the header to fit; 0 if it fits."""

    def moved(self, count: int) -> None:
        """The data section has been moved by so many bytes."""

    def header(self, metadata: Mapping[str, str]) -> bytes:
        """Everything before the data section."""


class Planned:
    """All specs are known: every tensor has an aligned place, whatever order they come in.

    The header is laid out with `{"format": "pt"}` in mind, so that it fits whether torch tensors
    come or not.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        metadata: Mapping[str, str],
        limits: Limits,
        data_order: Sequence[TensorSpec] | None = None,
    ) -> None:
        self._limits = limits
        self._specs = {spec.name: spec for spec in specs}
        arrangement = arrange(specs if data_order is None else data_order)
        self._offsets = arrangement.offsets
        self.data_bytes = arrangement.data_bytes
        header = build_header(specs, self._offsets, {"format": "pt", **metadata}, limits=limits)
        self.data_start = len(header)

    @property
    def total_bytes(self) -> int:
        return self.data_start + self.data_bytes

    def place(self, spec: TensorSpec) -> int:
        planned = self._specs.get(spec.name)
        if planned is None:
            raise LayoutError(f"tensor {spec.name!r} was not announced in specs")
        if planned != spec:
            raise LayoutError(
                f"tensor {spec.name!r} was announced as {planned.dtype} {list(planned.shape)}, "
                f"but is {spec.dtype} {list(spec.shape)}"
            )
        return self.data_start + self._offsets[spec.name]

    def missing(self, written: Collection[str]) -> list[str]:
        return [name for name in self._specs if name not in written]

    def lacking(self, metadata: Mapping[str, str]) -> int:
        return 0

    def moved(self, count: int) -> None:
        self.data_start += count

    def header(self, metadata: Mapping[str, str]) -> bytes:
        specs = list(self._specs.values())
        return build_header(
            specs, self._offsets, metadata, room=self.data_start, limits=self._limits
        )


class Streamed:
    """Nothing is known beforehand: tensors are laid end to end behind room kept for the header."""

    def __init__(self, header_bytes: int, limits: Limits) -> None:
        self._limits = limits
        self._specs: list[TensorSpec] = []
        self._offsets: dict[str, int] = {}
        self.data_start = -(-max(header_bytes, DATA_ALIGNMENT) // DATA_ALIGNMENT) * DATA_ALIGNMENT
        self.data_bytes = 0

    @property
    def total_bytes(self) -> int:
        return self.data_start + self.data_bytes

    def place(self, spec: TensorSpec) -> int:
        check_storable(spec)
        check_name_bytes(spec.name, self._limits)
        offset = self.data_bytes
        self._specs.append(spec)
        self._offsets[spec.name] = offset
        self.data_bytes += spec.nbytes
        return self.data_start + offset

    def missing(self, written: Collection[str]) -> list[str]:
        return []

    def lacking(self, metadata: Mapping[str, str]) -> int:
        tight = build_header(self._specs, self._offsets, metadata, limits=self._limits)
        return max(0, len(tight) - self.data_start)

    def moved(self, count: int) -> None:
        self.data_start += count

    def header(self, metadata: Mapping[str, str]) -> bytes:
        return build_header(
            self._specs, self._offsets, metadata, room=self.data_start, limits=self._limits
        )
