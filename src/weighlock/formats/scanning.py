"""What files would import if they were unpickled: every pickle in them, in any container.

Unlike opening, scanning goes on where it can: a wrong checksum or an unknown member must not hide
a pickle from the scan. Knows where pickles may be; reads them with the same inert machine.
"""

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from weighlock.errors import FormatError, LimitExceeded
from weighlock.formats.heads import Heads
from weighlock.formats.inert_pickle import Feed, Pickle, read_pickle
from weighlock.formats.nested import nested_checkpoints, within
from weighlock.formats.npy import MAGIC, is_object, read_header
from weighlock.formats.pickle_failures import stops_pickle
from weighlock.formats.tar_directory import has_tar_header
from weighlock.formats.torch_legacy import after_storages, is_legacy
from weighlock.formats.torch_names import is_known
from weighlock.formats.torch_tar import tar_globals
from weighlock.formats.zip_directory import Member, archives_in, inflated, read_directory
from weighlock.formats.zip_members import member_place
from weighlock.limits import Limits
from weighlock.sources.local import BytesSource

if TYPE_CHECKING:
    from weighlock.sources.base import Source

__all__ = ["Finding", "scan_source"]

_CHUNK_BYTES = 1024 * 1024
_LEGACY_PICKLES = 5
_MOST_PICKLES = 10_000

_IMPORTABLE = re.compile(r"[\w.-]+")
_header_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class Finding:
    """Something a pickle names, and where."""

    place: str
    """The member of an archive; empty for a plain file."""
    offset: int
    module: str
    name: str

    @property
    def known(self) -> bool:
        """Whether checkpoints name this in the ordinary course of things."""
        return is_known(self.module, self.name)


def scan_source(source: "Source", limits: Limits | None = None) -> Iterator[Finding]:
    """Every global named by every pickle in a source; none if there is no pickle in it.

    Raises:
        FormatError: something that begins as a pickle or an archive cannot be read to its end. What
            it named before that has been given.
        LimitExceeded: it is longer or does more than the limits allow.
    """
    limits = limits or Limits()
    first = bytearray(min(512, source.size))
    source.read_into(0, memoryview(first))
    if first[:4] == b"PK\x03\x04":
        for archive in archives_in(source, limits):  # distributed checkpoints: one for each chunk
            for finding in _scan_archive(archive, limits):
                place = f"{archive.start:,}: {finding.place}" if archive.start else finding.place
                yield replace(finding, place=place)
        return
    if has_tar_header(bytes(first)):  # before safetensors: torch would take it for tar
        for name, named, value in tar_globals(source, limits):
            yield from _as_findings(named, name)
            yield from _inside(value, name, limits)
        yield from _Row(source, 0, limits, is_other=True).findings()
        return
    if _is_safetensors(source, bytes(first[:9]), limits):
        yield from _Row(source, 0, limits, is_other=True).findings()
        return
    start = 0
    if first.startswith(MAGIC):
        start = _after_header(source.read_into, source.size, source.label)
    while start < source.size:
        row = _Row(source, start, limits)
        yield from row.findings()
        start = row.end


def _is_safetensors(source: "Source", first: bytes, limits: Limits) -> bool:
    """Whether a whole header of JSON is there, and not only a brace at its place."""
    length = int.from_bytes(first[:8], "little")
    if first[8:9] != b"{" or length > min(limits.header_bytes, source.size - 8):
        return False
    raw = bytearray(length)
    source.read_into(8, memoryview(raw))
    try:
        _header_decoder.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return False
    return True


def _scan_archive(source: "Source", limits: Limits) -> Iterator[Finding]:
    for member in read_directory(source, limits, fold_case=False).values():
        begin = 0
        if member.name.endswith(".npy"):
            read_into = partial(_read_member, source, member)
            begin = _after_header(read_into, member.size, f"{source.label}: {member.name}")
        named = begin > 0 or member.name.endswith((".pkl", ".pickle"))
        if begin == member.size or (not named and member.size > limits.pickle_bytes):
            continue
        if not named and any(f"/{part}/" in f"/{member.name}" for part in ("data", "constants")):
            continue  # a storage: its bytes are numbers, and may begin with anything
        raw = inflated(source, member, limits.pickle_bytes, check_crc=False)
        if member.name.endswith(".py") and raw[:1] != b"\x80":
            continue  # the code of TorchScript; "class" would begin a pickle of protocol 0
        feed = Feed(raw, label=f"{source.label}: {member.name}")
        at = begin
        for number in itertools.count():  # a second pickle may follow the first
            if at == len(raw):
                break
            _check_number(number, source, member.name, at)
            found: dict[tuple[str, str], int] = {}
            try:
                pickle = read_pickle(feed, at, limits, found)
            except (FormatError, LimitExceeded) as error:
                yield from _as_findings(found, member.name)
                begun = named and at == begin
                if found or begun or not stops_pickle(error, feed, len(raw)):
                    raise
                break
            at = pickle.end
            yield from _as_findings(found, member.name)
            yield from _inside(pickle.value, member.name, limits)


def _check_number(number: int, source: "Source", place: str, at: int) -> None:
    if number >= _MOST_PICKLES:
        raise FormatError(
            f"more than {_MOST_PICKLES:,} pickles follow each other in {place}: what begins at "
            f"byte {at:,} was not looked at",
            source=source.label,
        )


def _read_member(source: "Source", member: Member, offset: int, buffer: memoryview) -> None:
    place = member_place(source, Heads(source), member)
    place.source.read_into(place.span.offset + offset, buffer)


def _after_header(read_into: Callable[[int, memoryview], None], size: int, label: str) -> int:
    """Where the pickle of an array of objects begins; its end, if an array holds numbers."""
    try:
        header = read_header(read_into, size, label)
    except FormatError:
        return 0  # no array after all: it is looked at as any other file
    return header.end if is_object(header) else size


class _Row:
    """Pickles one after another, as legacy checkpoints have them, and the data behind them.

    A file that `is_other`, safetensors or tar, may be made to be a pickle as well. It seldom is:
    what its bytes say when they are read as one is no fault of it, only what could be imported is.
    """

    def __init__(
        self, source: "Source", start: int, limits: Limits, *, is_other: bool = False
    ) -> None:
        self._source = source
        self._start = start
        self._limits = limits
        self._is_other = is_other
        self._feed = Feed(b"", self._more, source.label, start)
        self.end = source.size
        """Where to look further: after the storages of a legacy save, else nowhere."""

    def _more(self, wanted: int) -> bytes:
        """Further bytes: as many as there are already, so that a long row takes few reads."""
        have = len(self._feed.data)
        at = self._start + have
        raw = bytearray(min(max(wanted, have, _CHUNK_BYTES), self._source.size - at))
        self._source.read_into(at, memoryview(raw))
        return bytes(raw)

    def findings(self) -> Iterator[Finding]:
        pickles: list[Pickle] = []
        for number in itertools.count():
            at = pickles[-1].end if pickles else 0
            if not self._feed.extend(at + 1):
                return
            _check_number(number, self._source, "the file", self._start + at)
            named: dict[tuple[str, str], int] = {}
            try:
                pickles.append(read_pickle(self._feed, at, self._limits, named))
            except (FormatError, LimitExceeded) as error:
                yield from _as_findings(self._importable(named), "")
                if self._is_fault(error, number, named):
                    raise
                return
            importable = self._importable(named)
            yield from _as_findings(importable, "")
            if len(importable) < len(named):
                return
            yield from _inside(pickles[-1].value, "", self._limits)
            if number == _LEGACY_PICKLES - 1 and is_legacy(self._feed.data):
                self._step_over_storages(pickles)
                return

    def _importable(self, named: dict[tuple[str, str], int]) -> dict[tuple[str, str], int]:
        """What is named before `pickle` would stop at something that no module is called."""
        if not self._is_other:
            return named
        found = {}
        for (module, name), offset in named.items():
            if not _IMPORTABLE.fullmatch(f"{module}.{name}"):
                break
            found[module, name] = offset
        return found

    def _is_fault(
        self, error: FormatError | LimitExceeded, number: int, named: dict[tuple[str, str], int]
    ) -> bool:
        """Whether this is a pickle that could not be read to its end, and not just data."""
        size = self._source.size - self._start
        if not self._is_other:
            begun = number == 0 and self._feed.data[:1] == b"\x80"
            if named or begun or is_legacy(self._feed.data):
                return True
        elif len(self._importable(named)) < len(named):
            return False
        elif isinstance(error, LimitExceeded) and error.limit == "pickle_bytes":
            return False  # the letters of BF16 in a header ask for half a gigabyte
        return bool(named) or not stops_pickle(error, self._feed, size)

    def _step_over_storages(self, pickles: list[Pickle]) -> None:
        """A legacy file may hold several saves; the next begins after the storages of this one."""
        try:
            end = after_storages(self._source, pickles[3], pickles[4], self._start + pickles[4].end)
        except FormatError:
            return  # nobody could find the next one either
        self.end = max(end, self._start + pickles[4].end)


def _inside(value: Any, place: str, limits: Limits) -> Iterator[Finding]:
    """What checkpoints name that lie as bytes in a pickle: somebody may load those as well."""
    if not limits.nested_depth:
        return
    inside = f"bytes in {place}" if place else "bytes"
    for raw in nested_checkpoints(value):
        bounded = within(raw, limits)
        for finding in scan_source(BytesSource(raw, inside), bounded):
            yield replace(finding, place=f"{finding.place} of {inside}".removeprefix(" of "))


def _as_findings(named: dict[tuple[str, str], int], place: str) -> Iterator[Finding]:
    for (module, name), offset in named.items():
        yield Finding(place, offset, module, name)
