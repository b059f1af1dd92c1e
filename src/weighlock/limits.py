"""Every bound in one frozen value, and the running count against one. Knows numbers and reasons."""

import contextlib
import numbers
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from weighlock.errors import LimitExceeded, LocalProtocolError, TransferTimeout

__all__ = ["Budget", "Limits", "check_number"]


def check_number(
    what: str, value: object, least: float | None = 0, *, is_whole: bool = False
) -> None:
    """Raise unless an argument is a number that can be meant.

    Args:
        what: what it is called.
        value: what was given.
        least: the smallest there is; None if there is none.
        is_whole: a part of one makes no sense.

    Raises:
        TypeError: it is no number. Texts with units are for the command line.
        LocalProtocolError: it is too small, or NaN.
    """
    # Numpy's are among them; a bool is one to Python, and nobody means it.
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or (is_whole and not isinstance(value, numbers.Integral)):
        wanted = "a whole number" if is_whole else "a number"
        raise TypeError(f"{what} must be {wanted}, not {repr(value)[:80]}")
    if least is not None and not value >= least:  # type: ignore[operator]  # nor is NaN
        raise LocalProtocolError(f"{what}={value!r}: must be at least {least:g}")


@dataclass(frozen=True, slots=True)
class Limits:
    """What input may ask for. Checked before anything is allocated.

    Raises:
        TypeError: a limit is no number.
        LocalProtocolError: a limit is negative.
    """

    header_bytes: int = 100_000_000
    """Longest header of a file or index of a sharded model: the bound of the format itself."""

    tensors: int = 1_000_000
    """Most tensors in one file; the largest models published so far have fewer than 200,000."""

    name_bytes: int = 4096
    """Longest name of a tensor in UTF-8."""

    rank: int = 64
    """Most dimensions of a tensor: numpy's own bound since 2.0; before, it was 32."""

    shards: int = 10_000
    """Most files of one sharded model."""

    open_files: int = 32
    """Descriptors one sharded catalog keeps; further shards are opened for each read."""

    pickle_bytes: int = 512 * 1024 * 1024
    """Longest pickle of a checkpoint; about 200 bytes a tensor are usual."""

    pickle_opcodes: int = 32_000_000
    """Most opcodes of one pickle; about 35 a tensor are usual."""

    pickle_memo: int = 16_000_000
    """Most entries in the memo of one pickle; about 12 a tensor are usual."""

    pickle_made_bytes: int = 1024 * 1024 * 1024
    """Most memory for what one pickle makes, by a rough count; about 2,000 a tensor are usual."""

    pickle_entries: int = 2_000_000
    """Most lists, dicts and objects in a checkpoint, and entries of objects, counted for each that
    has them: many may share a dict. A few for each tensor of a training checkpoint are usual."""

    depth: int = 1000
    """Deepest nesting of lists, dicts and objects in a checkpoint."""

    nested_depth: int = 4
    """How deep checkpoints that lie as bytes in checkpoints are opened; 0 leaves them alone."""

    connections: int = 256
    """Connections a server serves at once; further ones are refused."""

    connections_per_peer: int = 64
    """Of those, from one address: sixteen receivers behind one NAT."""

    request_head_bytes: int = 16 * 1024
    """Longest head of a request."""

    request_body_bytes: int = 64 * 1024
    """Longest body of a control request."""

    head_s: float = 10.0
    """Time for a request's head to arrive, from its first byte."""

    idle_s: float = 30.0
    """Time without a byte, or with less than 256 a second, after which a connection is given up, on
    both sides."""

    connect_s: float = 10.0
    """Time for a connection to come about, TLS included."""

    patience_s: float = 30.0
    """How long a fetch without any progress is tried again."""

    shares: int = 10_000
    """Shares and inboxes of one server at once."""

    announced_bytes: int = 16 * 1024 * 1024
    """Longest header a sender may announce to an inbox: that of 150,000 tensors."""

    arrivals: int = 256
    """Files on their way to one inbox at once."""

    tombstones: int = 100_000
    """Shares that are over and of which a server still knows how they ended."""

    pinned_bytes: int = 2**62
    """Bytes of arrays that the shares of one server keep in memory."""

    gathered_bytes: int = 16 * 1024 * 1024
    """Bytes of strided or compressed tensors that a server keeps ready for the next range."""

    expanded_bytes: int = 1024 * 1024 * 1024
    """Longest tensor of a file that is offered or read although the file holds only a part of its
    elements, and repeats them (stride 0): a file of a kilobyte may claim to be a terabyte."""

    budget_bytes: int = 32 * 1024 * 1024
    """Bytes of buffers that a server uses for all its connections together."""

    redirects: int = 5
    """Redirects followed from a URL that a person gave."""

    message_tree_bytes: int = 4 * 1024 * 1024
    """Longest tree of a message: its structure, without tensors; about 60 bytes a ref are usual."""

    message_nodes: int = 1_000_000
    """Most values, keys and containers in that tree: each takes up to 70 bytes of memory."""

    message_depth: int = 100
    """Deepest nesting of a message."""

    memory_bytes: int = 2**62
    """Most bytes a fetch to memory may ask for; never more than the machine has."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not ((type(value) is int or type(value) is float) and value >= 0):
                check_number(name, value)

    def check(self, limit: str, asked: int, what: str) -> None:
        """Raise `LimitExceeded` if `asked` is above the limit of that name."""
        allowed: int = getattr(self, limit)
        if asked > allowed:
            raise LimitExceeded(
                f"{what}: {asked:,} asked, {allowed:,} allowed; "
                f"from Python, limits=Limits({limit}={asked}) allows it if you trust it",
                limit=limit,
                asked=asked,
                allowed=allowed,
            )


class Budget:
    """Bytes in use, against a bound. From any thread.

    Whoever is slow holds what it uses for long, so that others may have to wait for it; they wait
    with a bound, and ask for less while much is in use.

    Args:
        total_bytes: most that is in use at once.
    """

    def __init__(self, total_bytes: int) -> None:
        self._total = total_bytes
        self._used = 0
        self._changed = threading.Condition()

    @property
    def used(self) -> int:
        """Bytes in use."""
        return self._used

    def fitting(self, most: int, least: int) -> int:
        """How much to ask for: `most`, or `least` while half of everything is in use."""
        return most if 2 * (self._used + most) <= self._total else min(most, least)

    @contextlib.contextmanager
    def hold(self, count: int, within_s: float) -> Iterator[None]:
        """Use so many bytes while the block runs.

        Raises:
            LimitExceeded: there are not so many in all.
            TransferTimeout: others used too many of them for so long.
        """
        if count > self._total:
            raise LimitExceeded(
                f"a buffer of {count:,} bytes: {self._total:,} are there for all buffers; pass "
                f"limits=Limits(budget_bytes={count})",
                limit="budget_bytes",
                asked=count,
                allowed=self._total,
            )
        with self._changed:
            if not self._changed.wait_for(lambda: self._used + count <= self._total, within_s):
                raise TransferTimeout(
                    f"{count:,} bytes of buffers were not free for {within_s:g} s: {self._used:,} "
                    f"of {self._total:,} are in use",
                    phase="idle",
                )
            self._used += count
        try:
            yield
        finally:
            with self._changed:
                self._used -= count
                self._changed.notify_all()
