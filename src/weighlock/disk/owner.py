"""Who made a temporary: enough of a process to tell later whether it still lives.

Knows processes by number, start time and boot; not what they made.
"""

import os
import re
from dataclasses import dataclass

__all__ = [
    "MARK",
    "NOBODY",
    "UNKNOWN_BOOT",
    "Owner",
    "owner_of",
    "part_owner",
    "prefix_of",
    "start_time",
    "temporary_name",
]

UNKNOWN_BOOT = "0"
"""Where the system does not tell one boot from another."""

MARK = ".part-"
"""In the name of every temporary that lies beside a destination."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, told apart from every other one.

    A process number comes back into use; together with the start time and the boot it does not, so
    that what a dead process left can be told from what a living one is writing.
    """

    pid: int
    started: str
    boot: str

    @classmethod
    def current(cls) -> "Owner":
        """This process."""
        return cls(os.getpid(), start_time(os.getpid()), _boot())

    def text(self) -> str:
        """What names it in a file."""
        return f"{self.pid} {self.started} {self.boot}\n"

    @classmethod
    def parse(cls, text: str) -> "Owner | None":
        """Whom a file names; None if that is no owner."""
        found = re.fullmatch(r"(\d{1,10}) (\d{1,20}) ([0-9a-f]{1,64})\n", text, re.ASCII)
        return None if found is None else cls(int(found[1]), found[2], found[3])


NOBODY = Owner(0, "0", UNKNOWN_BOOT)
"""Owns what was let go of on purpose."""


def prefix_of(destination: str) -> str:
    """What the temporaries of a destination begin with."""
    # 255 bytes is the longest name: the readable part is what may be cut.
    readable = os.fsdecode(os.fsencode(destination)[:120])
    return f".{readable}{MARK}"


def temporary_name(destination: str, owner: Owner | None = None) -> str:
    """A new hidden name beside a destination: whose it is, and 64 random bits."""
    owner = owner or Owner.current()
    whose = f"{owner.pid}-{owner.started}-{owner.boot}"
    return f"{prefix_of(destination)}{whose}-{os.urandom(8).hex()}"


def owner_of(name: str, destination: str) -> Owner | None:
    """Whose temporary of that destination a name is; None if it is none."""
    prefix = prefix_of(destination)
    if not name.startswith(prefix) or MARK in name[len(prefix) :]:
        return None
    return part_owner(name)


def part_owner(name: str) -> Owner | None:
    """Whose temporary a name is, of whatever destination; None if it is none."""
    found = re.fullmatch(r"(\d+)-(\d+)-([0-9a-f]+)-[0-9a-f]{16}", name.rpartition(MARK)[2])
    if not name.startswith(".") or MARK not in name or found is None:
        return None
    return Owner(int(found[1]), found[2], found[3])


def start_time(pid: int) -> str:
    """Clock ticks from boot to a process's start; "0" if there is no such process, or no more."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as status:
            # The second field is the program's name in brackets and may hold anything.
            facts = status.read().rpartition(b")")[2].split()
    except OSError:
        return "0"
    # Dead, and not yet waited for. A main thread that ended before others looks the same, but for
    # their number.
    if facts[0] in (b"Z", b"X") and int(facts[17]) <= 1:
        return "0"
    return facts[19].decode()


def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return boot.read(8)
    except OSError:
        return UNKNOWN_BOOT
