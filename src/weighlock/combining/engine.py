"""Combines blocks: reads rows, has them worked on, hands over the result. Knows threads.

What is planned is `plan`'s, what is done with a block its `Combine`'s. Each thread reads and works
on a block of its own; rows from servers are read ahead, all of a block at once. Results do not
depend on who was faster: a block is made of the same rows in the same order.
"""

import contextlib
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from weighlock.abort import Abort
from weighlock.combining.contributors import Lost, is_loss, named
from weighlock.combining.delivery import Delivery
from weighlock.combining.desk import SPARE_BYTES, Desk, Fault
from weighlock.combining.outcome import Target
from weighlock.combining.plan import (
    CONNECTED,
    Block,
    Part,
    kept_blocks,
    plan_blocks,
    row_bytes,
)
from weighlock.combining.rounding import numbers_per_unit
from weighlock.combining.rows import KeepsBlocks, Rows, is_remote, remote_sources
from weighlock.errors import (
    Aborted,
    CombineError,
    FormatError,
    ProtocolError,
    SourceError,
    SpoolClosed,
    TransferError,
    WeighlockError,
)
from weighlock.sources.grid import BLOCK_BYTES
from weighlock.tensors.arrays import byte_view
from weighlock.tensors.stored import StoredRef

__all__ = ["Setting", "combine_blocks"]

_AHEAD = 2
"""Blocks that are read while others are worked on, where rows come from servers."""

_READERS = 12
"""Requests under way at once, at the most."""

_UNREADABLE = FormatError, SourceError, SpoolClosed, TransferError, ProtocolError

_MOST_THREADS = 4


@dataclass(frozen=True, slots=True)
class Setting:
    """What all blocks of one call have in common."""

    labels: tuple[str, ...]
    """What to call the contributors in errors."""
    threads: int = 0
    """How many work; 0 for one a core, four at the most."""
    directory: str | None = None
    """Where rows that must be gathered are laid down."""
    abort: Abort = field(default_factory=Abort)
    """Of this call alone: Ctrl-C sets it."""
    progress: Callable[[int, int], None] | None = None
    """Called with bytes read and bytes to read."""


def combine_blocks(parts: Sequence[Part], target: Target, setting: Setting) -> None:
    """Make every part.

    Raises:
        Lost: a contributor could not be read.
        CombineError: the numbers are refused.
        Aborted: somebody said stop.
    """
    _Run(parts, target, setting).run()


class _Buffer:
    """Room for the rows of a block."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.rows = np.empty(shape, np.uint8)
        self.views = [byte_view(row) for row in self.rows]


@dataclass(slots=True)
class _Taken:
    """A block that somebody works on, or will."""

    block: Block
    rows: Rows
    buffer: _Buffer
    coming: dict[int, "Future[None]"]
    """Rows that are being read by others."""


class _Run:
    def __init__(self, parts: Sequence[Part], target: Target, setting: Setting) -> None:
        self._parts = parts
        self._target = target
        self._setting = setting
        self._threads = setting.threads or min(_MOST_THREADS, _cores())
        self._sources = remote_sources(parts)
        most = max((len(part.refs) for part in parts), default=1)
        self._ahead = _AHEAD if self._sources else 0
        under_way = self._threads + self._ahead
        length = row_bytes(
            most, under_way=under_way, threads=self._threads, sources=len(self._sources)
        )
        self._shape = most, length + SPARE_BYTES
        self._delivery = Delivery(target, length)
        # Rows shorter than a block of a share are read in turn: each block travels once then.
        turns = self._sources if length < BLOCK_BYTES else []
        self._turns = {id(source): threading.Lock() for source in turns}
        self._blocks = plan_blocks(parts, length)
        self._waiting: deque[_Taken] = deque()
        self._free: list[_Buffer] = []
        self._open: dict[int, Rows] = {}
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._total = sum(part.read_bytes for part in parts)
        self._done = 0

    def run(self) -> None:
        if self._sources:
            for source in self._sources:
                if isinstance(source, KeepsBlocks):
                    count = len(self._sources)
                    source.keep_at_most(kept_blocks(count), connections=count <= CONNECTED)
            readers = min(_READERS, self._shape[0] * _AHEAD)
            self._pool = ThreadPoolExecutor(readers, thread_name_prefix="weighlock-ahead")
        helpers: list[threading.Thread] = []
        try:
            for _ in range(self._threads - 1):
                helper = threading.Thread(target=self._work, name="weighlock-combine")
                helpers.append(helper)
                try:
                    helper.start()
                except RuntimeError:  # the system has no more: those that there are do it all
                    break
            self._work()
        except BaseException as error:  # Ctrl-C: the others stop after their block
            self._failure = self._failure or error
            self._setting.abort.set("interrupted")
        finally:
            try:
                self._end(helpers)
            finally:
                for rows in self._open.values():
                    rows.close()
        if self._failure is not None:
            raise self._failure

    def _end(self, helpers: Sequence[threading.Thread]) -> None:
        """Wait for all who work."""
        try:
            _join(helpers)
        except BaseException as error:  # Ctrl-C: now they do not wait for a server either
            self._failure = self._failure or error
            self._setting.abort.set("interrupted")
            _join(helpers)
        if self._pool is not None:
            # Whoever said stop does not wait for a server: of what others opened, which does
            # not hear of it, rows may be read to their end, and nobody takes them.
            is_awaited = not self._setting.abort.is_set
            self._pool.shutdown(wait=is_awaited, cancel_futures=True)

    def _work(self) -> None:
        desk = Desk()
        try:
            while (taken := self._take()) is not None:
                self._finish(taken, desk)
        except BaseException as error:
            with self._lock:
                self._failure = self._failure or error
            if not isinstance(error, Exception):  # Ctrl-C: nobody waits for a server any more
                self._setting.abort.set("interrupted")

    def _take(self) -> _Taken | None:
        self._setting.abort.check()
        with self._lock:
            try:
                while self._failure is None and len(self._waiting) <= self._ahead:
                    block = next(self._blocks, None)
                    if block is None:
                        break
                    self._waiting.append(self._begin(block))
            except BaseException as error:
                # Before the lock is free: whoever waits for it must not take up the next block of
                # a tensor whose rows are not laid down.
                self._failure = self._failure or error
                raise
            if self._failure is not None:
                return None
            return self._waiting.popleft() if self._waiting else None

    def _begin(self, block: Block) -> _Taken:
        """Have a block's rows read, those that somebody else can read."""
        part = self._parts[block.part]
        if block.is_first:
            self._open[block.part] = Rows(part, self._setting.directory, self._setting.abort)
        rows = self._open[block.part]
        buffer = self._free.pop() if self._free else _Buffer(self._shape)
        taken = _Taken(block, rows, buffer, {})
        for row, ref in enumerate(part.refs):
            if block.is_first:
                self._prepare(rows, row)
            if self._pool is not None and is_remote(ref):
                self._have_read(self._pool, taken, row)
        return taken

    def _have_read(self, pool: ThreadPoolExecutor, taken: _Taken, row: int) -> None:
        """Have a row read ahead; where the system has no more threads, it is read when needed."""
        coming: Future[None] = Future()

        def read() -> None:
            if not coming.set_running_or_notify_cancel():
                return
            try:
                self._read_ahead(taken, row)
            except BaseException as error:  # told to whoever needs the row
                coming.set_exception(error)
            else:
                coming.set_result(None)

        try:
            pool.submit(read)
        except RuntimeError:
            # It may have been taken on all the same, and must not be read when its buffer is used
            # for another block.
            if coming.cancel():
                return
        taken.coming[row] = coming

    def _read_ahead(self, taken: _Taken, row: int) -> None:
        ref = taken.rows.part.refs[row]
        turn = self._turns.get(id(ref.source)) if isinstance(ref, StoredRef) else None
        with turn or contextlib.nullcontext():
            self._read(taken, row)

    def _read(self, taken: _Taken, row: int) -> None:
        part, block = taken.rows.part, taken.block
        width = taken.rows.widths[row]
        view = taken.buffer.views[row][: block.units * width]
        try:
            taken.rows.read_into(row, block.first * width, view)
        except _UNREADABLE as error:
            raise self._unreadable(part, row, error) from error.__cause__

    def _prepare(self, rows: Rows, row: int) -> None:
        try:
            rows.prepare(row)
        except _UNREADABLE as error:
            raise self._unreadable(rows.part, row, error) from error.__cause__

    def _check(self, rows: Rows) -> None:
        """Every row must have come from what was opened."""
        for row in range(len(rows.part.refs)):
            try:
                rows.check(row)
            except _UNREADABLE as error:
                raise self._unreadable(rows.part, row, error) from error.__cause__

    def _unreadable(self, part: Part, row: int, error: WeighlockError) -> Exception:
        """What to raise for a row that cannot be had: it says whose it was."""
        if isinstance(error, Aborted):
            return error
        named(error, f"{self._setting.labels[part.owners[row]]}: tensor {part.spec.name!r}")
        return Lost(part.owners[row], error) if is_loss(error) else error

    def _finish(self, taken: _Taken, desk: Desk) -> None:
        rows, block = taken.rows, taken.block
        part = rows.part
        for row in rows.fill(block.first, block.units, taken.buffer.views):
            if row in taken.coming:
                self._await(taken.coming[row])
            else:
                self._read(taken, row)
        start, length = block.first * rows.made_width, block.units * rows.made_width
        room = self._target.room(part.spec, start, length)
        buffer = self._delivery.buffer() if room is None else room
        out = buffer[:length]
        try:
            with np.errstate(all="ignore"):  # what is not finite is looked for, and told, by us
                part.how.combine(taken.buffer.rows[: len(part.refs)], block.units, out, desk)
        except Fault as fault:
            self._check(rows)  # of a file that changed, this is said rather than what it held
            raise self._refused(part, block, fault) from fault
        if room is None:
            self._delivery.put(part.spec, start, length, buffer)
        with self._lock:
            self._free.append(taken.buffer)
            self._done += block.units * rows.read_width
            done = self._done
            rows.left -= block.units
            is_last = not rows.left
        if is_last:
            self._check(rows)
            self._open.pop(block.part).close()
        if self._setting.progress is not None:
            self._setting.progress(done, self._total)

    def _await(self, coming: "Future[None]") -> None:
        """Wait until a row has come, or somebody says stop."""
        # A future could be waited for, too, but not from a thread whose signal handler says stop.
        woken: queue.SimpleQueue[object] = queue.SimpleQueue()
        coming.add_done_callback(woken.put)
        with self._setting.abort.waking(lambda: woken.put(None)):
            woken.get()
        self._setting.abort.check()
        coming.result()

    def _refused(self, part: Part, block: Block, fault: Fault) -> CombineError:
        element = (block.first + fault.unit) * numbers_per_unit(part.spec.dtype)
        if part.refs[0].dtype.is_complex:
            element //= 2
        label = None if fault.row is None else self._setting.labels[part.owners[fault.row]]
        whose = f"{label}: " if label else ""
        return CombineError(
            f"{whose}tensor {part.spec.name!r} {fault.what} (element {element:,} of "
            f"{part.refs[0].spec.size:,})",
            contributor=label,
            tensor=part.spec.name,
        )


def _join(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        if thread.ident is not None:  # it was started
            thread.join()


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
