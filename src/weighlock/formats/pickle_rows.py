"""Pickles one after another, and what they would import. Knows no container.

They are read by the inert machine. Where that stops and `pickle` would go on, what follows is not
known, and that is an error: nobody may take silence for a clean bill.
"""

import itertools
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from weighlock.errors import FormatError, LimitExceeded
from weighlock.formats.inert_pickle import Feed, Pickle, read_pickle
from weighlock.formats.pickle_failures import stops_pickle
from weighlock.formats.torch_legacy import after_storages, is_legacy
from weighlock.limits import Limits

if TYPE_CHECKING:
    from weighlock.sources.base import Source

__all__ = ["Named", "PickleRow"]

_CHUNK_BYTES = 1024 * 1024
_LEGACY_PICKLES = 5
_MOST_PICKLES = 10_000

_IMPORTABLE = re.compile(r"[\w.-]+")


Named: TypeAlias = dict[tuple[str, str], int]
"""Module and name of what a pickle would import, and at which byte it says so."""


class PickleRow:
    """Pickles one after another, as legacy checkpoints have them, and the data behind them.

    Args:
        source: where they lie.
        start: where the first begins.
        limits: what they may ask for.
        is_pickle: whether it is one for sure; then it is a fault if it cannot be read. Who only
            knows that it would begin as pickles since protocol 2 do leaves it out.
        is_other: whether it is something else, as safetensors, tar or a text. That may be made to
            be a pickle as well. It seldom is: what its bytes say when they are read as one is no
            fault of it, only what could be imported is.
    """

    def __init__(
        self,
        source: "Source",
        start: int,
        limits: Limits,
        *,
        is_pickle: bool | None = None,
        is_other: bool = False,
    ) -> None:
        self._source = source
        self._start = start
        self._limits = limits
        self._is_pickle = is_pickle
        self._is_other = is_other
        self._feed = Feed(b"", self._more, source.label, start)
        self.end = source.size
        """Where to look further: after the storages of a legacy save, else nowhere."""

    def _more(self, wanted: int) -> bytes:
        """Further bytes: as many as there are already, so that a long row takes few reads."""
        have = len(self._feed.data)
        at = self._start + have
        raw = bytearray(min(max(wanted, have, _CHUNK_BYTES), self._source.size - at))
        self._source.read_into(at, memoryview(raw))
        return bytes(raw)

    def pickles(self) -> Iterator[tuple[Named, Any]]:
        """What each pickle names, and the object, as far as there is one.

        Raises:
            FormatError, LimitExceeded: what follows could not be read, and may name anything.
        """
        read: list[Pickle] = []
        for number in itertools.count():
            at = read[-1].end if read else 0
            if not self._feed.extend(at + 1):
                return
            if number >= _MOST_PICKLES:
                raise FormatError(
                    f"more than {_MOST_PICKLES:,} pickles follow each other: what begins at byte "
                    f"{self._start + at:,} was not looked at",
                    source=self._source.label,
                )
            named: Named = {}
            try:
                read.append(read_pickle(self._feed, at, self._limits, named))
            except (FormatError, LimitExceeded) as error:
                yield self._importable(named), None
                if self._is_fault(error, number, named):
                    raise
                return
            importable = self._importable(named)
            if len(importable) < len(named):
                yield importable, None
                return
            yield named, read[-1].value
            if number == _LEGACY_PICKLES - 1 and is_legacy(self._feed.data):
                self._step_over_storages(read)
                return

    def _importable(self, named: Named) -> Named:
        """What is named before `pickle` would stop at something that no module is called."""
        if not self._is_other:
            return named
        found = {}
        for (module, name), offset in named.items():
            if not _IMPORTABLE.fullmatch(f"{module}.{name}"):
                break
            found[module, name] = offset
        return found

    def _is_fault(self, error: FormatError | LimitExceeded, number: int, named: Named) -> bool:
        """Whether this is a pickle that could not be read to its end, and not just data."""
        size = self._source.size - self._start
        if not self._is_other:
            is_pickle = self._is_pickle
            if is_pickle is None:
                is_pickle = self._feed.data[:1] == b"\x80"
            if named or (is_pickle and number == 0) or is_legacy(self._feed.data):
                return True
        elif len(self._importable(named)) < len(named):
            return False
        elif isinstance(error, LimitExceeded) and error.limit == "pickle_bytes":
            return False  # the letters of BF16 in a header ask for half a gigabyte
        return bool(named) or not stops_pickle(error, self._feed, size)

    def _step_over_storages(self, pickles: list[Pickle]) -> None:
        """A legacy file may hold several saves; the next begins after the storages of this one."""
        try:
            end = after_storages(self._source, pickles[3], pickles[4], self._start + pickles[4].end)
        except FormatError:
            return  # nobody could find the next one either
        self.end = max(end, self._start + pickles[4].end)
