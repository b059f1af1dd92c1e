"""Statistics of a share's tensors on demand, a second of work at a time.

A tensor may have any size, so a look at it is divided: each request goes on for a second where the
last one stopped, and says how far it is. When nobody asks any more, nothing goes on. One look at a
time for a whole server, so that it takes one processor from transfers at the most.
"""

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from weighlock.errors import SourceChanged
from weighlock.sharing.shared import Share
from weighlock.sharing.statistics import Statistics, Tally, has_statistics
from weighlock.tensors.arrays import byte_view, empty
from weighlock.tensors.dtypes import DType
from weighlock.tensors.spec import Span

__all__ = ["Inspection", "Partly"]

T = TypeVar("T")

_BLOCK_BYTES = 1024 * 1024
_KEPT_PASSES = 4
"""Looks that have begun and are not finished; half a megabyte each."""

_KEPT_RESULTS = 256


@dataclass(frozen=True, slots=True)
class Partly:
    """How far a look is that is not finished."""

    done_bytes: int
    of_bytes: int


@dataclass(slots=True)
class _Pass:
    """A look at one tensor, somewhere between its first and its last byte."""

    span: Span
    tally: Tally
    done: int = 0


@dataclass(slots=True)
class Inspection:
    """Looks into tensors for one server. From any thread."""

    slice_s: float = 1.0
    """Work for one request; at least one block."""
    wait_s: float = 1.0
    """How long a request waits while another one is served."""
    busy: threading.Lock = field(default_factory=threading.Lock)
    """Held by the one that is."""
    _passes: OrderedDict[tuple[int, str], _Pass] = field(default_factory=OrderedDict)
    _results: OrderedDict[tuple[int, str], Statistics] = field(default_factory=OrderedDict)

    def look(self, number: int, share: Share, name: str) -> Statistics | Partly | None:
        """Statistics of a tensor, or how far they are; None: somebody else is being served.

        Raises:
            KeyError: there is no such tensor.
            ValueError: its elements cannot be told apart.
            SourceError: it cannot be read. `SourceChanged` ends the share.
        """
        key = number, name
        if not self.busy.acquire(timeout=self.wait_s):
            return None
        try:
            if key in self._results:
                self._results.move_to_end(key)
                return self._results[key]
            looked = self._passes.pop(key, None) or _begun(share, name)
            try:
                _go_on(share, looked, self.slice_s)
            except SourceChanged:
                share.end("changed")
                raise
            if looked.done < looked.span.length:
                _keep(self._passes, key, looked, _KEPT_PASSES)
                return Partly(looked.done, looked.span.length)
            found = looked.tally.statistics()
            _keep(self._results, key, found, _KEPT_RESULTS)
            return found
        finally:
            self.busy.release()


def _begun(share: Share, name: str) -> _Pass:
    file = share.contents.file
    name = file.aliases.get(name, name)
    spec = next((spec for spec in file.specs if spec.name == name), None)
    if spec is None:
        raise KeyError(name)
    if not has_statistics(spec.dtype):
        raise ValueError(f"elements of {spec.dtype} cannot be told apart")
    # A tensor without bytes has no place in the file.
    places = (segment.span for segment in file.segments if segment.ref.name == name)
    return _Pass(next(places, Span(0, 0)), Tally(DType(spec.dtype)))


def _go_on(share: Share, looked: _Pass, slice_s: float) -> None:
    """Read on until the time is up, from what is offered: a snapshot is not its array."""
    until = time.monotonic() + slice_s
    buffer = byte_view(empty((min(_BLOCK_BYTES, looked.span.length),), np.dtype(np.uint8)))
    while looked.done < looked.span.length:
        view = buffer[: looked.span.length - looked.done]
        share.contents.read_into(looked.span.offset + looked.done, view)
        looked.tally.add(view)
        looked.done += len(view)
        if time.monotonic() >= until:
            break


def _keep(kept: OrderedDict[tuple[int, str], T], key: tuple[int, str], new: T, most: int) -> None:
    kept[key] = new
    while len(kept) > most:
        kept.popitem(last=False)
