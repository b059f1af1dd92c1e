"""Where a server may listen, and with which certificate. Knows addresses and TLS; not HTTP."""

import contextlib
import ipaddress
import socket
import ssl

from weighlock.errors import LocalProtocolError, Refused, SourceError
from weighlock.sources.access import Address, shown

__all__ = ["check_address", "server_tls", "shake_hands", "under_tls"]

_PARTING_S = 0.5


def check_address(host: str, public_url: str | None, *, is_open: bool) -> None:
    """Raise unless a server may listen there.

    Raises:
        Refused: others can reach it, and neither TLS nor `insecure` makes that right.
        LocalProtocolError: nobody can dial it by that name, and there is no other.
    """
    if not isinstance(host, str):
        raise TypeError(f"host is a text, not {host!r}")
    if not is_open and not _is_loopback(host):
        raise Refused(
            (
                f"{host} can be reached by others: "
                if _is_known(host)
                else f"no machine called {host} is known here; for one that others can reach, "
            )
            + "give a certificate (tls_cert=, --tls-cert), or spell out insecure=True (--insecure)"
        )
    if public_url is not None:
        check_public_url(public_url)
    elif _is_wildcard(host):
        raise LocalProtocolError(
            f"{host} stands for every address: name the one others use with "
            "public_url= (--public-url)"
        )


def _is_known(host: str) -> bool:
    """Whether that leads to an address: an empty name stands for every one."""
    try:
        return not host or bool(socket.getaddrinfo(host, None))
    except (OSError, UnicodeError):
        return False


def check_public_url(url: str) -> None:
    """Raise `LocalProtocolError` unless tickets can be made of it by adding to its end."""
    try:
        address = Address.of(url)
    except SourceError as error:
        raise LocalProtocolError(
            f"public_url {shown(url)!r}: give scheme and host, as in https://weights.example:8400"
        ) from error
    if "?" in address.target or address.fragment:
        raise LocalProtocolError(f"public_url {shown(url)!r}: what follows its path has no place")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_wildcard(host: str) -> bool:
    try:
        return host == "" or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def server_tls(cert: str | None, key: str | None, client_ca: str | None) -> ssl.SSLContext | None:
    """A context for TLS 1.2 or newer, that asks clients for a certificate if told whose.

    Returns:
        None if there is no certificate.

    Raises:
        LocalProtocolError: a key, or whom to admit, was given without one. Nobody would be turned
            away, although that was asked for.
    """
    if cert is None:
        if key is not None or client_ca is not None:
            given = "tls_key" if client_ca is None else "client_ca"
            raise LocalProtocolError(f"{given} without a certificate: give tls_cert as well")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key)
        if client_ca is not None:
            context.load_verify_locations(client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise SourceError(f"certificate {cert}: {error}") from error
    return context


def under_tls(context: ssl.SSLContext, sock: socket.socket) -> ssl.SSLSocket:
    """The socket under TLS, before hands are shaken: from here on it is this one that is shut."""
    return context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)


def shake_hands(sock: ssl.SSLSocket, timeout_s: float) -> None:
    """Begin to speak TLS.

    Raises:
        OSError: the peer does not, or is not admitted; it has been told why.
    """
    sock.settimeout(timeout_s)
    try:
        sock.do_handshake()
    except OSError:
        _part(socket.socket(fileno=sock.detach()))
        raise


def _part(sock: socket.socket) -> None:
    """Close after the alert was read: closing with unread bytes would reset it away."""
    with sock, contextlib.suppress(OSError):
        sock.settimeout(_PARTING_S)
        sock.shutdown(socket.SHUT_WR)
        for _ in range(16):
            if not sock.recv(4096):
                break
