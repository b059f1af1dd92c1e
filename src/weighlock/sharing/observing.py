"""What operators are told of a server: its metrics. Knows the server's parts; changes nothing."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias, get_args

from weighlock import __version__
from weighlock.sharing.board import Board, Shown
from weighlock.sharing.listening import Listener
from weighlock.sharing.metrics import Family, Meters
from weighlock.sharing.share import FINAL, Reason, State

__all__ = ["families"]

_Values: TypeAlias = Mapping[tuple[tuple[str, str], ...], float]
_Kind: TypeAlias = Literal["share", "inbox"]
_PARTS: tuple[tuple[_Kind, str, str], ...] = (
    ("share", "shares", "receivers"),
    ("inbox", "inboxes", "senders"),
)


def families(
    board: Board, meters: Meters, listener: Listener, pinned_bytes: int, buffer_bytes: int
) -> Iterable[Family]:
    """Every metric of a server, as it stands."""
    live = [Shown.of(number, offer) for number, offer in board.live()]
    kinds = Counter(each.kind for each in live)
    states = Counter((each.kind, part.who.state) for each in live for part in each.taking_part)
    traffic = meters.total()
    yield _gauge("build_info", "Version of this server.", _by("version", {__version__: 1}))
    yield _gauge("shares", "Shares that live.", {(): kinds["share"]})
    yield _gauge("inboxes", "Inboxes that live.", {(): kinds["inbox"]})
    yield _gauge("offered_bytes", "Bytes of shares.", {(): sum(each.bytes for each in live)})
    yield _gauge("pinned_bytes", "Bytes of arrays kept because of shares.", {(): pinned_bytes})
    yield _gauge("buffer_bytes", "Bytes of the budget in use.", {(): buffer_bytes})
    for kind, offers, parts in _PARTS:
        yield _gauge(
            parts,
            f"Of {offers} that live, by state.",
            _by("state", {state: states[kind, state] for state in State}),
        )
        yield _counter(
            f"{parts}_ended_total",
            f"Of {offers} that are over, by the state they ended in.",
            _by("state", {state: board.final[kind, state] for state in State if state in FINAL}),
        )
        yield _counter(
            f"{offers}_ended_total",
            "Those that are over, by reason.",
            _by("reason", {reason: board.ended[kind, reason] for reason in get_args(Reason)}),
        )
    yield _counter("sent_bytes_total", "Bytes of shares sent.", {(): traffic.sent_bytes})
    yield _counter("received_bytes_total", "Bytes put into inboxes.", {(): traffic.received_bytes})
    requests: _Values = {
        (("kind", kind), ("status", str(status))): count
        for (kind, status), count in sorted(traffic.requests.items())
    }
    yield _counter("requests_total", "Replies by kind of request and status.", requests)
    yield _gauge("connections", "Open connections.", {(): listener.connections})
    yield _counter(
        "connections_refused_total",
        "Connections turned away because there were too many.",
        {(): listener.refused},
    )
    yield _counter(
        "connections_broken_total", "Connections that did not end in order.", {(): meters.broken}
    )


def _gauge(name: str, meaning: str, values: _Values) -> Family:
    return Family(name, "gauge", meaning, values)


def _counter(name: str, meaning: str, values: _Values) -> Family:
    return Family(name, "counter", meaning, values)


def _by(label: str, values: Mapping[Any, float]) -> _Values:
    return {((label, str(key)),): value for key, value in values.items()}
