"""What files would import if they were unpickled: every pickle in them, in any container.

Unlike opening, scanning goes on where it can: a wrong checksum or an unknown member must not hide
a pickle from the scan. Knows where pickles may be; reads them with the same inert machine.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weighlock.errors import FormatError, LimitExceeded
from weighlock.formats.inert_pickle import Feed, read_pickle
from weighlock.formats.torch_names import is_known
from weighlock.formats.zip_directory import inflated, read_directory
from weighlock.limits import Limits

if TYPE_CHECKING:
    from weighlock.sources.base import Source

__all__ = ["Finding", "scan_source"]

_PROTOCOLS = b"\x00\x01\x02\x03\x04\x05"
_CHUNK_BYTES = 1024 * 1024


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
        FormatError: something that should be a pickle or an archive cannot be read to its end.
        LimitExceeded: it is longer or does more than the limits allow.
    """
    limits = limits or Limits()
    first = bytearray(min(4, source.size))
    source.read_into(0, memoryview(first))
    if first[:4] == b"PK\x03\x04":
        yield from _scan_archive(source, limits)
    elif _looks_pickled(bytes(first)):
        yield from _scan_row(source, limits)


def _looks_pickled(first: bytes) -> bool:
    """Whether bytes begin as a pickle does: PROTO, or an opcode that can come first without it."""
    return (first[:1] == b"\x80" and first[1:2] in [bytes([p]) for p in _PROTOCOLS]) or (
        first[:1] in (b"(", b"c", b"L", b"]", b"}", b"i")
    )


def _scan_archive(source: "Source", limits: Limits) -> Iterator[Finding]:
    for member in read_directory(source, limits).values():
        named = member.name.endswith((".pkl", ".pickle"))
        if not named and (member.size < 2 or member.size > limits.pickle_bytes):
            continue
        if not named and "/data/" in f"/{member.name}":
            continue  # a storage: its bytes are numbers, and may begin with anything
        raw = inflated(source, member, limits.pickle_bytes, check_crc=False)
        if named or raw[:1] == b"\x80":
            try:
                yield from _findings(
                    Feed(raw, label=f"{source.label}: {member.name}"), limits, member.name
                )
            except (FormatError, LimitExceeded):
                if named:
                    raise


def _scan_row(source: "Source", limits: Limits) -> Iterator[Finding]:
    """Pickles one after another, as legacy checkpoints have them; what follows them is data."""
    feed: Feed

    def more(wanted: int) -> bytes:
        have = len(feed.data)
        count = min(max(wanted, _CHUNK_BYTES), source.size - have)
        raw = bytearray(count)
        source.read_into(have, memoryview(raw))
        return bytes(raw)

    feed = Feed(b"", more, source.label)
    yield from _findings(feed, limits, "")


def _findings(feed: Feed, limits: Limits, place: str) -> Iterator[Finding]:
    start = 0
    while feed.extend(start + 2):
        if start and feed.data[start : start + 1] != b"\x80":
            return
        try:
            pickle = read_pickle(feed, start, limits)
        except FormatError:
            if start:  # behind a pickle anything may follow
                return
            raise
        for (module, name), offset in pickle.globals.items():
            yield Finding(place, offset, module, name)
        start = pickle.end
