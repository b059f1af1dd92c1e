"""What is known of a file before its data: its header. Knows bytes and digests; not who sends them.

A header may have megabytes, and many files may be on their way: it is checked once as a whole, and
kept as digests.
"""

from collections.abc import Mapping

from blake3 import blake3

from weighlock.errors import LayoutError, TruncatedFile
from weighlock.formats.safetensors import open_safetensors
from weighlock.limits import Limits
from weighlock.sources.grid import BLOCK_BYTES
from weighlock.tensors.catalog import Catalog
from weighlock.tensors.spec import TensorSpec

__all__ = ["Announced", "Beginning", "check_announced"]

_FIRST_BYTES = 8
_NOTHING = blake3().digest()


class Announced:
    """A file of which only the header is here: enough to check what it says of itself."""

    def __init__(self, header: bytes, size: int, label: str) -> None:
        self._header = memoryview(header)
        self.size = size
        self.label = label

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer from the header."""
        if offset + len(buffer) > len(self._header):
            raise TruncatedFile(
                f"{len(self._header):,} bytes of header are announced, "
                f"{offset + len(buffer):,} belong to it",
                source=self.label,
            )
        buffer[:] = self._header[offset : offset + len(buffer)]

    @property
    def is_exact(self) -> bool:
        """Whether the header is as long as it says itself."""
        said = int.from_bytes(self._header[:_FIRST_BYTES], "little")
        return _FIRST_BYTES + said == len(self._header)

    def close(self) -> None:
        """There is nothing to close."""


class Beginning:
    """What a file must begin with, block by block.

    Args:
        header: the header that was announced, which is not kept.
    """

    __slots__ = ("_digests", "_length", "first")

    def __init__(self, header: bytes) -> None:
        self.first = bytes(header[:_FIRST_BYTES])
        """Its first bytes, which a file that is not complete has not."""
        self._length = len(header)
        view = memoryview(header)
        starts = range(0, len(header), BLOCK_BYTES)
        self._digests = [blake3(view[at : at + BLOCK_BYTES]).digest() for at in starts]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Beginning):
            return NotImplemented
        return (self._length, self._digests) == (other._length, other._digests)

    __hash__ = None  # type: ignore[assignment]

    def length_in(self, block: int) -> int:
        """How many bytes of a block are the header's."""
        return min(BLOCK_BYTES, max(0, self._length - block * BLOCK_BYTES))

    def digest(self, block: int) -> bytes:
        """The BLAKE3 of those bytes."""
        return self._digests[block] if block < len(self._digests) else _NOTHING

    def is_in(self, block: int, content: memoryview) -> bool:
        """Whether a whole block has them."""
        here = self.length_in(block)
        return not here or blake3(content[:here]).digest() == self.digest(block)


def check_announced(
    announced: Announced, expected: Mapping[str, TensorSpec] | None, limits: Limits
) -> None:
    """Look whether a header is valid, and announces what is expected, if anything is.

    Raises:
        FormatError: it is not valid for a file of that size; `LayoutError`: a tensor is missing, is
            one too many, or has another dtype or shape.
    """
    catalog = open_safetensors(announced, limits)
    if not announced.is_exact:
        raise LayoutError(f"{announced.label}: is longer or shorter than the header of a file")
    if expected is not None:
        _check_specs(catalog, expected)


def _check_specs(catalog: Catalog, expected: Mapping[str, TensorSpec]) -> None:
    missing = [name for name in expected if name not in catalog]
    if missing:
        raise LayoutError(f"tensor {missing[0]!r} is expected and not announced")
    for name, ref in catalog.items():
        spec = expected.get(name)
        if spec is None:
            raise LayoutError(f"tensor {name!r} is announced and not expected")
        if (spec.dtype, spec.shape) != (ref.dtype, ref.shape):
            raise LayoutError(
                f"tensor {name!r} is announced as {ref.dtype.value} {list(ref.shape)}, "
                f"{spec.dtype.value} {list(spec.shape)} is expected"
            )
