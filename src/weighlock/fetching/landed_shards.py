"""Which files of a sharded model have landed, until its index lies beside them.

Kept in the unfinished index, behind its own bytes. A file that is complete does not say what it is
a copy of: it counts only if nobody has touched it since it landed, the same URL still shows the
same strong validator, and the machine was not restarted meanwhile.
"""

import contextlib
import os
from types import TracebackType

import msgspec

from weighlock.disk.owner import Owner
from weighlock.disk.resumable import ResumableFile
from weighlock.errors import Aborted, FormatError, ProtocolError
from weighlock.fetching.journal import digest_of, read_record, write_record
from weighlock.sources.http import HttpSource
from weighlock.sources.local import Fingerprint

__all__ = ["LandedShards"]


class _Shard(msgspec.Struct, frozen=True):
    url: str
    validator: str
    fingerprint: Fingerprint


class _Record(msgspec.Struct, frozen=True):
    boot: str
    shards: dict[str, _Shard]


class LandedShards:
    """The index of a model that is being fetched, and what is there of its files.

    Left without an error, the index is put in place. It is kept for the next attempt, or discarded,
    as an unfinished file is.

    Args:
        path: where the index shall lie.
        content: the index.
        durable: survive a power loss once it is in place.
    """

    def __init__(self, path: str, content: bytes, *, durable: bool) -> None:
        self._directory = os.path.dirname(path)
        self._content = memoryview(content)
        self._file = ResumableFile(path, durable=durable)
        boot = Owner.current().boot
        record = read_record(self._file, len(content), _Record)
        self._record = record if record and record.boot == boot else _Record(boot, {})

    def __enter__(self) -> "LandedShards":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._file.truncate(len(self._content))
            self._file.write(0, self._content)
            self._file.commit()
        elif isinstance(error, (FormatError, ProtocolError, Aborted)):
            self._file.discard()
        else:
            self._file.keep()

    def is_here(self, name: str, source: HttpSource) -> bool:
        """Whether an earlier attempt has landed what the source now offers."""
        known = self._record.shards.get(name)
        return known is not None and known == self._found(name, source)

    def add(self, name: str, source: HttpSource) -> None:
        """A file has landed."""
        found = self._found(name, source)
        if found is not None:
            self._record.shards[name] = found
            write_record(self._file, len(self._content), self._record)

    def _found(self, name: str, source: HttpSource) -> _Shard | None:
        validator = source.remote.resource.etag
        with contextlib.suppress(OSError):
            status = os.lstat(os.path.join(self._directory, name))
            if validator is not None and status.st_size == source.size:
                url = digest_of(source.remote.address.url)
                return _Shard(url, validator, Fingerprint.of(status))
        return None
