"""A file that is put in place when complete, and taken up again if that did not come to pass.

It has a `.part-` name beside its destination from the start. Whoever begins the same destination
anew adopts what a dead process, or one that let go, has left; what that holds is for the adopter to
find out. Locks are an optimisation: two that adopt the same file race for its name, and one wins.
"""

import contextlib
import os

from weighlock.disk.atomic import AtomicFile
from weighlock.disk.effects import Disk
from weighlock.disk.judging import judge
from weighlock.disk.mounts import file_system
from weighlock.disk.owner import NOBODY, Owner, owner_of, start_time, temporary_name

__all__ = ["ResumableFile"]


class ResumableFile(AtomicFile):
    """As `AtomicFile`, but what was written can be left for the next attempt.

    `keep()` leaves it, and so does who forgets it. A `commit()` that fails, be it by a signal,
    leaves it too, unless the system says that it lost what was written.

    Args:
        path: the destination.
        durable: fsync file and directory in `commit`.
        disk: the effects; the machine's own if not given.
    """

    def __init__(
        self, path: "str | os.PathLike[str]", *, durable: bool = True, disk: Disk | None = None
    ) -> None:
        self.adopted_bytes = 0
        """Length of the file that was taken up; 0 for a new one."""
        self._is_kept = False
        super().__init__(path, durable=durable, disk=disk)

    @property
    def temporary_path(self) -> str:
        """Where the file lies until it is put in place."""
        return os.path.join(os.path.dirname(self.path), self._temporary or "")

    def keep(self) -> bool:
        """Close the file and leave it as nobody's, for the next attempt. Idempotent.

        An empty one is of no use to anybody, and removed.

        Returns:
            Whether it was left: now, before, or by a `commit` that failed.
        """
        if os.getpid() != self._pid:
            return False
        with self._lock:
            if self._is_open and self._holds_anything():
                self._hand_on()
            self.discard()
        return self._is_kept

    def _give_up(self) -> None:
        self.keep()

    def _failed(self) -> None:
        if self._is_sound:
            self._hand_on()

    def _holds_anything(self) -> bool:
        # By its name: the descriptor may not be there yet, or no more.
        if self._temporary is None:
            return False
        try:
            return os.stat(self._temporary, dir_fd=self._place.directory).st_size > 0
        except OSError:
            return False

    def _hand_on(self) -> None:
        """Leave the file as nobody's."""
        mine, self._temporary = self._temporary, None  # first, so that nothing removes it
        if mine is None:
            return
        try:
            name = temporary_name(self._place.name, NOBODY)
            self._disk.rename(self._place.directory, mine, name)
        except FileNotFoundError:
            return  # it is in place, or was taken away
        except OSError:
            pass  # it stays this process's, and can be had when that is gone
        self._is_kept = True

    def _create(self) -> None:
        if self._adopt():
            return
        self._temporary = temporary_name(self._place.name)
        self._fd = self._disk.create(self._place.directory, self._temporary)
        self._disk.lock(self._fd)

    def _adopt(self) -> bool:
        directory = self._place.directory
        opened: list[tuple[int, str, int]] = []
        with contextlib.ExitStack() as closing:
            for name in filter(self._is_left_over, self._disk.names(directory)):
                fd = self._disk.reopen(directory, name)
                if fd is not None:
                    closing.callback(self._release, fd)
                    opened.append((os.fstat(fd).st_size, name, fd))
            for size, name, fd in sorted(opened, reverse=True):
                if size and self._fd < 0:
                    self._take_up(name, fd, size)
                else:  # the largest is taken up; what else nobody owns can only be in the way
                    with contextlib.suppress(OSError):
                        self._disk.unlink(directory, name)
        return self._fd >= 0

    def _take_up(self, name: str, fd: int, size: int) -> None:
        mine = self._temporary = temporary_name(self._place.name)  # first: from now on it is kept
        try:
            self._disk.rename(self._place.directory, name, mine)
        except OSError:  # another one was faster
            self._temporary = None
            return
        self._fd, self.adopted_bytes = fd, size

    def _release(self, fd: int) -> None:
        """Let go of what was opened, unless it was taken up."""
        if fd == self._fd:
            return
        with contextlib.suppress(OSError):
            self._disk.unlock(fd)
        with contextlib.suppress(OSError):  # nothing was written through it
            self._disk.close(fd)

    def _is_left_over(self, name: str) -> bool:
        """Whether this is what a dead process left of the destination; its lock is asked later."""
        owner = owner_of(name, self._place.name)
        if owner is None:
            return False
        state, _ = judge(
            owner,
            is_locked=False,
            holds_nothing=False,
            here=Owner.current(),
            started=start_time(owner.pid),
            kind=file_system(self._place.directory),
        )
        return state == "dead"
