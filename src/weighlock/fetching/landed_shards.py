"""Which files of a sharded model have landed, until its index lies beside them.

Kept in the unfinished index, behind its own bytes, together with the names that are to land: what
has another name, or lies there without such a record, is somebody else's. A file that is complete
does not say what it is a copy of: it counts only if nobody has touched it since it landed, the same
URL still shows the same strong validator, and the machine was not restarted meanwhile.
"""

import contextlib
import os
from collections.abc import Iterable
from contextlib import closing

import msgspec
from msgspec.structs import replace

from weighlock.disk.effects import PosixDisk
from weighlock.disk.owner import UNKNOWN_BOOT, Owner
from weighlock.disk.place import Place
from weighlock.disk.resumable import ResumableFile
from weighlock.errors import Aborted, DiskError, WeighlockError
from weighlock.fetching.journal import digest_of, is_same_boot, read_record, write_record
from weighlock.formats.sharded import Index, is_index_name, read_index
from weighlock.lifetimes import Lifetime
from weighlock.limits import Limits
from weighlock.sources.http import HttpSource
from weighlock.sources.local import FileSource, Fingerprint

__all__ = ["LandedShards", "in_the_way"]


class _Shard(msgspec.Struct, frozen=True):
    url: str = ""
    validator: str | None = None
    """None: whatever lies there is not known to be whole, or not of which version."""
    fingerprint: Fingerprint | None = None
    """None: it has not landed."""
    is_synced: bool = False
    """It survives a power loss."""


class _Record(msgspec.Struct, frozen=True):
    boot: str
    shards: dict[str, _Shard]


class LandedShards(Lifetime):
    """The index of a model that is being fetched, and what is there of its files.

    Left without an error, the index is put in place. After an abort it is discarded with the files
    that have landed; else it is kept for the next attempt, if there is anything: that one file came
    as something else says nothing of the others.

    Args:
        path: where the index shall lie.
        index: what it says.
        limits: bounds of other indexes that lie there.
        durable: survive a power loss once it is in place.
        force: replace files of these names that are somebody else's.

    Raises:
        DiskError: there is one, and it is not to be replaced.
    """

    def __init__(
        self, path: str, index: Index, limits: Limits, *, durable: bool, force: bool
    ) -> None:
        self._directory = os.path.dirname(path)
        self._content = memoryview(index.raw)
        self._limits = limits
        self._durable = durable
        self._removes_indexes = force
        """Those that name an old model's files may still lie there."""
        self._file = ResumableFile(path, durable=durable)
        try:
            record = self._recorded(index.shards)
            known = record.shards
            if not force:
                self._check(name for name in index.shards if name not in known)
            if not is_same_boot(record.boot):
                known = {
                    name: _Shard(fingerprint=shard.fingerprint) for name, shard in known.items()
                }
            boot = Owner.current().boot
            self._record = _Record(boot, {name: known.get(name, _Shard()) for name in index.shards})
        except BaseException:
            self._file.keep()
            raise

    def _leave(self, error: BaseException | None) -> None:
        if error is None:
            try:
                self._put_in_place()
            except BaseException:
                self._file.keep()
                raise
        elif isinstance(error, Aborted):
            with contextlib.suppress(DiskError):
                self._remove(name for name in self._record.shards if self._is_ours(name))
            self._file.discard()
        elif any(os.path.lexists(self._path(name)) for name in self._record.shards):
            self._file.keep()
        else:
            self._file.discard()

    def is_here(self, name: str, source: HttpSource) -> bool:
        """Whether an earlier attempt has landed what the source now offers."""
        known = self._record.shards[name]
        if known.validator is None or (self._durable and not known.is_synced):
            return False
        return replace(known, is_synced=self._durable) == self._found(name, source)

    def make_way(self) -> None:
        """To be called before a file is put in place: no index may name old and new ones.

        From here on, what lies under the names of the files is known to be this fetch's.
        """
        if self._removes_indexes:
            self._remove(self._indexes(), is_synced=self._durable)
            self._removes_indexes = False
        self._write()

    def add(self, name: str, source: HttpSource, landed: Fingerprint) -> None:
        """A file has landed: this one, whatever has its name now."""
        self._record.shards[name] = _Shard(
            digest_of(source.remote.address.unsigned),
            source.remote.resource.etag,
            landed,
            self._durable,
        )
        self._write()

    @property
    def fingerprints(self) -> "dict[str, Fingerprint]":
        """Of the files that have landed, by their paths."""
        return {
            self._path(name): shard.fingerprint
            for name, shard in self._record.shards.items()
            if shard.fingerprint is not None
        }

    def _recorded(self, names: Iterable[str]) -> _Record:
        record = read_record(self._file, len(self._content), _Record)
        if record is not None:
            return record
        there = bytearray(len(self._content))
        is_whole = self._file.size == len(there) and self._file.read_into(0, memoryview(there))
        # An index that was only to be put in place: its files are known, not whether they are good.
        is_ours = is_whole and there == self._content
        return _Record(UNKNOWN_BOOT, {name: _Shard() for name in names} if is_ours else {})

    def _put_in_place(self) -> None:
        for name in self._record.shards:
            if not self._is_ours(name):
                raise DiskError(
                    f"{self._path(name)}: was changed since it landed: does another fetch write to "
                    "the same directory?"
                )
        self._file.write(0, self._content)
        self._file.truncate(len(self._content))
        self._file.commit()

    def _write(self) -> None:
        write_record(self._file, len(self._content), self._record)

    def _found(self, name: str, source: HttpSource) -> _Shard:
        with contextlib.suppress(OSError):
            status = os.lstat(self._path(name))
            if status.st_size == source.size:
                url = digest_of(source.remote.address.unsigned)
                found = Fingerprint.of(status)
                return _Shard(url, source.remote.resource.etag, found, self._durable)
        return _Shard()

    def _is_ours(self, name: str) -> bool:
        fingerprint = self._record.shards[name].fingerprint
        try:
            return fingerprint is not None and fingerprint.is_of(os.lstat(self._path(name)))
        except OSError:
            return False

    def _check(self, names: Iterable[str]) -> None:
        for name in names:
            if os.path.lexists(self._path(name)):
                raise in_the_way(self._path(name))

    def _indexes(self) -> list[str]:
        """The index that is there, and others that name a file of the same name."""
        found = [os.path.basename(self._file.path)]
        try:
            names = os.listdir(self._directory)
        except OSError as error:
            raise DiskError(
                f"{self._directory}: cannot be listed: {error.strerror}", errno=error.errno
            ) from error
        for name in names:
            if is_index_name(name) and name not in found:
                with (
                    contextlib.suppress(WeighlockError),
                    closing(FileSource(self._path(name))) as source,
                ):
                    named = read_index(source, self._limits).shards
                    if not self._record.shards.keys().isdisjoint(named):
                        found.append(name)
        return found

    def _remove(self, names: Iterable[str], *, is_synced: bool = False) -> None:
        disk = PosixDisk()
        with closing(Place(self._file.path, disk)) as place:
            for name in names:
                with (
                    place.errors("what is there cannot be removed"),
                    contextlib.suppress(FileNotFoundError),
                ):
                    disk.unlink(place.directory, name)
            if is_synced:
                place.sync_directory()

    def _path(self, name: str) -> str:
        return os.path.join(self._directory, name)


def in_the_way(path: str) -> DiskError:
    """The error for a file that would have to be replaced, while others of its model stay."""
    return DiskError(
        f"{path}: is in the way of a file of that name; name another directory, or pass force=True "
        "(--force), which replaces the files of the model one by one"
    )
