"""Blocks from a remote file into a landing, over several connections.

What is asked for is the plan's, where it goes the landing's, how it is asked the remote's.
"""

from collections.abc import Callable, Iterable

from weighlock.fetching.moving import Move, Moving, Progress
from weighlock.fetching.plan import Plan
from weighlock.sources.grid import block_count, block_length
from weighlock.sources.http_remote import BlockPlace, Remote
from weighlock.transfer.landing import Landing
from weighlock.transfer.rate import Rate

__all__ = ["Puller"]

_TOGETHER = 16
"""Ranges in one request at the most, where no cache wants all receivers to ask for the same ones.
A request costs its owner half a millisecond of Python and more: the bytes that it sends drive code
and objects out of the processor's caches."""


class Puller:
    """Pulls blocks of one remote file.

    Args:
        remote: the file.
        connections: how many requests are under way at once.
        rate: a bound on the bytes a second.
        on_pulled: called with the bytes of each block that came, from any thread.
    """

    def __init__(
        self,
        remote: Remote,
        *,
        connections: int = 4,
        rate: Rate | None = None,
        on_pulled: Callable[[int], object] | None = None,
    ) -> None:
        self._remote = remote
        self._connections = max(1, connections)
        self._rate = rate
        self._on_pulled = on_pulled

    def pull(
        self,
        blocks: Iterable[int],
        landing: Landing,
        progress: Progress,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Land these blocks.

        Args:
            blocks: which.
            landing: where.
            progress: is told of every one.
            meanwhile: done by the caller's thread once the other connections are under way.

        Raises:
            Aborted: somebody said stop.
            TransferError, SourceError: the first thing that could not be mended by trying again.
            DiskError: the landing refused.
        """
        remote = self._remote
        if remote.resource.has_ranges:
            count = self._connections
            is_ours = remote.resource.is_share and remote.resource.is_private
            # Of a large reply an owner would see nobody take anything while a bound is kept.
            together = _TOGETHER if is_ours and self._rate is None else 1
            plan = Plan(blocks, takers=count)
        else:
            plan, count, together = Plan(blocks, whole=block_count(remote.size)), 1, 1
        moving = Moving(
            *(remote.connections, plan, remote.size, progress, self._rate, remote.persist),
            together=together,
        )

        def mover(moving: Moving) -> Move:
            place = _Counted(moving, landing.place(), remote.size, self._on_pulled)

            def move(run: range) -> None:
                if remote.verifies:
                    # Before the lease: over the connection this thread has just given back. Later,
                    # a new one would have to be made for them beside it.
                    remote.load_digests(run)
                with remote.lease() as connection:
                    remote.receive(connection, run, place)

            return move

        moving.run(count, mover, meanwhile)


class _Counted:
    """A landing's place whose blocks are counted."""

    def __init__(
        self,
        moving: Moving,
        place: BlockPlace,
        size: int,
        on_pulled: Callable[[int], object] | None,
    ) -> None:
        self._moving = moving
        self._place = place
        self._size = size
        self._on_pulled = on_pulled
        self.views = place.views

    def landed(self, block: int) -> None:
        self._place.landed(block)
        if self._on_pulled is not None:
            self._on_pulled(block_length(block, self._size))
        self._moving.moved(block)
        if self._moving.is_paced:
            self._moving.pace(block_length(block, self._size))
