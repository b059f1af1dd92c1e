"""The head of a reply, read with suspicion. Knows `http.client`'s reader; not what heads mean.

`http.client` takes the end of a connection for the end of a head, and waits for a head as long as
bytes trickle in. Here one that breaks off is a lost peer, and each has its time and its size.
"""

import http.client
import time
from typing import Any

__all__ = ["MOST_HEAD_BYTES", "Reply"]

MOST_HEAD_BYTES = 256 * 1024


class _Head:
    """Reads lines until the deadline; stands for the file of a reply while its head comes."""

    def __init__(self, file: Any, deadline: float) -> None:
        self._file = file
        self._deadline = deadline
        self._taken = 0

    def readline(self, limit: int = 65_537) -> bytes:
        """A whole line, or so many bytes of a longer one."""
        line = bytearray()
        while len(line) < limit and not line.endswith(b"\n"):
            seen = self._file.peek(1)  # at most one receive
            if not seen:
                raise http.client.RemoteDisconnected("the connection ended within a head")
            count = min(seen.find(b"\n") + 1 or len(seen), limit - len(line))
            line += self._file.read(count)
            self._taken += count
            if self._taken > MOST_HEAD_BYTES:
                raise http.client.LineTooLong("head")
            if time.monotonic() > self._deadline:
                raise TimeoutError("the head of a reply takes too long")
        return bytes(line)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class Reply(http.client.HTTPResponse):
    """A reply whose head must be here in so many seconds."""

    def __init__(self, *args: Any, most_s: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._most_s = most_s

    def begin(self) -> None:
        """Read the head."""
        file = self.fp
        head: Any = _Head(file, time.monotonic() + self._most_s)
        self.fp = head
        try:
            super().begin()
        finally:
            if self.fp is head:
                self.fp = file
