"""Runs of blocks over several connections, in either direction: one plan, one patience.

Knows threads and when all is lost: the first failure that cannot be mended ends the work of all.
What moving a run means is the caller's.
"""

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from weighlock.errors import Aborted, RemoteProtocolError, WeighlockError
from weighlock.fetching.plan import Plan, Portion
from weighlock.limits import check_number
from weighlock.sources.connections import Connections
from weighlock.sources.grid import block_length
from weighlock.transfer.rate import Rate

__all__ = ["Move", "Moving", "Progress", "rate_of"]

Move: TypeAlias = Callable[[range], None]
"""Moves neighbouring blocks, and says of each when it has."""


def rate_of(limit_rate: float | None) -> Rate | None:
    """A bound on the bytes a second, if there is one.

    Raises:
        TypeError: it is no number.
        LocalProtocolError: nothing would ever move at that rate.
    """
    if limit_rate is None:
        return None
    check_number("limit_rate", limit_rate, None)
    return Rate(limit_rate, time.monotonic)


class Progress:
    """Bytes that are in place, told to whoever wants to know. From any thread.

    Args:
        total_bytes: what there is in all.
        tell: called with bytes in place and bytes in all.
    """

    def __init__(self, total_bytes: int, tell: Callable[[int, int], None] | None) -> None:
        self._total = total_bytes
        self._tell = tell
        self._done = 0
        self._lock = threading.Lock()

    @property
    def done(self) -> int:
        """Bytes that are in place."""
        return self._done

    def add(self, count: int) -> None:
        """So many more are in place."""
        with self._lock:
            self._done += count
            if self._tell is not None:
                self._tell(self._done, self._total)


def _weight(failure: BaseException) -> int:
    """What is raised of several: Ctrl-C before all, and last who stopped for what another met."""
    return 0 if not isinstance(failure, Exception) else 2 if isinstance(failure, Aborted) else 1


class Moving:
    """The work on one plan.

    Args:
        connections: what it goes over.
        plan: which blocks.
        size: bytes of the file they are of.
        progress: is told of every block.
        rate: a bound on the bytes a second.
        persist: tries a step again while that makes sense.
        together: so many neighbouring ranges are moved by one request at the most.
    """

    def __init__(
        self,
        connections: Connections,
        plan: Plan,
        size: int,
        progress: Progress,
        rate: Rate | None = None,
        persist: Callable[..., None] | None = None,
        *,
        together: int = 1,
    ) -> None:
        self._connections = connections
        self._plan = plan
        self._size = size
        self._progress = progress
        self._abort = connections.abort
        self._rate = rate
        self.is_paced = rate is not None
        """Whether there is a bound on the rate."""
        self._persist = persist or connections.persist
        self._together = together
        self._retrying = connections.retrying()
        self._lock = threading.Lock()
        self._is_over = False
        self._failures: list[BaseException] = []

    def run(
        self,
        threads: int,
        mover: Callable[["Moving"], Move],
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Move every block of the plan.

        Args:
            threads: how many work at once.
            mover: called in each thread for what moves its runs.
            meanwhile: done first by this thread, when the others have begun.

        Raises:
            Aborted: somebody said stop.
            TransferError, SourceError: the first thing that could not be mended by trying again.
        """
        others = [
            threading.Thread(target=self._work, args=(mover,), name="weighlock-move", daemon=True)
            for _ in range(threads - 1)
        ]
        for thread in others:
            try:
                thread.start()
            except RuntimeError:  # the system has no more: those there are will do
                break
            except BaseException as error:  # Ctrl-C; what others wait for is still done
                self._fail(error)
                break
        self._work(mover, meanwhile)
        for thread in others:
            if thread.ident is None:
                continue
            try:
                thread.join()
            except BaseException as error:  # Ctrl-C: nobody may go on with it afterwards
                self._fail(error)
                thread.join()
        if self._failures:
            self._abort.check()
            raise min(self._failures, key=_weight)
        if not self._plan.is_complete:
            raise RemoteProtocolError(f"{self._connections.label}: not every block was moved")
        self._abort.check()

    def _work(
        self, mover: Callable[["Moving"], Move], before: Callable[[], None] | None = None
    ) -> None:
        try:
            if before is not None:
                before()
            move, portion = mover(self), Portion(self._together)
            while not self._is_over:
                with self._lock:
                    run = self._plan.take(portion.ranges)
                if run is None:
                    return
                attempt = partial(self._attempt, run, move, portion)
                self._persist(attempt, self._retrying, self._pause)
        except BaseException as error:
            self._fail(error)

    def _attempt(self, run: range, move: Move, portion: Portion) -> None:
        for missing in self._plan.missing_of(run, portion.ranges):
            self._check()
            began = time.monotonic()
            try:
                move(missing)
            except WeighlockError:
                self._check()  # a connection shut from outside looks like a lost peer
                portion.failed(missing)
                raise
            portion.took(missing, time.monotonic() - began)

    def _check(self) -> None:
        self._abort.check()
        if self._is_over:
            raise Aborted("another connection of this transfer failed")

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._is_over and (left := until - time.monotonic()) > 0:
            if self._abort.wait(min(left, 0.1)):
                break

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._failures.append(error)
        self._is_over = True
        self._connections.shut()

    def moved(self, block: int) -> None:
        """Count a block that is in its place."""
        with self._lock:
            is_new = self._plan.landed(block)
        if is_new:  # what came before, and comes again from the start, is none
            self._retrying.progressed()
            self._progress.add(block_length(block, self._size))
        self._check()

    def pace(self, count: int) -> None:
        """Wait as long as the bound on the rate asks for after so many bytes.

        Raises:
            Aborted: somebody said stop, or another connection failed.
        """
        if self._rate is not None:
            with self._lock:
                pause = self._rate.pause_for(count)
            self._pause(pause)
        self._check()
