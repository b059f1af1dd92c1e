"""What dead processes left: found, judged, removed. Knows owners and locks; not what files hold.

Only what is provably dead goes: nobody holds its lock, and the process that made it is gone. A lock
that cannot be had, an owner that cannot be read, another machine's boot on a file system that both
may write to: kept, and reported.
"""

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from weighlock.disk.effects import Disk, PosixDisk
from weighlock.disk.judging import Verdict, judge
from weighlock.disk.mounts import file_system
from weighlock.disk.owner import Owner, part_owner, start_time
from weighlock.disk.roots import open_inside, open_root
from weighlock.disk.spool import OWNER_NAME, PREFIX, remove_flat
from weighlock.errors import DiskError

__all__ = ["Leftover", "SweepReport", "sweep"]

_OWNER_BYTES = 256


@dataclass(frozen=True, slots=True)
class Leftover:
    """A spool or an unfinished file, and what became of it."""

    path: str
    nbytes: int
    """Bytes of the files in it."""
    state: Verdict
    """Whether its owner is `dead`, `alive`, or not known."""
    reason: str


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What a sweep found."""

    removed: tuple[Leftover, ...]
    """Gone; in a dry run, what would go."""
    kept: tuple[Leftover, ...]
    """Of living owners, or not provably of dead ones."""

    @property
    def removed_bytes(self) -> int:
        """Bytes that were freed."""
        return sum(leftover.nbytes for leftover in self.removed)


def sweep(
    root: "str | os.PathLike[str]",
    *,
    parts: bool = False,
    dry_run: bool = False,
    disk: Disk | None = None,
) -> SweepReport:
    """Remove the spools below a root whose owners are provably dead.

    Args:
        root: the directory that spools were made in, or files fetched to.
        parts: remove the unfinished files (`.part-`) of dead processes beside them as well, which
            the next fetch to the same destination would go on with.
        dry_run: only say what would go.
        disk: the effects; the machine's own if not given.

    Raises:
        DiskError: the root is not there, or not to be trusted; see `Spool`.
    """
    disk = disk or PosixDisk()
    path = os.path.abspath(os.fspath(root))
    try:
        directory = open_root(path, disk)
    except DiskError:
        raise
    except (OSError, ValueError) as error:
        number, why = getattr(error, "errno", None), getattr(error, "strerror", None)
        raise DiskError(f"{path}: cannot be swept: {why or error}", errno=number) from error
    with _closing(disk, directory):
        sweeper = _Sweeper(path, directory, disk, dry_run)
        try:
            names = sorted(disk.names(directory))
        except OSError as error:
            raise DiskError(
                f"{path}: cannot be swept: {error.strerror}", errno=error.errno
            ) from error
        for name in names:
            sweeper.look_at(name, parts)
    return SweepReport(tuple(sweeper.removed), tuple(sweeper.kept))


class _Sweeper:
    def __init__(self, path: str, root: int, disk: Disk, dry_run: bool) -> None:
        self._path = path
        self._root = root
        self._disk = disk
        self._dry_run = dry_run
        self._here = Owner.current()
        self._kind = file_system(root)
        self.removed: list[Leftover] = []
        self.kept: list[Leftover] = []

    def look_at(self, name: str, parts: bool) -> None:
        """Deal with one name, if it is of ours."""
        owner = part_owner(name) if parts else None
        try:
            if name.startswith(PREFIX):
                self._spool(name)
            elif owner is not None:
                self._part(name, owner)
        except FileNotFoundError:
            pass  # its owner, or another sweep, was faster
        except OSError as error:
            self._keep(name, 0, "unsure", f"it cannot be looked at: {error.strerror}")

    def _spool(self, name: str) -> None:
        inside = self._open(name)
        if inside is None:
            return
        with _closing(self._disk, inside):
            names = self._disk.names(inside)
            locked = self._disk.reopen(inside, OWNER_NAME) if OWNER_NAME in names else -1
            with _closing(self._disk, locked):
                owner = _owner_in(inside)
                state, reason = self._judge(owner, locked is None, not {*names} - {OWNER_NAME})
                nbytes = _bytes_in(inside, names)
                self._deal(name, inside, nbytes, state, reason, holds_owner=OWNER_NAME in names)

    def _part(self, name: str, owner: Owner) -> None:
        status = os.stat(name, dir_fd=self._root, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            inside = self._open(name)
            if inside is not None:
                with _closing(self._disk, inside):
                    nbytes = _bytes_in(inside, self._disk.names(inside))
                    is_locked = not self._disk.lock(inside)
                    self._deal(name, inside, nbytes, *self._judge(owner, is_locked, False))
            return
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            self._keep(name, 0, "unsure", "it is no file of this user")
            return
        locked = self._disk.reopen(self._root, name)
        with _closing(self._disk, locked):
            state, reason = self._judge(owner, locked is None, False)
            self._deal(name, None, status.st_size, state, reason)

    def _open(self, name: str) -> int | None:
        try:
            inside = open_inside(self._root, name)
        except FileNotFoundError:
            return None  # its owner was faster
        except OSError as error:
            self._keep(name, 0, "unsure", f"it cannot be opened: {error.strerror}")
            return None
        user = os.fstat(inside).st_uid
        if user == os.geteuid():
            return inside
        self._disk.close(inside)
        self._keep(name, 0, "unsure", f"it belongs to user {user}")
        return None

    def _judge(
        self, owner: Owner | None, is_locked: bool, holds_nothing: bool
    ) -> tuple[Verdict, str]:
        return judge(
            owner,
            is_locked=is_locked,
            holds_nothing=holds_nothing,
            here=self._here,
            started="0" if owner is None else start_time(owner.pid),
            kind=self._kind,
        )

    def _deal(
        self,
        name: str,
        inside: int | None,
        nbytes: int,
        state: Verdict,
        reason: str,
        *,
        holds_owner: bool = True,
    ) -> None:
        if state != "dead":
            self._keep(name, nbytes, state, reason)
            return
        try:
            if inside is not None and _has_directories(inside, self._disk.names(inside)):
                self._keep(name, nbytes, "unsure", "it holds a directory, and so is none of ours")
                return
            if self._dry_run:
                pass
            elif inside is None:
                self._disk.unlink(self._root, name)
            else:
                # Without an owner it is empty, unless its maker puts one in just now.
                remove_flat(self._disk, self._root, name, inside if holds_owner else -1)
        except FileNotFoundError:
            return  # somebody else swept it
        except OSError as error:
            self._keep(name, nbytes, "dead", f"it could not be removed: {error.strerror}")
            return
        self.removed.append(Leftover(os.path.join(self._path, name), nbytes, state, reason))

    def _keep(self, name: str, nbytes: int, state: Verdict, reason: str) -> None:
        self.kept.append(Leftover(os.path.join(self._path, name), nbytes, state, reason))


@contextlib.contextmanager
def _closing(disk: Disk, fd: int | None) -> Iterator[None]:
    try:
        yield
    finally:
        if fd is not None and fd >= 0:
            with contextlib.suppress(OSError):
                disk.unlock(fd)
            with contextlib.suppress(OSError):  # nothing was written through it
                disk.close(fd)


def _owner_in(directory: int) -> Owner | None:
    """Whom the owner's file of a spool names."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0)
    try:
        file = os.open(OWNER_NAME, flags, dir_fd=directory)
    except OSError:
        return None
    try:
        return Owner.parse(os.read(file, _OWNER_BYTES).decode("ascii", "replace"))
    except OSError:
        return None
    finally:
        os.close(file)


def _has_directories(directory: int, names: list[str]) -> bool:
    modes = (os.stat(n, dir_fd=directory, follow_symlinks=False).st_mode for n in names)
    return any(stat.S_ISDIR(mode) for mode in modes)


def _bytes_in(directory: int, names: list[str]) -> int:
    found = 0
    for name in names:
        with contextlib.suppress(OSError):
            found += os.stat(name, dir_fd=directory, follow_symlinks=False).st_size
    return found
