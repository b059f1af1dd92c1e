"""What kind of file system something lies on. Knows Linux's tables of mounts; nothing elsewhere."""

import os

__all__ = ["IN_MEMORY", "LOCAL", "file_system", "is_same_mount"]

IN_MEMORY = frozenset({"tmpfs", "ramfs"})
"""File systems whose files take memory."""

LOCAL = IN_MEMORY | {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "overlay"}
"""File systems that no other machine writes to at the same time."""


def file_system(fd: int) -> str:
    """The kind of file system an open file lies on; empty if that cannot be known."""
    try:
        number = _mount_of(fd)
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
            for line in mounts:
                before, _, after = line.partition(" - ")
                if before.split(" ", 1)[0] == number:
                    return after.split(" ", 1)[0]
    except (OSError, StopIteration):
        pass
    return ""


def is_same_mount(one: int, other: int) -> bool:
    """Whether two open files lie on one mount, as far as that can be known."""
    if os.fstat(one).st_dev != os.fstat(other).st_dev:
        return False
    try:  # one file system may be mounted in several places
        return _mount_of(one) == _mount_of(other)
    except (OSError, StopIteration):
        return True


def _mount_of(fd: int) -> str:
    with open(f"/proc/self/fdinfo/{fd}") as facts:
        return next(line.split()[1] for line in facts if line.startswith("mnt_id:"))
