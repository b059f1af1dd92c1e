"""The `Source` protocol: what every place bytes are read from can do. Knows no implementation."""

from typing import Protocol, runtime_checkable

__all__ = ["Source"]


@runtime_checkable
class Source(Protocol):
    """Bytes readable at any offset, from any number of threads. There is no cursor.

    Two sources are equal if they read the same bytes of the same thing; equality and hash decide
    which tensors are tied.
    """

    @property
    def label(self) -> str:
        """What to call it in messages: a path, a URL."""

    @property
    def size(self) -> int:
        """Number of bytes."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the whole buffer from that offset.

        Raises:
            ShortRead: the source ends before the buffer is full.
            SourceChanged: it is no longer what was opened.
            SourceError: it could not be read.
            After any of them the buffer's content means nothing.
        """

    def close(self) -> None:
        """Let go of what the source holds. Idempotent; reading afterwards raises `SourceError`."""
