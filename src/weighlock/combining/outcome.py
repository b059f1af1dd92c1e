"""Where a combination goes, and what is told about it. Knows files and memory; no arithmetic."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

from weighlock.combining.contributors import Combinable, Contributor
from weighlock.combining.plan import Part
from weighlock.disk.spool import Spool
from weighlock.formats.detect import open_catalog
from weighlock.formats.grouping import read_groups
from weighlock.formats.writer import Writer
from weighlock.limits import Limits
from weighlock.sources.local import BytesSource
from weighlock.tensors.arrays import Array, byte_view, empty, flat_bytes, unpack_f4
from weighlock.tensors.beside import Beside
from weighlock.tensors.catalog import Catalog
from weighlock.tensors.dtypes import DType
from weighlock.tensors.groups import Group
from weighlock.tensors.ref import ArrayRef, TensorRef, loaded_shape
from weighlock.tensors.spec import Span, TensorSpec
from weighlock.tensors.stored import StoredRef

if TYPE_CHECKING:
    import os

__all__ = [
    "Out",
    "Report",
    "Target",
    "agreed_aliases",
    "agreed_groups",
    "notes_on",
    "target_for",
    "unread_of",
]

Out: TypeAlias = "str | os.PathLike[str] | Spool | None"
"""A file, a temporary one, or memory."""

_MOST_TOLD = 8
"""Notes on files of contributors that become notes on the result."""


@dataclass(frozen=True, slots=True)
class Report:
    """What was combined, and how."""

    tensors: int
    nbytes: int
    """Bytes of the result."""
    read_bytes: int
    """Bytes that were read for it."""
    weights: Mapping[str, float]
    """Who contributed, and its share of the whole."""
    skipped: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Tensors that not everybody has, and who lacks them."""
    excluded: Mapping[str, str] = field(default_factory=dict)
    """Who was lost and left out entirely, and why."""
    unread: Mapping[str, str] = field(default_factory=dict)
    """Tensors that are in no result, as they are of a kind that is not read, and why."""
    of_files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What readers of a contributor's file should know, by contributor."""

    def notes(self) -> list[str]:
        """What a reader of the result should know, as sentences."""
        notes = [f"{who} was lost and left out: {why}" for who, why in self.excluded.items()]
        for name, who in list(self.skipped.items())[:3]:
            notes.append(f"tensor {name!r} is made without {', '.join(who[:3])}")
        if len(self.skipped) > 3:
            notes.append(f"{len(self.skipped) - 3} more tensors are made without somebody")
        for name, why in list(self.unread.items())[:3]:
            notes.append(f"tensor {name!r} is left out: {why}")
        if len(self.unread) > 3:
            notes.append(f"{len(self.unread) - 3} more tensors are left out")
        told = [f"{who}: {note}" for who, several in self.of_files.items() for note in several]
        notes += told[:_MOST_TOLD]
        if len(told) > _MOST_TOLD:
            notes.append(f"{len(told) - _MOST_TOLD} more notes on files: see report.of_files")
        return notes


def agreed_aliases(catalogs: Sequence[Catalog], texts: Container[str]) -> dict[str, str]:
    """Names that stand for another tensor in everybody who has one of the two, and its name.

    Made once, it stays one: a model that grew when it was averaged would stay so ever after.

    Args:
        catalogs: of all contributors.
        texts: names under which the metadata of the result says something else.
    """
    said = {alias: name for c in catalogs for alias, name in c.aliases.items() if alias in c}
    return {
        alias: name
        for alias, name in said.items()
        if alias not in texts
        and all(_is_tied(c, alias, name) for c in catalogs if alias in c or name in c)
    }


def _is_tied(catalog: Catalog, alias: str, name: str) -> bool:
    """Whether its file says so, and the refs, which may have been renamed since, are the same."""
    is_said = catalog.aliases.get(alias) == name and alias in catalog and name in catalog
    return is_said and catalog[alias].identity() == catalog[name].identity()


def agreed_groups(catalogs: Iterable[Catalog], parts: Iterable[Part]) -> dict[str, Group]:
    """The tensors that are several entries together, in whoever has them, and in the result."""
    made = {part.spec.name: part.spec.dtype for part in parts}
    found: dict[str, Group] = {}
    differing: set[str] = set()
    for catalog in catalogs:
        for name, group in catalog.groups.items():
            # Its dtype is that of its values, which may be another one in the result.
            group = group.retyped(lambda part: str(made[part]) if part in made else None)
            if found.setdefault(name, group) != group:
                differing.add(name)
    return {
        name: group
        for name, group in found.items()
        if name not in differing and made.keys() >= set(group.parts.values())
    }


def unread_of(given: Iterable[Combinable], contributors: Sequence[Contributor]) -> dict[str, str]:
    """Tensors that nobody has but as what is not read, and why.

    Of catalogs and state dicts nothing is told: who gives one has seen what it holds.
    """
    found = {
        name: why
        for value, contributor in zip(given, contributors, strict=True)
        if not isinstance(value, Mapping)
        for name, why in contributor.catalog.unreadable.items()
    }
    return {n: why for n, why in found.items() if not any(n in c.catalog for c in contributors)}


def notes_on(
    given: Iterable[Combinable], contributors: Sequence[Contributor]
) -> dict[str, tuple[str, ...]]:
    """What readers of the files that were opened for this should know, by contributor."""
    return {
        contributor.label: tuple(contributor.catalog.notes)
        for value, contributor in zip(given, contributors, strict=True)
        if not isinstance(value, Mapping) and contributor.catalog.notes
    }


class Target(Protocol):
    """A result that is being made. Its bytes come in any order and from any thread."""

    def room(self, spec: TensorSpec, start: int, length: int) -> "Array | None":
        """Where so many bytes of a tensor are to be made; None if they are to be put there."""

    def put(self, spec: TensorSpec, start: int, data: memoryview) -> None:
        """Take bytes of a tensor for which there was no room to make them in."""

    def finish(self) -> None:
        """Everything came: put it in its place."""

    def catalog(self) -> Catalog:
        """The result, once it is in its place."""

    def discard(self) -> None:
        """Leave nothing behind."""


def target_for(
    out: Out,
    parts: Sequence[Part],
    *,
    order: Sequence[str],
    metadata: Mapping[str, str],
    aliases: Mapping[str, str],
    durable: bool,
    limits: Limits,
) -> Target:
    """A file if a path or a spool is given, else memory.

    Args:
        out: the path, or the spool.
        parts: what will be put, in the order of the data.
        order: the names, in the order in which readers list them.
        metadata: text to store beside them.
        aliases: other names of some of them.
        durable: survive a power loss once finished.
        limits: bounds of the header, and of memory.
    """
    specs = {part.spec.name: part.spec for part in parts}
    metadata = {**metadata, **aliases}
    if out is None:
        limits.check("memory_bytes", sum(spec.nbytes for spec in specs.values()), "a result")
        return _Memory([specs[name] for name in order], metadata, aliases)
    return _File(
        out,
        Writer(
            out,
            [specs[name] for name in order],
            data_order=list(specs),
            metadata=metadata,
            durable=durable,
            limits=limits,
        ),
        limits,
    )


class _File:
    def __init__(
        self, out: "str | os.PathLike[str] | Spool", writer: Writer, limits: Limits
    ) -> None:
        self._out = out
        self._writer = writer
        self._limits = limits

    def room(self, spec: TensorSpec, start: int, length: int) -> "Array | None":
        return None

    def put(self, spec: TensorSpec, start: int, data: memoryview) -> None:
        self._writer.write_part(spec, start, data)

    def finish(self) -> None:
        self._writer.finish()

    def catalog(self) -> Catalog:
        if isinstance(self._out, Spool):
            return self._writer.landed(self._limits)
        return open_catalog(self._out, self._limits)

    def discard(self) -> None:
        self._writer.discard()


class _Memory:
    def __init__(
        self, specs: Sequence[TensorSpec], metadata: Mapping[str, str], aliases: Mapping[str, str]
    ) -> None:
        self._specs = specs
        self._metadata = metadata
        self._aliases = aliases
        self._arrays: dict[str, Array] = {
            spec.name: empty(loaded_shape(spec), spec.dtype.numpy) for spec in specs
        }

    def room(self, spec: TensorSpec, start: int, length: int) -> "Array | None":
        if spec.dtype is DType.F4 or not length:
            return None
        return flat_bytes(self._arrays[spec.name])[start : start + length]

    def put(self, spec: TensorSpec, start: int, data: memoryview) -> None:
        if len(data):  # of F4, which has two numbers in a byte, and an array has one
            codes = flat_bytes(self._arrays[spec.name])[2 * start : 2 * (start + len(data))]
            unpack_f4(np.frombuffer(data, np.uint8), codes)

    def finish(self) -> None:
        """There is nothing to put anywhere."""

    def catalog(self) -> Catalog:
        refs = {spec.name: _in_memory(spec, self._arrays[spec.name]) for spec in self._specs}
        refs.update({alias: refs[name].renamed(alias) for alias, name in self._aliases.items()})
        groups, _ = read_groups(self._metadata, refs, Limits())
        return Catalog(refs, self._metadata, beside=Beside(self._aliases, groups=groups))

    def discard(self) -> None:
        self._arrays.clear()


def _in_memory(spec: TensorSpec, array: Array) -> TensorRef:
    if spec.dtype.is_packed and spec.dtype is not DType.F4:  # bytes, of which numpy has no type
        return StoredRef(spec, BytesSource(byte_view(array)), Span(0, spec.nbytes))
    return ArrayRef(spec, array)
