"""Numpy arrays in a ZIP archive, one member for each. Knows which members are arrays.

ZIP itself is `zip_directory`'s, the header of an array `npy`'s.
"""

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from weighlock.errors import FormatError, LayoutError, UnsupportedDType
from weighlock.formats.heads import Heads
from weighlock.formats.npy import array_ref, read_header, trailing
from weighlock.formats.zip_directory import DEFLATED, Member, head_spans
from weighlock.formats.zip_members import check_members, member_place
from weighlock.limits import Limits
from weighlock.tensors.catalog import Beside, Catalog

if TYPE_CHECKING:
    from weighlock.formats.npy import NpyHeader
    from weighlock.formats.torch_refs import StoragePlace
    from weighlock.sources.base import Source
    from weighlock.tensors.ref import TensorRef

__all__ = ["is_npz", "open_npz"]

_SUFFIX = ".npy"
_PICKLE = "data.pkl"
"""What a checkpoint has, and an archive of arrays has not."""


def is_npz(members: Iterable[str]) -> bool:
    """Whether an archive with members of these names, in its own order, is one of arrays.

    Numpy writes nothing but arrays; others put something before or between them.
    """
    names = list(members)
    if names and names[0].endswith(_SUFFIX):
        return True
    has_arrays = any(name.endswith(_SUFFIX) for name in names)
    return has_arrays and not any(name.rsplit("/", 1)[-1] == _PICKLE for name in names)


def open_npz(source: "Source", limits: Limits, members: dict[str, Member]) -> Catalog:
    """The catalog of an archive of arrays. Reads the headers of the arrays.

    Args:
        source: the archive.
        limits: what it may ask for.
        members: what its directory says.

    Raises:
        FormatError: the archive is broken, or could be read in two ways.
        LimitExceeded: it asks for more than the limits allow.
    """
    headers = Heads(source, head_spans(members.values()))
    refs: dict[str, TensorRef] = {}
    unreadable: dict[str, str] = {}
    notes: list[str] = []
    for member in members.values():
        if member.name.rsplit("/", 1)[-1] == _PICKLE:
            raise LayoutError(
                f"has arrays and {member.name!r}: it could be a checkpoint as well",
                source=source.label,
            )
        if not member.name.endswith(_SUFFIX):
            notes.append(f"member {member.name!r} is no array and left out")
            continue
        name = member.name.removesuffix(_SUFFIX)
        size = len(name.encode("utf-8", "surrogatepass"))
        limits.check("name_bytes", size, f"{source.label}: bytes of the name of an array")
        place = member_place(source, headers, member)
        try:
            header = _header(headers, member, place)
            limits.check("rank", len(header.shape), f"{source.label}: dimensions of {name[:60]!r}")
            refs[name] = array_ref(name, header, place.source, place.span)
        except UnsupportedDType as error:
            unreadable[name] = str(error)
            continue
        except FormatError as error:
            raise type(error)(f"member {member.name!r}: {error}", source=source.label) from error
        notes += [f"{member.name}: {note}" for note in trailing(header, refs[name], member.size)]

    beside = Beside(
        notes=tuple(notes),
        unreadable=unreadable,
        check=partial(check_members, source, tuple(members.values())),
    )
    return Catalog(refs, None, source.close, beside=beside)


def _header(headers: Heads, member: Member, place: "StoragePlace") -> "NpyHeader":
    if member.method == DEFLATED:
        return read_header(place.source.read_into, member.size, "its header")

    def read_into(offset: int, buffer: memoryview) -> None:
        # It mostly came along when the head of the member was read.
        buffer[:] = headers.read(place.span.offset + offset, len(buffer))

    return read_header(read_into, member.size, "its header")
