"""A source that remembers what was read from it. Passes the same suite as the real ones."""

import threading

__all__ = ["CountingSource"]


class CountingSource:
    """Any source, with a record of every read as `(offset, length)`, in order."""

    def __init__(self, source):
        self.source = source
        self.reads = []
        self._lock = threading.Lock()

    @property
    def label(self):
        return self.source.label

    @property
    def size(self):
        return self.source.size

    def __eq__(self, other):
        return isinstance(other, CountingSource) and self.source == other.source

    def __hash__(self):
        return hash(self.source)

    def __reduce__(self):
        return CountingSource, (self.source,)

    def read_into(self, offset, buffer):
        with self._lock:
            self.reads.append((offset, len(buffer)))
        self.source.read_into(offset, buffer)

    def close(self):
        self.source.close()

    def taken(self):
        """What was read since the last call, without reads of nothing."""
        with self._lock:
            reads, self.reads = self.reads, []
        return [(offset, length) for offset, length in reads if length]
