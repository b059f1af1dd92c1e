"""Objects as messages whose large tensors a server offers. Knows drafts and shares; no socket."""

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, TypedDict, Unpack

from weighlock.errors import LocalProtocolError
from weighlock.joining import join_buffers
from weighlock.limits import Limits
from weighlock.messages.codecs import Registry
from weighlock.messages.message import THRESHOLD_BYTES, Draft, pack
from weighlock.sharing.share import Outcome
from weighlock.sharing.shared import Share

__all__ = ["PackOptions", "Packed", "pack_and_share"]


class ShareOptions(TypedDict, total=False):
    """Of `Server.share`: for whom, how long, and whether arrays may be written at once."""

    receivers: Iterable[str]
    expires_s: float | None
    idle_s: float | None
    on_done: Callable[[Outcome], object] | None
    snapshot: bool


class PackOptions(ShareOptions, total=False):
    """Of `Server.pack`."""

    threshold_bytes: int | None
    registry: Registry | None
    limits: Limits | None


class Shares(Protocol):
    """What a server does."""

    def share(self, tensors: Mapping[str, object], **options: Unpack[ShareOptions]) -> Share:
        """Offer tensors."""


class Packed:
    """A message, and the share of the tensors it refers to."""

    def __init__(self, draft: Draft, share: Share | None, receivers: tuple[str, ...]) -> None:
        self.share = share
        """What somebody must still pull; None if nothing had to be offered."""
        self.receivers = receivers
        """Those it is for, where they were named."""
        self._draft = draft
        self._body: bytes | None = None

    def __repr__(self) -> str:
        return f"<Packed with {self.share!r}>"

    @property
    def body(self) -> bytes:
        """The message. With several named receivers each has its own: `body_for(name)`."""
        if self._body is None:
            self._body = join_buffers(self.parts)
        return self._body

    @property
    def parts(self) -> list[bytes | memoryview]:
        """The message as buffers for `sendmsg`; tensors that ride along are views of their arrays.

        Raises:
            LocalProtocolError: it is for several receivers, and none is the right one.
        """
        if self.share is None:
            return self._draft.parts()
        if not self.receivers:
            return self._draft.parts(self.share.url)
        if len(self.receivers) == 1:
            return self.parts_for(self.receivers[0])
        raise LocalProtocolError(
            f"this message is for {', '.join(self.receivers)}, whose tickets differ: "
            "take body_for(name) or parts_for(name)"
        )

    def body_for(self, receiver: str) -> bytes:
        """The message for one of those it is for, with that one's ticket."""
        return join_buffers(self.parts_for(receiver))

    def parts_for(self, receiver: str) -> list[bytes | memoryview]:
        """As `parts`, for one of those it is for."""
        return self._draft.parts(None if self.share is None else self.share.url_for(receiver))


def pack_and_share(server: Shares, obj: object, **options: Unpack[PackOptions]) -> Packed:
    """Pack an object, and offer what must be offered: all that `Server.pack` promises."""
    unknown = options.keys() - PackOptions.__optional_keys__
    if unknown:  # also if nothing is offered, where nobody would miss a receiver
        raise TypeError(f"pack() got an unexpected keyword argument {min(unknown)!r}")
    draft = pack(
        obj,
        threshold_bytes=options.pop("threshold_bytes", THRESHOLD_BYTES),
        registry=options.pop("registry", None),
        limits=options.pop("limits", None),
    )
    names = options.get("receivers", ())
    receivers = (names,) if isinstance(names, str) else tuple(dict.fromkeys(names))
    if not draft.tensors:
        return Packed(draft, None, receivers)
    options["receivers"] = receivers
    share = server.share(draft.tensors, **options)  # type: ignore[misc]
    try:
        if share.size != draft.file_bytes:
            raise LocalProtocolError(
                f"the share has {share.size:,} bytes, its message says {draft.file_bytes:,}"
            )
        packed = Packed(draft, share, receivers)
        # A tree that receivers would refuse is refused here.
        packed.parts_for(receivers[0]) if receivers else packed.parts
    except BaseException:
        share.revoke()
        raise
    return packed
