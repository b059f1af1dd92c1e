"""Counts for operators, in the text form of Prometheus. Knows numbers; no shares, no sockets.

Each connection counts for itself, in plain numbers that only its own thread changes: the byte path
takes no lock. Who asks adds them up.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Family", "Meters", "Traffic", "exposition", "kind_of"]

_KINDS = (
    ("/model.safetensors", "data"),
    ("/digests/", "digests"),
    ("/receivers/", "reports"),
)


def kind_of(target: str) -> str:
    """What sort of request names such a target; nothing else of it is kept."""
    if target.startswith("/s/"):
        return next((kind for part, kind in _KINDS if part in target), "other")
    if target.startswith("/i/"):
        return "inbox"
    if target.startswith(("/api/", "/page.", "/metrics")) or target == "/":
        return "page"
    return "other"


class Traffic:
    """What went over some connections. Changed by one thread, read by any."""

    __slots__ = ("received_bytes", "requests", "sent_bytes")

    def __init__(self) -> None:
        self.sent_bytes = 0
        """Bytes of tensors and headers of shares, not of the HTTP around them."""
        self.received_bytes = 0
        """Bytes that were put into inboxes."""
        self.requests: Counter[tuple[str, int]] = Counter()
        """Replies by kind and status."""

    def add(self, other: "Traffic") -> None:
        """Count the other's in, which may be changing."""
        self.sent_bytes += other.sent_bytes
        self.received_bytes += other.received_bytes
        self.requests.update(other.requests.copy())


class Meters:
    """The traffic of a server: of connections that are open, and of those that were."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[Traffic] = set()
        self._past = Traffic()
        self._broken = 0

    @contextlib.contextmanager
    def connection(self) -> Iterator[Traffic]:
        """One connection; if its block ends with an OSError it is counted as broken."""
        traffic = Traffic()
        with self._lock:
            self._open.add(traffic)
        broken = False
        try:
            yield traffic
        except OSError:
            broken = True
            raise
        finally:
            with self._lock:
                self._open.discard(traffic)
                self._past.add(traffic)
                self._broken += broken

    @property
    def broken(self) -> int:
        """Connections that did not end in order."""
        return self._broken

    def total(self) -> Traffic:
        """All of it so far."""
        total = Traffic()
        with self._lock:
            for traffic in (self._past, *self._open):
                total.add(traffic)
        return total


@dataclass(frozen=True, slots=True)
class Family:
    """A metric: its name without prefix, what it means, and a value for each set of labels."""

    name: str
    kind: Literal["counter", "gauge"]
    meaning: str
    values: Mapping[tuple[tuple[str, str], ...], float] = field(default_factory=dict)


def exposition(families: Iterable[Family]) -> str:
    """Metrics as Prometheus reads them (text format 0.0.4)."""
    lines = []
    for family in families:
        name = f"weighlock_{family.name}"
        lines += [f"# HELP {name} {_escaped(family.meaning)}", f"# TYPE {name} {family.kind}"]
        for labels, value in family.values.items():
            inner = ",".join(f'{key}="{_quoted(text)}"' for key, text in labels)
            lines.append(f"{name}{'{' + inner + '}' if inner else ''} {value}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _quoted(text: str) -> str:
    return _escaped(text).replace('"', '\\"')
