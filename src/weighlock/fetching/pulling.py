"""Blocks from a remote file into a landing, over several connections. Knows threads and patience.

What is asked for is the plan's, where it goes the landing's, how it is asked the remote's.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from weighlock.errors import Aborted, RemoteProtocolError, WeighlockError
from weighlock.fetching.plan import Plan
from weighlock.sources.grid import block_count, block_span
from weighlock.sources.http_remote import BlockPlace, Remote
from weighlock.transfer.landing import Landing
from weighlock.transfer.rate import Rate

__all__ = ["Progress", "Puller"]


class Progress:
    """Bytes that are here, told to whoever wants to know. From any thread.

    Args:
        total_bytes: what there is in all.
        tell: called with bytes here and bytes in all.
    """

    def __init__(self, total_bytes: int, tell: Callable[[int, int], None] | None) -> None:
        self._total = total_bytes
        self._tell = tell
        self._done = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """So many more are here."""
        with self._lock:
            self._done += count
            if self._tell is not None:
                self._tell(self._done, self._total)


class Puller:
    """Pulls blocks of one remote file.

    Args:
        remote: the file.
        connections: how many requests are under way at once.
        rate: a bound on the bytes a second.
    """

    def __init__(
        self,
        remote: Remote,
        *,
        connections: int = 4,
        rate: Rate | None = None,
    ) -> None:
        self._remote = remote
        self._connections = max(1, connections)
        self._rate = rate

    def pull(self, blocks: Iterable[int], landing: Landing, progress: Progress) -> None:
        """Land these blocks.

        Raises:
            Aborted: somebody said stop.
            TransferError, SourceError: the first thing that could not be mended by trying again.
            DiskError: the landing refused.
        """
        if self._remote.resource.has_ranges:
            plan, count = Plan(blocks), self._connections
        else:
            plan, count = Plan(blocks, whole=block_count(self._remote.size)), 1
        _Job(self._remote, plan, landing, progress, self._rate).run(count)
        self._remote.abort.check()


class _Job:
    def __init__(
        self,
        remote: Remote,
        plan: Plan,
        landing: Landing,
        progress: Progress,
        rate: Rate | None,
    ) -> None:
        self._remote = remote
        self._plan = plan
        self._landing = landing
        self._progress = progress
        self._abort = remote.abort
        self._rate = rate
        self._retrying = remote.retrying()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._failures: list[BaseException] = []

    def run(self, connections: int) -> None:
        threads = [
            threading.Thread(target=self._work, name="weighlock-fetch", daemon=True)
            for _ in range(connections - 1)
        ]
        for thread in threads:
            thread.start()
        self._work()
        for thread in threads:
            try:
                thread.join()
            except BaseException as error:  # Ctrl-C: nobody may write into the landing afterwards
                self._fail(error)
                thread.join()
        if self._failures:
            self._abort.check()
            raise self._failures[0]
        if not self._plan.is_complete:
            raise RemoteProtocolError(f"{self._remote.label}: not every block came")

    def _work(self) -> None:
        try:
            place = _Counted(self, self._landing.place())
            while not self._over.is_set():
                with self._lock:
                    run = self._plan.take()
                if run is None:
                    return
                self._remote.persist(
                    partial(self._attempt, run, place), self._retrying, self._pause
                )
        except BaseException as error:
            self._fail(error)

    def _attempt(self, run: range, place: BlockPlace) -> None:
        for missing in self._plan.missing_of(run):
            self._check()
            with self._remote.lease() as connection:
                try:
                    self._remote.receive(connection, missing, place)
                except WeighlockError:
                    self._check()  # a connection shut from outside looks like a lost peer
                    raise

    def _check(self) -> None:
        self._abort.check()
        if self._over.is_set():
            raise Aborted("another connection of this fetch failed")

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._over.is_set() and (left := until - time.monotonic()) > 0:
            if self._abort.wait(min(left, 0.1)):
                break

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._failures.append(error)
        self._over.set()
        self._remote.shut()

    def landed(self, block: int) -> None:
        """Count a block that is in its place."""
        with self._lock:
            is_new = self._plan.landed(block)
        self._retrying.progressed()
        count = block_span(block, self._remote.size).length
        if is_new:
            self._progress.add(count)
        if self._rate is not None:
            with self._lock:
                pause = self._rate.pause_for(count)
            self._pause(pause)
        self._check()


class _Counted:
    """A landing's place whose blocks are counted."""

    def __init__(self, job: _Job, place: BlockPlace) -> None:
        self._job = job
        self._place = place

    def views(self, block: int) -> Sequence[memoryview]:
        return self._place.views(block)

    def landed(self, block: int) -> None:
        self._place.landed(block)
        self._job.landed(block)
