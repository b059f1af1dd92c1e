"""PyTorch checkpoints since 1.6: a ZIP archive of one pickle and one member for each storage.

TorchScript archives are those, with constants in a second pickle, and code that is left alone.

Knows which members there are and what they are for; ZIP itself is `zip_directory`'s, the pickle
`inert_pickle`'s.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from weighlock.errors import FormatError, LayoutError, TruncatedFile
from weighlock.formats.heads import Heads
from weighlock.formats.inert_pickle import Feed, Pickle, read_pickle
from weighlock.formats.meanings import Storage
from weighlock.formats.rebuild import is_module, storage_of
from weighlock.formats.record_tree import RecordTree, read_tree
from weighlock.formats.torch_refs import StoragePlace, check_size, make_refs
from weighlock.formats.torch_script import (
    CONSTANTS,
    CONSTANTS_DIRECTORY,
    code_note,
    with_constants,
)
from weighlock.formats.zip_directory import (
    Member,
    check_case,
    head_spans,
    inflated,
    read_directory,
)
from weighlock.formats.zip_members import check_members, member_place
from weighlock.limits import Limits
from weighlock.tensors.catalog import Beside, Catalog

if TYPE_CHECKING:
    from weighlock.sources.base import Source

__all__ = ["open_torch_zip"]

_UNCHECKED = "it was written without checksums: damaged data cannot be told from sound data"


def open_torch_zip(
    source: "Source", limits: Limits | None = None, members: dict[str, Member] | None = None
) -> Catalog:
    """The catalog of a ZIP checkpoint. Reads the directory, the pickle and local headers only.

    Args:
        source: the archive.
        limits: what it may ask for.
        members: what its directory says, if that was read already.

    Raises:
        FormatError: the archive or its pickle is broken, or could be read in two ways.
        LimitExceeded: it asks for more than the limits allow.
    """
    limits = limits or Limits()
    if members is None:
        members = read_directory(source, limits)
    check_case(members, source.label)
    archive = _Archive(source, members)
    tree, named = _read_tree(archive, source, limits)
    refs, unreadable = make_refs(
        tree.tensors,
        archive.place_of,
        swap=archive.big_endian,
        label=source.label,
        limits=limits,
    )
    archive.forget_heads()
    notes = tree.notes if archive.has_checksums else (*tree.notes, _UNCHECKED)
    if archive.is_script:
        notes = (*notes, code_note(archive.names()))
    beside = Beside({}, tree.extras, notes, unreadable, named, archive.check, tree.groups)
    return Catalog(refs, {"format": "pt"}, source.close, beside=beside)


def _read_tree(
    archive: "_Archive", source: "Source", limits: Limits
) -> tuple[RecordTree, dict[tuple[str, str], int]]:
    """What the pickle holds and names. The records it was read as are gone on return."""
    pickle = _read_pickle(archive, "data.pkl", source, limits)
    for record in pickle.persistent_ids:
        if is_module(record):
            raise LayoutError(
                "a class with its source stands where a storage should", source=source.label
            )
        storage_of(record)
    root, named = pickle.value, pickle.globals
    if archive.is_script:
        constants = _read_pickle(archive, CONSTANTS, source, limits)
        root = with_constants(root, constants, source.label)
        named = {**constants.globals, **named}
    return read_tree(root, limits), named


def _read_pickle(archive: "_Archive", name: str, source: "Source", limits: Limits) -> Pickle:
    raw = archive.content(name, limits.pickle_bytes)
    return read_pickle(Feed(raw, label=f"{source.label}: {archive.prefix}{name}"), 0, limits)


class _Archive:
    """The members of a checkpoint, and where the storages they hold lie."""

    def __init__(self, source: "Source", members: dict[str, Member]) -> None:
        self._source = source
        self._members = members
        # torch.serialization.set_crc32_options(False) writes 0 for every member.
        self.has_checksums = any(member.crc for member in self._members.values())
        self.prefix = self._find_prefix()
        self.big_endian = self._byte_order() == "big"
        self.is_script = self.prefix + CONSTANTS in self._members
        self._headers = Heads(source, head_spans(self._storages()))
        self._places: dict[str, StoragePlace] = {}

    def names(self) -> list[str]:
        """The names of all members, without what they begin with in common."""
        return [name.removeprefix(self.prefix) for name in self._members]

    def member(self, name: str) -> Member:
        found = self._members.get(self.prefix + name)
        if found is None:
            raise TruncatedFile(f"has no member {self.prefix + name!r}", source=self._source.label)
        return found

    def content(self, name: str, most_bytes: int) -> bytes:
        """All of a member, which matches its checksum if there are checksums."""
        member = self.member(name)
        return inflated(self._source, member, most_bytes, check_crc=self.has_checksums)

    def place_of(self, storage: Storage) -> StoragePlace:
        """Where a storage lies; its member must be as long as the pickle says."""
        place = self._places.get(storage.key)
        if place is None:
            is_constant = self.is_script and storage.key.startswith(CONSTANTS_DIRECTORY)
            member = self.member(storage.key if is_constant else f"data/{storage.key}")
            place = self._places[storage.key] = member_place(self._source, self._headers, member)
        check_size(storage, place.span.length)
        return place

    def forget_heads(self) -> None:
        """Every storage has its place: the heads of members are not needed any more."""
        self._headers.forget()

    def check(self, progress: Callable[[int], None]) -> None:
        """Compare every member with its checksum."""
        members = self._members.values()
        check_members(self._source, members, progress, compare=self.has_checksums)

    def _storages(self) -> Iterator[Member]:
        homes = (f"{self.prefix}data/", self.prefix + CONSTANTS_DIRECTORY)
        return (m for m in self._members.values() if m.name.startswith(homes))

    def _find_prefix(self) -> str:
        """The directory all members share: the one with the pickle in it."""
        found = [name for name in self._members if name.rsplit("/", 1)[-1] == "data.pkl"]
        if len(found) > 1:  # files that were saved beside a script may have any name
            found = [name for name in found if name.split("/")[1:2] != ["extra"]]
        if len(found) > 1:
            raise FormatError("is a ZIP archive with two data.pkl", source=self._source.label)
        if not found:
            raise FormatError(f"is {_other_archive(self._members)}", source=self._source.label)
        prefix = found[0].removesuffix("data.pkl")
        strangers = [name for name in self._members if not name.startswith(prefix)]
        if strangers:
            raise LayoutError(
                f"member {strangers[0]!r} lies outside of {prefix!r}", source=self._source.label
            )
        return prefix

    def _byte_order(self) -> str:
        if self.prefix + "byteorder" not in self._members:
            return "little"
        order = self.content("byteorder", 16).decode("ascii", "replace").strip()
        if order not in ("little", "big"):
            raise LayoutError(f"its byte order is {order!r}", source=self._source.label)
        return order


def _other_archive(names: Iterable[str]) -> str:
    """What an archive without a pickle of tensors is."""
    for name in names:
        if name.endswith("archive_format"):
            return "a program that torch.export saved: load it there, and save its state_dict"
        if name.endswith(".data/extern_modules"):
            return "a torch.package: import the model from it, and save its state_dict"
    return (
        "a ZIP archive with no data.pkl: not a PyTorch checkpoint; unpack it, if weights are in it"
    )
