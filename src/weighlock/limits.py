"""Every bound in one frozen value. Knows numbers and their reasons; enforces nothing by itself."""

from dataclasses import dataclass

from weighlock.errors import LimitExceeded

__all__ = ["Limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What input may ask for. Checked before anything is allocated."""

    header_bytes: int = 100_000_000
    """Longest header of a file or index of a sharded model: the bound of the format itself."""

    tensors: int = 1_000_000
    """Most tensors in one file; the largest models published so far have fewer than 200,000."""

    name_bytes: int = 4096
    """Longest name of a tensor in UTF-8."""

    rank: int = 64
    """Most dimensions of a tensor: numpy's own bound."""

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

    depth: int = 1000
    """Deepest nesting of lists, dicts and objects in a checkpoint."""

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

    gathered_bytes: int = 32 * 1024 * 1024
    """Bytes of strided or compressed tensors that a server keeps ready for the next range."""

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

    def check(self, limit: str, asked: int, what: str) -> None:
        """Raise `LimitExceeded` if `asked` is above the limit of that name."""
        allowed: int = getattr(self, limit)
        if asked > allowed:
            raise LimitExceeded(
                f"{what}: {asked:,} asked, {allowed:,} allowed; "
                f"pass limits=Limits({limit}={asked}) if you trust it",
                limit=limit,
                asked=asked,
                allowed=allowed,
            )
