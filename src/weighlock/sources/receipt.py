"""What a receiver tells an owner: that it began, is alive, has landed, failed or stopped.

Control plane only: POSTs that are never cached and may be repeated. Tensors never depend on them;
an owner that cannot be told has still been received from.
"""

import contextlib
import re
import secrets
import threading
import time
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import msgspec

from weighlock.errors import (
    LocalProtocolError,
    PeerLost,
    Refused,
    RemoteProtocolError,
    SourceError,
    TransferError,
)
from weighlock.sources.access import NAME
from weighlock.sources.http_client import Connection
from weighlock.sources.http_remote import Remote
from weighlock.sources.http_replies import raise_for_status

__all__ = ["Receipt", "Said", "Word"]

Word: TypeAlias = Literal["started", "alive", "landed", "failed", "aborted"]

_MOST_S = 5.0
"""Time for a word to arrive: nothing that matters waits for it."""


@dataclass(frozen=True, slots=True)
class Said:
    """What the owner answered."""

    confirmed: bool = False
    """It knows that this receiver has landed."""
    alive_s: float | None = None
    """How often it wants to hear of it."""


class _Reply(msgspec.Struct, frozen=True):
    confirmed: bool = False
    alive_s: float | None = None


class Receipt:
    """The words of one attempt to receive a share. From any thread.

    Args:
        remote: the share.
        name: who speaks, if its URL does not say so.

    Raises:
        Refused: the URL is the ticket of another.
        LocalProtocolError: nobody can be called that.
    """

    def __init__(self, remote: Remote, name: str | None = None) -> None:
        self._label = remote.label
        self._access = remote.connections.access
        self._limits = remote.limits
        holder = remote.address.holder
        self.is_named = holder is not None or name is not None
        """Whether the owner is to know who this receiver is."""
        if name is not None and not re.fullmatch(NAME, name):
            raise LocalProtocolError(
                f"receiver={name!r} cannot be a name: 1 to 64 letters, digits and ._- that begin "
                "with a letter or digit"
            )
        self.name = name or f"anonymous-{secrets.token_hex(4)}"
        self._mac: str | None = None
        if holder is not None:
            self.name, mac = holder
            # A redirect to another origin takes no credentials along.
            if remote.resource.address.origin == remote.address.origin:
                self._mac = mac
            if name is not None and name != self.name:
                raise Refused(f"{self._label}: is the ticket of {self.name!r}, not of {name!r}")
        self.address = remote.resource.address.beside(f"receivers/{self.name}")
        self._attempt = secrets.token_hex(8)
        self._began_at = time.monotonic()
        self._abort = remote.abort
        self._within_s = _MOST_S
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._speaking: Connection | None = None

    def say(
        self, word: Word, bytes_here: int = 0, cause: str = "", within_s: float = _MOST_S
    ) -> Said:
        """Tell the owner.

        Raises:
            Aborted: somebody said stop. That, and what else is the last word, is said nevertheless.
            Refused: the ticket is not that of this receiver.
            ShareGone, SourceChanged: the share is over.
            PeerLost, TransferTimeout, RemoteProtocolError: it could not be told.
        """
        facts = {"state": word, "attempt": self._attempt, "bytes": bytes_here, "cause": cause}
        facts["seconds"] = round(time.monotonic() - self._began_at, 3)
        body = msgspec.json.encode(facts)
        with self._lock:
            if within_s < self._within_s:
                self._drop()  # its waits are longer
            self._within_s = within_s
            was_idle = self._connection is not None
            is_last = word in ("failed", "aborted")
            try:
                return self._post(body, is_last)
            except PeerLost:
                if not was_idle:
                    raise
            # A server may close a connection that was idle; that is no failure yet.
            return self._post(body, is_last)

    def try_to_say(
        self, word: Word, bytes_here: int = 0, cause: str = "", within_s: float = _MOST_S
    ) -> Said:
        """As `say`; what prevents it is not told, since nothing depends on it."""
        with contextlib.suppress(TransferError, SourceError, RemoteProtocolError):
            return self.say(word, bytes_here, cause, within_s)
        return Said()

    def close(self) -> None:
        """Close the connection. Idempotent."""
        with self._lock:
            self._drop()

    def shut(self) -> None:
        """Wake the thread that waits for an answer; a last word is not cut short."""
        speaking = self._speaking
        if speaking is not None:
            speaking.shut()

    def _post(self, body: bytes, is_last: bool) -> Said:
        connection, self._connection = self._connection, None
        if connection is None:
            limits = replace(
                self._limits,
                connect_s=min(self._within_s, self._limits.connect_s),
                idle_s=min(self._within_s, self._limits.idle_s),
            )
            connection = Connection(self.address, self._access, limits)
        headers = {"Content-Type": "application/json"}
        if self._mac is not None:
            headers["Weighlock-Mac"] = self._mac
        # A last word is brief. Whoever stops because of an abort may say so while that abort still
        # wakes others, and must not be silenced by it.
        self._speaking = None if is_last else connection
        try:
            if not is_last:
                self._abort.check()  # after it can be shut: whoever says stop now is heard
            reply = connection.request("POST", self.address, headers, body)
            if reply.status != 200:
                raise_for_status(reply, connection, self._label)
            answer = msgspec.json.decode(connection.read_small(reply), type=_Reply)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            connection.close()
            raise RemoteProtocolError(f"{self._label}: its answer makes no sense") from error
        except BaseException:
            connection.close()
            raise
        finally:
            self._speaking = None
        self._connection = connection
        return Said(answer.confirmed, answer.alive_s)

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
