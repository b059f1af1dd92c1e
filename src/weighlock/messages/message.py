"""Objects as messages: `pack` to bytes that hold URLs in place of tensors, `unpack` back to refs.

No connection is made and nothing is offered here. `pack` gives a draft that knows which tensors
somebody must offer; sealed with the URL under which they are, it is a message. A ref that came in a
message and was not fetched packs as itself: same owner, same URL, same bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from weighlock.errors import LocalProtocolError, MessageInvalid, SourceError
from weighlock.formats.virtual import place_all
from weighlock.joining import join_buffers
from weighlock.limits import Limits
from weighlock.messages.codecs import DEFAULT, Registry
from weighlock.messages.decoding import Build
from weighlock.messages.encoding import Walk
from weighlock.messages.table import Tensors
from weighlock.messages.wire import Envelope, join, read, read_root, write_root
from weighlock.sources.access import Access, Address, shown
from weighlock.sources.ticket import Tickets
from weighlock.tensors.catalog import Catalog
from weighlock.tensors.stored import Readable

__all__ = ["THRESHOLD_BYTES", "Draft", "pack", "unpack"]

THRESHOLD_BYTES = 65_536
"""Tensors from this size on are offered, smaller ones ride in the message."""


@dataclass(frozen=True, slots=True, repr=False)
class Draft:
    """A message that lacks one thing: the URL under which its tensors are offered."""

    tensors: Catalog
    """What must be offered, as a share of exactly this; empty if nothing must."""
    file_bytes: int
    """The size of that share's file."""
    _envelope: Envelope
    _hole: int | None
    """Which of the envelope's owners the URL is for."""
    _segments: tuple[memoryview, ...]
    _limits: Limits = field(default_factory=Limits)

    def __repr__(self) -> str:
        return f"<Draft with {len(self.tensors)} tensors to offer>"

    def seal(self, url: str | None = None) -> bytes:
        """The message, with the URL of a share of `tensors`; without one if there are none."""
        return join_buffers(self.parts(url))

    def parts(self, url: str | None = None) -> list[bytes | memoryview]:
        """The message as buffers for `sendmsg`; tensors in it are views of their arrays.

        Raises:
            LocalProtocolError: there are tensors to offer, and no URL, or what is none.
            LimitExceeded: the tree is larger than receivers take.
        """
        envelope = self._envelope
        if self._hole is not None:
            if not url:
                raise LocalProtocolError(
                    f"{len(self.tensors)} tensors must be offered: seal(url) takes the URL of a "
                    "share of draft.tensors; server.pack does both"
                )
            try:
                Address.of(url)
            except SourceError as error:
                raise LocalProtocolError(
                    f"seal: {shown(url)!r} is not the URL of a share of draft.tensors: {error}"
                ) from error
            urls = [*envelope.urls]
            urls[self._hole] = url
            envelope = envelope._replace(urls=urls)
        return join(envelope, self._segments, self._limits)


def pack(
    obj: object,
    *,
    threshold_bytes: int | None = THRESHOLD_BYTES,
    registry: Registry | None = None,
    limits: Limits | None = None,
) -> Draft:
    """Take an object apart into a small message and the tensors it refers to.

    Args:
        obj: None, bools, numbers, text, bytes, times, lists, tuples, sets, dicts, numpy scalars and
            dtypes, torch sizes and dtypes, registered types; and as tensors numpy arrays, torch
            tensors, refs and catalogs. Arrays must not be written before the message is sent.
        threshold_bytes: tensors of so many bytes are to be offered, smaller ones ride along; 0: all
            are offered, None: all ride along. Refs into shares of others always stay refs.
        registry: the types that travel; the default one if not given.
        limits: bounds of the tree.

    Raises:
        CodecRefused: something in it does not travel; says what and where.
        LimitExceeded: it is nested too deep, or without end.
    """
    limits = limits or Limits()
    walk = Walk(DEFAULT if registry is None else registry, threshold_bytes, limits)
    root = write_root(walk.node(obj))
    tensors = Catalog(walk.own)
    # No two are tied: the walk has met each once. What a share makes of them is the same file.
    placed = place_all(tensors, {}, tied="copy", limits=limits) if walk.own else None
    offsets = {s.ref.name: s.span.offset for s in placed.segments} if placed is not None else {}
    file_bytes = 0 if placed is None else placed.size
    hole = walk.owners.get(None)
    owners = [owner or ("", file_bytes) for owner in walk.owners]
    rows = walk.rows
    envelope = Envelope(
        urls=[url for url, _ in owners],
        sizes=[size for _, size in owners],
        names=[row.name for row in rows],
        dtypes=[row.spec.dtype.value for row in rows],
        ranks=[len(row.spec.shape) for row in rows],
        dims=[size for row in rows for size in row.spec.shape],
        owners=[row.owner for row in rows],
        offsets=[
            offsets[row.spec.name] if row.owner == hole else row.offset
            for row in rows
            if row.owner is not None
        ],
        root=root,
    )
    return Draft(tensors, file_bytes, envelope, hole, tuple(walk.segments), limits)


def unpack(
    body: "bytes | bytearray | memoryview",
    *,
    access: Access | None = None,
    registry: Registry | None = None,
    limits: Limits | None = None,
    open_ticket: Callable[[str, int], Readable] | None = None,
) -> Any:
    """The object of a message, with refs in place of tensors that were offered. Opens nothing.

    Args:
        body: the message. Arrays that rode along are views of it: they keep it alive, and are
            read-only if it is.
        access: the hosts its refs may dial when they are read (`Access(allow=[…])`); none if not
            given. Who only passes refs on needs no access.
        registry: the types that are taken; the default one if not given.
        limits: how long, how large and how deep the tree may be.
        open_ticket: gives the source of a URL and a file's size; opens nothing by itself.

    Raises:
        MessageInvalid: the bytes are not a message, or hold what is not registered here.
        LimitExceeded: its tree is larger or deeper than allowed.
    """
    limits = limits or Limits()
    try:
        view = memoryview(body).cast("B")
    except TypeError as error:
        raise MessageInvalid(f"a message is bytes, not a {type(body).__name__}") from error
    envelope, end = read(view, limits)
    open_ticket = open_ticket or Tickets(access, limits)
    tensors = Tensors(view, end, envelope, open_ticket, limits)
    registry = DEFAULT if registry is None else registry
    return Build(tensors, registry).build(read_root(envelope.root))
