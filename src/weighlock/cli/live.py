"""What `serve` shows while it runs: a table on a terminal, lines elsewhere. Knows rich."""

import contextlib
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from weighlock.cli.text import escaped, size
from weighlock.sharing.board import Shown, TakingPart
from weighlock.sharing.offer import Offer
from weighlock.sharing.share import FINAL, State

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["shown_live"]

_MOST_ROWS = 20
_BAR_CELLS = 20
_NUMBERED = re.compile(r"^(?:share|inbox) \d+(?=:)")


class _Lines(logging.Formatter):
    """One line for each record; what came from files and peers is harmless in it.

    Args:
        names: what to call the shares and inboxes, which the log calls "share 1" and so on.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        super().__init__()
        self._names = names

    def format(self, record: logging.LogRecord) -> str:
        said = _NUMBERED.sub(lambda m: self._names.get(m[0], m[0]), record.getMessage())
        line = f"{self.formatTime(record, '%H:%M:%S')} {escaped(said)}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


@contextlib.contextmanager
def shown_live(offers: Sequence[tuple[str, Offer]], *, verbose: bool) -> Iterator[None]:
    """While the block lasts, stderr tells who receives what.

    On a terminal as a table, with lines of the log above it if `verbose`; elsewhere as one line for
    each beginning and end of a transfer, with more of the log if `verbose`.

    Args:
        offers: what to call each share and inbox of a server, in the order they were made.
        verbose: show more of the log.
    """
    numbered = enumerate(offers, 1)
    names = {f"{Shown.of(n, offer).kind} {n}": name for n, (name, offer) in numbered}
    if not sys.stderr.isatty():
        with _logged(logging.DEBUG if verbose else logging.INFO, names):
            yield
        return
    from rich.console import Console
    from rich.live import Live

    live = Live(
        console=Console(stderr=True),
        refresh_per_second=2,
        transient=True,
        get_renderable=lambda: _table([offer for _, offer in offers]),
    )
    with live, _logged(logging.DEBUG if verbose else logging.WARNING, names):
        yield


@contextlib.contextmanager
def _logged(level: int, names: Mapping[str, str]) -> Iterator[None]:
    logger = logging.getLogger("weighlock")
    before = logger.level
    lines = logging.StreamHandler(sys.stderr)  # of this moment: a table on it makes room for lines
    lines.setFormatter(_Lines(names))
    logger.addHandler(lines)
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.removeHandler(lines)
        logger.setLevel(before)


def _table(offers: Sequence[Offer]) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("", "who", "state", "", "", ""):
        table.add_column(heading, justify="left" if heading else "right", no_wrap=True)
    rows = [row for number, offer in enumerate(offers) for row in _rows(Shown.of(number, offer))]
    for cells in rows[:_MOST_ROWS]:
        # Text, not str: rich would take brackets in a name for markup.
        table.add_row(*(Text(escaped(cell)) for cell in cells))
    if len(rows) > _MOST_ROWS:
        table.caption = f"and {len(rows) - _MOST_ROWS:,} more"
    return table


def _rows(shown: Shown) -> list[tuple[str, ...]]:
    """A row for each who takes part, those under way first."""
    title = shown.title or shown.kind
    order = sorted(shown.taking_part, key=lambda part: (part.who.state in FINAL, part.who.name))
    if not order:
        return [(title, "nobody yet", shown.ended or "", "", size(shown.bytes), "")]
    return [(title, *_facts(part)) for part in order]


def _facts(part: TakingPart) -> tuple[str, ...]:
    one = part.who
    done = min(1.0, one.bytes_here / max(1, part.of_bytes or 1))
    full = round((1.0 if one.state is State.LANDED else done) * _BAR_CELLS)
    bar = "━" * full + "·" * (_BAR_CELLS - full)
    return one.name, one.state, bar, size(one.bytes_here), f"{size(int(one.rate))}/s"
