"""Fetch a model of many files, by the URL of its index: every shard in turn.

Knows which tensor lies in which file; how one file is fetched is `one`'s.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING

from weighlock.disk.effects import PosixDisk
from weighlock.disk.owner import MARK
from weighlock.disk.place import Place, make_directories
from weighlock.disk.spool import Spool
from weighlock.errors import FormatError, LayoutError, SourceError, WeighlockError
from weighlock.fetching.bases import is_copy
from weighlock.fetching.file_fetch import FetchOptions, FileFetch
from weighlock.fetching.filling import check_memory, into_arrays
from weighlock.fetching.gathering import choose, open_spread, save_chosen
from weighlock.fetching.landed_shards import LandedShards, in_the_way
from weighlock.formats.detect import open_catalog, open_source
from weighlock.formats.remote import noted
from weighlock.formats.sharded import INDEX_NAME, Index, ShardedRefs, read_index
from weighlock.formats.spooled import open_landed_shards
from weighlock.limits import Limits
from weighlock.sources.access import Address, shown
from weighlock.sources.http import HttpSource
from weighlock.sources.local import FileSource, Fingerprint
from weighlock.tensors.catalog import Catalog, unmatched
from weighlock.tensors.filling import targets_of

if TYPE_CHECKING:
    from weighlock.disk.lease import Lease
    from weighlock.tensors.ref import TensorRef

__all__ = ["fetch_sharded", "only", "shards_of"]

_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
"""An index chooses the names of the files that are written: it shall choose those of weights."""


def fetch_sharded(
    url: str,
    out: object | None,
    into: "str | os.PathLike[str] | Spool | None",
    patterns: Sequence[str] | None,
    base: Catalog | None,
    tell: Callable[[int, int], None] | None,
    how: FetchOptions,
) -> Catalog:
    """A sharded model: to memory, into arrays, or to files, of which the index comes last."""
    with closing(how.open(url)) as first:
        index = read_index(first, how.limits)
    if into is not None and patterns is None:
        return noted(_fetch_files(url, index, into, base, tell, how), first)
    with open_spread(url, how) as whole:
        chosen = choose(whole, patterns)
        if into is not None:
            return noted(save_chosen(into, chosen, how, tell), first)
        if out is None:
            check_memory(chosen.nbytes, how.limits)
            arrays = None
        else:  # all of it is checked before anything is asked for
            received = into_arrays(chosen, out, strict=patterns is None, cast=how.cast, lazily=True)
            arrays = targets_of(out)
        refs: dict[str, TensorRef] = {}
        before, total = 0, sum(ref.nbytes for ref in chosen.values())
        for shard, names in shards_of(index, patterns).items():
            there = sum(chosen[name].nbytes for name in names)
            told = _scaled(tell, before, there, total)
            with closing(how.open(Address.of(url).sibling(shard).url)) as source:
                one = FileFetch(source, only(names, shard), base, how)
                places = None if arrays is None else {name: arrays[name] for name in names}
                refs.update(one.fetch(places, None, told))
            before += there
        if out is not None:
            return noted(received.catalog, first)
        return noted(Catalog({name: refs[name] for name in chosen}, index.metadata), first)


def shards_of(index: Index, patterns: Sequence[str] | None = None) -> dict[str, list[str]]:
    """The files that hold these tensors, in order of their names, and which each of them holds.

    Raises:
        LayoutError: no name matches.
    """
    held: dict[str, list[str]] = {}
    for name, shard in index.weight_map.items():
        if patterns is None or any(fnmatchcase(name, pattern) for pattern in patterns):
            held.setdefault(shard, []).append(name)
    if patterns is not None and not held:
        raise unmatched(patterns)
    return {shard: held[shard] for shard in sorted(held)}


def only(names: Sequence[str], shard: str) -> Callable[[Catalog], Catalog]:
    """What chooses these tensors from the catalog of a shard."""

    def chosen(remote: Catalog) -> Catalog:
        for name in names:
            if name not in remote:
                raise LayoutError(
                    f"has no tensor {name!r}, which its index says it holds", source=shard
                )
        return remote.only(names)

    return chosen


def _fetch_files(
    url: str,
    index: Index,
    into: "str | os.PathLike[str] | Spool",
    base: Catalog | None,
    tell: Callable[[int, int], None] | None,
    how: FetchOptions,
) -> Catalog:
    address = Address.of(url)
    urls = {name: address.sibling(name).url for name in index.shards}
    if isinstance(into, Spool):
        total = _size_of_all(urls, how)
        into.reserve(total)
        return open_landed_shards(index, _to_spool(urls, total, into, base, tell, how), how.limits)
    _check_names(index, url)
    make_directories(into)
    path = os.path.join(into, os.path.basename(address.target.partition("?")[0]) or INDEX_NAME)
    if os.path.lexists(path) and not how.force:
        here = _here(path, index, urls, how)
        if here is None:
            raise in_the_way(path)
        return _opened(index, here, how.limits)
    landing = LandedShards(path, index, how.limits, durable=how.durable, force=how.force)
    before = 0
    with landing as landed:
        total = _size_of_all(urls, how)
        _reserve(into, index, total)
        for name, shard in urls.items():
            target = os.path.join(into, name)
            with closing(how.open(shard)) as source:
                told = _scaled(tell, before, source.size, total)
                if not landed.is_here(name, source):
                    landed.make_way()
                    with _base_at(target, base, source, how.limits) as mine:
                        there = FileFetch(source, None, mine, how).to_file(target, told)
                    there.close()
                    landed.add(name, source, there.fingerprint)
                elif told is not None:
                    told(1, 1)
                before += source.size
    return _opened(index, landed.fingerprints, how.limits)


def _opened(index: Index, fingerprints: Mapping[str, Fingerprint], limits: Limits) -> Catalog:
    """The catalog of files that are known: of others under their names, nothing is read."""
    places = {os.path.basename(path): os.path.abspath(path) for path in fingerprints}
    known = {places[os.path.basename(path)]: found for path, found in fingerprints.items()}
    refs = ShardedRefs(index.weight_map, places, limits, open_source, partial(_open_known, known))
    return Catalog(refs, index.metadata, refs.close, refs.shards)


def _open_known(known: Mapping[str, Fingerprint], path: str, *, hold: bool) -> FileSource:
    return FileSource(path, hold=hold, fingerprint=known[path])


def _check_names(index: Index, url: str) -> None:
    """Raise `LayoutError` unless files of these names can be nothing but weights."""
    for name in index.shards:
        if name.startswith(".") or not name.lower().endswith(_SUFFIXES):
            raise LayoutError(
                f"names the shard {name!r}: to be written to a directory, its name must end with "
                f"{', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]}, and not begin with a dot",
                source=shown(url),
            )


def _here(
    path: str, index: Index, urls: Mapping[str, str], how: FetchOptions
) -> dict[str, Fingerprint] | None:
    """The files of the whole model, if it lies there already, as its digests prove."""
    found: dict[str, Fingerprint] = {}
    try:
        with closing(FileSource(path)) as there:
            if there.size != len(index.raw) or read_index(there, how.limits).raw != index.raw:
                return None
        for name, shard in urls.items():
            file = os.path.join(os.path.dirname(path), name)
            # Before it is compared: one that comes later is another one.
            found[file] = FileSource(file, hold=False).fingerprint
            with closing(how.open(shard)) as source:
                if not is_copy(source, file):
                    return None
    except (SourceError, FormatError):
        return None
    return found


@contextmanager
def _base_at(
    path: str, base: Catalog | None, source: HttpSource, limits: Limits
) -> Iterator[Catalog | None]:
    """The model one has; else the file that is to be replaced, if it holds weights."""
    old = None
    if base is None and source.verifies and os.path.isfile(path):
        with suppress(WeighlockError):
            old = open_catalog(path, limits)
    with nullcontext(base) if old is None else old as mine:
        yield mine


def _size_of_all(urls: Mapping[str, str], how: FetchOptions) -> int:
    total = 0
    for shard in urls.values():
        with closing(how.open(shard)) as source:
            total += source.size
    return total


def _to_spool(
    urls: Mapping[str, str],
    total: int,
    spool: Spool,
    base: Catalog | None,
    tell: Callable[[int, int], None] | None,
    how: FetchOptions,
) -> "dict[str, Lease]":
    landed: dict[str, Lease] = {}
    before = 0
    for name, shard in urls.items():
        with closing(how.open(shard)) as source:
            told = _scaled(tell, before, source.size, total)
            landed[name] = FileFetch(source, None, base, how).to_spool(spool, told)
            before += source.size
    return landed


def _reserve(directory: "str | os.PathLike[str]", index: Index, total: int) -> None:
    """Raise `NoSpace` if the files cannot fit beside what an earlier attempt has left of them."""
    names = set(index.shards)
    here = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name in names or MARK in entry.name:
                with suppress(OSError):  # another fetch has just put it in its place
                    here += entry.stat(follow_symlinks=False).st_blocks * 512
    place = Place(os.path.join(directory, INDEX_NAME), PosixDisk())
    with closing(place):
        place.reserve(max(0, total - here))


def _scaled(
    tell: Callable[[int, int], None] | None, before: int, there: int, total: int
) -> Callable[[int, int], None] | None:
    """Progress of one file as progress of all: blocks it pulls may hold more than was wanted."""
    if tell is None:
        return None
    return lambda done, of: tell(before + done * there // max(of, 1), total)
