"""Fetch what an object refers to: every owner is dialled once, for all that is wanted of it.

Knows which refs belong together and what takes their place; pulling is `fetch`'s. Nobody is dialled
before it is clear that all of them may be.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any, Literal

from blake3 import blake3

from weighlock.abort import Abort
from weighlock.disk.place import make_directories
from weighlock.disk.spool import Spool
from weighlock.errors import MessageInvalid
from weighlock.fetching.bases import Base, opened_base
from weighlock.fetching.file_fetch import FetchOptions, FileFetch
from weighlock.fetching.filling import check_memory
from weighlock.fetching.reporting import Reporting
from weighlock.limits import Limits
from weighlock.messages.codecs import DEFAULT, Registry
from weighlock.messages.walking import replace_refs
from weighlock.sources.access import Access
from weighlock.sources.http import HttpSource
from weighlock.sources.ticket import Tickets, TicketSource
from weighlock.tensors.catalog import Catalog
from weighlock.tensors.ref import TensorRef
from weighlock.tensors.spec import Span
from weighlock.tensors.stored import StoredRef
from weighlock.tensors.torch import TorchRef, from_array

__all__ = ["resolve"]


def resolve(
    obj: object,
    *,
    into: "str | os.PathLike[str] | Spool | None" = None,
    base: "Base | None" = None,
    tensors: Literal["numpy", "torch"] = "numpy",
    access: Access | None = None,
    abort: Abort | None = None,
    progress: Callable[[int, int], None] | None = None,
    connections: int = 4,
    durable: bool = True,
    confirm: bool = True,
    registry: Registry | None = None,
    limits: Limits | None = None,
) -> Any:
    """Fetch every tensor an object refers to.

    Args:
        obj: what `unpack` gave, or any object of dicts, lists, tuples, catalogs and registered
            types with refs in it. It is not changed.
        into: a directory in which each owner's tensors become a file, or a spool, where they go
            with their last ref; to memory if not given. A file that an earlier call has put in that
            directory is never changed: refs to it stay good, and the same tensors are not fetched
            again.
        base: a model one has, as a catalog, arrays or a path: blocks that are the same in its
            tensors of the same names are not pulled.
        tensors: what takes the place of refs in memory.
        access: the hosts that may be dialled, instead of what `unpack` was told.
        abort: `abort.set()` in any thread ends this with `Aborted`.
        progress: called with bytes here and bytes in all, from any thread.
        connections: requests under way at once.
        durable: survive a power loss once this returns, with `into`.
        confirm: tell owners that wait for this receiver that it has landed; a warning is logged if
            one could not be told. Who will fetch more of the same message says False, and
            `weighlock.done(obj)` at the end.
        registry: the types to look into; the default one if not given.
        limits: timeouts, patience, bounds of what may come.

    Returns:
        The object with arrays in place of its refs. With `into`, with refs to what is now on disk;
        refs to what was here already stay. Catalogs stay catalogs.

    Raises:
        Refused: a ref names a host that is not allowed. Nobody has been dialled then.
        LimitExceeded: the tensors do not fit into memory. Likewise. Or what an owner has, or the
            object itself, asks for more than `limits` allow.
        TransferError, RemoteProtocolError, FormatError, SourceError, DiskError: as `fetch`.
        MessageInvalid: an owner has something else than the ref says.
    """
    limits = limits or Limits()
    registry = DEFAULT if registry is None else registry
    how = FetchOptions(
        access=access,
        abort=abort or Abort(),
        connections=connections,
        durable=durable,
        limits=limits,
        keeps=True,
    )
    found = _Found()
    replace_refs(obj, found.note, registry, limits)
    if into is None:
        check_memory(found.nbytes + found.remote_bytes, limits)
    landed: dict[tuple[object, Span], TensorRef] = {}
    with ExitStack() as stack:
        known = stack.enter_context(opened_base(base, limits))
        if isinstance(into, Spool):
            how = replace(how, abort=stack.enter_context(into.aborting(how.abort)))
        opened = [
            (wanted, stack.enter_context(closing(_connect(source, how))))
            for source, wanted in found.by_owner.items()
        ]
        before = 0
        for wanted, source in opened:
            tell = _within(progress, before, wanted.nbytes, found.remote_bytes)
            place = None if into is None else _place(into, wanted)
            one = FileFetch(source, wanted.choose, known, how)
            if confirm:
                with Reporting(source, None, tell) as reporting:
                    catalog = one.fetch(None, place, reporting.told)
                reporting.warn_if_unconfirmed()
            else:
                catalog = one.fetch(None, place, tell)
            for span, name in wanted.names.items():
                landed[wanted.source, span] = catalog[name]
            before += wanted.nbytes
    kept = _Kept(landed, on_disk=into is not None, as_torch=tensors == "torch")
    return replace_refs(obj, kept.value, registry, limits, kept.ref)


def _connect(source: "HttpSource | TicketSource", how: FetchOptions) -> HttpSource:
    if isinstance(source, TicketSource):
        return source.connect(how.access, how.abort)
    # Whoever opened it chose to; it is dialled again, so that it can be aborted and closed.
    own = TicketSource(source.ticket or "", source.size, Tickets(limits=how.limits))
    access = how.access or source.remote.connections.access
    return own.connect(access, how.abort, is_chosen=True)


def _place(into: "str | os.PathLike[str] | Spool", wanted: "_Wanted") -> "str | Spool":
    """A file for what is wanted of an owner: the same for the same, so that it is taken up again.

    Another one for other tensors of the same share: there may be refs to those that came before.
    """
    if isinstance(into, Spool):
        return into
    ticket: str = wanted.source.ticket or ""
    make_directories(into)
    spans = sorted((span.offset, span.length) for span in wanted.refs)
    name = blake3(repr((ticket.partition("#")[0], spans)).encode()).hexdigest(16)
    return os.path.join(into, f"share-{name}.safetensors")


def _within(
    tell: Callable[[int, int], None] | None, before: int, most: int, total: int
) -> Callable[[int, int], None] | None:
    if tell is None:
        return None
    # Blocks hold more than what is wanted of them.
    return lambda done, whole: tell(before + (most * done // whole if whole else most), total)


class _Wanted:
    """What is wanted of one owner."""

    def __init__(self, source: "HttpSource | TicketSource") -> None:
        self.source = source
        self.refs: dict[Span, StoredRef] = {}
        self.names: dict[Span, str] = {}
        """What the owner calls them."""

    @property
    def nbytes(self) -> int:
        return sum(span.length for span in self.refs)

    def choose(self, remote: Catalog) -> Catalog:
        """The tensors of the share that the refs mean."""
        there = {ref.span: ref for ref in remote.values() if isinstance(ref, StoredRef)}
        for span, ref in self.refs.items():
            found = there.get(span)
            if found is None or (found.dtype, found.shape) != (ref.dtype, ref.shape):
                what = "nothing" if found is None else f"{found.dtype} {list(found.shape)}"
                raise MessageInvalid(
                    f"tensor {ref.name!r} is said to be {ref.dtype} {list(ref.shape)} at byte "
                    f"{span.offset:,} of {self.source.label}, which has {what} there"
                )
            self.names[span] = found.name
        return remote.only(self.names.values())


class _Found:
    """The refs of an object: those of shares by owner, and the bytes of all others."""

    def __init__(self) -> None:
        self.by_owner: dict[HttpSource | TicketSource, _Wanted] = {}
        self.nbytes = 0

    @property
    def remote_bytes(self) -> int:
        return sum(wanted.nbytes for wanted in self.by_owner.values())

    def note(self, ref: TensorRef) -> TensorRef:
        source, span = _share_of(ref)
        if source is not None and span is not None:
            if span.length:
                wanted = self.by_owner.setdefault(source, _Wanted(source))
                wanted.refs[span] = ref  # type: ignore[assignment]
        elif isinstance(ref, StoredRef):
            self.nbytes += ref.nbytes
        return ref


def _share_of(ref: TensorRef) -> "tuple[HttpSource | TicketSource | None, Span | None]":
    if isinstance(ref, StoredRef) and isinstance(ref.source, (HttpSource, TicketSource)):
        span = ref.contiguous_span
        if ref.source.ticket is not None and span is not None:
            return ref.source, span
    return None, None


class _Kept:
    """What takes the place of refs."""

    def __init__(
        self, landed: dict[tuple[object, Span], TensorRef], *, on_disk: bool, as_torch: bool
    ) -> None:
        self._landed = landed
        self._on_disk = on_disk
        self._as_torch = as_torch
        self._values: dict[object, object] = {}

    def ref(self, ref: TensorRef) -> TensorRef:
        """A ref to what is here now."""
        source, span = _share_of(ref)
        if source is None or span is None or not span.length:
            return ref
        here = self._landed[source, span]
        return here if here.name == ref.name else here.renamed(ref.name)

    def value(self, ref: TensorRef) -> object:
        """What stands for a ref outside catalogs; tied ones stay one."""
        if self._on_disk:
            return self.ref(ref)
        identity = ref.identity() if ref.nbytes else id(ref)
        if identity not in self._values:
            here = self.ref(ref)
            if not self._as_torch:
                self._values[identity] = here.load()
            elif isinstance(here, TorchRef) or here.dtype.is_packed:
                self._values[identity] = here.torch()
            else:
                self._values[identity] = from_array(here.load())
        return self._values[identity]
