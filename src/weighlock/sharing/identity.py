"""Ids that outlive the server: the same file, unchanged, has the same URL after a restart.

An id is the keyed hash of path and fingerprint; the key is 32 random bytes in a file that only its
owner can read. Who has neither key nor URL cannot guess it.
"""

import fcntl
import os
import secrets
from collections.abc import Iterator

from blake3 import blake3

from weighlock.errors import DiskError, SourceError
from weighlock.sources.inflated import InflatedSource
from weighlock.sources.joined import Joined
from weighlock.sources.local import FileSource
from weighlock.sources.window import Window
from weighlock.tensors.catalog import Catalog

__all__ = [
    "default_secret_path",
    "page_token",
    "secret",
    "stable_id",
    "stable_inbox_id",
    "ticket_key",
    "token_in",
]

_SECRET_BYTES = 32


def default_secret_path() -> str:
    """Where the key lies if nobody says otherwise."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return os.path.join(state, "weighlock", "secret")


def secret(path: str) -> bytes:
    """The key in that file, which is made if there is none.

    Raises:
        SourceError: it is not such a key, others can read it, or it cannot be opened.
        DiskError: it cannot be written.
    """
    fd = _open(path)
    try:
        mode, key = os.fstat(fd).st_mode, _read_or_fill(fd)
    except OSError as error:
        raise DiskError(f"{path}: no key can be written: {error}", errno=error.errno) from error
    finally:
        os.close(fd)
    if mode & 0o077:
        raise SourceError(f"{path}: others can read this key; `chmod 600` it, or remove it")
    if len(key) != _SECRET_BYTES:
        raise SourceError(f"{path}: is no key of {_SECRET_BYTES} bytes; remove it")
    return key


def _read_or_fill(fd: int) -> bytes:
    # Servers that start at the same moment must end with the same key: who has the lock first
    # fills the file, the others find it full.
    fcntl.flock(fd, fcntl.LOCK_EX)
    key = os.pread(fd, _SECRET_BYTES + 1, 0)
    if not key:
        key = secrets.token_bytes(_SECRET_BYTES)
        os.pwrite(fd, key, 0)
    return key


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC) if _has_bytes(path) else _made(path)
    except OSError as error:
        raise SourceError(f"{path}: cannot be read or made: {error.strerror}") from error


def _has_bytes(path: str) -> bool:
    try:
        return os.stat(path).st_size > 0
    except FileNotFoundError:
        return False


def _made(path: str) -> int:
    os.makedirs(os.path.dirname(path) or ".", mode=0o700, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def page_token(key: bytes) -> str:
    """The token of the page: the same after a restart, so that a page left open goes on."""
    return blake3(b"page", key=key).hexdigest(16)


def token_in(path: str) -> str:
    """The token in that file, as others can be told to read it too.

    Raises:
        SourceError: it cannot be read, or others can read it.
    """
    try:
        with open(path, encoding="ascii") as file:
            mode, text = os.fstat(file.fileno()).st_mode, file.read(1024)
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{path}: no token can be read from it: {error}") from error
    if mode & 0o077:
        raise SourceError(f"{path}: others can read this token; `chmod 600` it")
    return text.strip()


def stable_id(key: bytes, path: str, catalog: Catalog) -> str:
    """The id of a share of these files as they are now."""
    found = (file for ref in catalog.values() for s in ref.sources() for file in _innermost(s))
    sources = {file.path: file for file in found if isinstance(file, FileSource)}
    hasher = blake3(key=key)
    hasher.update(os.fsencode(os.path.abspath(path)))
    for name in sorted(sources):
        hasher.update(b"\0" + os.fsencode(name) + repr(sources[name].fingerprint).encode())
    return hasher.hexdigest(16)


def _innermost(source: object) -> Iterator[object]:
    """The sources that others are made of."""
    if isinstance(source, Joined):
        for run in source.runs:
            yield from _innermost(run.source)
    elif isinstance(source, (InflatedSource, Window)):
        yield from _innermost(source.source)
    else:
        yield source


def stable_inbox_id(key: bytes, path: str) -> str:
    """The id of an inbox that puts what comes there."""
    return blake3(b"inbox\0" + os.fsencode(os.path.abspath(path)), key=key).hexdigest(16)


def ticket_key(key: bytes) -> bytes:
    """What tickets of a server with that key are made with: they outlive it as its ids do."""
    return blake3(b"tickets", key=key).digest()
