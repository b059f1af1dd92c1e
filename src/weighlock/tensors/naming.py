"""What is said of the tensors of a catalog: which names are meant, near, missing. Pure."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from weighlock.errors import LayoutError

if TYPE_CHECKING:
    from weighlock.tensors.catalog import Catalog
    from weighlock.tensors.ref import TensorRef

__all__ = ["LoadReport", "NoSuchName", "matching", "places_of", "some_names", "unmatched"]

_COMPARED = 20_000
"""Names that are looked at for one that was misspelt: some tenths of a second."""

_OTHER_LENGTH = 8


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What `load_into` did not fill: empty on both sides when it was strict."""

    missing: tuple[str, ...]
    """Names of the target that the catalog does not have."""
    unexpected: tuple[str, ...]
    """Names of the catalog that the target does not have."""


def some_names(names: Iterable[str]) -> str:
    """The first of some names, and how many more there are."""
    names = list(names)
    shown = ", ".join(repr(name) for name in names[:3])
    return (shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")) or "none"


def matching(catalog: "Catalog", patterns: Sequence[str]) -> "Catalog":
    """The tensors whose names match a glob pattern.

    Raises:
        LayoutError: none does.
    """
    chosen = catalog.select(*patterns)
    if not chosen:
        raise unmatched(patterns)
    return chosen


def unmatched(patterns: Sequence[str]) -> LayoutError:
    """What to say where no name matches."""
    if not patterns:
        return LayoutError("no tensor matches: there are no patterns, names= is empty")
    return LayoutError(f"no tensor matches {' or '.join(map(repr, patterns))}")


def places_of(refs: "Iterable[TensorRef]") -> list[str]:
    """Where tensors come from: the first place, and how many more there are; none in memory."""
    sources = dict.fromkeys(source for ref in refs for source in ref.sources())
    labels = list(dict.fromkeys(getattr(source, "label", "a source") for source in sources))
    return labels[:1] + ([f"{len(labels) - 1} more files"] if len(labels) > 1 else [])


class NoSuchName(KeyError):
    """A catalog has no tensor of that name. What is near it is looked up when somebody reads this.

    That takes long, and whoever only asks whether there is one does not wait for it.
    """

    def __init__(self, name: str, names: Collection[str]) -> None:
        super().__init__(name)
        self._names = names

    def __str__(self) -> str:
        near = [repr(name) for name in _near(str(self.args[0]), self._names)]
        meant = f"; did you mean {' or '.join(near)}?" if near else ""
        return f"{self.args[0]!r} is none of the {len(self._names)} tensors here{meant}"

    def __reduce__(self) -> tuple[object, ...]:
        return KeyError, self.args


def _near(name: str, names: Iterable[str]) -> list[str]:
    """Up to three of the names that resemble one which is not among them."""
    import difflib

    wanted, length = name.lower(), len(name)
    # Those of quite another length are no misspellings, and comparing takes long.
    alike = {
        each.lower(): each
        for each in islice(names, _COMPARED)
        if abs(len(each) - length) <= _OTHER_LENGTH
    }
    return [alike[each] for each in difflib.get_close_matches(wanted, alike, 3, 0.7)]
