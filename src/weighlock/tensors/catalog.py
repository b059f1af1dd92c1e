"""An ordered mapping of names to refs, whatever route they came by.

Knows names, refs and metadata. What it reads from is the refs' business.
"""

import fnmatch
import re
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, ValuesView
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from weighlock.errors import LayoutError, LocalProtocolError, UnsupportedDType
from weighlock.lifetimes import Lifetime
from weighlock.tensors.beside import Beside
from weighlock.tensors.groups import Group
from weighlock.tensors.naming import (
    LoadReport,
    NoSuchName,
    matching,
    places_of,
    some_names,
    unmatched,
)
from weighlock.tensors.ref import TensorRef, check_ref
from weighlock.tensors.stored import load_together

if TYPE_CHECKING:
    from os import PathLike

    from weighlock.tensors.arrays import Array
    from weighlock.tensors.torch import Tensor

__all__ = ["Beside", "Catalog", "Keeping", "LoadReport", "matching", "unmatched"]

_SUMMED = 10_000
"""A catalog of up to so many tensors says how large it is wherever it is shown."""

Keeping: TypeAlias = "Callable[[str | PathLike[str], bool], Catalog]"


class Catalog(Lifetime, Mapping[str, TensorRef]):
    """Names and their tensors, none of them read yet. Immutable and ordered.

    The names of a sharded model are those of its index: a file is opened when one of its tensors is
    asked for, and all of them when `extras`, `notes`, `unreadable` or `globals` are.

    `Catalog.of` makes one of arrays and torch tensors, as in a state dict.

    Args:
        refs: the tensors by name. Kept, not copied: it may open files as it is asked.
        metadata: what the file says about itself beside its tensors.
        close: called once by `close()`, to let go of what the refs read from.
        shards: gives the catalogs of the files the tensors are spread over, by file name.
        beside: what else the file holds.
        keep: makes the files behind the refs lasting ones, where they are temporary.

    Raises:
        TypeError: the first or the last of the tensors is no ref.
    """

    __slots__ = ("_beside", "_close", "_is_closed", "_keep", "_metadata", "_refs", "_shards")

    def __init__(
        self,
        refs: Mapping[str, TensorRef],
        metadata: Mapping[str, str] | None = None,
        close: Callable[[], None] | None = None,
        shards: "Callable[[], Mapping[str, Catalog]] | None" = None,
        beside: "Beside | None" = None,
        keep: "Keeping | None" = None,
    ) -> None:
        if type(refs) is dict and refs:
            # Not each of a million; and what opens files when it is asked is not asked.
            check_ref(next(iter(refs.values())))
            check_ref(next(reversed(refs.values())))
        self._refs = refs
        self._is_closed = False
        self._metadata = MappingProxyType(dict(metadata or {}))
        self._close = close
        self._shards = shards
        self._beside = beside or Beside()
        self._keep = keep

    @classmethod
    def of(
        cls, tensors: Mapping[str, object], metadata: Mapping[str, str] | None = None
    ) -> "Catalog":
        """A catalog of what is in memory, or of refs from anywhere. Nothing is copied or read.

        Args:
            tensors: names and numpy arrays, torch tensors or refs: a state dict. A catalog stays
                what it is.
            metadata: text beside the tensors; a catalog's own is kept if this is not given.

        Raises:
            LayoutError: it is no mapping, or something in it is no plain tensor.
            UnsupportedDType: a tensor has a type that safetensors has not.
        """
        from weighlock.tensors.convert import refs_of

        if isinstance(tensors, Catalog):
            if metadata is None:
                return tensors
            return Catalog(tensors._refs, metadata, shards=tensors._shards, beside=tensors._beside)
        return cls({ref.name: ref for ref in refs_of(tensors)}, metadata)

    def _take_over(self, other: "Catalog") -> None:
        """Be the other one from now on, with what there is to close."""
        inner = other._refs, other._metadata, other._close, other._shards, other._beside
        Catalog.__init__(self, *inner, other._keep)
        other._close = None

    def __getitem__(self, name: str) -> TensorRef:
        try:
            return self._refs[name]
        except KeyError:
            told = self._beside.groups.get(name) or self._beside.unreadable.get(name)
            if told is None:
                raise NoSuchName(name, self._refs) from None
            raise KeyError(f"{name}: {told}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._refs)

    def __len__(self) -> int:
        return len(self._refs)

    def __contains__(self, name: object) -> bool:
        return name in self._refs

    def items(self) -> ItemsView[str, TensorRef]:
        """Names and refs. Those of the dict beneath: ten times as fast as a `Mapping`'s own."""
        return self._refs.items()

    def values(self) -> ValuesView[TensorRef]:
        """The refs."""
        return self._refs.values()

    def __repr__(self) -> str:
        # Nothing is opened for it, and not a million refs are looked at.
        is_known = type(self._refs) is dict and len(self) <= _SUMMED
        facts = [f"{len(self)} tensor{'' if len(self) == 1 else 's'}"]
        facts += [f"{self.nbytes:,} bytes", *places_of(self.values())] if is_known else []
        facts += ["sharded"] * self.is_sharded + ["closed"] * self._is_closed
        return f"<Catalog of {', '.join(facts)}>"

    def __reduce__(self) -> "tuple[type[Catalog], tuple[object, ...]]":
        metadata = dict(self._metadata)
        return Catalog, (self._refs, metadata, self._close, self._shards, self._beside)

    def _leave(self, error: BaseException | None) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files behind the refs; they raise when used afterwards. Idempotent."""
        close, self._close = self._close, None
        if close is not None:
            self._is_closed = True
            close()

    @property
    def metadata(self) -> Mapping[str, str]:
        """What the file says about itself beside its tensors."""
        return self._metadata

    @property
    def aliases(self) -> Mapping[str, str]:
        """Names that the metadata of a file gives to tensors it holds under another name."""
        return self._beside.aliases

    @property
    def extras(self) -> Mapping[Any, Any]:
        """What a checkpoint holds that is not a tensor, as plain values: epoch, settings.

        Of a sharded model, what each of its files holds, by file name.
        """
        return self._whole_beside().extras

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader should know, such as names that were changed to stay apart."""
        return self._whole_beside().notes

    @property
    def unreadable(self) -> Mapping[str, str]:
        """Names of tensors of a kind that is not read, and why; they are not in the catalog.

        Unless the index of a sharded model lists them: `readable` leaves them out there.
        """
        return self._whole_beside().unreadable

    @property
    def groups(self) -> Mapping[str, Group]:
        """Tensors that are several entries together (sparse, quantised, nested), by name.

        And those without data (meta), which have no entry at all. A group of which a part is not
        in this catalog is left out.
        """
        found = self._whole_beside().groups
        return {n: g for n, g in found.items() if all(p in self._refs for p in g.parts.values())}

    @property
    def globals(self) -> Mapping[tuple[str, str], int]:
        """What the file would import if it were unpickled: (module, name), and at which byte."""
        return self._whole_beside().globals

    def _whole_beside(self) -> Beside:
        return self._beside.with_shards(self.shards()) if self.is_sharded else self._beside

    def check(self, progress: Callable[[int], None] = lambda _: None) -> None:
        """Read everything the file has a checksum for, and raise if one does not match."""
        if self._beside.check is not None:
            self._beside.check(progress)
        for shard in self.shards().values():
            shard.check(progress)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; one that goes by several names counts once."""
        return sum({ref.identity(): ref.nbytes for ref in self.values()}.values())

    def shards(self) -> "Mapping[str, Catalog]":
        """The files of a sharded model by name, all opened; empty for one that lies in one file."""
        return self._shards() if self._shards is not None else {}

    @property
    def is_sharded(self) -> bool:
        """Whether the tensors are spread over several files that an index holds together."""
        return self._shards is not None

    def readable(self) -> "Catalog":
        """The tensors that are read: without those an index lists and `unreadable` explains."""
        unreadable = self.unreadable
        if not any(name in unreadable for name in self):
            return self
        return self.only(name for name in self if name not in unreadable)

    def select(self, *patterns: str) -> "Catalog":
        """The readable tensors whose name matches one of the glob patterns, in this order."""
        for pattern in patterns:
            if not isinstance(pattern, str):
                raise TypeError(f"select: a pattern is a text, not {type(pattern).__name__}")
        matches = re.compile("|".join(fnmatch.translate(pattern) for pattern in patterns)).match
        chosen: dict[str, TensorRef] = {}
        for name in self:
            if patterns and matches(name):
                try:
                    chosen[name] = self._refs[name]
                except UnsupportedDType:  # only the file that holds it knew that it is not read
                    if name not in self.unreadable:
                        raise
        return self._with(chosen)

    def only(self, names: Iterable[str]) -> "Catalog":
        """The tensors of these names, in the order given."""
        if isinstance(names, str):
            raise TypeError(f"only: several names are wanted; for one, [{names!r}]")
        return self._with({name: self._refs[name] for name in names})

    def rename(self, names: Mapping[str, str] | Callable[[str], str]) -> "Catalog":
        """The same tensors under other names.

        Args:
            names: old name to new name (others keep theirs), or a function from old to new.

        Raises:
            LayoutError: two tensors would have one name, or a name to be changed is not there.
        """
        if isinstance(names, Mapping):
            absent = [name for name in names if name not in self]
            if absent:
                raise LayoutError(f"cannot rename {absent[0]!r}: there is no tensor of that name")
            new_name: Callable[[str], str] = lambda old: names.get(old, old)  # noqa: E731
        else:
            new_name = names
        renamed: dict[str, TensorRef] = {}
        origin: dict[str, str] = {}
        for old, ref in self.items():
            new = new_name(old)
            if new in renamed:
                raise LayoutError(f"{origin[new]!r} and {old!r} would both be named {new!r}")
            renamed[new] = ref if new == old else ref.renamed(new)
            origin[new] = old
        groups = {new_name(name): g.renamed(new_name) for name, g in self.groups.items()}
        return self._with(renamed, replace(self._beside, groups=groups, has_all_groups=True))

    def _with(self, refs: Mapping[str, TensorRef], beside: Beside | None = None) -> "Catalog":
        """Other refs into the same files; those are still this catalog's to close."""
        beside = beside or self._beside
        return Catalog(refs, self._metadata, shards=self._shards, beside=beside)

    def noted(self, note: str) -> "Catalog":
        """The same catalog with one more note; it takes over what there is to close."""
        beside = replace(self._beside, notes=(*self._beside.notes, note))
        return Catalog(self._refs, self._metadata, self._close, self._shards, beside, self._keep)

    def replaced(self, refs: Mapping[str, TensorRef], beside: Beside) -> "Catalog":
        """The same file with other refs into it; it takes over what there is to close."""
        return Catalog(refs, self._metadata, self._close, self._shards, beside, self._keep)

    def keeping(self, keep: "Keeping") -> "Catalog":
        """The same catalog of temporary files; it takes over what there is to close."""
        return Catalog(self._refs, self._metadata, self._close, self._shards, self._beside, keep)

    def keep(self, path: "str | PathLike[str]", *, durable: bool = True) -> "Catalog":
        """Hand over what landed in a spool: it lies under that path now, and is not temporary.

        On the same file system the file is renamed, and refs taken before read on; elsewhere it is
        copied, and the temporary file still goes with its last ref. The destination is replaced
        atomically; for a model of several files it is a directory, which must be new or empty.

        Args:
            path: the destination.
            durable: survive a power loss once this returns.

        Returns:
            The catalog of what lies there.

        Raises:
            LocalProtocolError: these tensors do not lie in a spool, or are not all of a file.
            SpoolClosed: the spool was closed.
            DiskError: the disk refused. Nothing has changed then.
        """
        if self._keep is None:
            raise LocalProtocolError(
                f"cannot keep these {len(self)} tensors as {path}: they are not what landed in a "
                "spool; weighlock.save(path, catalog) writes tensors from anywhere"
            )
        return self._keep(path, durable)

    def map(self, change: Callable[[TensorRef], TensorRef]) -> "Catalog":
        """The same names with a changed ref each, such as one that casts as it reads."""
        refs = {name: change(ref) for name, ref in self.items()}
        groups = self.groups
        if not groups:
            return self._with(refs)
        dtypes: Mapping[str, str] = {name: ref.dtype.value for name, ref in refs.items()}
        groups = {name: g.retyped(dtypes.get) for name, g in groups.items()}
        return self._with(refs, replace(self._beside, groups=groups, has_all_groups=True))

    def load(self) -> "dict[str, Array]":
        """Every tensor as a numpy array. A tensor of several names is read once and shared."""
        identities = {name: ref.identity() for name, ref in self.items()}
        unique = {identity: self[name] for name, identity in identities.items()}
        arrays = dict(zip(unique, load_together(unique.values()), strict=True))
        return {name: arrays[identity] for name, identity in identities.items()}

    def torch(self, device: object = None, dtype: object = None) -> "dict[str, Tensor]":
        """Every tensor as a torch tensor: `module.load_state_dict(catalog.torch())`.

        A tensor of several names is read once and shared. Reading into what a module has
        already, `load_into(module)`, takes half the memory.

        Args:
            device: where to; the CPU if not given.
            dtype: of torch, or a name of one: floats are converted to it, whole numbers stay.

        Raises:
            What `ref.torch` raises.
        """
        from weighlock.tensors.torch import state_dict

        return state_dict(self, device, dtype)

    def load_into(self, target: object, *, strict: bool = True, cast: bool = False) -> LoadReport:
        """Read straight into existing arrays or parameters.

        Args:
            target: a mapping of names to numpy arrays or torch tensors, or a torch module.
            strict: refuse if either side has a name the other lacks.
            cast: convert where dtypes differ; refused otherwise.

        Returns:
            The names that were left out, when not strict.

        Raises:
            LayoutError: names, shapes or dtypes differ, or places partly share memory. Nothing has
                been written then.
        """
        from weighlock.tensors.filling import Slot, check_apart, slots_of

        slots: dict[str, Slot] = slots_of(target)
        report = LoadReport(
            missing=tuple(name for name in slots if name not in self),
            unexpected=tuple(name for name in self if name not in slots),
        )
        if strict and (report.missing or report.unexpected):
            raise LayoutError(
                f"names differ: {some_names(report.missing)} not in the catalog, "
                f"{some_names(report.unexpected)} not in the target; strict=False loads the rest"
            )
        pairs = [(self[name], slot) for name, slot in slots.items() if name in self]
        for ref, slot in pairs:
            slot.check(ref, cast=cast)
        check_apart({ref.name: slot for ref, slot in pairs})
        for ref, slot in pairs:
            slot.fill(ref)
        return report
