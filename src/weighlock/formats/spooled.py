"""Catalogs of what has landed in a spool. Knows leases and formats; landing is the caller's."""

import os
from collections.abc import Callable, Mapping
from functools import partial

from weighlock.disk.atomic import AtomicFile
from weighlock.disk.directory import AtomicDirectory
from weighlock.disk.handover import placed
from weighlock.disk.lease import Lease
from weighlock.formats.detect import open_catalog, open_source
from weighlock.formats.sharded import INDEX_NAME, Index, ShardedRefs
from weighlock.limits import Limits
from weighlock.sources.leased import LeasedSource
from weighlock.sources.local import FileSource
from weighlock.tensors.catalog import Catalog

__all__ = ["open_landed", "open_landed_shards"]


def open_landed(lease: Lease, limits: Limits | None = None) -> Catalog:
    """The catalog of a file that landed in a spool. The file lives as long as the refs.

    Raises:
        FormatError: it is not what it should be; the file is gone then.
        SpoolClosed: the spool was closed.
    """
    limits = limits or Limits()
    source = LeasedSource(lease)
    try:
        return open_catalog(source, limits).keeping(partial(_keep, lease, limits))
    except BaseException:
        source.close()
        raise


def _keep(lease: Lease, limits: Limits, path: "str | os.PathLike[str]", durable: bool) -> Catalog:
    if placed(lease, path, durable=durable):
        lease.moved(os.path.abspath(path))
    return open_catalog(path, limits)


def open_landed_shards(
    index: Index, leases: Mapping[str, Lease], limits: Limits | None = None
) -> Catalog:
    """The catalog of a model whose files all landed in a spool; every one is looked into.

    Raises:
        FormatError: a file is not what the index says; all are gone then.
        SpoolClosed: the spool was closed.
    """
    limits = limits or Limits()
    refs = _LeasedShards(index.weight_map, leases, limits)
    try:
        for lease in leases.values():  # as a fetch to a directory does, one at a time
            source = LeasedSource(lease)
            try:
                open_source(source, limits)
            finally:
                source.shut()
    except BaseException:
        refs.close()
        raise
    keep = partial(_keep_shards, index, leases, limits)
    return Catalog(refs, index.metadata, refs.close, refs.shards, keep=keep)


class _LeasedShards(ShardedRefs):
    """Refs over shards in a spool. A pickle of it holds no leases, only where the files lie."""

    def __init__(
        self, weight_map: Mapping[str, str], leases: Mapping[str, Lease], limits: Limits
    ) -> None:
        self._leases = {lease.path: lease for lease in leases.values()}
        places = {name: lease.path for name, lease in leases.items()}
        super().__init__(weight_map, places, limits, open_source, self._open_leased)

    def _open_leased(self, path: str, *, hold: bool) -> LeasedSource:
        return LeasedSource(self._leases[path], hold=hold)

    def __reduce__(self) -> "tuple[Callable[..., ShardedRefs], tuple[object, ...]]":
        return ShardedRefs, (self._weight_map, self._places, self._limits, open_source, FileSource)

    def close(self) -> None:
        """Let every file go."""
        super().close()
        for lease in self._leases.values():
            lease.release()


def _keep_shards(
    index: Index,
    leases: Mapping[str, Lease],
    limits: Limits,
    path: "str | os.PathLike[str]",
    durable: bool,
) -> Catalog:
    with AtomicDirectory(path, durable=durable) as directory:
        moved = {
            name: lease
            for name, lease in leases.items()
            if placed(lease, directory.path_of(name), durable=durable, staged=True)
        }
        with AtomicFile(directory.path_of(INDEX_NAME), durable=durable, staged=True) as file:
            file.write(0, memoryview(index.raw))
    for name, lease in moved.items():
        lease.moved(os.path.abspath(os.path.join(path, name)))
    return open_catalog(path, limits)
