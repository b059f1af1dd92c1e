"""The server: shares tensors over HTTP. Knows shares and requests; its neighbours know sockets."""

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, Unpack

from weighlock.disk.spool import Spool
from weighlock.errors import LocalProtocolError, TransferTimeout
from weighlock.lifetimes import Lifetime
from weighlock.limits import Budget, Limits, check_number
from weighlock.sharing.answering import Answering
from weighlock.sharing.binding import check_address, server_tls, shake_hands, under_tls
from weighlock.sharing.board import Board
from weighlock.sharing.conversation import Conversation
from weighlock.sharing.destination import Directory, InSpool
from weighlock.sharing.identity import etag_of
from weighlock.sharing.inbox import Inbox
from weighlock.sharing.inbox_routes import find_inbox
from weighlock.sharing.listening import Listener, Peer
from weighlock.sharing.metrics import Family, Meters
from weighlock.sharing.observing import families
from weighlock.sharing.offer import Offer, Ticketing
from weighlock.sharing.offers import Offers
from weighlock.sharing.packing import Packed, PackOptions, pack_and_share
from weighlock.sharing.page import Page, check_token
from weighlock.sharing.routes import (
    find,
)
from weighlock.sharing.share import Life, Outcome
from weighlock.sharing.shared import Share
from weighlock.sharing.tickets import check_name
from weighlock.tensors.spec import SpecsLike, TensorSpec
from weighlock.transfer.contents import Contents
from weighlock.transfer.digests import Digests
from weighlock.transfer.kept import Kept
from weighlock.transfer.layout import lay_out
from weighlock.transfer.upstream import Upstreams

__all__ = ["Server"]

_log = logging.getLogger("weighlock.server")

_KEY_BYTES = 32
"""Of a keyed BLAKE3."""


class Server(Lifetime):
    """Offers tensors to receivers that pull them.

    Args:
        host: the address to bind; the machine itself only, if not given.
        port: the port, 0 for any.
        public_url: what others call this server, as in `"https://weights.example:8400"`; needed if
            the bound address is not one they can dial.
        tls_cert: file of the certificate (chain) to serve TLS with.
        tls_key: file of its key, if that is not in the same file.
        client_ca: file of the certificates whose holders may connect; anybody if not given.
        insecure: allow an address that others can reach without TLS.
        directory: where tensors are laid down that must be gathered first; the system's temporary
            directory if not given.
        key: 32 secret bytes that tickets with names are made with; with the same ones they are good
            for a server that was started again.
        page: show a page to watch it by, at `page_url`, and metrics at `/metrics`; a text of
            16 to 128 letters, digits or ._~+/=- is the token that guards both; True lets one be
            made.
        limits: connections, timeouts, sizes.
        start: answer at once. A server that takes the place of another should offer what that did,
            and be started then: who comes back too early would be told that there is nothing.

    Raises:
        Refused: the address can be reached by others, and there is no TLS.
        LocalProtocolError: what was given does not go together, or cannot be an address.
        DiskError: the address cannot be bound: its port is taken, or it is not this machine's;
            `errno` says which.
        SourceError: the certificate cannot be read.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        public_url: str | None = None,
        tls_cert: str | None = None,
        tls_key: str | None = None,
        client_ca: str | None = None,
        insecure: bool = False,
        directory: str | None = None,
        key: bytes | None = None,
        page: bool | str = False,
        limits: Limits | None = None,
        start: bool = True,
    ) -> None:
        token = check_token(page) if isinstance(page, str) else secrets.token_hex(16)
        self._limits = limits or Limits()
        self._directory = directory
        self._tls = server_tls(tls_cert, tls_key, client_ca)
        check_address(host, public_url, is_open=insecure or self._tls is not None)
        self._offers = Offers(self._limits)
        self._budget = Budget(self._limits.budget_bytes)
        self._kept = Kept(self._limits.gathered_bytes)
        self._board, self._meters = Board(), Meters()
        self._page = None if page is False else Page(token, self._board, self._families)
        self._key = secrets.token_bytes(_KEY_BYTES) if key is None else _checked(key)
        self._pid = os.getpid()
        self._answering = Answering(self._offers, self._key, self._limits, self._budget, self._page)
        self._started = threading.Event()
        self._has_started = False
        self._listener = Listener(host, port, self._serve, self._limits, is_plain=self._tls is None)
        scheme = "http" if self._tls is None else "https"
        shown_host = f"[{host}]" if ":" in host else host
        self.url = (public_url or f"{scheme}://{shown_host}:{self._listener.port}").rstrip("/")
        """What others call this server."""
        self.page_url = None if self._page is None else f"{self.url}/#token={token}"
        """Where a person can watch it, with the token in the fragment; None if there is no page."""
        if start:
            self.start()

    def start(self) -> None:
        """Answer, also those who have connected before. Idempotent."""
        self._has_started = True
        self._started.set()

    def __repr__(self) -> str:
        if self._answering.is_stopping:
            return f"<Server {self.url}, closed>"
        return f"<Server {self.url} with {len(self._offers)} shares and inboxes>"

    def _leave(self, error: BaseException | None) -> None:
        self.close()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._listener.port

    def close(self, grace_s: float = 5.0) -> None:
        """Stop: replies on their way get so long to finish. Idempotent."""
        self._answering.is_stopping = True
        self._started.set()  # who waits is let go
        self._listener.close(grace_s, self._cut)
        if os.getpid() == self._pid:  # a forked child has its own copy, and no say
            self._offers.close()

    def share(
        self,
        tensors: Mapping[str, object],
        *,
        metadata: Mapping[str, str] | None = None,
        snapshot: bool = False,
        tied: Literal["copy", "alias"] = "alias",
        receivers: Iterable[str] = (),
        expires_s: float | None = None,
        idle_s: float | None = 600.0,
        on_done: Callable[[Outcome], object] | None = None,
        cacheable: bool = False,
        title: str = "",
        share_id: str | None = None,
    ) -> Share:
        """Offer tensors. Nothing is copied, unless it must be gathered.

        Args:
            tensors: a catalog, or names and arrays, torch tensors or refs. Arrays are hashed before
                this returns, and must not be written until the share is over.
            metadata: text beside the tensors; a catalog's own is kept if this is not given.
            snapshot: copy arrays while hashing; they may be written as soon as this returns.
            tied: offer tensors that are the same view once, with the other names in the metadata
                (`"alias"`), or once for each name.
            receivers: names of those it is for: each has a ticket, `share.url_for(name)`, and the
                share is over when each has landed, failed, aborted or been lost.
            expires_s: how long it lasts at the most.
            idle_s: a receiver that has begun and is not heard for so long is lost; a share without
                named receivers is over so long after the last request. None: never. Who never
                came is waited for until the share expires or is revoked.
            on_done: called once with the outcome when it is over, from the thread that ended it.
            cacheable: let caches in front of this server keep it.
            title: what people call it, on the page.
            share_id: 32 hex digits that name it, also after a restart; random if not given.

        Raises:
            LayoutError, UnsupportedDType: they cannot lie in a safetensors file.
            LimitExceeded: there are too many shares, or they keep too much in memory.
            LocalProtocolError: the server is closed, or another process's; a receiver's name or
                the id cannot be one; a share of that id is there.
            SourceError, DiskError: a tensor that must be gathered cannot be read, or laid down.
        """
        self._check_process()
        _check_life(expires_s, idle_s, on_done)
        is_named = bool(share_id)
        share_id = share_id or secrets.token_hex(16)
        if find(f"/s/{share_id}/digests/0") is None:
            raise LocalProtocolError("share_id must be 32 lower-case hex digits")
        names = self._names(receivers)
        limits = self._limits
        file = lay_out(tensors, metadata, tied=tied, limits=limits)
        contents = Contents(file, directory=self._directory, limits=limits, kept=self._kept)
        pinned = contents.pinned_bytes
        number = self._board.next_number()
        try:
            self._offers.check_room(pinned)
            contents.gather_all()
            if snapshot:
                contents.copy_memory()
            digests = Digests(contents)
            if pinned:  # what lies in files is hashed when it is asked for
                digests.hash_all()
            contents.forward(Upstreams(limits))
            share = Share(
                Ticketing(self._key, share_id, f"{self.url}/s/{share_id}/model.safetensors"),
                contents,
                # It begins now: what was hashed for minutes has not been idle for minutes.
                Life(time.monotonic, receivers=names, expires_s=expires_s, idle_s=idle_s),
                digests=digests,
                etag=etag_of(share_id, file, digests) if is_named else None,
                budget=self._budget,
                cacheable=cacheable,
                forget=lambda share: self._forget(share_id, number, share),
                on_done=on_done,
                title=title,
                label=f"share {number}",
            )
            self._offers.add(share_id, share, pinned)
        except BaseException:
            contents.close()
            raise
        self._board.put(number, share)
        _log.info("share %d: %d tensors, %d bytes", number, share.tensors, share.size)
        return share

    def inbox(
        self,
        senders: Iterable[str] = (),
        *,
        into: "str | os.PathLike[str] | Spool",
        specs: "SpecsLike | None" = None,
        quota_bytes: int | None = None,
        expires_s: float | None = None,
        idle_s: float | None = 600.0,
        on_done: Callable[[Outcome], object] | None = None,
        durable: bool = True,
        inbox_id: str | None = None,
    ) -> Inbox:
        """Make a place to push tensors to, for senders that cannot be dialled.

        Args:
            senders: names of those who may push, each once: each has a ticket,
                `inbox.url_for(name)`, and the inbox is over when each has landed, failed, aborted
                or been lost. Without names, whoever has its URL may push.
            into: the directory that takes a file of each, named after the sender; or a spool, where
                each lives as long as the catalog that iterating gives of it.
            specs: the tensors that are expected, as specs or `(name, dtype, shape)`, or as what
                has them by name: a catalog, a state dict. Anything else is refused before its data.
            quota_bytes: longest file that one sender may push.
            expires_s: how long it lasts at the most.
            idle_s: a sender not heard for so long is lost; without names, the inbox is over so long
                after the last request. None: never.
            on_done: called once with the outcome when it is over.
            durable: what has landed in a directory survives a power loss.
            inbox_id: 32 hex digits that name it; random if not given.

        Raises:
            LimitExceeded: there are too many shares and inboxes.
            LocalProtocolError: the server is closed, or another process's; a sender's name or the
                id cannot be one; an inbox of that id is there.
            LayoutError: something in `specs` is none.
            DiskError: the directory is not there and cannot be made.
        """
        self._check_process()
        _check_life(expires_s, idle_s, on_done)
        if quota_bytes is not None:
            check_number("quota_bytes", quota_bytes)
        inbox_id = inbox_id or secrets.token_hex(16)
        if find_inbox(f"/i/{inbox_id}/senders/x") is None:
            raise LocalProtocolError("inbox_id must be 32 lower-case hex digits")
        expected = None
        if specs is not None:
            expected = {spec.name: spec for spec in TensorSpec.several(specs)}
        life = Life(
            time.monotonic, receivers=self._names(senders), expires_s=expires_s, idle_s=idle_s
        )
        self._offers.check_room()
        number = self._board.next_number()
        inbox = Inbox(
            Ticketing(self._key, inbox_id, f"{self.url}/i/{inbox_id}"),
            life,
            destination=(
                InSpool(into, self._limits)
                if isinstance(into, Spool)
                else Directory(into, durable, self._limits)
            ),
            specs=expected,
            quota_bytes=quota_bytes,
            limits=self._limits,
            forget=lambda inbox: self._forget(inbox_id, number, inbox),
            on_done=on_done,
            label=f"inbox {number}",
        )
        self._offers.add(inbox_id, inbox)
        self._board.put(number, inbox)
        return inbox

    def pack(self, obj: object, **options: Unpack[PackOptions]) -> Packed:
        """An object as a message, whose large tensors this server offers.

        Args:
            obj: anything that travels; see `weighlock.pack`. Arrays that are offered must not be
                written until the share is over, those that ride along until the message is sent.
            options: `threshold_bytes`: tensors of so many bytes are offered, smaller ones ride
                along (65,536 if not given; 0: all are offered, None: all ride along). `registry`:
                the types that travel. `limits`: bounds of the tree. `receivers`, `expires_s`,
                `idle_s`, `on_done`, `snapshot`: of the share, as in `share`.

        Returns:
            The message, for each receiver with its own ticket, and the share of what it refers to.

        Raises:
            CodecRefused: something in it does not travel; says what and where.
            LimitExceeded, LocalProtocolError, LayoutError, SourceError, DiskError: as `share`.
            TypeError: there is no such option.
            After any of them nothing is offered.
        """
        return pack_and_share(self, obj, **options)

    def _cut(self) -> None:
        """Nobody who serves waits for other servers any more."""
        for offer in self._offers:
            if isinstance(offer, Share):
                offer.contents.stop_waiting()

    def _forget(self, offer_id: str, number: int, offer: Offer) -> None:
        self._offers.forget(offer_id, offer)
        self._board.take_down(number)

    def _names(self, names: Iterable[str]) -> tuple[str, ...]:
        given = (names,) if isinstance(names, str) else tuple(names)
        try:
            return tuple(dict.fromkeys(check_name(name) for name in given))
        except ValueError as error:
            raise LocalProtocolError(str(error)) from error

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise LocalProtocolError(
                "this server belongs to the process that was forked; make one in this process"
            )

    def _serve(self, peer: Peer) -> None:
        """One connection, from its first byte to its end."""
        self._started.wait()
        if not self._has_started:
            return  # closed before: "not here" would be taken for the last word
        peer.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A broken way is noticed even if nothing is to be sent.
        peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        try:
            if self._tls is not None:
                peer.sock = under_tls(self._tls, peer.sock)
                shake_hands(peer.sock, self._limits.connect_s)
            with self._meters.connection() as traffic:
                Conversation(self._answering, peer, self._limits, traffic, self._budget).run()
        except (OSError, TransferTimeout) as error:
            _log.debug("%s: connection ended: %s", peer.host, error)

    def _families(self) -> Iterable[Family]:
        pinned, used = self._offers.pinned_bytes, self._budget.used
        return families(self._board, self._meters, self._listener, pinned, used)


def _check_life(expires_s: object, idle_s: object, on_done: object) -> None:
    """Raise unless these can be what they are called, before anything is hashed."""
    for name, value in (("expires_s", expires_s), ("idle_s", idle_s)):
        if value is not None:
            check_number(name, value)
    if on_done is not None and not callable(on_done):
        raise TypeError(f"on_done is a function that takes the outcome, not {on_done!r}")


def _checked(key: bytes) -> bytes:
    if len(key) != _KEY_BYTES:
        raise LocalProtocolError(f"a key has {_KEY_BYTES} bytes; this one has {len(key)}")
    return key
