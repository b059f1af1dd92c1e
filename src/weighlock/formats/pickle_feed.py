"""The bytes of a pickle, as far as they have been asked for. Knows neither opcodes nor sources."""

from collections.abc import Callable

__all__ = ["PADDING", "Feed"]

PADDING = bytes(16)
"""Longer than the fixed arguments of any opcode."""


class Feed:
    """The bytes of a pickle: all of them, or as many as have been asked for so far.

    Args:
        data: what is there already.
        more: gives at least so many further bytes, or fewer at the end, or none after it.
        label: what to call it in errors.
        offset: where the data begins in its source, for errors.
    """

    __slots__ = ("_more", "_padded", "data", "label", "offset")

    def __init__(
        self,
        data: bytes,
        more: Callable[[int], bytes] | None = None,
        label: str = "pickle",
        offset: int = 0,
    ) -> None:
        self.data = data
        self.label = label
        self.offset = offset
        self._more = more
        self._padded: bytes | None = None

    def extend(self, wanted: int) -> bool:
        """Have at least `wanted` bytes; False if there are not so many."""
        while len(self.data) < wanted and self._more is not None:
            further = self._more(wanted - len(self.data))
            if not further:
                self._more = None
            self.data += further
        return len(self.data) >= wanted

    @property
    def complete(self) -> bool:
        """Whether no more bytes can come."""
        return self._more is None

    def padded(self) -> bytes:
        """All bytes and a few more.

        Fixed arguments can be taken from it without looking whether they are there: what is read
        beyond the end is noticed at the next opcode.
        """
        if self._padded is None:
            self._padded = self.data + PADDING
        return self._padded
