"""Ids that outlive the server: the same file, unchanged, has the same URL after a restart.

An id is the keyed hash of a path and of the fingerprints of its files; the key is 32 random bytes
in a file that only its owner can read. Who has neither key nor URL cannot guess it. Where nothing
would tell that the content has changed, the id is random.
"""

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from typing import TypeAlias

from blake3 import blake3

from weighlock.errors import DiskError, SourceError
from weighlock.formats.sharded import is_index_name
from weighlock.sources.access import Address
from weighlock.sources.grid import BLOCK_BYTES
from weighlock.sources.http import HttpSource
from weighlock.sources.inflated import InflatedSource
from weighlock.sources.joined import Joined
from weighlock.sources.local import BytesSource, FileSource, Fingerprint
from weighlock.sources.window import Window
from weighlock.tensors.catalog import Catalog
from weighlock.tensors.ref import TensorRef
from weighlock.transfer.digests import Digests
from weighlock.transfer.layout import VirtualFile

__all__ = [
    "Files",
    "default_secret_path",
    "etag_of",
    "files_at",
    "page_token",
    "secret",
    "stable_id",
    "stable_inbox_id",
    "ticket_key",
    "token_in",
]

_SECRET_BYTES = 32

_TAG = "latest"
"""Names the folder beside it that holds the model."""

_DECIDING = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".npz", ".npy", ".distcp"),
    *(".metadata", _TAG),
)
"""How files of a directory end that decide what its tensors are: not its texts, nor its logs."""

Files: TypeAlias = tuple[tuple[str, Fingerprint], ...]


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
    # Zeros are what a power loss can leave of a key: everybody could guess them.
    if len(key) != _SECRET_BYTES or not any(key):
        raise SourceError(f"{path}: is no key of {_SECRET_BYTES} bytes; remove it")
    return key


def _read_or_fill(fd: int) -> bytes:
    # One that is there is read without a lock: NFS gives none for a file that is open for reading.
    return os.pread(fd, _SECRET_BYTES + 1, 0) or _filled(fd)


def _filled(fd: int) -> bytes:
    # Servers that start at the same moment must end with the same key: who has the lock first
    # fills the file, the others find it full.
    fcntl.flock(fd, fcntl.LOCK_EX)
    key = os.pread(fd, _SECRET_BYTES + 1, 0)
    if key:
        return key
    key = secrets.token_bytes(_SECRET_BYTES)
    taken = os.pwrite(fd, key, 0)
    if taken != len(key):
        os.ftruncate(fd, 0)  # for who comes next, when there is room
        raise OSError(errno.ENOSPC, f"took {taken} of {len(key)} bytes")
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


def files_at(path: str) -> Files:
    """The files at a path as they are now; to be asked before the path is opened.

    Also those from which no tensor is read, but where all the others lie: an index, a pickle.
    """
    return tuple(sorted(_files_at(path)))


def _files_at(path: str) -> Iterator[tuple[str, Fingerprint]]:
    try:
        names = sorted(os.listdir(path)) if os.path.isdir(path) else None
    except OSError:  # opening says so
        return
    if names is None:
        yield from _file(path)
        return
    for name in names:
        inner = os.path.join(path, name)
        if name.endswith(_DECIDING) or is_index_name(name):
            yield from _file(inner)
        if _TAG in names and os.path.isdir(inner) and not os.path.islink(inner):
            yield from _files_at(inner)


def _file(path: str) -> Iterator[tuple[str, Fingerprint]]:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return
    if stat.S_ISREG(status.st_mode):
        yield os.path.abspath(path), Fingerprint.of(status)


def stable_id(key: bytes, path: str, catalog: Catalog, before: Files) -> str:
    """The id of a share of what a path or a URL holds now.

    Args:
        key: makes it one that nobody can guess.
        path: what was opened.
        catalog: what was found there.
        before: `files_at(path)` before it was opened. Who changes a file meanwhile changes the id.
    """
    origins = {origin for ref in catalog.values() for origin in _origins(ref)}
    seen = (before, files_at(path), _files_of(origins)) if before else _behind(path, origins)
    if seen is None:
        return secrets.token_hex(16)
    place = os.path.abspath(path) if before else path
    return blake3(repr((place, seen)).encode(), key=key).hexdigest(16)


def etag_of(share_id: str, file: VirtualFile, digests: Digests) -> str:
    """The strong ETag of a share: the same for the same content, also under an id used again.

    What is not hashed yet is told by the files it lies in, and by what was read of it.
    """
    hasher = blake3(share_id.encode())
    hasher.update(blake3(file.header).digest())
    root = digests.root
    if root is None:
        origins = {origin for segment in file.segments for origin in _origins(segment.ref)}
        told = sorted(repr(told) for told in map(_told, origins))
        hasher.update(repr(told).encode())
    else:
        hasher.update(root)
    return f'"{hasher.hexdigest(16)}"'


def _told(origin: object) -> object:
    """What differs if one of the origins of a share is not what it was."""
    if isinstance(origin, FileSource):
        return origin.path, origin.fingerprint
    if isinstance(origin, HttpSource):
        return origin.remote.address.url, origin.size, origin.remote.resource.validator
    if isinstance(origin, BytesSource):
        hasher = blake3()
        for offset in range(0, origin.size, BLOCK_BYTES):
            buffer = bytearray(min(BLOCK_BYTES, origin.size - offset))
            origin.read_into(offset, memoryview(buffer))
            hasher.update(buffer)
        return hasher.digest()
    return None


def _files_of(origins: set[object]) -> Files:
    files = {(one.path, one.fingerprint) for one in origins if isinstance(one, FileSource)}
    return tuple(sorted(files, key=repr))


def _behind(url: str, origins: set[object]) -> object:
    """What tells that the one file behind a URL has changed; None if nothing does.

    Of tensors that do not lie in that very file it is not known what decided where they lie.
    """
    found = [one for one in origins if isinstance(one, HttpSource)]
    if len(origins) != 1 or not found or found[0].remote.address != Address.of(url):
        return None
    validator = found[0].remote.resource.validator
    return None if validator == (None, None) else (found[0].size, validator)


def _origins(ref: TensorRef) -> Iterator[object]:
    """What the bytes of a tensor come from in the end; None if nobody knows."""
    is_known = False
    for source in ref.sources():
        is_known = True
        yield from _innermost(source)
    if not is_known:
        yield None


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
