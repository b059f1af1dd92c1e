"""Which blocks of an unfinished file have landed, for servers that have no digests to prove it.

Written behind the file's own bytes, where completing the file cuts it off. It is believed only if
the same URL still shows the same strong validator and the machine was not restarted meanwhile:
after a power loss the journal could be on the disk and the blocks not. And only if nothing follows
it: whoever takes up a file for anything else moves its end, or empties it.
"""

import threading
from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec
from blake3 import blake3

from weighlock.disk.owner import UNKNOWN_BOOT, Owner
from weighlock.disk.resumable import ResumableFile
from weighlock.errors import DiskError
from weighlock.sources.grid import block_count
from weighlock.sources.http_remote import BlockPlace
from weighlock.transfer.landing import FileLanding

__all__ = ["Journal", "digest_of", "is_same_boot", "read_record", "write_record"]

R = TypeVar("R", bound=msgspec.Struct)

_EVERY_BLOCKS = 8
_MAGIC = b"weighlock journal\n"
_MOST_BYTES = 16 * 1024 * 1024


class _Record(msgspec.Struct, frozen=True):
    url: str
    validator: str
    boot: str
    size: int
    landed: bytes
    """One bit per block."""


def is_same_boot(boot: str) -> bool:
    """Whether the machine certainly runs since a record was written: blocks are where it says."""
    return boot == Owner.current().boot != UNKNOWN_BOOT


def digest_of(url: str) -> str:
    """What tells a URL from others, and tells nothing of it."""
    return blake3(url.encode()).hexdigest()


def write_record(file: ResumableFile, offset: int, record: msgspec.Struct) -> None:
    """Put a record behind what a file holds, and at its end."""
    body = msgspec.msgpack.encode(record)
    text = _MAGIC + len(body).to_bytes(8, "little") + blake3(body).digest() + body
    file.write(offset, memoryview(text))
    if file.size > offset + len(text):
        file.truncate(offset + len(text))


def read_record(file: ResumableFile, offset: int, kind: type[R]) -> R | None:
    """The record behind what a file holds, if there is a whole one at its end."""
    try:
        return _read_record(file, offset, kind)
    except DiskError:  # a bad sector: what it says is not known
        return None


def _read_record(file: ResumableFile, offset: int, kind: type[R]) -> R | None:
    head = bytearray(len(_MAGIC) + 40)
    if not file.read_into(offset, memoryview(head)):
        return None
    length = int.from_bytes(head[len(_MAGIC) : len(_MAGIC) + 8], "little")
    if not head.startswith(_MAGIC) or length > _MOST_BYTES:
        return None
    if file.size != offset + len(head) + length:
        return None
    body = bytearray(length)
    if not file.read_into(offset + len(head), memoryview(body)):
        return None
    if blake3(body).digest() != head[len(_MAGIC) + 8 :]:
        return None
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.DecodeError:
        return None


class Journal:
    """A landing in a file that remembers what has landed.

    Args:
        landing: the landing.
        file: its file.
        url: where it is fetched from, without what a new signature changes; kept as a digest, as it
            may hold a secret.
        validator: the strong validator of what is there: it tells versions of it apart, not files.
    """

    def __init__(self, landing: FileLanding, file: ResumableFile, url: str, validator: str) -> None:
        self._landing = landing
        self._file = file
        self._url = digest_of(url)
        self._validator = validator
        self._size = landing.size
        self._landed = bytearray(-(-block_count(self._size) // 8))
        self._since = 0
        self._lock = threading.Lock()

    @property
    def blocks(self) -> Sequence[int]:
        return self._landing.blocks

    def place(self) -> BlockPlace:
        return _JournaledPlace(self, self._landing.place())

    def put(self, block: int, content: memoryview) -> None:
        self._landing.put(block, content)
        self.landed(block)

    def take_up(self) -> list[int]:
        """What an earlier attempt landed, if it can be believed; the first block never is.

        The first bytes of a file are withheld until it is complete, so its block comes anew.
        """
        record = self._read()
        found: list[int] = []
        if record is not None and self._is_ours(record):
            landed = record.landed
            found = [n for n in self.blocks if n and landed[n // 8] >> n % 8 & 1]
        else:
            self._file.truncate(0)  # of what else is there nothing is known
        self._mark(found)
        self._write()  # before any block of this attempt
        return found

    def _is_ours(self, record: _Record) -> bool:
        if not is_same_boot(record.boot):
            return False
        mine = self._url, self._validator, self._size, len(self._landed)
        return mine == (record.url, record.validator, record.size, len(record.landed))

    def landed(self, block: int) -> None:
        """A block is in the file."""
        with self._lock:
            self._mark([block])
            self._since += 1
            if self._since >= _EVERY_BLOCKS:
                self._since = 0
                self._write()

    def _mark(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._landed[block // 8] |= 1 << block % 8

    def _write(self) -> None:
        boot = Owner.current().boot
        record = _Record(self._url, self._validator, boot, self._size, bytes(self._landed))
        write_record(self._file, self._size, record)

    def _read(self) -> _Record | None:
        return read_record(self._file, self._size, _Record)


class _JournaledPlace:
    def __init__(self, journal: Journal, place: BlockPlace) -> None:
        self._journal = journal
        self._place = place

    def views(self, block: int) -> Sequence[memoryview]:
        return self._place.views(block)

    def landed(self, block: int) -> None:
        self._place.landed(block)
        self._journal.landed(block)
