"""What files would import if they were unpickled: every pickle in them, in any container.

Unlike opening, scanning goes on where it can: a wrong checksum or an unknown member must not hide
a pickle from the scan. What is in a container is told by its first bytes, as those do who load it,
and not by its name. What could not be looked into is an error, never silence. Knows where pickles
may be; what they say is `pickle_rows`'s.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from weighlock.errors import FormatError
from weighlock.formats.heads import Heads
from weighlock.formats.impostors import packing_of
from weighlock.formats.nested import nested_checkpoints, within
from weighlock.formats.npy import MAGIC, read_header
from weighlock.formats.pickle_rows import Named, PickleRow
from weighlock.formats.tar_directory import is_tar_for_python, tar_members
from weighlock.formats.torch_names import is_known
from weighlock.formats.torch_tar import TORCH_MEMBERS, tar_globals
from weighlock.formats.zip_directory import DEFLATED, archives_in, read_directory
from weighlock.formats.zip_members import member_place
from weighlock.limits import Limits
from weighlock.sources.local import BytesSource
from weighlock.sources.window import Window

if TYPE_CHECKING:
    from weighlock.sources.base import Source

__all__ = ["Finding", "scan_source"]

_HEAD_BYTES = 512
"""As much of a file as it takes to tell what it is."""

_ZIP = b"PK\x03\x04"

_UNPACKED_BYTES = 64 * 1024 * 1024
"""An archive that lies deflated in another is unpacked to memory, up to this: its directory is at
its end, and deflate can only be read forwards."""

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
        FormatError: something that begins as a pickle or an archive cannot be read to its end, or
            is compressed. What it named before that has been given.
        LimitExceeded: it is longer, deeper or does more than the limits allow.
    """
    return _scan(source, limits or Limits())


def _scan(source: "Source", limits: Limits, is_pickle: bool | None = None) -> Iterator[Finding]:
    """What a source names; `is_pickle` is what its name says, where it has one."""
    first = _first_of(source)
    if first.startswith(_ZIP):
        for archive in archives_in(source, limits):  # distributed checkpoints: one for each chunk
            for finding in _scan_zip(archive, limits):
                place = f"{archive.start:,}: {finding.place}" if archive.start else finding.place
                yield replace(finding, place=place)
    elif is_tar_for_python(first):  # before safetensors: torch would take it for tar
        yield from _scan_tar(source, limits)
        yield from _scan_row(PickleRow(source, 0, limits, is_other=True), limits)
    elif _is_safetensors(source, first, limits):
        yield from _scan_row(PickleRow(source, 0, limits, is_other=True), limits)
    elif first.startswith(MAGIC):
        yield from _scan_arrays(source, limits)
    elif packing := packing_of(first):
        raise FormatError(
            f"is {packing}, and was not looked into: unpack it, and scan what comes out",
            source=source.label,
        )
    else:
        # A member of an archive that neither is called a pickle nor begins as one is a text, or
        # numbers: "class" would begin a pickle of protocol 0.
        is_other = is_pickle is False and first[:1] != b"\x80"
        start = 0
        while start < source.size:
            row = PickleRow(source, start, limits, is_pickle=is_pickle, is_other=is_other)
            yield from _scan_row(row, limits)
            start = row.end


def _first_of(source: "Source") -> bytes:
    first = bytearray(min(_HEAD_BYTES, source.size))
    source.read_into(0, memoryview(first))
    return bytes(first)


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


def _scan_row(row: PickleRow, limits: Limits) -> Iterator[Finding]:
    for named, value in row.pickles():
        yield from _findings(named, value, limits)


def _findings(named: Named, value: Any, limits: Limits) -> Iterator[Finding]:
    """What a pickle names, and checkpoints that lie in it as bytes: somebody may load those too."""
    for (module, name), offset in named.items():
        yield Finding("", offset, module, name)
    for raw in nested_checkpoints(value):
        _check_depth(limits, "bytes")
        yield from _at("bytes", _scan(BytesSource(raw, "bytes"), within(raw, limits)))


def _check_depth(limits: Limits, label: str) -> None:
    if not limits.nested_depth:
        raise FormatError(
            "lies too deep, one in the other, and was not looked into: unpack it, and scan what "
            "comes out",
            source=label,
        )


def _at(place: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    for finding in findings:
        yield replace(finding, place=f"{finding.place} in {place}".removeprefix(" in "))


def _scan_arrays(source: "Source", limits: Limits) -> Iterator[Finding]:
    """Numpy's arrays, one after another: a pickle follows the header of each that holds objects."""
    start = 0
    while start < source.size:
        rest = Window(source, start, source.size - start, source.label)
        if not _first_of(rest).startswith(MAGIC):
            return
        header = read_header(rest.read_into, rest.size, source.label)
        if header.item_bytes is None:
            row = PickleRow(source, start + header.end, limits, is_pickle=True)
            yield from _scan_row(row, limits)
            return
        start += header.end + header.item_bytes * math.prod(header.shape)


def _scan_zip(source: "Source", limits: Limits) -> Iterator[Finding]:
    members = read_directory(source, limits, fold_case=False)
    storages = _storages(members)
    heads = Heads(source)
    for name, member in members.items():
        if not member.size or (name.casefold().startswith(storages) and not _is_pickle(name)):
            continue
        place = member_place(source, heads, member)
        content = Window(place.source, place.span.offset, member.size, f"{source.label}: {name}")
        if name.endswith(".py") and _first_of(content)[:1] != b"\x80":
            continue  # the code of TorchScript
        is_deflated = member.method == DEFLATED
        yield from _at(name, _scan_member(content, name, limits, is_deflated=is_deflated))


def _storages(names: Iterable[str]) -> tuple[str, ...]:
    """How the names of storages begin, in small letters: they are numbers, whatever they look like.

    They lie beside the pickle that names them, which torch finds in large letters as well.
    """
    folded = (name.casefold() for name in names)
    pickles = (name for name in folded if name.rpartition("/")[2] in ("data.pkl", "constants.pkl"))
    return tuple(name.removesuffix(".pkl") + "/" for name in pickles)


def _is_pickle(name: str) -> bool:
    return name.casefold().endswith((".pkl", ".pickle"))


def _scan_tar(source: "Source", limits: Limits) -> Iterator[Finding]:
    for name, named, value in tar_globals(source, limits):
        yield from _at(name, _findings(named, value, limits))
    for member in tar_members(source, Heads(source, dense=True)):
        name, span = member.name, member.span
        if member.is_file and span.length and name not in TORCH_MEMBERS:
            content = Window(source, span.offset, span.length, f"{source.label}: {name}")
            yield from _at(name, _scan_member(content, name, limits))


def _scan_member(
    source: "Source", name: str, limits: Limits, *, is_deflated: bool = False
) -> Iterator[Finding]:
    """What a member of an archive names, which may be an archive in turn."""
    first = _first_of(source)
    if not (first.startswith(_ZIP) or is_tar_for_python(first)):
        return _scan(source, limits, _is_pickle(name))
    _check_depth(limits, source.label)
    if is_deflated:
        if source.size > _UNPACKED_BYTES:
            raise FormatError(
                f"is an archive of {source.size:,} bytes, deflated in another, and was not looked "
                "into: unpack it, and scan what comes out",
                source=source.label,
            )
        raw = bytearray(source.size)
        source.read_into(0, memoryview(raw))
        source = BytesSource(bytes(raw), source.label)
    return _scan(source, replace(limits, nested_depth=limits.nested_depth - 1))
