"""A run of bytes of another source, as a source of its own. Knows where it begins and ends."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weighlock.errors import ShortRead

if TYPE_CHECKING:
    from weighlock.tensors.stored import Readable

__all__ = ["Window"]


@dataclass(frozen=True, slots=True)
class Window:
    """Bytes `start` to `start + size` of a source, which belongs to somebody else."""

    source: "Readable"
    start: int
    size: int
    label: str
    head: bytes = field(default=b"", compare=False, repr=False)
    """What it begins with, if that is known already."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer from that byte of the window on."""
        if offset < 0 or offset + len(buffer) > self.size:
            raise ShortRead(
                f"{self.label}: has {self.size:,} bytes; {len(buffer):,} were wanted at {offset:,}",
                wanted=len(buffer),
                got=max(0, min(self.size - offset, len(buffer))),
            )
        if offset + len(buffer) <= len(self.head):
            buffer[:] = self.head[offset : offset + len(buffer)]
        else:
            self.source.read_into(self.start + offset, buffer)

    def close(self) -> None:
        """Nothing: who opened the source below closes it."""
