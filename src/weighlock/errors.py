"""The error tree: one class per kind of failure, all below `WeighlockError`.

```
WeighlockError
├─ FormatError (ValueError)      bytes are not what they claim to be        .source .offset
│  ├─ HeaderError                the header cannot be read as a header
│  ├─ LayoutError                names, shapes, dtypes or offsets contradict each other
│  ├─ UnsupportedDType           an element type this format or library does not have
│  ├─ TruncatedFile              the file ends before what it announces
│  └─ UnsupportedPickle          a pickle that is broken, or that only code could read
├─ SourceError (OSError)         bytes could not be read
│  ├─ NotFound (FileNotFoundError)  there is no such file
│  ├─ NotAllowed (PermissionError)  the system does not let us read it
│  ├─ ShortRead                  the source ended early                     .wanted .got
│  └─ SourceChanged              the file is no longer the one that was opened
├─ DiskError (OSError)           bytes could not be put
│  ├─ NoSpace                    the disk is or would be full           .wanted_bytes .free_bytes
│  ├─ SpoolClosed                the temporary directory that held them was closed
│  └─ NotDurable                 fsync failed: the new file was discarded, never retried
├─ TransferError                 weights could not be moved between machines
│  ├─ ShareGone                  the share is over or never was                           .reason
│  ├─ Refused                    the other side, or our own policy, does not allow it
│  ├─ Aborted                    somebody on this side asked to stop                      .reason
│  ├─ ChunkCorrupt               a block does not match its digest (retryable)            .chunk
│  ├─ PeerLost (OSError)         the connection broke or never came (retryable)
│  └─ TransferTimeout (TimeoutError)  no progress within the time allowed (retryable)     .phase
├─ ProtocolError                 something that is not the protocol was said
│  ├─ LocalProtocolError         by this side: a fault of the program
│  └─ RemoteProtocolError        by the other side
├─ MessageError                  an object and its message do not go together              .path
│  ├─ CodecRefused (TypeError)   the object holds something that no message carries
│  └─ MessageInvalid (ValueError)  the bytes are not a message
├─ CombineError (ValueError)     models do not go together, or one is refused .contributor .tensor
└─ LimitExceeded                 input asks for more than `Limits` allows   .limit .asked .allowed
```

Messages say what happened, to which thing, with both numbers, and what to do. Whether a repeat may
help is told by `retryable` on the class, never by the text. Knows no other module of the package.
"""

from typing import ClassVar

__all__ = [
    "Aborted",
    "ChunkCorrupt",
    "CodecRefused",
    "CombineError",
    "DiskError",
    "FormatError",
    "HeaderError",
    "LayoutError",
    "LimitExceeded",
    "LocalProtocolError",
    "MessageError",
    "MessageInvalid",
    "NoSpace",
    "NotAllowed",
    "NotDurable",
    "NotFound",
    "PeerLost",
    "ProtocolError",
    "Refused",
    "RemoteProtocolError",
    "ShareGone",
    "ShortRead",
    "SourceChanged",
    "SourceError",
    "SpoolClosed",
    "TransferError",
    "TransferTimeout",
    "TruncatedFile",
    "UnsupportedDType",
    "UnsupportedPickle",
    "WeighlockError",
]


class WeighlockError(Exception):
    """The root of every error raised on purpose."""

    retryable: ClassVar[bool] = False

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions come back from worker processes as pickles, which call the class with `args`
        # alone: not enough where there are numbers beside the message.
        state = dict(self.__dict__)
        if isinstance(self, OSError):
            state["errno"] = self.errno
        return _unpickled, (type(self), self.args, state)


def _unpickled(
    kind: type[WeighlockError], args: tuple[object, ...], state: dict[str, object]
) -> WeighlockError:
    error = kind.__new__(kind, *args)
    error.args = args
    for name, value in state.items():
        setattr(error, name, value)
    return error


class FormatError(WeighlockError, ValueError):
    """Bytes are not what they claim to be."""

    def __init__(
        self, message: str, *, source: str | None = None, offset: int | None = None
    ) -> None:
        super().__init__(f"{source}: {message}" if source else message)
        self.source = source
        """The label of the source that holds the bytes, where known."""
        self.offset = offset
        """The byte in that source at which reading failed, where known."""


class HeaderError(FormatError):
    """The header cannot be read as a header."""


class LayoutError(FormatError):
    """Names, shapes, dtypes or offsets contradict each other."""


class UnsupportedDType(FormatError):
    """An element type this format or library does not have."""


class TruncatedFile(FormatError):
    """The file ends before what it announces."""


class UnsupportedPickle(FormatError):
    """A pickle that is broken, or that only code could read; names the opcode and its byte."""


class SourceError(WeighlockError, OSError):
    """Bytes could not be read."""

    def __init__(self, message: str, *, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


class NotFound(SourceError, FileNotFoundError):
    """There is no such file."""


class NotAllowed(SourceError, PermissionError):
    """The system does not let us read it."""


class ShortRead(SourceError):
    """The source ended before the read was full."""

    def __init__(self, message: str, *, wanted: int, got: int) -> None:
        super().__init__(message)
        self.wanted = wanted
        """Bytes that were asked for."""
        self.got = got
        """Bytes that came."""


class SourceChanged(SourceError):
    """The file is no longer the one that was opened."""


class DiskError(WeighlockError, OSError):
    """Bytes could not be put, or the system did not give what that takes: a directory, a port.

    `errno` is the system's, where it said one.
    """

    def __init__(self, message: str, *, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


class NoSpace(DiskError):
    """The disk is full, or would be."""

    def __init__(
        self, message: str, *, wanted_bytes: int, free_bytes: int, errno: int | None = None
    ) -> None:
        super().__init__(message, errno=errno)
        self.wanted_bytes = wanted_bytes
        """What it would take."""
        self.free_bytes = free_bytes
        """What there is."""


class SpoolClosed(DiskError):
    """The spool that holds, or should hold, the bytes was closed, or belongs to another process."""


class NotDurable(DiskError):
    """An fsync failed; what it was to protect has been discarded and is not retried."""


class TransferError(WeighlockError):
    """Weights could not be moved between machines."""


class ShareGone(TransferError):
    """The share is over, or there never was one of that id."""

    def __init__(self, message: str, *, reason: str = "unknown") -> None:
        super().__init__(message)
        self.reason = reason
        """unknown, revoked, expired or settled."""


class Refused(TransferError):
    """The other side, or the policy of this one, does not allow it."""


class Aborted(TransferError):
    """Somebody on this side asked to stop."""

    def __init__(self, message: str, *, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        """What `abort.set()` was told."""


class ChunkCorrupt(TransferError):
    """A block does not match its digest."""

    retryable: ClassVar[bool] = True

    def __init__(self, message: str, *, chunk: int) -> None:
        super().__init__(message)
        self.chunk = chunk
        """The number of the block."""


class PeerLost(TransferError, OSError):
    """The connection broke, could not be made, or was answered that nobody has time."""

    retryable: ClassVar[bool] = True

    def __init__(
        self, message: str, *, retry_after_s: float | None = None, hashed_blocks: int = 0
    ) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """When the other side asked to come back, where it did."""
        self.hashed_blocks = hashed_blocks
        """How far it is with the digests that were asked for, where it says so."""


class TransferTimeout(TransferError, TimeoutError):
    """No progress within the time allowed."""

    retryable: ClassVar[bool] = True

    def __init__(self, message: str, *, phase: str) -> None:
        super().__init__(message)
        self.phase = phase
        """connect, first_byte or idle."""


class ProtocolError(WeighlockError):
    """Something that is not the protocol was said."""


class LocalProtocolError(ProtocolError):
    """This side said it: a fault of the program."""


class RemoteProtocolError(ProtocolError):
    """The other side said it."""


class MessageError(WeighlockError):
    """An object and its message do not go together."""

    def __init__(self, message: str, *, path: str | None = None) -> None:
        super().__init__(f"{message}, at {path}" if path else message)
        self.path = path
        """The place in the object, as in `$.weights['layer.3'].hook`, where known."""


class CodecRefused(MessageError, TypeError):
    """The object holds something that no message carries."""


class MessageInvalid(MessageError, ValueError):
    """The bytes are not a message, or not one that this side understands."""


class CombineError(WeighlockError, ValueError):
    """Models do not go together, or what one of them holds is refused."""

    def __init__(
        self, message: str, *, contributor: str | None = None, tensor: str | None = None
    ) -> None:
        super().__init__(message)
        self.contributor = contributor
        """Whose fault it is, where it is somebody's."""
        self.tensor = tensor
        """In which tensor, where it is in one."""


class LimitExceeded(WeighlockError):
    """Input asks for more than `Limits` allows."""

    def __init__(self, message: str, *, limit: str, asked: int, allowed: int) -> None:
        super().__init__(message)
        self.limit = limit
        """The field of `Limits`."""
        self.asked = asked
        self.allowed = allowed
