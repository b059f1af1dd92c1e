"""Which proxy stands between this process and a server, as the environment says it.

Knows `http_proxy`, `https_proxy` and `no_proxy`, in small letters and in capitals, as curl and most
others read them. This machine itself is never asked for through a proxy.
"""

import ipaddress
from base64 import b64encode
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit
from urllib.request import (  # type: ignore[attr-defined] # which typeshed lacks
    getproxies_environment,
    proxy_bypass_environment,
)

from weighlock.errors import SourceError
from weighlock.sources.access import Address, shown

__all__ = ["Proxy", "proxy_for"]


@dataclass(frozen=True, slots=True)
class Proxy:
    """An HTTP proxy."""

    host: str
    port: int
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    """What it is shown with every request that it reads."""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def proxy_for(address: Address) -> Proxy | None:
    """The proxy by which an address is to be asked for; None: none.

    Raises:
        SourceError: it is none that can be spoken to.
    """
    found = getproxies_environment()
    url = found.get(address.scheme)
    if not url or _is_here(address.host):
        return None
    if proxy_bypass_environment(f"{address.host}:{address.port}", found):
        return None
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port or 80
    except ValueError as error:
        raise _unusable(address, url) from error
    if parts.scheme != "http" or not parts.hostname:
        raise _unusable(address, url)
    headers = {}
    if parts.username is not None:
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers["Proxy-Authorization"] = f"Basic {b64encode(login.encode()).decode()}"
    return Proxy(parts.hostname, port, headers)


def _unusable(address: Address, url: str) -> SourceError:
    return SourceError(
        f"{shown(address.url)}: is to be asked for by {shown(url)}, as {address.scheme}_proxy "
        f"says, which is no http:// proxy; to ask without one, name {address.host} in no_proxy"
    )


def _is_here(host: str) -> bool:
    if host.lower() == "localhost" or host.lower().endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
