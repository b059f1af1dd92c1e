"""Files that have landed, as an inbox sees them: never written again. Knows files; not senders."""

from weighlock.errors import Refused
from weighlock.sources.local import FileSource

__all__ = ["InItsPlace", "LandedFile"]


class InItsPlace:
    """A file that has landed: somebody else's."""

    def write(self, offset: int, data: memoryview) -> None:
        raise Refused("it has landed, and is not changed")

    def truncate(self, size: int) -> None:
        raise Refused("it has landed, and is not changed")

    def read_into(self, offset: int, buffer: memoryview) -> bool:
        raise Refused("it has landed, and is not looked at")

    def allocated_bytes(self) -> int:
        """Nothing more is to come."""
        return 2**62

    def close(self) -> None:
        """There is nothing to let go of."""

    keep = discard = close


class LandedFile(InItsPlace):
    """A file that is complete: it is compared with, and never written."""

    def __init__(self, path: str) -> None:
        self._source = FileSource(path)
        self.size = self._source.size
        self.fingerprint = self._source.fingerprint

    def read_into(self, offset: int, buffer: memoryview) -> bool:
        """Fill the buffer; False if the file ends before."""
        if offset + len(buffer) > self.size:
            return False
        self._source.read_into(offset, buffer)
        return True

    def close(self) -> None:
        """Let go of it. Idempotent."""
        self._source.close()

    keep = discard = close
