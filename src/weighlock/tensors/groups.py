"""A tensor that a file holds as several, or not at all: what it is, and which entries it is in."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

__all__ = ["Group"]


@dataclass(frozen=True, slots=True)
class Group:
    """Entries of a catalog that are one tensor together.

    `catalog.only(group.parts.values())` are its refs. A group without parts is a tensor of which
    the file holds the spec and no data.
    """

    kind: str
    """`sparse_coo`, `sparse_csr`, `sparse_csc`, `sparse_bsr`, `sparse_bsc`, `nested`,
    `nested jagged`, `quantized per_tensor_affine` (and other schemes of torch), `meta`."""
    dtype: str
    """Element type of the whole: its safetensors name, or torch's where there is none."""
    shape: tuple[int | None, ...]
    """Shape of the whole; None for a dimension whose size differs from row to row."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """What each part is (`indices`, `values`, `int_repr`, `scale`, …), and its name."""

    @property
    def is_quantized(self) -> bool:
        """Whether its parts are integers and what turns them into numbers."""
        return self.kind.startswith("quantized")

    def retyped(self, dtype_of: Callable[[str], str | None]) -> "Group":
        """The same of entries that have other dtypes; its own follows that of its values."""
        values = self.parts.get("values")
        dtype = None if values is None else dtype_of(values)
        return self if dtype is None else replace(self, dtype=dtype)

    def renamed(self, new_name: Callable[[str], str]) -> "Group":
        """The same of entries that have other names."""
        parts = {part: new_name(name) for part, name in self.parts.items()}
        return Group(self.kind, self.dtype, self.shape, parts)

    def __str__(self) -> str:
        shape = ", ".join("*" if size is None else str(size) for size in self.shape)
        where = f"in {', '.join(self.parts.values())}" if self.parts else "no data"
        return f"{self.kind} {self.dtype} [{shape}], {where}"
