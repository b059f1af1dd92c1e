"""Gathered tensors that stay in memory for the next range. Knows bytes, and who has what."""

import threading
from collections import OrderedDict

__all__ = ["Kept"]


class Kept:
    """So many bytes for everybody together; what was not used for longest goes first.

    Args:
        most_bytes: of all that is kept; one tensor is, whatever its size.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._tensors: OrderedDict[tuple[int, int], memoryview] = OrderedDict()
        self._keys: dict[int, set[int]] = {}
        self.nbytes = 0
        """Bytes that are kept."""

    def get(self, owner: object, key: int) -> memoryview | None:
        """What an owner has kept under a key, if it is still there."""
        with self._lock:
            found = self._tensors.get((id(owner), key))
            if found is not None:
                self._tensors.move_to_end((id(owner), key))
            return found

    def put(self, owner: object, key: int, tensor: memoryview) -> None:
        """Keep it, until others need the room or its owner is through."""
        with self._lock:
            self._tensors[id(owner), key] = tensor
            self._keys.setdefault(id(owner), set()).add(key)
            self.nbytes += len(tensor)
            while self.nbytes > self._most_bytes and len(self._tensors) > 1:
                (oldest, at), dropped = self._tensors.popitem(last=False)
                self._keys[oldest].discard(at)
                self.nbytes -= len(dropped)

    def drop(self, owner: object) -> None:
        """An owner is through."""
        with self._lock:
            for key in self._keys.pop(id(owner), ()):
                self.nbytes -= len(self._tensors.pop((id(owner), key)))
