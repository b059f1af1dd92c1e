"""Connections that are kept for the next request, and the patience of those who use them.

Knows addresses, threads, forks and when to try again; not what is asked for.
"""

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from weighlock.abort import Abort
from weighlock.errors import SourceError, WeighlockError
from weighlock.limits import Limits
from weighlock.sources.access import Access, Address
from weighlock.sources.http_client import Connection
from weighlock.sources.retrying import Retrying

__all__ = ["Connections"]

T = TypeVar("T")


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
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._idle: list[Connection] = []
        self._leased: set[Connection] = set()
        self._closed = False
        self._forget = self.abort.on_set(self.shut)

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
        with self._guard():
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def shut(self) -> None:
        """Wake every thread that waits for a reply; it will see a lost peer."""
        for connection in list(self._leased):
            connection.shut()

    def __del__(self) -> None:
        for connection in getattr(self, "_idle", ()):
            connection.close()

    @contextlib.contextmanager
    def lease(self, address: Address, *, is_kept: bool = True) -> Iterator[Connection]:
        """A connection for one thread; kept for the next if nothing goes wrong."""
        with self._guard():
            if self._closed:
                raise SourceError(f"{self.label}: used after it was closed")
            connection = self._idle.pop() if self._idle else None
        if connection is not None and connection.origin != address.origin:
            connection.close()
            connection = None
        connection = connection or Connection(address, self.access, self.limits)
        self._leased.add(connection)
        try:
            self.abort.check()  # after it can be shut: whoever says stop now is heard
            yield connection
        except BaseException:
            connection.close()
            raise
        finally:
            self._leased.discard(connection)
        with self._guard():
            if is_kept and not self._closed:
                self._idle.append(connection)
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
            sleep(pause)

    def _guard(self) -> threading.Lock:
        pid = os.getpid()
        if pid != self._pid:
            # A fork: connections are the parent's conversations, and the lock may be held by a
            # thread that does not exist here.
            self._lock = threading.Lock()
            self._idle = []
            self._pid = pid
        return self._lock
