"""What may be dialled, and with which credentials. Knows origins; opens no connection.

Credentials belong to an origin and never travel: neither pickled, nor packed, nor shown.
"""

import re
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NoReturn
from urllib.parse import quote, urljoin, urlsplit

from weighlock.errors import LocalProtocolError, SourceError
from weighlock.sources.words import printable

__all__ = ["NAME", "Access", "Address", "Credential", "shown"]

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
"""What those who take part in a transfer may be called: a label in a URL that needs no escape."""

_ID = re.compile("[0-9a-f]{32}")
_HOLDER = re.compile(rf"r=({NAME})\.([0-9a-f]{{32}})")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_TEXT = re.compile(r"[\t -~\x80-\xff]*")
_OF_ONE_FILE = {"versionid", "generation", "snapshot"}
"""How S3, Google and Azure name a version of an object in a query."""
_SIGNING = frozenset(
    ("awsaccesskeyid", "googleaccessid", "signature", "expires", "policy", "key-pair-id", "token")
)
_SIGNING_AZURE = frozenset(
    {
        *("sv", "st", "se", "sr", "sp", "sig", "spr", "sip", "ss", "srt", "sdd"),
        *("skoid", "sktid", "skt", "ske", "sks", "skv", "saoid", "suoid", "scid"),
    }
)
"""Fields of a query that differ from one signature of a URL to the next, all in small letters."""
_ASCII = "".join(map(chr, range(0x20, 0x7F)))
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Address:
    """A URL, taken apart. The fragment stays here: it never travels."""

    scheme: str
    host: str
    port: int
    target: str = field(repr=False)
    """Path and query, as a request names them."""
    fragment: str = field(default="", repr=False)

    @classmethod
    def of(cls, url: str) -> "Address":
        """The parts of an http or https URL.

        Raises:
            SourceError: it is not one.
            TypeError: it is no text at all.
        """
        if not isinstance(url, str):
            raise TypeError(f"a URL is a str, not a {type(url).__name__}")
        try:
            parts = urlsplit(url.strip())
            port = parts.port
        except ValueError as error:
            raise SourceError(f"{shown(url)}: is not a URL") from error
        if parts.scheme not in _PORTS or not parts.hostname:
            raise SourceError(
                f"{shown(url)}: only http:// and https:// URLs with a host can be opened"
            )
        if parts.username is not None:
            raise SourceError(
                f"{shown(url)}: holds a user name; pass credentials as "
                "--header 'Authorization: …', or as "
                "access=Access(origins={'host': Credential(headers=…)})"
            )
        if any(char <= " " or char == "\x7f" for char in parts.netloc):
            raise SourceError(f"{shown(url)}: is not a URL")
        # What is escaped stays, what must be is: users paste both.
        target = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
        if parts.query:
            target += "?" + quote(parts.query, safe="/%:@!$&'()*+,;=~-._?")
        return cls(
            parts.scheme, parts.hostname, port or _PORTS[parts.scheme], target, parts.fragment
        )

    @property
    def origin(self) -> str:
        """Scheme, host and port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    @property
    def url(self) -> str:
        """The whole URL, without its fragment."""
        return self.origin + self.target

    @property
    def ticket(self) -> str:
        """The whole URL, with who its holder is."""
        return f"{self.url}#{self.fragment}" if self.fragment else self.url

    @property
    def holder(self) -> tuple[str, str] | None:
        """The name on a ticket and what proves it; None if it is nobody's in particular."""
        found = _HOLDER.fullmatch(self.fragment)
        return None if found is None else (found[1], found[2])

    def redirected(self, location: str) -> "Address":
        """Where a redirect leads.

        Args:
            location: as `http.client` gives it: what a server sent as UTF-8 reads as Latin-1.

        Raises:
            SourceError: it leads to no URL.
        """
        try:
            url = urljoin(self.url, quote(location.encode("latin-1"), safe=_ASCII))
        except ValueError as error:
            raise SourceError(f"{shown(self.url)}: leads to what is not a URL") from error
        return Address.of(url)

    def beside(self, path: str) -> "Address":
        """The address of what has that path in the same directory.

        The query goes along: it may hold a token that opens the whole directory. Not by `urljoin`:
        that drops empty segments, which S3 has in names.
        """
        target = f"{self._path.rpartition('/')[0]}/{path}{self.query_beside}"
        return replace(self, target=target, fragment="")

    def below(self, path: str) -> "Address":
        """The address of what has that path where this one is a directory; the query likewise."""
        target = f"{self._path.rstrip('/')}/{path}{self.query_beside}"
        return replace(self, target=target, fragment="")

    def sibling(self, name: str) -> "Address":
        """The address of a file of that very name in the same directory."""
        return self.beside(quote(name, safe=""))

    @property
    def unsigned(self) -> str:
        """The URL without what differs from one signature of it to the next, or may."""
        path, _, query = self.url.partition("?")
        fields = query.split("&")
        names = {_key(field) for field in fields}
        signing = _SIGNING | _SIGNING_AZURE if "sig" in names else _SIGNING
        kept = "&".join(
            field
            for field in fields
            if _key(field) not in signing and not _key(field).startswith(("x-amz-", "x-goog-"))
        )
        return f"{path}?{kept}" if kept else path

    @property
    def _path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def query_beside(self) -> str:
        """The query that files in the same directory are asked for with, and its question mark.

        What tells versions of one file apart is left out.
        """
        fields = self.target.partition("?")[2].split("&")
        kept = "&".join(field for field in fields if _key(field) not in _OF_ONE_FILE)
        return f"?{kept}" if kept else ""


def _key(field: str) -> str:
    """The name of a field of a query."""
    return field.partition("=")[0].lower()


def shown(url: str) -> str:
    """A URL as it may be shown and logged: without user, query, fragment and the id of a share."""
    try:
        parts = urlsplit(url.strip())
    except ValueError:
        return "<not a URL>"
    pieces = parts.path.split("/")
    for number, piece in enumerate(pieces):
        is_after = number > 0 and pieces[number - 1] in ("s", "i")
        if (is_after and piece) or _ID.fullmatch(piece):
            pieces[number] = "…"  # the id is the capability
    host = parts.netloc.rpartition("@")[2]
    query = "?…" if parts.query else ""
    start = f"{parts.scheme}://{host}" if parts.scheme or host else ""
    return printable(f"{start}{'/'.join(pieces)}{query}", 300)


@dataclass(frozen=True, slots=True)
class Credential:
    """What one origin is shown: headers, and certificates for TLS.

    Raises:
        SourceError: a header cannot be sent. Its text is not shown: it may be a secret.
    """

    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    ca: str | None = None
    """File of the certificates to trust instead of the system's."""
    cert: str | None = None
    """File of this side's certificate, for servers that ask for one."""
    key: str | None = None
    """File of its key, if that is not in the same file."""

    def __post_init__(self) -> None:
        for name, text in self.headers.items():
            if not _TOKEN.fullmatch(name):
                raise SourceError(f"{name!r} cannot be the name of a header")
            if not _TEXT.fullmatch(text):
                raise SourceError(
                    f"header {name!r}: its text holds a line break, or what Latin-1 has not; what "
                    "was read from a file often ends with one: strip it"
                )

    def __reduce__(self) -> NoReturn:
        raise TypeError("credentials are not pickled: make them where they are used")

    def tls(self) -> ssl.SSLContext:
        """A context that verifies the server, TLS 1.2 or newer."""
        try:
            context = ssl.create_default_context(cafile=self.ca)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key)
        except (OSError, ssl.SSLError) as error:
            raise SourceError(f"certificates {self.ca or self.cert}: {error}") from error
        return context


class Access:
    """What may be dialled, and with what.

    Args:
        allow: hosts, or hosts with ports, that URLs found in messages may name; a text is one.
        origins: credentials by origin: `"host"`, `"host:port"` or `"https://host:port"`.

    Raises:
        LocalProtocolError: what `allow` names can be no host: it would allow nothing.
        TypeError: a host is no text, or what is to be shown to an origin no `Credential`.
    """

    __slots__ = ("_allow", "_origins")

    def __init__(
        self, allow: str | Iterable[str] = (), origins: Mapping[str, Credential] | None = None
    ) -> None:
        hosts = (allow,) if isinstance(allow, str) else tuple(allow)
        self._allow = frozenset(_normal(_checked_host(name)) for name in hosts)
        self._origins: dict[str, Credential] = {}
        for name, found in (origins or {}).items():
            if not isinstance(found, Credential):  # not shown: it may be a secret
                raise TypeError(
                    f"origins: what {name!r} is shown is a {type(found).__name__}; pass a "
                    "Credential, as in Credential(headers={'Authorization': …})"
                )
            self._origins[_normal(name)] = found

    def __repr__(self) -> str:
        return f"<Access to {sorted(self._allow)} with {len(self._origins)} credentials>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("Access is not pickled: it holds credentials; make one where it is used")

    def allows(self, address: Address) -> bool:
        """Whether a URL that came in a message may be dialled."""
        host = address.host.lower()
        return host in self._allow or f"{host}:{address.port}" in self._allow

    def credential(self, address: Address) -> Credential:
        """What to show that origin; nothing if none was given for it."""
        host = address.host.lower()
        keys = [_normal(address.origin), f"{host}:{address.port}"]
        if address.port == _PORTS[address.scheme]:
            keys += [f"{address.scheme}://{host}", host]
        else:
            keys += [host]
        return next((self._origins[key] for key in keys if key in self._origins), Credential())


def _checked_host(name: object) -> str:
    """A host that can be one, or an error that says how to name it."""
    if not isinstance(name, str):
        raise TypeError(f"allow: a host is a text, not {name!r}")
    text = name.strip()
    if "://" in text or "/" in text:
        host = urlsplit(text if "://" in text else f"//{text}").netloc.rpartition("@")[2]
        raise LocalProtocolError(
            f"allow: {shown(name)!r} is a URL, or a part of one; hosts are allowed, with a port or "
            f"without: {host or 'host:port'!r}"
        )
    if "*" in text:
        raise LocalProtocolError(
            f"allow: {name!r}: there are no patterns here; name every host that may be dialled"
        )
    if not text:
        raise LocalProtocolError("allow: a host without a name allows nothing")
    return text


def _normal(name: str) -> str:
    """An origin as it is compared: without brackets around an address of many colons."""
    return name.lower().rstrip("/").replace("[", "").replace("]", "")
