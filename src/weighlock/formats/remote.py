"""Weights behind a URL: one file, or what names the files of a model. Reads headers only."""

import logging
import os
import random
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial

from weighlock.abort import Abort
from weighlock.errors import Aborted, TruncatedFile, WeighlockError
from weighlock.formats.sharded import (
    METADATA_NAME,
    OpenFile,
    ShardedRefs,
    is_index_name,
    read_index,
)
from weighlock.limits import Limits
from weighlock.sources.access import Access, Address
from weighlock.sources.base import Source
from weighlock.sources.http import HttpSource
from weighlock.sources.http_remote import Remote
from weighlock.sources.receipt import Receipt, Word
from weighlock.sources.resting import Resting
from weighlock.sources.retrying import Retrying
from weighlock.tensors.catalog import Catalog

__all__ = ["UNVERIFIED", "is_index", "is_metadata", "noted", "open_url"]

_log = logging.getLogger("weighlock")

_PATIENCE_S = 5.0
"""How long an owner that cannot be told of an end is tried again: somebody waits for `close`."""

_BRIEFLY_S = 0.4
"""How long an owner has to hear that somebody said stop."""

UNVERIFIED = "unverified: its server has no digests, so what it sends is taken as it comes"

_UNCHECKED = "unverified: its blocks were not checked against their digests, as was asked"


def is_index(url: str) -> bool:
    """Whether a URL names the index of a sharded model."""
    return is_index_name(_path(url))


def is_metadata(url: str) -> bool:
    """Whether a URL names the metadata of a distributed checkpoint."""
    return _path(url).endswith(f"/{METADATA_NAME}")


def _path(url: str) -> str:
    return Address.of(url).target.partition("?")[0]


def open_url(
    url: str,
    limits: Limits,
    open_source: Callable[[Source, Limits], Catalog],
    *,
    access: Access | None = None,
    verify: bool = True,
    abort: Abort | None = None,
) -> Catalog:
    """The catalog of what a URL names.

    Raises:
        TransferError, SourceError: it could not be had.
        FormatError: it is not in a format that can be read.
    """
    open_file = partial(
        _open_file, access=access, verify=verify, limits=limits, abort=abort, resting=Resting()
    )
    source = open_file(url, hold=True)
    open_beside = partial(_open_beside, Address.of(url).query_beside, open_file)
    try:
        if is_index(url):
            catalog = _open_index(source, url, limits, open_source, open_beside)
        elif is_metadata(url):
            from weighlock.formats.dcp import open_dcp_source

            place_of = partial(_url_beside, url)
            catalog = open_dcp_source(source, place_of, limits, open_beside)
            source.close()
        else:
            if not source.size:
                raise TruncatedFile("is empty", source=source.label)
            catalog = open_source(source, limits)
    except BaseException:
        source.close()
        raise
    catalog = noted(catalog, source)
    is_awaited = source.remote.resource.is_share and source.remote.address.holder is not None
    return _Ticketed(catalog, source) if is_awaited else catalog


class _Ticketed(Catalog):
    """A catalog whose owner waits for this receiver: closing it says that it has landed.

    Only the process that opened it speaks: a forked child that is through has not landed for it.
    """

    __slots__ = ("_pid", "_receipt", "_remote")

    def __init__(self, catalog: Catalog, source: HttpSource) -> None:
        self._take_over(catalog)
        self._remote = source.remote
        self._pid = os.getpid()
        self._receipt: Receipt | None = Receipt(source.remote)

    def _leave(self, error: BaseException | None) -> None:
        if error is not None:
            stopped = isinstance(error, (Aborted, GeneratorExit))
            self._say("aborted" if stopped else "failed", type(error).__name__)
        self.close()

    def close(self) -> None:
        self._say("landed")
        super().close()

    def _say(self, word: Word, cause: str = "") -> None:
        receipt, self._receipt = self._receipt, None
        if receipt is None or os.getpid() != self._pid:
            return
        patience_s = min(_PATIENCE_S, self._remote.limits.patience_s)
        retrying = Retrying(patience_s, time.monotonic, random.random)
        with closing(receipt):
            if self._remote.abort.is_set and word != "landed":
                # Said once: who said stop waits for no more, and no longer than that takes.
                receipt.try_to_say(word, cause=cause, within_s=_BRIEFLY_S)
                return
            try:
                self._remote.persist(lambda: receipt.say(word, cause=cause), retrying)
            except WeighlockError as error:
                _log.warning("%s: its owner could not be told %r: %s", receipt.name, word, error)


def noted(catalog: Catalog, source: HttpSource) -> Catalog:
    """The catalog, with a note if what came from that source was not verified."""
    if source.verifies:
        return catalog
    return catalog.noted(_UNCHECKED if source.remote.resource.is_share else UNVERIFIED)


def _open_index(
    source: HttpSource,
    url: str,
    limits: Limits,
    open_source: Callable[[Source, Limits], Catalog],
    open_file: OpenFile,
) -> Catalog:
    index = read_index(source, limits)
    source.close()
    places = {name: _url_beside(url, name) for name in index.shards}
    refs = ShardedRefs(index.weight_map, places, limits, open_source, open_file)
    catalog = Catalog(refs, index.metadata, refs.close, refs.shards)
    # What lies beside it nobody can list: there may be shards that hold all of the model.
    return catalog if index.weight_map else catalog.noted("its index lists no tensors")


def _url_beside(url: str, name: str) -> str:
    """Where a file lies; without a query, as errors may name it."""
    return Address.of(url).sibling(name).url.partition("?")[0]


def _open_beside(query: str, open_file: OpenFile, place: str, *, hold: bool) -> Source:
    return open_file(place + query, hold=hold)


def _open_file(
    url: str,
    *,
    hold: bool,
    access: Access | None,
    verify: bool,
    limits: Limits,
    abort: Abort | None,
    resting: Resting,
) -> HttpSource:
    # Not the first ones hold something for good, but those that were used last for a while.
    remote = Remote(url, access=access, verify=verify, limits=limits, abort=abort)
    return HttpSource(remote, resting)
