"""What sockets, TLS and `http.client` raise, as errors of our tree. Knows no connection."""

import http.client
import re
import ssl

from weighlock.errors import (
    PeerLost,
    Refused,
    RemoteProtocolError,
    TransferTimeout,
    WeighlockError,
)
from weighlock.sources.words import printable

__all__ = ["THEIRS", "Translated", "is_plain", "translated"]

_REFUSING = re.compile(
    "_ALERT_.*(?:CERT|UNKNOWN_CA|ACCESS_DENIED|PROTOCOL_VERSION|HANDSHAKE_FAILURE|SECURITY"
    "|UNRECOGNIZED_NAME|UNKNOWN_PSK|APPLICATION_PROTOCOL)"
)
"""Alerts that mean this client. Others come from servers that restart, and from flipped bits."""

THEIRS = (OSError, ValueError, http.client.HTTPException)
"""What they raise. Some errors of ours are such too: who may meet both asks which it is."""


class Translated:
    """Makes what sockets, TLS and http.client raise in a block errors of our tree."""

    __slots__ = ("_label", "_phase")

    def __init__(self, label: str, phase: str) -> None:
        self._label = label
        self._phase = phase

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if isinstance(error, THEIRS) and not isinstance(error, WeighlockError):
            raise translated(error, self._label, self._phase) from error


def is_plain(error: ssl.SSLError) -> bool:
    """Whether the other side answered a handshake with something that is not TLS."""
    return "WRONG_VERSION" in str(error)


def translated(error: Exception, label: str, phase: str) -> WeighlockError:
    """What they raised, as an error of our tree."""
    match error:
        case TimeoutError() | BlockingIOError():
            return TransferTimeout(f"{label}: no answer in time ({phase})", phase=phase)
        case ssl.SSLCertVerificationError():
            return Refused(
                f"{label}: its certificate is not trusted: {error.verify_message}; pass its CA: "
                "--ca ca.pem, or access=Access(origins={'host:port': Credential(ca='ca.pem')})"
            )
        case ssl.SSLEOFError() | ssl.SSLZeroReturnError():
            return PeerLost(f"{label}: the connection was closed within TLS")
        case ssl.SSLError() if _REFUSING.search(str(error.reason)):
            return Refused(f"{label}: refused the TLS connection: {error.reason}")
        case ssl.SSLError() if phase == "connect" and "_ALERT_" not in str(error.reason):
            what = "speaks no TLS" if is_plain(error) else "TLS failed"
            return Refused(f"{label}: {what}: {error.reason or error}")
        case ssl.SSLError():
            return PeerLost(f"{label}: TLS broke off: {error.reason or error}")
        case http.client.RemoteDisconnected() | http.client.IncompleteRead():
            return PeerLost(f"{label}: the connection was closed without a reply")
        case http.client.HTTPException():
            what = f"{type(error).__name__}: {str(error)[:100]!r}"
            return RemoteProtocolError(f"{label}: does not speak HTTP ({what})")
        case ValueError():
            return RemoteProtocolError(
                f"{label}: its reply makes no sense: {printable(str(error))}"
            )
    return PeerLost(f"{label}: {getattr(error, 'strerror', None) or error}")
