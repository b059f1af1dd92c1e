"""Directories that spools lie in: can they be trusted? Knows users and modes; makes nothing.

Whoever else may write to a root could plant links in it, or rename what is ours.
"""

import os
import stat

from weighlock.disk.effects import Disk
from weighlock.errors import DiskError

__all__ = ["open_inside", "open_root"]


def open_root(root: str, disk: Disk) -> int:
    """The root, open.

    Raises:
        DiskError: it belongs to a user who is neither this one nor the superuser, or everybody may
            write to it and it has no sticky bit.
    """
    ours = {0, os.geteuid()}
    link = os.lstat(root)
    if link.st_uid not in ours:
        raise DiskError(f"{root}: belongs to user {link.st_uid}: name a root of your own")
    directory = disk.open_directory(root)
    status = os.fstat(directory)
    is_open_to_all = status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX
    if status.st_uid in ours and not is_open_to_all:
        return directory
    disk.close(directory)
    if status.st_uid not in ours:
        raise DiskError(f"{root}: leads to what belongs to user {status.st_uid}: name your own")
    raise DiskError(
        f"{root}: everybody may write to it, and it has no sticky bit (mode "
        f"{stat.S_IMODE(status.st_mode):o}): run `chmod o-w`, or name a root of your own"
    )


def open_inside(root: int, name: str) -> int:
    """A directory in a root, open; never what a link of that name leads to."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
    return os.open(name, flags, dir_fd=root)
