"""Tickets that carry a name: a URL whose fragment proves who its holder is.

A fragment never travels in a request for data, so that caches see one URL for everybody; on the
control plane it is shown. Pure: knows keys and text.
"""

import hmac
import re

from blake3 import blake3

from weighlock.sources.access import NAME

__all__ = ["MAC", "check_name", "is_genuine", "mac_of", "ticket"]

MAC = "weighlock-mac"
"""The header that shows it."""

_NAME = re.compile(NAME)


def check_name(name: str) -> str:
    """The name, if it can be one.

    Raises:
        ValueError: it is empty, too long, or has other characters than letters, digits, `._-`.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} cannot be a name: 1 to 64 letters, digits and ._- that begin with a letter "
            "or digit"
        )
    return name


def mac_of(key: bytes, offer_id: str, name: str) -> str:
    """What proves that its holder was given the ticket of that name."""
    return blake3(f"{offer_id}\0{name}".encode(), key=key).hexdigest(16)


def is_genuine(key: bytes, offer_id: str, name: str, mac: str | None) -> bool:
    """Whether a mac is the one of that name, in a time that says nothing."""
    # As bytes: a header may hold what is not ASCII, and text that is not cannot be compared.
    return hmac.compare_digest(mac_of(key, offer_id, name).encode(), (mac or "").encode())


def ticket(url: str, key: bytes, offer_id: str, name: str) -> str:
    """The URL for one name."""
    return f"{url}#r={check_name(name)}.{mac_of(key, offer_id, name)}"
