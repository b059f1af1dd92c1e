"""Connections that are kept for the next request, and the patience of those who use them.

Knows addresses, threads, forks and when to try again; not what is asked for.
"""

import contextlib
import logging
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TypeVar

from weighlock.abort import Abort
from weighlock.errors import SourceError, WeighlockError
from weighlock.limits import Limits
from weighlock.per_process import PerProcess
from weighlock.sources.access import Access, Address
from weighlock.sources.http_client import Connection
from weighlock.sources.retrying import RETRIES, Retrying

__all__ = ["Connections"]

T = TypeVar("T")

_log = logging.getLogger(RETRIES)


class Connections:
    """Connections for one purpose; each is used by one thread at a time.

    Args:
        label: what they are for, as errors name it.
        access: credentials.
        limits: timeouts, patience.
        abort: ends whatever waits for a reply.
    """

    def __init__(
        self,
        label: str,
        access: Access | None = None,
        limits: Limits | None = None,
        abort: Abort | None = None,
    ) -> None:
        self.label = label
        self.access = access or Access()
        self.limits = limits or Limits()
        self.abort = abort or Abort()
        # After a fork connections are the conversations of the parent.
        self._own = PerProcess(_Own)
        self.secured: set[str] = set()
        """Origins that have spoken TLS."""
        self._closed = False
        self._forget = self.abort.on_set(_weakly(self.shut))
        # Not `__del__`: of a ring of garbage, the sockets might be ended before who closes them.
        weakref.finalize(self, _let_go, self._own, self._forget)

    @property
    def is_closed(self) -> bool:
        """Whether they were closed."""
        return self._closed

    def close(self) -> None:
        """Close those nobody uses, and the others when they come back. Idempotent."""
        self._forget()
        self._closed = True
        self.rest()

    def rest(self) -> None:
        """Close those nobody uses now; whoever asks next gets a new one."""
        own = self._own()
        with own.lock:
            idle, own.idle = own.idle, []
        for connection in idle:
            connection.close()

    def shut(self) -> None:
        """Wake every thread that waits for a reply; it will see a lost peer."""
        for connection in list(self._own().leased):
            connection.shut()

    @contextlib.contextmanager
    def lease(self, address: Address, *, is_kept: bool = True) -> Iterator[Connection]:
        """A connection for one thread; kept for the next if nothing goes wrong."""
        own = self._own()
        with own.lock:
            if self._closed:
                raise SourceError(f"{self.label}: used after it was closed")
            connection = own.idle.pop() if own.idle else None
        if connection is not None and connection.origin != address.origin:
            connection.close()
            connection = None
        connection = connection or Connection(address, self.access, self.limits, self.secured)
        own.leased.add(connection)
        try:
            self.abort.check()  # after it can be shut: whoever says stop now is heard
            yield connection
        except BaseException:
            connection.close()
            raise
        finally:
            own.leased.discard(connection)
        with own.lock:
            if is_kept and not self._closed and not connection.is_shut:
                own.idle.append(connection)
                return
        connection.close()

    def retrying(self) -> Retrying:
        """A new measure of patience."""
        return Retrying(self.limits.patience_s, time.monotonic, random.random)

    def persist(
        self,
        attempt: Callable[[], T],
        retrying: Retrying | None = None,
        sleep: Callable[[float], object] | None = None,
    ) -> T:
        """Try until it works, another try cannot help, or patience is at its end."""
        retrying = retrying or self.retrying()
        sleep = sleep or self.abort.wait
        while True:
            self.abort.check()
            try:
                return attempt()
            except WeighlockError as error:
                self.abort.check()  # a connection shut from outside looks like a lost peer
                pause = retrying.pause_after(error)
                if retrying.is_to_be_told():
                    patience = f"{self.limits.patience_s:g} s"
                    _log.info("%s; trying again for up to %s", error, patience)
            sleep(pause)


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Calls a method of an object as long as there is one.

    An abort that held on to connections would be held by them, and what nobody closed would end
    with the next collection of garbage, its sockets perhaps before it.
    """
    weak = weakref.WeakMethod(method)

    def call() -> None:
        found = weak()
        if found is not None:
            found()

    return call


class _Own:
    """The connections of one process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.idle: list[Connection] = []
        self.leased: set[Connection] = set()


def _let_go(every: PerProcess[_Own], forget: Callable[[], None]) -> None:
    """Close what nobody closed."""
    forget()
    for own in every:
        for connection in own.idle:
            connection.close()
