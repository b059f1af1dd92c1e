"""A share whose URL came in a message: dialled when it is first read, and only if that is allowed.

URLs that a program chose are its own business; those in messages are input. Nothing is dialled that
`Access.allow` does not name, and what is dialled may not lead elsewhere.
"""

import threading
import weakref
from collections import OrderedDict

from weighlock.abort import Abort
from weighlock.errors import Refused, SourceError
from weighlock.limits import Limits
from weighlock.per_process import PerProcess
from weighlock.sources.access import Access, Address, shown
from weighlock.sources.http import HttpSource
from weighlock.sources.http_remote import Remote
from weighlock.sources.http_replies import Resource

__all__ = ["TicketSource", "Tickets"]

_OPENED = 4
"""Shares of a message of which digests and blocks are kept, one of them with its connections: a
message may name thousands."""


class TicketSource:
    """A share's file, known by its URL and size alone. Blocks are verified as they are read.

    Args:
        ticket: the URL, as the message has it.
        size: bytes of the file, as the message has them; a server that says otherwise is refused.
        tickets: what may be dialled; nothing if not given.
    """

    def __init__(self, ticket: str, size: int, tickets: "Tickets | None" = None) -> None:
        self.ticket = ticket
        self.size = size
        self._tickets = tickets or Tickets()
        self._use = PerProcess(_Use)
        self._is_kept = True
        self._closed = False
        self._opened: HttpSource | None = None

    @property
    def label(self) -> str:
        """The URL as it may be shown."""
        return shown(self.ticket)

    def __repr__(self) -> str:
        return f"<TicketSource {self.label} of {self.size:,} bytes>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TicketSource):
            return NotImplemented
        return (self.ticket, self.size) == (other.ticket, other.size)

    def __hash__(self) -> int:
        return hash((self.ticket, self.size))

    def __reduce__(self) -> tuple[object, ...]:
        # Without what may be dialled: that is for the program to say which unpickles it.
        return TicketSource, (self.ticket, self.size)

    def connect(
        self,
        access: Access | None = None,
        abort: Abort | None = None,
        *,
        is_chosen: bool = False,
    ) -> HttpSource:
        """The file, for a fetch of its own. No connection is made yet.

        Args:
            access: what may be dialled, instead of what was given with the message.
            abort: ends whatever waits.
            is_chosen: the program chose the URL itself.

        Raises:
            Refused: the URL is none, or names a host that is not allowed.
        """
        access = access or self._tickets.access
        try:
            address = Address.of(self.ticket)
        except SourceError as error:
            raise Refused(f"a message names {self.label!r}, which cannot be dialled") from error
        if not is_chosen and not access.allows(address):
            place = address.origin.rpartition("//")[2]
            raise Refused(
                f"{self.label}: came in a message, and {place} is not allowed; to dial it, pass "
                f"access=Access(allow=[{place!r}]) to unpack or resolve"
            )
        return HttpSource(
            Remote(
                self.ticket,
                access=access,
                limits=self._tickets.limits,
                abort=abort,
                resource=Resource(address, self.size, is_share=True),
            )
        )

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer from verified blocks; the first read dials."""
        use = self._use()
        with use.lock:
            if self._closed:
                raise SourceError(f"{self.label}: used after it was closed")
            source = self._opened = self._opened or self.connect()
            use.readers += 1
            self._is_kept = True
        try:
            self._tickets.will_read(self)
            source.read_into(offset, buffer)
        finally:
            with use.lock:
                use.readers -= 1
            if not self._is_kept:
                self.let_go()

    def rest(self) -> None:
        """Close connections that are not in use; the next read dials again."""
        source = self._opened
        if source is not None:
            source.remote.connections.rest()

    def let_go(self) -> None:
        """Forget what was opened, now or after the reads under way; the next read opens it."""
        use = self._use()
        with use.lock:
            self._is_kept = False
            if use.readers:
                return
            source, self._opened = self._opened, None
        if source is not None:
            source.close()

    def close(self) -> None:
        """Let go of it for good. Idempotent."""
        self._closed = True
        self.let_go()


class _Use:
    """How many reads of one process are under way."""

    __slots__ = ("lock", "readers")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.readers = 0


class Tickets:
    """Gives the sources of a message's URLs, of which few are open at a time.

    Args:
        access: what may be dialled; nothing if not given.
        limits: timeouts and patience.
    """

    def __init__(self, access: Access | None = None, limits: Limits | None = None) -> None:
        self.access = access or Access()
        self.limits = limits or Limits()
        # Weakly: a source that nobody has any more ends, with its connections.
        self._recent: OrderedDict[int, weakref.ref[TicketSource]] = OrderedDict()
        self._lock = PerProcess(threading.Lock)

    def __call__(self, ticket: str, size: int) -> TicketSource:
        """The source of one."""
        return TicketSource(ticket, size, self)

    def will_read(self, source: TicketSource) -> None:
        """Keep this one connected, the last few opened, and let go of all others."""
        with self._lock():
            self._recent[id(source)] = weakref.ref(source)
            self._recent.move_to_end(id(source))
            over = len(self._recent) - _OPENED
            old = [self._recent.popitem(last=False)[1] for _ in range(max(0, over))]
            others = list(self._recent.values())
        for reference in old:
            if (other := reference()) is not None:
                other.let_go()
        for reference in others:
            if (other := reference()) is not None and other is not source:
                other.rest()
