"""Tensors that do not lie as in a share, read one by one: checkpoints on plain servers.

What is wanted of a catalog is chosen here, too. Knows refs and where they shall go; how those that
lie as in a share are pulled is `one`'s.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from weighlock.disk.spool import Spool
from weighlock.fetching.filling import check_memory, into_arrays
from weighlock.formats.detect import open_catalog, open_source
from weighlock.formats.remote import open_url
from weighlock.tensors.catalog import Beside, Catalog, matching
from weighlock.tensors.convert import as_ref

if TYPE_CHECKING:
    import os

    from weighlock.fetching.file_fetch import FetchOptions
    from weighlock.tensors.arrays import Array
    from weighlock.tensors.ref import TensorRef

__all__ = [
    "Names",
    "choose",
    "fetch_spread",
    "gather",
    "open_spread",
    "save_chosen",
]

Names: TypeAlias = Sequence[str] | Callable[[Catalog], Catalog]
"""Glob patterns, or what chooses from a catalog."""


def open_spread(url: str, how: "FetchOptions") -> Catalog:
    """The catalog of what lies in files beside the one that a URL names."""
    return open_url(
        url, how.limits, open_source, access=how.access, verify=how.verify, abort=how.abort
    )


def fetch_spread(
    url: str,
    out: object | None,
    into: "str | os.PathLike[str] | Spool | None",
    names: "Names | None",
    tell: Callable[[int, int], None] | None,
    how: "FetchOptions",
) -> Catalog:
    """A distributed checkpoint: its whole tensors, put together as they are read."""
    with open_spread(url, how) as whole:
        fetched = gather(choose(whole, names), out, into, how, tell, strict=names is None)
        for note in whole.notes:
            fetched = fetched.noted(note)
        return fetched


def gather(
    chosen: Catalog,
    out: object | None,
    into: "str | os.PathLike[str] | Spool | None",
    how: "FetchOptions",
    tell: Callable[[int, int], None] | None,
    *,
    strict: bool,
) -> Catalog:
    """Read tensors one by one: into arrays, to a safetensors file or spool, or to memory.

    Args:
        chosen: the tensors.
        out: the arrays, if it is arrays.
        into: the file or spool, if it is that.
        how: what every file of one fetch has in common.
        tell: called with bytes here and bytes in all.
        strict: `out` must have a place for each, and no other.
    """
    if into is not None:
        return save_chosen(into, chosen, how, tell)
    count = how.counting(_bytes_by_name(chosen), tell)
    if out is not None:
        received = into_arrays(chosen, out, strict=strict, cast=how.cast, lazily=True)
        for each in received.later:
            each.fill()
            count(each.nbytes)
        return received.catalog
    check_memory(chosen.nbytes, how.limits)
    arrays: dict[object, Array] = {}
    refs: dict[str, TensorRef] = {}
    for name, ref in chosen.items():
        identity = ref.identity()
        if identity not in arrays:  # a tensor of several names is read once
            arrays[identity] = ref.load()
        refs[name] = as_ref(name, arrays[identity])
        count(ref.nbytes)
    return Catalog(refs, chosen.metadata, beside=Beside(groups=chosen.groups))


def save_chosen(
    into: "str | os.PathLike[str] | Spool",
    chosen: Catalog,
    how: "FetchOptions",
    tell: Callable[[int, int], None] | None,
) -> Catalog:
    """Copy tensors that do not lie as in a share, one by one."""
    from weighlock.formats.save import save

    count = how.counting(_bytes_by_name(chosen), tell)
    if isinstance(into, Spool):
        return save(into, chosen, progress=count, limits=how.limits)
    save(into, chosen, durable=how.durable, progress=count, limits=how.limits)
    return open_catalog(into, how.limits)


def choose(remote: Catalog, names: "Names | None") -> Catalog:
    """What is wanted of a catalog.

    Raises:
        LayoutError: no name matches.
    """
    if names is None:
        return remote
    if callable(names):
        return names(remote)
    return matching(remote, names)


def _bytes_by_name(catalog: Catalog) -> int:
    """Bytes of all tensors; of one with several names, once for each."""
    return sum(ref.nbytes for ref in catalog.values())
