"""How far work is, on stderr: a bar on a terminal, and a line at the end. Knows rich, on demand."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import click

from weighlock.cli.shared import tell
from weighlock.cli.text import escaped, size

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

__all__ = ["Transfer", "progress_bar", "quiet_option", "transfer_bar"]

_SHORT_S = 1.0
"""Work of less time is not told of where nobody watches: a script runs it a thousand times."""

quiet_option = click.option("-q", "--quiet", is_flag=True, help="Show no progress and no timing.")


@contextlib.contextmanager
def progress_bar(
    doing: str, total_bytes: int, *, quiet: bool = False
) -> Iterator[Callable[[int], None]]:
    """Gives a function to call with bytes done: a bar on a terminal, and one line at the end."""
    with transfer_bar(doing, total_bytes, quiet=quiet) as transfer:
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            transfer.tell(done, total_bytes)

        yield advance
        transfer.seen_bytes = total_bytes


class Transfer:
    """What is known of a transfer while it runs.

    Args:
        show: called with bytes here and bytes in all.
    """

    def __init__(self, show: Callable[[int, int], None]) -> None:
        self._show = show
        self.seen_bytes = 0
        """Bytes that are in place."""
        self.moved_bytes: int | None = None
        """Bytes of them that had to travel, if that is known."""

    def tell(self, done: int, total: int) -> None:
        """So many bytes are in place, of so many. From any thread."""
        self.seen_bytes = done
        self._show(done, total)

    def said(self, seconds: float, moved: str) -> str:
        """The transfer in a few words; `moved` says what became of what had to travel."""
        if self.moved_bytes is None or self.moved_bytes >= self.seen_bytes:
            return f"{size(self.seen_bytes)} in {seconds:.2f} s ({_rate(self.seen_bytes, seconds)})"
        part = f"{size(self.seen_bytes)}, of which {size(self.moved_bytes)} were {moved}"
        rate = f" ({_rate(self.moved_bytes, seconds)})" if self.moved_bytes else ""
        return f"{part}, in {seconds:.2f} s{rate}"


@contextlib.contextmanager
def transfer_bar(
    doing: str, total_bytes: int | None = None, *, moved: str = "moved", quiet: bool = False
) -> Iterator[Transfer]:
    """The same for a transfer, which tells bytes here and bytes in all, from any thread."""
    start = time.monotonic()
    with _bar(doing, total_bytes) if not quiet else contextlib.nullcontext(_nothing) as show:
        transfer = Transfer(show)
        yield transfer
    seconds = time.monotonic() - start
    if not quiet and (seconds >= _SHORT_S or _is_watched()):
        tell(f"{escaped(doing)}: {transfer.said(seconds, moved)}")


def _nothing(done: int, total: int) -> None:
    """Show nothing."""


def _is_watched() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()  # None if the caller closed it: `2>&-`


def _rate(count: int, seconds: float) -> str:
    return f"{size(int(count / seconds))}/s" if seconds > 0 else "?"


@contextlib.contextmanager
def _bar(doing: str, total_bytes: int | None) -> Iterator[Callable[[int, int], None]]:
    if not _is_watched():
        yield _nothing
        return
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(*_columns(console.width), console=console, transient=True, expand=True) as bar:
        task = bar.add_task(escaped(doing), total=total_bytes)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _columns(width: int) -> "list[ProgressColumn]":
    """What fits on one line. What is being done is cut first; then go the bar, rate and time."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.table import Column

    first = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    whole = partial(Column, no_wrap=True)
    # Not markup: brackets in a name are brackets.
    columns: list[ProgressColumn] = [
        TextColumn("{task.description}", markup=False, table_column=first)
    ]
    if width >= 100:
        columns.append(BarColumn(20, table_column=whole()))
    columns.append(TaskProgressColumn(table_column=whole()))
    columns.append(DownloadColumn(table_column=whole()))
    if width >= 60:
        columns.append(TransferSpeedColumn(table_column=whole()))
    if width >= 70:
        columns.append(TimeRemainingColumn(table_column=whole()))
    return columns
